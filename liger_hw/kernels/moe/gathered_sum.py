r"""Sum gathered rows, weighted or not: combine experts' outputs, or gradients of their inputs.

    out[t] = sum over k of weights[place[t, k]] rows[place[t, k]]

The order and rounding are those of (rows * weights[:, None])[place].sum(1) in torch on a GPU: the product is rounded to
the dtype that torch promotes to, every fourth k is accumulated in fp32, then those sums.

Letters: S rows of H columns into T = S / k. Traffic: SH + TH, instead of the 5SH + TH of torch's three operations.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import raw
from liger_hw.kernels._math import in_row, rounded
from liger_hw.kernels._rows import rows_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


@tuned
def gathered_sum_config(width, itemsize, device):
    block = min(width, 2048 // itemsize)
    # a fused multiply-add would not round the product with fp32 weights: on an H200 2 of 10,000 fp16 results then
    # differ from torch's
    return Config({"COLS": block}, row_warps(block, device, 16 // itemsize), fp_fusion=False)


@triton.jit
def _term(ROWS, PLACE, W, at, valid, col, mask, cols: tl.constexpr):
    """Load a row and multiply it by its weight; return zeros for an absent row."""
    row = tl.load(PLACE + at, valid, other=0)
    x = tl.load(ROWS + row * cols + col, mask & valid, other=0.0).to(tl.float32)
    if W is not None:
        x *= tl.load(W + row, valid, other=0.0).to(tl.float32)
        if ROWS.dtype.element_ty == W.dtype.element_ty:
            x = rounded(x, ROWS.dtype.element_ty)
    return x


@triton.jit
def gathered_sum(ROWS, PLACE, W, OUT, cols: tl.constexpr, K: tl.constexpr, COLS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * K
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = in_row(col, cols, COLS)
    a = tl.zeros([COLS], tl.float32)
    b, c, d = a, a, a
    for k in range(0, K, 4):
        a += _term(ROWS, PLACE, W, at + k, k < K, col, mask, cols)
        b += _term(ROWS, PLACE, W, at + k + 1, k + 1 < K, col, mask, cols)
        c += _term(ROWS, PLACE, W, at + k + 2, k + 2 < K, col, mask, cols)
        d += _term(ROWS, PLACE, W, at + k + 3, k + 3 < K, col, mask, cols)
    tl.store(OUT + tl.program_id(0).to(tl.int64) * cols + col, a + b + c + d, mask)


@raw(lambda rows, place: rows.new_empty(place.shape[0], rows.shape[1]))
def sum_gathered(rows: torch.Tensor, place: torch.Tensor, weights: torch.Tensor | None, *, out):
    """Return the weighted sums of gathered rows, (T, H) in the dtype of `rows`.

    Args:
        rows: (S, H) contiguous.
        place: (T, k) contiguous int64, the rows of each sum.
        weights: (S,), one for each row, in the dtype of `rows` or fp32; None: no weights.
    """
    tokens, cols = out.shape
    config = gathered_sum_config(power_of_2(cols), rows.element_size(), device_of(rows))
    grid = tokens, -(-cols // config["COLS"]), 1
    launch(gathered_sum, grid, config, rows, place, weights, out, cols, place.shape[1])


@tuned
def gathered_product_config(width, itemsize, device):
    block = min(width, 2048 // itemsize)
    return Config({"COLS": block}, row_warps(block, device, 16 // itemsize))


@triton.jit
def gathered_product(ROWS, INDEX, W, OUT, row_stride, cols: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = in_row(col, cols, COLS)
    x = tl.load(ROWS + tl.load(INDEX + row) * row_stride + col, mask).to(tl.float32)
    tl.store(OUT + row * cols + col, x * tl.load(W + row).to(tl.float32), mask)


@raw(lambda rows, index: rows.new_empty(len(index), rows.shape[1]))
def gather_weighted(rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, *, out):
    """Return rows[index] * weights[:, None], rounded to the dtype of `rows`.

    Args:
        rows: (T, H). index: (S,) int64. weights: (S,) floats.
    """
    (rows, row_stride), cols = rows_of(rows), rows.shape[1]
    config = gathered_product_config(power_of_2(cols), rows.element_size(), device_of(rows))
    grid = len(index), -(-cols // config["COLS"]), 1
    launch(gathered_product, grid, config, rows, index, weights, out, row_stride, cols)
