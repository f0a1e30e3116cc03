"""Distil a teacher's stored probabilities, of all tokens or of each row's likeliest.

    q = softmax((x W^T + b) / T)
    D(p, q) = sum_j d(p_j, q_j)           over the stored tokens j of a row
              + d(p_rest, q_rest),        all other tokens, as one class: p_rest = 1 - sum_j p_j
    KL: d = p (log p - log q)    dlogits = (m q_j - p_j) / T of a stored token,  m = sum_j p_j + p_rest
    any d: dz by autograd of the K + 1 classes; another token's is that of q_rest times its share in q_rest

q_rest is the sum over the other tokens, not 1 - sum_j q_j, which cancels where a student knows the stored tokens. The
stored tokens' sum has 24 bits, so that p_rest below 1e-7 is unknown: the reverse KL, which takes its logarithm, takes
1e-7 for it, as TRL 1.16 does.
"""

import torch

from liger_hw._torch import traced
from liger_hw.checks import check, names_arguments
from liger_hw.dispatch import widen
from liger_hw.kernels.vocabulary._autograd import rows_by_autograd
from liger_hw.kernels.vocabulary._fp16 import largest_finite
from liger_hw.kernels.vocabulary.chunked_head import prepare_head, wide_dtype
from liger_hw.kernels.vocabulary.cross_entropy.formula import TARGET_DTYPES, counted_first
from liger_hw.kernels.vocabulary.divergence import elements, kind_of
from liger_hw.kernels.vocabulary.divergence.probabilities import Form, kl_by_row, kl_rows
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import row_functions
from liger_hw.kernels.vocabulary.selective_log_softmax.formula import Scaling, empty_rows
from liger_hw.losses.arguments import IGNORED, check_numbers, flatten_rows, prepare_labels
from liger_hw.losses.engine import CHUNK_MEMORY, Head, LogitScaling, slice_rows, sum_over_chunks
from liger_hw.spelling import check_known

OFFLINE_LOSSES = ("kl", "reverse_kl", "jsd", "tvd")
LEAST_REST = {"reverse_kl": 1e-7}


@names_arguments
def offline_distillation_loss(
    x: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_tokens: torch.Tensor | None = None,
    teacher_lse: torch.Tensor | None = None, labels: torch.Tensor | None = None, bias: torch.Tensor | None = None,
    rest: bool = True, temperature: float = 1.0, ignore_index: int = IGNORED, chunk_memory: float = CHUNK_MEMORY,
    accum_dtype: torch.dtype | None = None, softcap: float | None = None, logit_scale: float = 1.0,
    logits_dtype: torch.dtype | None = None, soft_loss: str = "kl", beta: float = 0.5, invariant: bool = False,
    counted_rows: int | None = None,
):  # fmt: skip
    """Compute the mean divergence of a student from a teacher's stored log-probabilities.

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
        rest: with `teacher_tokens`, compare the probability of all other tokens, as one class; False leaves it out, for
            "kl" and "tvd" only: the others are then no divergences, and may fall below 0.
        temperature: divides the student's logits.
        chunk_memory, accum_dtype, logits_dtype, invariant: as in `logits_loss`.
        softcap, logit_scale: of the student's head, as in `selective_log_softmax`.
        soft_loss, beta: as in `distillation_loss`, without "cosine": "kl", "reverse_kl", "jsd" or "tvd", of the stored
            tokens and the class for the others. Only "kl" where the teacher stores all tokens. "reverse_kl" is infinite
            where a stored probability is 0, and takes 1e-7 for a smaller probability of the others.
        counted_rows: the most rows whose label is not `ignore_index`, as in `fused_linear_cross_entropy`.

    Returns:
        the mean over the rows that count, 0 without any, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range; on a CPU, a token is outside
            the vocabulary or twice in a row (elsewhere a token outside makes the loss NaN).
        RuntimeError: a second backward.

    Examples:
        >>> hidden, head, tokens = torch.rand(3, 8), torch.rand(10, 8), torch.arange(4).expand(3, 4)
        >>> teacher = torch.rand(3, 4).log_softmax(-1) - 0.1  # log-probabilities of 4 tokens
        >>> loss = liger_hw.offline_distillation_loss(hidden, head, teacher, tokens)
    """
    rows = {"teacher": teacher, "teacher_tokens": teacher_tokens, "teacher_lse": teacher_lse, "labels": labels}
    x, teacher, teacher_tokens, teacher_lse, labels = flatten_rows(x, **rows)
    x, weight, bias = prepare_head(x, weight, bias, chunk_memory, flat=True, logits_dtype=logits_dtype)
    labels, ignore_index = prepare_labels(x, labels, ignore_index, "labels")
    check_numbers("a positive number", above=0, temperature=temperature)
    check_numbers("0 to 1", least=0, most=1, beta=beta)
    check_known("soft_loss", soft_loss, OFFLINE_LOSSES, "Soft losses")
    divergence = kind_of(beta) if soft_loss == "jsd" else soft_loss, beta
    allowed = f"True: without the others {soft_loss} is no divergence"
    check(rest or divergence[0] in ("kl", "tvd"), "rest", rest, allowed)
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
    if teacher_lse is not None:
        fits = teacher_lse.is_floating_point() and teacher_lse.shape == x.shape[:1] and teacher_lse.device == x.device
        check(fits, "teacher_lse", teacher_lse, f"floats ({len(x)},) on {x.device}")
    rows = x, teacher, teacher_tokens, teacher_lse
    excess, labels, x, *rows = counted_first(counted_rows, labels, ignore_index, *rows)
    teacher, teacher_tokens, teacher_lse = rows
    valid = labels != ignore_index
    factor = 1 / (valid.sum().clamp(min=1).to(wide_dtype(x)) * excess)
    scaling, temperature = LogitScaling.of(softcap, logit_scale), float(temperature)
    head = Head(x, weight, bias, scaling, chunk_memory, accum_dtype, logits_dtype, invariant)
    if teacher_tokens is None:
        _check_kl(divergence)
        rows = teacher, labels, factor, ignore_index
        return kl_to_probabilities("offline_distillation_loss", head, *rows, Form(True, temperature))
    rows = teacher, teacher_tokens, teacher_lse, valid
    return _divergence_from_top_k(head, *rows, factor, rest, temperature, divergence)


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


def kl_to_probabilities(op, head, teacher, labels, factor, ignore_index, form):
    """Return `factor` times the sum of KL(teacher, student) over the rows that count.

    Args:
        op: name of the caller's op, for errors.
        head: a `Head`. teacher: (N, V) of `form`, a `Form`. labels: (N,).
        factor: () in a wide dtype.
    """
    scaling = head.scaling

    def by_row(logits, teacher, labels):
        valid = labels != ignore_index
        logits, teacher = (t.masked_fill(~valid[:, None], 0) for t in (logits, teacher))
        return (torch.where(valid, kl_by_row(logits, teacher, form), 0),)

    plan = head.plan(teacher)
    if plan is None:
        return (by_row(head.logits(), teacher, labels)[0] * factor).sum()
    if teacher.dtype == torch.float64 != head.x.dtype:
        teacher = teacher.float()

    def step(part, logits, differentiate, gradients):
        soft, grad_factor = factor.new_zeros(len(logits)), factor
        if gradients.scales:
            mass = teacher[part].logsumexp(1).exp() if form.logarithms else teacher[part].sum(1, dtype=torch.float32)
            largest = mass.float().masked_fill(labels[part] == ignore_index, 0)
            bound = factor * largest_finite(largest) / form.temperature * scaling.slope
            grad_factor = factor * gradients.factor(bound)
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

    return sum_over_chunks(op, step, head, plan, 2 + scaling.buffers)[0]


def _divergence_from_top_k(head, teacher, tokens, teacher_lse, valid, factor, rest, temperature, divergence):
    scaling = head.scaling
    log_p = teacher.to(factor.dtype)
    if teacher_lse is not None:
        log_p = log_p / temperature - teacher_lse.detach()[:, None].to(log_p.dtype)
    vocabulary, k = len(head.weight), tokens.shape[1]
    check_top_k(tokens, valid, vocabulary)
    outside = ((tokens < 0) | (tokens >= vocabulary)).any(1) & valid
    reads = valid & ~outside
    tokens = torch.where(reads[:, None], tokens, torch.arange(k, device=tokens.device, dtype=tokens.dtype)).long()
    if k == vocabulary:
        _check_kl(divergence)
        labels, log_p = torch.where(valid, 0, IGNORED), log_p.masked_fill(outside[:, None], float("nan"))
        by_column = torch.zeros_like(log_p).scatter(1, tokens, log_p)
        rows = by_column, labels, factor, IGNORED
        return kl_to_probabilities("offline_distillation_loss", head, *rows, Form(True, temperature))
    if rest:
        p_rest = 1 - log_p.exp().sum(1, keepdim=True)
        log_p = torch.cat((log_p, p_rest.clamp(min=LEAST_REST.get(divergence[0], 0)).log()), 1)
    row_weights = torch.where(outside, float("nan"), valid.to(factor.dtype))
    rows = log_p, tokens, row_weights = log_p.masked_fill(~reads[:, None], 0), tokens, row_weights
    plan = head.plan(*rows)
    if plan is None:
        logits = head.logits().masked_fill((row_weights == 0)[:, None], 0)
        z = widen(logits) / temperature
        z = torch.cat((z.gather(1, tokens), z.scatter(1, tokens, float("-inf")).logsumexp(1, True)), 1)
        return (_top_k_rows(z, log_p, row_weights, divergence) * factor).sum()

    def step(part, logits, differentiate, gradients):
        z = scaling.chunk(logits)
        chunk = plan, z, *slice_rows(rows, part), divergence, temperature, differentiate
        soft, dz, write_gradient = _top_k_chunk(*chunk)
        if differentiate:
            largest = largest_finite(dz) / temperature * scaling.slope * factor if gradients.scales else None
            write_gradient(dz * (factor if largest is None else factor * gradients.factor(largest)))
            scaling.write_gradient(logits, z, valid[part])
        return ((soft * factor).sum(),)

    return sum_over_chunks("offline_distillation_loss", step, head, plan, 1 + scaling.buffers)[0]


def _check_kl(divergence):
    """Refuse other divergences than KL where the teacher stores all tokens."""
    other = "'kl' of all tokens; for another divergence give logits_loss a function of logits that calls liger_hw.jsd"
    check(divergence[0] == "kl", "soft_loss", divergence[0], other)


def _top_k_rows(z, log_p, row_weights, divergence):
    """Define each row's divergence times its weight.

    Args:
        z: (N, K + 1) the student's logits of the stored tokens, and the log-sum-exp of all others, over temperature.
        log_p: (N, K + 1), or (N, K) without the class for the others.
        divergence: kind and beta, as `elements` takes them.
    """
    log_q = z.log_softmax(-1)[:, : log_p.shape[1]]
    return torch.where(row_weights == 0, 0, elements(log_q, log_p, *divergence).sum(1)) * row_weights


def _top_k_chunk(plan, logits, log_p, tokens, row_weights, divergence, temperature, differentiate):
    """Compute `_top_k_rows` of a chunk's logits.

    Returns:
        (the rows, their gradient by z or None, a function that writes the logits' gradient over them, given that of z).
    """
    functions, scaling = row_functions(plan), Scaling(IGNORED, None, 1.0, temperature)
    ignored = row_weights == 0
    stored = (widen(logits.gather(1, tokens)) / temperature).masked_fill(ignored[:, None], 0)
    logits.scatter_(1, tokens, float("-inf"))  # the kernels then see the other tokens alone
    first = torch.where(ignored, IGNORED, 0)  # any token of the vocabulary: its result is unused
    unused, _, lse_rest, partition = empty_rows(logits, False, stored.dtype)
    functions.forward_rows(logits, first, scaling, unused, None, lse_rest, partition)
    z = torch.cat((stored, lse_rest[:, None]), 1).requires_grad_(differentiate)
    with torch.set_grad_enabled(differentiate):
        soft = _top_k_rows(z, log_p, row_weights, divergence)
        dz = torch.autograd.grad(soft.sum(), z)[0] if differentiate else None

    def write_gradient(dz):
        others_grad = dz[:, -1].contiguous()
        zeros = torch.zeros_like(others_grad)
        functions.backward_rows(logits, first, scaling, None, partition, zeros, None, others_grad)
        logits.scatter_(1, tokens, (dz[:, :-1] / temperature).to(logits.dtype))

    return soft.detach(), dz, write_gradient
