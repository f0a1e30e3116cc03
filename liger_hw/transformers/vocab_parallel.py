"""Compute cross entropy of a vocabulary sharded over ranks, with one small all-gather.

Each rank holds V / ranks consecutive columns. loss = log sum exp(x) - x_target, both over all ranks; the gradient of a
rank's columns, softmax - one-hot, needs no further communication. `kernels.vocabulary_parallel` computes both.
"""

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from liger_hw._torch import is_compiling
from liger_hw.checks import check, plain_numbers
from liger_hw.dispatch.function import save, saved
from liger_hw.kernels.vocabulary.chunked_head import Plan
from liger_hw.kernels.vocabulary.cross_entropy.formula import check_labels
from liger_hw.kernels.vocabulary.selective_log_softmax import selective_log_softmax
from liger_hw.kernels.vocabulary.selective_log_softmax.formula import Scaling
from liger_hw.kernels.vocabulary.vocabulary_parallel import Columns

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


class VocabParallelCrossEntropyFunction(torch.autograd.Function):  # in dispatch.Function Dynamo breaks no graph
    @staticmethod
    def forward(ctx, logits, target, plan, scaling, alpha, mode):
        columns = Columns(plan, logits, target, scaling, smooths=alpha > 0 and mode == "global")
        statistics, cols = columns.statistics(), logits.shape[1]
        loss = (1 - alpha) * statistics.distance
        if columns.smooths:
            loss = loss + alpha / plan.vocabulary * statistics.smoothed
        elif alpha:
            loss = loss + alpha * (statistics.lse - logits.sum(-1, dtype=torch.float32) / cols)
        save(ctx, logits, target, torch.stack((statistics.peak, statistics.total), -1))
        ctx.set_materialize_grads(False)
        ctx.rest = plan, scaling, alpha, plan.vocabulary if mode == "global" else cols
        return torch.where(columns.counts, loss, 0).float()

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        if dloss is None:
            return (None,) * 6
        logits, target, partition = saved(ctx)
        plan, scaling, alpha, averaged = ctx.rest
        gradient, dloss = logits.clone(), dloss.to(partition.dtype)
        columns = Columns(plan, gradient, target, scaling, smooths=alpha > 0)
        smoothing_grad = alpha / averaged * dloss if alpha else None
        columns.write_gradient(partition, None, (alpha - 1) * dloss, None, alpha * dloss, smoothing_grad)
        return gradient, *[None] * 5


def vocab_parallel_cross_entropy(
    logits, target, group=None, ignore_index=-100, label_smoothing=0.0, formula="pytorch", mode="global"
):
    """Compute each token's cross entropy; each rank of `group` holds an equal vocabulary shard.

    Args:
        logits: (S, B, V / ranks), this rank's columns, in the order of ranks. Each has as many, which nothing checks.
            The backward reads them, so do not write to them before. With label smoothing in mode "partition" their sum
            may become infinite near 3e38.
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
    (label_smoothing,) = plain_numbers((), label_smoothing=label_smoothing)
    check_smoothing(label_smoothing, formula, mode)
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    cols = logits.shape[-1]
    check_labels("target", target, cols * ranks, ignore_index)
    averaged = cols * ranks if mode == "global" else cols
    alpha = label_smoothing
    if alpha and formula == "megatron":
        check(averaged > 1, "logits", tuple(logits.shape), "two columns or more for Megatron's smoothing")
        alpha *= averaged / (averaged - 1)
    with_kernels = not is_compiling() and selective_log_softmax.choose(logits.device, logits.dtype) == "triton"
    name = "" if ranks == 1 else group.group_name
    plan = Plan(0, with_kernels, first=rank * cols, vocabulary=cols * ranks, widest=cols, group=name)
    rows = logits.reshape(-1, cols).contiguous()
    scaling = Scaling(ignore_index, None, 1.0, 1.0)
    return VocabParallelCrossEntropyFunction.apply(rows, target.reshape(-1), plan, scaling, alpha, mode).view_as(target)
