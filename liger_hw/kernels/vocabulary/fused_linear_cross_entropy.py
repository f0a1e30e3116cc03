r"""Compute the cross entropy of a linear layer's output without all logits in memory.

    logits = x W^T + b           a chunk of rows at a time, in one buffer that every chunk uses
    loss   = cross_entropy(logits, target)
    dx     = dlogits W,   dW = dlogits^T x,   db = sum over rows of dlogits

For "sum" and "mean" the forward computes the gradients, and writes dlogits over the chunk's logits; the backward
multiplies them by the incoming gradient unless that is 1. For "none" the backward recomputes the logits.
In fp16, which needs a loss scale, dlogits are stored times a power of two, and the gradients wait in fp32 for the
incoming gradient. That takes 2NH + 2VH bytes more than bf16 until the backward, and there 2 max(NH, VH) beside them.

Letters: N rows of H features, V columns. Operations: 2NVH for each of logits, dx and dW; a frozen input costs nothing.
Memory beside the gradients: one chunk of logits. Traffic of a chunk of M rows: 2MV written and read for the logits, as
much for their gradient, and dW read and written. So few large chunks are fast; `chunk_memory` bounds their size.
"""

import functools
from collections.abc import Sequence

import torch

from liger_hw.dispatch import Cost, op, raw
from liger_hw.dispatch.function import refuse_lost_backward
from liger_hw.kernels.vocabulary import sharded_head
from liger_hw.kernels.vocabulary._fp16 import largest_finite
from liger_hw.kernels.vocabulary._in_forward import GradientsInForward
from liger_hw.kernels.vocabulary._products import linear
from liger_hw.kernels.vocabulary.chunked_head import (
    ChunkedHead,
    MiB,
    Plan,
    empty_gradients,
    gradient_memory,
    needed_gradients,
    prepare_head,
    sliced,
    wide_dtype,
)
from liger_hw.kernels.vocabulary.cross_entropy import formula as ce_formula
from liger_hw.kernels.vocabulary.cross_entropy import kernels
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import row_functions
from liger_hw.kernels.vocabulary.selective_log_softmax.formula import Scaling, selected_rows
from liger_hw.kernels.vocabulary.vocabulary_parallel import CrossEntropyRows


@op
def fused_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, reduction: str = "mean",
    num_items: torch.Tensor | float | None = None, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, chunk_memory: float = 512 * MiB, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
    group: "torch.distributed.ProcessGroup | None" = None, logits_dtype: torch.dtype | None = None,
    invariant: bool = False, counted_rows: int | None = None, token_weights: torch.Tensor | None = None,
    return_entropy: bool = False,
):  # fmt: skip
    """Compute `cross_entropy(F.linear(x, weight, bias), target)`, in memory for a chunk of the logits.

    Args:
        x: (N, H), any floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        weight: (V, H) in the dtype of `x`, or fp32 with 16 bits; under torch.autocast both are cast first, as F.linear
            does.
        target: (N,) int64 or int32, as in `cross_entropy`, the token that each row predicts (already shifted). A value
            outside [0, V) is an error on a CPU, and elsewhere makes the loss NaN, and with it every gradient that its
            row reaches.
        bias: (V,) in the dtype of `weight`, or None.
        ce_weight: (V,) class weights, or None.
        ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, reduction, num_items: as in
            `cross_entropy`.
        accum_dtype: torch.float32 accumulates the chunks' weight gradients in fp32, which takes an fp32 copy of the
            weight. None does so for more than 32 chunks. Up to 32, rounding the sum to the weight's dtype after each
            chunk stays within half of the error that two roundings of a single large product may make.
        use_token_scaling: loss, z-loss and gradient of a row are multiplied by the probability of its target, as a
            constant (arXiv:2508.05629).
        chunk_memory: bytes that a chunk of logits may take. Larger is faster until the chunk holds a few thousand rows.
        return_z_loss, return_token_accuracy, return_predicted_tokens: also return these.
        group: process group whose ranks hold equal parts of the vocabulary, in the order of ranks: `weight` and `bias`
            are this rank's rows, and every other argument is the same on all ranks; results are NaN if `target` is
            not. A weight that is a DTensor with Shard(0) needs none, and its parts may differ by torch's rule. Loss and
            gradient of `x` are then those of the whole vocabulary, on every rank.
        logits_dtype: torch.float32 computes the logits of `x.float()` and `weight.float()`, and their gradient, in
            fp32, without a wide copy of either; autocast then casts nothing. None: logits in the dtype of `x`, or in
            fp32 where one of `x` and `weight` is fp32 and the other has 16 bits. fp64 inputs stay in fp64.
        invariant: a row's loss, predicted token and gradient (but for the divisor of a mean) have the same bits beside
            any other rows, in any chunk: products of rows come from a kernel whose tiles ignore their number. On a CPU
            and by the reference each row is a product of its own. Not of a vocabulary sharded over ranks, nor for
            gradients of fp16 logits that the forward computes.
        counted_rows: the most rows whose target is not `ignore_index`, known to the caller. The products then have so
            many rows, among them all that count; the host waits for nothing. With more such rows the call is an error
            on a CPU, and elsewhere loss and gradients are NaN. None: products of all rows.
        token_weights: (N,) numbers that multiply each row's loss, z-loss included; constants. A mean's divisor stays
            the number of rows. The weights of ignored rows may be any. None: 1.
        return_entropy: also return the entropy of the distribution after `softcap` and `logit_scale`. It reads a
            chunk's logits once more.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs), () or for "none" (N,); a `CrossEntropyOutput` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, an option is out of its range or, on a CPU, a target; the
            token weights need a gradient.
        RuntimeError: a second backward through a "sum" or "mean", as the first one releases the gradients.

    Examples:
        >>> hidden, head = torch.zeros(3, 8), torch.rand(10, 8)
        >>> liger_hw.fused_linear_cross_entropy(hidden, head, torch.tensor([1, 2, -100]))
        tensor(2.3026)
    """
    call = fused_linear_cross_entropy.arguments(
        x, weight, target, bias, ce_weight, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale,
        reduction, num_items, accum_dtype, use_token_scaling, chunk_memory, return_z_loss, return_token_accuracy,
        return_predicted_tokens, group, logits_dtype, invariant, counted_rows, token_weights, return_entropy,
    )  # fmt: skip
    if sharded_head.needs_distribution(call):
        return sharded_head.distributed(fused_linear_cross_entropy, call)
    (x, weight, bias), formula, token_weights = _prepare(call)
    logits = sharded_head.all_columns(linear(x, weight, bias, call.logits_dtype, call.invariant), call.group)
    loss, z_loss, predicted = ce_formula.row_losses(logits, ce_formula.Targets.of(call, ce_weight, reduction), formula)
    entropy = selected_rows(logits.detach(), target, _scaling_of(formula))[1] if return_entropy else None
    return ce_formula.output_of(call, *ce_formula.weighted(token_weights, loss, z_loss), predicted, entropy)


def _scaling_of(formula):
    return Scaling(formula.ignore_index, formula.softcap, formula.logit_scale, 1.0)


def _prepare(call):
    """Check a call; return its head, its `Formula` and its weights of rows."""
    head = prepare_head(call.x, call.weight, call.bias, call.chunk_memory, flat=True, logits_dtype=call.logits_dtype)
    sharded_head.check_invariant(call)
    ce_formula.check_call(call, "x", "ce_weight", sharded_head.vocabulary_of(call))
    ce_formula.check_accum_dtype(call.accum_dtype)
    ce_formula.check_counted_rows(call.counted_rows, call.target, call.ignore_index)
    token_weights = ce_formula.prepare_token_weights(
        call.token_weights, call.target, call.ignore_index, wide_dtype(head[0])
    )
    return head, ce_formula.Formula.of(call, call.use_token_scaling), token_weights


@fused_linear_cross_entropy.shards
def _(call):
    call, rule = ce_formula.shard_rows(call, "x", "ce_weight", weight="v H", bias="v", reduces="v")
    return call, rule | {"token_weights": rule["target"]}


@fused_linear_cross_entropy.cost
def _(x, weight, *options, **named):
    inputs, product = x.nbytes + weight.nbytes, 2 * x.numel() * weight.shape[0]
    return Cost(inputs, 2 * inputs, product, 2 * product)


def _empty_rows(x, predict, entropy_needed):
    """Return memory for each row's loss, z-loss, partition (see `forward_rows`), predicted token and entropy."""
    loss = x.new_empty(x.shape[0], dtype=wide_dtype(x))
    predicted = loss.new_empty(loss.shape if predict else 0, dtype=torch.int64)
    entropy = loss.new_empty(loss.shape if entropy_needed else 0)
    return loss, torch.empty_like(loss), loss.new_empty(x.shape[0], 2), predicted, entropy


def _rows(plan):
    """Return what has `forward_rows` and `backward_rows` for a chunk's logits."""
    if plan.group:
        return CrossEntropyRows(plan)
    return kernels if plan.with_kernels else ce_formula


def _fake_forward(x, weight, bias, predict, entropy_needed, needed):
    return *_empty_rows(x, predict, entropy_needed), *empty_gradients(x, weight, bias, needed, True)


@raw(_fake_forward, returns="loss z_loss partition predicted entropy x_gradient weight_gradient bias_gradient")
def _fused_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: ce_formula.Targets,
    formula: ce_formula.Formula, plan: Plan, predict: bool, entropy_needed: bool, token_weights: torch.Tensor | None,
    needed: Sequence[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    """Compute each row's losses, and the `needed` gradients of their sum."""
    loss, z_loss, partition, predicted, entropy = _empty_rows(x, predict, entropy_needed)

    def step(part, logits, gradients):
        part_targets = targets._replace(target=sliced(targets.target, part))
        if entropy_needed:  # the cross entropy, which overwrites the logits, writes the other results anew
            rows = loss[part], entropy[part], z_loss[part], partition[part]
            row_functions(plan).forward_rows(logits, part_targets.target, _scaling_of(formula), *rows)
        row_weights = None if token_weights is None else token_weights[part]
        if gradients.scales:
            largest = targets.largest_gradient(formula, plan.vocabulary or len(weight))
            factor = gradients.factor(largest if row_weights is None else largest * largest_finite(row_weights))
            part_targets = part_targets.times(factor)
        _rows(plan).forward_rows(
            logits, part_targets, formula, *(sliced(rows, part) for rows in (loss, z_loss, partition)),
            predicted[part] if predict else None, any(needed) and row_weights is None,
        )  # fmt: skip
        if row_weights is not None:
            if any(needed):
                _rows(plan).backward_rows(logits, part_targets, formula, partition[part], row_weights)
            loss[part] *= row_weights
            z_loss[part] *= row_weights
        if gradients.scales:
            loss[part] /= factor
            z_loss[part] /= factor

    return loss, z_loss, partition, predicted, entropy, *ChunkedHead(x, weight, bias, plan).run(step, needed, True)


@_fused_linear_cross_entropy.backward(gradient_memory, without_gradient="z_loss predicted entropy")
def _fused_linear_cross_entropy_backward(
    x, weight, bias, targets, partition, dloss, formula, plan, *, x_grad, weight_grad, bias_grad
):  # fmt: skip
    def step(part, logits, _):
        part_targets = targets._replace(target=targets.target[part])
        _rows(plan).backward_rows(logits, part_targets, formula, partition[part], dloss[part])

    return ChunkedHead(x, weight, bias, plan).gradients(step, x_grad, weight_grad, bias_grad)


class FusedLinearCrossEntropySumFunction(GradientsInForward):
    """Autograd function of the rows' summed loss, with gradients computed in the forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, targets, formula, plan, predict, entropy_needed, token_weights, needs_grad):
        loss, z_loss, _, predicted, entropy, *gradients = _fused_linear_cross_entropy(
            x, weight, bias, targets, formula, plan, predict, entropy_needed, token_weights, needs_grad
        )
        again = "call it again, or use reduction='none' and reduce its result (of a model: pass skip_logits=False)"
        FusedLinearCrossEntropySumFunction.keep(
            ctx, gradients, "fused_linear_cross_entropy", (x.dtype, weight.dtype, weight.dtype), plan.with_kernels,
            again=again, weight=weight,
        )  # fmt: skip
        ctx.mark_non_differentiable(z_loss, predicted, entropy)
        return loss.sum(), z_loss, predicted, entropy


def _by_counted_rows(with_kernels, call, head, formula, token_weights):
    """Compute a call on as many rows as may count, those that do first."""
    (x, *parameters), rows = head, len(call.target)
    factor, target, x, token_weights, order = ce_formula.counted_first(
        call.counted_rows, call.target, call.ignore_index, x, token_weights,
        torch.arange(rows, device=call.target.device),
    )  # fmt: skip
    output = _on_rows(with_kernels, call._replace(target=target), (x, *parameters), formula, token_weights)

    def by_row(value, fill=0):
        return ce_formula.scatter_rows(value, order, rows, fill) if value is not None and value.ndim else value

    loss, *others = (output,) if torch.is_tensor(output) else output
    loss = by_row(loss) * factor.to(loss.dtype)
    if not others:
        return loss
    return ce_formula.CrossEntropyOutput(loss, *(by_row(value, fill) for value, fill in zip(others, (0, 0, -1, 0))))


def _by_chunks(with_kernels, call):
    if sharded_head.needs_distribution(call):
        return sharded_head.distributed(fused_linear_cross_entropy, call)
    prepared = _prepare(call)
    fewer = call.counted_rows is not None and call.counted_rows < len(call.target)
    return (_by_counted_rows if fewer else _on_rows)(with_kernels, call, *prepared)


def _on_rows(with_kernels, call, head, formula, token_weights):
    """Compute a prepared call on all its rows."""
    x, weight, bias = head
    targets = ce_formula.Targets.of(call, call.ce_weight, call.reduction, with_kernels)
    plan = Plan.of(call, with_kernels)
    predict = call.return_predicted_tokens or call.return_token_accuracy
    arguments = x, weight, bias, targets, formula, plan, predict, call.return_entropy
    if call.reduction == "none":
        *losses, predicted, entropy = _fused_linear_cross_entropy.apply(*arguments, None, (False, False, False))
        losses = ce_formula.weighted(token_weights, *losses)
    else:
        refuse_lost_backward()
        needed = needed_gradients(x, weight, bias)
        *losses, predicted, entropy = FusedLinearCrossEntropySumFunction.apply(*arguments, token_weights, needed)
    return ce_formula.output_of(call, *losses, predicted, entropy if call.return_entropy else None)


fused_linear_cross_entropy.register("triton", bound=True)(functools.partial(_by_chunks, True))
fused_linear_cross_entropy.register("cpu", bound=True)(functools.partial(_by_chunks, False))
