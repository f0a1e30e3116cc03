r"""Compute a gated linear unit and the next projection, whose input the backward recomputes.

    y   = f(gate) up                                        as in glu.py
    out = y W^T + b

    dy  = dout W                                            dgate and dup from it as in glu.py
    dW  = dout^T y                                          y recomputed in that same pass, over dy
    db  = sum over rows of dout

Letters: R rows of C columns, projected to H. F.linear keeps y for dW: RC values beside gate and up, 134 MB a layer in
bf16 for Llama-3.2-1B at 8x1024 tokens, a third of what a gated MLP keeps of that width. To recompute y costs the
backward one write (6RC instead of 5RC), because it reads gate and up anyway. The matrix products are torch's, of the
same values as in the backward of F.linear, so all gradients are bitwise equal. An MLP without a gate has no up: it
keeps one tensor of that width instead of the two of torch's gelu or silu.
"""

import torch

from liger_hw._torch import is_checkpointed, unviewed
from liger_hw.checks import check
from liger_hw.dispatch import Cost, autocasts, cast_for_linear, differentiable, op, raw
from liger_hw.kernels.mlp._in_place import goes_in_place, overwritten, writes_over
from liger_hw.kernels.mlp.glu import ACTIVATIONS, activate, gated, geglu, glu, launch_backward, swiglu, validate
from liger_hw.spelling import check_known


def _validate(gate, up, weight, bias, activation):
    """Check the arguments; return the dtype that F.linear computes in, which autocast may set."""
    validate(gate, up)
    check_known("activation", activation, ACTIVATIONS)
    dtype, cast = gate.dtype if up is None else torch.promote_types(gate.dtype, up.dtype), False
    if autocasts(gate.device.type) and dtype != torch.float64:
        dtype, cast = torch.get_autocast_dtype(gate.device.type), True
    fits = weight.ndim == 2 and weight.shape[0] > 0 and weight.shape[1] == gate.shape[-1]
    fits = fits and weight.device == gate.device and (cast or weight.dtype == dtype)
    check(fits, "weight", weight, f"{dtype} of shape (H, {gate.shape[-1]}) on {gate.device} (or torch.autocast)")
    if bias is not None:
        fits = bias.shape == weight.shape[:1] and bias.device == weight.device and (cast or bias.dtype == dtype)
        check(fits, "bias", bias, f"{dtype} of shape ({weight.shape[0]},) on {weight.device} (or torch.autocast)")
    return dtype


@op(fusible=True)
def glu_linear(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str = "silu", in_place: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute F.linear(f(gate) * up, weight, bias), the end of a gated MLP (arXiv:2002.05202).

    Bitwise equal to `swiglu`, `geglu` or `activate` followed by F.linear, forward and backward. Where `weight` and one
    of `gate` and `up` want a gradient, F.linear would keep the product; here the backward recomputes it. Otherwise,
    where `gate` and `up` differ in dtype, and in the reference (a CPU), the op runs those two steps.

    Args:
        gate: (..., C), as in `swiglu`.
        up: (..., C), as in `swiglu`; None: no product, the end of an MLP without a gate.
        weight: (H, C), in the dtype of the product; under torch.autocast any, cast as F.linear casts.
        bias: (H,), in a dtype as for `weight`, or None.
        activation: one of those of `activate`.
        in_place: as in `swiglu`. With it, forward and backward need less memory than the two steps at any time; without
            it a backward may hold the gradient of the result longer than they do.

    Returns:
        (..., H), in the dtype of the product, or autocast's.

    Raises:
        ValueError: as in `swiglu`; `weight` or `bias` does not fit; `activation` is unknown.

    Examples:
        >>> liger_hw.glu_linear(torch.rand(2, 8), torch.rand(2, 8), torch.rand(6, 8)).shape
        torch.Size([2, 6])
    """
    _validate(gate, up, weight, bias, activation)
    y = activate.reference(gate, activation)
    return torch.nn.functional.linear(y if up is None else y * up, weight, bias)


@glu_linear.shards
def _(call):
    cols = "c" if call.bias is None else "C"  # each rank would add the bias to its part of the sum
    return call, {"gate": f"... {cols}", "up": f"... {cols}", "weight": f"h {cols}", "bias": "h", "returns": "... h"}


@glu_linear.cost
def _(gate, up, weight, bias=None, activation="silu", **options):
    if up is None:
        unit = activate.cost_of(gate, activation)
    else:
        unit = (swiglu if activation == "silu" else geglu).cost_of(gate, up)
    inputs = sum(x.nbytes for x in (gate, up, weight) if x is not None)
    out = gate.numel() // gate.shape[-1] * weight.shape[0]
    product, out_bytes = 2 * out * gate.shape[-1], out * weight.itemsize
    return Cost(
        inputs + out_bytes, 2 * inputs + out_bytes, product + unit.forward_flops, 2 * product + unit.backward_flops
    )


@raw(mutates=("dy",))
def _glu_linear_backward(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, activation: str, gate_grad: bool, up_grad: bool,
    *, dgate, dup,
):  # fmt: skip
    launch_backward(gate, up, dy, dgate, dup, dy, activation)


@raw(mutates=("gate", "up", "dy"))
def glu_linear_backward_in_place(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, activation: str
) -> None:
    launch_backward(gate, up, dy, gate, up, dy, activation)


def unit_gradients(gate, up, dy, activation, in_place, gate_grad, up_grad):
    """Return the gradients of gate and up; write the product f(gate) up over `dy`."""
    if writes_over(in_place, gate_grad, up is None or up_grad):
        glu_linear_backward_in_place(gate, up, dy, activation)
        return overwritten(gate, up)
    return _glu_linear_backward(gate, up, dy, activation, gate_grad, up_grad)


@differentiable("out")
def _glu_linear(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, activation: str,
    defers: bool,
):  # fmt: skip
    """Compute the op for one dtype, where weight and gate or up want gradients.

    `defers`: return a placeholder without memory, of the result's shape, for `_deferred_projection`.
    """
    if defers:
        return gate.new_empty_strided((*gate.shape[:-1], weight.shape[0]), [0] * gate.ndim)
    out = torch.nn.functional.linear(glu(gate, up, activation), weight, bias)
    return out if bias is None else unviewed(out)


@_glu_linear.backward()
def _(gate, up, weight, activation, in_place: bool, dout, *, gate_grad, up_grad, weight_grad, bias_grad):
    dout = dout.reshape(-1, weight.shape[0])
    dy = torch.mm(dout, weight).to(gate.dtype).view(gate.shape)  # autocast in a backward casts it
    dgate, dup = unit_gradients(gate, up, dy, activation, in_place, gate_grad, up_grad)
    y = dy.view(len(dout), gate.shape[-1])  # the kernel wrote it over dy
    return dgate, dup, torch.mm(dout.t(), y), dout.sum(0) if bias_grad else None


@differentiable("out")
def _deferred_projection(placeholder: torch.Tensor, tensors: tuple, activation: str):  # autograd tracks no tuple
    """Compute the result of the placeholder of `_glu_linear`, and keep nothing."""
    gate, up, weight, bias = tensors
    return unviewed(torch.nn.functional.linear(glu(gate, up, activation), weight, bias))


@_deferred_projection.backward()
def _(dout, *, placeholder_grad):
    return dout


@glu_linear.register("triton")
def _(gate, up, weight, bias=None, activation="silu", in_place=False):
    dtype = _validate(gate, up, weight, bias, activation)
    learns = gate.requires_grad or up is not None and up.requires_grad
    keeps_y = torch.is_grad_enabled() and weight.requires_grad and learns
    if not keeps_y or not gate.dtype == dtype == (gate if up is None else up).dtype:
        return torch.nn.functional.linear(gated(gate, up, activation, in_place), weight, bias)
    if weight.dtype != dtype:
        (weight,) = cast_for_linear(dtype, weight)  # as autocast does, but for the backward too
    # Checkpointing recomputes a layer only up to the last saved tensor. If a gated MLP ends the layer, a function after
    # all saved tensors spares the recomputation of the MLP's product and projection.
    defers = is_checkpointed()
    out = _glu_linear.apply(gate, up, weight, bias, activation, defers, goes_in_place(gate, up, in_place))
    return _deferred_projection.apply(out, (gate, up, weight, bias), activation) if defers else out
