"""Distil a teacher's stored probabilities, of all tokens or of each row's likeliest.

    q = softmax((x W^T + b) / T)
    KL(p, q) = sum_j p_j (log p_j - log q_j)                                    over the stored tokens j of a row
               + p_rest (log p_rest - log q_rest),   p_rest = 1 - sum_j p_j     all other tokens, as one class
    dlogits = (m q_j - p_j) / T of a stored token,  (m q_rest - p_rest) / T times the share in q_rest of another;
              m = sum_j p_j + p_rest

q_rest is the sum over the other tokens, not 1 - sum_j q_j, which cancels where a student knows the stored tokens.
"""

import torch

from liger_hw._torch import traced
from liger_hw.checks import check, names_arguments
from liger_hw.dispatch import widen
from liger_hw.kernels.vocabulary._autograd import rows_by_autograd
from liger_hw.kernels.vocabulary._fp16 import largest_finite
from liger_hw.kernels.vocabulary._products import linear
from liger_hw.kernels.vocabulary.chunked_head import prepare_head, wide_dtype
from liger_hw.kernels.vocabulary.cross_entropy.formula import TARGET_DTYPES
from liger_hw.kernels.vocabulary.divergence.probabilities import Form, kl_by_row, kl_rows
from liger_hw.kernels.vocabulary.selective_log_softmax.formula import Scaling, empty_rows
from liger_hw.kernels.vocabulary.selective_log_softmax.kernels import backward_rows, forward_rows
from liger_hw.losses.arguments import check_numbers, flatten_rows, prepare_labels
from liger_hw.losses.engine import CHUNK_MEMORY, UNSCALED, LogitScaling, plan_of, sum_over_chunks, taken

IGNORED = -100


@names_arguments
def offline_distillation_loss(
    x: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_tokens: torch.Tensor | None = None,
    teacher_lse: torch.Tensor | None = None, labels: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    rest: bool = True, temperature: float = 1.0, ignore_index: int = IGNORED, chunk_memory: float = CHUNK_MEMORY,
    accum_dtype: torch.dtype | None = None, softcap: float | None = None, logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None,
):  # fmt: skip
    """Compute the mean KL divergence of a student from a teacher's stored log-probabilities.

    Args:
        x: (N, H) hidden states of the student, or (..., H); then also the other tensors with a value for each row.
            weight: (V, H). bias: (V,) or None.
        teacher: (N, V) log-probabilities, or with `teacher_tokens` (N, K) of those tokens; any floating dtype, -inf for
            a probability of 0. A constant. They belong to the distribution at `temperature`, which is not applied to
            them without `teacher_lse`.
        teacher_tokens: (N, K) int64 or int32, the tokens of `teacher`, distinct in each row: a top-k. None: all tokens,
            in their order.
        teacher_lse: (N,), beside `teacher_tokens`. `teacher` then holds logits, and this the log-sum-exp of all logits
            of the row divided by `temperature`: log p = teacher / temperature - teacher_lse.
        labels: (N,) int64 or int32, of the rows of `x` (already shifted); a row labelled `ignore_index` does not count,
            and its other values may be any. The labels have no other effect. None: all rows count.
        rest: with `teacher_tokens`, compare the probability of all other tokens, as one class; False leaves it out.
        temperature: divides the student's logits.
        chunk_memory, accum_dtype, logits_dtype: as in `logits_loss`.
        softcap, logit_scale: of the student's head, as in `selective_log_softmax`.

    Returns:
        the mean over the rows that count, 0 without any, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range; on a CPU, a token is outside
            the vocabulary or twice in a row (elsewhere a token outside makes the loss NaN).
        RuntimeError: a second backward.
    """
    rows = {"teacher": teacher, "teacher_tokens": teacher_tokens, "teacher_lse": teacher_lse, "labels": labels}
    x, teacher, teacher_tokens, teacher_lse, labels = flatten_rows(x, **rows)
    x, weight, bias = prepare_head(x, weight, bias, chunk_memory, flat=True, logits_dtype=logits_dtype)
    labels = prepare_labels(x, labels, "labels")
    check_numbers("a positive number", above=0, temperature=temperature)
    teacher, vocabulary = teacher.detach(), len(weight)
    if teacher_tokens is None:
        check(teacher_lse is None, "teacher_lse", teacher_lse, "None without teacher_tokens")
        shape = len(x), vocabulary
    else:
        fits = teacher_tokens.dtype in TARGET_DTYPES and teacher_tokens.ndim == 2 and len(teacher_tokens) == len(x)
        fits = fits and 0 < teacher_tokens.shape[1] <= vocabulary and teacher_tokens.device == x.device
        allowed = f"int64 or int32 ({len(x)}, K) on {x.device}, K from 1 to {vocabulary}"
        check(fits, "teacher_tokens", teacher_tokens, allowed)
        shape = tuple(teacher_tokens.shape)
    fits = teacher.is_floating_point() and teacher.shape == shape and teacher.device == x.device
    check(fits, "teacher", teacher, f"floats {shape} on {x.device}")
    valid = labels != ignore_index
    factor = 1 / valid.sum().clamp(min=1).to(wide_dtype(x))
    options = {"temperature": float(temperature), "chunk_memory": chunk_memory, "accum_dtype": accum_dtype}
    options |= {"scaling": LogitScaling.of(softcap, logit_scale), "logits_dtype": logits_dtype}
    if teacher_tokens is None:
        arguments = x, weight, bias, teacher, labels, factor, ignore_index
        return kl_to_probabilities("offline_distillation_loss", *arguments, logarithms=True, **options)
    return _kl_to_top_k(x, weight, bias, teacher, teacher_tokens, teacher_lse, valid, factor, rest, **options)


def check_top_k(tokens, valid, vocabulary):
    """Refuse on a CPU tokens that are outside the vocabulary or twice in a row.

    valid: (N,) bool, the rows to check.
    """
    if tokens.device.type != "cpu" or traced(tokens):
        return
    tokens = tokens[valid].sort(1).values
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    check(outside.numel() == 0, "teacher_tokens", outside[:1].tolist(), f"0 to {vocabulary - 1}")
    twice = tokens[:, 1:][tokens[:, 1:] == tokens[:, :-1]]
    check(twice.numel() == 0, "teacher_tokens", f"{twice[:1].tolist()} twice in a row", "distinct tokens in a row")


def kl_to_probabilities(
    op, x, weight, bias, teacher, labels, factor, ignore_index, logarithms, temperature, eps=0.0,
    chunk_memory=CHUNK_MEMORY, accum_dtype=None, scaling=UNSCALED, logits_dtype=None,
):  # fmt: skip
    """Return `factor` times the sum of KL(teacher, student) over the rows that count.

    Args:
        op: name of the caller's op, for errors.
        x, weight, bias: as `prepare_head` returns them. teacher: (N, V) of `Form`. labels: (N,).
        factor: () in a wide dtype.
    """
    form = Form(logarithms, temperature, eps)

    def by_row(logits, teacher, labels):
        valid = labels != ignore_index
        logits, teacher = (t.masked_fill(~valid[:, None], 0) for t in (logits, teacher))
        return (torch.where(valid, kl_by_row(logits, teacher, form), 0),)

    plan = plan_of(chunk_memory, x, weight, bias, teacher, accum_dtype=accum_dtype, logits_dtype=logits_dtype)
    if plan is None:
        return (by_row(scaling(linear(x, weight, bias, logits_dtype)), teacher, labels)[0] * factor).sum()
    if teacher.dtype == torch.float64 != x.dtype:
        teacher = teacher.float()

    def step(part, logits, differentiate, gradients):
        soft, grad_factor = factor.new_zeros(len(logits)), factor
        if gradients.scales:
            mass = teacher[part].logsumexp(1).exp() if logarithms else teacher[part].sum(1, dtype=torch.float32)
            largest = mass.float().masked_fill(labels[part] == ignore_index, 0)
            grad_factor = factor * gradients.factor(factor * largest_finite(largest) / temperature * scaling.slope)
        z = scaling.chunk(logits)
        if plan.with_kernels:
            kl_rows(z, teacher[part], labels[part], grad_factor, soft, form, ignore_index, differentiate)
        else:
            incoming = [grad_factor.expand(len(logits))] if differentiate else None
            rows_by_autograd(
                lambda logits, rows: by_row(logits, teacher[part][rows], labels[part][rows]), z, (soft,), incoming
            )
        if differentiate:
            scaling.write_gradient(logits, z, labels[part] != ignore_index)
        return ((soft * factor).sum(),)

    return sum_over_chunks(op, step, x, weight, bias, plan, 2 + scaling.buffers)[0]


def _kl_to_top_k(
    x, weight, bias, teacher, tokens, teacher_lse, valid, factor, rest, temperature, chunk_memory, accum_dtype, scaling,
    logits_dtype,
):  # fmt: skip
    log_p = teacher.to(factor.dtype)
    if teacher_lse is not None:
        fits = teacher_lse.is_floating_point() and teacher_lse.shape == x.shape[:1] and teacher_lse.device == x.device
        check(fits, "teacher_lse", teacher_lse, f"floats ({len(x)},) on {x.device}")
        log_p = log_p / temperature - teacher_lse.detach()[:, None].to(log_p.dtype)
    vocabulary, k = len(weight), tokens.shape[1]
    check_top_k(tokens, valid, vocabulary)
    outside = ((tokens < 0) | (tokens >= vocabulary)).any(1) & valid
    reads = valid & ~outside
    tokens = torch.where(reads[:, None], tokens, torch.arange(k, device=tokens.device, dtype=tokens.dtype)).long()
    if k == vocabulary:
        labels, log_p = torch.where(valid, 0, IGNORED), log_p.masked_fill(outside[:, None], float("nan"))
        return kl_to_probabilities(
            "offline_distillation_loss", x, weight, bias, torch.zeros_like(log_p).scatter(1, tokens, log_p), labels,
            factor, IGNORED, True, temperature, 0.0, chunk_memory, accum_dtype, scaling, logits_dtype,
        )  # fmt: skip
    log_p = log_p.masked_fill(~reads[:, None], float("-inf"))
    p_rest = (1 - log_p.exp().sum(1)).clamp(min=0) if rest else torch.zeros_like(log_p[:, 0])
    row_weights = torch.where(outside, float("nan"), valid.to(factor.dtype))
    rows = log_p, p_rest, tokens, row_weights
    plan = plan_of(chunk_memory, x, weight, bias, *rows, accum_dtype=accum_dtype, logits_dtype=logits_dtype)
    if plan is None:
        logits = scaling(linear(x, weight, bias, logits_dtype))
        return (_top_k_by_torch(logits, *rows, rest, temperature)[0] * factor).sum()

    def step(part, logits, differentiate, gradients):
        soft, grad_factor = factor.new_zeros(len(logits)), factor
        part_rows = taken(rows, part)
        if gradients.scales:
            largest = largest_finite(part_rows[0].exp().sum(1) + part_rows[1])
            grad_factor = factor * gradients.factor(factor * largest / temperature * scaling.slope)
        z = scaling.chunk(logits)
        if plan.with_kernels:
            _top_k_by_kernels(z, soft, grad_factor if differentiate else None, *part_rows, temperature)
        else:
            incoming = [grad_factor.expand(len(logits))] if differentiate else None
            rows_by_autograd(
                lambda logits, part: _top_k_by_torch(logits, *taken(part_rows, part), rest, temperature), z, (soft,),
                incoming,
            )  # fmt: skip
        if differentiate:
            scaling.write_gradient(logits, z, valid[part])
        return ((soft * factor).sum(),)

    return sum_over_chunks("offline_distillation_loss", step, x, weight, bias, plan, 1 + scaling.buffers)[0]


def _top_k_by_torch(logits, log_p, p_rest, tokens, row_weights, rest, temperature):
    """Return each row's divergence times its weight, ((N,),)."""
    logits = logits.masked_fill((row_weights == 0)[:, None], 0)
    log_q = (widen(logits) / temperature).log_softmax(-1)
    soft = _divergence(log_p, log_q.gather(1, tokens))
    if rest:
        log_q_rest = log_q.scatter(1, tokens, float("-inf")).logsumexp(1)
        soft = soft + _divergence(p_rest.log()[:, None], log_q_rest[:, None])
    return (torch.where(row_weights == 0, 0, soft) * row_weights,)


def _top_k_by_kernels(logits, soft, grad_factor, log_p, p_rest, tokens, row_weights, temperature):
    """Write `_top_k_by_torch` to `soft` and, unless `grad_factor` is None, the gradient over the logits."""
    scaling = Scaling(IGNORED, None, 1.0, temperature)
    z = logits.gather(1, tokens).float() / temperature
    z = z.masked_fill((row_weights == 0)[:, None], 0)
    logits.scatter_(1, tokens, float("-inf"))  # the kernels then see the other tokens alone
    first = torch.where(row_weights == 0, IGNORED, 0)  # any token of the vocabulary: its result is unused
    unused, _, lse_rest, partition = empty_rows(logits, False)
    forward_rows(logits, first, scaling, unused, None, lse_rest, partition)
    row_max = torch.maximum(z.amax(1), lse_rest)
    z, z_rest = z - row_max[:, None], lse_rest - row_max
    log_sum_exp = (z.exp().sum(1) + z_rest.exp()).log()
    log_q, log_q_rest = z - log_sum_exp[:, None], z_rest - log_sum_exp
    divergence = _divergence(log_p, log_q) + _divergence(p_rest.log()[:, None], log_q_rest[:, None])
    soft.copy_(torch.where(row_weights == 0, 0, divergence) * row_weights)
    if grad_factor is not None:
        p, grad_factor = log_p.exp(), grad_factor * row_weights
        mass = p.sum(1) + p_rest
        drest = (mass * log_q_rest.exp() - p_rest) * grad_factor
        backward_rows(logits, first, scaling, None, partition, torch.zeros_like(drest), None, drest)
        dz = (mass[:, None] * log_q.exp() - p) * (grad_factor / temperature)[:, None]
        logits.scatter_(1, tokens, dz.to(logits.dtype))


def _divergence(log_p, log_q):
    """Return each row's divergence, where 0 log 0 is 0."""
    p = log_p.exp()
    return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(1)
