r"""Convolve attention weights over queries, keys and heads (multi-token attention, arXiv:2504.00927).

    p   = softmax or sparsemax of the scores s_ij with j <= i; 0 for j > i
    c   = conv2d(p, weight, bias)
    out = c_ij for j <= i, else 0

    dc  = dout_ij for j <= i, else 0
    dp, dweight, dbias: of the convolution of dc
    ds  = softmax's or sparsemax's gradient of dp, for j <= i; else 0

The causal kernels of `softmax.py` compute p and ds: no masked copy of the scores exists. torch has the convolution,
which keeps p and the weight alone, so the last mask overwrites its result.

Letters: N scores, M values of the result. Traffic: forward reads half of the scores and writes p (1.5N), the
convolution reads p and writes its result (N + M), and the mask writes half of that (M/2). Backward reads half of dout
and writes dc (1.5M), the convolution's gradients read p once and dc twice and write dp (2N + 2M), and the last kernel
reads half of p and of dp and writes ds (2N). Memory bounds it, or the convolution's products if a group has many
channels.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from liger_hw._torch import results_are_kept
from liger_hw.checks import check
from liger_hw.dispatch import Cost, autocasts, op
from liger_hw.kernels.attention.softmax import softmax, softmax_rows, sparsemax


def _validate(scores, weight, bias, groups):
    fits = scores.ndim == 4 and scores.is_floating_point()
    check(fits, "scores", scores, "floating point (batch, channels, queries, keys)")
    cast = autocasts(scores.device.type) and scores.dtype != torch.float64
    channels = scores.shape[1]
    check(groups > 0 and channels % groups == 0, "groups", groups, f"a divisor of the {channels} channels")
    fits = weight.ndim == 4 and weight.shape[0] % groups == 0 and weight.shape[1] == channels // groups
    fits = fits and weight.device == scores.device and (cast or weight.dtype == scores.dtype)
    like = f"on {scores.device} (or torch.autocast)"
    allowed = f"{scores.dtype} of shape (a multiple of {groups}, {channels // groups}, height, width) {like}"
    check(fits, "weight", weight, allowed)
    if bias is not None:
        fits = bias.shape == weight.shape[:1] and bias.device == scores.device and (cast or bias.dtype == scores.dtype)
        check(fits, "bias", bias, f"{scores.dtype} of shape ({weight.shape[0]},) {like}")


@op(validate=_validate)
def multi_token_attention(
    scores: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: int | Sequence = 1,
    padding: int | str | Sequence = 0, dilation: int | Sequence = 1, groups: int = 1, sparse: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Convolve the causal softmax or sparsemax of scores by F.conv2d, and mask the result.

    Both masks leave what `tril()` leaves: key j of query i counts if j <= i, for any number of queries and keys. The
    weights are computed in fp32 and rounded once. The convolution is torch's: its products may be TF32 and its
    gradients may differ in the last bits of every run, as torch.backends.cudnn allows.

    Args:
        scores: (B, C, queries, keys), any strides and floating dtype; plain torch computes dtypes other than fp32,
            fp16 and bf16. What does not count may hold any values. -inf gives the weight 0; a query whose scores that
            count are all -inf, or with NaN or inf, has weights of NaN, and so have the results that read them.
        weight: (O, C / groups, height, width), in the dtype of `scores`; under torch.autocast any, cast as F.conv2d
            casts.
        bias: (O,), in a dtype as for `weight`, or None.
        stride, padding, dilation, groups: as in F.conv2d.
        sparse: use sparsemax instead of softmax.

    Returns:
        (B, O, height, width of the result), in the dtype of `scores`, or autocast's.

    Raises:
        ValueError: `weight` or `bias` does not fit, or `groups` does not divide C.
        RuntimeError: F.conv2d refuses the sizes: a kernel larger than the padded scores, or a stride of 0.

    Examples:
        >>> scores, taps = torch.rand(1, 4, 6, 6), torch.rand(4, 4, 3, 3)
        >>> liger_hw.multi_token_attention(scores, taps, padding=1).shape
        torch.Size([1, 4, 6, 6])
    """
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = (sparsemax if sparse else softmax).reference(scores.masked_fill(future, float("-inf")))
    return F.conv2d(weights.tril(), weight, bias, stride, padding, dilation, groups).tril()


multi_token_attention.shards(scores="b C Q K", weight="", bias="", returns="b O H W")


def _past(x):
    """Return how many values of matrices are not in the future."""
    queries, keys = x.shape[-2:]
    short = min(queries, keys)
    return x.shape[:-2].numel() * (short * (short + 1) // 2 + (queries - short) * keys)


@multi_token_attention.cost
def _(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False):
    tensors = (None if x is None else x.detach().to("meta") for x in (scores, weight, bias))
    out = F.conv2d(*tensors, stride, padding, dilation, groups)
    counts, results, parameters = _past(scores), _past(out), weight.nbytes + (0 if bias is None else bias.nbytes)
    products, size = results * weight[0].numel(), scores.element_size()
    return Cost(
        counts * size + out.nbytes + parameters,
        (counts + results) * size + scores.nbytes + weight.nbytes + parameters,
        (20 if sparse else 5) * counts + 2 * products,
        4 * counts + 4 * products,
    )


@multi_token_attention.register("triton")
def _(scores, weight, bias, stride, padding, dilation, groups, sparse):
    weights = softmax_rows(scores, sparse, True)
    mixed = F.conv2d(weights, weight, bias, stride, padding, dilation, groups)
    return mixed.tril() if results_are_kept() else mixed.tril_()
