"""Compute the backward of a root-mean-square norm of rows too wide for a program."""
# One kernel reduces each row, a second reads the rows again, a block of columns at a time.

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.kernels._configs import norm_backward_config, norm_wide_sums_config
from liger_hw.kernels._math import in_row, in_tile, load_parameter
from liger_hw.kernels._partials import add_partials, wide_grid
from liger_hw.kernels._rows import rows_and_cols, rows_of, rows_or_none
from liger_hw.kernels.norms.rms_norm.kernels import before_weight, load_rows, rstd_of, square, store_ds
from liger_hw.launch import launch
from liger_hw.tuning import tuned


@tuned
def rms_norm_wide_sums_config(cols, itemsize, device):
    # 32 values a lane are 10% slower on an H200 (65,536 columns: 0.366 ms, 0.332 with 16)
    return norm_wide_sums_config(device, per_lane=16)


@tuned
def rms_norm_wide_backward_config(itemsize, device):
    return norm_backward_config(1024, itemsize, device)


@triton.jit
def rms_norm_wide_sums(
    S, W, DY, RSTD, MEAN, s_stride, dy_stride, eps, offset, cols: tl.constexpr, CASTING: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute rstd and mean(m normed) of a row too wide for one block."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    dtype: tl.constexpr = S.dtype.element_ty
    squares, products = tl.zeros((1, COLS), tl.float32), tl.zeros((1, COLS), tl.float32)
    for start in tl.range(0, cols, COLS, num_stages=STAGES):
        at = start + tl.arange(0, COLS)[None, :]
        w = load_parameter(W, at, 1.0, cols, COLS)
        mask = in_row(at, cols, COLS)
        s = load_rows(S, row, at, mask, s_stride).to(tl.float32)
        dy = load_rows(DY, row, at, mask, dy_stride).to(tl.float32)
        squares += square(s, dtype, CASTING)
        products += before_weight(dy, W, w, offset, dtype, CASTING) * s
    rstd = rstd_of(tl.sum(squares, 1) / cols, eps, dtype, CASTING)
    tl.store(RSTD + row, rstd)
    tl.store(MEAN + row, rstd * tl.sum(products, 1) / cols)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_wide_backward(
    S, W, DY, DS_OUT, DS, DW, RSTD, MEAN, rows, s_stride, dy_stride, ds_out_stride, offset,
    cols: tl.constexpr, CASTING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a block of columns of every n-th row, so that their sum for dw stays in registers
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = S.dtype.element_ty
    w = load_parameter(W, col, 1.0, cols, COLS)
    dw = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        rstd = tl.load(RSTD + row, row < rows, other=0.0)[:, None]
        mean = tl.load(MEAN + row, row < rows, other=0.0)[:, None]
        s = load_rows(S, row, col, mask, s_stride).to(tl.float32)
        dy = load_rows(DY, row, col, mask, dy_stride).to(tl.float32)
        m = before_weight(dy, W, w, offset, dtype, CASTING)
        dw += store_ds(DS, DS_OUT, s, m, dy, rstd, mean, row, col, mask, ds_out_stride, dtype, CASTING, cols)
    if DW is not None:
        dw_at = DW + tl.program_id(1).to(tl.int64) * cols + col
        tl.store(dw_at, tl.sum(dw, 0)[None, :], in_row(col, cols, COLS))


def wide_backward_rows(s, weight, dy, ds_out, ds, dweight, eps, offset, casting_mode):
    """Do the work of `kernels.backward_rows` for rows of any width."""
    rows, cols = rows_and_cols(dy)
    rstd, mean = dy.new_empty(rows, dtype=torch.float32), dy.new_empty(rows, dtype=torch.float32)
    (s, s_stride), (dy, dy_stride), (ds_out, ds_out_stride) = rows_of(s), rows_of(dy), rows_or_none(ds_out)
    config = rms_norm_wide_sums_config(cols, s.element_size(), device_of(dy))
    launch(
        rms_norm_wide_sums, (rows, 1, 1), config,
        s, weight, dy, rstd, mean, s_stride, dy_stride, eps, offset, cols, casting_mode,
    )  # fmt: skip
    config = rms_norm_wide_backward_config(s.element_size(), device_of(dy))
    blocks, groups = wide_grid(config, rows, cols)
    dw = dy.new_empty((groups, cols), dtype=torch.float32) if dweight is not None else None
    launch(
        rms_norm_wide_backward, (blocks, groups, 1), config,
        s, weight, dy, ds_out, ds, dw, rstd, mean, rows, s_stride, dy_stride, ds_out_stride, offset, cols,
        casting_mode,
    )  # fmt: skip
    add_partials(dw, dweight)
