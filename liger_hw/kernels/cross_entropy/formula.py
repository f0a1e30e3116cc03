"""What the two cross-entropy ops share: the loss of a row by definition, its options, and what the caller gets."""

from typing import NamedTuple

import torch

from liger_hw.checks import check, refuse
from liger_hw.dispatch import widen
from liger_hw.kernels.cross_entropy.totals import divisors
from liger_hw.spelling import check_known

REDUCTIONS = ("none", "sum", "mean")
TARGET_DTYPES = (torch.int64, torch.int32)


class CrossEntropyOutput(NamedTuple):
    """What the loss functions return when anything beside the loss is asked for; what was not is None.

    Attributes:
        loss: as without it; contains the z-loss.
        z_loss: the z-loss alone, reduced like the loss; for logging, no gradient.
        token_accuracy: share of the rows not ignored whose largest logit is the target's; by row under "none".
        predicted_tokens: (N,) int64, the column of each row's largest logit, -1 where the row is ignored.
    """

    loss: torch.Tensor
    z_loss: torch.Tensor | None = None
    token_accuracy: torch.Tensor | None = None
    predicted_tokens: torch.Tensor | None = None


class Formula(NamedTuple):
    """The numbers in the loss of a row, in the order in which raw functions and kernels take them."""

    ignore_index: int
    label_smoothing: float
    lse_square_scale: float
    softcap: float | None
    logit_scale: float
    token_scaling: bool = False

    @classmethod
    def of(cls, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, token_scaling=False):
        """From a caller's numbers; raises ValueError for those that are out of range."""
        check(0 <= label_smoothing <= 1, "label_smoothing", label_smoothing, "0 to 1")
        check(softcap is None or softcap > 0, "softcap", softcap, "None or a positive number")
        softcap = None if softcap is None else float(softcap)
        smoothing, square = float(label_smoothing), float(lse_square_scale)
        return cls(int(ignore_index), smoothing, square, softcap, float(logit_scale), bool(token_scaling))


class Terms(NamedTuple):
    """The tensors in the loss of a row beside its logits, in the order in which raw functions and kernels take them.

    Attributes:
        target: (N,). weight: (V,) class weights. weight_sum: their sum.
        denominator: what divides the losses, and the z-losses too where count is None.
        count: what divides the z-losses.
    """

    target: torch.Tensor
    weight: torch.Tensor | None
    weight_sum: torch.Tensor | None
    denominator: torch.Tensor | None
    count: torch.Tensor | None


def validate(names, rows, vocabulary, like, target, weight, reduction, num_items):
    """Refuse what neither loss function can compute. `names` are their arguments that `like` and `weight` came as."""
    if not (target.dtype in TARGET_DTYPES and target.shape == (rows,) and target.device == like.device):
        refuse("target", target, f"int64 or int32 of shape ({rows},) on {like.device}, one for each row of {names[0]}")
    if weight is not None:
        fits = weight.shape == (vocabulary,) and weight.is_floating_point() and weight.device == like.device
        check(fits, names[1], weight, f"floating point of shape ({vocabulary},) on {like.device}")
    check_known("reduction", reduction, REDUCTIONS)
    if num_items is not None:
        check(reduction == "mean", "num_items", num_items, "None, unless reduction is 'mean'")
        fits = not torch.is_tensor(num_items) or num_items.numel() == 1
        check(fits, "num_items", num_items, "a number, or a tensor of one")


def validate_logits(logits, target, weight, reduction, num_items):
    check(logits.ndim == 2 and logits.is_floating_point() and logits.shape[1] > 0, "logits", logits, "floats (N, V)")
    validate(("logits", "weight"), *logits.shape, logits, target, weight, reduction, num_items)


def terms(target, weight, reduction, num_items, ignore_index, with_kernels=False) -> Terms:
    """The tensors a row's loss needs, made on the device: the host waits for nothing."""
    weight_sum = denominator = count = None
    if weight is not None:
        weight = weight.detach().contiguous()  # kernels read it value after value
        weight_sum = widen(weight).sum()
    if num_items is not None:
        if torch.is_tensor(num_items):
            denominator = num_items.to(target.device, torch.float32).reshape(())
        else:
            denominator = torch.full((), num_items, dtype=torch.float32, device=target.device)
    elif reduction == "mean" and with_kernels:
        denominator, *counts = divisors(target, weight, ignore_index)
        count = counts[0] if counts else None
    elif reduction == "mean":
        counted = target != ignore_index
        denominator = counted.sum().clamp(min=1)
        if weight is not None:
            count = denominator
            of_targets = widen(weight)[target.long().clamp(0, weight.shape[0] - 1)]
            denominator = torch.where(counted, of_targets, 0).sum()
            denominator = torch.where(denominator == 0, 1, denominator)
    return Terms(target, weight, weight_sum, denominator, count)


def outcome(loss, z_loss, predicted, target, reduction, ignore_index, wanted):
    """What the caller asked for, of rows' losses (or their sum) divided already: the loss, or a CrossEntropyOutput."""
    z_wanted, accuracy_wanted, predicted_wanted = wanted
    if reduction != "none" and loss.ndim:
        loss = loss.sum()
    if not any(wanted):
        return loss
    accuracy = None
    if accuracy_wanted:
        counted = target != ignore_index
        accuracy = ((predicted == target) & counted).float()
        accuracy = accuracy if reduction == "none" else accuracy.sum() / counted.sum().clamp(min=1)
    if z_wanted and reduction != "none" and z_loss.ndim:
        z_loss = z_loss.sum()
    return CrossEntropyOutput(loss, z_loss if z_wanted else None, accuracy, predicted if predicted_wanted else None)


def row_losses(logits, terms, formula):
    """The definition: loss and z-loss of every row, divided as its terms say, and the predicted tokens."""
    target, weight, weight_sum, denominator, count = terms
    vocabulary, e = logits.shape[1], formula.label_smoothing
    ignored = target == formula.ignore_index
    outside = ~ignored & ((target < 0) | (target >= vocabulary))
    y = torch.where(ignored | outside, 0, target).long()
    scaled = widen(logits).masked_fill(ignored[:, None], 0) * formula.logit_scale
    z = scaled if formula.softcap is None else formula.softcap * torch.tanh(scaled / formula.softcap)
    log_p = torch.log_softmax(z, -1)
    log_p_y = log_p.gather(1, y[:, None])[:, 0]
    loss = -(1 - e) * log_p_y if weight is None else -(1 - e) * widen(weight)[y] * log_p_y
    if e:
        loss = loss - e / vocabulary * (log_p if weight is None else log_p * widen(weight)).sum(-1)
    z_loss = formula.lse_square_scale * torch.logsumexp(z, -1).square()
    if denominator is not None:
        loss, z_loss = loss / denominator, z_loss / (denominator if count is None else count)
    if formula.token_scaling:
        p_y = log_p_y.detach().exp()
        loss, z_loss = loss * p_y, z_loss * p_y
    loss = torch.where(ignored, 0, (loss + z_loss) * torch.where(outside, float("nan"), 1.0).to(loss.dtype))
    predicted = torch.where(ignored, -1, scaled.argmax(-1))
    return loss, torch.where(ignored, 0, z_loss).detach(), predicted
