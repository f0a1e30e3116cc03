"""Distillation of a teacher's head into a student's, by soft losses and hard labels.

Memory holds both models' logits for one chunk of rows at a time. The student's gradient overwrites the student's
logits. The teacher gets no gradient.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from liger_hw.checks import check, names_arguments
from liger_hw.dispatch import widen
from liger_hw.kernels._logits import empty_gradient, padded_rows
from liger_hw.kernels.vocabulary._autograd import rows_by_autograd
from liger_hw.kernels.vocabulary.chunked_head import ChunkedHead, prepare_head, wide_dtype
from liger_hw.kernels.vocabulary.cross_entropy.formula import check_labels, counted_first
from liger_hw.kernels.vocabulary.divergence import kind_of
from liger_hw.kernels.vocabulary.divergence.logits import divergence_rows, largest_soft_gradient, soft_rows
from liger_hw.losses.arguments import IGNORED, check_numbers, flatten_rows, prepare_labels
from liger_hw.losses.engine import CHUNK_MEMORY, Head, LogitScaling, detached, sum_over_chunks
from liger_hw.spelling import check_known

SOFT_LOSSES = ("jsd", "kl", "reverse_kl", "tvd", "cosine")
TEACHER = "teacher_x", "teacher_weight", "teacher_bias"


class DistillationOutput(NamedTuple):
    """Output of `distillation_loss`; soft and hard are for logging and have no gradient.

    Attributes:
        loss: hard_weight * hard + soft_weight * soft.
        soft, hard: unweighted means over the rows that are not ignored; hard is 0 if hard_weight is 0.
    """

    loss: torch.Tensor
    soft: torch.Tensor
    hard: torch.Tensor


@names_arguments
def distillation_loss(
    x: torch.Tensor, weight: torch.Tensor, teacher_x: torch.Tensor, teacher_weight: torch.Tensor,
    labels: torch.Tensor | None = None, bias: torch.Tensor | None = None, teacher_bias: torch.Tensor | None = None,
    soft_loss: str | Mapping = "jsd", beta: float = 0.5, temperature: float = 1.0, hard_weight: float = 0.5,
    soft_weight: float = 0.5, ignore_index: int = IGNORED, chunk_memory: float = CHUNK_MEMORY,
    accum_dtype: torch.dtype | None = None, softcap: float | None = None, logit_scale: float = 1.0,
    teacher_softcap: float | None = None, teacher_logit_scale: float = 1.0, logits_dtype: torch.dtype | None = None,
    invariant: bool = False, counted_rows: int | None = None,
):  # fmt: skip
    """Compute the mean soft loss to the teacher plus the labels' mean cross entropy.

    Args:
        x: (N, H) hidden states of the student, or (..., H); then also the other tensors with a value for each row.
            weight: (V, H). bias: (V,) or None.
        teacher_x: (N, H'). teacher_weight: (V', H'). teacher_bias: (V',) or None. Constants. If the vocabularies
            differ in size, the soft loss pads the shorter logits with 0.
        labels: (N,) int64 or int32, the token that each row predicts (already shifted); both losses skip a row labelled
            `ignore_index`. None: all rows count, and there is no hard loss.
        soft_loss: "jsd" (arXiv:2306.13649 eq. 1, by `beta`), "kl" (of the student from the teacher, Hinton's
            arXiv:1503.02531 without its factor T^2), "reverse_kl" (arXiv:2306.08543), "tvd" (arXiv:2307.15190), or
            "cosine" (1 - the cosine of the logits). Or a dict of several and their weights, which are added:
            {"kl": 1.0, "tvd": 0.5}.
        beta: parameter of "jsd", 0 to 1: 0 is "kl" and 1 is "reverse_kl".
        temperature: divides both models' logits in the soft loss, not in the hard loss.
        hard_weight, soft_weight: weights of the two losses.
        chunk_memory: bytes that a chunk of both models' logits may take.
        accum_dtype: as in `logits_loss`.
        softcap, logit_scale, teacher_softcap, teacher_logit_scale: of each head, as in `selective_log_softmax`.
        logits_dtype, invariant: of both models' logits, as in `fused_linear_cross_entropy`.
        counted_rows: the most rows whose label is not `ignore_index`, as there, for both models' products.

    Returns:
        A `DistillationOutput` in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range; on a CPU, a label of the
            hard loss is outside the student's vocabulary (elsewhere the loss is then NaN).
        RuntimeError: a second backward.

    Examples:
        >>> student, head = torch.rand(3, 8), torch.rand(10, 8)
        >>> teacher, teacher_head = torch.rand(3, 16), torch.rand(10, 16)
        >>> output = liger_hw.distillation_loss(student, head, teacher, teacher_head, torch.tensor([1, 2, 3]))
    """
    x, teacher_x, labels = flatten_rows(x, teacher_x=teacher_x, labels=labels)
    x, weight, bias = prepare_head(x, weight, bias, chunk_memory, flat=True, logits_dtype=logits_dtype)
    teacher = prepare_head(teacher_x, teacher_weight, teacher_bias, chunk_memory, True, TEACHER, logits_dtype)
    teacher_x, teacher_weight, teacher_bias = detached(teacher)
    check(len(teacher_x) == len(x), "teacher_x", teacher_x, f"floats ({len(x)}, H)")
    kinds = _check_options(soft_loss, beta, temperature, hard_weight, soft_weight)
    teacher_scaling = LogitScaling.of(teacher_softcap, teacher_logit_scale, "teacher_")
    scaling = LogitScaling.of(softcap, logit_scale)
    labels, hard_weight, ignore_index = _labels(x, labels, hard_weight, ignore_index, len(weight))
    excess, labels, x, teacher_x = counted_first(counted_rows, labels, ignore_index, x, teacher_x)
    count = (labels != ignore_index).sum().clamp(min=1).to(wide_dtype(x)) * excess
    factors = torch.stack([soft_weight / count, hard_weight / count])
    options = kinds, float(beta), float(temperature), bool(hard_weight), ignore_index
    student = Head(x, weight, bias, scaling, chunk_memory, accum_dtype, logits_dtype, invariant)
    teacher = Head(teacher_x, teacher_weight, teacher_bias, teacher_scaling, *student[4:])
    plan = student.plan(*teacher[:3])
    if plan is None:
        soft, hard = _rows_by_torch(student.logits(), teacher.logits(), labels, *options)
        loss = (soft * factors[0] + hard * factors[1]).sum()
        return DistillationOutput(loss, soft.detach().sum() / count, hard.detach().sum() / count)

    def step(part, logits, differentiate, gradients):
        teacher_rows = ChunkedHead(teacher_x[part], teacher_weight, teacher_bias, plan, rows=len(logits))
        teacher_logits = teacher_scaling.chunk(teacher_rows.logits(slice(0, len(logits))))
        z = scaling.chunk(logits)
        soft, hard = logits.new_zeros(2, len(logits), dtype=factors.dtype)
        grad_factors = factors
        if gradients.scales:
            bounded = z, teacher_logits, labels[part] != ignore_index
            largest = sum(share * largest_soft_gradient(*bounded, kind, temperature) for kind, share in kinds)
            grad_factors = factors * gradients.factor(factors[0] * largest * scaling.slope, factors[1] * scaling.slope)
        if plan.with_kernels:
            z = _rows_by_kernels(z, teacher_logits, labels[part], *options, grad_factors, soft, hard, differentiate)
        else:
            incoming = [row.expand(len(z)) for row in grad_factors[: 1 + bool(hard_weight)]]
            rows_by_autograd(
                lambda logits, rows: _rows_by_torch(logits, teacher_logits[rows], labels[part][rows], *options),
                z, (soft, hard), incoming if differentiate else None,
            )  # fmt: skip
        if differentiate:
            scaling.write_gradient(logits, z, labels[part] != ignore_index)
        return (soft * factors[0] + hard * factors[1]).sum(), soft, hard

    widths = 1 + scaling.buffers + (1 + teacher_scaling.buffers) * len(teacher_weight) / len(weight)  # of both models
    widths += 2 * len(kinds) * (len(kinds) > 1)  # copies in fp32
    loss, soft, hard = sum_over_chunks("distillation_loss", step, student, plan, widths)
    return DistillationOutput(loss, soft.sum() / count, hard.sum() / count)


def _labels(x, labels, hard_weight, ignore_index, vocabulary):
    """Return checked labels, the hard loss's weight and `ignore_index`; without labels all rows count."""
    hard_weight = 0.0 if labels is None else hard_weight
    labels, ignore_index = prepare_labels(x, labels, ignore_index, "labels")
    if hard_weight:
        check_labels("labels", labels, vocabulary, ignore_index)
    return labels, hard_weight, ignore_index


def _check_options(soft_loss, beta, temperature, hard_weight, soft_weight):
    """Check the options; return (kind of divergence, its weight) of each soft loss."""
    shares = list(soft_loss.items()) if isinstance(soft_loss, Mapping) else [(soft_loss, 1.0)]
    check(len(shares) > 0, "soft_loss", soft_loss, "one or more soft losses")
    for name, share in shares:
        check_known("soft_loss", name, SOFT_LOSSES, "Soft losses")
        check_numbers("0 or more", least=0, **{f"soft_loss[{name!r}]": share})
    check_numbers("a positive number", above=0, temperature=temperature)
    check_numbers("0 to 1", least=0, most=1, beta=beta)
    check_numbers("0 or more", least=0, hard_weight=hard_weight, soft_weight=soft_weight)
    return [(kind_of(beta) if name == "jsd" else name, float(share)) for name, share in shares]


def _rows_by_kernels(
    z, teacher_logits, labels, kinds, beta, temperature, with_hard_loss, ignore_index, factors, soft, hard,
    differentiate,
):  # fmt: skip
    """Write the losses of rows; return the gradient.

    It overwrites z or, of several soft losses, is their sum in fp32.
    """
    z = padded_rows(widen(z)) if len(kinds) > 1 else z
    total = None
    for index, (kind, share) in enumerate(kinds, start=1):  # two may be equal: "jsd" with a beta of 0, and "kl"
        is_last = index == len(kinds)
        dz, value = z if is_last else empty_gradient(z).copy_(z), torch.empty_like(soft)
        divergence_rows(
            dz, teacher_logits, labels, torch.stack((factors[0] * share, factors[1])), value,
            hard if is_last and with_hard_loss else None, kind, beta, temperature, ignore_index, differentiate,
        )  # fmt: skip
        soft += share * value
        total = dz if total is None else total.add_(dz)
    return total


def _rows_by_torch(logits, teacher_logits, labels, kinds, beta, temperature, with_hard_loss, ignore_index):
    """Return the soft and the hard loss of each row, (N,) each, 0 where ignored."""
    valid = labels != ignore_index
    logits = logits.masked_fill(~valid[:, None], 0)
    teacher_logits = teacher_logits.masked_fill(~valid[:, None], 0)
    soft = sum(share * soft_rows(logits, teacher_logits, kind, beta, temperature) for kind, share in kinds)
    soft, hard = torch.where(valid, soft, 0), torch.zeros_like(soft)
    if with_hard_loss:
        hard = cross_entropy(widen(logits), labels.long(), reduction="none", ignore_index=ignore_index)
    return soft, hard
