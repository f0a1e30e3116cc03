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
    Terms,
    check_kernel_dtype,
    outcome,
    row_losses,
    terms,
    validate_logits,
)  # fmt: skip
from liger_hw.kernels.cross_entropy.kernels import backward_rows, forward_rows, scale_rows

__all__ = ["CrossEntropyOutput", "cross_entropy"]


@op
def cross_entropy(
    logits, target, weight=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None,
    logit_scale=1.0, reduction="mean", num_items=None, return_z_loss=False, return_token_accuracy=False,
    return_predicted_tokens=False, in_place=False,
):  # fmt: skip
    """`torch.nn.functional.cross_entropy` of class indices, with z-loss, softcap and logit scale.

    Args:
        logits: (N, V), any floating dtype; any stride between rows costs no copy.
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
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range. The kernels take fp32, fp16
            and bf16 logits.
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


def _empty_outputs(logits, terms, *options):
    z_wanted, predicted_wanted = options[-2:]
    loss = logits.new_empty(logits.shape[0], dtype=torch.float32)
    z_loss = loss.new_empty(loss.shape if z_wanted else 0)
    return loss, z_loss, loss.new_empty(loss.shape if predicted_wanted else 0, dtype=torch.int64)


def _forward(logits, terms, formula, wanted, partition, gradient):
    loss, z_loss, predicted = _empty_outputs(logits, terms, *wanted)
    z_wanted, predicted_wanted = wanted
    outputs = loss, z_loss if z_wanted else None, partition, predicted if predicted_wanted else None
    forward_rows(logits, Terms(*terms), formula, *outputs, gradient)
    return loss, z_loss, predicted


def _fake_forward(logits, *options):
    return *_empty_outputs(logits, *options), logits.new_empty(logits.shape[0], 2, dtype=torch.float32)


@raw(_fake_forward)
def _cross_entropy_forward(
    logits: torch.Tensor, terms: Sequence[torch.Tensor | None], ignore_index: int, label_smoothing: float,
    lse_square_scale: float, softcap: float | None, logit_scale: float, z_wanted: bool, predicted_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    partition = logits.new_empty(logits.shape[0], 2, dtype=torch.float32)
    return *_forward(logits, terms, formula, (z_wanted, predicted_wanted), partition, False), partition


@raw(_empty_outputs, mutates=["logits"])
def _cross_entropy_forward_in_place(
    logits: torch.Tensor, terms: Sequence[torch.Tensor | None], ignore_index: int, label_smoothing: float,
    lse_square_scale: float, softcap: float | None, logit_scale: float, z_wanted: bool, predicted_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    return _forward(logits, terms, formula, (z_wanted, predicted_wanted), None, True)


def _empty_gradient(logits, *options):
    """With padded rows where the logits have them, so that both are read and written in whole vectors."""
    cols, vector = logits.shape[1], 16 // logits.element_size()
    stride = cols if logits.stride(0) % vector else -(-cols // vector) * vector
    return logits.new_empty(logits.shape[0], stride)[:, :cols]


@raw(_empty_gradient)
def _cross_entropy_backward(
    logits: torch.Tensor, terms: Sequence[torch.Tensor | None], partition: torch.Tensor, dloss: torch.Tensor,
    ignore_index: int, label_smoothing: float, lse_square_scale: float, softcap: float | None, logit_scale: float,
) -> torch.Tensor:  # fmt: skip
    dx = _empty_gradient(logits)
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    backward_rows(logits, Terms(*terms), formula, partition, dloss, dx)
    return dx


@raw(mutates=["dx"])
def _cross_entropy_scale(dx: torch.Tensor, dloss: torch.Tensor) -> None:
    scale_rows(dx, dloss)


class CrossEntropyFunction(Function):
    """Losses of the rows; a reduction of them hands every row the same gradient, by a stride of 0."""

    @staticmethod
    def forward(ctx, logits, target, weight, weight_sum, denominator, count, options):
        terms = target, weight, weight_sum, denominator, count
        loss, z_loss, predicted, partition = _cross_entropy_forward(logits, terms, *options)
        ctx.save_for_backward(logits, partition, *terms)
        ctx.numbers = options[:-2]
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss, z_loss, predicted

    @staticmethod
    def backward(ctx, dloss, *_):
        logits, partition, *terms = ctx.saved_tensors
        return _cross_entropy_backward(logits, terms, partition, dloss, *ctx.numbers), *[None] * 6


class CrossEntropyInPlaceFunction(Function):
    """As above, with the gradient made in the forward, in the place of the logits."""

    @staticmethod
    def forward(ctx, logits, target, weight, weight_sum, denominator, count, options):
        terms = target, weight, weight_sum, denominator, count
        loss, z_loss, predicted = _cross_entropy_forward_in_place(logits, terms, *options)
        torch.autograd.graph.increment_version(logits)  # whoever saved the logits for a backward must hear of it
        ctx.dx = logits.detach()
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss, z_loss, predicted

    @staticmethod
    def backward(ctx, dloss, *_):
        if ctx.dx is None:
            raise RuntimeError(
                "cross_entropy(in_place=True) keeps its gradient in the place of the logits, and a first backward has "
                "taken it: a second one, and a gradient of the gradient, need in_place=False"
            )
        dx, ctx.dx = ctx.dx, None
        _cross_entropy_scale(dx, dloss)
        return dx, *[None] * 6


@cross_entropy.register("triton")
def _(
    logits, target, weight=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0, softcap=None,
    logit_scale=1.0, reduction="mean", num_items=None, return_z_loss=False, return_token_accuracy=False,
    return_predicted_tokens=False, in_place=False,
):  # fmt: skip
    validate_logits(logits, target, weight, reduction, num_items)
    formula = Formula.of(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale)
    check_kernel_dtype("logits", logits)
    row_terms = terms(target.contiguous(), weight, reduction, num_items, ignore_index)
    rows, cols = logits.shape
    if (cols > 1 and logits.stride(1) != 1) or (rows > 1 and logits.stride(0) < cols):
        logits = logits.contiguous()
    in_place = in_place and logits.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    function = CrossEntropyInPlaceFunction if in_place else CrossEntropyFunction
    options = *formula[:-1], return_z_loss, return_predicted_tokens or return_token_accuracy
    loss, z_loss, predicted = function.apply(logits, *row_terms, options)
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    return outcome(loss, z_loss, predicted, target, reduction, ignore_index, wanted)
