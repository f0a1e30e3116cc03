r"""Compute the experts of a mixture by two grouped matrix products that save little.

For token t, its k experts e and their routing weights w:

    out[t] = sum over k of w (f(x[t] G_e^T) * (x[t] U_e^T)) D_e^T

The operations, their order and rounding are those of transformers' `grouped_mm_experts_forward`, so the results are
bitwise equal where torch's grouped product serves both, except that here unrounded fp32 products are added, which
changes a rare tie of 16 bits. For every pair of a token and an expert, transformers saves the gathered input, gate and
up, their product and its projection: 2H + 3I values. This file saves gate and up alone (2I), and writes their gradients
over them. The products read rows of x and dout by index. The backward recomputes the product in the pass that computes
the gradients (`expert_glu`), and computes the routing weights' gradient before the down projection, where both
gradients need the same matrix product:

    dw = <dout[t], y D_e^T> = <dout[t] D_e, y>,      dy = w dout[t] D_e

After a write to D that autograd does not count, as through `.data`, dw belongs to the new D; transformers', which keeps
the products y D_e^T, to the old one.

On an H200 (torch 2.11, Triton 3.6) a step of bf16 experts takes 1.04 to 1.10 times its bare grouped products in
Mixtral's and DeepSeek-V3's sizes (1,024 to 65,536 tokens), and 1.25 to 1.44 times in Qwen3-30B-A3B's, whose experts are
narrow. transformers' implementation takes 1.14 to 1.38 and 1.89 to 2.02 times.

With adapters, G + B A in the place of G, a product of A x (S, r) comes first, and the projection adds B (A x) to its
sums before it rounds them. Their four gradients are outer products of r rows. A step of LoRA of rank 16 takes 3.4 ms in
Qwen3-30B-A3B's sizes and 8,192 tokens (H200), 7.6 by operations of torch around the grouped products.

The gradient of x is a sum over k of gathered rows (`gathered_sum`), while the backward of indexing would sort. Experts
without a gate, f(x U^T) D^T, have no product: they save I values instead of 2H + 2I or more.
"""

from collections.abc import Sequence

import torch

from liger_hw._torch import backward_keeps_graph, is_plain, saved_tensors_are_kept
from liger_hw.checks import check, refuse
from liger_hw.dispatch import Cost, differentiable, op
from liger_hw.kernels.mlp.glu import ACTIVATIONS, gated, glu
from liger_hw.kernels.moe.expert_glu import expert_glu_backward_in_place
from liger_hw.kernels.moe.gathered_sum import gather_weighted, sum_gathered
from liger_hw.kernels.moe.grouped_mm import (
    LARGEST_RANK,
    grouped_mm,
    multiply_groups,
    multiply_rows,
    multiply_rows_with_adapter,
)
from liger_hw.kernels.moe.routing import sort_pairs
from liger_hw.spelling import check_known


def _validate(x, gate_up_proj, down_proj, top_k_index, top_k_weights, activation, gate_up_lora, down_lora, lora_scale):
    check(isinstance(lora_scale, (int, float)), "lora_scale", repr(lora_scale), "a number")
    check(x.is_floating_point() and x.ndim == 2, "x", x, "a floating point matrix")
    here = x.dtype, x.device
    fits = down_proj.ndim == 3 and down_proj.shape[0] > 0 and down_proj.shape[1] == x.shape[1]
    fits = fits and (down_proj.dtype, down_proj.device) == here
    check(fits, "down_proj", down_proj, f"{x.dtype} of shape (E, {x.shape[1]}, I) on {x.device}, E > 0")
    experts, hidden, intermediate = down_proj.shape
    shapes = [(experts, rows, hidden) for rows in (2 * intermediate, intermediate)]
    fits = gate_up_proj.shape in shapes and (gate_up_proj.dtype, gate_up_proj.device) == here
    check(fits, "gate_up_proj", gate_up_proj, f"{x.dtype} of a shape of {shapes} on {x.device}")
    fits = top_k_index.ndim == 2 and top_k_index.shape[0] == x.shape[0] and top_k_index.device == x.device
    fits = fits and top_k_index.dtype in (torch.int64, torch.int32)
    check(fits, "top_k_index", top_k_index, f"int64 or int32 of shape ({x.shape[0]}, k) on {x.device}")
    fits = top_k_weights.shape == top_k_index.shape and top_k_weights.device == x.device
    fits = fits and top_k_weights.dtype in (x.dtype, torch.float32)
    check(fits, "top_k_weights", top_k_weights, f"{x.dtype} or torch.float32 of shape {tuple(top_k_index.shape)}")
    check_known("activation", activation, ACTIVATIONS)
    for name, lora, weights in (("gate_up_lora", gate_up_lora, gate_up_proj), ("down_lora", down_lora, down_proj)):
        if lora is not None:
            if len(lora) != 2 or lora[0].ndim != 3 or lora[0].shape[1] == 0:
                refuse(name, f"shapes {[tuple(x.shape) for x in lora]}", "a pair (A, B) of rank 1 or more")
            (number, outputs, inputs), (a, b) = weights.shape, lora
            for factor, shape in ((a, (number, a.shape[1], inputs)), (b, (number, outputs, a.shape[1]))):
                fits = factor.shape == shape and (factor.dtype, factor.device) == here
                check(fits, name, factor, f"{x.dtype} of shapes (E, r, {inputs}) and (E, {outputs}, r) on {x.device}")


@op(validate=_validate)
def experts(
    x: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor, activation: str = "silu", up_first: bool = False,
    gate_up_lora: Sequence | None = None, down_lora: Sequence | None = None, lora_scale: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """Compute the weighted sum of each token's experts, gated MLPs (arXiv:2401.04088), as transformers does.

    Kernels save gate and up alone, write their gradients over them, and never wait for the device.

    Args:
        x: (T, H), tokens.
        gate_up_proj: (E, 2I, H), in the dtype of `x`, gate and up of each expert; (E, I, H): experts without a gate.
        down_proj: (E, H, I), in the dtype of `x`.
        top_k_index: (T, k) int64 or int32, the experts of each token, 0 to E - 1. Another number is an error on a CPU;
            on a GPU and in compiled code it makes the token's result NaN.
        top_k_weights: (T, k), their routing weights, in the dtype of `x` or fp32.
        activation: one of those of `activate`, applied to the gate.
        up_first: up comes before gate in `gate_up_proj`.
        gate_up_lora, down_lora: low-rank factors (A, B) of each expert, (E, r, inputs) and (E, outputs, r), in the
            dtype of `x`; None: none. A projection W x then is W x + lora_scale B (A x) (arXiv:2106.09685), rounded
            after each product and the sum; no merged weight exists. peft's `target_parameters` holds the same factors
            as A (E r, inputs) and B (outputs, r E): A.view(E, r, -1) and B.view(outputs, r, E).permute(2, 0, 1).
            Kernels round A x, its product with `lora_scale`, and the sum W x + B (A x); where torch computes W x, that,
            too. They keep A x beside gate and up. For r above 64 they do as the reference, and keep what each
            product's backward needs.
        lora_scale: alpha / r.

    Returns:
        (T, H), in the dtype of `x`. Each expert's output is rounded, then its product with the routing weight to the
        dtype that torch promotes to; their sum is computed in fp32 and rounded.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; `activation` is unknown.

    Examples:
        >>> gate_up, down = torch.rand(4, 6, 8), torch.rand(4, 8, 3)  # 4 experts
        >>> chosen, weights = torch.tensor([[0, 2], [1, 3]]), torch.rand(2, 2)
        >>> liger_hw.experts(torch.rand(2, 8), gate_up, down, chosen, weights).shape
        torch.Size([2, 8])
    """
    return _by_operations(
        grouped_mm.reference, _unit, x, gate_up_proj, down_proj, top_k_index, top_k_weights, activation, up_first,
        gate_up_lora, down_lora, lora_scale,
    )  # fmt: skip


def _unit(gate, up, activation):
    y = ACTIVATIONS[activation](gate)
    return y if up is None else y * up


def _by_operations(
    multiply, unit, x, gate_up_proj, down_proj, top_k_index, top_k_weights, activation, up_first, gate_up_lora,
    down_lora, lora_scale,
):  # fmt: skip
    """Compute the experts by operations around the grouped product `multiply` and the gated `unit`."""

    def project(rows, weights, lora):
        y = multiply(rows, weights.transpose(1, 2), offs)
        if lora is None:
            return y
        a, b = lora
        return y + lora_scale * multiply(multiply(rows, a.transpose(1, 2), offs), b.transpose(1, 2), offs)

    inside = top_k_index.clamp(0, len(gate_up_proj) - 1)
    known = inside == top_k_index
    if top_k_index.device.type == "cpu" and is_plain(top_k_index) and not torch.compiler.is_compiling():
        check(known.all(), "top_k_index", top_k_index, f"experts from 0 to {len(gate_up_proj) - 1}")
    else:
        top_k_index, top_k_weights = inside, torch.where(known, top_k_weights, float("nan"))
    order, position, offs = sort_by_expert(top_k_index, gate_up_proj.shape[0])
    hidden = project(x[order // top_k_index.shape[1]], gate_up_proj, gate_up_lora)
    gate, up = _gate_and_up(hidden, down_proj.shape[2], up_first)
    projected = project(unit(gate, up, activation), down_proj, down_lora)
    weighted = projected * top_k_weights.reshape(-1)[order, None]
    return weighted[position].view(*top_k_index.shape, x.shape[1]).sum(1).to(x.dtype)


def sort_by_expert(top_k_index, experts):
    """Sort the S = T k pairs of token and expert by expert, then token.

    Returns:
        order: (S,), the pair of each sorted row.
        position: (S,), the sorted row of each pair.
        offs: (E,) int32, the row after each expert's last.
    """
    chosen, order = top_k_index.reshape(-1).sort(stable=True)
    numbers = torch.arange(max(experts, len(order)), device=order.device)
    offs = torch.searchsorted(chosen, numbers[:experts].to(chosen.dtype), right=True, out_int32=True)
    return order, torch.empty_like(order).scatter_(0, order, numbers[: len(order)]), offs


def _gate_and_up(hidden, intermediate, up_first):
    if hidden.shape[1] == intermediate:
        return hidden, None
    gate, up = hidden.chunk(2, dim=-1)
    return (up, gate) if up_first else (gate, up)


@experts.cost
def _(x, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_lora=None, down_lora=None, **options):
    weights = gate_up_proj, down_proj, *(gate_up_lora or ()), *(down_lora or ())
    inputs = x.nbytes + top_k_index.nbytes + top_k_weights.nbytes + sum(weight.nbytes for weight in weights)
    flops = 2 * top_k_index.numel() * sum(weight[0].numel() for weight in weights)
    return Cost(inputs + x.nbytes, 2 * inputs + x.nbytes, flops, 2 * flops)


@experts.register("cpu", bound=True)
def _(a):
    return _by_operations(grouped_mm, _unit, *a)


@experts.register("triton", bound=True)
def _(a):
    ranks = [lora[0].shape[1] for lora in (a.gate_up_lora, a.down_lora) if lora is not None]
    # torch.compile does not follow tensors from `_experts` to `_project`
    if torch.compiler.is_compiling() or any(rank > LARGEST_RANK for rank in ranks):
        return _by_operations(grouped_mm, lambda gate, up, activation: gated(gate, up, activation, False), *a)
    factors = *(a.gate_up_lora or (None, None)), *(a.down_lora or (None, None))
    placeholder, *kept = _experts.apply(*a[:7], *factors, float(a.lora_scale), not saved_tensors_are_kept())
    return _project.apply(placeholder, (a.down_proj, factors[3], *kept), a.activation, a.up_first)


def _multiply_by_factor(rows, factor, offs, index, scale):
    """Return scale * rows factor, (S, r), after which nothing needs the scale."""
    u = multiply_rows(rows, factor, offs, index)
    return u if scale == 1 else u.mul_(scale)


def _multiply(rows, weights, offs, index, u, b):
    if u is None:
        return multiply_rows(rows, weights, offs, index)
    return multiply_rows_with_adapter(rows, weights, offs, index, u, b)


@differentiable("out hidden row_weights tokens place offs y gate_up_u down_u")
def _experts(
    x: torch.Tensor, gate_up_proj: torch.Tensor, down_proj: torch.Tensor, top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor, activation: str, up_first: bool, gate_up_a: torch.Tensor | None,
    gate_up_b: torch.Tensor | None, down_a: torch.Tensor | None, down_b: torch.Tensor | None, lora_scale: float,
):  # fmt: skip
    """Compute the first projection of every expert; its backward is the whole backward.

    `out` is a placeholder (T, H) of one value for the graph. gate_up_u, down_u: (S, r), the products with first
    factors, which the backward reads; y: (S, I), the second projection's input, which it computes again.
    """
    tokens, place, row_weights, offs = sort_pairs(top_k_index, top_k_weights, gate_up_proj.shape[0])
    gate_up_u = down_u = y = None
    if gate_up_a is not None:
        gate_up_u = _multiply_by_factor(x, gate_up_a.transpose(1, 2), offs, tokens, lora_scale)
        gate_up_b = gate_up_b.transpose(1, 2)
    hidden = _multiply(x, gate_up_proj.transpose(1, 2), offs, tokens, gate_up_u, gate_up_b)
    if down_a is not None:
        y = glu(*_gate_and_up(hidden, down_proj.shape[2], up_first), activation)
        down_u = _multiply_by_factor(y, down_a.transpose(1, 2), offs, None, lora_scale)
    return x.new_empty_strided(x.shape, (0, 0)), hidden, row_weights, tokens, place, offs, y, gate_up_u, down_u


@_experts.backward(without_gradient="hidden row_weights place offs y down_u")
def _(
    x, gate_up_proj, down_proj, gate_up_a, gate_up_b, down_a, down_b, hidden, gate_up_u, down_u, row_weights, tokens,
    place, offs, activation, up_first, lora_scale, in_place: bool, dout, *, x_grad, gate_up_proj_grad, down_proj_grad,
    top_k_weights_grad, gate_up_a_grad, gate_up_b_grad, down_a_grad, down_b_grad,
):  # fmt: skip
    """Multiply by both projections' weights, and sum the outer products of those that learn.

    With an adapter W + s B A the gradient of x is dy W + (s dy B) A, that of A (s dy B)^T x, that of B dy^T (s A x).
    """
    du = None if down_a is None else _multiply_by_factor(dout, down_b, offs, tokens, lora_scale)
    # dout D_e, until the next kernel writes the product over it
    y = _multiply(dout, down_proj, offs, tokens, du, down_a)
    if not in_place or backward_keeps_graph():  # hooks of the program keep it, or a second backward reads it
        hidden = hidden.clone()
    gate, up = _gate_and_up(hidden, down_proj.shape[2], up_first)
    drow_weights = expert_glu_backward_in_place(gate, up, y, row_weights, activation)
    dx = dgate_up = ddown = dgate_up_a = dgate_up_b = ddown_a = ddown_b = None
    if down_proj_grad:
        ddown = multiply_groups(gather_weighted(dout, tokens, row_weights), y, offs, None)
    if down_a_grad:
        ddown_a = multiply_groups(_weighted(du, row_weights), y, offs, None)
    if down_b_grad:
        ddown_b = multiply_groups(_weighted(down_u, row_weights), dout, offs, tokens).transpose(1, 2)
    del y
    if gate_up_proj_grad:
        dgate_up = multiply_groups(hidden, x, offs, tokens)
    if gate_up_b_grad:
        dgate_up_b = multiply_groups(hidden, gate_up_u, offs, None)
    du = None
    if gate_up_a_grad or x_grad and gate_up_a is not None:
        du = _multiply_by_factor(hidden, gate_up_b, offs, None, lora_scale)
    if gate_up_a_grad:
        dgate_up_a = multiply_groups(du, x, offs, tokens)
    if x_grad:
        dx = sum_gathered(_multiply(hidden, gate_up_proj, offs, None, du, gate_up_a), place, None)
    dweights = drow_weights[place] if top_k_weights_grad else None
    return dx, dgate_up, ddown, dweights, dgate_up_a, dgate_up_b, ddown_a, ddown_b


def _weighted(rows, weights):
    return (rows * weights[:, None]).to(rows.dtype)


@differentiable("out")
def _project(placeholder: torch.Tensor, tensors: tuple, activation: str, up_first: bool):
    """Compute the second projection of every expert; its backward passes the gradient unchanged to `_experts`.

    Autograd does not track tensors in a tuple, so it saves nothing. Activation checkpointing recomputes up to the last
    saved tensor, so it skips this function.
    """
    down_proj, b, hidden, row_weights, place, offs, y, u = tensors
    if y is None:
        y = glu(*_gate_and_up(hidden, down_proj.shape[2], up_first), activation)
    projected = _multiply(y, down_proj.transpose(1, 2), offs, None, u, None if b is None else b.transpose(1, 2))
    return sum_gathered(projected, place, row_weights)


@_project.backward()
def _(dout, *, placeholder_grad):
    return dout
