r"""Compute the cross entropy of logits, with all that language-model training adds to it.

    z    = softcap tanh(logit_scale x / softcap)            softcap None: z = logit_scale x
    lse  = log sum_j exp(z_j),   p_j = exp(z_j - lse)
    ce   = (1 - e) w_y (lse - z_y) + e/V sum_j w_j (lse - z_j)          e = label_smoothing, w = class weights
    loss = ce / D + l lse^2 / M                                         l = lse_square_scale

    dz_j = p_j [((1 - e) w_y + e/V sum_k w_k) / D + 2 l lse / M] - e/V w_j / D - (1 - e) w_y / D [j = y]
    dx_j = dz_j logit_scale (1 - (z_j / softcap)^2)

D and M are 1. Under "mean", D is the sum of the targets' class weights (without weights, their number), M their number.
Letters: N rows of V columns, target y. Traffic: the forward reads the logits (NV); the backward reads them and writes
the gradient (2NV). With `in_place` one kernel does both: it reads a row twice, the second time from the last block to
the first, as the last blocks are the likeliest to be in L2 still, and writes the gradient over it. Ignored rows are not
read. Exponentials are powers of two.
"""

import torch

from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, raw
from liger_hw.kernels._logits import empty_gradient
from liger_hw.kernels.vocabulary._fp16 import power_of_2_below
from liger_hw.kernels.vocabulary._in_forward import GradientsInForward
from liger_hw.kernels.vocabulary.cross_entropy.formula import (
    CrossEntropyOutput,
    Formula,
    Targets,
    check_call,
    output_of,
    row_losses,
    shard_rows,
)
from liger_hw.kernels.vocabulary.cross_entropy.kernels import backward_rows, forward_rows, scale_rows
from liger_hw.kernels.vocabulary.cross_entropy.totals import launch_totals, total

__all__ = ["CrossEntropyOutput", "cross_entropy"]


@op
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    reduction: str = "mean", num_items: torch.Tensor | float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, in_place: bool = False,
):  # fmt: skip
    """Compute `torch.nn.functional.cross_entropy` of class indices, with z-loss, softcap and logit scale.

    Args:
        logits: (N, V), any floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16. Any stride
            between rows costs no copy. The loss and gradient of a row with +inf are NaN, as torch's, the z-loss +inf.
        target: (N,) int64 or int32. A value outside [0, V) other than `ignore_index` is an error on a CPU. Elsewhere,
            and in a compiled graph, it makes that row's loss and gradient NaN, and so the reduced loss: nothing is read
            out of bounds, and the host waits for no check.
        weight: (V,) class weights, or None for 1.
        ignore_index: rows with this target have loss 0 and gradient 0 for any logits.
        label_smoothing: share of the target's probability spread over the vocabulary (arXiv:1512.00567).
        lse_square_scale: adds the z-loss `lse_square_scale * logsumexp^2` (arXiv:2204.02311, section 5), without class
            weights.
        softcap: logits become `softcap * tanh(logits / softcap)` first (Gemma2ForCausalLM), after `logit_scale`.
        logit_scale: logits are multiplied by it first, in fp32 (CohereForCausalLM).
        reduction: "none", "sum" or "mean" over the rows not ignored. "mean" divides the cross entropy by the sum of
            their class weights, as torch does (NaN for a sum of 0), and the z-loss by their number; without such rows
            the loss is 0.
        num_items: number, or tensor of one, that "mean" divides by instead: Hugging Face's `num_items_in_batch`. The
            loss for 0 is NaN, and 0 where no row counts.
        return_z_loss, return_token_accuracy, return_predicted_tokens: also return these.
        in_place: the forward computes the gradient, where one is wanted, over `logits`. The caller must own them: they
            are lost, and the gradient takes no memory (logits with a column stride are copied first). In fp16 the
            gradient is kept times a power of two until the incoming one arrives, so that none is lost before a loss
            scale. Under torch.compile this changes nothing, as the compiler plans memory.

    Returns:
        The loss in fp32 (fp64 for fp64 logits), () or for "none" (N,); a `CrossEntropyOutput` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, an option is out of its range or, on a CPU, a target.
        RuntimeError: a second backward through an `in_place` loss.

    Examples:
        >>> liger_hw.cross_entropy(torch.zeros(3, 10), torch.tensor([1, 2, -100]))
        tensor(2.3026)
    """
    call = cross_entropy.arguments(
        logits, target, weight, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, reduction,
        num_items, return_z_loss, return_token_accuracy, return_predicted_tokens, in_place,
    )  # fmt: skip
    formula = _formula_of(call)
    return output_of(call, *row_losses(logits, Targets.of(call, weight, reduction), formula))


def _formula_of(call):
    logits = call.logits
    check(logits.ndim == 2 and logits.is_floating_point() and logits.shape[1] > 0, "logits", logits, "floats (N, V)")
    check_call(call, "logits", "weight", logits.shape[1])
    return Formula.of(call)


@cross_entropy.shards
def _(call):
    return shard_rows(call, "logits", "weight")


@cross_entropy.cost
def _(logits, *options, in_place=False, **named):
    read = written = logits.nbytes
    done = 4 * logits.numel()
    if in_place:
        return Cost(read, written, done, done)
    return Cost(read, read + written, done, done)


def _empty_results(logits, with_z_loss, predict, reduction="none", needs_grad=False):
    rows = logits.shape[0]
    loss = logits.new_empty(rows if reduction == "none" else (), dtype=torch.float32)
    return (
        loss, torch.empty_like(loss) if with_z_loss else None,
        loss.new_empty(rows, dtype=torch.int64) if predict else None,
        loss.new_empty(()) if needs_grad and reduction == "mean" else None,
        loss.new_empty(2 * rows) if needs_grad else None,
    )  # fmt: skip


@raw(_empty_results)
def _cross_entropy_forward(
    logits: torch.Tensor, targets: Targets, formula: Formula, with_z_loss: bool, predict: bool, reduction: str,
    needs_grad: bool, *, loss, z_loss, predicted, denominator, partition,
):  # fmt: skip
    """Compute the loss of each row, or of all rows under "sum" and "mean".

    "mean" requires targets without a denominator: the kernel that adds up the losses counts it.
    """
    if reduction == "none":
        forward_rows(logits, targets, formula, loss, z_loss, partition, predicted)
        return
    row_loss = loss.new_empty(logits.shape[0])
    row_z_loss = torch.empty_like(row_loss) if with_z_loss else None
    forward_rows(logits, targets, formula, row_loss, row_z_loss, partition, predicted)
    sums = loss, z_loss, denominator, None
    launch_totals(targets.target, None, row_loss, row_z_loss, sums, formula.ignore_index, reduction == "mean")


@_cross_entropy_forward.backward(empty_gradient, without_gradient="z_loss predicted")
def _cross_entropy_backward(logits, targets, denominator: torch.Tensor | None, partition, dloss, formula, *, dlogits):
    if denominator is not None:
        targets = Targets(targets.target, None, None, denominator, None)
    backward_rows(logits, targets, formula, partition, dloss, dlogits)


@raw(lambda logits, with_z_loss, predict: _empty_results(logits, with_z_loss, predict)[:3], mutates=["logits"])
def _cross_entropy_forward_in_place(
    logits: torch.Tensor, targets: Targets, formula: Formula, with_z_loss: bool, predict: bool,
    *, loss, z_loss, predicted,
):  # fmt: skip
    forward_rows(logits, targets, formula, loss, z_loss, None, predicted, True)


@raw(mutates=["dx"])
def _cross_entropy_scale(dx: torch.Tensor, dloss: torch.Tensor) -> None:
    scale_rows(dx, dloss)


class CrossEntropyInPlaceFunction(GradientsInForward):
    """Autograd function whose forward writes the gradient over the logits."""

    @staticmethod
    def forward(ctx, logits, targets, formula, with_z_loss, predict, reduction):
        factor, scale = None, _cross_entropy_scale
        if logits.dtype == torch.float16:
            factor = power_of_2_below(targets.largest_gradient(formula, logits.shape[1]))
            targets, scale = targets.times(factor), lambda dx, dloss: _cross_entropy_scale(dx, dloss / factor)
        loss, z_loss, predicted = _cross_entropy_forward_in_place(logits, targets, formula, with_z_loss, predict)
        if factor is not None:
            loss /= factor
            z_loss = None if z_loss is None else z_loss / factor
        torch.autograd.graph.increment_version(logits)  # so that another function that saved it raises an error
        CrossEntropyInPlaceFunction.keep(
            ctx, (logits.detach(),), "cross_entropy(in_place=True)", (logits.dtype,), scale=scale,
            again="pass in_place=False",
        )  # fmt: skip
        ctx.mark_non_differentiable(*(x for x in (z_loss, predicted) if x is not None))
        return loss if reduction == "none" else total(loss), z_loss, predicted


@cross_entropy.register("triton", bound=True)
def _(call):
    formula, logits, weight = _formula_of(call), call.logits, call.weight
    rows, cols = logits.shape
    row_stride, stride = logits.stride()
    if (cols > 1 and stride != 1) or (rows > 1 and row_stride < cols):
        logits = logits.contiguous()
    in_place = call.in_place and logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    # the in-place forward needs the divisor before its gradient; otherwise the kernel that sums the losses counts it
    count_last = call.reduction == "mean" and weight is None and call.num_items is None and not in_place
    targets = Targets.of(call, weight, "sum" if count_last else call.reduction, True)
    reduction = "sum" if call.reduction == "mean" and not count_last else call.reduction
    predict = call.return_predicted_tokens or call.return_token_accuracy
    apply = CrossEntropyInPlaceFunction.apply if in_place else _cross_entropy_forward.apply
    return output_of(call, *apply(logits, targets, formula, call.return_z_loss, predict, reduction))
