"""Losses over preferred and dispreferred answers; `preference_formulas` has the formulas.

`preference_loss` takes pairs, `unpaired_preference_loss` single answers with a label. If a loss depends on its own pair
(or answer) alone, the forward computes the gradients pair by pair (`sequence_loss`). If it depends on the whole batch,
the backward recomputes the logits.
"""

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple, get_args

import torch

from liger_hw.checks import check, names_arguments
from liger_hw.kernels.vocabulary.cross_entropy.formula import check_labels
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax
from liger_hw.losses.arguments import check_head, check_numbers, prepare_reference
from liger_hw.losses.engine import CHUNK_MEMORY
from liger_hw.losses.preference_formulas import (
    PAIR_LOSSES,
    UNPAIRED_LOSSES,
    Answers,
    Pairs,
    needs_whole_batch,
)
from liger_hw.losses.sequences import sequence_loss, token_loss
from liger_hw.spelling import check_known


class PreferenceOutput(NamedTuple):
    """Output of `preference_loss`; only the loss has a gradient, the others are for logging.

    Attributes:
        loss: mean over the pairs, plus alpha times the NLL. ().
        chosen_log_probs, rejected_log_probs: of each answer, (P,).
        chosen_logits_mean, rejected_logits_mean: over all positions and the whole vocabulary. ().
        nll_loss: mean negative log-probability of the chosen answers' tokens. (). 0 if alpha is 0.
        chosen_rewards, rejected_rewards: beta times the log-ratio to the reference model, (P,).
    """

    loss: torch.Tensor
    chosen_log_probs: torch.Tensor
    rejected_log_probs: torch.Tensor
    chosen_logits_mean: torch.Tensor
    rejected_logits_mean: torch.Tensor
    nll_loss: torch.Tensor
    chosen_rewards: torch.Tensor
    rejected_rewards: torch.Tensor


class UnpairedPreferenceOutput(NamedTuple):
    """Output of `unpaired_preference_loss`; only the loss has a gradient.

    Attributes:
        loss: mean over the answers. Others: sums, (), over chosen and rejected answers; rewards: beta log-ratio.
    """

    loss: torch.Tensor
    chosen_log_probs_sum: torch.Tensor
    rejected_log_probs_sum: torch.Tensor
    chosen_logits_sum: torch.Tensor
    rejected_logits_sum: torch.Tensor
    chosen_rewards_sum: torch.Tensor
    rejected_rewards_sum: torch.Tensor


def _answers(token_log_probs, labels, ignore_index, average):
    """Compute each answer's log-probability, (R, T) -> (R,); 0 for an answer without tokens."""
    total = token_log_probs.sum(-1)
    return total / (labels != ignore_index).sum(-1).clamp(min=1) if average else total


def _logits_sums(x, weight, bias, *groups):
    """Sum each group's logits over positions and vocabulary: x (R, T, H) -> () each.

    The sum of x W^T over rows and columns is the sum of x over rows times the sum of W over rows: no logits.
    """
    with torch.no_grad():
        wide = torch.promote_types(x.dtype, torch.float32)
        column, constant = weight.sum(0, dtype=wide), 0.0 if bias is None else bias.sum(dtype=wide)
        sequences = (x.sum(1, dtype=wide) * column).sum(-1) + x.shape[1] * constant
        return [(sequences * group).sum() for group in groups]


def _reference(x, labels, average, options, ref_x, ref_weight, ref_bias, ref_log_probs):
    """Return the reference model's log-probabilities of the answers, (R,)."""
    rows = labels.shape[:1]
    for name, value in {"ref_weight": ref_weight, "ref_bias": ref_bias}.items():
        check(value is None or ref_x is not None, name, value, "None without ref_x")
    if ref_log_probs is not None:
        fits = torch.is_tensor(ref_log_probs) and ref_log_probs.shape == rows and ref_x is None
        check(fits, "ref_log_probs", ref_log_probs, f"shape {tuple(rows)}, one for each answer, and no ref_x beside it")
        return ref_log_probs.detach()
    if ref_x is None:
        return torch.zeros(rows, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    with torch.no_grad():
        ref_x, ref_weight, ref_bias = prepare_reference(ref_x, ref_weight, ref_bias, "labels", labels, **options)
        token_log_probs = fused_linear_selective_log_softmax(ref_x, ref_weight, labels, ref_bias, **options)
        return _answers(token_log_probs, labels, options["ignore_index"], average)


def _check_answers(x, weight, labels, ignore_index):
    check(x.ndim == 3, "x", x, "floats (answers, T, H)")
    check_head(x, weight)
    check(labels.shape == x.shape[:2], "labels", labels, f"shape {tuple(x.shape[:2])}, one for each position of x")
    check_labels("labels", labels, len(weight), ignore_index)


@names_arguments
def preference_loss(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None,
    loss_type: str | Callable = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0, alpha: float = 0.0,
    average_log_prob: bool | None = None, ref_x: torch.Tensor | None = None, ref_weight: torch.Tensor | None = None,
    ref_bias: torch.Tensor | None = None, ref_log_probs: torch.Tensor | None = None,
    nll_labels: torch.Tensor | None = None, ignore_index: int = -100, chunk_memory: float = CHUNK_MEMORY,
    **loss_options,
):  # fmt: skip
    """Compute the mean loss of P pairs plus `alpha` times the chosen answers' NLL.

    Args:
        x: (2P, T, H) hidden states, the chosen answers first, then the rejected ones in the same order.
        weight: (V, H). bias: (V,) or None.
        labels: (2P, T), the token that each position predicts (already shifted), `ignore_index` outside the answer.
        loss_type: a name of `PAIR_LOSSES`, or a function like those, (`Pairs`, beta, label_smoothing) -> (P,). A pair's
            loss must not depend on other pairs unless the function's attribute `whole_batch` is true (see
            `@pair_loss`).
        beta: weight of the log-ratio; more than 0.
        label_smoothing: probability that a pair's order is wrong: 0 to 0.5, more than 0 for "exo_pair" and less than
            0.5 for "robust". These two, "sigmoid", "simpo", "aot" and "aot_pair" use it; the others take 0 alone.
        alpha: weight of the NLL.
        average_log_prob: average an answer's token log-probabilities instead of summing them. Default: for "simpo" and
            "orpo", as they are defined.
        ref_x, ref_weight, ref_bias: the reference model's hidden states (2P, T, H') and head; no gradient. "simpo" and
            "orpo" take no reference.
        ref_log_probs: (2P,) instead of these. Without either the reference's log-probabilities are 0.
        nll_labels: (2P, T) or (P, T) labels for the NLL if they differ from `labels` (ORPO's include the prompt).
        chunk_memory: bytes that a chunk of logits may take.
        loss_options: of the loss type, in `preference_formulas`: `gamma` of "simpo", `tau` of "discopop", `delta` of
            "bco_pair".

    Returns:
        A `PreferenceOutput`.

    Raises:
        ValueError: an odd number of answers, shapes that do not fit, an unknown loss type or option out of range; on a
            CPU, a label outside the vocabulary (elsewhere the loss is then NaN).
        RuntimeError: a second backward, except for a loss of the whole batch: "aot", "aot_pair", and "bco_pair" without
            `delta`.
    """
    _check_answers(x, weight, labels, ignore_index)
    check(x.shape[0] % 2 == 0 and x.shape[0] > 0, "x", x, "an even number of answers: chosen, then rejected")
    formula, whole_batch = _formula(PAIR_LOSSES, loss_type, beta, loss_options, preference_loss)
    smooths = getattr(formula.func, "smooths", True)
    allowed = "0 to 0.5" if smooths else f"0, as {loss_type} has no smoothing"
    check_numbers(allowed, least=0, most=0.5 if smooths else 0, label_smoothing=label_smoothing)
    check_numbers(alpha=alpha)
    reference_free = getattr(formula.func, "reference_free", False)
    average_log_prob = reference_free if average_log_prob is None else average_log_prob
    for name, value in {"ref_x": ref_x, "ref_log_probs": ref_log_probs}.items():
        check(value is None or not reference_free, name, value, f"None: {loss_type} has no reference model")
    pairs, options = x.shape[0] // 2, {"ignore_index": ignore_index, "chunk_memory": chunk_memory}
    reference = _reference(x, labels, average_log_prob, options, ref_x, ref_weight, ref_bias, ref_log_probs)
    by_pair, labels_by_pair = reference.reshape(2, pairs), labels.reshape(2, pairs, -1)
    nll_items = (labels_by_pair[0] != ignore_index).sum().clamp(min=1)
    nll_weight = alpha if nll_labels is None else 0.0

    def pair_sum(log_probs, entropy, groups):
        policy = _answers(log_probs, labels_by_pair[:, groups], ignore_index, average_log_prob)
        losses = formula(Pairs(*policy, *by_pair[:, groups]), beta, label_smoothing)
        value = losses.sum() / pairs
        return value - nll_weight * log_probs[0].sum() / nll_items if nll_weight else value

    loss, token_log_probs = _grouped_loss(pair_sum, whole_batch, x, weight, labels, bias, 2, options)
    nll = torch.zeros_like(loss.detach())
    if alpha and nll_labels is None:
        nll = -token_log_probs[:pairs].sum() / nll_items
    elif alpha:
        fits = nll_labels.ndim == 2 and nll_labels.shape[0] >= pairs and nll_labels.shape[1] == labels.shape[1]
        check(fits, "nll_labels", nll_labels, f"shape {tuple(labels.shape)} or its first half")
        check_labels("nll_labels", nll_labels, len(weight), ignore_index)
        chosen = nll_labels[:pairs].reshape(-1)
        total = token_loss(_negative, x[:pairs].reshape(-1, x.shape[-1]), weight, chosen, bias, **options)[0]
        nll = total / (chosen != ignore_index).sum().clamp(min=1)
        loss = loss + alpha * nll
    answers = Pairs(*_answers(token_log_probs, labels, ignore_index, average_log_prob).split(pairs), *by_pair)
    is_chosen = torch.arange(2 * pairs, device=x.device) < pairs
    sums = _logits_sums(x.detach(), weight.detach(), bias if bias is None else bias.detach(), is_chosen, ~is_chosen)
    means = (total / (pairs * x.shape[1] * weight.shape[0]) for total in sums)
    logged = answers.chosen, answers.rejected, *means, nll, beta * answers.c, beta * answers.r
    return PreferenceOutput(loss, *(value.detach() for value in logged))


@names_arguments
def unpaired_preference_loss(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, preferred: torch.Tensor,
    bias: torch.Tensor | None = None, loss_type: str | Callable = "kto", beta: float = 0.1,
    average_log_prob: bool = False, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
    ref_x: torch.Tensor | None = None, ref_weight: torch.Tensor | None = None, ref_bias: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None, ignore_index: int = -100, chunk_memory: float = CHUNK_MEMORY,
    **loss_options,
):  # fmt: skip
    """Compute the mean loss of B answers, each labelled preferred or not.

    Args:
        preferred: (B,) bool.
        loss_type: "kto" or "bco", or a function like those, (`Answers`, beta) -> (R,).
        desirable_weight, undesirable_weight: weights of preferred and other answers, the lambdas of KTO.
        loss_options: `kl` of "kto", `delta` of "bco": numbers, or tensors of one value.
        others: as in `preference_loss`, with B in place of 2P, in any order.

    Returns:
        An `UnpairedPreferenceOutput`.

    Raises:
        ValueError, RuntimeError: as `preference_loss`; "bco" without `delta` allows a second backward.
    """
    _check_answers(x, weight, labels, ignore_index)
    check(x.shape[0] > 0, "x", x, "at least one answer")
    fits = torch.is_tensor(preferred) and preferred.dtype == torch.bool and preferred.shape == labels.shape[:1]
    check(fits, "preferred", preferred, f"bool of shape ({x.shape[0]},), one for each answer")
    check_numbers("0 or more", least=0, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    formula, whole_batch = _formula(UNPAIRED_LOSSES, loss_type, beta, loss_options, unpaired_preference_loss)
    options = {"ignore_index": ignore_index, "chunk_memory": chunk_memory}
    reference = _reference(x, labels, average_log_prob, options, ref_x, ref_weight, ref_bias, ref_log_probs)
    factors = torch.full_like(reference, undesirable_weight).masked_fill(preferred, desirable_weight) / len(x)

    def answer_sum(log_probs, entropy, groups):
        policy = _answers(log_probs[0], labels[groups], ignore_index, average_log_prob)
        losses = formula(Answers(policy, reference[groups], preferred[groups]), beta)
        return (losses * factors[groups]).sum()

    loss, token_log_probs = _grouped_loss(answer_sum, whole_batch, x, weight, labels, bias, 1, options)
    policy = _answers(token_log_probs, labels, ignore_index, average_log_prob)
    rewards = beta * (policy - reference)
    logits = _logits_sums(x.detach(), weight.detach(), bias if bias is None else bias.detach(), preferred, ~preferred)
    log_probs = [(policy * group).sum() for group in (preferred, ~preferred)]
    return UnpairedPreferenceOutput(loss, *log_probs, *logits, *((rewards * g).sum() for g in (preferred, ~preferred)))


def _negative(log_probs, entropy):
    return (-log_probs,)


def _grouped_loss(formula, whole_batch, x, weight, labels, bias, parts, options):
    """Compute (loss, detached token log-probabilities), by group unless the loss couples the batch."""
    if not whole_batch:
        return sequence_loss(formula, x, weight, labels, bias, parts, **options)[:2]
    log_probs = fused_linear_selective_log_softmax(x, weight, labels, bias, **options)
    grouped = log_probs.reshape(parts, len(labels) // parts, *labels.shape[1:])
    return formula(grouped, None, slice(None)), log_probs.detach()


def _formula(losses, loss_type, beta, loss_options, function):
    """Return (the loss with its options, whether it couples the batch); check both."""
    if not callable(loss_type):
        check_known("loss_type", loss_type, losses, "Loss types, or a function of that form")
    check_numbers("a positive number", above=0, beta=beta)
    loss = loss_type
    if not callable(loss_type):
        loss, known = losses[loss_type], losses[loss_type].options
        for name, value in loss_options.items():
            if name not in known:
                arguments = inspect.signature(function).parameters
                check_known("option", name, known, f"Options of {loss_type}", others=arguments)
            kinds = get_args(known[name].annotation)
            is_scalar = torch.Tensor in kinds and torch.is_tensor(value) and value.numel() == 1
            if not is_scalar and not (type(None) in kinds and value is None):
                check_numbers("a number" + ", or a tensor of one" * (torch.Tensor in kinds), **{name: value})
    return functools.partial(loss, **loss_options), needs_whole_batch(loss, loss_options)
