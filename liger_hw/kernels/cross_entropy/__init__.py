r"""Cross entropy of logits, with everything that language-model training adds to it.

    z    = softcap tanh(logit_scale x / softcap)            softcap None: z = logit_scale x
    lse  = log sum_j exp(z_j),   p_j = exp(z_j - lse)
    ce   = (1 - e) w_y (lse - z_y) + e/V sum_j w_j (lse - z_j)          e = label_smoothing, w = class weights
    loss = ce / D + l lse^2 / M                                         l = lse_square_scale

    dz_j = p_j [((1 - e) w_y + e/V sum_k w_k) / D + 2 l lse / M] - e/V w_j / D - (1 - e) w_y / D [j = y]
    dx_j = dz_j logit_scale (1 - (z_j / softcap)^2)

D and M are 1, or under "mean" the sum of the targets' class weights (without any, their number) and their number.
Letters: N rows of V columns, target y. Traffic: the forward reads the logits (NV); the backward reads them and writes
the gradient (2NV). With `in_place` one kernel does both: it reads a row twice, the second time from the last block to
the first because those are the likeliest to be in L2 still, and writes the gradient over it. Rows to ignore are not
read. Exponentials are powers of two, with log2(e) folded into the scale of the logits.
"""

from collections.abc import Sequence

import torch

from liger_hw.dispatch import Cost, Function, op, raw
from liger_hw.kernels.cross_entropy.formula import (
    CrossEntropyOutput,
    Formula,
    outcome,
    row_losses,
    terms,
    validate_logits,
)  # fmt: skip
from liger_hw.kernels.cross_entropy.kernels import backward_rows, forward_rows, scale_rows
from liger_hw.kernels.cross_entropy.totals import launch_totals, total

__all__ = ["CrossEntropyOutput", "cross_entropy"]


@op
def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, lse_square_scale: float = 0.0, softcap: float | None = None, logit_scale: float = 1.0,
    reduction: str = "mean", num_items: torch.Tensor | float | None = None, return_z_loss: bool = False,
    return_token_accuracy: bool = False, return_predicted_tokens: bool = False, in_place: bool = False,
):  # fmt: skip
    """`torch.nn.functional.cross_entropy` of class indices, with z-loss, softcap and logit scale.

    Args:
        logits: (N, V), any floating dtype; plain torch computes others than fp32, fp16 and bf16. Any stride between
            rows costs no copy.
        target: (N,) int64 or int32. A value outside [0, V) that is not `ignore_index` makes that row's loss and
            gradient NaN, and so the reduced loss: nothing is read out of bounds, and the host waits for no check.
        weight: (V,) class weights, or None for 1.
        ignore_index: rows with this target have loss 0 and gradient 0, whatever their logits.
        label_smoothing: share of the target's probability spread over all classes (arXiv:1512.00567).
        lse_square_scale: the z-loss `lse_square_scale * logsumexp^2` is added (arXiv:2204.02311, section 5); the class
            weights do not apply to it.
        softcap: logits become `softcap * tanh(logits / softcap)` first (Gemma2ForCausalLM), after `logit_scale`.
        logit_scale: logits are multiplied by it first, in fp32 (CohereForCausalLM).
        reduction: "none", "sum" or "mean" over the rows not ignored. "mean" divides the cross entropy by the sum of
            their class weights, as torch does, and the z-loss by their number; where there are none the loss is 0.
        num_items: number, or tensor of one, that "mean" divides by instead: Hugging Face's `num_items_in_batch`.
        return_z_loss, return_token_accuracy, return_predicted_tokens: also return these.
        in_place: where a gradient is wanted it is made in the forward, over `logits`, which the caller must own: the
            logits are lost and the gradient takes no memory (logits with a column stride are copied first). Under
            torch.compile memory is the compiler's to plan, and this changes nothing.

    Returns:
        The loss in fp32 (fp64 for fp64 logits), () or for "none" (N,); a `CrossEntropyOutput` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range.
        RuntimeError: a second backward through an `in_place` loss.
    """
    validate_logits(logits, target, weight, reduction, num_items)
    formula = Formula.of(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    rows = row_losses(logits, terms(target, weight, reduction, num_items, ignore_index), formula)
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    return outcome(*rows, target, reduction, ignore_index, wanted)


@cross_entropy.cost
def _(logits, *options, in_place=False, **named):
    read = written = logits.nbytes
    done = 4 * logits.numel()
    if in_place:
        return Cost(read, written, done, done)
    return Cost(read, read + written, done, done)


def _empty_rows(logits, z_wanted, predicted_wanted):
    """Loss, z-loss and predicted token of each row; None for what is not wanted."""
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    z_loss = torch.empty_like(loss) if z_wanted else None
    return loss, z_loss, torch.empty_like(loss, dtype=torch.int64) if predicted_wanted else None


def _there(*tensors):
    return [tensor for tensor in tensors if tensor is not None]


def _fake_forward(logits, terms, *options):
    z_wanted, predicted_wanted, reduction, kept = options[-4:]
    loss, z_loss, predicted = _empty_rows(logits, z_wanted, predicted_wanted)
    partition = loss.new_empty(2 * loss.shape[0]) if kept else None
    denominator = loss.new_empty(()) if kept and reduction == "mean" else None
    if reduction != "none":
        loss, z_loss = loss.new_empty(()), loss.new_empty(()) if z_wanted else None
    return _there(loss, z_loss, predicted, denominator, partition)


@raw(_fake_forward)
def _cross_entropy_forward(
    logits: torch.Tensor, terms: Sequence[torch.Tensor | None], ignore_index: int, label_smoothing: float,
    lse_square_scale: float, softcap: float | None, logit_scale: float, z_wanted: bool, predicted_wanted: bool,
    reduction: str, kept: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """Loss, z-loss and predicted tokens, those that are wanted; if `kept`, what the backward needs.

    Under "sum" and "mean" the losses are those of all rows. "mean" is for terms that say not what to divide by: that is
    found beside the losses' sum, and returned before what is kept.
    """
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    loss, z_loss, predicted = _empty_rows(logits, z_wanted, predicted_wanted)
    partition = loss.new_empty(2 * loss.shape[0]) if kept else None
    forward_rows(logits, terms, formula, loss, z_loss, partition, predicted)
    if reduction == "none":
        return _there(loss, z_loss, predicted, partition)
    total_loss = loss.new_empty(())
    sums = total_loss, torch.empty_like(total_loss) if z_wanted else None
    denominator = torch.empty_like(total_loss) if kept and reduction == "mean" else None
    launch_totals(terms[0], None, loss, z_loss, (*sums, denominator, None), ignore_index, reduction == "mean")
    return _there(*sums, predicted, denominator, partition)


def _fake_forward_in_place(logits, terms, *options):
    return _there(*_empty_rows(logits, *options[-2:]))


@raw(_fake_forward_in_place, mutates=["logits"])
def _cross_entropy_forward_in_place(
    logits: torch.Tensor, terms: Sequence[torch.Tensor | None], ignore_index: int, label_smoothing: float,
    lse_square_scale: float, softcap: float | None, logit_scale: float, z_wanted: bool, predicted_wanted: bool,
) -> list[torch.Tensor]:  # fmt: skip
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    loss, z_loss, predicted = _empty_rows(logits, z_wanted, predicted_wanted)
    forward_rows(logits, terms, formula, loss, z_loss, None, predicted, True)
    return _there(loss, z_loss, predicted)


def _empty_gradient(logits, *options):
    """With padded rows where the logits have them, so that both are read and written in whole vectors."""
    (rows, cols), vector = logits.shape, 16 // logits.element_size()
    if cols % vector == 0 or logits.stride(0) % vector:
        return logits.new_empty((rows, cols))
    return logits.new_empty((rows, -(-cols // vector) * vector))[:, :cols]


@raw(_empty_gradient)
def _cross_entropy_backward(
    logits: torch.Tensor, terms: Sequence[torch.Tensor | None], partition: torch.Tensor, dloss: torch.Tensor,
    ignore_index: int, label_smoothing: float, lse_square_scale: float, softcap: float | None, logit_scale: float,
) -> torch.Tensor:  # fmt: skip
    dx = _empty_gradient(logits)
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    backward_rows(logits, terms, formula, partition, dloss, dx)
    return dx


@raw(mutates=["dx"])
def _cross_entropy_scale(dx: torch.Tensor, dloss: torch.Tensor) -> None:
    scale_rows(dx, dloss)


class CrossEntropyFunction(Function):
    """The losses of the rows or, by one small kernel more, their sum or mean."""

    @staticmethod
    def forward(ctx, logits, target, weight, weight_sum, denominator, count, options):
        terms = target, weight, weight_sum, denominator, count
        kept = ctx.needs_input_grad[0]
        outputs = _cross_entropy_forward(logits, terms, *options, kept)
        if kept:  # the compiler traces no list.pop
            *outputs, partition = outputs
            if options[-1] == "mean":
                *outputs, denominator = outputs
                terms = target, None, None, denominator, None
            ctx.save_for_backward(logits, partition, *terms)
            ctx.numbers = options[:-3]
            ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    def backward(ctx, dloss, *_):
        logits, partition, *terms = ctx.saved_tensors
        dx = _cross_entropy_backward(logits, terms, partition, dloss, *ctx.numbers)
        return dx, None, None, None, None, None, None


class CrossEntropyInPlaceFunction(Function):
    """As above, with the gradient made in the forward, in the place of the logits."""

    @staticmethod
    def forward(ctx, logits, target, weight, weight_sum, denominator, count, options):
        terms = target, weight, weight_sum, denominator, count
        loss, *others = _cross_entropy_forward_in_place(logits, terms, *options[:-1])
        torch.autograd.graph.increment_version(logits)  # whoever saved the logits for a backward must hear of it
        ctx.dx = logits.detach()
        loss = loss if options[-1] == "none" else total(loss)
        ctx.mark_non_differentiable(*others)
        return loss, *others

    @staticmethod
    def backward(ctx, dloss, *_):
        if ctx.dx is None:
            raise RuntimeError(
                "cross_entropy(in_place=True) keeps its gradient in the place of the logits, and a first backward has "
                "taken it: a second one, and a gradient of the gradient, need in_place=False"
            )
        dx, ctx.dx = ctx.dx, None
        _cross_entropy_scale(dx, dloss)
        return dx, None, None, None, None, None, None


@cross_entropy.register("triton")
def _(
    logits, target, weight=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None,
    logit_scale=1.0, reduction="mean", num_items=None, return_z_loss=False, return_token_accuracy=False,
    return_predicted_tokens=False, in_place=False,
):  # fmt: skip
    validate_logits(logits, target, weight, reduction, num_items)
    formula = Formula.of(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    rows, cols = logits.shape
    row_stride, stride = logits.stride()
    if (cols > 1 and stride != 1) or (rows > 1 and row_stride < cols):
        logits = logits.contiguous()
    in_place = in_place and logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    # a gradient made in the forward must know what it is divided by; otherwise that is found with the losses' sum
    divided_last = reduction == "mean" and weight is None and num_items is None and not in_place
    row_terms = terms(target.contiguous(), weight, "sum" if divided_last else reduction, num_items, ignore_index, True)
    summed = "sum" if reduction == "mean" and not divided_last else reduction
    predicted_wanted = return_predicted_tokens or return_token_accuracy
    options = *formula[:-1], return_z_loss, predicted_wanted, summed
    function = CrossEntropyInPlaceFunction if in_place else CrossEntropyFunction
    loss, *others = function.apply(logits, *row_terms, options)
    if not others:
        return loss
    z_loss, predicted = others[0], others[-1]  # what is not wanted is not looked at
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    return outcome(loss, z_loss, predicted, target, reduction, ignore_index, wanted)
