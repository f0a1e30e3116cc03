r"""Cross entropy of a linear layer's output whose logits never exist all at once.

    logits = x W^T + b           a chunk of rows at a time, in one buffer that every chunk uses
    loss   = cross_entropy(logits, target)
    dx     = dlogits W,   dW = dlogits^T x,   db = sum over rows of dlogits

For "sum" and "mean" the gradients are made in the forward, where dlogits takes the place of the chunk's logits; the
backward multiplies them by the incoming gradient unless that is 1. For "none" the backward makes the logits again.

Letters: N rows of H features, V columns. Operations: 2NVH for each of logits, dx and dW; a frozen input costs nothing.
Memory beside the gradients: one chunk of logits. Traffic of a chunk of M rows: 2MV written and read for the logits, as
much for their gradient, and dW read and written: few large chunks are fast, and `chunk_memory` says how large.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, Function, op, raw
from liger_hw.kernels.cross_entropy import kernels, plain
from liger_hw.kernels.cross_entropy.formula import (
    Formula,
    Terms,
    outcome,
    row_losses,
    terms,
    validate,
)
from liger_hw.kernels.linear_chunks import (
    Gradients,
    MiB,
    chunk_rows,
    empty_gradients,
    logits_in_chunks,
    prepare_linear,
    scale_gradients_of_linear,
    wide_dtype,
)


def _prepare(x, weight, target, bias, ce_weight, reduction, num_items, accum_dtype, chunk_memory):
    x, weight, bias = prepare_linear(x, weight, bias, chunk_memory, flat=True)
    validate(("x", "ce_weight"), x.shape[0], weight.shape[0], x, target, ce_weight, reduction, num_items)
    check(accum_dtype in (None, torch.float32), "accum_dtype", accum_dtype, "None or torch.float32")
    return x, weight, bias


@op
def fused_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, bias: torch.Tensor | None = None,
    ce_weight: torch.Tensor | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0, reduction: str = "mean",
    num_items: torch.Tensor | float | None = None, accum_dtype: torch.dtype | None = None,
    use_token_scaling: bool = False, chunk_memory: float = 512 * MiB, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False,
):  # fmt: skip
    """`cross_entropy(F.linear(x, weight, bias), target)`, in memory for a chunk of the logits.

    Args:
        x: (N, H), any floating dtype; plain torch computes others than fp32, fp16 and bf16.
        weight: (V, H) in the dtype of `x`; under torch.autocast both are cast first, as F.linear does.
        target: (N,) int64 or int32, as in `cross_entropy`; so a value outside [0, V) makes the loss NaN, and with it
            the gradients of everything that its row touches.
        bias: (V,) in the dtype of `x`, or None.
        ce_weight: (V,) class weights, or None.
        ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, reduction, num_items: as in
            `cross_entropy`.
        accum_dtype: torch.float32 adds up the chunks' weight gradients in fp32, which takes a copy of the weight in
            fp32. None does so where there are more than 32 chunks; up to there, rounding the sum to the weight's dtype
            after each stays within half of the error that two roundings of a single large product may make.
        use_token_scaling: loss, z-loss and gradient of a row are multiplied by the probability of its target, as a
            constant (arXiv:2508.05629).
        chunk_memory: bytes that a chunk of logits may take. Larger is faster until the chunk holds a few thousand rows.
        return_z_loss, return_token_accuracy, return_predicted_tokens: also return these.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs), () or for "none" (N,); a `CrossEntropyOutput` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range.
        RuntimeError: a second backward through a "sum" or "mean", whose gradients the first has handed out.
    """
    x, weight, bias = _prepare(x, weight, target, bias, ce_weight, reduction, num_items, accum_dtype, chunk_memory)
    formula = Formula.of(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, use_token_scaling)
    logits = torch.nn.functional.linear(x, weight, bias)
    rows = row_losses(logits, terms(target, ce_weight, reduction, num_items, ignore_index), formula)
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    return outcome(*rows, target, reduction, ignore_index, wanted)


@fused_linear_cross_entropy.cost
def _(x, weight, *options, **named):
    inputs, product = x.nbytes + weight.nbytes, 2 * x.numel() * weight.shape[0]
    return Cost(inputs, 2 * inputs, product, 2 * product)


def _empty_outputs(x, predicted_wanted):
    """Loss, z-loss, partition (see `forward_rows`) and predicted token of each row."""
    loss = x.new_empty(x.shape[0], dtype=wide_dtype(x))
    predicted = loss.new_empty(loss.shape if predicted_wanted else 0, dtype=torch.int64)
    return loss, torch.empty_like(loss), loss.new_empty(x.shape[0], 2), predicted


class _Plan(NamedTuple):
    """How to go through the rows, in the order in which raw functions take it."""

    chunk_memory: int
    accumulate_fp32: bool
    with_kernels: bool


def _run(x, weight, bias, terms, plan, wanted, rows_pass):
    """The gradients, after `rows_pass(module of row functions, slice, logits, terms)` made them of each chunk's logits.

    A row of logits begins at a 16-byte boundary whatever the vocabulary.
    """
    vector = 16 // x.element_size()
    stride = -(-weight.shape[0] // vector) * vector
    size = chunk_rows(x.shape[0], stride * x.element_size(), plan.chunk_memory, device_of(x))
    gradients = Gradients(x, weight, bias, wanted, -(-x.shape[0] // size), plan.accumulate_fp32)
    for part, logits in logits_in_chunks(x, weight, bias, size, stride):
        rows_pass(kernels if plan.with_kernels else plain, part, logits, terms._replace(target=terms.target[part]))
        if any(wanted):
            gradients.add(part, logits)
    return gradients.finished()


def _fake_forward(x, weight, bias, terms, *options):
    predicted_wanted, wanted = options[-2:]
    return *_empty_outputs(x, predicted_wanted), *empty_gradients(x, weight, bias, wanted)


@raw(_fake_forward)
def _fused_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, terms: Sequence[torch.Tensor | None],
    ignore_index: int, label_smoothing: float, lse_square_scale: float, softcap: float | None, logit_scale: float,
    token_scaling: bool, chunk_memory: int, accumulate_fp32: bool, with_kernels: bool, predicted_wanted: bool,
    wanted: Sequence[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, token_scaling)
    loss, z_loss, partition, predicted = _empty_outputs(x, predicted_wanted)

    def forward(rows, part, logits, terms):
        found = predicted[part] if predicted_wanted else None
        rows.forward_rows(logits, terms, formula, loss[part], z_loss[part], partition[part], found, any(wanted))

    plan = _Plan(chunk_memory, accumulate_fp32, with_kernels)
    return loss, z_loss, partition, predicted, *_run(x, weight, bias, Terms(*terms), plan, wanted, forward)


def _fake_backward(x, weight, bias, terms, partition, dloss, *options):
    return empty_gradients(x, weight, bias, options[-1])


@raw(_fake_backward)
def _fused_linear_cross_entropy_backward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, terms: Sequence[torch.Tensor | None],
    partition: torch.Tensor, dloss: torch.Tensor, ignore_index: int, label_smoothing: float, lse_square_scale: float,
    softcap: float | None, logit_scale: float, token_scaling: bool, chunk_memory: int, accumulate_fp32: bool,
    with_kernels: bool, wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, token_scaling)

    def backward(rows, part, logits, terms):
        rows.backward_rows(logits, terms, formula, partition[part], dloss[part])

    plan = _Plan(chunk_memory, accumulate_fp32, with_kernels)
    return _run(x, weight, bias, Terms(*terms), plan, wanted, backward)


class FusedLinearCrossEntropyFunction(Function):
    """The sum of the rows' losses; the gradients are made in the forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, ce_weight, weight_sum, denominator, count, options):
        formula, plan, predicted_wanted, wanted = options
        terms = target, ce_weight, weight_sum, denominator, count
        loss, z_loss, _, predicted, *gradients = _fused_linear_cross_entropy(
            x, weight, bias, terms, *formula, *plan, predicted_wanted, wanted
        )
        if torch.compiler.is_compiling():
            ctx.save_for_backward(*gradients)
        else:  # nothing but the backward may hold them, or autograd copies what it could hand over
            ctx.gradients = gradients
        ctx.with_kernels, ctx.wanted = plan.with_kernels, wanted
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss.sum(), z_loss, predicted

    @staticmethod
    def backward(ctx, dloss, *_):
        if torch.compiler.is_compiling():
            gradients = [gradient * dloss.to(gradient.dtype) for gradient in ctx.saved_tensors]
        elif ctx.gradients is None:
            raise RuntimeError(
                "fused_linear_cross_entropy makes its gradients in the forward, and a first backward has handed them "
                "out: for a second one call it again, or use reduction='none' and reduce its result"
            )
        else:
            gradients, ctx.gradients = ctx.gradients, None
            scale_gradients_of_linear(*gradients, dloss, ctx.with_kernels)
        return *(g if wanted else None for g, wanted in zip(gradients, ctx.wanted)), *[None] * 6


class FusedLinearCrossEntropyRowsFunction(Function):
    """The losses of the rows; the backward makes the logits again, and their gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, ce_weight, weight_sum, denominator, count, options):
        formula, plan, predicted_wanted, wanted = options
        terms = target, ce_weight, weight_sum, denominator, count
        loss, z_loss, partition, predicted, *_ = _fused_linear_cross_entropy(
            x, weight, bias, terms, *formula, *plan, predicted_wanted, [False] * 3
        )
        ctx.save_for_backward(x, weight, bias, partition, *terms)
        ctx.options = options
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss, z_loss, predicted

    @staticmethod
    def backward(ctx, dloss, *_):
        x, weight, bias, partition, *terms = ctx.saved_tensors
        formula, plan, _, wanted = ctx.options
        gradients = _fused_linear_cross_entropy_backward(
            x, weight, bias, terms, partition, dloss, *formula, *plan, wanted
        )
        return *(g if w else None for g, w in zip(gradients, wanted)), *[None] * 6


def _chunked(with_kernels):
    """The op, chunk by chunk: with Triton kernels, or in plain torch."""

    def implementation(
        x, weight, target, bias=None, ce_weight=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0,
        softcap=None, logit_scale=1.0, reduction="mean", num_items=None, accum_dtype=None, use_token_scaling=False,
        chunk_memory=512 * MiB, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        x, weight, bias = _prepare(x, weight, target, bias, ce_weight, reduction, num_items, accum_dtype, chunk_memory)
        formula = Formula.of(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, use_token_scaling)
        row_terms = terms(target.contiguous(), ce_weight, reduction, num_items, ignore_index, with_kernels)
        plan = _Plan(int(chunk_memory), accum_dtype is not None, with_kernels)
        # needs_input_grad knows nothing of no_grad, so what is wanted is asked here
        wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias))
        predicted_wanted = return_predicted_tokens or return_token_accuracy
        if any(wanted):
            function = FusedLinearCrossEntropyRowsFunction if reduction == "none" else FusedLinearCrossEntropyFunction
            options = formula, plan, predicted_wanted, wanted
            loss, z_loss, predicted = function.apply(x, weight, bias, *row_terms, options)
        else:
            loss, z_loss, _, predicted, *_ = _fused_linear_cross_entropy(
                x, weight, bias, row_terms, *formula, *plan, predicted_wanted, wanted
            )
        wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
        return outcome(loss, z_loss, predicted, target, reduction, ignore_index, wanted)

    return implementation


fused_linear_cross_entropy.register("triton")(_chunked(with_kernels=True))
fused_linear_cross_entropy.register("cpu")(_chunked(with_kernels=False))
