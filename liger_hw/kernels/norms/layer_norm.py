r"""Compute layer norm over the last dimension.

    normed = (x - mean(x)) rstd                             rstd = 1 / sqrt(mean((x - mean(x))^2) + eps)
    y      = normed w + b                                   rounded once

    m  = dy w
    dx = rstd (m - mean(m) - normed mean(m normed))
    dw = sum over rows of dy normed,  db = sum over rows of dy

Letters: R rows of C columns. Traffic: forward reads x and writes y (2RC) and saves mean and rstd (R each, fp32);
backward reads x and dy and writes dx (3RC) plus one fp32 partial dw and db a program. Both are bound by memory. A row
that does not fit one block is read twice, in the backward by two kernels. The forward then keeps a running mean and sum
of squares (Welford, Technometrics 1962) for every lane and merges them (Chan et al., 1979), so that no variance is the
difference of two large numbers.
"""

import functools

import torch
from torch.nn.functional import layer_norm as layer_norm_by_torch  # now, as a program may replace it later

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_columns
from liger_hw.dispatch import Cost, empty_rows, op, raw, widen
from liger_hw.kernels._configs import norm_backward_config, norm_forward_config, norm_wide_sums_config
from liger_hw.kernels._math import in_row, in_tile, load_parameter
from liger_hw.kernels._partials import add_partials, partial_sums, programs_for, wide_grid
from liger_hw.kernels._rows import contiguous, rows_and_cols, rows_of
from liger_hw.launch import launch
from liger_hw.tuning import tuned


def _validate(x, weight, bias):
    check(x.ndim and x.is_floating_point(), "x", x, "floating point rows")
    check_columns("weight", weight, x)
    check_columns("bias", bias, x)


@op(validate=_validate)
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-6
) -> torch.Tensor:
    """Normalise each row of `x` to mean 0, variance 1; scale and shift (arXiv:1607.06450).

    Like torch.nn.functional.layer_norm over the last dimension, in fp32, rounded once.

    Args:
        x: (..., C), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        weight: (C,), any floating dtype, or None for no scale.
        bias: (C,), any floating dtype, or None for no shift.
        eps: added to the variance.

    Returns:
        (..., C) in `x.dtype`.

    Raises:
        ValueError: `weight` or `bias` does not fit `x`.

    Examples:
        >>> liger_hw.layer_norm(torch.rand(2, 8), torch.ones(8), torch.zeros(8)).shape
        torch.Size([2, 8])
    """
    wide = widen(x)
    weight, bias = (None if parameter is None else parameter.to(wide.dtype) for parameter in (weight, bias))
    return layer_norm_by_torch(wide, x.shape[-1:], weight, bias, eps).to(x.dtype)


layer_norm.shards(x="... H", weight="H", bias="H", returns="x")


@layer_norm.cost
def _(x, weight=None, bias=None, *options, **named):
    tensor, parameters = x.nbytes, sum(p.nbytes for p in (weight, bias) if p is not None)
    return Cost(2 * tensor + parameters, 3 * tensor + 2 * parameters, 7 * x.numel(), 13 * x.numel())


@tuned
def layer_norm_forward_config(cols, itemsize, device):
    return norm_forward_config(cols, device)


@tuned
def layer_norm_backward_config(cols, itemsize, device):
    return norm_backward_config(cols, itemsize, device)


@tuned
def layer_norm_wide_sums_config(cols, itemsize, device):
    # With 16 values a lane a core has registers for one program: on an H200 65,536 columns take 0.381 ms, and 0.337
    # with 32 values; 262,144 take 0.366 and 0.331; 16,384 of fp32 0.363 and 0.325.
    return norm_wide_sums_config(device, per_lane=32)


@tuned
def layer_norm_wide_backward_config(itemsize, device):
    return norm_backward_config(1024, itemsize, device)


@triton.jit(do_not_specialize=["rows"])
def layer_norm_forward(
    X, W, B, Y, MEAN, RSTD, rows, x_stride, eps, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    if cols <= COLS:
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        x = tl.load(X + row[:, None] * x_stride + col, mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, 1) / cols
        x = tl.where(in_row(col, cols, COLS), x - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / cols + eps)
        w, b = load_parameter(W, col, 1.0, cols, COLS), load_parameter(B, col, 0.0, cols, COLS)
        tl.store(Y + row[:, None] * cols + col, x * rstd[:, None] * w.to(tl.float32) + b.to(tl.float32), mask)
    else:
        # first each lane's mean and sum of squared deviations over the blocks, then those of all lanes
        lane_mean, squares = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        blocks = 0.0
        for start in range(0, cols, COLS):
            at = start + col
            mask = in_tile(row, at, rows, cols, ROWS, COLS)
            x = tl.load(X + row[:, None] * x_stride + at, mask, other=0.0).to(tl.float32)
            blocks += 1.0
            deviation = tl.where(in_row(at, cols, COLS), x - lane_mean, 0.0)
            lane_mean += deviation * (1.0 / blocks)
            squares += deviation * (x - lane_mean)
        values = ((cols - 1 - col) // COLS + 1).to(tl.float32)  # the count of each lane
        mean = tl.sum(values * lane_mean, 1) / cols
        deviation = lane_mean - mean[:, None]
        rstd = 1.0 / tl.sqrt(tl.sum(squares + values * deviation * deviation, 1) / cols + eps)
        for start in range(0, cols, COLS):
            at = start + col
            mask = in_tile(row, at, rows, cols, ROWS, COLS)
            x = tl.load(X + row[:, None] * x_stride + at, mask, other=0.0).to(tl.float32)
            w, b = load_parameter(W, at, 1.0, cols, COLS), load_parameter(B, at, 0.0, cols, COLS)
            tl.store(
                Y + row[:, None] * cols + at,
                (x - mean[:, None]) * rstd[:, None] * w.to(tl.float32) + b.to(tl.float32),
                mask,
            )
    if MEAN is not None:
        tl.store(MEAN + row, mean, row < rows)
        tl.store(RSTD + row, rstd, row < rows)


@triton.jit
def _load_normed(X, DY, w, mean, rstd, row, at, mask, x_stride, dy_stride):
    """Load a row; return it normalised, the gradient before the weight and the output's gradient."""
    x = tl.load(X + row[:, None] * x_stride + at, mask, other=0.0).to(tl.float32)
    dy = tl.load(DY + row[:, None] * dy_stride + at, mask, other=0.0).to(tl.float32)
    return (x - mean) * rstd, dy * w.to(tl.float32), dy


@triton.jit
def _store_partial(PARTIAL, products, program, at, cols: tl.constexpr, COLS: tl.constexpr):
    partial_at = PARTIAL + program.to(tl.int64) * cols + at
    tl.store(partial_at, tl.sum(products, 0)[None, :], in_row(at, cols, COLS))


@triton.jit(do_not_specialize=["rows"])
def layer_norm_backward(
    X, W, MEAN, RSTD, DY, DX, DW, DB, rows, x_stride, dy_stride,
    cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a fixed number of programs stride over the rows; each sums its own dw and db
    col = tl.arange(0, COLS)[None, :]
    w = load_parameter(W, col, 1.0, cols, COLS)
    dw, db = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        mean = tl.load(MEAN + row, row < rows, other=0.0)[:, None]
        rstd = tl.load(RSTD + row, row < rows, other=0.0)[:, None]
        normed, m, dy = _load_normed(X, DY, w, mean, rstd, row, col, mask, x_stride, dy_stride)
        if DX is not None:
            along, shift = tl.sum(m * normed, 1)[:, None] / cols, tl.sum(m, 1)[:, None] / cols
            tl.store(DX + row[:, None] * cols + col, rstd * (m - normed * along - shift), mask)
        dw += dy * normed
        db += dy
    if DW is not None:
        _store_partial(DW, dw, tl.program_id(0), col, cols, COLS)
    if DB is not None:
        _store_partial(DB, db, tl.program_id(0), col, cols, COLS)


@triton.jit
def layer_norm_wide_sums(
    X, W, MEAN, RSTD, DY, ALONG, SHIFT, x_stride, dy_stride, cols: tl.constexpr, COLS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute mean(m normed) and mean(m) of a row too wide for a program's registers."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    mean, rstd = tl.load(MEAN + row)[:, None], tl.load(RSTD + row)[:, None]
    along, shift = tl.zeros((1, COLS), tl.float32), tl.zeros((1, COLS), tl.float32)
    for start in tl.range(0, cols, COLS, num_stages=STAGES):
        at = start + tl.arange(0, COLS)[None, :]
        w = load_parameter(W, at, 1.0, cols, COLS)
        normed, m, _ = _load_normed(X, DY, w, mean, rstd, row, at, in_row(at, cols, COLS), x_stride, dy_stride)
        along += m * normed
        shift += m
    tl.store(ALONG + row, tl.sum(along, 1) / cols)
    tl.store(SHIFT + row, tl.sum(shift, 1) / cols)


@triton.jit(do_not_specialize=["rows"])
def layer_norm_wide_backward(
    X, W, MEAN, RSTD, DY, DX, DW, DB, ALONG, SHIFT, rows, x_stride, dy_stride,
    cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a block of columns of every n-th row, so that their sums for dw and db stay in registers
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    w = load_parameter(W, col, 1.0, cols, COLS)
    dw, db = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        mean = tl.load(MEAN + row, row < rows, other=0.0)[:, None]
        rstd = tl.load(RSTD + row, row < rows, other=0.0)[:, None]
        along = tl.load(ALONG + row, row < rows, other=0.0)[:, None]
        shift = tl.load(SHIFT + row, row < rows, other=0.0)[:, None]
        normed, m, dy = _load_normed(X, DY, w, mean, rstd, row, col, mask, x_stride, dy_stride)
        if DX is not None:
            tl.store(DX + row[:, None] * cols + col, rstd * (m - normed * along - shift), mask)
        dw += dy * normed
        db += dy
    if DW is not None:
        _store_partial(DW, dw, tl.program_id(1), col, cols, COLS)
    if DB is not None:
        _store_partial(DB, db, tl.program_id(1), col, cols, COLS)


def _empty_outputs(x, needs_grad):
    mean = x.new_empty(rows_and_cols(x)[0], dtype=torch.float32) if needs_grad else None
    return empty_rows(x), mean, torch.empty_like(mean) if needs_grad else None


@raw(_empty_outputs)
def _layer_norm_forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, needs_grad: bool,
    *, y, mean, rstd,
):  # fmt: skip
    rows, cols = rows_and_cols(x)
    x, x_stride = rows_of(x)
    config = layer_norm_forward_config(cols, x.element_size(), device_of(x))
    launch(
        layer_norm_forward, (-(-rows // config["ROWS"]), 1, 1), config,
        x, contiguous(weight), contiguous(bias), y, mean, rstd, rows, x_stride, eps, cols,
    )  # fmt: skip


@_layer_norm_forward.backward()
def _layer_norm_backward(x, weight, bias, mean, rstd, dy, *, dx, dweight, dbias):
    config = layer_norm_backward_config(x.shape[-1], x.element_size(), device_of(x))
    launch_backward = functools.partial(_narrow_backward, config) if x.shape[-1] <= config["COLS"] else _wide_backward
    launch_backward(*rows_of(x), contiguous(weight), mean, rstd, *rows_of(dy), dx, dweight, dbias)


def _narrow_backward(config, x, x_stride, weight, mean, rstd, dy, dy_stride, dx, dweight, dbias):
    rows, cols = rstd.shape[0], x.shape[-1]
    programs = programs_for(config, rows, cols)
    dw, db = partial_sums(dweight, programs), partial_sums(dbias, programs)
    launch(
        layer_norm_backward, (programs, 1, 1), config,
        x, weight, mean, rstd, dy, dx, dw, db, rows, x_stride, dy_stride, cols,
    )  # fmt: skip
    add_partials(dw, dweight)
    add_partials(db, dbias)


def _wide_backward(x, x_stride, weight, mean, rstd, dy, dy_stride, dx, dweight, dbias):
    rows, cols = rstd.shape[0], x.shape[-1]
    along, shift = torch.empty_like(rstd), torch.empty_like(rstd)
    if dx is not None:
        config = layer_norm_wide_sums_config(cols, x.element_size(), device_of(x))
        launch(
            layer_norm_wide_sums, (rows, 1, 1), config,
            x, weight, mean, rstd, dy, along, shift, x_stride, dy_stride, cols,
        )  # fmt: skip
    config = layer_norm_wide_backward_config(x.element_size(), device_of(x))
    blocks, groups = wide_grid(config, rows, cols)
    dw, db = (None if gradient is None else rstd.new_empty(groups, cols) for gradient in (dweight, dbias))
    launch(
        layer_norm_wide_backward, (blocks, groups, 1), config,
        x, weight, mean, rstd, dy, dx, dw, db, along, shift, rows, x_stride, dy_stride, cols,
    )  # fmt: skip
    add_partials(dw, dweight)
    add_partials(db, dbias)


layer_norm.register("triton")(_layer_norm_forward.apply)
