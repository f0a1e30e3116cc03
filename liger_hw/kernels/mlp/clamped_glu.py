r"""Compute gated linear units with clamped inputs (gpt_oss arXiv:2508.10925, DeepSeek-V4, MiniMax-M3).

    g = min(gate, limit)        u = max(-limit, min(up, limit)) + offset
    y = f(g) u                  f(g) = g s(alpha g), s the sigmoid

    dgate = dy u f'(g) where gate < limit, else 0         f'(g) = s(alpha g) + alpha g s(alpha g) (1 - s(alpha g))
    dup   = dy f(g)    where |up| < limit, else 0         in torch 2.13 also where they are equal

Letters: R rows of C columns. Traffic: forward reads gate and up and writes y (3RC), backward reads gate, up and dy and
writes their gradients (5RC), recomputing f. Both are bound by memory. A fused projection is read in place, as halves of
its rows or alternating values, and its gradients are written in the same order.
"""

from typing import NamedTuple

import torch
from torch import sigmoid  # now, as a program may replace it later
from torch.nn.functional import silu as silu_by_torch

from liger_hw._torch import clamp_passes_at_limits
from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, raw, widen
from liger_hw.kernels._math import rounded
from liger_hw.kernels._rows import rows_of, rows_or_none
from liger_hw.kernels.mlp.glu import program_tile, tile_config
from liger_hw.launch import launch
from liger_hw.tuning import power_of_2, tuned


def _validate(gate, up, limit, interleaved):
    check(gate.is_floating_point() and gate.ndim > 0, "gate", gate, "floating point rows")
    if up is None:
        check(gate.shape[-1] % 2 == 0, "gate", gate, "rows of gate and up, an even number of columns")
    else:
        like = up.dtype == gate.dtype and up.shape == gate.shape and up.device == gate.device
        check(like, "up", up, gate)
        check(not interleaved, "interleaved", interleaved, "False where up is given")
    check(limit > 0, "limit", limit, "a positive number")


@op(validate=_validate)
def clamped_swiglu(
    gate: torch.Tensor, up: torch.Tensor | None = None, limit: float = 7.0, alpha: float | None = None,
    offset: float = 0.0, interleaved: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute (clamp(up) + offset) * g * sigmoid(alpha * g) with g = min(gate, limit).

    Args:
        gate: (..., C), or (..., 2C) of gate and up where `up` is None; any dtype that `swiglu` takes.
        up: (..., C), like `gate`.
        limit: upper bound of `gate`, and bound of `up` on both sides; values beyond it get no gradient,
            and those at it what torch's clamp gives them.
        alpha: factor in the sigmoid's argument; the gate times its sigmoid is then rounded after each operation, as in
            gpt_oss, also for 0. None: silu, rounded once (DeepSeek-V4).
        offset: added to the clamped `up`; gpt_oss uses 1.0.
        interleaved: gate and up alternate in the rows of a fused `gate`; otherwise the gate is their first half.

    Returns:
        (..., C), contiguous, in `gate.dtype`.

    Raises:
        ValueError: `up` is not like `gate`, a fused row is odd, or `limit` is not positive.

    Examples:
        >>> liger_hw.clamped_swiglu(torch.zeros(1, 2), torch.ones(1, 2), limit=7.0)
        tensor([[0., 0.]])
    """
    gate, up = _split(gate, up, interleaved)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    silu = alpha is None
    activated = silu_by_torch(widen(gate)).to(gate.dtype) if silu else gate * sigmoid(gate * alpha)
    return (up + offset if offset else up) * activated


@clamped_swiglu.shards
def _(call):
    if call.up is None:  # a shard of fused columns would pair them wrongly
        return call, {"gate": "... C", "returns": "... H"}
    return call, {"gate": "...", "up": "...", "returns": "gate"}


@clamped_swiglu.cost
def _(gate, up=None, *options, **named):
    inputs = gate.nbytes + (0 if up is None else up.nbytes)
    count = inputs // gate.itemsize // 2
    return Cost(inputs + inputs // 2, 2 * inputs + inputs // 2, 9 * count, 18 * count)


def _split(gate, up, interleaved):
    if up is not None:
        return gate, up
    return (gate[..., ::2], gate[..., 1::2]) if interleaved else gate.chunk(2, -1)


# bf16 on an H200: with 128 lanes, tiles of 1,024 columns are 4 to 16% faster than 2,048 in every backward (16384x2880:
# 0.122 ms and 0.139; fused 0.128 and 0.152) and within 5% of the best. With 64 lanes every forward is as fast or faster
# (fused: 0.074 and 0.084; interleaved 0.075, and 0.080 on 128 lanes).
@tuned
def clamped_glu_forward_config(width, itemsize, device):
    return tile_config(width, itemsize, device, tile=min(1024 * itemsize, 4096), lanes=64)


@tuned
def clamped_glu_backward_config(width, itemsize, device):
    return tile_config(width, itemsize, device, tile=min(1024 * itemsize, 4096), lanes=128)


@triton.jit
def _activated(g, alpha, dtype: tl.constexpr, SILU: tl.constexpr):
    if SILU:
        return rounded(g / (1.0 + tl.exp(-g)), dtype)
    else:
        return rounded(g * rounded(1.0 / (1.0 + tl.exp(-rounded(g * alpha, dtype))), dtype), dtype)


@triton.jit
def _mask(row, rows, start, cols, whole: tl.constexpr, COLS: tl.constexpr):
    if whole:
        return tl.full((1, COLS), True, tl.int1)
    else:
        return (row < rows) & (start + tl.arange(0, COLS)[None, :] < cols)


@triton.jit
def _load_clamped(
    G, U, row, start, rows, cols, g_stride, u_stride, limit, offset,
    whole: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Load gate and up; return them, and both clamped with the offset added."""
    dtype: tl.constexpr = G.dtype.element_ty
    if INTERLEAVED:  # load both, then split: accesses to every other value would be one value wide
        mask = _mask(row, rows, 2 * start, tl.cast(cols, tl.int64) * 2, whole, 2 * COLS)
        both = tl.load(G + row * g_stride + 2 * start + tl.arange(0, 2 * COLS)[None, :], mask)
        gate, up = tl.split(tl.reshape(both.to(tl.float32), [ROWS, COLS, 2]))
    else:
        mask = _mask(row, rows, start, cols, whole, COLS)
        col = start + tl.arange(0, COLS)[None, :]
        gate = tl.load(G + row * g_stride + col, mask).to(tl.float32)
        up = tl.load(U + row * u_stride + col, mask).to(tl.float32)
    g = tl.where(gate > limit, limit, gate)  # keeps NaN, unlike a minimum
    u = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate, up, g, rounded(u + offset, dtype)


@triton.jit
def _forward_tile(
    G, U, Y, row, start, rows, cols, g_stride, u_stride, y_stride, limit, alpha, offset, whole: tl.constexpr,
    SILU: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    _, _, g, u = _load_clamped(
        G, U, row, start, rows, cols, g_stride, u_stride, limit, offset, whole, INTERLEAVED, ROWS, COLS
    )
    y = u * _activated(g, alpha, G.dtype.element_ty, SILU)
    mask = _mask(row, rows, start, cols, whole, COLS)
    tl.store(Y + row * y_stride + start + tl.arange(0, COLS)[None, :], y, mask)


@triton.jit(do_not_specialize=["rows"])
def clamped_glu_forward(
    G, U, Y, rows, cols, g_stride, u_stride, y_stride, limit, alpha, offset,
    SILU: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, start, whole = program_tile(rows, cols, ROWS, COLS)
    limit = rounded(tl.full((), limit, tl.float32), G.dtype.element_ty)  # torch clamps to it in the tensor's dtype
    if whole:  # at an odd width a mask would make every access one value wide
        _forward_tile(
            G, U, Y, row, start, rows, cols, g_stride, u_stride, y_stride, limit, alpha, offset, True,
            SILU, INTERLEAVED, ROWS, COLS,
        )  # fmt: skip
    else:
        _forward_tile(
            G, U, Y, row, start, rows, cols, g_stride, u_stride, y_stride, limit, alpha, offset, False,
            SILU, INTERLEAVED, ROWS, COLS,
        )  # fmt: skip


@triton.jit
def _backward_tile(
    G, U, DY, DG, DU, row, start, rows, cols, g_stride, u_stride, dy_stride, d_stride, limit, alpha, offset,
    whole: tl.constexpr, SILU: tl.constexpr, INTERLEAVED: tl.constexpr, AT_LIMIT: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    gate, up, g, u = _load_clamped(
        G, U, row, start, rows, cols, g_stride, u_stride, limit, offset, whole, INTERLEAVED, ROWS, COLS
    )
    mask = _mask(row, rows, start, cols, whole, COLS)
    col = start + tl.arange(0, COLS)[None, :]
    dy = tl.load(DY + row * dy_stride + col, mask).to(tl.float32)
    a = 1.0 if SILU else alpha
    s = tl.sigmoid(a * g)
    dg = tl.where((gate <= limit) if AT_LIMIT else (gate < limit), dy * u * s * (1.0 + a * g * (1.0 - s)), 0.0)
    # not by tl.abs(up): 70 us instead of 66 for interleaved halves of 8,192 x 2,880 (H200, Triton 3.6)
    within = (up <= limit) & (up >= -limit) if AT_LIMIT else (up < limit) & (up > -limit)
    du = tl.where(within, dy * _activated(g, alpha, G.dtype.element_ty, SILU), 0.0)
    if INTERLEAVED:
        both = tl.reshape(tl.join(dg, du), [ROWS, 2 * COLS])
        at = DG + row * d_stride + 2 * start + tl.arange(0, 2 * COLS)[None, :]
        tl.store(at, both, _mask(row, rows, 2 * start, tl.cast(cols, tl.int64) * 2, whole, 2 * COLS))
    else:
        tl.store(DG + row * d_stride + col, dg, mask)
        tl.store(DU + row * d_stride + col, du, mask)


@triton.jit(do_not_specialize=["rows"])
def clamped_glu_backward(
    G, U, DY, DG, DU, rows, cols, g_stride, u_stride, dy_stride, d_stride, limit, alpha, offset,
    SILU: tl.constexpr, INTERLEAVED: tl.constexpr, AT_LIMIT: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, start, whole = program_tile(rows, cols, ROWS, COLS)
    limit = rounded(tl.full((), limit, tl.float32), G.dtype.element_ty)  # torch clamps to it in the tensor's dtype
    if whole:
        _backward_tile(
            G, U, DY, DG, DU, row, start, rows, cols, g_stride, u_stride, dy_stride, d_stride, limit, alpha, offset,
            True, SILU, INTERLEAVED, AT_LIMIT, ROWS, COLS,
        )  # fmt: skip
    else:
        _backward_tile(
            G, U, DY, DG, DU, row, start, rows, cols, g_stride, u_stride, dy_stride, d_stride, limit, alpha, offset,
            False, SILU, INTERLEAVED, AT_LIMIT, ROWS, COLS,
        )  # fmt: skip


class Clamp(NamedTuple):
    """Options of a clamped unit; without an alpha it is that of silu."""

    limit: float
    alpha: float | None
    offset: float
    interleaved: bool


def _launch(kernel, find_config, gate, up, dy, outputs, clamp):
    """Launch `kernel` over the rows of gate and up; contiguous tensors are one row."""
    limit, alpha, offset, interleaved = clamp
    cols = gate.shape[-1] // (2 if up is None else 1)
    count = gate.numel() // (2 if up is None else 1)
    y_stride, d_stride = cols, gate.shape[-1]
    (g, g_stride), (dy, dy_stride) = rows_of(gate), rows_or_none(dy)
    u, u_stride = (g, g_stride) if up is None else rows_of(up)
    if up is None and not interleaved:
        g, u = g.chunk(2, -1)
    elif all(x is None or x.is_contiguous() for x in (gate, up, dy)):
        cols, g_stride, u_stride, dy_stride, y_stride, d_stride = count, 0, 0, 0, 0, 0
    itemsize = gate.element_size() * (2 if interleaved else 1)  # bytes loaded at once for one column
    config = find_config(min(power_of_2(cols), 4096), itemsize, device_of(gate))
    rows = count // cols if count else 0
    tiles = -(-rows // config["ROWS"]) * -(-cols // config["COLS"])
    tensors, strides, flags = (g, u, *outputs), (g_stride, u_stride, y_stride), ()
    if dy is not None:
        tensors, strides = (g, u, dy, *outputs), (g_stride, u_stride, dy_stride, d_stride)
        flags = (clamp_passes_at_limits(),)
    launch(
        kernel, (tiles, 1, 1), config, *tensors, rows, cols, *strides,
        limit, alpha or 0.0, offset, alpha is None, interleaved, *flags,
    )  # fmt: skip


@raw(lambda gate, up: gate.new_empty((*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1))))
def _clamped_glu_forward(gate: torch.Tensor, up: torch.Tensor | None, clamp: Clamp, *, y):
    _launch(clamped_glu_forward, clamped_glu_forward_config, gate, up, None, (y,), clamp)


@_clamped_glu_forward.backward(
    lambda gate, up: (gate.new_empty(gate.shape), up if up is None else up.new_empty(up.shape))
)
def _clamped_glu_backward(gate, up, clamp, dy, *, dgate, dup):
    outputs = (dgate, dgate) if clamp.interleaved else _split(dgate, dup, False)
    _launch(clamped_glu_backward, clamped_glu_backward_config, gate, up, dy, outputs, clamp)


@clamped_swiglu.register("triton")
def _(gate, up, limit, alpha, offset, interleaved):
    alpha = None if alpha is None else float(alpha)
    return _clamped_glu_forward.apply(gate, up, Clamp(float(limit), alpha, float(offset), interleaved))
