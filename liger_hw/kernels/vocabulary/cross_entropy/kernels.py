"""Compute cross entropy with Triton kernels; the package's docstring has the formulas."""

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.kernels._configs import two_on_a_core
from liger_hw.kernels._logits import (
    alignment,
    body_mask,
    body_parts,
    body_pointer,
    edge_columns,
    row_at,
    row_gradient_config,
)
from liger_hw.kernels._math import LOWEST_FINITE
from liger_hw.kernels._scores import log_of, needed_scale, power_unit_of, row_softmax, scaled, score, unit_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


@tuned
def cross_entropy_forward_config(cols, itemsize, plain, gradient, device):
    # A program reads up to three blocks ahead, as two programs' blocks must fit the shared memory: without gradient
    # 8,192 rows of 128,256 columns in bf16 take 0.52 ms on an H200. With gradient blocks have 32 KiB and none is ahead
    # (1.23 ms; with two blocks of 64 KiB ahead 1.29). Softcap, smoothing and predictions hold twice as many values.
    block, values = (4096, 32) if device.async_copy else (8192, 16)
    if not plain:
        block, values = 8192 // itemsize, 32 // itemsize
    staged = itemsize if plain else itemsize + 4  # of the logits, and of fp32 class weights
    stages = min(4, 1 + device.shared_memory // (2 * block * staged)) if device.async_copy else 1
    if plain and gradient and device.async_copy:
        stages, block, values = 1, 32768 // itemsize, 8 * itemsize
    block = min(power_of_2(max(cols, 16)), block)  # at least one whole vector
    values = max(values, two_on_a_core(block, device))
    # with fused multiply-adds the largest logit's distance from itself would be a rounding error, not 0
    return Config({"COLS": block, "STAGES": stages}, row_warps(block, device, per_lane=values), fp_fusion=False)


@tuned
def cross_entropy_backward_config(cols, itemsize, device):
    return row_gradient_config(cols, itemsize, device)


@tuned
def cross_entropy_scale_config(cols, itemsize, device):
    block = min(power_of_2(cols), 4096)
    return Config({"COLS": block}, row_warps(block, device, per_lane=16))


@triton.jit
def _online(x, col, mask, count, WEIGHT, logit_scale, softcap, row_max, sum_exp, weights, smoothed, best, best_col,
            SMOOTH: tl.constexpr, PREDICT: tl.constexpr, cols: tl.constexpr):  # fmt: skip
    """Add a tile to each lane's running maximum, sums and largest logit's column.

    A lane reduces its own vector alone, so that no lane waits for another before the row's end. The tile has this shape
    from the load on, because the reshape of a mask goes through shared memory. `count` columns of a lane's vector
    exist. The maximum stays finite, so that a logit of +inf makes the sum of powers +inf, and NaN alone makes it NaN.
    `smoothed` adds up the distances from the maximum times class weights: a sum of large logits themselves would
    overflow. `weights` adds up twice the class weights, for `_moved`.
    """
    if PREDICT:  # before the softcap, which makes large logits equal; the first of equal ones wins, as in torch.argmax
        a = tl.where(mask, scaled(x, logit_scale), float("-inf"))
        block_best = tl.max(a, 1)
        block_col = tl.min(tl.where(a == block_best[:, None], col, cols - 1), 1)
        better = (block_best > best) | ((block_best == best) & (block_col < best_col))
        best, best_col = tl.where(better, block_best, best), tl.where(better, block_col, best_col)
    z, unit = score(x, logit_scale, softcap)[0], power_unit_of(softcap)
    z = tl.where(mask, z, float("-inf"))
    new_max = tl.minimum(tl.maximum(row_max, tl.max(z, 1)), -LOWEST_FINITE)
    below = z - new_max[:, None]
    sum_exp = sum_exp * tl.exp2((row_max - new_max) * unit) + tl.sum(tl.exp2(below * unit), 1)
    if SMOOTH:
        smoothed = _moved(smoothed, weights, row_max, new_max)
        if WEIGHT is not None:
            weight = tl.load(WEIGHT + col, mask, other=0.0).to(tl.float32)
            smoothed += tl.sum(tl.where(mask, below * weight, 0.0), 1)
            weights += 2.0 * tl.sum(weight, 1)
        else:
            smoothed += tl.sum(tl.where(mask, below, 0.0), 1)
            weights += 2.0 * count
    return new_max, sum_exp, weights, smoothed, best, best_col


@triton.jit
def _moved(smoothed, weights, old_max, new_max):
    """Return weighted distances from another maximum.

    Halves times twice the weights, because a large difference may overflow.
    """
    return smoothed + (old_max * 0.5 - new_max * 0.5) * weights


@triton.jit
def _over_lanes(lane_max, sum_exp, weights, smoothed, best, best_col, softcap, cols: tl.constexpr):
    """Reduce the lanes' values to the row's maximum, sums and largest logit's column."""
    row_max, sum_exp = row_softmax(lane_max, sum_exp, power_unit_of(softcap))
    smoothed, row_best = tl.sum(_moved(smoothed, weights, lane_max, row_max), 0), tl.max(best, 0)
    best_col = tl.min(tl.where(best == row_best, best_col, cols - 1), 0)
    return row_max, sum_exp, tl.sum(weights, 0), smoothed, row_best, best_col


@triton.jit
def _coefficients(y, distance, WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, label_smoothing, lse_square_scale,
             valid_target, cols: tl.constexpr, TOKEN_SCALING: tl.constexpr):  # fmt: skip
    """Return the coefficients of the terms in the loss of a row.

    The terms are -log p_y, -w_j log p_j, -sum_j w_j log p_j / sum_j w_j and lse^2. `distance` is -log2 p_y.
    """
    coef_target = tl.full((), 1.0, tl.float32)
    coef_each = tl.full((), 0.0, tl.float32)
    coef_all, coef_square = coef_each, coef_each + lse_square_scale
    if WEIGHT is not None:
        coef_target = tl.load(WEIGHT + y, valid_target, other=0.0).to(tl.float32)
    if label_smoothing is not None:
        coef_target *= 1.0 - label_smoothing
        coef_each += label_smoothing / cols
        coef_all += label_smoothing
        if WEIGHT is not None:
            coef_all = coef_each * tl.load(WEIGHT_SUM).to(tl.float32)
    if DENOMINATOR is not None:
        denominator = tl.load(DENOMINATOR).to(tl.float32)
        coef_target, coef_each, coef_all = coef_target / denominator, coef_each / denominator, coef_all / denominator
        if COUNT is not None:
            denominator = tl.load(COUNT).to(tl.float32)
        coef_square = coef_square / denominator
    if TOKEN_SCALING:
        p_y = tl.exp2(-distance)
        coef_target, coef_each = coef_target * p_y, coef_each * p_y
        coef_all, coef_square = coef_all * p_y, coef_square * p_y
    return tl.where(valid_target, coef_target, float("nan")), coef_each, coef_all, coef_square


@triton.jit
def _gradient(
    x, col, mask, row_max, WEIGHT, coef_exp, coef_each, coef_target, logit_scale, softcap, SMOOTH: tl.constexpr
):
    """Return dx_j from coefficients that logit_scale has multiplied.

    `coef_exp` multiplies exp(z_j - row_max); `coef_target` is 0 except in the target's column. Peak and sum_exp are
    separate, as the rounding of a single log-sum-exp would be the same relative error in the whole row.
    """
    z, ratio = score(x, logit_scale, softcap)
    dx = coef_exp * tl.exp2((z - row_max) * power_unit_of(softcap)) - coef_target
    if SMOOTH:
        if WEIGHT is not None:
            dx -= coef_each * tl.load(WEIGHT + col, mask, other=0.0).to(tl.float32)
        else:
            dx -= coef_each
    if softcap is not None:
        dx *= 1.0 - ratio * ratio
    return dx


@triton.jit
def _write_zeros(row, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, COLS: tl.constexpr):
    if not ALIGNED or cols % VECTOR != 0:
        edge, edge_valid = edge_columns(row, cols, VECTOR)
        tl.store(row.first + edge, tl.zeros((2 * VECTOR,), tl.float32), edge_valid)
    for start in range(0, row.body, COLS):
        at = start + tl.arange(0, COLS)
        tl.store(row.middle + at, tl.zeros((COLS,), tl.float32), body_mask(row, at, cols, VECTOR, ALIGNED, COLS))


@triton.jit
def _statistics(
    row, WEIGHT, logit_scale, softcap, SMOOTH: tl.constexpr, PREDICT: tl.constexpr, cols: tl.constexpr,
    VECTOR: tl.constexpr, ALIGNED: tl.constexpr, POLICY: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk a row for its maximum z, sums and largest logit's column."""
    LANES: tl.constexpr = COLS // VECTOR
    first = tl.arange(0, LANES) * VECTOR  # column of each lane's vector
    lane = first[:, None] + tl.arange(0, VECTOR)[None, :]
    row_max = tl.full((LANES,), LOWEST_FINITE, tl.float32)
    best = tl.full((LANES,), float("-inf"), tl.float32)
    best_col = tl.full((LANES,), cols - 1, tl.int32)
    sum_exp = tl.zeros((LANES,), tl.float32)
    weights, smoothed = sum_exp, sum_exp
    for start in tl.range(0, row.body, COLS, num_stages=STAGES):
        at = start + lane
        mask = body_mask(row, at, cols, VECTOR, ALIGNED, COLS)
        x = tl.load(row.middle + at, mask, other=0.0, eviction_policy=POLICY)
        count = tl.where(body_mask(row, start + first, cols, VECTOR, ALIGNED, COLS), VECTOR, 0)
        row_max, sum_exp, weights, smoothed, best, best_col = _online(
            x, row.head + at, mask, count, WEIGHT, logit_scale, softcap, row_max, sum_exp, weights, smoothed, best,
            best_col, SMOOTH, PREDICT, cols,
        )  # fmt: skip
    row_max, row_sum_exp, weights, smoothed, best, best_col = _over_lanes(
        row_max, sum_exp, weights, smoothed, best, best_col, softcap, cols
    )
    if not ALIGNED or cols % VECTOR != 0:
        edge, edge_valid = edge_columns(row, cols, VECTOR)
        edge, edge_valid = tl.reshape(edge, (2, VECTOR)), tl.reshape(edge_valid, (2, VECTOR))
        count = tl.where(tl.arange(0, 2) == 0, row.head, cols - row.head - row.body)
        zeros = tl.zeros((2,), tl.float32)
        lanes = _online(
            tl.load(row.first + edge, edge_valid, other=0.0), edge, edge_valid, count, WEIGHT, logit_scale, softcap,
            zeros + row_max, zeros, zeros, zeros, zeros + best, tl.zeros((2,), tl.int32) + best_col, SMOOTH, PREDICT,
            cols,
        )  # fmt: skip
        new_max, edge_sum_exp, _, edge_smoothed, best, best_col = _over_lanes(*lanes, softcap, cols)
        row_sum_exp = row_sum_exp * tl.exp2((row_max - new_max) * power_unit_of(softcap)) + edge_sum_exp
        smoothed = _moved(smoothed, weights, row_max, new_max) + edge_smoothed
        row_max = new_max
    return row_max, row_sum_exp, smoothed, best_col


@triton.jit
def _write_gradient(
    row, x_y, y, valid_target, row_max, WEIGHT, coef_exp, coef_each, coef_target, logit_scale, softcap,
    SMOOTH: tl.constexpr, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, BACKWARDS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Walk a row block by block, and write the gradient over it."""
    lane = tl.arange(0, COLS)
    tl.debug_barrier()  # every lane has read the whole row and its target's logit
    for start in tl.range(0, row.body, COLS, num_stages=STAGES):
        if BACKWARDS:  # L2 holds the last columns that `_statistics` read
            at = (row.body - 1) // COLS * COLS - start + lane
        else:
            at = start + lane
        mask = body_mask(row, at, cols, VECTOR, ALIGNED, COLS)
        x, col = tl.load(row.middle + at, mask, other=0.0, eviction_policy="evict_first"), row.head + at
        dx = _gradient(x, col, mask, row_max, WEIGHT, coef_exp, coef_each, 0.0, logit_scale, softcap, SMOOTH)
        tl.store(row.middle + at, dx, mask, eviction_policy="evict_first")
    if not ALIGNED or cols % VECTOR != 0:
        edge, edge_valid = edge_columns(row, cols, VECTOR)
        x = tl.load(row.first + edge, edge_valid, other=0.0)
        dx = _gradient(x, edge, edge_valid, row_max, WEIGHT, coef_exp, coef_each, 0.0, logit_scale, softcap, SMOOTH)
        tl.store(row.first + edge, dx, edge_valid)
    # Write the target's column again with its own term: a comparison in every column would take registers (H200: 120
    # against 54 a lane), and a core would hold half as many programs.
    dx = _gradient(
        x_y, y, valid_target, row_max, WEIGHT, coef_exp, coef_each, coef_target, logit_scale, softcap, SMOOTH
    )
    tl.debug_barrier()
    tl.store(row.first + y, dx, valid_target)


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def cross_entropy_forward(
    LOGITS, TARGET, WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, LOSS, Z_LOSS, PARTITION, PREDICTED, stride, misaligned,
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, TOKEN_SCALING: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, BACKWARDS: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // LOGITS.dtype.element_ty.primitive_bitwidth
    SMOOTH: tl.constexpr = label_smoothing is not None
    PREDICT: tl.constexpr = PREDICTED is not None
    row = row_at(LOGITS, index, stride, misaligned, cols, VECTOR, ALIGNED)
    y = tl.load(TARGET + index)
    if y == ignore_index:
        if GRADIENT:
            _write_zeros(row, cols, VECTOR, ALIGNED, COLS)
        tl.store(LOSS + index, 0.0)
        if Z_LOSS is not None:
            tl.store(Z_LOSS + index, 0.0)
        if PARTITION is not None:
            tl.store(PARTITION + 2 * index, 0.0)
            tl.store(PARTITION + 2 * index + 1, 1.0)
        if PREDICT:
            tl.store(PREDICTED + index, -1)
    else:
        valid_target = (y >= 0) & (y < cols)
        x_y = tl.load(row.first + y, valid_target, other=0.0)
        z_y, _ = score(x_y, logit_scale, softcap)
        unit = unit_of(softcap)
        POLICY: tl.constexpr = "evict_last" if GRADIENT else ""  # `_write_gradient` reads the row again
        row_max, sum_exp, smoothed, best_col = _statistics(
            row, WEIGHT, logit_scale, softcap, SMOOTH, PREDICT, cols, VECTOR, ALIGNED, POLICY, COLS, STAGES
        )
        log_sum_exp = log_of(sum_exp, softcap)
        lse = row_max + log_sum_exp
        distance = (row_max - z_y) + log_sum_exp  # the difference first: it is exact near the maximum
        distance = tl.where(sum_exp < float("inf"), distance, float("nan"))  # as log-softmax beside a logit of +inf
        coef_target, coef_each, coef_all, coef_square = _coefficients(
            y, distance * power_unit_of(softcap), WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, label_smoothing,
            lse_square_scale, valid_target, cols, TOKEN_SCALING,
        )  # fmt: skip
        z_loss = tl.where(coef_square == 0.0, 0.0, coef_square * (lse * unit) * (lse * unit))
        loss = coef_target * (distance * unit) + z_loss
        if SMOOTH:
            loss += (coef_all * log_sum_exp - coef_each * smoothed) * unit
        tl.store(LOSS + index, loss)
        if Z_LOSS is not None:
            tl.store(Z_LOSS + index, z_loss)
        if PARTITION is not None:
            tl.store(PARTITION + 2 * index, row_max)
            tl.store(PARTITION + 2 * index + 1, sum_exp)
        if PREDICT:
            tl.store(PREDICTED + index, best_col)
        if GRADIENT:
            coef_exp = scaled(coef_target + coef_all + 2.0 * unit * coef_square * lse, logit_scale) / sum_exp
            _write_gradient(
                row, x_y, y, valid_target, row_max, WEIGHT, coef_exp, scaled(coef_each, logit_scale),
                scaled(coef_target, logit_scale), logit_scale, softcap, SMOOTH, cols, VECTOR, ALIGNED, BACKWARDS, COLS,
                STAGES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def cross_entropy_backward(
    LOGITS, TARGET, WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, PARTITION, X_Y, DLOSS, DX, stride, dx_stride, dloss_stride,
    misaligned, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, ALIGNED: tl.constexpr,
    SAME_ALIGNMENT: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # DX may be LOGITS: a program reads the columns alone that it writes, and the targets' logits from X_Y
    TOKEN_SCALING: tl.constexpr = X_Y is not None
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    VECTOR: tl.constexpr = 128 // LOGITS.dtype.element_ty.primitive_bitwidth
    EDGES: tl.constexpr = not ALIGNED or cols % VECTOR != 0
    SMOOTH: tl.constexpr = label_smoothing is not None
    row = row_at(LOGITS, index, stride, misaligned, cols, VECTOR, ALIGNED)
    D = DX + index * dx_stride
    D_BODY = D + row.head
    if SAME_ALIGNMENT:
        D_BODY = body_pointer(DX, index, dx_stride, row.head, misaligned, VECTOR, ALIGNED)
    at = part * COLS + tl.arange(0, COLS)
    mask = body_mask(row, at, cols, VECTOR, ALIGNED, COLS)
    y = tl.load(TARGET + index)
    if y == ignore_index:
        if EDGES and part == 0:
            edge, edge_valid = edge_columns(row, cols, VECTOR)
            tl.store(D + edge, tl.zeros((2 * VECTOR,), tl.float32), edge_valid)
        tl.store(D_BODY + at, tl.zeros((COLS,), tl.float32), mask)
    else:
        valid_target = (y >= 0) & (y < cols)
        row_max, sum_exp = tl.load(PARTITION + 2 * index), tl.load(PARTITION + 2 * index + 1)
        unit = unit_of(softcap)
        lse = row_max + log_of(sum_exp, softcap)
        distance = lse
        if TOKEN_SCALING:
            z_y, _ = score(tl.load(X_Y + index), logit_scale, softcap)
            distance = (row_max - z_y) + log_of(sum_exp, softcap)
        coef_target, coef_each, coef_all, coef_square = _coefficients(
            y, distance * power_unit_of(softcap), WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, label_smoothing,
            lse_square_scale, valid_target, cols, TOKEN_SCALING,
        )  # fmt: skip
        coef_loss = scaled(tl.load(DLOSS + index * dloss_stride), logit_scale)
        coef_exp = (coef_target + coef_all + 2.0 * unit * coef_square * lse) * coef_loss / sum_exp
        coef_target, coef_each = coef_target * coef_loss, coef_each * coef_loss
        x, col = tl.load(row.middle + at, mask, other=0.0), row.head + at
        coef_y = tl.where(col == y, coef_target, 0.0)
        dx = _gradient(x, col, mask, row_max, WEIGHT, coef_exp, coef_each, coef_y, logit_scale, softcap, SMOOTH)
        tl.store(D_BODY + at, dx, mask)
        if EDGES and part == 0:
            edge, edge_valid = edge_columns(row, cols, VECTOR)
            edge_x = tl.load(row.first + edge, edge_valid, other=0.0)
            edge_coef_y = tl.where(edge == y, coef_target, 0.0)
            edge_dx = _gradient(
                edge_x, edge, edge_valid, row_max, WEIGHT, coef_exp, coef_each, edge_coef_y, logit_scale, softcap,
                SMOOTH,
            )  # fmt: skip
            tl.store(D + edge, edge_dx, edge_valid)


@triton.jit(do_not_specialize=["misaligned"])
def cross_entropy_scale(
    DX, DLOSS, stride, dloss_stride, misaligned, ALIGNED: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // DX.dtype.element_ty.primitive_bitwidth
    dloss = tl.load(DLOSS + index * dloss_stride).to(tl.float32)
    if dloss != 1.0:
        row = row_at(DX, index, stride, misaligned, cols, VECTOR, ALIGNED)
        for start in range(0, row.body, COLS):
            at = start + tl.arange(0, COLS)
            mask = body_mask(row, at, cols, VECTOR, ALIGNED, COLS)
            tl.store(row.middle + at, tl.load(row.middle + at, mask, other=0.0).to(tl.float32) * dloss, mask)
        if not ALIGNED or cols % VECTOR != 0:
            edge, edge_valid = edge_columns(row, cols, VECTOR)
            EDGE = row.first + edge
            tl.store(EDGE, tl.load(EDGE, edge_valid, other=0.0).to(tl.float32) * dloss, edge_valid)


def _kernel_numbers(formula):
    """Return the formula's numbers for a kernel, which omits the code for each None."""
    ignore_index, label_smoothing, square, softcap, logit_scale, token_scaling = formula
    return ignore_index, label_smoothing or None, square, softcap, needed_scale(logit_scale, softcap), token_scaling


def forward_rows(logits, targets, formula, loss, z_loss=None, partition=None, predicted=None, gradient=False):
    """Write the losses of the rows of `logits`, and optionally their gradient over them.

    Args:
        logits: rows of unit stride. loss, z_loss: (N,) fp32.
        partition: 2N fp32, for each row a peak, in units of `unit_of`, and a total: sum_j exp(z_j) = total exp(peak).
        predicted: (N,) int64.
    """
    rows, cols = logits.shape
    misaligned, aligned = alignment(logits)
    plain = formula.softcap is None and formula.label_smoothing == 0 and predicted is None
    device = device_of(logits)
    config = cross_entropy_forward_config(cols, logits.element_size(), plain, gradient, device)
    launch(
        cross_entropy_forward, (rows, 1, 1), config,
        logits, *targets, loss, z_loss, partition, predicted, logits.stride(0), misaligned, *_kernel_numbers(formula),
        gradient, aligned, not device.ascending_only, cols,
    )  # fmt: skip


def backward_rows(logits, targets, formula, partition, dloss, dx=None):
    """Write the gradient of `logits` to `dx` or over them; `dloss` is (N,) or ()."""
    dx = logits if dx is None else dx
    rows, cols = logits.shape
    misaligned, aligned = alignment(logits)
    *numbers, token_scaling = _kernel_numbers(formula)
    x_y = logits.gather(1, targets.target.long().clamp(0, cols - 1)[:, None]) if token_scaling else None
    dloss_stride = dloss.stride(0) if dloss.ndim else 0  # a reduction's gradient is one value for all rows
    same = alignment(dx)[0] == misaligned and (dx.stride(0) - logits.stride(0)) * dx.element_size() % 16 == 0
    config = cross_entropy_backward_config(cols, logits.element_size(), device_of(logits))
    launch(
        cross_entropy_backward, (rows, body_parts(logits, config["COLS"]), 1), config,
        logits, *targets, partition, x_y, dloss, dx, logits.stride(0), dx.stride(0), dloss_stride, misaligned,
        *numbers, aligned, same, cols,
    )  # fmt: skip


def scale_rows(dx, dloss):
    """Multiply each row of `dx` by its incoming gradient, (N,) or (), unless 1."""
    rows, cols = dx.shape
    dloss_stride = dloss.stride(0) if dloss.ndim else 0
    config = cross_entropy_scale_config(cols, dx.element_size(), device_of(dx))
    launch(cross_entropy_scale, (rows, 1, 1), config, dx, dloss, dx.stride(0), dloss_stride, *alignment(dx), cols)
