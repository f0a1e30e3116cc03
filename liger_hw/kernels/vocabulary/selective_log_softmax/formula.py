"""Define the selective log-softmax of a row, its options and its outputs for both ops."""

from typing import NamedTuple

import torch

from liger_hw.checks import check
from liger_hw.dispatch import widen
from liger_hw.kernels.vocabulary._autograd import rows_by_autograd
from liger_hw.kernels.vocabulary.cross_entropy.formula import TARGET_DTYPES, check_labels_of_op


class SelectedLogProbs(NamedTuple):
    """Output of the selective log-softmax ops if `return_*` asks for more than log-probabilities.

    Attributes:
        log_probs: log-probability of each row's token.
        entropy: of each row's distribution, in nats; None unless asked for.
        lse: log-sum-exp of each row's scaled logits; None unless asked for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None


class Scaling(NamedTuple):
    """Numbers that scale a row's logits before the softmax, in the kernels' order."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float

    @classmethod
    def of(cls, ignore_index, softcap, logit_scale, temperature):
        """Take a caller's numbers; raise ValueError for a number out of range."""
        check(temperature > 0, "temperature", temperature, "a positive number")
        check(softcap is None or softcap > 0, "softcap", softcap, "None or a positive number")
        softcap = None if softcap is None else float(softcap)
        return cls(int(ignore_index), softcap, float(logit_scale), float(temperature))


def check_tokens(tokens, shape, like, vocabulary, ignore_index):
    fits = tokens.dtype in TARGET_DTYPES and tokens.shape == shape and tokens.device == like.device
    check(fits, "tokens", tokens, f"int64 or int32 of shape {tuple(shape)} on {like.device}")
    check_labels_of_op("tokens", tokens, vocabulary, ignore_index)


def output_of(call, log_probs, entropy, lse):
    """Return the log-probabilities or a SelectedLogProbs, in the shape of the call's tokens."""
    shape = call.tokens.shape
    log_probs = log_probs.reshape(shape)
    if not (call.return_entropy or call.return_lse):
        return log_probs
    entropy = entropy.reshape(shape) if call.return_entropy else None
    return SelectedLogProbs(log_probs, entropy, lse.reshape(shape) if call.return_lse else None)


def empty_rows(like, entropy_needed, dtype=torch.float32):
    """Return memory for the rows' log-probability, entropy (if needed), log-sum-exp and partition."""
    log_probs = like.new_empty(like.shape[0], dtype=dtype)
    entropy = log_probs.new_empty(log_probs.shape if entropy_needed else 0)
    return log_probs, entropy, torch.empty_like(log_probs), log_probs.new_empty(like.shape[0], 2)


def selected_rows(logits, tokens, scaling):
    """Define the log-probability, entropy and log-sum-exp of rows of logits (N, V)."""
    ignored = tokens == scaling.ignore_index
    outside = ~ignored & ((tokens < 0) | (tokens >= logits.shape[-1]))
    scaled = widen(logits).masked_fill(ignored[:, None], 0) * scaling.logit_scale
    z = scaled if scaling.softcap is None else scaling.softcap * torch.tanh(scaled / scaling.softcap)
    z = z / scaling.temperature
    log_p = torch.log_softmax(z, -1)
    picked = log_p.gather(1, torch.where(ignored | outside, 0, tokens).long()[:, None])[:, 0]
    picked = torch.where(outside, float("nan"), picked)
    p = log_p.exp()
    entropy = -(p * torch.where(p == 0, 0, log_p)).sum(-1)
    return tuple(torch.where(ignored, 0, row) for row in (picked, entropy, torch.logsumexp(z, -1)))


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
