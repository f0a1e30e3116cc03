"""Losses over preferred and dispreferred answers; `preference_formulas` has the formulas.

`preference_loss` takes pairs, `unpaired_preference_loss` single answers with a label. If a loss depends on its own pair
(or answer) alone, the forward computes the gradients pair by pair (`sequence_loss`). If it depends on the whole batch,
the backward recomputes the logits.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import torch

from liger_hw._torch import is_dtensor
from liger_hw.checks import check, names_arguments
from liger_hw.dispatch import widen
from liger_hw.kernels.vocabulary.chunked_head import wide_dtype
from liger_hw.kernels.vocabulary.cross_entropy.formula import check_labels
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax
from liger_hw.losses.arguments import check_head, check_numbers, choose, reference_log_probs
from liger_hw.losses.engine import CHUNK_MEMORY, check_result, detached
from liger_hw.losses.preference_formulas import DIVERGENCES, PAIR_LOSSES, UNPAIRED_LOSSES, Answers, Pairs
from liger_hw.losses.sequences import sequence_loss, token_loss
from liger_hw.spelling import check_known


class PreferenceOutput(NamedTuple):
    """Output of `preference_loss`; only the loss has a gradient, the others are for logging.

    Attributes:
        loss: mean over the pairs, plus alpha times the NLL. ().
        chosen_log_probs, rejected_log_probs: of each answer, (P,).
        chosen_logits_mean, rejected_logits_mean: over all positions and the whole vocabulary, (); None with a softcap.
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


class _Sums(NamedTuple):
    """How the log-probabilities of tokens become those of answers.

    Attributes:
        tokens: their number, (..., R), at least 1.
        weights: of each token, (..., R, T), or None.
        average: divide by the number.
    """

    tokens: torch.Tensor
    weights: torch.Tensor | None
    average: bool

    def answers(self, token_log_probs):
        """Compute the answers' log-probabilities, (..., R, T) -> (..., R); 0 without tokens."""
        total = (token_log_probs if self.weights is None else token_log_probs * self.weights).sum(-1)
        return total / self.tokens if self.average else total

    def select(self, parts, groups):
        """Return those of a slice of the groups, (parts, k, ...)."""
        by_part = (rows if rows is None else rows.unflatten(0, (parts, -1))[:, groups] for rows in self[:2])
        return _Sums(*by_part, self.average)


def _token_weights(labels, ignore_index, ld_alpha, dtype):
    """Return (2P, T) weights of LD-DPO: `ld_alpha` beyond the length of a pair's shorter answer."""
    if ld_alpha is None:
        return None
    valid = labels != ignore_index
    shorter = torch.minimum(*valid.sum(-1).chunk(2)).repeat(2)
    return choose(valid.cumsum(-1) > shorter[:, None], ld_alpha, 1.0, dtype)


def _logits_sums(x, weight, bias, head, *groups):
    """Sum each group's logits over positions and vocabulary: x (R, T, H) -> () each.

    The sum of x W^T over rows and columns is the sum of x over rows times the sum of W over rows: no logits. With a
    softcap there is no such way, and the sums are None.
    """
    if head["softcap"] is not None:
        return [None] * len(groups)
    with torch.no_grad():
        wide = torch.promote_types(x.dtype, torch.float32)
        column, constant = weight.sum(0, dtype=wide), 0.0 if bias is None else bias.sum(dtype=wide)
        if is_dtensor(weight) and not is_dtensor(x):
            column, constant = (t.full_tensor() if is_dtensor(t) else t for t in (column, constant))
        sequences = ((x.sum(1, dtype=wide) * column).sum(-1) + x.shape[1] * constant) * head["logit_scale"]
        return [(sequences * group).sum() for group in groups]


def _reference(x, labels, sums, options, ref_x, ref_weight, ref_bias, ref_log_probs):
    """Return the reference model's log-probabilities of the answers, (R,)."""
    rows = labels.shape[:1]
    for name, value in {"ref_weight": ref_weight, "ref_bias": ref_bias}.items():
        check(value is None or ref_x is not None, name, value, "None without ref_x")
    if ref_log_probs is not None:
        fits = torch.is_tensor(ref_log_probs) and ref_log_probs.shape == rows and ref_x is None
        check(fits, "ref_log_probs", ref_log_probs, f"shape {tuple(rows)}, one for each answer, and no ref_x beside it")
        return widen(ref_log_probs.detach())
    if ref_x is None:
        return torch.zeros(rows, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    return sums.answers(reference_log_probs(ref_x, ref_weight, ref_bias, "labels", labels, options))


def _check_answers(x, weight, labels, ignore_index):
    check(x.ndim == 3, "x", x, "floats (answers, T, H)")
    check_head(x, weight)
    check(labels.shape == x.shape[:2], "labels", labels, f"shape {tuple(x.shape[:2])}, one for each position of x")
    check_labels("labels", labels, len(weight), ignore_index)


@names_arguments
def preference_loss(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, bias: torch.Tensor | None = None,
    loss_type: str | Callable | Sequence = "sigmoid", beta: float = 0.1, label_smoothing: float = 0.0,
    alpha: float = 0.0, average_log_prob: bool | None = None, ref_x: torch.Tensor | None = None,
    ref_weight: torch.Tensor | None = None, ref_bias: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    nll_labels: torch.Tensor | None = None, ignore_index: int = -100, chunk_memory: float = CHUNK_MEMORY,
    loss_weights: Sequence | None = None, f_divergence: str = "reverse_kl", f_alpha: float = 0.5,
    ld_alpha: float | None = None, softcap: float | None = None, logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None, invariant: bool = False, counted_rows: int | None = None,
    accum_dtype: torch.dtype | None = None, **loss_options,
):  # fmt: skip
    """Compute the mean loss of P pairs plus `alpha` times the chosen answers' NLL.

    Args:
        x: (2P, T, H) hidden states, the chosen answers first, then the rejected ones in the same order.
        weight: (V, H). bias: (V,) or None.
        labels: (2P, T), the token that each position predicts (already shifted), `ignore_index` outside the answer.
        loss_type: a name of `PAIR_LOSSES`, or a function like those, (`Pairs`, beta, label_smoothing) -> (P,). A pair's
            loss must not depend on other pairs unless the function's attribute `whole_batch` is true (see
            `@pair_loss`). Or several in a list, whose losses are added.
        beta: weight of the log-ratio; more than 0.
        label_smoothing: probability that a pair's order is wrong: 0 to 0.5, more than 0 for "exo_pair" and less than
            0.5 for "robust". These two, "sigmoid", "sigmoid_norm", "simpo", "aot" and "aot_pair" use it; the others
            take 0 alone.
        alpha: weight of the NLL.
        average_log_prob: average an answer's token log-probabilities instead of summing them. Default: for "simpo" and
            "orpo", as they are defined; a list of these and others needs it.
        ref_x, ref_weight, ref_bias: the reference model's hidden states (2P, T, H') and head; no gradient. "simpo" and
            "orpo" take no reference.
        ref_log_probs: (2P,) instead of these. Without either the reference's log-probabilities are 0.
        nll_labels: (2P, T) or (P, T) labels for the NLL if they differ from `labels` (ORPO's include the prompt).
        chunk_memory: bytes that a chunk of logits may take.
        loss_weights: of the losses in a list; 1 by default.
        f_divergence: "forward_kl", "js_divergence" or "alpha_divergence" (with `f_alpha`, 1 - the paper's alpha)
            instead of the reverse KL (arXiv:2309.16240): the log-ratio log t becomes f'(t). For "sigmoid",
            "sigmoid_norm", "hinge", "ipo", "ipo_norm", "exo_pair", "robust" and "discopop".
        ld_alpha: 0 to 1, the weight of tokens beyond the length of a pair's shorter answer (LD-DPO, arXiv:2409.06411),
            in the reference's log-probabilities, too; not in the NLL. None: 1.
        softcap, logit_scale: of both heads, as in `selective_log_softmax`.
        logits_dtype: of both heads, as in `fused_linear_cross_entropy`.
        invariant: of both heads, as in `sequence_loss`.
        counted_rows: the most labels that are not `ignore_index`, as there, also for the reference model's products;
            the NLL of `nll_labels` keeps all rows. accum_dtype: as there.
        loss_options: of the loss types, in `preference_formulas`: `gamma` of "simpo", `tau` of "discopop", `delta` of
            "bco_pair".

    Returns:
        A `PreferenceOutput`. With a softcap the means of the logits are None.

    Raises:
        ValueError: an odd number of answers, shapes that do not fit, an unknown loss type or option out of range; on a
            CPU, a label outside the vocabulary (elsewhere the loss is then NaN).
        RuntimeError: a second backward, except for a loss of the whole batch: "aot", "aot_pair", and "bco_pair" without
            `delta`.

    Examples:
        >>> hidden, head = torch.rand(4, 5, 8), torch.rand(10, 8)  # two chosen answers, then two rejected
        >>> liger_hw.preference_loss(hidden, head, torch.randint(10, (4, 5)), loss_type="simpo").loss.shape
        torch.Size([])
    """
    _check_answers(x, weight, labels, ignore_index)
    check(x.shape[0] % 2 == 0 and x.shape[0] > 0, "x", x, "an even number of answers: chosen, then rejected")
    mixture = _mixture(PAIR_LOSSES, loss_type, loss_weights, beta, loss_options, preference_loss)
    score = _score(f_divergence, f_alpha, mixture)
    smooths = mixture.any("smooths", True)
    allowed = "0 to 0.5" if smooths else f"0, as {loss_type} has no smoothing"
    check_numbers(allowed, least=0, most=0.5 if smooths else 0, label_smoothing=label_smoothing)
    check_numbers(alpha=alpha)
    check_numbers("0 to 1, or None", least=0, most=1, ld_alpha=1 if ld_alpha is None else ld_alpha)
    reference_free = mixture.any("reference_free", False)
    if average_log_prob is None:
        weighted = [loss for loss, share in zip(mixture.functions, mixture.weights) if share]
        other = [loss for loss in weighted if not mixture.any("averages", False, loss)]
        same = len({mixture.any("reference_free", False, loss) for loss in other}) < 2
        allowed = f"True or False beside {loss_type}, of which some take means and some take sums by themselves"
        check(same, "average_log_prob", None, allowed)
        average_log_prob = reference_free
    for name, value in {"ref_x": ref_x, "ref_log_probs": ref_log_probs}.items():
        check(value is None or not reference_free, name, value, f"None: {loss_type} has no reference model")
    head = _head_options(softcap, logit_scale, logits_dtype, invariant, counted_rows, accum_dtype)
    pairs, options = x.shape[0] // 2, {"ignore_index": ignore_index, "chunk_memory": chunk_memory, **head}
    counts = (labels != ignore_index).sum(-1)
    sums = _Sums(counts.clamp(min=1), _token_weights(labels, ignore_index, ld_alpha, wide_dtype(x)), average_log_prob)
    by_pair = _reference(x, labels, sums, options, ref_x, ref_weight, ref_bias, ref_log_probs).reshape(2, pairs)
    nll_items = counts[:pairs].sum().clamp(min=1)
    nll_weight = alpha if nll_labels is None else 0.0

    def pair_sum(log_probs, entropy, groups):
        group_sums = sums.select(2, groups)
        nll = -log_probs[0].sum(-1) * pairs / nll_items
        tokens = (1, 1) if average_log_prob else group_sums.tokens
        group = Pairs(*group_sums.answers(log_probs), *by_pair[:, groups], nll, *tokens, score)
        total = mixture.sum(group, beta, label_smoothing).sum()
        return (total + nll_weight * nll.sum() if nll_weight else total) / pairs

    loss, token_log_probs = _grouped_loss(pair_sum, mixture, x, weight, labels, bias, 2, options)
    nll = torch.zeros_like(loss.detach())
    if alpha and nll_labels is None:
        nll = -token_log_probs[:pairs].sum() / nll_items
    elif alpha:
        nll = _nll(x[:pairs], weight, nll_labels, labels.shape, bias, options)
        loss = loss + alpha * nll
    answers = Pairs(*sums.answers(token_log_probs).split(pairs), *by_pair)
    is_chosen = torch.arange(2 * pairs, device=x.device) < pairs
    totals = _logits_sums(x, weight, bias, head, is_chosen, ~is_chosen)
    means = (total if total is None else total / (pairs * x.shape[1] * weight.shape[0]) for total in totals)
    logged = answers.chosen, answers.rejected, *means, nll, beta * answers.c, beta * answers.r
    return PreferenceOutput(loss, *detached(logged))


@names_arguments
def unpaired_preference_loss(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, preferred: torch.Tensor,
    bias: torch.Tensor | None = None, loss_type: str | Callable = "kto", beta: float = 0.1,
    average_log_prob: bool = False, desirable_weight: float = 1.0, undesirable_weight: float = 1.0,
    ref_x: torch.Tensor | None = None, ref_weight: torch.Tensor | None = None, ref_bias: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None, ignore_index: int = -100, chunk_memory: float = CHUNK_MEMORY,
    softcap: float | None = None, logit_scale: float = 1.0, logits_dtype: torch.dtype | None = None,
    invariant: bool = False, counted_rows: int | None = None, accum_dtype: torch.dtype | None = None, **loss_options,
):  # fmt: skip
    """Compute the mean loss of B answers, each labelled preferred or not.

    Args:
        preferred: (B,) bool.
        loss_type: "kto", "apo_zero_unpaired" or "bco", or a function like those, (`Answers`, beta) -> (R,).
        desirable_weight, undesirable_weight: weights of preferred and other answers, the lambdas of KTO.
        loss_options: `kl` of "kto", `delta` of "bco": numbers, or tensors of one value.
        others: as in `preference_loss`, with B in place of 2P, in any order.

    Returns:
        An `UnpairedPreferenceOutput`.

    Raises:
        ValueError, RuntimeError: as `preference_loss`; "bco" without `delta` allows a second backward.

    Examples:
        >>> hidden, head, good = torch.rand(2, 5, 8), torch.rand(10, 8), torch.tensor([True, False])
        >>> labels, before = torch.randint(10, (2, 5)), torch.rand(2)
        >>> output = liger_hw.unpaired_preference_loss(hidden, head, labels, good, ref_log_probs=before)
    """
    _check_answers(x, weight, labels, ignore_index)
    check(x.shape[0] > 0, "x", x, "at least one answer")
    fits = torch.is_tensor(preferred) and preferred.dtype == torch.bool and preferred.shape == labels.shape[:1]
    check(fits, "preferred", preferred, f"bool of shape ({x.shape[0]},), one for each answer")
    check_numbers("0 or more", least=0, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    mixture = _mixture(UNPAIRED_LOSSES, loss_type, None, beta, loss_options, unpaired_preference_loss)
    head = _head_options(softcap, logit_scale, logits_dtype, invariant, counted_rows, accum_dtype)
    options = {"ignore_index": ignore_index, "chunk_memory": chunk_memory, **head}
    sums = _Sums((labels != ignore_index).sum(-1).clamp(min=1), None, average_log_prob)
    reference = _reference(x, labels, sums, options, ref_x, ref_weight, ref_bias, ref_log_probs)
    factors = choose(preferred, desirable_weight, undesirable_weight, wide_dtype(x)) / len(x)

    def answer_sum(log_probs, entropy, groups):
        policy = sums.select(1, groups).answers(log_probs)[0]
        losses = mixture.sum(Answers(policy, reference[groups], preferred[groups]), beta)
        return (losses * factors[groups]).sum()

    loss, token_log_probs = _grouped_loss(answer_sum, mixture, x, weight, labels, bias, 1, options)
    policy = sums.answers(token_log_probs)
    rewards = beta * (policy - reference)
    log_probs = [(policy * group).sum() for group in (preferred, ~preferred)]
    logits = _logits_sums(x, weight, bias, head, preferred, ~preferred)
    return UnpairedPreferenceOutput(loss, *log_probs, *logits, *((rewards * g).sum() for g in (preferred, ~preferred)))


def _nll(x, weight, nll_labels, shape, bias, options):
    """Compute the chosen answers' mean NLL by labels of its own."""
    fits = nll_labels.ndim == 2 and nll_labels.shape in (shape, (len(x), shape[1]))
    check(fits, "nll_labels", nll_labels, f"shape {tuple(shape)} or its first half")
    check_labels("nll_labels", nll_labels, len(weight), options["ignore_index"])
    chosen, options = nll_labels[: len(x)].reshape(-1), options | {"counted_rows": None}
    rows = x.reshape(-1, x.shape[-1])
    total = token_loss(lambda log_probs, entropy: (-log_probs,), rows, weight, chosen, bias, **options)[0]
    return total / (chosen != options["ignore_index"]).sum().clamp(min=1)


def _head_options(softcap, logit_scale, logits_dtype, invariant, counted_rows, accum_dtype):
    return {
        "softcap": softcap, "logit_scale": logit_scale, "logits_dtype": logits_dtype, "invariant": invariant,
        "counted_rows": counted_rows, "accum_dtype": accum_dtype,
    }  # fmt: skip


def _grouped_loss(formula, mixture, x, weight, labels, bias, parts, options):
    """Compute (loss, detached token log-probabilities), by group unless the loss couples the batch."""
    if not mixture.any("whole_batch", False):
        return sequence_loss(formula, x, weight, labels, bias, parts, **options)[:2]
    log_probs = fused_linear_selective_log_softmax(x, weight, labels, bias, **options)
    grouped = log_probs.reshape(parts, len(labels) // parts, *labels.shape[1:])
    return formula(grouped, None, slice(None)), log_probs.detach()


class _Mixture(NamedTuple):
    """Losses that are added: functions with their options, and a weight for each."""

    functions: list
    weights: tuple

    def sum(self, answers, *options):
        """Return the weighted sum of the losses of `answers`, `Pairs` or `Answers`."""
        losses = [loss(answers, *options) for loss in self.functions]
        for loss in losses:
            check_result("loss_type", loss, answers[0].shape, "a loss for each pair or answer")
        return sum(weight * loss for loss, weight in zip(losses, self.weights))

    def any(self, attribute, default, *losses):
        """Tell whether one of `losses` (all) has an attribute.

        It may be a function of the options.
        """
        values = [(getattr(loss.func, attribute, default), loss.keywords) for loss in losses or self.functions]
        return any(value(options) if callable(value) else value for value, options in values)


def _mixture(losses, loss_type, loss_weights, beta, loss_options, function):
    """Return the `_Mixture` of one loss type or several; check types, weights and options."""
    check_numbers("a positive number", above=0, beta=beta)
    several = isinstance(loss_type, (list, tuple)) and "loss_weights" in inspect.signature(function).parameters
    types = loss_type if several else [loss_type]
    check(len(types) > 0, "loss_type", loss_type, "one name, or several in a list")
    weights = (1.0,) * len(types) if loss_weights is None else tuple(loss_weights)
    fits = loss_weights is None or several and len(weights) == len(types)
    check(fits, "loss_weights", loss_weights, "a number for each loss type in a list, or None")
    for share in weights:
        check_numbers(loss_weights=share)
    for name in (one for one in types if not callable(one)):
        check_known("loss_type", name, losses, "Loss types, or a function of that form")
    if not several and callable(loss_type):
        return _Mixture([functools.partial(loss_type, **loss_options)], weights)
    functions = [one if callable(one) else losses[one] for one in types]
    known = {name: p for loss in functions for name, p in getattr(loss, "options", {}).items()}
    for name, value in loss_options.items():
        if name not in known:
            arguments = inspect.signature(function).parameters
            check_known("option", name, known, f"Options of {', '.join(map(str, types))}", others=arguments)
        kinds = get_args(known[name].annotation)
        is_scalar = torch.Tensor in kinds and torch.is_tensor(value) and value.numel() == 1
        if not is_scalar and not (type(None) in kinds and value is None):
            check_numbers("a number" + ", or a tensor of one" * (torch.Tensor in kinds), **{name: value})
    with_options = []
    for loss in functions:
        options = {name: value for name, value in loss_options.items() if name in getattr(loss, "options", {})}
        with_options.append(functools.partial(loss, **options))
    return _Mixture(with_options, weights)


def _score(divergence, alpha, mixture):
    """Return the function of log-ratios that a divergence gives."""
    check_known("f_divergence", divergence, DIVERGENCES)
    check_numbers(f_alpha=alpha)
    if divergence != "reverse_kl":
        names = [loss.func.__name__ for loss in mixture.functions if not getattr(loss.func, "by_margin", True)]
        check(not names, "f_divergence", divergence, f"'reverse_kl' with {', '.join(names)}")
    return functools.partial(DIVERGENCES[divergence], alpha=alpha)
