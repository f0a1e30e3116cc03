r"""Compute the root-mean-square norm over the last dimension, alone or after a residual addition.

    s    = x (+ residual)                                   rounded to x's dtype
    rstd = 1 / sqrt(mean(s^2) + eps)
    y    = s rstd (w + offset)

    m  = dy (w + offset)
    ds = rstd (m - s rstd mean(m s rstd)) (+ ds_out)        dx = dresidual = ds
    dw = sum over rows of dy s rstd

Letters: R rows of C columns. Traffic: forward reads x and writes y (2RC); a residual adds one read and one write (4RC).
Backward reads s and dy and writes ds (3RC), plus one fp32 partial dw a program; a residual adds a read of ds_out (4RC).
Both are bound by memory. `kernels.py` keeps a row in registers; `wide.py` reads a wider one twice in the backward.
"""

import torch
from torch import rsqrt  # now, as a program may replace it later

from liger_hw.backends import device_of
from liger_hw.checks import check, check_columns
from liger_hw.dispatch import Cost, empty_rows, op, raw, widen
from liger_hw.kernels._configs import in_registers
from liger_hw.kernels._rows import contiguous, rows_and_cols, rows_of
from liger_hw.kernels.norms.rms_norm.kernels import backward_rows, rms_norm_forward, rms_norm_forward_config
from liger_hw.kernels.norms.rms_norm.wide import wide_backward_rows
from liger_hw.launch import launch
from liger_hw.spelling import check_known

__all__ = ["CASTING_MODES", "fused_add_rms_norm", "rms_norm"]

CASTING_MODES = ("llama", "gemma", "none")


def _validate(x, weight, casting_mode, residual=None):
    check(x.ndim and x.is_floating_point(), "x", x, "floating point rows")
    check_known("casting_mode", casting_mode, CASTING_MODES)
    check_columns("weight", weight, x)
    if residual is not None:
        like = residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device
        check(like, "residual", residual, x)


@op(validate=_validate, fusible=True)
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama",
) -> torch.Tensor:  # fmt: skip
    """Scale each row to unit root mean square, then by `weight + offset` (arXiv:1910.07467).

    Args:
        x: (..., C), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        weight: (C,), any floating dtype, or None for no scale.
        eps: added to the mean square.
        offset: added to the weight; Gemma stores its weight minus one and passes 1.0.
        casting_mode: "llama" rounds the normalised row to `x.dtype`, then scales it in fp32 by `weight + offset`,
            itself in fp32, and rounds the product (LlamaRMSNorm). "gemma" rounds the product alone (GemmaRMSNorm with
            offset 1, T5-style and Olmo2RMSNorm with 0). "none" rounds to `x.dtype` after every operation.

    Returns:
        (..., C) in `x.dtype`.

    Raises:
        ValueError: `weight` does not fit `x`, or `casting_mode` is unknown.

    Examples:
        >>> liger_hw.rms_norm(torch.rand(2, 8), torch.ones(8)).shape
        torch.Size([2, 8])
    """
    if casting_mode == "none":
        y = x * rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        if weight is not None:
            weight = weight.to(x.dtype)
            y = (y * (weight + offset if offset else weight)).to(x.dtype)
        return y
    wide = widen(x)
    y = wide * rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y if casting_mode == "gemma" else widen(y.to(x.dtype))
        y = y * (widen(weight) + offset if offset else weight)  # of the weight itself autograd keeps no copy
    return y.to(x.dtype)


@op(validate=_validate, fusible=True)
def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6, offset: float = 0.0,
    casting_mode: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Compute `x + residual` and its `rms_norm`, as a pre-norm transformer block does.

    Args:
        x: (..., C).
        residual: like `x`.
        weight, eps, offset, casting_mode: as in `rms_norm`.

    Returns:
        (y, s): the normalised sum and the sum, both (..., C) in `x.dtype`; s is rounded before it is normalised.

    Raises:
        ValueError: `residual` is not like `x`, `weight` does not fit, or `casting_mode` is unknown.

    Examples:
        >>> normed, summed = liger_hw.fused_add_rms_norm(torch.rand(2, 8), torch.rand(2, 8), torch.ones(8))
    """
    s = x + residual
    return rms_norm.reference(s, weight, eps, offset, casting_mode), s


rms_norm.shards(x="... H", weight="H", returns="x")
fused_add_rms_norm.shards(x="... H", residual="... H", weight="H", returns=("x", "x"))


@rms_norm.cost
def _(x, weight=None, *options, **named):
    tensor, w = x.nbytes, 0 if weight is None else weight.nbytes
    return Cost(2 * tensor + w, 3 * tensor + 2 * w, 4 * x.numel(), 9 * x.numel())


@fused_add_rms_norm.cost
def _(x, residual, weight=None, *options, **named):
    tensor, w = x.nbytes, 0 if weight is None else weight.nbytes
    return Cost(4 * tensor + w, 4 * tensor + 2 * w, 5 * x.numel(), 10 * x.numel())


@raw()
def _rms_norm_forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting_mode: str, *, y):
    rows, cols = rows_and_cols(x)
    config = rms_norm_forward_config(cols, x.element_size(), device_of(x))
    x, x_stride = rows_of(x)
    launch(
        rms_norm_forward, (-(-rows // config["ROWS"]), 1, 1), config,
        x, None, contiguous(weight), y, None, rows, x_stride, 0, eps, offset, cols, casting_mode,
    )  # fmt: skip


@_rms_norm_forward.backward()
def _rms_norm_backward(x, weight, eps, offset, casting_mode, dy, dx_out: torch.Tensor | None = None, *, dx, dweight):
    """Write the gradients of normalised rows `x`, of which `dx_out` is a further gradient."""
    dx = empty_rows(x) if dx is None else dx  # the kernel always writes it
    one_kernel = in_registers(x.shape[-1], x.element_size(), device_of(x))
    launch_backward = backward_rows if one_kernel else wide_backward_rows
    launch_backward(x, contiguous(weight), dy, dx_out, dx, dweight, eps, offset, casting_mode)


rms_norm.register("triton")(_rms_norm_forward.apply)


@raw(lambda x: (empty_rows(x), empty_rows(x)))
def _fused_add_rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting_mode: str,
    *, y, s,
):  # fmt: skip
    rows, cols = rows_and_cols(x)
    config = rms_norm_forward_config(cols, x.element_size(), device_of(x))
    (x, x_stride), (residual, residual_stride) = rows_of(x), rows_of(residual)
    launch(
        rms_norm_forward, (-(-rows // config["ROWS"]), 1, 1), config,
        x, residual, contiguous(weight), y, s, rows, x_stride, residual_stride, eps, offset, cols, casting_mode,
    )  # fmt: skip


@_fused_add_rms_norm_forward.backward(depends={"s": ["x", "residual"]})
def _(
    s, weight, eps, offset, casting_mode, dy: torch.Tensor | None, ds: torch.Tensor | None,
    *, x_grad, residual_grad, weight_grad,
):  # fmt: skip
    if dy is None:  # no gradient reaches the normalised rows
        return ds, ds, None
    dx, dweight = _rms_norm_backward(s, weight, eps, offset, casting_mode, dy, ds, True, weight_grad)
    return dx, dx, dweight


fused_add_rms_norm.register("triton")(_fused_add_rms_norm_forward.apply)
