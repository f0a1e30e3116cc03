"""Formulas of the preference losses over log-probabilities of whole answers.

A loss type is one function of `Pairs` under `@pair_loss`, or of `Answers` under `@unpaired_loss`. Its parameters with
a default are its options; their annotations give the types. A pair loss whose third parameter is not called `smoothing`
refuses `label_smoothing`.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import logsigmoid

from liger_hw.checks import check

PAIR_LOSSES, UNPAIRED_LOSSES = {}, {}  # loss_type -> function


def _register(losses, function=None, *, whole_batch=False, reference_free=False, by_margin=False, averages=False):
    """Register a loss type under its name, and set its attributes.

    Args:
        whole_batch: whether a pair's (or an answer's) loss depends on others of the batch; the loss then keeps the
            whole batch's log-probabilities until the backward. Or a function (options given) -> bool.
        reference_free: it is defined of averaged log-probabilities, without a reference model.
        averages: it divides an answer's log-probability by its tokens, if that is a sum.
        by_margin: it reads the log-ratios by `Pairs.margin` alone, so another divergence may replace the KL.
    """
    attributes = {"whole_batch": whole_batch, "reference_free": reference_free}
    attributes |= {"by_margin": by_margin, "averages": averages}
    if function is None:
        return functools.partial(_register, losses, **attributes)
    parameters = inspect.signature(function).parameters
    function.options = {name: p for name, p in parameters.items() if p.default is not p.empty}
    vars(function).update(attributes, smooths="smoothing" in parameters)
    losses[function.__name__] = function
    return function


pair_loss, unpaired_loss = functools.partial(_register, PAIR_LOSSES), functools.partial(_register, UNPAIRED_LOSSES)


LARGEST_EXPONENT = 80  # as in TRL's alpha divergence: fp32 holds its power


def _power_less_1(exponent):
    return torch.expm1(exponent.clamp(max=LARGEST_EXPONENT))


DIVERGENCES = {  # name -> f'(t) as a function of (log t, alpha), arXiv:2309.16240, whose alpha is 1 - alpha here
    "reverse_kl": lambda log_t, alpha: log_t,
    "forward_kl": lambda log_t, alpha: -_power_less_1(-log_t),
    "js_divergence": lambda log_t, alpha: math.log(2) + logsigmoid(log_t),
    "alpha_divergence": lambda log_t, alpha: log_t if alpha == 1 else _power_less_1((alpha - 1) * log_t) / (alpha - 1),
}


class Pairs(NamedTuple):
    """P chosen and rejected answers.

    Attributes:
        chosen, rejected: log-probabilities of the answers, (P,).
        ref_chosen, ref_rejected: the reference model's; 0 without one.
        nll: negative log-probability of the chosen answer's tokens, over the mean number of tokens, (P,).
        chosen_tokens, rejected_tokens: their numbers, (P,); 1 where the log-probabilities are averages already.
        score: a function of a log-ratio: log t, or f'(t) of another divergence.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    ref_chosen: torch.Tensor
    ref_rejected: torch.Tensor
    nll: torch.Tensor | None = None
    chosen_tokens: torch.Tensor | int = 1
    rejected_tokens: torch.Tensor | int = 1
    score: Callable = lambda log_ratio: log_ratio

    @property
    def c(self):
        return self.chosen - self.ref_chosen

    @property
    def r(self):
        return self.rejected - self.ref_rejected

    @property
    def margin(self):
        return self.score(self.c) - self.score(self.r)

    @property
    def margin_by_token(self):
        return self.score(self.c) / self.chosen_tokens - self.score(self.r) / self.rejected_tokens


def _smoothed(margin, smoothing):
    """Compute conservative DPO (Mitchell 2023, eq. 3): labels are wrong with probability `smoothing`."""
    return -logsigmoid(margin) * (1 - smoothing) - logsigmoid(-margin) * smoothing


@pair_loss(by_margin=True)
def sigmoid(pairs, beta, smoothing):
    """Compute DPO, arXiv:2305.18290 eq. 7, or CPO without a reference, arXiv:2401.08417 eq. 3."""
    return _smoothed(beta * pairs.margin, smoothing)


@pair_loss(by_margin=True, averages=True)
def sigmoid_norm(pairs, beta, smoothing):
    """Compute DPO of log-ratios divided by the answers' lengths (TRL)."""
    return _smoothed(beta * pairs.margin_by_token, smoothing)


@pair_loss(reference_free=True)
def simpo(pairs, beta, smoothing, gamma: float = 0.5):
    """Compute SimPO, arXiv:2405.14734 eq. 6, from averaged log-probabilities without a reference."""
    return _smoothed(beta * (pairs.c - pairs.r) - gamma, smoothing)


@pair_loss(by_margin=True)
def robust(pairs, beta, smoothing):
    """Compute robust DPO, arXiv:2403.00409, unbiased if pairs are swapped with probability `smoothing`."""
    check(smoothing < 0.5, "label_smoothing", smoothing, "0 to 0.5, less than that for robust")
    margin = beta * pairs.margin
    return (-logsigmoid(margin) * (1 - smoothing) + logsigmoid(-margin) * smoothing) / (1 - 2 * smoothing)


@pair_loss(by_margin=True)
def hinge(pairs, beta, _):
    """Compute SLiC-HF's calibration loss, arXiv:2305.10425, with DPO's margin."""
    return torch.relu(1 - beta * pairs.margin)


@pair_loss(by_margin=True)
def ipo(pairs, beta, _):
    """Compute IPO, arXiv:2310.12036 eq. 17."""
    return (pairs.margin - 1 / (2 * beta)) ** 2


@pair_loss(by_margin=True, averages=True)
def ipo_norm(pairs, beta, _):
    """Compute IPO of log-ratios divided by the answers' lengths, as TRL's "ipo" is."""
    return (pairs.margin_by_token - 1 / (2 * beta)) ** 2


@pair_loss(by_margin=True, averages=True)
def sft(pairs, beta, _):
    """Compute the mean negative log-probability of the chosen answers' tokens (TRL)."""
    return pairs.nll


@pair_loss(by_margin=True)
def exo_pair(pairs, beta, smoothing):
    """Compute EXO for pairs, arXiv:2402.00856 eq. 16: the reverse KL from smoothed labels."""
    check(smoothing > 0, "label_smoothing", smoothing, "0 to 0.5, more than 0 for exo_pair")
    margin = beta * pairs.margin
    right = torch.sigmoid(margin) * (logsigmoid(margin) - math.log(1 - smoothing))
    return right + torch.sigmoid(-margin) * (logsigmoid(-margin) - math.log(smoothing))


@pair_loss
def nca_pair(pairs, beta, _):
    """Compute NCA for pairs, arXiv:2402.05369."""
    c, r = beta * pairs.c, beta * pairs.r
    return -logsigmoid(c) - 0.5 * logsigmoid(-c) - 0.5 * logsigmoid(-r)


@pair_loss(whole_batch=lambda options: options.get("delta") is None)
def bco_pair(pairs, beta, _, delta: torch.Tensor | float | None = None):
    """Compute BCO of pairs, arXiv:2404.04656; `delta` defaults to these pairs' mean reward."""
    c, r = beta * pairs.c, beta * pairs.r
    delta = torch.cat((c, r)).mean().detach() if delta is None else delta
    return -logsigmoid(c - delta) - logsigmoid(delta - r)


@pair_loss
def sppo_hard(pairs, beta, _):
    """Compute SPPO, arXiv:2405.00675 eq. 4.7, with winning probabilities rounded to 0 or 1."""
    return (pairs.c - 0.5 / beta) ** 2 + (pairs.r + 0.5 / beta) ** 2


@pair_loss
def apo_zero(pairs, beta, _):
    """Compute APO-zero, arXiv:2408.06266 eq. 7: raise the chosen, lower the rejected."""
    return 1 - torch.sigmoid(beta * pairs.c) + torch.sigmoid(beta * pairs.r)


@pair_loss
def apo_down(pairs, beta, _):
    """Compute APO-down, arXiv:2408.06266 eq. 8: lower both, the rejected further."""
    return torch.sigmoid(beta * pairs.c) + 1 - torch.sigmoid(beta * (pairs.c - pairs.r))


@pair_loss(by_margin=True)
def discopop(pairs, beta, _, tau: float = 0.05):
    """Compute DiscoPOP, arXiv:2406.08414 eq. 5, the log-ratio modulated loss."""
    check(tau > 0, "tau", tau, "a positive number")
    margin = beta * pairs.margin
    mix = torch.sigmoid(margin / tau)
    return -logsigmoid(margin) * (1 - mix) + torch.exp(logsigmoid(margin / tau) - margin)  # the power alone overflows


@pair_loss(whole_batch=True)
def aot(pairs, beta, smoothing):
    """Compute paired AOT, arXiv:2406.05882: sort policy and reference margins over the batch."""
    margin = (pairs.chosen - pairs.rejected).sort().values
    return _smoothed(beta * (margin - (pairs.ref_chosen - pairs.ref_rejected).sort().values), smoothing)


@pair_loss(whole_batch=True)
def aot_pair(pairs, beta, smoothing):
    """Compute unpaired AOT, arXiv:2406.05882: sort chosen and rejected log-ratios over the batch."""
    return _smoothed(beta * (pairs.c.sort().values - pairs.r.sort().values), smoothing)


def log_odds_ratio(pairs):
    """Compute log(odds of chosen / odds of rejected) of mean log-probabilities; clamp infinite odds."""

    def log_odds(log_prob):
        log_prob = log_prob.clamp(max=-torch.finfo(log_prob.dtype).eps)
        return log_prob - torch.log(-torch.expm1(log_prob))

    return log_odds(pairs.c) - log_odds(pairs.r)


@pair_loss(reference_free=True)
def orpo(pairs, beta, _):
    """Compute ORPO, arXiv:2403.07691 eq. 7 without the NLL, from averaged log-probabilities."""
    return -beta * logsigmoid(log_odds_ratio(pairs))


class Answers(NamedTuple):
    """Log-probabilities (R,) of answers, 0 for an absent reference, and `preferred`, bool."""

    log_probs: torch.Tensor
    ref_log_probs: torch.Tensor
    preferred: torch.Tensor

    @property
    def log_ratio(self):
        return self.log_probs - self.ref_log_probs


@unpaired_loss
def kto(answers, beta, kl: torch.Tensor | float = 0.0):
    """Compute KTO, arXiv:2402.01306 eq. 7; `kl` estimates the reference point z_0, the policy's KL."""
    log_ratio = answers.log_ratio
    return 1 - torch.sigmoid(beta * torch.where(answers.preferred, log_ratio - kl, kl - log_ratio))


@unpaired_loss
def apo_zero_unpaired(answers, beta):
    """Compute APO-zero of single answers, arXiv:2408.06266 eq. 7: raise the preferred, lower the others."""
    return torch.sigmoid(beta * torch.where(answers.preferred, -answers.log_ratio, answers.log_ratio))


@unpaired_loss(whole_batch=lambda options: options.get("delta") is None)
def bco(answers, beta, delta: torch.Tensor | float | None = None):
    """Compute BCO, arXiv:2404.04656; `delta` defaults to these answers' mean reward."""
    reward = beta * answers.log_ratio
    delta = reward.mean().detach() if delta is None else delta
    return -logsigmoid(torch.where(answers.preferred, reward - delta, delta - reward))
