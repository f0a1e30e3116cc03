"""Compute cross entropy of a vocabulary sharded over ranks, with three small all-reduces.

Each rank holds V / ranks consecutive columns. loss = log sum exp(x) - x_target, both over all ranks; the gradient of a
rank's columns, softmax - one-hot, needs no further communication.
"""

import torch
import torch.distributed as dist

from liger_hw.checks import check
from liger_hw.kernels.cross_entropy.formula import check_labels

FORMULAS = ("pytorch", "megatron")  # smoothing alpha, or alpha V / (V - 1), which excludes the target
MODES = ("global", "partition")  # mean for smoothing over all columns, or over the rank's columns


def check_smoothing(label_smoothing, formula, mode):
    """Raise a ValueError, in liger_kernel's words, for an option of smoothing out of its range."""
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be in [0, 1), got {label_smoothing}")
    if formula not in FORMULAS:
        raise ValueError(f"label_smoothing_formula must be one of {FORMULAS}, got {formula!r}")
    if mode not in MODES:
        raise ValueError(f"label_smoothing_mode must be one of {MODES}, got {mode!r}")


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, group, ignore_index, smoothing, formula, mode):
        ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)

        def over_ranks(x, op=dist.ReduceOp.SUM):
            if ranks > 1:
                dist.all_reduce(x, op, group)
            return x

        wide, cols = logits.float(), logits.shape[-1]
        wide = wide - over_ranks(wide.amax(-1, keepdim=True), dist.ReduceOp.MAX)
        outside = (target != ignore_index) & ((target < 0) | (target >= cols * ranks))
        lse = over_ranks(wide.exp().sum(-1)).log().masked_fill(outside, float("nan"))
        here = target - rank * cols
        is_here = (here >= 0) & (here < cols)
        here = here.clamp(0, cols - 1).unsqueeze(-1)
        loss = lse - over_ranks(wide.gather(-1, here).squeeze(-1) * is_here)
        averaged = cols * ranks if mode == "global" else cols
        alpha = smoothing * (averaged / (averaged - 1) if formula == "megatron" else 1)
        if smoothing:
            log_probs = (wide - lse.unsqueeze(-1)).sum(-1)
            mean = (over_ranks(log_probs) if mode == "global" else log_probs) / averaged
            loss = (1 - alpha) * loss - alpha * mean
        counts = target != ignore_index
        ctx.save_for_backward(wide - lse.unsqueeze(-1), here, is_here, counts)
        ctx.alpha, ctx.averaged, ctx.dtype = alpha, averaged, logits.dtype
        return torch.where(counts, loss, torch.zeros_like(loss))

    @staticmethod
    def backward(ctx, grad):
        log_probs, here, is_here, counts = ctx.saved_tensors
        # the weights of the smoothed target, which multiply each softmax, sum to 1
        gradient = log_probs.exp() - ctx.alpha / ctx.averaged
        gradient.scatter_add_(-1, here, -(1 - ctx.alpha) * is_here.unsqueeze(-1).to(gradient.dtype))
        return (gradient * (grad * counts).unsqueeze(-1)).to(ctx.dtype), *[None] * 6


def vocab_parallel_cross_entropy(
    logits, target, group=None, ignore_index=-100, label_smoothing=0.0, formula="pytorch", mode="global"
):
    """Compute each token's cross entropy; each rank of `group` holds an equal vocabulary shard.

    Args:
        logits: (S, B, V / ranks), this rank's columns, in the order of ranks.
        target: (S, B) int64 or int32 in [0, V) or `ignore_index`, whose loss and gradient are 0. Another value is an
            error on a CPU, and elsewhere makes the token's loss and gradient NaN.
        group: a process group, or None for one rank.
        label_smoothing: 0 to 1.
        formula: "pytorch" spreads label_smoothing over all V; "megatron" over the V - 1 others.
        mode: "global" smooths over all columns; "partition" over this rank's, so that ranks differ.

    Returns:
        fp32 (S, B), equal on every rank except with smoothing in mode "partition".

    Raises:
        ValueError: the shapes do not fit, or an option is out of its range.
    """
    check(logits.ndim == 3, "logits", tuple(logits.shape), "three dimensions: sequence, batch, vocabulary")
    check(target.shape == logits.shape[:2], "target", tuple(target.shape), f"{tuple(logits.shape[:2])}")
    check_smoothing(label_smoothing, formula, mode)
    check_labels(
        "target", target, logits.shape[-1] * (1 if group is None else dist.get_world_size(group)), ignore_index
    )
    return _VocabParallelCrossEntropy.apply(logits, target, group, ignore_index, label_smoothing, formula, mode)
