r"""Compute a linear layer with a low-rank adapter (LoRA, arXiv:2106.09685).

    u   = x A^T                                             A: (r, C)
    y   = x W^T + b + s u B^T                               W: (H, C), B: (H, r)

    du  = s dy B
    dx  = dy W + du A                                       dW = dy^T x, db = sum over rows of dy
    dA  = du^T x
    dB  = s dy^T u

Letters: R rows. The products with W take 2RCH operations each. Those of the adapter have an inner or outer size of r,
16 for example, so memory bounds them: forward reads x once and reads and writes y once (RC + 2RH values beside the
product), backward reads x once, dy twice, and reads and writes dx once.

`products.py` has the adapter's part: `lora_project` computes u, in the backward du. `lora_expand` writes u B^T + b, in
the backward du A, and the product with W adds to that: a library adds to its result almost for free. On an H100, 8,192
rows of 4,096 columns take 0.348 instead of 0.342 ms, and a pass of its own over the result took 0.060 ms. So the
adapter's part and the sum are rounded, where PEFT rounds the layer's part and the sum.

Adapters in fp32 on a bf16 model (PEFT's default) keep fp32, without copies of x or dy in fp32: numbers of fp32 become
three of bf16 whose sum they are, and matrix cores multiply those into fp32. `lora_gradients` multiplies dA and each dB
of layers that share x from the same terms, which are written for u and du, in one launch: for few rows the host is what
takes time. For many torch multiplies them, and u by terms that `lora_split` writes. Without kernels, for ranks above 64
and adapters in fp32 on fp16, torch adds the same products to y in place.

W may be stored in 4 bits (QLoRA, arXiv:2305.14314). Forward and backward each write it whole, for one product; no graph
keeps it.
"""

import torch

from liger_hw._torch import is_checkpointed, results_are_kept, unviewed
from liger_hw.checks import check, refuse
from liger_hw.dispatch import Cost, autocasts, cast_for_linear, differentiable, op, uncast
from liger_hw.dispatch.function import Function, refuse_lost_backward, save, saved
from liger_hw.kernels.linear.dequantize_4bit import dequantize_4bit
from liger_hw.kernels.linear.lora_linear.products import (
    LARGEST_RANK,
    adapted_product,
    adapter_project,
    add_product,
    add_products,
    gradients,
    join_projections,
    project_by_each,
)
from liger_hw.kernels.mlp._in_place import goes_in_place
from liger_hw.kernels.mlp.glu import ACTIVATIONS, activate, gated, glu
from liger_hw.kernels.mlp.glu import validate as validate_glu
from liger_hw.kernels.mlp.glu_linear import glu_linear, unit_gradients
from liger_hw.spelling import check_known


def _is_autocast(x):
    """Tell whether autocast casts the arguments of F.linear(x, ...); it does not know "meta"."""
    return autocasts(x.device.type) and x.dtype != torch.float64


def _validate(x, weight, bias, lora_a, lora_b, dropout=0.0):
    """Check the arguments; return the dtype of the adapter's products, which autocast may set."""
    check(x.is_floating_point() and x.ndim > 0, "x", x, "floating point rows")
    device, cast = x.device, _is_autocast(x)
    dtype = torch.get_autocast_dtype(device.type) if cast else x.dtype
    cols, (features, rank) = x.shape[-1], lora_b.shape if lora_b.ndim == 2 else (0, 0)
    stored, state = _stored(weight)
    weight_dtype, factor_dtype = weight.dtype, lora_a.dtype
    allowed = (weight_dtype,) if cast == (state is None) else (dtype,)  # F.linear casts, and 4 bits become any dtype
    if weight.shape != (features, cols) or stored.device != device or weight_dtype not in allowed:
        shown = f"{dtype} of shape ({features or 'H'}, {cols}) on {device}"
        refuse("weight", stored, f"{shown} (or torch.autocast), or `dequantize_4bit.arguments` of such a weight")
    if bias is not None:
        allowed = dtype if state is None else weight_dtype, torch.float32
        if bias.shape != (features,) or bias.device != device or not (cast or bias.dtype in allowed):
            refuse("bias", bias, f"{allowed[0]} or fp32 of shape ({features},) on {device} (or torch.autocast)")
    if lora_a.shape != (rank, cols) or rank == 0 or lora_a.device != device or not factor_dtype.is_floating_point:
        refuse("lora_a", lora_a, f"floating point of shape ({rank or 'r'}, {cols}) on {device}")
    if lora_b.device != device or lora_b.dtype != factor_dtype:
        refuse("lora_b", lora_b, f"{factor_dtype} of shape {(features, rank)} on {device}")
    if not 0 <= dropout <= 1:
        refuse("dropout", dropout, "0 to 1")
    return dtype


@op
def lora_linear(
    x: torch.Tensor, weight: torch.Tensor | tuple, bias: torch.Tensor | None, lora_a: torch.Tensor,
    lora_b: torch.Tensor, scaling: float = 1.0, dropout: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Compute F.linear(x, weight, bias) + scaling * F.linear(F.linear(dropout(x), lora_a), lora_b).

    This is peft.tuners.lora.layer.Linear with one adapter. With kernels the adapter's part and the sum are
    rounded, where PEFT rounds the base's result, the sum and, with adapters of x's dtype, each step of the adapter;
    dropout draws the same mask.

    Args:
        x: (..., C), any floating dtype.
        weight: (H, C), in `x.dtype`; under torch.autocast any, cast as F.linear casts. It may be frozen. Or
            `dequantize_4bit.arguments` of a frozen weight, whose product is computed in their `dtype` (autocast's under
            autocast), and rounded to `x.dtype`.
        bias: (H,), in a dtype as for `weight` or in fp32, which its gradient keeps, or None.
        lora_a: (r, C), in `x.dtype`, or in fp32 for an x in bf16. Plain torch multiplies others, and ranks above 64.
        lora_b: (H, r), in the dtype of `lora_a`.
        scaling: of the adapter's part; PEFT's lora_alpha / r, or lora_alpha / sqrt(r) (arXiv:2312.03732).
        dropout: the share of the values of x that the adapter does not see; 0 where the module is not training.

    Returns:
        (..., H), in the dtype of F.linear(x, weight, bias); with a weight in 4 bits in `x.dtype`.

    Raises:
        ValueError: a weight does not fit `x`, or `dropout` is not within 0 to 1.

    Examples:
        >>> x, weight, a, b = torch.rand(2, 8), torch.rand(6, 8), torch.rand(4, 8), torch.rand(6, 4)
        >>> liger_hw.lora_linear(x, weight, None, a, b, scaling=2.0).shape
        torch.Size([2, 6])
    """
    _validate(x, weight, bias, lora_a, lora_b, dropout)
    stored, state = _stored(weight)
    is_late = bias is not None and bias.dtype != weight.dtype and not _is_autocast(x)
    first_bias = None if is_late else bias
    if state is None:
        y = torch.nn.functional.linear(x, weight, first_bias)
    else:
        y = _frozen_linear.apply(x, stored, state, first_bias)
    dropped = torch.nn.functional.dropout(x.to(lora_a.dtype), dropout)
    update = torch.nn.functional.linear(torch.nn.functional.linear(dropped, lora_a), lora_b) * scaling
    return (y + (update + bias if is_late else update)).to(y.dtype)


# a part of the ranks would need the base product on one rank alone
lora_linear.shards(x="... C", weight="h C", bias="h", lora_a="R C", lora_b="h R", returns="... h")


@lora_linear.cost
def _(x, weight, bias, lora_a, lora_b, scaling=1.0, dropout=0.0):
    rows = x.numel() // x.shape[-1]
    stored = _stored(weight)[0]
    y_bytes = rows * lora_b.shape[0] * x.itemsize
    inputs = sum(t.nbytes for t in (x, stored, lora_a, lora_b))
    small = 2 * rows * (lora_a.numel() + lora_b.numel())
    base = 2 * rows * lora_b.shape[0] * x.shape[-1]
    # backward: dx of the same size; dA and dB, du
    more = base if stored.requires_grad else 0
    return Cost(inputs + y_bytes, inputs + y_bytes + x.nbytes, base + small, base + 2 * small + more)


# Autograd -------------------------------------------------------------------------------------------------------------


def _stored(weight):
    """Return (tensor of a weight, None), or of 4 bits (packed numbers, `dequantize_4bit`'s further arguments)."""
    if isinstance(weight, torch.Tensor):
        return weight, None
    check(isinstance(weight, dequantize_4bit.arguments), "weight", weight, "a tensor, or `dequantize_4bit.arguments`")
    return weight.packed, tuple(weight[1:])


def _whole(weight, state):
    """Return a stored weight, of 4 bits written whole in their dtype."""
    return weight if state is None else dequantize_4bit(weight, *state)


@differentiable("y")
def _frozen_linear(x: torch.Tensor, weight: torch.Tensor, state: tuple, bias: torch.Tensor | None):
    """Compute F.linear(x, weight, bias) of 4 bits in their dtype, for the reference."""
    weight = _whole(weight, state)
    is_late = bias is not None and bias.dtype != weight.dtype  # fp32, perhaps that of x
    y = torch.nn.functional.linear(x.to(weight.dtype), weight, None if is_late else bias).to(x.dtype)
    if is_late:
        y = (y + bias).to(y.dtype) if results_are_kept() else y.add_(bias)
    return unviewed(y)


@_frozen_linear.backward()
def _(weight, state, dy, *, x_grad, bias_grad):
    with uncast(dy):
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        if x_grad:
            weight = _whole(weight, state)
            dx = torch.mm(rows.to(weight.dtype), weight).to(dy.dtype).view(*dy.shape[:-1], weight.shape[1])
        return dx, rows.sum(0) if bias_grad else None


@differentiable("y u kept_weight kept_a")
def _lora_linear(
    x: torch.Tensor, weight: torch.Tensor, state: tuple | None, bias: torch.Tensor | None, lora_a: torch.Tensor,
    lora_b: torch.Tensor, mask: torch.Tensor | None, scaling: float, sum_dtype: torch.dtype | None, needs_dx: bool,
):  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    matrix = _whole(weight, state).t()
    y, u = adapted_product(rows, _seen(rows, mask), matrix, bias, lora_a.t(), lora_b.t(), scaling, None)
    y = unviewed(y.view(*x.shape[:-1], lora_b.shape[0]))
    return (y, u, weight, lora_a) if needs_dx else (y, u, None, None)  # a program may write to what no backward reads


@_lora_linear.backward()
def _(
    x, state, lora_b, mask, scaling, sum_dtype, u, kept_weight, kept_a, dy,
    *, x_grad, weight_grad, bias_grad, lora_a_grad, lora_b_grad,
):  # fmt: skip
    with uncast(dy):  # a program may call backward within autocast
        dy, rows, dx, du = dy.reshape(-1, lora_b.shape[0]), x.reshape(-1, x.shape[-1]), None, None
        if x_grad:
            dx, du = adapted_product(dy, dy, _whole(kept_weight, state), None, lora_b, kept_a, scaling, mask)
            dx = dx.view(x.shape)
        elif lora_a_grad:
            du = adapter_project(dy, lora_b, scaling)
        seen = _seen(rows, mask) if lora_a_grad else rows
        pairs = [(dy, u) if lora_b_grad else None]
        da, (db,) = gradients(seen, du if lora_a_grad else None, pairs, lora_b, lora_b.shape[1])
        dw = torch.mm(dy.t(), rows) if weight_grad else None
        return dx, dw, dy.sum(0, dtype=sum_dtype) if bias_grad else None, da, db


def _seen(rows, mask):
    """Return the rows that the adapter sees, but for dropout's factor."""
    return rows if mask is None else rows * mask


def _sum_dtype(bias):
    """Return the dtype of the sum for a bias gradient, None for the rows' dtype."""
    return torch.float32 if bias is not None and bias.dtype == torch.float32 else None


def _cast(x, dtype, tensors):
    """Return tensors as autocast casts them for F.linear."""
    return cast_for_linear(dtype, *tensors) if _is_autocast(x) else tensors


def _prepare(x, weight, bias, lora_a, lora_b, dropout=0.0):
    """Check the arguments; return them as autocast casts them, the weight as `_stored` does."""
    dtype = _validate(x, weight, bias, lora_a, lora_b, dropout)
    stored, state = _stored(weight)
    rows, stored, *others = _cast(x, dtype, [x, stored, bias, lora_a, lora_b])
    return rows, stored, state, *others


@lora_linear.register("triton")
def _(x, weight, bias, lora_a, lora_b, scaling=1.0, dropout=0.0):
    rows, stored, state, bias_cast, a, b = _prepare(x, weight, bias, lora_a, lora_b, dropout)
    if dropout == 1:
        return lora_linear.reference(x, weight, bias, lora_a, lora_b, scaling, dropout)
    mask = None
    if dropout:  # the mask that torch draws depends on the dtype
        mask = torch.native_dropout(x.detach().to(lora_a.dtype).reshape(-1, x.shape[-1]), dropout, True)[1]
        scaling = scaling / (1 - dropout)
    sum_dtype, needs_dx = _sum_dtype(bias_cast), rows.requires_grad
    y = _lora_linear.apply(rows, stored, state, bias_cast, a, b, mask, scaling, sum_dtype, needs_dx)
    return y if state is None else y.to(x.dtype)


# Layers that share x --------------------------------------------------------------------------------------------------


def share_dx(x, *layers):
    """Tell whether `lora_linear_group` computes layers of (weight, bias, lora_a, lora_b, scaling)."""
    if torch.compiler.is_compiling() or not (torch.is_grad_enabled() and x.requires_grad):
        return False  # without dx nothing is shared
    dtype, ranks = layers[0][2].dtype, 0
    for weight, bias, lora_a, *_ in layers:
        if _stored(weight)[0].requires_grad or bias is not None and bias.requires_grad or lora_a.dtype != dtype:
            return False
        ranks += lora_a.shape[0]
    return ranks <= LARGEST_RANK and lora_linear.runs(x, "triton")


def lora_linear_group(x, *layers):
    """Compute lora_linear(x, *layer) of each layer, with one gradient of x.

    The layers are those that `share_dx` allows, of arguments that `lora_linear` takes. Autograd would add up a dx of
    each: three passes over one more, and each dx is rounded. Here du A of all is one product, to which the products
    with W add, and u and dA are one product.
    """
    states, tensors, scalings = [], [], []
    for weight, bias, lora_a, lora_b, scaling in layers:
        stored, state = _stored(weight)
        states.append(state)
        tensors += stored, bias, lora_a, lora_b
        scalings.append(scaling)
    rows = x
    if _is_autocast(x):
        rows, *tensors = _cast(x, torch.get_autocast_dtype(x.device.type), [x, *tensors])
    refuse_lost_backward()
    results = _LoraLinearGroup.apply(rows, states, scalings, *tensors)
    return tuple(y if state is None else y.to(x.dtype) for y, state in zip(results, states))


class _LoraLinearGroup(Function):
    """Compute layers whose tensors are weight, bias, A and B."""

    @staticmethod
    def forward(ctx, x, states, scalings, *tensors):
        leading, rows = x.shape[:-1], x.reshape(-1, x.shape[-1])
        weights, biases, factors_a, factors_b = (tensors[i::4] for i in range(4))
        projected = project_by_each(rows, factors_a, scalings)
        ctx.states, ctx.scalings = states, scalings
        ctx.set_materialize_grads(False)
        save(ctx, x, *weights, *factors_a, *factors_b, *projected)
        results = []
        for weight, state, bias, u, lora_b in zip(weights, states, biases, projected, factors_b):
            y = add_products(rows, _whole(weight, state).t(), bias, u, lora_b.t())
            results.append(unviewed(y.view(*leading, y.shape[1])))
        return tuple(results)

    @staticmethod
    def backward(ctx, *incoming):
        x, *kept = saved(ctx)
        rows, count, dx = x.reshape(-1, x.shape[-1]), len(incoming), None
        needed = ctx.needs_input_grad
        if all(dy is None for dy in incoming):  # a later function returned no gradient
            return (None,) * len(needed)
        with uncast(x):
            reached, factors, projected, pairs = [], [], [], []
            results = [None] * (3 + 4 * count)
            for i, dy in enumerate(incoming):
                if dy is None:
                    continue
                weight, lora_a, lora_b, u = kept[i::count]
                dy = dy.reshape(-1, dy.shape[-1])
                reached.append((i, dy, weight))
                factors.append(lora_a)
                projected.append(adapter_project(dy, lora_b, ctx.scalings[i]))
                pairs.append((dy, u) if needed[6 + 4 * i] else None)
            du, lora_a = join_projections(rows, projected, factors[0]), torch.cat(factors)
            if needed[0]:
                for i, dy, weight in reached:
                    matrix = _whole(weight, ctx.states[i])
                    dx = add_products(dy, matrix, None, du, lora_a) if dx is None else add_product(dx, dy, matrix)
                results[0] = dx.view(x.shape)
            a_grad = any(needed[5 + 4 * i] for i, *_ in reached)
            da, db = gradients(rows, du if a_grad else None, pairs, lora_a, len(lora_a))
            parts = da.split([len(factor) for factor in factors]) if a_grad else [None] * len(factors)
            for (i, *_), *factor_grads in zip(reached, parts, db):
                results[5 + 4 * i : 7 + 4 * i] = factor_grads
        return tuple(results)


# The end of a gated MLP -----------------------------------------------------------------------------------------------


def _validate_glu(gate, up, weight, bias, lora_a, lora_b, activation):
    validate_glu(gate, up)
    check_known("activation", activation, ACTIVATIONS)
    promoted = up if up is not None and torch.promote_types(gate.dtype, up.dtype) == up.dtype else gate
    return _validate(promoted, weight, bias, lora_a, lora_b)


@op
def lora_glu_linear(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor | tuple,
    bias: torch.Tensor | None, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float = 1.0,
    activation: str = "silu", in_place: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute lora_linear(f(gate) * up, weight, ...), the end of a gated MLP with an adapter.

    Where `gate` or `up`, and `lora_a` or `weight`, want gradients, the backward recomputes the product instead of
    keeping it. Otherwise, where dtypes differ, and in the reference (a CPU), the op runs the two steps.

    Args:
        gate, up, activation, in_place: as in `glu_linear`.
        weight, bias, lora_a, lora_b, scaling: as in `lora_linear`.

    Returns:
        (..., H), in the dtype of the product, or autocast's with a plain weight.

    Raises:
        ValueError: as in `glu_linear` and `lora_linear`.

    Examples:
        >>> gate, up, weight = torch.rand(2, 8), torch.rand(2, 8), torch.rand(6, 8)
        >>> liger_hw.lora_glu_linear(gate, up, weight, None, torch.rand(4, 8), torch.rand(6, 4)).shape
        torch.Size([2, 6])
    """
    _validate_glu(gate, up, weight, bias, lora_a, lora_b, activation)
    y = activate.reference(gate, activation)
    return lora_linear.reference(y if up is None else y * up, weight, bias, lora_a, lora_b, scaling)


lora_glu_linear.shards(gate="... C", up="... C", weight="h C", bias="h", lora_a="R C", lora_b="h R", returns="... h")


@lora_glu_linear.cost
def _(gate, up, weight, bias, lora_a, lora_b, scaling=1.0, activation="silu", in_place=False):
    unit_cost = glu_linear.cost_of(gate, up, weight, bias, activation)
    linear = lora_linear.cost_of(gate, weight, bias, lora_a, lora_b)
    plain = 2 * gate.numel() * weight.shape[0]
    return Cost(
        unit_cost.forward_bytes + lora_a.nbytes + lora_b.nbytes,
        unit_cost.backward_bytes + lora_a.nbytes + lora_b.nbytes,
        unit_cost.forward_flops - plain + linear.forward_flops,
        unit_cost.backward_flops - 2 * plain + linear.backward_flops,
    )


@differentiable("out y u")
def _lora_glu_linear(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor, state: tuple | None, bias: torch.Tensor | None,
    lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float, sum_dtype: torch.dtype | None, activation: str,
    defers: bool,
):  # fmt: skip
    """Compute the op for one dtype.

    `defers`: return a placeholder without memory instead of the result, for `_deferred_projection`.
    """
    y = glu(gate, up, activation)
    rows, shape = y.view(-1, y.shape[-1]), (*gate.shape[:-1], lora_b.shape[0])
    if defers:
        return gate.new_empty_strided(shape, [0] * gate.ndim), y, adapter_project(rows, lora_a.t(), scaling)
    out, u = adapted_product(rows, rows, _whole(weight, state).t(), bias, lora_a.t(), lora_b.t(), scaling, None)
    return unviewed(out.view(shape)), y, u


@_lora_glu_linear.backward(without_gradient="y u")
def _(
    gate, up, weight, state, lora_a, lora_b, scaling, sum_dtype, activation, in_place: bool, u, dout,
    *, gate_grad, up_grad, weight_grad, bias_grad, lora_a_grad, lora_b_grad,
):  # fmt: skip
    with uncast(dout):
        dout = dout.reshape(-1, lora_b.shape[0])
        dy, du = adapted_product(dout, dout, _whole(weight, state), None, lora_b, lora_a, scaling, None)
        dy = dy.view(gate.shape)
        dgate, dup = unit_gradients(gate, up, dy, activation, in_place, gate_grad, up_grad)
        y = dy.view(len(dout), gate.shape[-1])  # the kernel wrote it over dy
        pairs = [(dout, u) if lora_b_grad else None]
        da, (db,) = gradients(y, du if lora_a_grad else None, pairs, lora_b, lora_b.shape[1])
        dw = torch.mm(dout.t(), y) if weight_grad else None
        return dgate, dup, dw, dout.sum(0, dtype=sum_dtype) if bias_grad else None, da, db


@differentiable("out")
def _deferred_projection(placeholder: torch.Tensor, tensors: tuple):  # autograd tracks no tuple
    """Compute the result of the placeholder of `_lora_glu_linear`, and keep nothing."""
    y, u, weight, state, bias, lora_b = tensors
    rows = y.view(-1, y.shape[-1])
    y = add_products(rows, _whole(weight, state).t(), bias, u, lora_b.t())
    return unviewed(y.view(placeholder.shape))


@_deferred_projection.backward()
def _(dout, *, placeholder_grad):
    return dout


@lora_glu_linear.register("triton")
def _(gate, up, weight, bias, lora_a, lora_b, scaling=1.0, activation="silu", in_place=False):
    dtype = _validate_glu(gate, up, weight, bias, lora_a, lora_b, activation)
    learns = gate.requires_grad or up is not None and up.requires_grad
    stored, state = _stored(weight)
    keeps_y = torch.is_grad_enabled() and learns and (stored.requires_grad or lora_a.requires_grad)
    stored, *others = _cast(gate, dtype, [stored, bias, lora_a, lora_b])
    one_dtype = gate.dtype == dtype == (gate if up is None else up).dtype
    if not keeps_y or not one_dtype:
        return lora_linear(gated(gate, up, activation, in_place), weight, bias, lora_a, lora_b, scaling)
    defers, in_place = is_checkpointed(), goes_in_place(gate, up, in_place)
    bias, lora_a, lora_b = others
    sum_dtype = _sum_dtype(bias)
    out, y, u = _lora_glu_linear.apply(
        gate, up, stored, state, bias, lora_a, lora_b, scaling, sum_dtype, activation, defers, in_place
    )
    return _deferred_projection.apply(out, (y, u, stored, state, bias, lora_b)) if defers else out
