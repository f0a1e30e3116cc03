r"""Divide each row by its Euclidean norm.

    r  = 1 / sqrt(sum(x^2) + eps)
    y  = x r

    dx = r (dy - y sum(dy y))

Letters: R rows of C columns. Traffic: forward reads x and writes y (2RC); backward reads x and dy and writes dx (3RC).
Both are bound by memory. The kernels are those of `gated_rms_norm`, without a gate and with a sum instead of a mean.
"""

import torch
from torch import rsqrt  # now, as a program may replace it later

from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, widen
from liger_hw.kernels.norms.gated_rms_norm import normalise
from liger_hw.kernels.norms.gated_rms_norm.kernels import NormForm
from liger_hw.spelling import check_known

L2_CASTING_MODES = ("gemma", "none")


def _validate(x, casting_mode):
    check(x.ndim and x.is_floating_point(), "x", x, "floating point rows")
    check_known("casting_mode", casting_mode, L2_CASTING_MODES)


@op(validate=_validate)
def l2_norm(x: torch.Tensor, eps: float = 1e-6, casting_mode: str = "gemma") -> torch.Tensor:
    """Compute x / sqrt(sum(x^2) + eps) of each row.

    Linear attention normalises queries and keys in this way. Llama 4's L2 norm takes the mean of the squares: that is
    `rms_norm` without a weight.

    Args:
        x: (..., C), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        eps: added to the sum of squares.
        casting_mode: "gemma" computes in fp32 and rounds once (flash-linear-attention). "none" rounds to `x.dtype`
            after every operation (l2norm of transformers' Qwen3-Next).

    Returns:
        (..., C) in `x.dtype`.

    Raises:
        ValueError: `x` has no floating point rows, or `casting_mode` is unknown.

    Examples:
        >>> liger_hw.l2_norm(torch.tensor([[3.0, 4.0]]))
        tensor([[0.6000, 0.8000]])
    """
    wide = x if casting_mode == "none" else widen(x)
    return (wide * rsqrt((wide * wide).sum(-1, keepdim=True) + eps)).to(x.dtype)


l2_norm.shards(x="... H", returns="x")


@l2_norm.cost
def _(x, *options, **named):
    return Cost(2 * x.nbytes, 3 * x.nbytes, 3 * x.numel(), 7 * x.numel())


@l2_norm.register("triton")
def _(x, eps, casting_mode):
    return normalise(x, NormForm(eps, casting_mode=casting_mode, mean=False))
