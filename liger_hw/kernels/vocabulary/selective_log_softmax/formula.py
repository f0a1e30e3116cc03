"""Define the selective log-softmax of a row, its options and its outputs for both ops."""

import math
from typing import NamedTuple

import torch

from liger_hw.checks import check
from liger_hw.dispatch import widen
from liger_hw.kernels.vocabulary._autograd import rows_by_autograd
from liger_hw.kernels.vocabulary.cross_entropy.formula import TARGET_DTYPES, check_ignore_index, check_op_labels


class SelectedLogProbs(NamedTuple):
    """Output of the selective log-softmax ops if `return_*` asks for more than log-probabilities.

    Attributes:
        log_probs: log-probability of each row's token.
        entropy: of each row's distribution, in nats; None unless asked for.
        lse: log-sum-exp of each row's scaled logits; None unless asked for.
        is_top1: bool, whether the row's token has the first of its largest logits, before a softcap; no gradient.
        mean_logits: mean of the row's scaled logits over the vocabulary; no gradient.
        log_sum_sq_probs: log of the sum of the squared probabilities; no gradient.

    Examples:
        >>> logits, tokens = torch.rand(3, 10), torch.tensor([1, 2, 3])
        >>> liger_hw.selective_log_softmax(logits, tokens, return_entropy=True).entropy.shape
        torch.Size([3])
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None


class RowStatistics(NamedTuple):
    """Tell which statistics of a row, without a gradient, a call asks for."""

    is_top1: bool
    mean_logits: bool
    log_sum_sq_probs: bool

    @classmethod
    def of(cls, call):
        return cls(*(bool(getattr(call, f"return_{name}")) for name in cls._fields))

    def empty_rows(self, log_probs):
        """Return memory for each, without elements for one that is not asked for."""
        dtypes = torch.bool, log_probs.dtype, log_probs.dtype
        return [log_probs.new_empty(len(log_probs) if asked else 0, dtype=d) for asked, d in zip(self, dtypes)]

    def asked(self, rows):
        """Return the rows of a statistic that is asked for, None for another."""
        return [row if asked else None for asked, row in zip(self, rows)]


class Scaling(NamedTuple):
    """Numbers that scale a row's logits before the softmax, in the kernels' order."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float

    @classmethod
    def of(cls, ignore_index, softcap, logit_scale, temperature):
        """Take a caller's numbers; raise ValueError for a number out of range."""
        check(0 < temperature < math.inf, "temperature", temperature, "a positive number")
        check(softcap is None or softcap > 0, "softcap", softcap, "None or a positive number")
        softcap = None if softcap is None else float(softcap)
        return cls(int(ignore_index), softcap, float(logit_scale), float(temperature))


def check_tokens(tokens, shape, like, vocabulary, ignore_index):
    fits = tokens.dtype in TARGET_DTYPES and tokens.shape == shape and tokens.device == like.device
    check(fits, "tokens", tokens, f"int64 or int32 of shape {tuple(shape)} on {like.device}")
    check_ignore_index(ignore_index, tokens.dtype)
    check_op_labels("tokens", tokens, vocabulary, ignore_index)


def output_of(call, log_probs, entropy, lse, *statistics):
    """Return the log-probabilities or a SelectedLogProbs, in the shape of the call's tokens."""
    shape = call.tokens.shape
    asked = call.return_entropy, call.return_lse, *(RowStatistics.of(call) if statistics else ())
    if not any(asked):
        return log_probs.reshape(shape)
    rows = (entropy, lse, *statistics)
    return SelectedLogProbs(log_probs.reshape(shape), *(r.reshape(shape) if a else None for a, r in zip(asked, rows)))


def empty_rows(like, entropy_needed, dtype=torch.float32):
    """Return memory for the rows' log-probability, entropy (if needed), log-sum-exp and partition."""
    log_probs = like.new_empty(like.shape[0], dtype=dtype)
    entropy = log_probs.new_empty(log_probs.shape if entropy_needed else 0)
    return log_probs, entropy, torch.empty_like(log_probs), log_probs.new_empty(like.shape[0], 2)


def _scaled(logits, ignored, scaling):
    """Return the rows times `logit_scale`, and z."""
    scaled = widen(logits).masked_fill(ignored[:, None], 0) * scaling.logit_scale
    z = scaled if scaling.softcap is None else scaling.softcap * torch.tanh(scaled / scaling.softcap)
    return scaled, z / scaling.temperature


def selected_rows(logits, tokens, scaling):
    """Define the log-probability, entropy and log-sum-exp of rows of logits (N, V)."""
    ignored = tokens == scaling.ignore_index
    outside = ~ignored & ((tokens < 0) | (tokens >= logits.shape[-1]))
    _, z = _scaled(logits, ignored, scaling)
    log_p = torch.log_softmax(z, -1)
    picked = log_p.gather(1, torch.where(ignored | outside, 0, tokens).long()[:, None])[:, 0]
    picked = torch.where(outside, float("nan"), picked)
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0, log_p)).sum(-1)
    return tuple(torch.where(ignored, 0, row) for row in (picked, entropy, torch.logsumexp(z, -1)))


def row_statistics(logits, tokens, scaling):
    """Define `RowStatistics` of rows of logits (N, V): 0 and False where ignored."""
    ignored = tokens == scaling.ignore_index
    with torch.no_grad():
        scaled, z = _scaled(logits, ignored, scaling)
        is_top1 = (scaled.argmax(-1) == tokens) & ~ignored
        rows = z.mean(-1), torch.logsumexp(2 * torch.log_softmax(z, -1), -1)
    return is_top1, *(torch.where(ignored, 0, row) for row in rows)


def write_statistics(logits, tokens, scaling, partition, is_top1, mean_logits, log_sum_sq_probs):
    """Compute `kernels.write_statistics` without Triton."""
    outputs = is_top1, mean_logits, log_sum_sq_probs
    rows_by_autograd(lambda logits, part: row_statistics(logits, tokens[part], scaling), logits, outputs)


def forward_rows(logits, tokens, scaling, log_probs, entropy, lse, partition):
    """Compute `kernels.forward_rows` without Triton. The backward needs no partition."""
    rows_by_autograd(
        lambda logits, part: selected_rows(logits, tokens[part], scaling), logits, (log_probs, entropy, lse)
    )


def backward_rows(logits, tokens, scaling, entropy, partition, dlog_probs, dentropy=None, dlse=None):
    """Compute `kernels.backward_rows` without Triton, over the logits."""
    rows_by_autograd(
        lambda logits, part: selected_rows(logits, tokens[part], scaling), logits, (), (dlog_probs, dentropy, dlse)
    )
