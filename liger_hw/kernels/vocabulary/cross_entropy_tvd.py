r"""Compute cross entropy and total variation distance of each row of logits at once.

    q = softmax(s),   p = softmax(t)
    ce = -log q_y,    tvd = sum_j |q_j - p_j| / 2
    ds_j = dce (q_j - [j = y]) + dtvd (a_j - q_j sum_i a_i),     a_j = q_j sign(q_j - p_j) / 2

Letters: N rows of V columns. The forward reads both rows twice, for the sums of powers and, backwards so that L2 holds
the first columns, for the distance. It keeps five numbers a row. The backward reads both once and writes the gradient
(3NV), so the incoming gradients may be any, one for each row.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_kernel_dtype
from liger_hw.dispatch import Cost, op, raw, widen
from liger_hw.kernels._logits import padded_columns, padded_row_config, padded_rows, row_gradient_config
from liger_hw.kernels._math import LN_2, LOG2_E, LOWEST_FINITE, in_row
from liger_hw.kernels._scores import online_softmax, row_softmax
from liger_hw.kernels.vocabulary.cross_entropy.formula import TARGET_DTYPES, check_op_labels
from liger_hw.kernels.vocabulary.selective_log_softmax.formula import Scaling, selected_rows
from liger_hw.launch import launch
from liger_hw.tuning import tuned

NUMBERS_PER_ROW = 5  # of a row: peak and total of the student's powers, of the teacher's, and the sum of a_j


def _validate(student_logits, teacher_logits, target, ignore_index):
    student, teacher = student_logits, teacher_logits
    check(student.ndim == 2 and student.is_floating_point(), "student_logits", student, "floats (N, V)")
    fits = teacher.shape == student.shape and teacher.is_floating_point() and teacher.device == student.device
    check(fits, "teacher_logits", teacher, f"floats of shape {tuple(student.shape)} on {student.device}")
    fits = target.dtype in TARGET_DTYPES and target.shape == student.shape[:1] and target.device == student.device
    check(fits, "target", target, f"int64 or int32 of shape ({len(student)},) on {student.device}, one for each row")
    check_op_labels("target", target, student.shape[1], ignore_index)


@op(validate=_validate)
def cross_entropy_tvd(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, target: torch.Tensor, ignore_index: int = -100
):
    """Compute each row's cross entropy and its total variation distance from a teacher (arXiv:2307.15190).

    Args:
        student_logits: (N, V), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and
            bf16. Rows that do not begin at 16-byte boundaries are copied once.
        teacher_logits: (N, V), any floating dtype; a constant.
        target: (N,) int64 or int32. Both losses and the gradient of a row are 0 where it is `ignore_index`.

    Returns:
        (cross entropy, total variation distance), both (N,) in fp32 (fp64 for fp64 inputs), both with a gradient. A
        second backward is right.

    Raises:
        ValueError: shapes, dtypes or devices do not fit or, on a CPU, a target is outside the vocabulary. Elsewhere the
            cross entropy is then NaN.

    Examples:
        >>> student, teacher = torch.rand(3, 10), torch.rand(3, 10)
        >>> losses = liger_hw.cross_entropy_tvd(student, teacher, torch.tensor([1, 2, 3]))
    """
    log_probs, _, _ = selected_rows(student_logits, target, Scaling(ignore_index, None, 1.0, 1.0))
    ignored = (target == ignore_index)[:, None]
    logits = (widen(x).masked_fill(ignored, 0) for x in (student_logits, teacher_logits.detach()))
    q, p = (x.softmax(-1) for x in logits)
    return -log_probs, (q - p).masked_fill(ignored, 0).abs().sum(-1) / 2


cross_entropy_tvd.shards(student_logits="N V", teacher_logits="N V", target="N", returns=("target", "target"))


@cross_entropy_tvd.cost
def _(student_logits, teacher_logits, *options, **named):
    size, both = student_logits.numel(), student_logits.nbytes + teacher_logits.nbytes
    return Cost(both, both + student_logits.nbytes, 12 * size, 10 * size)


@tuned
def cross_entropy_tvd_forward_config(cols, itemsize, device):
    return padded_row_config(cols, device)


@tuned
def cross_entropy_tvd_backward_config(cols, itemsize, device):
    return row_gradient_config(max(cols, 16), itemsize, device)


@triton.jit
def _row(X, row, stride):
    VECTOR: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    return X + tl.multiple_of(row * stride, VECTOR)


@triton.jit
def _scores(X, at, cols: tl.constexpr, COLS: tl.constexpr, POLICY: tl.constexpr):
    return padded_columns(X, at, float("-inf"), cols, COLS, POLICY)  # -inf beyond the row


@triton.jit
def _slope(q, p):
    return tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0))


@triton.jit(do_not_specialize=["s_stride", "t_stride", "ignore_index"])
def cross_entropy_tvd_forward(
    S, T, TARGET, CE, TVD, STATE, s_stride, t_stride, ignore_index, cols: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    S_ROW, T_ROW = _row(S, row, s_stride), _row(T, row, t_stride)
    lane = tl.arange(0, COLS)
    y = tl.load(TARGET + row)
    ce = tl.full((), 0.0, tl.float32)
    distance = ce
    if y != ignore_index:
        VECTOR: tl.constexpr = 128 // S.dtype.element_ty.primitive_bitwidth
        s_max = tl.full((COLS // VECTOR,), LOWEST_FINITE, tl.float32)
        s_sum_exp = tl.zeros((COLS // VECTOR,), tl.float32)
        t_max, t_sum_exp = s_max, s_sum_exp
        for start in range(0, cols, COLS):
            s_max, s_sum_exp = online_softmax(
                _scores(S_ROW, start + lane, cols, COLS, "evict_last"), s_max, s_sum_exp, VECTOR, LOG2_E
            )
            t_max, t_sum_exp = online_softmax(
                _scores(T_ROW, start + lane, cols, COLS, "evict_last"), t_max, t_sum_exp, VECTOR, LOG2_E
            )
        s_row_max, s_row_sum_exp = row_softmax(s_max, s_sum_exp, LOG2_E)
        t_row_max, t_row_sum_exp = row_softmax(t_max, t_sum_exp, LOG2_E)
        distances, slopes = tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32)
        last = (cols - 1) // COLS * COLS
        for start in range(0, cols, COLS):
            at = last - start + lane
            q = tl.exp2((_scores(S_ROW, at, cols, COLS, "evict_first") - s_row_max) * LOG2_E) * (1.0 / s_row_sum_exp)
            p = tl.exp2((_scores(T_ROW, at, cols, COLS, "evict_first") - t_row_max) * LOG2_E) * (1.0 / t_row_sum_exp)
            distances += tl.abs(q - p)
            slopes += _slope(q, p)
        distance = 0.5 * tl.sum(distances, 0)
        valid_target = (y >= 0) & (y < cols)
        z_y = tl.load(S_ROW + y, valid_target, other=0.0).to(tl.float32)
        ce = tl.where(valid_target, tl.log2(s_row_sum_exp) * LN_2 - (z_y - s_row_max), float("nan"))
        STATE += row * 5
        tl.store(STATE, s_row_max)
        tl.store(STATE + 1, s_row_sum_exp)
        tl.store(STATE + 2, t_row_max)
        tl.store(STATE + 3, t_row_sum_exp)
        tl.store(STATE + 4, tl.sum(slopes, 0))
    tl.store(CE + row, ce)
    tl.store(TVD + row, distance)


@triton.jit(do_not_specialize=["s_stride", "t_stride", "ds_stride", "ignore_index"])
def cross_entropy_tvd_backward(
    S, T, TARGET, STATE, D_CE, D_TVD, DS, s_stride, t_stride, ds_stride, ignore_index, cols: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // S.dtype.element_ty.primitive_bitwidth
    padded: tl.constexpr = (cols + VECTOR - 1) // VECTOR * VECTOR
    at = tl.program_id(1) * COLS + tl.arange(0, COLS)
    DS_ROW = _row(DS, row, ds_stride)
    y = tl.load(TARGET + row)
    if y == ignore_index:
        tl.store(DS_ROW + at, tl.zeros((COLS,), tl.float32), in_row(at, padded, COLS))
    else:
        STATE += row * 5
        s, t = _scores(_row(S, row, s_stride), at, cols, COLS, ""), _scores(_row(T, row, t_stride), at, cols, COLS, "")
        q = tl.exp2((s - tl.load(STATE)) * LOG2_E) / tl.load(STATE + 1)
        p = tl.exp2((t - tl.load(STATE + 2)) * LOG2_E) / tl.load(STATE + 3)
        coef_ce = tl.load(D_CE + row).to(tl.float32)
        coef_ce = tl.where((y >= 0) & (y < cols), coef_ce, float("nan"))
        ds = coef_ce * (q - tl.where(at == y, 1.0, 0.0))
        ds += tl.load(D_TVD + row).to(tl.float32) * (_slope(q, p) - q * tl.load(STATE + 4))
        tl.store(DS_ROW + at, tl.where(at < cols, ds, 0.0), in_row(at, padded, COLS))


def _empty_results(student):
    ce = student.new_empty(len(student), dtype=torch.float32)
    return ce, torch.empty_like(ce), ce.new_empty(len(student), NUMBERS_PER_ROW)


@raw(_empty_results)
def _cross_entropy_tvd(
    student: torch.Tensor, teacher: torch.Tensor, target: torch.Tensor, ignore_index: int, *, ce, tvd, state
):
    (rows, cols), student, teacher = student.shape, padded_rows(student), padded_rows(teacher)
    config = cross_entropy_tvd_forward_config(cols, student.element_size(), device_of(student))
    launch(
        cross_entropy_tvd_forward, (rows, 1, 1), config,
        student, teacher, target, ce, tvd, state, student.stride(0), teacher.stride(0), ignore_index, cols,
    )  # fmt: skip


def _padded_gradient(student):
    vector, (rows, cols) = 16 // student.element_size(), student.shape
    return student.new_empty(rows, -(-cols // vector) * vector)


@raw(_padded_gradient)
def _cross_entropy_tvd_backward(
    student: torch.Tensor, teacher: torch.Tensor, target: torch.Tensor, state: torch.Tensor, dce: torch.Tensor,
    dtvd: torch.Tensor, ignore_index: int, *, ds,
):  # fmt: skip
    """Compute the gradient, padded to whole vectors."""
    rows, cols = student.shape
    student, teacher = padded_rows(student), padded_rows(teacher)
    config = cross_entropy_tvd_backward_config(cols, student.element_size(), device_of(student))
    launch(
        cross_entropy_tvd_backward, (rows, -(-cols // config["COLS"]), 1), config,
        student, teacher, target, state, dce.contiguous(), dtvd.contiguous(), ds, student.stride(0), teacher.stride(0),
        ds.stride(0), ignore_index, cols,
    )  # fmt: skip


@_cross_entropy_tvd.backward()
def _(student, teacher, target, state, ignore_index, dce, dtvd, *, student_grad):
    ds = _cross_entropy_tvd_backward(student, teacher, target, state, dce, dtvd, ignore_index)
    return ds[:, : student.shape[1]]


@cross_entropy_tvd.register("triton")
def _(student_logits, teacher_logits, target, ignore_index):
    check_kernel_dtype("teacher_logits", teacher_logits)
    return _cross_entropy_tvd.apply(student_logits, teacher_logits.detach(), target.contiguous(), int(ignore_index))
