"""Define the cross entropy of a row, its options and its outputs for both ops.

`call` is a named tuple of all arguments of one of the two ops.
"""

import math
import numbers
from typing import NamedTuple

import torch

from liger_hw._torch import is_dtensor, traced
from liger_hw._triton import interpreting
from liger_hw.backends import forced
from liger_hw.checks import check, check_constants, refuse
from liger_hw.dispatch import widen
from liger_hw.kernels.vocabulary._autograd import rows_by_autograd
from liger_hw.kernels.vocabulary._fp16 import largest_finite
from liger_hw.kernels.vocabulary.cross_entropy.totals import divisors
from liger_hw.spelling import check_known

REDUCTIONS = ("none", "sum", "mean")
TARGET_DTYPES = (torch.int64, torch.int32)
MASKED = -(2**31)  # ignore_index of losses with a mask, which no caller's token has


class CrossEntropyOutput(NamedTuple):
    """Output of the loss functions; attributes that no `return_*` asks for are None.

    Attributes:
        loss: the loss, z-loss included.
        z_loss: the z-loss alone, reduced like the loss, for logging: it has no gradient.
        token_accuracy: share of the rows not ignored whose largest logit is the target's; by row under "none".
        predicted_tokens: (N,) int64, the column of each row's largest logit, -1 where the row is ignored. Of a row
            with NaN, whose loss is NaN, any column.
        entropy: mean entropy in nats of the rows not ignored, without a gradient; by row under "none".

    Examples:
        >>> logits, labels = torch.rand(3, 10), torch.tensor([1, 2, 3])
        >>> liger_hw.cross_entropy(logits, labels, return_token_accuracy=True).token_accuracy.shape
        torch.Size([])
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None
    entropy: torch.Tensor | None = None


class Formula(NamedTuple):
    """Numbers in the loss of a row, in the order in which kernels take them."""

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float | None
    logit_scale: float
    token_scaling: bool

    @classmethod
    def of(cls, call, token_scaling=False):
        """Take the numbers of a call; raise ValueError for a number out of range."""
        smoothing, softcap = call.label_smoothing, call.softcap
        check(0 <= smoothing <= 1, "label_smoothing", smoothing, "0 to 1")
        check(softcap is None or softcap > 0, "softcap", softcap, "None or a positive number")
        softcap = None if softcap is None else float(softcap)
        square, scale = float(call.lse_square_scale), float(call.logit_scale)
        return cls(int(call.ignore_index), float(smoothing), square, softcap, scale, bool(token_scaling))


class Targets(NamedTuple):
    """Tensors in the loss of a row beside its logits, in the kernels' order.

    Attributes:
        target: (N,). class_weight: (V,). weight_sum: () of the class weights.
        denominator: () divides the losses, and the z-losses too where count is None.
        count: () divides the z-losses.
    """

    target: torch.Tensor
    class_weight: torch.Tensor | None
    weight_sum: torch.Tensor | None
    denominator: torch.Tensor | None
    count: torch.Tensor | None

    @classmethod
    def of(cls, call, class_weight, reduction, with_kernels=False):
        """Make the tensors of a call on its device, without a host wait."""
        target, num_items, weight_sum, denominator, count = call.target.contiguous(), call.num_items, None, None, None
        if class_weight is not None:
            class_weight = class_weight.detach().contiguous()  # kernels read it with unit stride
            weight_sum = widen(class_weight).sum()
        if num_items is not None:
            wide = torch.promote_types(call[0].dtype, torch.float32)
            if torch.is_tensor(num_items):
                denominator = num_items.to(target.device, wide).reshape(())
            else:
                denominator = torch.full((), float(num_items), dtype=wide, device=target.device)
        elif reduction == "mean" and with_kernels:
            denominator, count = divisors(target, class_weight, call.ignore_index)
        elif reduction == "mean":
            counted = target != call.ignore_index
            denominator = counted.sum().clamp(min=1)
            if class_weight is not None:
                count = denominator
                target_weights = widen(class_weight)[target.long().clamp(0, class_weight.shape[0] - 1)]
                denominator = torch.where(counted, target_weights, 0).sum()
                without_weight = torch.where(counted.any(), float("nan"), 1.0)  # NaN as torch's, but 0 of no row
                denominator = torch.where(denominator == 0, without_weight.to(denominator.dtype), denominator)
        return cls(target, class_weight, weight_sum, denominator, count)

    def largest_gradient(self, formula, vocabulary):
        """Bound the gradient of an fp16 logit, () fp32, without a wait for the device."""
        weight = self.class_weight
        loss_bound = torch.ones((), device=self.target.device) if weight is None else largest_finite(weight)
        loss_bound = loss_bound if self.denominator is None else loss_bound / self.denominator.abs()
        lse_bound = 0.0
        if formula.lse_square_scale:
            largest_logit = formula.softcap or abs(formula.logit_scale) * torch.finfo(torch.float16).max
            lse_bound = 2 * abs(formula.lse_square_scale) * (largest_logit + math.log(vocabulary))
            count = self.denominator if self.count is None else self.count
            lse_bound = lse_bound if count is None else lse_bound / count.abs()
        return (loss_bound + lse_bound) * abs(formula.logit_scale)

    def times(self, factor):
        """Return targets that make losses and gradients `factor` () times as large."""
        count = None if self.count is None else self.count / factor
        denominator = 1 / factor if self.denominator is None else self.denominator / factor
        return self._replace(denominator=denominator, count=count)


def check_labels(name, labels, classes, ignore_index):
    """Refuse labels that are not integers and, on a CPU, labels outside the vocabulary.

    Elsewhere, and in a compiled graph, a label outside makes the loss NaN.
    """
    check(labels.dtype in TARGET_DTYPES, name, labels, "int64 or int32")
    if labels.device.type != "cpu" or traced(labels):
        return
    outside = labels[(labels != ignore_index) & ((labels < 0) | (labels >= classes))]
    allowed = f"0 to {classes - 1}" + f", or {ignore_index} to ignore" * (ignore_index != MASKED)
    check(outside.numel() == 0, name, outside[:1].tolist(), allowed)


def check_ignore_index(ignored, dtype):
    """Refuse an ignored label that labels of `dtype` cannot have."""
    integers = torch.iinfo(dtype)
    fits = isinstance(ignored, numbers.Integral) and not isinstance(ignored, bool)
    fits = torch.is_tensor(ignored) or fits and integers.min <= ignored <= integers.max
    if not fits:  # not check(), whose text Dynamo cannot make of a symbol
        refuse("ignore_index", repr(ignored), f"an integer that {dtype} holds, as the labels")


def check_op_labels(name, labels, classes, ignore_index):
    """Apply `check_labels`, but not to a backend forced in the interpreter, whose kernels write NaN."""
    if not (interpreting() and forced()):
        check_labels(name, labels, classes, ignore_index)


def check_counted_rows(bound, target, ignore_index):
    """Refuse a bound that is no number of rows or, on a CPU, too small."""
    fits = bound is None or isinstance(bound, numbers.Integral) and not isinstance(bound, bool) and bound >= 0
    check(fits, "counted_rows", repr(bound), "None or a number of rows")
    if bound is not None and target.device.type == "cpu" and not traced(target) and not is_dtensor(target):
        count = int((target != ignore_index).sum())
        check(bound >= count, "counted_rows", bound, f"at least the {count} rows whose target is not {ignore_index}")


def counted_first(bound, target, ignore_index, *rows):
    """Take at most `bound` rows, those that count first; return a factor, target and rows.

    Args:
        bound: `counted_rows` of the caller, or None. The factor of the loss is NaN where more rows count.
        rows: tensors with a row for each target (N,), or None.
    """
    check_counted_rows(bound, target, ignore_index)
    if bound is None or bound >= len(target):
        return 1.0, target, *rows
    counts = target != ignore_index
    order = torch.argsort((~counts).to(torch.uint8), stable=True)[:bound]
    factor = torch.where(counts.sum() > bound, float("nan"), 1.0)
    return factor, *(row if row is None else row.index_select(0, order) for row in (target, *rows))


def scatter_rows(values, order, rows, fill=0):
    """Return `rows` values by row: those of `counted_first` at their places, `fill` elsewhere."""
    return values.new_full((rows, *values.shape[1:]), fill).index_copy(0, order, values)


def check_accum_dtype(accum_dtype):
    check(accum_dtype in (None, torch.float32), "accum_dtype", accum_dtype, "None or torch.float32")


def prepare_token_weights(token_weights, target, ignore_index, dtype):
    """Return checked weights (N,) in `dtype`, 0 for ignored rows; None stays None."""
    if token_weights is None:
        return None
    check_token_weights(token_weights, target.shape)
    check(token_weights.device == target.device, "token_weights", token_weights, f"numbers on {target.device}")
    return token_weights.to(dtype).masked_fill(target == ignore_index, 0).contiguous()


def check_token_weights(weights, shape):
    """Refuse weights of tokens that do not fit, or that need a gradient."""
    fits = torch.is_tensor(weights) and weights.shape == shape and not weights.is_complex()
    check(fits, "token_weights", weights, f"None, or numbers of shape {tuple(shape)}")
    check_constants(token_weights=weights)


def weighted(row_weights, *losses):
    """Multiply each row's losses by its weight."""
    return losses if row_weights is None else [loss * row_weights.to(loss.dtype) for loss in losses]


def check_call(call, rows_name, weight_name, vocabulary):
    """Refuse arguments that neither op can compute; errors use the names of the caller's arguments."""
    rows, target = getattr(call, rows_name), call.target
    class_weight, num_items = getattr(call, weight_name), call.num_items
    count, device = rows.shape[0], rows.device
    if not (target.dtype in TARGET_DTYPES and target.shape == (count,) and target.device == device):
        refuse("target", target, f"int64 or int32 of shape ({count},) on {device}, one for each row of {rows_name}")
    check_ignore_index(call.ignore_index, target.dtype)
    check_op_labels("target", target, vocabulary, call.ignore_index)
    if class_weight is not None:
        fits = class_weight.shape == (vocabulary,) and class_weight.is_floating_point()
        fits = fits and class_weight.device == device
        check(fits, weight_name, class_weight, f"floating point of shape ({vocabulary},) on {device}")
        check_constants(**{weight_name: class_weight})
    check_known("reduction", call.reduction, REDUCTIONS)
    if num_items is not None:
        check(call.reduction == "mean", "num_items", num_items, "None, unless reduction is 'mean'")
        fits = num_items.numel() == 1 if torch.is_tensor(num_items) else isinstance(num_items, numbers.Real)
        check(fits, "num_items", num_items, "a number, or a tensor of one")


def shard_rows(call, rows_name, weight_name, **rule):
    """Return the call and its rule for DTensors whose rows are sharded.

    The divisor of a mean is that of all ranks. Rows stay whole where a rank's mean of them cannot be added to others'.
    """
    weighted_mean = call.reduction == "mean" and call.num_items is None and getattr(call, weight_name) is not None
    means = call.return_token_accuracy or getattr(call, "return_entropy", False)
    n = "N" if weighted_mean or means and call.reduction != "none" else "n"
    if call.reduction == "mean" and is_dtensor(call.target) and call.num_items is None and not weighted_mean:
        call = call._replace(num_items=(call.target != call.ignore_index).sum().full_tensor().clamp(min=1))
    row_dims = n if call.reduction == "none" else ""
    rule |= {"target": n, weight_name: "V", "returns": (row_dims, row_dims, row_dims, n, row_dims)}
    return call, {rows_name: f"{n} {'V' if rows_name == 'logits' else 'H'}"} | rule


def mean_over_labels(rows, counted):
    """Return the mean of the rows that count; the others are 0."""
    return rows.sum() / counted.sum().clamp(min=1)


def output_of(call, loss, z_loss, predicted, entropy=None):
    """Return a call's loss, or a CrossEntropyOutput; `loss` may hold rows or a total.

    Args:
        entropy: (N,), 0 where the row is ignored, or None where the call asks for none.
    """
    by_row = call.reduction == "none"
    if not by_row and loss.ndim:
        loss = loss.sum()
    asked = call.return_z_loss, call.return_token_accuracy, call.return_predicted_tokens, entropy is not None
    if not any(asked):
        return loss
    counted, accuracy = call.target != call.ignore_index, None

    def reduced(rows):
        return rows if by_row or rows is None else mean_over_labels(rows, counted)

    if call.return_token_accuracy:
        accuracy = reduced(((predicted == call.target) & counted).float())
    if call.return_z_loss and not by_row and z_loss.ndim:
        z_loss = z_loss.sum()
    return CrossEntropyOutput(
        loss, z_loss if call.return_z_loss else None, accuracy, predicted if call.return_predicted_tokens else None,
        reduced(entropy),
    )  # fmt: skip


def row_losses(logits, targets, formula, predict=True):
    """Define each row's loss and z-loss, divided by the denominators, and predicted token or None."""
    target, class_weight, _, denominator, count = targets
    vocabulary, e = logits.shape[1], formula.label_smoothing
    ignored = target == formula.ignore_index
    outside = ~ignored & ((target < 0) | (target >= vocabulary))
    y = torch.where(ignored | outside, 0, target).long()
    scaled = widen(logits).masked_fill(ignored[:, None], 0)
    scaled = scaled if formula.logit_scale == 1 else scaled * formula.logit_scale
    z = scaled if formula.softcap is None else formula.softcap * torch.tanh(scaled / formula.softcap)
    log_p = torch.log_softmax(z, -1)
    log_p_y = log_p.gather(1, y[:, None])[:, 0]
    loss = -(1 - e) * log_p_y if class_weight is None else -(1 - e) * widen(class_weight)[y] * log_p_y
    if e:
        loss = loss - e / vocabulary * (log_p if class_weight is None else log_p * widen(class_weight)).sum(-1)
    z_loss = torch.zeros_like(loss)
    if formula.lse_square_scale:
        z_loss = formula.lse_square_scale * torch.logsumexp(z, -1).square()
    if denominator is not None:
        loss, z_loss = loss / denominator, z_loss / (denominator if count is None else count)
    if formula.token_scaling:
        p_y = log_p_y.detach().exp()
        loss, z_loss = loss * p_y, z_loss * p_y
    loss = torch.where(ignored, 0, (loss + z_loss) * torch.where(outside, float("nan"), 1.0).to(loss.dtype))
    predicted = torch.where(ignored, -1, scaled.argmax(-1)) if predict else None
    return loss, torch.where(ignored, 0, z_loss).detach(), predicted


def forward_rows(logits, targets, formula, loss, z_loss, partition, predicted=None, gradient=False):
    """Compute `kernels.forward_rows` without Triton. The backward needs no partition."""

    def rows(logits, part):
        return row_losses(logits, targets._replace(target=targets.target[part]), formula, predicted is not None)

    rows_by_autograd(rows, logits, (loss, z_loss, predicted), (torch.ones_like(loss),) if gradient else None)


def backward_rows(logits, targets, formula, partition, dloss):
    """Compute `kernels.backward_rows` without Triton, over the logits."""

    def rows(logits, part):
        return row_losses(logits, targets._replace(target=targets.target[part]), formula, False)

    rows_by_autograd(rows, logits, (), (dloss,))
