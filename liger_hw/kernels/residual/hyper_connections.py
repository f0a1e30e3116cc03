r"""Mix the residual streams of hyper-connections before and after a layer (arXiv:2512.24880).

    pre        y    = sum over i of h_i x_i                      i, o: streams; rounded once
               dx_i = h_i dy,  dh_i = <x_i, dy>

    post_res   y_o  = sum over i of r_oi x_i + p_o f             f: the layer's output; rounded once
               dx_i = sum over o of r_oi dy_o,    dr_oi = <dy_o, x_i>
               df   = sum over o of p_o dy_o,     dp_o  = <dy_o, f>

Both are products with a small matrix of each row: one output without f, or S outputs with it, so they share two
kernels. Letters: R rows of S streams of C columns. Traffic of pre: forward (S + 1) RC; backward reads x and dy and
writes dx (2S + 1) RC. Traffic of post_res: forward (2S + 1) RC; backward reads x, f and dy and writes dx and df
(3S + 2) RC. All are bound by memory. Every value is read once, except in post_res's backward of more than 4 streams:
there a program takes 2 to 4 input streams, and each program reads dy.
"""

import math

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_kernel_dtype
from liger_hw.dispatch import Cost, empty_rows, op, raw, uncast, widen
from liger_hw.kernels._math import in_row
from liger_hw.kernels._rows import contiguous, rows_of, rows_or_none
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned

MOST_STREAMS = 16  # a program holds a value of every stream in registers


def check_streams(x):
    fits = x.is_floating_point() and x.ndim >= 2 and 1 <= x.shape[-2] <= MOST_STREAMS
    check(fits, "x", x, f"floating point (..., streams, columns) of 1 to {MOST_STREAMS} streams")


def check_like(name, tensor, shape, x):
    fits = tensor.is_floating_point() and tensor.shape == shape and tensor.device == x.device
    check(fits, name, tensor, f"floating point of shape {tuple(shape)} on {x.device}")


def wide_product(a, b):
    """Multiply matrices in fp32, or wider if one of them is; autocast changes nothing."""
    dtype = torch.promote_types(widen(a).dtype, b.dtype)
    with uncast(a):
        return a.to(dtype) @ b.to(dtype)


def _validate_pre(x, h_pre):
    check_streams(x)
    check_like("h_pre", h_pre, x.shape[:-1], x)


def _validate_post_res(x, f_out, h_post, h_res):
    check_streams(x)
    check_like("f_out", f_out, x.shape[:-2] + x.shape[-1:], x)
    check_like("h_post", h_post, x.shape[:-1], x)
    check_like("h_res", h_res, x.shape[:-1] + x.shape[-2:-1], x)


@op(validate=_validate_pre)
def mhc_pre(x: torch.Tensor, h_pre: torch.Tensor) -> torch.Tensor:
    """Sum the streams of hyper-connections to the input of a layer, weighted by `h_pre`.

    Args:
        x: (..., S, C), 1 to 16 streams, any strides and floating dtype; plain torch computes dtypes other than fp32,
            fp16 and bf16.
        h_pre: (..., S), any floating dtype.

    Returns:
        (..., C) in `x.dtype`; computed in fp32 and rounded once.

    Raises:
        ValueError: `x` has no streams or more than 16, or `h_pre` does not fit it.

    Examples:
        >>> liger_hw.mhc_pre(torch.rand(2, 4, 8), torch.rand(2, 4)).shape
        torch.Size([2, 8])
    """
    return (widen(h_pre).unsqueeze(-1) * widen(x)).sum(-2).to(x.dtype)


@op(validate=_validate_post_res)
def mhc_post_res(x: torch.Tensor, f_out: torch.Tensor, h_post: torch.Tensor, h_res: torch.Tensor) -> torch.Tensor:
    """Mix the streams of hyper-connections by `h_res` and add a layer's output by `h_post`.

    Args:
        x: (..., S, C), 1 to 16 streams, of a dtype and strides as in `mhc_pre`.
        f_out: (..., C), the layer's output, any floating dtype.
        h_post: (..., S), any floating dtype.
        h_res: (..., S, S), any floating dtype; the first S is that of the results.

    Returns:
        (..., S, C) in `x.dtype`; computed in fp32 and rounded once.

    Raises:
        ValueError: `x` has no streams or more than 16, or another argument does not fit it.

    Examples:
        >>> x, h_res = torch.rand(2, 4, 8), torch.rand(2, 4, 4)
        >>> liger_hw.mhc_post_res(x, torch.rand(2, 8), torch.rand(2, 4), h_res).shape
        torch.Size([2, 4, 8])
    """
    return (wide_product(h_res, x) + widen(h_post).unsqueeze(-1) * widen(f_out).unsqueeze(-2)).to(x.dtype)


mhc_pre.shards(x="... S c", h_pre="... S", returns="... c")
mhc_post_res.shards(x="... S c", f_out="... c", h_post="... S", h_res="... S S", returns="x")


@mhc_pre.cost
def _(x, h_pre):
    y = x.nbytes // x.shape[-2]
    forward = x.nbytes + h_pre.nbytes + y
    return Cost(forward, forward + x.nbytes + h_pre.nbytes, 2 * x.numel(), 3 * x.numel())


@mhc_post_res.cost
def _(x, f_out, h_post, h_res):
    inputs = sum(tensor.nbytes for tensor in (x, f_out, h_post, h_res))
    flops = 2 * (x.shape[-2] + 1) * x.numel()
    return Cost(inputs + x.nbytes, 2 * inputs + x.nbytes, flops, 2 * flops)


@tuned
def mhc_forward_config(cols, streams, outs, itemsize, device):
    # registers hold all streams: 64 values a lane, but at least a vector of each
    values = 64 if device.core else device.registers // 2  # without a core's limits, few lanes get no more registers
    per_lane = max(16 // itemsize, min(16, power_of_2(values // streams + 1) // 2))
    block = min(power_of_2(cols), 64 * per_lane)
    return Config({"COLS": block}, row_warps(block, device, per_lane))


@tuned
def mhc_backward_config(cols, streams, outs, itemsize, device):
    # One warp a row: its lanes add up their sums without a barrier. Registers hold a vector of every dy (half of one
    # from 9 outputs on), and sums and coefficients of 32 pairs of an input and an output. At odd widths each value of
    # 16 bits takes a register: 8 of each stream spill (compiled for gfx1100).
    vector, pairs = (16 if outs <= 8 else 8) // itemsize, 32
    vector = min(vector, 4) if cols % vector else vector
    if device.core is None:
        vector, pairs = min(vector, device.registers // 32), device.registers // 4
    block = min(power_of_2(cols), vector * device.warp_size)
    group = power_of_2(pairs // outs + 1) // 2
    return Config({"GROUP": group, "VECTOR": min(vector, block), "COLS": block}, num_warps=1)


@triton.jit
def mhc_forward(
    X, F, P, H, Y, x_stride, f_stride, cols: tl.constexpr, streams: tl.constexpr, outs: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = in_row(col, cols, COLS)
    xs = ()
    for i in tl.static_range(streams):
        xs = xs + (tl.load(X + (row * streams + i) * x_stride + col, mask, other=0.0).to(tl.float32),)
    if F is not None:
        f = tl.load(F + row * f_stride + col, mask, other=0.0).to(tl.float32)
    for o in tl.static_range(outs):
        y = tl.zeros([COLS], tl.float32)
        for i in tl.static_range(streams):
            y += tl.load(H + (row * outs + o) * streams + i).to(tl.float32) * xs[i]
        if F is not None:
            y += tl.load(P + row * outs + o).to(tl.float32) * f
        tl.store(Y + (row * outs + o) * cols + col, y, mask)


@triton.jit
def _tile(cols: tl.constexpr, VECTOR: tl.constexpr, COLS: tl.constexpr):
    """Return the columns of a tile [lanes, VECTOR] whose last dimension stays within a lane.

    A lane has adjacent columns if rows begin at vectors, else lanes have adjacent columns.
    """
    LANES: tl.constexpr = COLS // VECTOR
    lane, value = tl.arange(0, LANES)[:, None], tl.arange(0, VECTOR)[None, :]
    if cols % VECTOR == 0:
        return lane * VECTOR + value
    else:
        return value * LANES + lane


@triton.jit
def _load_coefficients(P, row, first, outs: tl.constexpr, stride: tl.constexpr, COUNT: tl.constexpr):
    """Load the coefficients of COUNT inputs from `first` on, of all outputs for each."""
    coefficients = ()
    for j in tl.static_range(COUNT):
        for o in tl.static_range(outs):
            at = (row * outs + o) * stride + first + j
            coefficients = coefficients + (tl.load(P + at, first + j < stride, other=0.0).to(tl.float32),)
    return coefficients


@triton.jit
def _sum_outputs(coefficients, dys, j: tl.constexpr, outs: tl.constexpr):
    """Return the gradient of input j."""
    total = coefficients[j * outs] * dys[0]
    for o in tl.static_range(1, outs):
        total += coefficients[j * outs + o] * dys[o]
    return total


@triton.jit
def mhc_backward(
    X, F, P, H, DY, DX, DF, DP, DH, x_stride, f_stride, dy_stride, cols: tl.constexpr, streams: tl.constexpr,
    outs: tl.constexpr, GROUP: tl.constexpr, VECTOR: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # a program has the input streams `first` to `first + SIZE` of a row; the first program of a row has f as well
    GROUPS: tl.constexpr = (streams + GROUP - 1) // GROUP
    SIZE: tl.constexpr = (streams + GROUPS - 1) // GROUPS
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE
    col = _tile(cols, VECTOR, COLS)
    dh, dp = (), ()
    if DX is not None:
        h = _load_coefficients(H, row, first, outs, streams, SIZE)
    if DF is not None:
        p = _load_coefficients(P, row, 0, outs, 1, 1)
    for _ in tl.static_range(SIZE * outs):
        dh = dh + (tl.zeros([COLS // VECTOR], tl.float32),)
    for _ in tl.static_range(outs):
        dp = dp + (tl.zeros([COLS // VECTOR], tl.float32),)
    for start in range(0, cols, COLS):
        at = start + col
        mask = in_row(at, cols, COLS)
        f_mask = mask
        if GROUPS > 1:
            f_mask = mask & (tl.full((1, 1), first, tl.int32) == 0)
        dys, new_dh, new_dp = (), (), ()
        for o in tl.static_range(outs):
            dys = dys + (tl.load(DY + (row * outs + o) * dy_stride + at, mask, other=0.0).to(tl.float32),)
        for j in tl.static_range(SIZE):
            x_mask = mask
            if SIZE * GROUPS > streams:
                x_mask = mask & (tl.full((1, 1), first + j, tl.int32) < streams)
            if DH is not None:
                x = tl.load(X + (row * streams + first + j) * x_stride + at, x_mask, other=0.0).to(tl.float32)
                for o in tl.static_range(outs):
                    new_dh = new_dh + (dh[j * outs + o] + tl.sum(x * dys[o], 1),)
            if DX is not None:
                dx = _sum_outputs(h, dys, j, outs)
                tl.store(DX + (row * streams + first + j) * cols + at, dx, x_mask)
        if DP is not None:
            f = tl.load(F + row * f_stride + at, f_mask, other=0.0).to(tl.float32)
            for o in tl.static_range(outs):
                new_dp = new_dp + (dp[o] + tl.sum(f * dys[o], 1),)
            dp = new_dp
        if DF is not None:
            tl.store(DF + row * cols + at, _sum_outputs(p, dys, 0, outs), f_mask)
        if DH is not None:
            dh = new_dh
    for o in tl.static_range(outs):
        if DH is not None:
            for j in tl.static_range(SIZE):
                place = DH + (row * outs + o) * streams + first + j
                tl.store(place, tl.sum(dh[j * outs + o], 0), first + j < streams)
        if DP is not None:
            tl.store(DP + row * outs + o, tl.sum(dp[o], 0), first == 0)


def _sizes(x, f_out):
    """Return rows, streams, columns and the number of outputs."""
    streams, cols = x.shape[-2:]
    return math.prod(x.shape[:-2]), streams, cols, 1 if f_out is None else streams


@raw(lambda x, f_out: x.new_empty(x.shape[:-2] + x.shape[-1:]) if f_out is None else empty_rows(x))
def _mhc_forward(x: torch.Tensor, f_out: torch.Tensor | None, h_post: torch.Tensor | None, h: torch.Tensor, *, y):
    rows, streams, cols, outs = _sizes(x, f_out)
    config = mhc_forward_config(cols, streams, outs, x.element_size(), device_of(x))
    (x, x_stride), (f, f_stride) = rows_of(x), rows_or_none(f_out)
    grid = rows, -(-cols // config["COLS"]), 1
    launch(mhc_forward, grid, config, x, f, h_post, h, y, x_stride, f_stride, cols, streams, outs)


@_mhc_forward.backward()
def _mhc_backward(x, f_out, h_post, h, dy, *, dx, df_out, dh_post, dh):
    rows, streams, cols, outs = _sizes(x, f_out)
    config = mhc_backward_config(cols, streams, outs, x.element_size(), device_of(x))
    (x, x_stride), (f, f_stride), (dy, dy_stride) = rows_of(x), rows_or_none(f_out), rows_of(dy)
    launch(
        mhc_backward, (rows, -(-streams // config["GROUP"]), 1), config,
        x, f, h_post, h, dy, dx, df_out, dh_post, dh, x_stride, f_stride, dy_stride, cols, streams, outs,
    )  # fmt: skip


@mhc_pre.register("triton")
def _(x, h_pre):
    check_kernel_dtype("h_pre", h_pre)
    return _mhc_forward.apply(x, None, None, contiguous(h_pre))


@mhc_post_res.register("triton")
def _(x, f_out, h_post, h_res):
    for name, tensor in (("f_out", f_out), ("h_post", h_post), ("h_res", h_res)):
        check_kernel_dtype(name, tensor)
    return _mhc_forward.apply(x, f_out, contiguous(h_post), contiguous(h_res))
