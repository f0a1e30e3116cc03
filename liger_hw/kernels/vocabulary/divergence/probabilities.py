r"""Compute KL(p, q) of given probabilities p from rows of logits, with the gradient.

    q = softmax(s / T)
    kl = sum_j p_j (log p_j - log q_j),     ds = factor / T (q sum_j p_j - p)          p need not add up to 1

Traffic of a row of V columns: a kernel reads both rows twice, for the sums and for the divergence, and writes the
student's once. The second pass runs backwards, so that it finds in L2 the last columns of the first.
"""

from typing import NamedTuple

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import widen
from liger_hw.kernels import _logits
from liger_hw.kernels._logits import padded_columns, padded_rows
from liger_hw.kernels._math import LN_2, LOG2_E, LOWEST_FINITE, in_row
from liger_hw.kernels._scores import below_peak, online_softmax, row_softmax
from liger_hw.kernels.vocabulary.divergence import log_probabilities
from liger_hw.launch import launch
from liger_hw.tuning import tuned


class Form(NamedTuple):
    """Form of a teacher's rows, and the temperature of the student.

    Attributes:
        logarithms: they are log-probabilities, else probabilities.
        temperature: divides the student's logits. eps: the least probability whose logarithm is taken.
    """

    logarithms: bool
    temperature: float
    eps: float = 0.0


@tuned
def kl_of_probabilities_config(cols, itemsize, device):
    # with 16 values a lane, 8 bytes spill on sm_100 and sm_120 (Triton 3.9)
    return _logits.padded_row_config(cols, device, per_lane=8)


@triton.jit
def _teacher(P, at, LOGARITHMS: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr, POLICY: tl.constexpr):
    """Load columns: probabilities and what their logarithms come from; 0 beyond the row."""
    if LOGARITHMS:
        log_p = padded_columns(P, at, float("-inf"), cols, COLS, POLICY)
        return tl.exp2(log_p * LOG2_E), log_p
    else:
        p = padded_columns(P, at, 0.0, cols, COLS, POLICY)
        return p, p


@triton.jit(do_not_specialize=["s_stride", "p_stride", "ignore_index"])
def kl_of_probabilities(
    S, P, LABELS, FACTOR, SOFT, s_stride, p_stride, ignore_index, temperature, eps, LOGARITHMS: tl.constexpr,
    GRADIENT: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // S.dtype.element_ty.primitive_bitwidth
    P_VECTOR: tl.constexpr = 128 // P.dtype.element_ty.primitive_bitwidth
    padded: tl.constexpr = (cols + VECTOR - 1) // VECTOR * VECTOR
    S += tl.multiple_of(row * s_stride, VECTOR)
    P += tl.multiple_of(row * p_stride, P_VECTOR)
    lane = tl.arange(0, COLS)
    soft = tl.full((), 0.0, tl.float32)
    if tl.load(LABELS + row) == ignore_index:
        if GRADIENT:
            for start in range(0, cols, COLS):
                tl.store(S + start + lane, tl.zeros((COLS,), tl.float32), in_row(start + lane, padded, COLS))
    else:
        power_unit = LOG2_E / temperature
        row_max = tl.full((COLS // VECTOR,), LOWEST_FINITE, tl.float32)
        sum_exp = tl.zeros((COLS // VECTOR,), tl.float32)
        masses, values = tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32)
        for start in range(0, cols, COLS):
            at = start + lane
            s = padded_columns(S, at, float("-inf"), cols, COLS, "evict_last")
            row_max, sum_exp = online_softmax(s, row_max, sum_exp, VECTOR, power_unit)
            masses += _teacher(P, at, LOGARITHMS, cols, COLS, "evict_last")[0]
        row_max, row_sum_exp = row_softmax(row_max, sum_exp, power_unit)
        log_sum = tl.log2(row_sum_exp) * LN_2
        mass = tl.sum(masses, 0)
        last = (cols - 1) // COLS * COLS
        for start in range(0, cols, COLS):
            at = last - start + lane
            s = padded_columns(S, at, float("-inf"), cols, COLS, "evict_first")
            log_q = below_peak(s, row_max, 1.0 / temperature, log_sum)
            p, log_p = _teacher(P, at, LOGARITHMS, cols, COLS, "evict_first")
            if not LOGARITHMS:
                log_p = tl.log2(tl.maximum(p, eps)) * LN_2
            values += tl.where(p == 0, 0.0, p * (log_p - log_q))
            if GRADIENT:
                ds = (mass * tl.exp2(log_q * LOG2_E) - p) * (tl.load(FACTOR).to(tl.float32) / temperature)
                tl.store(S + at, tl.where(at < cols, ds, 0.0), in_row(at, padded, COLS))
        soft = tl.sum(values, 0)
    tl.store(SOFT + row, soft)


def kl_rows(student, teacher, labels, factor, soft, form, ignore_index, gradient):
    """Write the divergence of each row, and optionally the student's gradient in place.

    Args:
        student: (N, V) logits; rows begin at 16-byte boundaries and are readable up to the next boundary.
        teacher: (N, V) of `form`, any strides. labels: (N,), rows of `ignore_index` have loss 0 and gradient 0.
        factor: () of the gradient. soft: (N,) fp32.
    """
    cols = student.shape[1]
    teacher = padded_rows(teacher)
    config = kl_of_probabilities_config(cols, student.element_size(), device_of(student))
    launch(
        kl_of_probabilities, (student.shape[0], 1, 1), config,
        student, teacher, labels, factor, soft, student.stride(0), teacher.stride(0), ignore_index, form.temperature,
        form.eps, form.logarithms, gradient, cols,
    )  # fmt: skip


def kl_by_row(logits, teacher, form):
    """Define the divergence of each row."""
    logits, p = widen(logits), widen(teacher)
    log_q = log_probabilities(logits, form.temperature)
    if form.logarithms:
        p, log_p = p.exp(), p
    else:
        log_p = p.clamp(min=form.eps).log()
    return (p * (log_p - log_q).masked_fill(p == 0, 0)).sum(-1)
