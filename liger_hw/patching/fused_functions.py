"""Functions of torch that a loss without logits replaces: cross entropy and logsumexp.

Each takes the arguments of torch's function and returns None where no op computes it, else two functions:

    fused(x (N, H), weight, bias, logit_scale, softcap, group) -> value, without logits
    ordinary(logits) -> value
"""

import torch

from liger_hw._torch import PLAIN
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax
from liger_hw.patching.record import autocast_dtype


def call_fused(function, logits, args, kwargs):
    """Call a function of this file on uncomputed logits; None where no op computes it."""
    try:
        functions = function(logits, *args, **kwargs) if logits.fits else None
    except TypeError:  # torch itself reports the wrong arguments
        return None
    return None if functions is None else logits.fuse(*functions)


def cross_entropy(
    logits, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    fits = size_average is None and reduce is None and type(target) in PLAIN
    fits = fits and (weight is None or type(weight) in PLAIN)
    fits = fits and logits.ndim == 2 and target.dtype == torch.int64 and target.shape == logits.shape[:1]
    if not fits or reduction not in ("mean", "sum", "none"):
        return None
    options = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    # autocast computes the loss in fp32
    dtype = torch.promote_types(logits.dtype, torch.float32) if autocast_dtype(logits.device.type) else logits.dtype
    # a backward that needs the logits reads them again, and a program may write to its own
    target, weight = target.clone(), None if weight is None else weight.clone()

    def fused(x, head, bias, scale, softcap, group):
        loss = fused_linear_cross_entropy(
            x, head, target, bias, weight, logit_scale=scale, softcap=softcap, group=group, **options
        )
        if reduction == "mean":  # the op's mean of no row is 0, torch's is NaN
            loss = loss.masked_fill(~(target != ignore_index).any(), float("nan"))
        return loss.to(dtype)

    # as now: a program may replace it before the backward
    return fused, lambda real, plain=torch.nn.functional.cross_entropy: plain(real.to(dtype), target, weight, **options)


def logsumexp(logits, dim, keepdim=False):
    if dim not in (-1, logits.ndim - 1) or keepdim or not logits.numel():
        return None
    token = torch.zeros(logits.shape[:-1].numel(), dtype=torch.int64, device=logits.device)  # unused
    dtype, shape = logits.dtype, logits.shape[:-1]

    def fused(x, head, bias, scale, softcap, group):
        row = fused_linear_selective_log_softmax(
            x, head, token, bias, logit_scale=scale, softcap=softcap, return_lse=True, group=group
        )
        return row.lse.to(dtype).reshape(shape)

    return fused, lambda real: real.logsumexp(-1)
