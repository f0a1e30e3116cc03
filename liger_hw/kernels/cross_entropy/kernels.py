"""The Triton kernels of cross entropy; the formulas are in the package's docstring."""

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.kernels._math import in_row
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


@tuned
def cross_entropy_forward_config(cols, itemsize, plain, gradient, device):
    # Blocks are read ahead where that costs no registers. H200, 8,192 rows of bf16, in ms: 128,256 columns take 0.52
    # without gradient with 4,096 on 4 warps (0.88 with 16,384 on 32), and 1.41 with it with 8,192 on 16 warps (1.45
    # with 4,096, 1.54 with 16,384); 32,000 columns 0.16 and, with 4,096 on 8 warps, 0.32. Softcap, smoothing and
    # predictions hold twice as many values a lane.
    stages, block, values = 1, 8192, 16
    if device.async_copy:
        stages, block, values = 4, 8192 if gradient and cols > 65536 else 4096, 16 if gradient else 32
    if not plain:
        block, values = block // 2, values // 2
    block = min(power_of_2(cols), block)
    staged = stages * (itemsize if plain else itemsize + 4)  # of the logits, and of fp32 class weights
    while stages > 1 and block * staged > device.shared_memory // 2:
        block //= 2
    return Config({"COLS": block, "STAGES": stages}, row_warps(block, device, per_lane=values))


@tuned
def cross_entropy_backward_config(cols, itemsize, device):
    block = min(power_of_2(cols), 8192)
    return Config({"COLS": block}, row_warps(block, device, per_lane=16))


@tuned
def cross_entropy_scale_config(cols, itemsize, device):
    block = min(power_of_2(cols), 4096)
    return Config({"COLS": block}, row_warps(block, device, per_lane=16))


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # a running maximum that a row of -inf does not turn into inf - inf


@triton.jit
def _split(row, stride, misaligned, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """A row is `head` columns to its first 16-byte boundary, `body` columns in whole vectors, and less than one more.

    The body needs a mask by vectors at most, which keeps its accesses at 16 bytes whatever the width.
    """
    if ALIGNED:
        return 0, cols // VECTOR * VECTOR
    else:
        before = row * stride
        if misaligned is not None:
            before += misaligned
        head = tl.minimum((VECTOR - before % VECTOR) % VECTOR, cols).to(tl.int32)
        return head, (cols - head) // VECTOR * VECTOR


@triton.jit
def _edge(head, body, cols: tl.constexpr, VECTOR: tl.constexpr):
    """The columns before and after the body, and which lanes have one."""
    lane = tl.arange(0, 2 * VECTOR)
    col = tl.where(lane < VECTOR, lane, head + body + lane - VECTOR)
    return col, tl.where(lane < VECTOR, lane < head, col < cols)


@triton.jit
def _in_body(at, body, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, COLS: tl.constexpr):
    if ALIGNED:
        return in_row(at, cols // VECTOR * VECTOR, COLS)
    else:
        return at < tl.multiple_of(body, VECTOR)


@triton.jit
def _body_pointer(X, row, stride, head, misaligned, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Where a row's body begins, with what the compiler must be told: that it is a 16-byte boundary."""
    if ALIGNED:
        return X + tl.multiple_of(row * stride, VECTOR)
    elif misaligned is None:
        return X + tl.multiple_of(row * stride + head, VECTOR)
    else:  # not every compiler hears it in this form
        return tl.multiple_of(X + (row * stride + head), 16)


@triton.jit
def _tanh(x):
    """To 3 ulp of itself everywhere, as the softcap multiplies its error. (2 sigmoid(2x) - 1 loses small results.)"""
    s = x * x
    small = ((s * 1.57394409e-2 - 5.23025580e-2) * s + 1.33152470e-1) * s - 3.33327681e-1
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)
    return tl.where(s < 0.3, x + x * s * small, tl.where(x < 0, -large, large))


@triton.jit
def _score(x, logit_scale, softcap):
    """z in units of ln 2, and what the softcap multiplied."""
    x = x.to(tl.float32)
    if softcap is None:
        return x * (logit_scale * LOG2_E), 0.0
    else:
        ratio = _tanh(x * (logit_scale / softcap))
        return ratio * (softcap * LOG2_E), ratio


@triton.jit
def _online(x, col, mask, WEIGHT, logit_scale, softcap, peak, total, smoothed, best, best_col,
            SMOOTH: tl.constexpr, PREDICT: tl.constexpr, cols: tl.constexpr):  # fmt: skip
    """Take one block into the running maximum, the sum of powers, the weighted sum and the largest logit's place."""
    if PREDICT:  # before the softcap, which makes large ones equal; of equal ones the first, as torch.argmax
        a = tl.where(mask, x.to(tl.float32) * logit_scale, float("-inf"))
        block_best = tl.max(a, 0)
        block_col = tl.min(tl.where(a == block_best, col, cols - 1), 0)
        better = (block_best > best) | ((block_best == best) & (block_col < best_col))
        best, best_col = tl.where(better, block_best, best), tl.where(better, block_col, best_col)
    z, _ = _score(x, logit_scale, softcap)
    z = tl.where(mask, z, float("-inf"))
    higher = tl.maximum(peak, tl.max(z, 0))
    total = total * tl.exp2(peak - higher) + tl.exp2(z - higher)
    if SMOOTH:
        weighted = tl.where(mask, z, 0.0)
        if WEIGHT is not None:
            weighted *= tl.load(WEIGHT + col, mask, other=0.0).to(tl.float32)
        smoothed += tl.sum(weighted, 0)
    return higher, total, smoothed, best, best_col


@triton.jit
def _factors(y, distance, WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, label_smoothing, lse_square_scale,
             inside, cols: tl.constexpr, TOKEN_SCALING: tl.constexpr):  # fmt: skip
    """What multiplies -log p_y, -w_j log p_j, -sum_j w_j log p_j / sum_j w_j and lse^2 in the loss of a row.

    `distance` is -log2 p_y.
    """
    of_target = tl.full((), 1.0, tl.float32)
    of_each = tl.full((), 0.0, tl.float32)
    of_all, of_square = of_each, of_each + lse_square_scale
    if WEIGHT is not None:
        of_target = tl.load(WEIGHT + y, inside, other=0.0).to(tl.float32)
    if label_smoothing is not None:
        of_target *= 1.0 - label_smoothing
        of_each += label_smoothing / cols
        of_all += label_smoothing
        if WEIGHT is not None:
            of_all = of_each * tl.load(WEIGHT_SUM).to(tl.float32)
    if DENOMINATOR is not None:
        denominator = tl.load(DENOMINATOR).to(tl.float32)
        of_target, of_each, of_all = of_target / denominator, of_each / denominator, of_all / denominator
        if COUNT is not None:
            denominator = tl.load(COUNT).to(tl.float32)
        of_square = of_square / denominator
    if TOKEN_SCALING:
        p_y = tl.exp2(-distance)
        of_target, of_each, of_all, of_square = of_target * p_y, of_each * p_y, of_all * p_y, of_square * p_y
    return tl.where(inside, of_target, float("nan")), of_each, of_all, of_square


@triton.jit
def _gradient(x, col, mask, y, peak, WEIGHT, of_power, of_each, of_target, logit_scale, softcap, SMOOTH: tl.constexpr):
    """dx_j, where `of_power` multiplies 2^(z_j - peak) and every factor has been multiplied by logit_scale.

    A peak and a total, and not the one log-sum-exp, whose rounding would be the same relative error in all of a row.
    """
    z, ratio = _score(x, logit_scale, softcap)
    dx = of_power * tl.exp2(z - peak) - tl.where(col == y, of_target, 0.0)
    if SMOOTH:
        if WEIGHT is not None:
            dx -= of_each * tl.load(WEIGHT + col, mask, other=0.0).to(tl.float32)
        else:
            dx -= of_each
    if softcap is not None:
        dx *= 1.0 - ratio * ratio
    return dx


@triton.jit
def _edge_gradient(X, DX, head, body, y, peak, WEIGHT, of_power, of_each, of_target, logit_scale, softcap,
                   SMOOTH: tl.constexpr, cols: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    col, mask = _edge(head, body, cols, VECTOR)
    x = tl.load(X + col, mask, other=0.0)
    dx = _gradient(x, col, mask, y, peak, WEIGHT, of_power, of_each, of_target, logit_scale, softcap, SMOOTH)
    tl.store(DX + col, dx, mask)


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def cross_entropy_forward(
    LOGITS, TARGET, WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, LOSS, Z_LOSS, PARTITION, PREDICTED, stride, misaligned,
    ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, TOKEN_SCALING: tl.constexpr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // LOGITS.dtype.element_ty.primitive_bitwidth
    EDGES: tl.constexpr = not ALIGNED or cols % VECTOR != 0
    SMOOTH: tl.constexpr = label_smoothing is not None
    PREDICT: tl.constexpr = PREDICTED is not None
    lane = tl.arange(0, COLS)
    head, body = _split(row, stride, misaligned, cols, VECTOR, ALIGNED)
    X = LOGITS + row * stride
    BODY = _body_pointer(LOGITS, row, stride, head, misaligned, VECTOR, ALIGNED)
    y = tl.load(TARGET + row)
    if y == ignore_index:
        if GRADIENT:
            if EDGES:
                edge, edge_mask = _edge(head, body, cols, VECTOR)
                tl.store(X + edge, tl.zeros((2 * VECTOR,), tl.float32), edge_mask)
            for start in range(0, body, COLS):
                at = start + lane
                tl.store(BODY + at, tl.zeros((COLS,), tl.float32), _in_body(at, body, cols, VECTOR, ALIGNED, COLS))
        tl.store(LOSS + row, 0.0)
        if Z_LOSS is not None:
            tl.store(Z_LOSS + row, 0.0)
        if PARTITION is not None:
            tl.store(PARTITION + 2 * row, 0.0)
            tl.store(PARTITION + 2 * row + 1, 1.0)
        if PREDICT:
            tl.store(PREDICTED + row, -1)
    else:
        inside = (y >= 0) & (y < cols)
        z_y, _ = _score(tl.load(X + y, inside, other=0.0), logit_scale, softcap)
        peak = tl.full((), LOWEST, tl.float32)
        best = tl.full((), float("-inf"), tl.float32)
        best_col = tl.full((), cols - 1, tl.int32)
        total = tl.zeros((COLS,), tl.float32)
        smoothed = tl.full((), 0.0, tl.float32)
        if EDGES:
            edge, edge_mask = _edge(head, body, cols, VECTOR)
            zeros = tl.zeros((2 * VECTOR,), tl.float32)
            peak, edge_total, smoothed, best, best_col = _online(
                tl.load(X + edge, edge_mask, other=0.0), edge, edge_mask, WEIGHT, logit_scale, softcap, peak, zeros,
                smoothed, best, best_col, SMOOTH, PREDICT, cols,
            )  # fmt: skip
            total = tl.where(lane == 0, tl.sum(edge_total, 0), total)
        for start in tl.range(0, body, COLS, num_stages=STAGES):
            at = start + lane
            mask = _in_body(at, body, cols, VECTOR, ALIGNED, COLS)
            peak, total, smoothed, best, best_col = _online(
                tl.load(BODY + at, mask, other=0.0), head + at, mask, WEIGHT, logit_scale, softcap, peak, total,
                smoothed, best, best_col, SMOOTH, PREDICT, cols,
            )  # fmt: skip
        row_total = tl.sum(total, 0)
        lse = peak + tl.log2(row_total)
        distance = (peak - z_y) + tl.log2(row_total)  # the difference first: it is exact near the peak
        of_target, of_each, of_all, of_square = _factors(
            y, distance, WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, label_smoothing, lse_square_scale, inside, cols,
            TOKEN_SCALING,
        )  # fmt: skip
        z_loss = of_square * (lse * LN_2) * (lse * LN_2)
        loss = of_target * (distance * LN_2) + z_loss
        if SMOOTH:
            loss += (of_all * lse - of_each * smoothed) * LN_2
        tl.store(LOSS + row, loss)
        if Z_LOSS is not None:
            tl.store(Z_LOSS + row, z_loss)
        if PARTITION is not None:
            tl.store(PARTITION + 2 * row, peak)
            tl.store(PARTITION + 2 * row + 1, row_total)
        if PREDICT:
            tl.store(PREDICTED + row, best_col)
        if GRADIENT:
            of_power = (of_target + of_all + 2.0 * LN_2 * of_square * lse) * logit_scale / row_total
            of_target, of_each = of_target * logit_scale, of_each * logit_scale
            tl.debug_barrier()  # the whole row and its target's logit have been read by every lane
            for start in tl.range(0, body, COLS, num_stages=STAGES):
                at = (body - 1) // COLS * COLS - start + lane
                mask = _in_body(at, body, cols, VECTOR, ALIGNED, COLS)
                x, col = tl.load(BODY + at, mask, other=0.0), head + at
                dx = _gradient(
                    x, col, mask, y, peak, WEIGHT, of_power, of_each, of_target, logit_scale, softcap, SMOOTH
                )
                tl.store(BODY + at, dx, mask)
            if EDGES:
                edge, edge_mask = _edge(head, body, cols, VECTOR)
                x = tl.load(X + edge, edge_mask, other=0.0)
                dx = _gradient(
                    x, edge, edge_mask, y, peak, WEIGHT, of_power, of_each, of_target, logit_scale, softcap, SMOOTH
                )
                tl.store(X + edge, dx, edge_mask)


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def cross_entropy_backward(
    LOGITS, TARGET, WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, PARTITION, DLOSS, DX, stride, dx_stride, dloss_stride,
    misaligned, ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, TOKEN_SCALING: tl.constexpr,
    ALIGNED: tl.constexpr, SAME_ALIGNMENT: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    VECTOR: tl.constexpr = 128 // LOGITS.dtype.element_ty.primitive_bitwidth
    EDGES: tl.constexpr = not ALIGNED or cols % VECTOR != 0
    SMOOTH: tl.constexpr = label_smoothing is not None
    head, body = _split(row, stride, misaligned, cols, VECTOR, ALIGNED)
    X, D = LOGITS + row * stride, DX + row * dx_stride
    D_BODY = D + head
    if SAME_ALIGNMENT:
        D_BODY = _body_pointer(DX, row, dx_stride, head, misaligned, VECTOR, ALIGNED)
    at = part * COLS + tl.arange(0, COLS)
    mask = _in_body(at, body, cols, VECTOR, ALIGNED, COLS)
    y = tl.load(TARGET + row)
    if y == ignore_index:
        if EDGES and part == 0:
            edge, edge_mask = _edge(head, body, cols, VECTOR)
            tl.store(D + edge, tl.zeros((2 * VECTOR,), tl.float32), edge_mask)
        tl.store(D_BODY + at, tl.zeros((COLS,), tl.float32), mask)
    else:
        inside = (y >= 0) & (y < cols)
        peak, total = tl.load(PARTITION + 2 * row), tl.load(PARTITION + 2 * row + 1)
        lse = peak + tl.log2(total)
        distance = lse
        if TOKEN_SCALING:
            z_y, _ = _score(tl.load(X + y, inside, other=0.0), logit_scale, softcap)
            distance = (peak - z_y) + tl.log2(total)
        of_target, of_each, of_all, of_square = _factors(
            y, distance, WEIGHT, WEIGHT_SUM, DENOMINATOR, COUNT, label_smoothing, lse_square_scale, inside, cols,
            TOKEN_SCALING,
        )  # fmt: skip
        of_loss = tl.load(DLOSS + row * dloss_stride).to(tl.float32) * logit_scale
        of_power = (of_target + of_all + 2.0 * LN_2 * of_square * lse) * of_loss / total
        of_target, of_each = of_target * of_loss, of_each * of_loss
        BODY = _body_pointer(LOGITS, row, stride, head, misaligned, VECTOR, ALIGNED)
        x = tl.load(BODY + at, mask, other=0.0)
        dx = _gradient(x, head + at, mask, y, peak, WEIGHT, of_power, of_each, of_target, logit_scale, softcap, SMOOTH)
        tl.store(D_BODY + at, dx, mask)
        if EDGES and part == 0:
            _edge_gradient(
                X,
                D,
                head,
                body,
                y,
                peak,
                WEIGHT,
                of_power,
                of_each,
                of_target,
                logit_scale,
                softcap,
                SMOOTH,
                cols,
                VECTOR,
            )


@triton.jit(do_not_specialize=["misaligned"])
def cross_entropy_scale(
    DX, DLOSS, stride, dloss_stride, misaligned, ALIGNED: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // DX.dtype.element_ty.primitive_bitwidth
    dloss = tl.load(DLOSS + row * dloss_stride).to(tl.float32)
    if dloss != 1.0:
        head, body = _split(row, stride, misaligned, cols, VECTOR, ALIGNED)
        BODY = _body_pointer(DX, row, stride, head, misaligned, VECTOR, ALIGNED)
        for start in range(0, body, COLS):
            at = start + tl.arange(0, COLS)
            mask = _in_body(at, body, cols, VECTOR, ALIGNED, COLS)
            tl.store(BODY + at, tl.load(BODY + at, mask, other=0.0).to(tl.float32) * dloss, mask)
        if not ALIGNED or cols % VECTOR != 0:
            edge, edge_mask = _edge(head, body, cols, VECTOR)
            EDGE = DX + row * stride + edge
            tl.store(EDGE, tl.load(EDGE, edge_mask, other=0.0).to(tl.float32) * dloss, edge_mask)


def _alignment(x) -> tuple[int | None, bool]:
    """Elements from the last 16-byte boundary to `x`, None for 0, and whether every row of `x` begins on one."""
    misaligned = x.data_ptr() % 16 // x.element_size() or None
    return misaligned, misaligned is None and x.stride(0) * x.element_size() % 16 == 0


def _numbers(formula):
    """The formula's numbers for a kernel, which leaves out the code for those that are None."""
    return formula._replace(label_smoothing=formula.label_smoothing or None)


def forward_rows(logits, terms, formula, loss, z_loss=None, partition=None, predicted=None, gradient=False):
    """Write the losses of the rows of `logits` (unit stride in a row), and their gradient over them if asked for.

    Args:
        loss, z_loss: (N,) fp32.
        partition: (N, 2) fp32, a peak and a total, where sum_j exp(z_j) = total exp(peak); the peak in units of ln 2.
        predicted: (N,) int64.
    """
    rows, cols = logits.shape
    misaligned, aligned = _alignment(logits)
    plain = formula.softcap is None and formula.label_smoothing == 0 and predicted is None
    config = cross_entropy_forward_config(cols, logits.element_size(), plain, gradient, device_of(logits))
    launch(
        cross_entropy_forward, (rows, 1, 1), config,
        logits, *terms, loss, z_loss, partition, predicted, logits.stride(0), misaligned, *_numbers(formula),
        gradient, aligned, cols,
    )  # fmt: skip


def backward_rows(logits, terms, formula, partition, dloss, dx=None):
    """Write the gradient of `logits` to `dx`, or over them; `partition` is the forward's, `dloss` is (N,)."""
    dx = logits if dx is None else dx
    rows, cols = logits.shape
    misaligned, aligned = _alignment(logits)
    same = _alignment(dx)[0] == misaligned and (dx.stride(0) - logits.stride(0)) * dx.element_size() % 16 == 0
    config = cross_entropy_backward_config(cols, logits.element_size(), device_of(logits))
    launch(
        cross_entropy_backward, (rows, -(-cols // config["COLS"]), 1), config,
        logits, *terms, partition, dloss, dx, logits.stride(0), dx.stride(0), dloss.stride(0), misaligned,
        *_numbers(formula), aligned, same, cols,
    )  # fmt: skip


def scale_rows(dx, dloss):
    """Multiply each row of `dx` by its own incoming gradient; programs whose is 1 end at once."""
    rows, cols = dx.shape
    config = cross_entropy_scale_config(cols, dx.element_size(), device_of(dx))
    launch(cross_entropy_scale, (rows, 1, 1), config, dx, dloss, dx.stride(0), dloss.stride(0), *_alignment(dx), cols)
