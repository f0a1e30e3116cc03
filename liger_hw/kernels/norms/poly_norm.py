r"""Compute PolyNorm, a sum of normalised powers of each row (arXiv:2411.03884).

    r_k = 1 / sqrt(mean(x^2k) + eps)                        k = 1, 2, 3
    y   = w_0 x^3 r_3 + w_1 x^2 r_2 + w_2 x r_1 + b         rounded once

    dx      = sum over k of w_(3-k) r_k k x^(k-1) (dy - x^k r_k^2 mean(dy x^k))
    dw_(3-k) = sum over rows of r_k sum(dy x^k),  db = sum of dy

Letters: R rows of C columns. Traffic: forward reads x and writes y (2RC); backward reads x and dy and writes dx (3RC),
plus four partial sums a program. Both are bound by memory. A row too wide for a program is read twice.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, empty_rows, op, raw, widen
from liger_hw.kernels._configs import norm_backward_config, norm_forward_config, widest_block
from liger_hw.kernels._math import in_tile
from liger_hw.kernels._partials import add_partials
from liger_hw.kernels._rows import contiguous, rows_and_cols, rows_of
from liger_hw.launch import launch
from liger_hw.tuning import tuned


def _validate(x, weight, bias):
    check(x.ndim and x.is_floating_point(), "x", x, "floating point rows")
    check(weight.shape == (3,) and weight.device == x.device, "weight", weight, f"three values on {x.device}")
    check(bias.numel() == 1 and bias.device == x.device, "bias", bias, f"one value on {x.device}")


@op(validate=_validate)
def poly_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Compute w0 n(x^3) + w1 n(x^2) + w2 n(x) + b.

    n(u) = u / sqrt(mean(u^2) + eps). Everything is computed in fp32 and rounded once.

    Args:
        x: (..., C), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        weight: (3,), any floating dtype.
        bias: one value, any floating dtype.
        eps: added to each mean square.

    Returns:
        (..., C) in `x.dtype`.

    Raises:
        ValueError: `weight` or `bias` has another number of values.

    Examples:
        >>> liger_hw.poly_norm(torch.rand(2, 8), torch.ones(3) / 3, torch.zeros(1)).shape
        torch.Size([2, 8])
    """
    wide = widen(x)
    powers = (p * torch.rsqrt(p.square().mean(-1, keepdim=True) + eps) for p in (wide**3, wide**2, wide))
    return (sum(w * p for w, p in zip(widen(weight), powers)) + widen(bias.reshape(()))).to(x.dtype)


poly_norm.shards(x="... H", weight="", bias="", returns="x")


@poly_norm.cost
def _(x, weight, bias, *options, **named):
    parameters = weight.nbytes + bias.nbytes
    return Cost(2 * x.nbytes + parameters, 3 * x.nbytes + 2 * parameters, 14 * x.numel(), 32 * x.numel())


@tuned
def poly_norm_forward_config(cols, itemsize, device):
    # two rows: x and its powers; with one, 24,576 columns spill (compiled for sm90)
    return norm_forward_config(cols, device, rows_live=2)


@tuned
def poly_norm_backward_config(cols, itemsize, device):
    # on as many warps as a wider row would get, a lane would load half a vector and spill
    return norm_backward_config(min(cols, 2 * widest_block(device, 4)), itemsize, device)


@triton.jit
def _load(P, row, at, mask, stride):
    return tl.load(P + row[:, None] * stride + at, mask, other=0.0).to(tl.float32)


@triton.jit
def _rstd(squares, cols: tl.constexpr, eps):
    return 1.0 / tl.sqrt(tl.sum(squares, 1) / cols + eps)[:, None]


@triton.jit
def _weights(W):
    """Return the weights of the first, second and third power."""
    return tl.load(W + 2).to(tl.float32), tl.load(W + 1).to(tl.float32), tl.load(W).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def poly_norm_forward(
    X, W, B, Y, rows, x_stride, eps, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    w1, w2, w3 = _weights(W)
    b = tl.load(B).to(tl.float32)
    if cols <= COLS:
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        x = _load(X, row, col, mask, x_stride)
        square, cube = x * x, x * x * x
        r1, r2, r3 = _rstd(square, cols, eps), _rstd(square * square, cols, eps), _rstd(cube * cube, cols, eps)
        y = w3 * (cube * r3) + w2 * (square * r2) + w1 * (x * r1) + b
        tl.store(Y + row[:, None] * cols + col, y, mask)
    else:
        sum_1, sum_2 = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        sum_3 = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, cols, COLS):
            x = _load(X, row, start + col, in_tile(row, start + col, rows, cols, ROWS, COLS), x_stride)
            square, cube = x * x, x * x * x
            sum_1 += square
            sum_2 += square * square
            sum_3 += cube * cube
        r1, r2, r3 = _rstd(sum_1, cols, eps), _rstd(sum_2, cols, eps), _rstd(sum_3, cols, eps)
        for start in range(0, cols, COLS):
            mask = in_tile(row, start + col, rows, cols, ROWS, COLS)
            x = _load(X, row, start + col, mask, x_stride)
            square, cube = x * x, x * x * x
            y = w3 * (cube * r3) + w2 * (square * r2) + w1 * (x * r1) + b
            tl.store(Y + row[:, None] * cols + start + col, y, mask)


@triton.jit
def _dx(x, dy, f1, f2, f3, g1, g2, g3):
    """Return the gradient of x; f_k is w r_k and g_k is r_k^2 mean(dy x^k)."""
    square = x * x
    slope_2, slope_3 = 2.0 * x * (dy - square * g2), 3.0 * square * (dy - square * x * g3)
    return f1 * (dy - x * g1) + f2 * slope_2 + f3 * slope_3


@triton.jit(do_not_specialize=["rows"])
def poly_norm_backward(
    X, W, DY, DX, SUMS, rows, x_stride, dy_stride, eps, cols: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a fixed number of programs stride over the rows; each sums its own gradients of weight and bias
    col = tl.arange(0, COLS)[None, :]
    w1, w2, w3 = _weights(W)
    dw1, dw2, dw3 = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    db = 0.0
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        if cols <= COLS:
            mask = in_tile(row, col, rows, cols, ROWS, COLS)
            x, dy = _load(X, row, col, mask, x_stride), _load(DY, row, col, mask, dy_stride)
            square, cube = x * x, x * x * x
            r1, r2, r3 = _rstd(square, cols, eps), _rstd(square * square, cols, eps), _rstd(cube * cube, cols, eps)
            along_1, along_2, along_3 = tl.sum(dy * x, 1), tl.sum(dy * square, 1), tl.sum(dy * cube, 1)
            db += tl.sum(dy)  # as a sum of each row, the LLVM of Triton 3.9 crashes on RDNA at odd widths
        else:
            sum_1, sum_2 = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
            sum_3, total = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
            on_1, on_2 = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
            on_3 = tl.zeros((ROWS, COLS), tl.float32)
            for first in range(0, cols, COLS):
                mask = in_tile(row, first + col, rows, cols, ROWS, COLS)
                x, dy = _load(X, row, first + col, mask, x_stride), _load(DY, row, first + col, mask, dy_stride)
                square, cube = x * x, x * x * x
                sum_1 += square
                sum_2 += square * square
                sum_3 += cube * cube
                on_1 += dy * x
                on_2 += dy * square
                on_3 += dy * cube
                total += dy
            r1, r2, r3 = _rstd(sum_1, cols, eps), _rstd(sum_2, cols, eps), _rstd(sum_3, cols, eps)
            along_1, along_2, along_3 = tl.sum(on_1, 1), tl.sum(on_2, 1), tl.sum(on_3, 1)
            db += tl.sum(total)
        valid = (row < rows)[:, None]  # absent rows get 0: with eps=0 theirs is infinite, and would make dw NaN
        r1, r2, r3 = tl.where(valid, r1, 0.0), tl.where(valid, r2, 0.0), tl.where(valid, r3, 0.0)
        g1 = r1 * r1 * along_1[:, None] / cols
        g2 = r2 * r2 * along_2[:, None] / cols
        g3 = r3 * r3 * along_3[:, None] / cols
        if cols <= COLS:
            dx = _dx(x, dy, w1 * r1, w2 * r2, w3 * r3, g1, g2, g3)
            tl.store(DX + row[:, None] * cols + col, dx, mask)
        else:
            for first in range(0, cols, COLS):
                mask = in_tile(row, first + col, rows, cols, ROWS, COLS)
                x, dy = _load(X, row, first + col, mask, x_stride), _load(DY, row, first + col, mask, dy_stride)
                dx = _dx(x, dy, w1 * r1, w2 * r2, w3 * r3, g1, g2, g3)
                tl.store(DX + row[:, None] * cols + first + col, dx, mask)
        dw1 += tl.sum(r1, 1) * along_1
        dw2 += tl.sum(r2, 1) * along_2
        dw3 += tl.sum(r3, 1) * along_3
    at = tl.arange(0, 16)  # of which 4 count: the next kernel then loads whole vectors
    sums = tl.where(at == 0, tl.sum(dw3, 0), tl.where(at == 1, tl.sum(dw2, 0), tl.sum(dw1, 0)))
    tl.store(SUMS + tl.program_id(0) * 16 + at, tl.where(at == 3, db, sums))


@raw()
def _poly_norm_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, *, y):
    rows, cols = rows_and_cols(x)
    config = poly_norm_forward_config(cols, x.element_size(), device_of(x))
    x, x_stride = rows_of(x)
    grid = -(-rows // config["ROWS"]), 1, 1
    launch(poly_norm_forward, grid, config, x, contiguous(weight), bias, y, rows, x_stride, eps, cols)


@raw(lambda x: (empty_rows(x), x.new_empty(16, dtype=torch.float32)))
def _poly_norm_backward(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor, eps: float, *, dx, sums):
    """Compute dx, and 16 values: first the gradients of three weights and the bias."""
    rows, cols = rows_and_cols(x)
    config = poly_norm_backward_config(cols, x.element_size(), device_of(x))
    programs = config.grid_for(-(-rows // config["ROWS"]))
    partial = dy.new_empty((programs, 16), dtype=torch.float32)
    (x, x_stride), (dy, dy_stride), weight = rows_of(x), rows_of(dy), contiguous(weight)
    grid = programs, 1, 1
    launch(poly_norm_backward, grid, config, x, weight, dy, dx, partial, rows, x_stride, dy_stride, eps, cols)
    add_partials(partial, sums)


@_poly_norm_forward.backward()
def _(x, weight, bias, eps, dy, *, x_grad, weight_grad, bias_grad):
    dx, sums = _poly_norm_backward(x, weight, dy, eps)
    return dx, sums[:3].to(weight.dtype), sums[3].to(bias.dtype).view(bias.shape)


poly_norm.register("triton")(_poly_norm_forward.apply)
