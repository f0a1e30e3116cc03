"""Compute the selective log-softmax with Triton kernels; the package's docstring has the formulas."""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.kernels._logits import (
    alignment,
    body_mask,
    body_parts,
    body_pointer,
    edge_columns,
    row_at,
    row_gradient_config,
)
from liger_hw.kernels._math import LN_2, LOG2_E, LOWEST_FINITE
from liger_hw.kernels._scores import needed_scale, power_unit_of, scaled, score, unit_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned

LEAST_POWER = tl.constexpr(-1e4)  # 2^-1e4 is 0 in fp32, as 2^-inf; times a sum of 0 it is 0, where -inf gives NaN


@tuned
def selective_log_softmax_forward_config(cols, itemsize, device):
    # The cross entropy's forward without gradient has these values, measured on an H200 in bf16. fp32 with as many
    # values a lane spills 8 bytes on sm_80.
    stages, values = 4 if device.async_copy else 1, 64 // itemsize
    block = min(power_of_2(max(cols, 16)), 4096)  # at least one whole vector
    while stages > 1 and block * stages * itemsize > device.shared_memory // 2:
        block //= 2
    # with fused multiply-adds the largest logit's distance from itself would be a rounding error, not 0
    return Config({"COLS": block, "STAGES": stages}, row_warps(block, device, per_lane=values), fp_fusion=False)


@tuned
def selective_log_softmax_backward_config(cols, itemsize, device):
    return row_gradient_config(cols, itemsize, device)


@tuned
def selective_log_softmax_statistics_config(cols, itemsize, device):
    return selective_log_softmax_forward_config(cols, itemsize, device)


@triton.jit
def _score(x, softcap, logit_scale, temperature):
    """Return `score`, with a softcap divided by the temperature, which else divides the unit."""
    z, ratio = score(x, logit_scale, softcap)
    return z if softcap is None else z * (1.0 / temperature), ratio


@triton.jit
def _unit(softcap, temperature):
    """Return the unit of a `_score`."""
    return unit_of(softcap) if softcap is not None else 1.0 / temperature


@triton.jit
def _power_unit(softcap, temperature):
    """Return the unit of a `_score` in units of ln 2."""
    return power_unit_of(softcap) if softcap is not None else LOG2_E / temperature


@triton.jit
def _online_softmax(z, mask, unit, row_max, sum_exp, moment, MOMENT: tl.constexpr, VECTOR: tl.constexpr):
    """Add a block to each lane's running maximum and both sums of powers 2^(unit z).

    The second sum multiplies powers by their exponents. A lane reduces its own vectors alone, so that none waits for
    another before the row's end.
    """
    LANES: tl.constexpr = z.shape[0] // VECTOR
    z = tl.reshape(tl.where(mask, z, float("-inf")), (LANES, VECTOR))
    new_max = tl.minimum(tl.maximum(row_max, tl.max(z, 1)), -LOWEST_FINITE)  # +inf makes the sum +inf, not NaN
    exponent, moved = (z - new_max[:, None]) * unit, (row_max - new_max) * unit
    exp = tl.exp2(exponent)
    if MOMENT:
        moved = tl.maximum(moved, LEAST_POWER)
        moment = (moment + moved * sum_exp) * tl.exp2(moved)
        moment += tl.sum(tl.where(exp > 0, exp * exponent, 0.0), 1)
    return new_max, sum_exp * tl.exp2(moved) + tl.sum(exp, 1), moment


@triton.jit
def _over_lanes(lane_max, sum_exp, moment, unit, MOMENT: tl.constexpr):
    """Reduce the lanes' values to the row's maximum and sums."""
    row_max = tl.max(lane_max, 0)
    moved = tl.maximum((lane_max - row_max) * unit, LEAST_POWER)
    rescale = tl.exp2(moved)
    if MOMENT:
        moment = tl.sum((moment + moved * sum_exp) * rescale, 0)
    return row_max, tl.sum(sum_exp * rescale, 0), moment


@triton.jit
def _statistics(
    row, softcap, logit_scale, temperature, MOMENT: tl.constexpr, cols: tl.constexpr, VECTOR: tl.constexpr,
    ALIGNED: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk a row for its maximum z and both sums of exponentials."""
    LANES: tl.constexpr = COLS // VECTOR
    lane = tl.arange(0, COLS)
    unit = _power_unit(softcap, temperature)
    row_max = tl.full((LANES,), LOWEST_FINITE, tl.float32)
    sum_exp = tl.zeros((LANES,), tl.float32)
    moment = tl.zeros((LANES,), tl.float32)
    if not ALIGNED or cols % VECTOR != 0:
        edge, edge_valid = edge_columns(row, cols, VECTOR)
        edge_x = tl.load(row.first + edge, edge_valid, other=0.0)
        edge_z = _score(edge_x, softcap, logit_scale, temperature)[0]
        none = tl.zeros((2,), tl.float32)
        edge_stats = _online_softmax(edge_z, edge_valid, unit, none + LOWEST_FINITE, none, none, MOMENT, VECTOR)
        edge_max, edge_sum_exp, edge_moment = _over_lanes(*edge_stats, unit, MOMENT)
        first = tl.arange(0, LANES) == 0
        row_max = tl.where(first, edge_max, row_max)
        sum_exp = tl.where(first, edge_sum_exp, sum_exp)
        if MOMENT:
            moment = tl.where(first, edge_moment, moment)
    for start in tl.range(0, row.body, COLS, num_stages=STAGES):
        at = start + lane
        mask = body_mask(row, at, cols, VECTOR, ALIGNED, COLS)
        z = _score(tl.load(row.middle + at, mask, other=0.0), softcap, logit_scale, temperature)[0]
        row_max, sum_exp, moment = _online_softmax(z, mask, unit, row_max, sum_exp, moment, MOMENT, VECTOR)
    return _over_lanes(row_max, sum_exp, moment, unit, MOMENT)


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def selective_log_softmax_forward(
    LOGITS, TOKENS, LOG_PROBS, ENTROPY, LSE, PARTITION, stride, misaligned, ignore_index, softcap, logit_scale,
    temperature, ALIGNED: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // LOGITS.dtype.element_ty.primitive_bitwidth
    MOMENT: tl.constexpr = ENTROPY is not None
    y = tl.load(TOKENS + index)
    log_prob = tl.full((), 0.0, tl.float32)
    entropy, lse, row_max, sum_exp = log_prob, log_prob, log_prob, log_prob + 1.0
    if y != ignore_index:
        row = row_at(LOGITS, index, stride, misaligned, cols, VECTOR, ALIGNED)
        valid_target = (y >= 0) & (y < cols)
        z_y = _score(tl.load(row.first + y, valid_target, other=0.0), softcap, logit_scale, temperature)[0]
        unit = _unit(softcap, temperature)
        row_max, sum_exp, moment = _statistics(
            row, softcap, logit_scale, temperature, MOMENT, cols, VECTOR, ALIGNED, COLS, STAGES
        )
        lse = row_max * unit + tl.log2(sum_exp) * LN_2
        # the difference first: it is exact near the maximum; of halves, because a large one may overflow
        log_prob = (z_y * 0.5 - row_max * 0.5) * (2.0 * unit) - tl.log2(sum_exp) * LN_2
        log_prob = tl.where(valid_target & (sum_exp < float("inf")), log_prob, float("nan"))
        if MOMENT:
            entropy = (tl.log2(sum_exp) - moment / sum_exp) * LN_2
    tl.store(LOG_PROBS + index, log_prob)
    tl.store(LSE + index, lse)
    tl.store(PARTITION + 2 * index, row_max)
    tl.store(PARTITION + 2 * index + 1, sum_exp)
    if ENTROPY is not None:
        tl.store(ENTROPY + index, entropy)


@triton.jit
def _gradient(
    x, col, y, row_max, log_sum_exp, entropy, coef_token, coef_exp, coef_entropy, softcap, logit_scale, temperature
):
    """Return dx_j.

    The factors include logit_scale / temperature, and those of exponentials 1 / sum_exp.
    """
    z, ratio = _score(x, softcap, logit_scale, temperature)
    exponent = (z - row_max) * _power_unit(softcap, temperature)
    exp = tl.exp2(exponent)
    factor = tl.zeros_like(exp) + coef_exp
    if coef_entropy is not None:
        factor -= coef_entropy * tl.where(exp > 0, (exponent - log_sum_exp) * LN_2 + entropy, 0.0)
    dx = factor * exp + tl.where(col == y, coef_token, 0.0)
    if softcap is not None:
        dx *= 1.0 - ratio * ratio
    return dx


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def selective_log_softmax_backward(
    LOGITS, TOKENS, ENTROPY, PARTITION, D_LOG_PROBS, D_ENTROPY, D_LSE, DX, stride, dx_stride, misaligned, ignore_index,
    softcap, logit_scale, temperature, ALIGNED: tl.constexpr, SAME_ALIGNMENT: tl.constexpr, cols: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    VECTOR: tl.constexpr = 128 // LOGITS.dtype.element_ty.primitive_bitwidth
    EDGES: tl.constexpr = not ALIGNED or cols % VECTOR != 0
    row = row_at(LOGITS, index, stride, misaligned, cols, VECTOR, ALIGNED)
    D = DX + index * dx_stride
    D_BODY = D + row.head
    if SAME_ALIGNMENT:
        D_BODY = body_pointer(DX, index, dx_stride, row.head, misaligned, VECTOR, ALIGNED)
    at = part * COLS + tl.arange(0, COLS)
    mask = body_mask(row, at, cols, VECTOR, ALIGNED, COLS)
    y = tl.load(TOKENS + index)
    if y == ignore_index:
        tl.store(D_BODY + at, tl.zeros((COLS,), tl.float32), mask)
        if EDGES and part == 0:
            edge, edge_valid = edge_columns(row, cols, VECTOR)
            tl.store(D + edge, tl.zeros((2 * VECTOR,), tl.float32), edge_valid)
    else:
        row_max, sum_exp = tl.load(PARTITION + 2 * index), tl.load(PARTITION + 2 * index + 1)
        scale = (1.0 if logit_scale is None else logit_scale) / temperature
        coef_token = tl.load(D_LOG_PROBS + index).to(tl.float32) * scale
        coef_token = tl.where((y >= 0) & (y < cols) & (sum_exp < float("inf")), coef_token, float("nan"))
        coef_exp = -coef_token / sum_exp
        if D_LSE is not None:
            coef_exp += tl.load(D_LSE + index).to(tl.float32) * scale / sum_exp
        log_sum_exp = tl.log2(sum_exp)
        entropy = None
        coef_entropy = None
        if D_ENTROPY is not None:
            entropy = tl.load(ENTROPY + index)
            coef_entropy = tl.load(D_ENTROPY + index).to(tl.float32) * scale / sum_exp
        dx = _gradient(
            tl.load(row.middle + at, mask, other=0.0), row.head + at, y, row_max, log_sum_exp, entropy, coef_token,
            coef_exp, coef_entropy, softcap, logit_scale, temperature,
        )  # fmt: skip
        tl.store(D_BODY + at, dx, mask)
        if EDGES and part == 0:
            edge, edge_valid = edge_columns(row, cols, VECTOR)
            edge_dx = _gradient(
                tl.load(row.first + edge, edge_valid, other=0.0), edge, y, row_max, log_sum_exp, entropy, coef_token,
                coef_exp, coef_entropy, softcap, logit_scale, temperature,
            )  # fmt: skip
            tl.store(D + edge, edge_dx, edge_valid)


@triton.jit(do_not_specialize=["ignore_index"])
def selective_log_softmax_statistics(
    LOGITS, TOKENS, PARTITION, IS_TOP1, MEAN, stride, ignore_index, softcap, logit_scale, temperature,
    cols: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write whether a row's token has the first largest logit, and the mean of z.

    Without the mean, a row is not read where its token's z is clearly below the maximum that the forward found.
    """
    index = tl.program_id(0).to(tl.int64)
    y = tl.load(TOKENS + index)
    inside = (y != ignore_index) & (y >= 0) & (y < cols)
    x_y = tl.load(LOGITS + index * stride + y, inside, other=0.0).to(tl.float32)
    row_max = tl.load(PARTITION + 2 * index)
    skips = y == ignore_index
    if MEAN is None:
        z_y = _score(x_y, softcap, logit_scale, temperature)[0]
        skips |= z_y < row_max - tl.abs(row_max) * 1e-5
    larger = tl.zeros((COLS,), tl.int32)
    total = tl.zeros((COLS,), tl.float32)
    x_y = tl.where(x_y != x_y, float("inf"), scaled(x_y, logit_scale))  # NaN is the largest, as in torch
    for start in tl.range(0, tl.where(skips, 0, cols), COLS, num_stages=STAGES):
        at = start + tl.arange(0, COLS)
        mask = at < cols
        x = tl.load(LOGITS + index * stride + at, mask, other=0.0).to(tl.float32)
        if MEAN is not None:
            total += tl.where(mask, _score(x, softcap, logit_scale, temperature)[0], 0.0)
        if IS_TOP1 is not None:
            x = tl.where(x != x, float("inf"), scaled(x, logit_scale))
            larger |= (mask & ((x > x_y) | ((x == x_y) & (at < y)))).to(tl.int32)
    if IS_TOP1 is not None:
        is_first = inside & (tl.max(larger, 0) == 0)
        tl.store(IS_TOP1 + index, tl.where(skips, 0, is_first.to(tl.uint8)))
    if MEAN is not None:
        tl.store(MEAN + index, tl.sum(total, 0) / cols * _unit(softcap, temperature))


def _kernel_numbers(scaling):
    """Return the scaling's numbers for a kernel, which omits the code for each None."""
    ignore_index, softcap, logit_scale, temperature = scaling
    return ignore_index, softcap, needed_scale(logit_scale, softcap), temperature


def forward_rows(logits, tokens, scaling, log_probs, entropy, lse, partition):
    """Write the log-probability, entropy, log-sum-exp and partition of rows of `logits`, in fp32.

    Args:
        logits: rows of unit stride. log_probs, lse: (N,). entropy: (N,) or None.
        partition: (N, 2), a peak and a total: sum_j exp(z_j) = total exp(peak). The peak is in units of `_unit`.
    """
    rows, cols = logits.shape
    misaligned, aligned = alignment(logits)
    config = selective_log_softmax_forward_config(cols, logits.element_size(), device_of(logits))
    launch(
        selective_log_softmax_forward, (rows, 1, 1), config,
        logits, tokens, log_probs, entropy, lse, partition, logits.stride(0), misaligned,
        *_kernel_numbers(scaling), aligned, cols,
    )  # fmt: skip


def backward_rows(logits, tokens, scaling, entropy, partition, dlog_probs, dentropy=None, dlse=None, dx=None):
    """Write the gradient of `logits` to `dx` or over them, from (N,) gradients or None."""
    dx = logits if dx is None else dx
    rows, cols = logits.shape
    misaligned, aligned = alignment(logits)
    same = alignment(dx)[0] == misaligned and (dx.stride(0) - logits.stride(0)) * dx.element_size() % 16 == 0
    config = selective_log_softmax_backward_config(cols, logits.element_size(), device_of(logits))
    incoming = (grad if grad is None else grad.contiguous() for grad in (dlog_probs, dentropy, dlse))
    launch(
        selective_log_softmax_backward, (rows, body_parts(logits, config["COLS"]), 1), config,
        logits, tokens, entropy, partition, *incoming, dx, logits.stride(0), dx.stride(0), misaligned,
        *_kernel_numbers(scaling), aligned, same, cols,
    )  # fmt: skip


def write_statistics(logits, tokens, scaling, partition, is_top1, mean_logits, log_sum_sq_probs):
    """Write `RowStatistics` of rows of `logits`, (N,) each or None.

    `selective_log_softmax_statistics` computes the first two. The third reads the logits once more, in the forward
    kernel at half the temperature, where exponentials are squares.

    Args:
        logits, tokens, scaling, partition: of `forward_rows`, which wrote `partition`.
    """
    top1 = is_top1 if is_top1 is None else is_top1.view(torch.uint8)
    for results in ((top1, None), (None, mean_logits)):  # H100, bf16: 0.25 ms for both, 0.42 by one launch
        if any(row is not None for row in results):
            rows, cols = logits.shape
            config = selective_log_softmax_statistics_config(cols, logits.element_size(), device_of(logits))
            launch(
                selective_log_softmax_statistics, (rows, 1, 1), config,
                logits, tokens, partition, *results, logits.stride(0), *_kernel_numbers(scaling), cols,
            )  # fmt: skip
    if log_sum_sq_probs is not None:
        unused, lse, squares = (torch.empty_like(x) for x in (log_sum_sq_probs, log_sum_sq_probs, partition))
        half = scaling._replace(temperature=scaling.temperature / 2)
        forward_rows(logits, tokens, half, unused, None, lse, squares)
        total, squares_total = partition[:, 1], squares[:, 1]  # of the same peak
        torch.sub(squares_total.log(), total.log(), alpha=2, out=log_sum_sq_probs)
        log_sum_sq_probs.masked_fill_(tokens == scaling.ignore_index, 0)
