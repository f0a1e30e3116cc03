r"""Compute dynamic tanh, which replaces a norm (arXiv:2503.10622).

    t = tanh(alpha x)
    y = gamma t + beta                                      rounded once

    ds     = dy gamma (1 - t^2)
    dx     = ds alpha
    dalpha = sum of ds x,  dgamma = sum over rows of dy t,  dbeta = sum over rows of dy

Letters: R rows of C columns. Traffic: forward reads x and writes y (2RC); backward reads x and dy and writes dx (3RC),
plus fp32 partial sums of a fixed number of programs. Both are bound by memory. No value depends on its whole row, so a
program has a block of columns of every n-th row.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_columns
from liger_hw.dispatch import Cost, op, raw, widen
from liger_hw.kernels._math import LOG2_E, in_row, in_tile, load_parameter, reciprocal
from liger_hw.kernels._partials import add_partials, programs_for_blocks
from liger_hw.kernels._rows import contiguous, rows_and_cols, rows_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


def _validate(x, alpha, gamma, beta):
    check(x.ndim and x.is_floating_point(), "x", x, "floating point rows")
    check(alpha.numel() == 1 and alpha.device == x.device, "alpha", alpha, f"one value on {x.device}")
    check_columns("gamma", gamma, x)
    check_columns("beta", beta, x)


@op(validate=_validate)
def dyt(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None = None) -> torch.Tensor:
    """Compute gamma tanh(alpha x) + beta in fp32 and round once.

    Args:
        x: (..., C), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        alpha: one value, any floating dtype.
        gamma: (C,), any floating dtype.
        beta: (C,), any floating dtype, or None for no shift.

    Returns:
        (..., C) in `x.dtype`.

    Raises:
        ValueError: `alpha` has several values, or `gamma` or `beta` does not fit `x`.

    Examples:
        >>> liger_hw.dyt(torch.zeros(1, 3), torch.ones(1), torch.ones(3), torch.ones(3))
        tensor([[1., 1., 1.]])
    """
    y = widen(gamma) * torch.tanh(widen(alpha.reshape(())) * widen(x))
    return (y if beta is None else y + widen(beta)).to(x.dtype)


dyt.shards(x="... c", alpha="", gamma="c", beta="c", returns="x")


@dyt.cost
def _(x, alpha, gamma, beta=None):
    parameters = sum(p.nbytes for p in (alpha, gamma, beta) if p is not None)
    return Cost(2 * x.nbytes + parameters, 3 * x.nbytes + 2 * parameters, 4 * x.numel(), 11 * x.numel())


@tuned
def dyt_forward_config(cols, itemsize, device):
    # Narrow tiles read gamma and beta once for many rows: 16384 x 8192 take 0.153 ms, in tiles of 256 columns 0.172
    # (H200). Rows that do not begin at whole vectors take 10% longer in them.
    if cols % 8:
        return _tile(cols, device, 256, 16)
    return _tile(cols, device, 64, 64 // itemsize)


@tuned
def dyt_backward_config(cols, itemsize, device):
    # Two programs a core load two tiles of 16 KiB of x and dy ahead: 64 KiB in flight. 8192 x 4096 take 0.075 ms in
    # bf16, and 0.100 in tiles of 256 columns on 16 warps; in fp32 0.114 and 0.123 (H200).
    if itemsize == 2:
        return _tile(cols, device, 128, 16, STAGES=3 if device.async_copy else 1)
    return _tile(cols, device, 64, 16, 2048, STAGES=3 if device.async_copy else 1)


def _tile(cols, device, widest, per_lane, values=4096, **more):
    """Return a tile of `values` values of at most `widest` columns."""
    block = min(power_of_2(cols), widest)
    return Config({"ROWS": values // block, "COLS": block} | more, row_warps(values, device, per_lane), programs=2)


@triton.jit
def tanh_and_slope(x, dtype: tl.constexpr):
    """Compute tanh and its derivative, for results rounded to `dtype`.

    Its series serves where 1 - e would cancel.
    """
    square = x * x
    series = x + x * square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835))))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    q = reciprocal(1.0 + e, dtype)
    far = (1.0 - e) * q
    return tl.where(square < 0.09, series, tl.where(x < 0.0, -far, far)), 4.0 * e * q * q


@triton.jit
def _column_block(cols: tl.constexpr, COLS: tl.constexpr):
    """Return this program's columns, and its number among the programs that share them."""
    BLOCKS: tl.constexpr = (cols + COLS - 1) // COLS
    return tl.program_id(0) % BLOCKS * COLS + tl.arange(0, COLS)[None, :], tl.program_id(0) // BLOCKS


@triton.jit(do_not_specialize=["rows"])
def dyt_forward(
    X, ALPHA, GAMMA, BETA, Y, rows, x_stride, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    col, program = _column_block(cols, COLS)
    row = program.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = in_tile(row, col, rows, cols, ROWS, COLS)
    x = tl.load(X + row[:, None] * x_stride + col, mask, other=0.0).to(tl.float32)
    gamma = load_parameter(GAMMA, col, 1.0, cols, COLS).to(tl.float32)
    beta = load_parameter(BETA, col, 0.0, cols, COLS).to(tl.float32)
    t, _ = tanh_and_slope(tl.load(ALPHA).to(tl.float32) * x, Y.dtype.element_ty)
    tl.store(Y + row[:, None] * cols + col, gamma * t + beta, mask)


@triton.jit(do_not_specialize=["rows"])
def dyt_backward(
    X, ALPHA, GAMMA, DY, DX, DALPHA, DGAMMA, DBETA, rows, x_stride, dy_stride, cols: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a fixed number of programs stride over the rows of a block of columns; each sums its own gradients
    BLOCKS: tl.constexpr = (cols + COLS - 1) // COLS
    col, program = _column_block(cols, COLS)
    alpha, gamma = tl.load(ALPHA).to(tl.float32), load_parameter(GAMMA, col, 1.0, cols, COLS).to(tl.float32)
    dalpha, dgamma = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    dbeta = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(program * ROWS, rows, tl.num_programs(0) // BLOCKS * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        x = tl.load(X + row[:, None] * x_stride + col, mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row[:, None] * dy_stride + col, mask, other=0.0).to(tl.float32)
        t, slope = tanh_and_slope(alpha * x, X.dtype.element_ty)
        ds = dy * gamma * slope
        if DX is not None:
            tl.store(DX + row[:, None] * cols + col, ds * alpha, mask)
        dalpha += ds * x
        dgamma += dy * t
        dbeta += dy
    valid = in_row(col, cols, COLS)
    if DALPHA is not None:
        tl.store(DALPHA + tl.program_id(0), tl.sum(tl.sum(dalpha, 1), 0))
    if DGAMMA is not None:
        tl.store(DGAMMA + program.to(tl.int64) * cols + col, tl.sum(dgamma, 0)[None, :], valid)
    if DBETA is not None:
        tl.store(DBETA + program.to(tl.int64) * cols + col, tl.sum(dbeta, 0)[None, :], valid)


@raw()
def _dyt_forward(x: torch.Tensor, alpha: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, *, y):
    rows, cols = rows_and_cols(x)
    config = dyt_forward_config(cols, x.element_size(), device_of(x))
    x, x_stride = rows_of(x)
    programs = -(-rows // config["ROWS"]) * -(-cols // config["COLS"])
    gamma, beta = map(contiguous, (gamma, beta))
    launch(dyt_forward, (programs, 1, 1), config, x, alpha, gamma, beta, y, rows, x_stride, cols)


@_dyt_forward.backward()
def _dyt_backward(x, alpha, gamma, beta, dy, *, dx, dalpha, dgamma, dbeta):
    rows, cols = rows_and_cols(x)
    config = dyt_backward_config(cols, x.element_size(), device_of(x))
    blocks = -(-cols // config["COLS"])
    programs = programs_for_blocks(config, x.numel(), rows, blocks)

    parameters = (dalpha, (programs * blocks, 1)), (dgamma, (programs, cols)), (dbeta, (programs, cols))
    sums = [None if gradient is None else dy.new_empty(shape, dtype=torch.float32) for gradient, shape in parameters]
    (x, x_stride), (dy, dy_stride) = rows_of(x), rows_of(dy)
    launch(
        dyt_backward, (programs * blocks, 1, 1), config,
        x, alpha, contiguous(gamma), dy, dx, *sums, rows, x_stride, dy_stride, cols,
    )  # fmt: skip
    for partial, (gradient, _) in zip(sums, parameters):
        add_partials(partial, gradient)


dyt.register("triton")(_dyt_forward.apply)
