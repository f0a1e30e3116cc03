r"""Attend over the outputs of earlier layers in place of a residual sum (arXiv:2603.15031).

    r_n = 1 / sqrt(mean(v_n^2) + eps)                       n = 1, ..., N
    s_n = sum of u v_n r_n                                  u = w_norm w_query
    p   = softmax(s) over n
    y   = sum over n of p_n v_n                             rounded once

    ds_n = p_n (sum of dy v_n - delta)                      delta = sum over n of p_n (sum of dy v_n)
    dv_n = p_n dy + ds_n r_n (u - v_n s_n r_n / D)
    du   = sum over rows and n of ds_n r_n v_n,    dw_query = du w_norm,    dw_norm = du w_query

Letters: N blocks of R rows of D columns. Traffic: forward reads v and writes y ((N + 1) R D), plus 2 N + 2 fp32 values
a row for the backward. Backward reads v and dy and writes dv ((2 N + 1) R D), plus partial sums of a fixed number of
programs. Both are bound by memory. The softmax is computed online, so the forward reads each block once. The backward
reads the blocks of a row twice, first for delta; the second time they are in the cache. A row too wide for a program
has several, and each reads all of it for the sums.
"""

from collections.abc import Sequence

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, raw, uncast, widen
from liger_hw.kernels._configs import row_block
from liger_hw.kernels._math import LOG2_E, LOWEST, in_row, in_tile, load_parameter
from liger_hw.kernels._partials import add_partials, partial_sums, programs_for_blocks
from liger_hw.kernels._rows import contiguous, rows_and_cols, rows_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, row_warps, tuned


def _stacked(blocks):
    if torch.is_tensor(blocks):
        return blocks
    like = blocks[0]
    for block in blocks:
        check((block.shape, block.dtype, block.device) == (like.shape, like.dtype, like.device), "blocks", block, like)
    return torch.stack(tuple(blocks))


def _validate(blocks, w_query, w_norm):
    fits = blocks.ndim > 1 and len(blocks) and blocks.is_floating_point()
    check(fits, "blocks", blocks, "floating point (N, ..., D) with N of at least 1, or a sequence of N (..., D)")
    for name, weight in (("w_query", w_query), ("w_norm", w_norm)):
        fits = weight.shape == blocks.shape[-1:] and weight.device == blocks.device
        check(fits, name, weight, "one value for each column of blocks, on their device")


@op
def attention_residual(
    blocks: torch.Tensor | Sequence[torch.Tensor], w_query: torch.Tensor, w_norm: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """Weigh the blocks of each row by a softmax over their number, and add them.

    The score of a block is the product of `w_query` and its RMSNorm with weight `w_norm`. Everything is computed in
    fp32 and rounded once.

    Args:
        blocks: (N, ..., D), any N of at least 1, strides and floating dtype; plain torch computes dtypes other than
            fp32, fp16 and bf16. Or a list or tuple of N tensors (..., D), which is stacked first: that reads and writes
            all of them once more, and keeps the copy for the backward.
        w_query, w_norm: (D,), any floating dtype.
        eps: added to each mean square.

    Returns:
        (..., D), contiguous, in the dtype of `blocks`.

    Raises:
        ValueError: there is no block, blocks of a sequence differ in shape, dtype or device, or a weight does not fit.

    Examples:
        >>> blocks = [torch.rand(2, 8) for _ in range(3)]
        >>> liger_hw.attention_residual(blocks, torch.rand(8), torch.ones(8)).shape
        torch.Size([2, 8])
    """
    blocks = _stacked(blocks)
    _validate(blocks, w_query, w_norm)
    wide = widen(blocks)
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * widen(w_norm)
    with uncast(wide):
        weights = (keys @ w_query.to(keys.dtype)).softmax(0)
    return (weights[..., None] * wide).sum(0).to(blocks.dtype)


@attention_residual.shards
def _(call):
    blocks = _stacked(call.blocks)
    rows = " ".join(map(str, range(blocks.ndim - 2)))
    return call._replace(blocks=blocks), dict(blocks=f"N {rows} D", w_query="D", w_norm="D", returns=f"{rows} D")


@attention_residual.cost
def _(blocks, w_query, w_norm, *options, **named):
    row, weights = blocks.nbytes // len(blocks), w_query.nbytes + w_norm.nbytes
    return Cost(
        blocks.nbytes + row + weights, 2 * blocks.nbytes + row + 2 * weights, 6 * blocks.numel(), 11 * blocks.numel()
    )


@tuned
def attention_residual_forward_config(cols, itemsize, device):
    return _rows_config(cols, itemsize, device, 3, 16)


@tuned
def attention_residual_backward_config(cols, itemsize, device):
    # parts of a row have further addresses: in fp32, 16 values a lane spill (compiled for sm90)
    return _rows_config(cols, itemsize, device, 4, 8)


def _rows_config(cols, itemsize, device, rows_live, part_per_lane):
    """Return the configuration of programs that keep `rows_live` rows in fp32, or parts of them.

    Short rows share a program, and all programs run at once. Three blocks are in flight where loads bypass registers
    and half of the shared memory holds them.
    """
    block, per_lane = row_block(cols, device, rows_live), 16
    if cols > block:
        block, per_lane = 4 * device.max_threads, part_per_lane
    rows = max(1, min(16, 2048 // block))
    ahead = device.shared_memory // (2 * rows * block * itemsize) if device.async_copy and cols <= block else 1
    programs = max(1, device.registers * device.max_threads // (2 * rows_live * rows * block))
    meta = {"ROWS": rows, "COLS": block, "STAGES": max(1, min(3, ahead))}
    return Config(meta, row_warps(rows * block, device, per_lane), programs=programs)


@triton.jit
def _program_part(cols: tl.constexpr, COLS: tl.constexpr):
    """Return this program's number among those of the same columns, their number, and the columns."""
    PARTS: tl.constexpr = (cols + COLS - 1) // COLS
    program, programs = tl.program_id(0) // PARTS, tl.num_programs(0) // PARTS
    return program, programs, tl.program_id(0) % PARTS * COLS + tl.arange(0, COLS)[None, :]


@triton.jit
def _load_u(QUERY, NORM, col, cols: tl.constexpr, COLS: tl.constexpr):
    query, norm = load_parameter(QUERY, col, 0.0, cols, COLS), load_parameter(NORM, col, 0.0, cols, COLS)
    return query.to(tl.float32) * norm.to(tl.float32)


@triton.jit
def _load(P, row, col, stride, rows, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    mask = in_tile(row, col, rows, cols, ROWS, COLS)
    return tl.load(P + row[:, None] * stride + col, mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["count", "rows"])
def attention_residual_forward(
    V, QUERY, NORM, Y, STATS, count, rows, block_stride, row_stride, eps, cols: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    program, _, col = _program_part(cols, COLS)
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    u = _load_u(QUERY, NORM, col, cols, COLS)
    peak, total = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((ROWS, COLS), tl.float32)
    for n in tl.range(0, count, num_stages=STAGES):
        block = V + tl.cast(n, tl.int64) * block_stride
        v = _load(block, row, col, row_stride, rows, cols, ROWS, COLS)
        squares, products = v * v, v * u
        if cols > COLS:
            squares, products = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
            for start in range(0, cols, COLS):
                at = start + tl.arange(0, COLS)[None, :]
                part = _load(block, row, at, row_stride, rows, cols, ROWS, COLS)
                squares += part * part
                products += part * _load_u(QUERY, NORM, at, cols, COLS)
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 1) / cols + eps)
        score = tl.sum(products, 1) * rstd
        higher = tl.maximum(peak, score)
        kept = tl.exp2((peak - higher) * LOG2_E)
        # A fused multiply-add would subtract from the score before its rounding, and the largest would not weigh 1
        # (seen on an H200). An infinite score gives NaN, as in torch's softmax.
        below = tl.where(score == higher, score * 0.0, score - higher)
        power = tl.exp2(below * LOG2_E)
        y = y * kept[:, None] + power[:, None] * v
        total = total * kept + power
        peak = higher
        at = STATS + tl.cast(n + 2, tl.int64) * rows + row  # programs that share a row write the same values
        tl.store(at, score, row < rows)
        tl.store(at + tl.cast(count, tl.int64) * rows, rstd, row < rows)
    tl.store(STATS + row, peak, row < rows)
    tl.store(STATS + rows + row, total, row < rows)
    tl.store(Y + row[:, None] * cols + col, y / total[:, None], in_tile(row, col, rows, cols, ROWS, COLS))


@triton.jit
def _load_stats(STATS, peak, total, n, count, row, rows):
    """Return the weight p, the score and rstd of a block."""
    at = STATS + tl.cast(n + 2, tl.int64) * rows + row
    score = tl.load(at, row < rows, other=0.0)
    rstd = tl.load(at + tl.cast(count, tl.int64) * rows, row < rows, other=0.0)
    return tl.exp2((score - peak) * LOG2_E) / total, score, rstd


@triton.jit
def _along(
    V, DY, v, dy, row, row_stride, dy_stride, rows, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Return the sum of dy v over all columns; load those of other programs."""
    products = dy * v
    if cols > COLS:
        products = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, cols, COLS):
            col = start + tl.arange(0, COLS)[None, :]
            dy = _load(DY, row, col, dy_stride, rows, cols, ROWS, COLS)
            products += dy * _load(V, row, col, row_stride, rows, cols, ROWS, COLS)
    return tl.sum(products, 1)


@triton.jit(do_not_specialize=["count", "rows"])
def attention_residual_backward(
    V, QUERY, NORM, STATS, DY, DV, DU, count, rows, block_stride, row_stride, dy_stride, cols: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a fixed number of programs stride over the rows of a block of columns; each sums its own du
    program, programs, col = _program_part(cols, COLS)
    u, du = _load_u(QUERY, NORM, col, cols, COLS), tl.zeros((ROWS, COLS), tl.float32)
    for first in range(program * ROWS, rows, programs * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        peak = tl.load(STATS + row, row < rows, other=0.0)
        total = tl.load(STATS + rows + row, row < rows, other=1.0)
        dy = _load(DY, row, col, dy_stride, rows, cols, ROWS, COLS)
        delta = tl.zeros((ROWS,), tl.float32)
        # The first pass over the blocks sums delta (the sum of dy y would be less exact), the second uses it. One loop,
        # so that both compute the same bits: a block with all of the weight gives its score a gradient of 0.
        for i in tl.range(0, 2 * count, num_stages=STAGES):
            n = i % count
            block = V + tl.cast(n, tl.int64) * block_stride
            v = _load(block, row, col, row_stride, rows, cols, ROWS, COLS)
            p, score, rstd = _load_stats(STATS, peak, total, n, count, row, rows)
            along = _along(block, DY, v, dy, row, row_stride, dy_stride, rows, cols, ROWS, COLS)
            if i < count:
                delta += p * along
            else:
                slope = (p * (along - delta) * rstd)[:, None]
                if DV is not None:
                    dv = p[:, None] * dy + slope * (u - v * (score * rstd / cols)[:, None])
                    at = DV + (tl.cast(n, tl.int64) * rows + row)[:, None] * cols + col
                    tl.store(at, dv, in_tile(row, col, rows, cols, ROWS, COLS))
                du += slope * v
    if DU is not None:
        tl.store(DU + program.to(tl.int64) * cols + col, tl.sum(du, 0)[None, :], in_row(col, cols, COLS))


def _block_rows(blocks):
    """Return `blocks` with unit stride inside a row, and the strides of blocks and rows."""
    rows, cols = rows_and_cols(blocks[0])
    blocks = blocks.reshape(len(blocks), rows, cols)
    blocks = blocks if blocks.stride(2) == 1 else blocks.contiguous()
    return blocks, blocks.stride(0), blocks.stride(1)


def _empty_results(blocks):
    rows, _ = rows_and_cols(blocks[0])
    return blocks.new_empty(blocks.shape[1:]), blocks.new_empty((2 * len(blocks) + 2, rows), dtype=torch.float32)


@raw(_empty_results)
def _attention_residual_forward(
    blocks: torch.Tensor, w_query: torch.Tensor, w_norm: torch.Tensor, eps: float, *, y, stats
):
    """Compute y and statistics of each row, in fp32.

    They are the largest score, the softmax's divisor, N scores and N reciprocal roots.
    """
    rows, cols = rows_and_cols(y)
    config = attention_residual_forward_config(cols, blocks.element_size(), device_of(blocks))
    v, *strides = _block_rows(blocks)
    launch(
        attention_residual_forward, (-(-rows // config["ROWS"]) * -(-cols // config["COLS"]), 1, 1), config,
        v, w_query, w_norm, y, stats, len(blocks), rows, *strides, eps, cols,
    )  # fmt: skip


def _empty_gradients(blocks, w_query, blocks_grad, weights_grad):
    dv = blocks.new_empty(blocks.shape) if blocks_grad else None
    return dv, blocks.new_empty(w_query.shape, dtype=torch.float32) if weights_grad else None


@raw(_empty_gradients)
def _attention_residual_backward(
    blocks: torch.Tensor, w_query: torch.Tensor, w_norm: torch.Tensor, stats: torch.Tensor, dy: torch.Tensor,
    blocks_grad: bool, weights_grad: bool, *, dv, du,
):  # fmt: skip
    """Compute the gradients of blocks and of u, in fp32."""
    rows, cols = rows_and_cols(dy)
    if not rows:
        if du is not None:
            du.zero_()
        return
    config = attention_residual_backward_config(cols, blocks.element_size(), device_of(blocks))
    parts = -(-cols // config["COLS"])
    programs = programs_for_blocks(config, blocks.numel(), rows, parts)
    sums = partial_sums(du, programs)
    (v, *strides), (dy, dy_stride) = _block_rows(blocks), rows_of(dy)
    launch(
        attention_residual_backward, (programs * parts, 1, 1), config,
        v, w_query, w_norm, stats, dy, dv, sums, len(blocks), rows, *strides, dy_stride, cols,
    )  # fmt: skip
    add_partials(sums, du)


@_attention_residual_forward.backward()
def _(blocks, w_query, w_norm, stats, dy, *, blocks_grad, w_query_grad, w_norm_grad):
    dv, du = _attention_residual_backward(blocks, w_query, w_norm, stats, dy, blocks_grad, w_query_grad or w_norm_grad)
    dquery = (du * w_norm).to(w_query.dtype) if w_query_grad else None
    return dv, dquery, (du * w_query).to(w_norm.dtype) if w_norm_grad else None


@attention_residual.register("triton")
def _(blocks, w_query, w_norm, eps=1e-6):
    blocks = _stacked(blocks)
    _validate(blocks, w_query, w_norm)
    return _attention_residual_forward.apply(blocks, contiguous(w_query), contiguous(w_norm), eps)
