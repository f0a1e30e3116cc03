r"""Compute divergence and cross entropy of rows of logits at once, with the student's gradient.

    q = softmax(s / T),   p = softmax(t / T)                    the shorter row is padded with logits of 0
    soft = divergence(q, p),     hard = -log softmax(s)_y
    ds   = soft_factor / T (a - q sum_j a_j) + hard_factor (softmax(s) - [j = y])       a_j = dsoft / dlog q_j

The cosine distance takes the logits as they are, as temperature cancels:

    soft = 1 - s.t / (|s| |t|),     dsoft/ds = (s.t / |s|^2 s - t) / (|s| |t|)

Traffic of a student's row and a teacher's, of V columns: a kernel reads both three times, for the sums of powers, the
divergence and the gradient. The second pass runs backwards and the third forwards, so that each finds in L2 the last
columns of the one before. The student's row is written once. The cosine needs no middle pass, unless the squares of a
row overflow: then it reads both once more.
"""

import math

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import widen
from liger_hw.kernels._logits import padded_row_config
from liger_hw.kernels._math import LN_2, LOG2_E, LOWEST_FINITE, in_row
from liger_hw.kernels._scores import below_peak, online_softmax, row_softmax
from liger_hw.kernels.vocabulary.divergence import divergence_element, elements, log_probabilities, logarithm_unit
from liger_hw.launch import launch
from liger_hw.tuning import tuned

LEAST_NORM = tl.constexpr(1e-8)  # by which torch divides a shorter row
SMALL = tl.constexpr(2.0**-80)  # multiplies a row whose squares overflow, so that their sum is finite and far from 0


@tuned
def divergence_of_logits_config(cols, itemsize, device):
    # with 16 a core holds two programs: jsd of 4,096 x 128,256 bf16 took 3.44 ms for 2.93 (H100, Triton 3.6)
    return padded_row_config(cols, device, per_lane=8)


@triton.jit
def _readable(at, row_cols: tl.constexpr, cols: tl.constexpr, VECTOR: tl.constexpr, COLS: tl.constexpr):
    """Mask a row's columns up to a multiple of VECTOR, in a loop over `cols`.

    The row may have fewer: then `in_row` would make no mask of whole blocks, and the loop go on behind the row.
    """
    padded: tl.constexpr = (row_cols + VECTOR - 1) // VECTOR * VECTOR
    if row_cols < cols:
        return at < padded
    else:
        return in_row(at, padded, COLS)


@triton.jit
def _pair(S, T, at, student_cols: tl.constexpr, teacher_cols: tl.constexpr, cols: tl.constexpr,
          VECTOR: tl.constexpr, T_VECTOR: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Load columns of both rows, -inf beyond either's end.

    Rows are readable up to a multiple of VECTOR, the teacher's of T_VECTOR.
    """
    if student_cols == teacher_cols and cols % VECTOR == 0:  # nothing to pad
        mask = in_row(at, cols, COLS)
        s, t = tl.load(S + at, mask, other=float("-inf")), tl.load(T + at, mask, other=float("-inf"))
        return s.to(tl.float32), t.to(tl.float32)
    s = tl.load(S + at, _readable(at, student_cols, cols, VECTOR, COLS), other=0.0).to(tl.float32)
    t = tl.load(T + at, _readable(at, teacher_cols, cols, T_VECTOR, COLS), other=0.0).to(tl.float32)
    s = tl.where(at < student_cols, s, tl.where(at < cols, 0.0, float("-inf")))
    return s, tl.where(at < teacher_cols, t, tl.where(at < cols, 0.0, float("-inf")))


@triton.jit
def _hard_loss(S, y, row_max, log_sum_exp, student_cols: tl.constexpr):
    """Return -log softmax(s)_y, or NaN for a label outside the vocabulary.

    `log_sum_exp` is in units of ln 2.
    """
    valid_target = (y >= 0) & (y < student_cols)
    s_y = tl.load(S + y, valid_target, other=0.0).to(tl.float32)
    # the difference first: it is exact near the maximum
    return tl.where(valid_target, (row_max - s_y) + log_sum_exp * LN_2, float("nan"))


@triton.jit(do_not_specialize=["s_stride", "t_stride", "ignore_index"])
def divergence_of_logits(
    S, T, LABELS, FACTORS, SOFT, HARD, s_stride, t_stride, ignore_index, beta, rest_beta, temperature,
    KIND: tl.constexpr, GRADIENT: tl.constexpr, student_cols: tl.constexpr, teacher_cols: tl.constexpr,
    cols: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // S.dtype.element_ty.primitive_bitwidth
    T_VECTOR: tl.constexpr = 128 // T.dtype.element_ty.primitive_bitwidth
    S += tl.multiple_of(row * s_stride, VECTOR)
    T += tl.multiple_of(row * t_stride, T_VECTOR)
    lane = tl.arange(0, COLS)
    y = tl.load(LABELS + row)
    soft = tl.full((), 0.0, tl.float32)
    hard = soft
    if y == ignore_index:
        if GRADIENT:
            for start in range(0, student_cols, COLS):
                stored = _readable(start + lane, student_cols, student_cols, VECTOR, COLS)
                tl.store(S + start + lane, tl.zeros((COLS,), tl.float32), stored)
    else:
        unit = logarithm_unit(KIND)
        scale, power_unit = unit / temperature, LOG2_E / temperature
        s_max = tl.full((COLS // VECTOR,), LOWEST_FINITE, tl.float32)
        s_sum_exp = tl.zeros((COLS // VECTOR,), tl.float32)
        t_max, hard_max = s_max, s_max
        t_sum_exp, hard_sum_exp = s_sum_exp, s_sum_exp
        for start in range(0, cols, COLS):
            at = start + lane
            s, t = _pair(S, T, at, student_cols, teacher_cols, cols, VECTOR, T_VECTOR, COLS)
            if HARD is not None and student_cols == cols:  # whose rows have the same maximum
                _, hard_sum_exp = online_softmax(s, s_max, hard_sum_exp, VECTOR, LOG2_E)
            s_max, s_sum_exp = online_softmax(s, s_max, s_sum_exp, VECTOR, power_unit)
            t_max, t_sum_exp = online_softmax(t, t_max, t_sum_exp, VECTOR, power_unit)
            if HARD is not None and student_cols < cols:
                cold = tl.where(at < student_cols, s, float("-inf"))
                hard_max, hard_sum_exp = online_softmax(cold, hard_max, hard_sum_exp, VECTOR, LOG2_E)
        s_row_max, s_row_sum_exp = row_softmax(s_max, s_sum_exp, power_unit)
        t_row_max, t_row_sum_exp = row_softmax(t_max, t_sum_exp, power_unit)
        s_log_sum, t_log_sum = tl.log2(s_row_sum_exp) * (LN_2 * unit), tl.log2(t_row_sum_exp) * (LN_2 * unit)
        values = tl.zeros((COLS,), tl.float32)
        slopes = tl.zeros((COLS,), tl.float32)
        last = (cols - 1) // COLS * COLS
        slope_sum = tl.full((), -1.0, tl.float32)  # for "kl" it is -sum p, known without a pass
        if KIND != "kl" or not GRADIENT:
            for start in range(0, cols, COLS):
                s, t = _pair(S, T, last - start + lane, student_cols, teacher_cols, cols, VECTOR, T_VECTOR, COLS)
                log_q = below_peak(s, s_row_max, scale, s_log_sum)
                log_p = below_peak(t, t_row_max, scale, t_log_sum)
                value, slope, _ = divergence_element(log_q, log_p, beta, rest_beta, KIND)
                values += value
                slopes += slope
            slope_sum = tl.sum(slopes, 0)
        hard_row_max, hard_log_sum = s_row_max, s_log_sum
        if HARD is not None:
            if student_cols == cols:
                hard_max = s_max
            hard_row_max, hard_row_sum_exp = row_softmax(hard_max, hard_sum_exp, LOG2_E)
            hard_log_sum = tl.log2(hard_row_sum_exp)
            hard = _hard_loss(S, y, hard_row_max, hard_log_sum, student_cols)
        if GRADIENT:
            coef_soft = tl.load(FACTORS).to(tl.float32) / temperature
            coef_hard = tl.load(FACTORS + 1).to(tl.float32)
            coef_hard = tl.where(hard == hard, coef_hard, float("nan"))
            tl.debug_barrier()  # every lane has read the label's logit
            for start in range(0, cols, COLS):
                at = start + lane
                if KIND == "kl":
                    at = last - start + lane
                s, t = _pair(S, T, at, student_cols, teacher_cols, cols, VECTOR, T_VECTOR, COLS)
                log_q = below_peak(s, s_row_max, scale, s_log_sum)
                log_p = below_peak(t, t_row_max, scale, t_log_sum)
                value, slope, q = divergence_element(log_q, log_p, beta, rest_beta, KIND)
                if KIND == "kl":
                    values += value
                ds = coef_soft * (slope - q * slope_sum)
                if HARD is not None:
                    p = tl.exp2(below_peak(s, hard_row_max, LOG2_E, hard_log_sum))
                    ds += coef_hard * (p - tl.where(at == y, 1.0, 0.0))
                stored = _readable(at, student_cols, cols, VECTOR, COLS)
                tl.store(S + at, tl.where(at < student_cols, ds, 0.0), stored)
        soft = tl.sum(values, 0)
    tl.store(SOFT + row, soft)
    if HARD is not None:
        tl.store(HARD + row, hard)


@tuned
def cosine_of_logits_config(cols, itemsize, device):
    return padded_row_config(cols, device)


@triton.jit
def _values(X, at, row_cols: tl.constexpr, cols: tl.constexpr, VECTOR: tl.constexpr, COLS: tl.constexpr):
    """Load columns of a row in a loop over `cols`, 0 beyond its end."""
    x = tl.load(X + at, _readable(at, row_cols, cols, VECTOR, COLS), other=0.0).to(tl.float32)
    return tl.where(at < row_cols, x, 0.0)


@triton.jit
def _products(S, T, s_scale, t_scale, lane, student_cols: tl.constexpr, teacher_cols: tl.constexpr,
              cols: tl.constexpr, VECTOR: tl.constexpr, T_VECTOR: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Return the rows' product and squares, after both rows are multiplied by their scales."""
    products = tl.zeros((COLS,), tl.float32)
    s_squares, t_squares = products, products
    for start in range(0, cols, COLS):
        s = _values(S, start + lane, student_cols, cols, VECTOR, COLS) * s_scale
        t = _values(T, start + lane, teacher_cols, cols, T_VECTOR, COLS) * t_scale
        products += s * t
        s_squares += s * s
        t_squares += t * t
    return tl.sum(products, 0), tl.sum(s_squares, 0), tl.sum(t_squares, 0)


@triton.jit(do_not_specialize=["s_stride", "t_stride", "ignore_index"])
def cosine_of_logits(
    S, T, LABELS, FACTORS, SOFT, HARD, s_stride, t_stride, ignore_index, GRADIENT: tl.constexpr,
    student_cols: tl.constexpr, teacher_cols: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // S.dtype.element_ty.primitive_bitwidth
    T_VECTOR: tl.constexpr = 128 // T.dtype.element_ty.primitive_bitwidth
    S += tl.multiple_of(row * s_stride, VECTOR)
    T += tl.multiple_of(row * t_stride, T_VECTOR)
    lane = tl.arange(0, COLS)
    y = tl.load(LABELS + row)
    soft = tl.full((), 0.0, tl.float32)
    hard = soft
    if y == ignore_index:
        if GRADIENT:
            for start in range(0, student_cols, COLS):
                stored = _readable(start + lane, student_cols, student_cols, VECTOR, COLS)
                tl.store(S + start + lane, tl.zeros((COLS,), tl.float32), stored)
    else:
        products = tl.zeros((COLS,), tl.float32)
        s_squares, t_squares = products, products
        row_max = tl.full((COLS // VECTOR,), LOWEST_FINITE, tl.float32)
        sum_exp = tl.zeros((COLS // VECTOR,), tl.float32)
        for start in range(0, cols, COLS):
            at = start + lane
            s = _values(S, at, student_cols, cols, VECTOR, COLS)
            t = _values(T, at, teacher_cols, cols, T_VECTOR, COLS)
            products += s * t
            s_squares += s * s
            t_squares += t * t
            if HARD is not None:
                row_max, sum_exp = online_softmax(
                    tl.where(at < student_cols, s, float("-inf")), row_max, sum_exp, VECTOR, LOG2_E
                )
        product, s_square, t_square = tl.sum(products, 0), tl.sum(s_squares, 0), tl.sum(t_squares, 0)
        s_scale, t_scale = soft + 1.0, soft + 1.0
        if (s_square == float("inf")) | (t_square == float("inf")):
            s_scale = tl.where(s_square == float("inf"), SMALL, 1.0)
            t_scale = tl.where(t_square == float("inf"), SMALL, 1.0)
            product, s_square, t_square = _products(
                S, T, s_scale, t_scale, lane, student_cols, teacher_cols, cols, VECTOR, T_VECTOR, COLS
            )
        s_norm, t_norm = tl.sqrt(s_square), tl.maximum(tl.sqrt(t_square), LEAST_NORM)
        s_divisor = tl.maximum(s_norm, LEAST_NORM)
        cosine = product / (s_divisor * t_norm)
        soft = 1.0 - cosine
        hard_row_max, hard_log_sum = soft, soft
        if HARD is not None:
            hard_row_max, hard_row_sum_exp = row_softmax(row_max, sum_exp, LOG2_E)
            hard_log_sum = tl.log2(hard_row_sum_exp)
            hard = _hard_loss(S, y, hard_row_max, hard_log_sum, student_cols)
        if GRADIENT:
            coef_soft, coef_hard = tl.load(FACTORS).to(tl.float32), tl.load(FACTORS + 1).to(tl.float32)
            coef_soft *= s_scale / s_divisor
            coef_s, coef_t = tl.where(s_norm > 0, cosine / s_norm, 0.0), 1.0 / t_norm
            coef_hard = tl.where(hard == hard, coef_hard, float("nan"))
            tl.debug_barrier()  # every lane has read the label's logit
            last = (student_cols - 1) // COLS * COLS
            for start in range(0, student_cols, COLS):
                at = last - start + lane
                s = _values(S, at, student_cols, student_cols, VECTOR, COLS)
                t = _values(T, at, teacher_cols, student_cols, T_VECTOR, COLS)
                ds = coef_soft * (coef_s * (s * s_scale) - coef_t * (t * t_scale))
                if HARD is not None:
                    p = tl.exp2(below_peak(s, hard_row_max, LOG2_E, hard_log_sum))
                    ds += coef_hard * (p - tl.where(at == y, 1.0, 0.0))
                stored = _readable(at, student_cols, student_cols, VECTOR, COLS)
                tl.store(S + at, tl.where(at < student_cols, ds, 0.0), stored)
    tl.store(SOFT + row, soft)
    if HARD is not None:
        tl.store(HARD + row, hard)


def divergence_rows(student, teacher, labels, factors, soft, hard, kind, beta, temperature, ignore_index, gradient):
    """Write the soft and hard losses of rows, and optionally the student's gradient in place.

    Args:
        student, teacher: (N, V), (N, V'); rows begin at 16-byte boundaries and are readable up to the next boundary.
        labels: (N,), rows of `ignore_index` have loss 0 and gradient 0. factors: (2,) fp32 of soft and hard gradients.
        soft, hard: (N,) fp32; hard may be None.
        kind: a kind of divergence, or "cosine".
    """
    cols = max(student.shape[1], teacher.shape[1])
    kernel, find_config = divergence_of_logits, divergence_of_logits_config
    options = beta, 1 - beta, temperature, kind
    if kind == "cosine":
        kernel, find_config, options = cosine_of_logits, cosine_of_logits_config, ()
    launch(
        kernel, (student.shape[0], 1, 1), find_config(cols, student.element_size(), device_of(student)),
        student, teacher, labels, factors, soft, hard, student.stride(0), teacher.stride(0), ignore_index, *options,
        gradient, student.shape[1], teacher.shape[1], cols,
    )  # fmt: skip


def soft_rows(student, teacher, kind, beta, temperature):
    """Define each row's divergence or, for the kind "cosine", 1 - the cosine."""
    further = student.shape[1] - teacher.shape[1]
    teacher = torch.nn.functional.pad(widen(teacher).detach(), (0, max(further, 0)))
    student = torch.nn.functional.pad(widen(student), (0, max(-further, 0)))
    if kind == "cosine":  # whose squares would overflow
        largest = (z.detach().abs().amax(-1, keepdim=True) for z in (student, teacher))
        student, teacher = (z / torch.where(a > 1e15, a, 1) for z, a in zip((student, teacher), largest))
        return 1 - torch.nn.functional.cosine_similarity(student, teacher, dim=-1)
    return elements(*(log_probabilities(z, temperature) for z in (student, teacher)), kind, beta).sum(-1)


def largest_soft_gradient(student, teacher, keep, kind, temperature):
    """Bound a student logit's gradient in any row's soft loss, a number or () fp32.

    Args:
        student, teacher: (N, V), (N, V') logits. keep: (N,), the rows that count; other rows may hold any values.
    """
    if kind == "cosine":
        norms = torch.linalg.vector_norm(student, dim=1, dtype=torch.float32).clamp(min=1e-8)
        return 2 / norms.masked_fill(~keep, float("inf")).amin()
    if kind == "reverse_kl":  # q_j |log q_j - log p_j - KL|; -log p_j and KL are at most the teacher's range + log V
        least, most = teacher.aminmax(dim=1)
        reach = (most.float().clamp(min=0) - least.float().clamp(max=0)).masked_fill(~keep, 0).amax() / temperature
        return (reach + math.log(max(student.shape[1], teacher.shape[1])) + 1) / temperature
    return 1 / temperature
