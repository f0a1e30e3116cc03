r"""Multiply int8 values by weights of 2 bits, packed four in a byte, exactly.

    out = x W                           in int32; W_k is -1, 0, 1 or 2
    packed_r = sum over q = 0 to 3 of (W_{qR + r} + 1) 4^q        R = ceil(K / 4)

Letters: M rows of K values, to N values. So a byte holds one weight of each quarter of W's rows, and quarter q of x's
columns belongs to bits 2q and 2q + 1. A product reads x (MK bytes) and the packed weights (KN / 4) at least once and
writes 4MN bytes. There is no gradient, as all tensors are integers.

A program has a tile of rows and columns. A step of its loop loads one packed block, makes its four blocks of weights,
and multiplies a block of each quarter of x by them. So each byte is loaded once. One row reads hardly more than the
packed weights, an eighth of the bytes of bf16 weights.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, raw
from liger_hw.kernels._math import in_row
from liger_hw.kernels._rows import rows_of
from liger_hw.kernels.moe.grouped_mm import banded, in_vectors
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, tuned


def pack_int2(weight: torch.Tensor) -> torch.Tensor:
    """Pack the integers -1, 0, 1 and 2 into 2 bits each.

    Args:
        weight: (K, ...), any integer dtype. Other values corrupt those of the same byte; nothing checks them, as the
            check would wait for the device.

    Returns:
        uint8 (R, ...) with R = ceil(K / 4). Row r has the rows r, R + r, 2R + r and 3R + r, from the lowest bits up;
        rows after the last are -1.

    Raises:
        ValueError: `weight` is a number or not of integers.

    Examples:
        >>> liger_hw.pack_int2(torch.ones(4, 8, dtype=torch.int8)).shape
        torch.Size([1, 8])
    """
    whole = not (weight.is_floating_point() or weight.is_complex() or weight.dtype == torch.bool)
    check(whole and weight.ndim > 0, "weight", weight, "integers of shape (K, ...)")
    rows = -(-weight.shape[0] // 4)
    bits = weight.new_zeros((4 * rows, *weight.shape[1:]), dtype=torch.uint8)
    bits[: weight.shape[0]] = weight + 1
    first, second, third, fourth = bits.split(rows) if rows else [bits] * 4
    return first | second << 2 | third << 4 | fourth << 6


def unpack_int2(packed: torch.Tensor) -> torch.Tensor:
    """Return the weights that `pack_int2` packed.

    Args:
        packed: uint8 (R, ...).

    Returns:
        int32 (4R, ...).

    Raises:
        ValueError: `packed` is a number or not uint8.

    Examples:
        >>> packed = liger_hw.pack_int2(torch.ones(4, 1, dtype=torch.int8))
        >>> liger_hw.unpack_int2(packed).flatten().tolist()
        [1, 1, 1, 1]
    """
    check(packed.dtype == torch.uint8 and packed.ndim > 0, "packed", packed, "uint8 of shape (R, ...)")
    return torch.cat([(packed >> shift & 3).to(torch.int32) - 1 for shift in (0, 2, 4, 6)])


def _validate(x, packed):
    check(x.dtype == torch.int8 and x.ndim > 0, "x", x, "int8 of shape (..., K)")
    fits = packed.ndim == 2 and (packed.dtype, packed.device) == (torch.uint8, x.device)
    fits = fits and packed.shape[0] == -(-x.shape[-1] // 4)
    check(fits, "packed", packed, f"uint8 of shape ({-(-x.shape[-1] // 4)}, N) on {x.device}, from pack_int2")


@op(validate=_validate, dtypes=(torch.int8,))
def int2_matmul(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Multiply int8 values by a matrix of 2-bit weights, exactly.

    Args:
        x: int8 (..., K), any strides. K below 2^23, where a sum may exceed int32.
        packed: uint8 (R, N), R = ceil(K / 4), any strides: the weights -1, 0, 1 and 2 that `pack_int2` packs.

    Returns:
        int32 (..., N), contiguous. It has no gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

    Examples:
        >>> packed = liger_hw.pack_int2(torch.ones(4, 4, dtype=torch.int8))
        >>> liger_hw.int2_matmul(torch.ones(1, 4, dtype=torch.int8), packed)
        tensor([[4, 4, 4, 4]], dtype=torch.int32)
    """
    weight = unpack_int2(packed)[: x.shape[-1]]
    return (x.double() @ weight.double()).to(torch.int32)  # below 2^53 float64 is exact; torch has no int8 everywhere


int2_matmul.shards(x="... K", packed="R n", returns="... n")


@int2_matmul.cost
def _(x, packed):
    values = x.shape[:-1].numel() * packed.shape[1]
    return Cost(x.nbytes + packed.nbytes + 4 * values, 0, 2 * values * x.shape[-1], 0)


@tuned
def int2_product_config(tile_rows, vectors, device):
    # Few rows are bound by the packed weights: narrow tiles make many programs, and a step ahead loads 4 KiB of them.
    # More rows are bound by unpacking, so a tile unpacks for as many rows as its sums leave registers: 64 a lane, half
    # of that where 32 lanes also take the loads of the next step (compiled for gfx1100, twice as many spill).
    if tile_rows <= 32:
        rows, cols, depth, lanes = tile_rows, 32, 128 if device.async_copy else 64, 128
    else:
        rows, cols, depth, lanes = tile_rows, 128, 32, 256
        if device.warp_size <= 32 and not device.async_copy:
            rows = 64
    if not vectors:  # each value has a pointer
        rows, cols, depth = min(rows, 64), min(cols, 64), 32
    stages = 4 if device.async_copy and vectors else 2
    return Config({"ROWS": rows, "COLS": cols, "DEPTH": depth, "BAND": 8}, lanes // device.warp_size, stages)


@triton.jit
def int2_product(
    X, PACKED, OUT, rows, x_stride, k_stride, n_stride, depth: tl.constexpr, cols: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    quarter: tl.constexpr = (depth + 3) // 4
    row, col = banded(tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(cols, COLS), BAND)
    row, col, k = row * ROWS + tl.arange(0, ROWS), col * COLS + tl.arange(0, COLS), tl.arange(0, DEPTH)
    col_mask = in_row(col, cols, COLS)
    # a step has DEPTH columns of each quarter of x
    which, column = tl.arange(0, 4 * DEPTH) // DEPTH, tl.arange(0, 4 * DEPTH) % DEPTH
    # rows after the last repeat it, as a mask in the loop would cost more than the reads; none is stored
    x = X + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * x_stride + (which * quarter + column)[None, :]
    packed = PACKED + (k.to(tl.int64) * k_stride)[:, None] + (col.to(tl.int64) * n_stride)[None, :]
    shift = (2 * tl.arange(0, 4)).to(tl.uint8)
    total = tl.zeros((ROWS, COLS), tl.int32)
    for first in range(0, quarter, DEPTH):
        if depth % (4 * DEPTH) == 0:
            values = tl.load(x)
        else:  # zeros leave out the weights beyond x
            valid = (first + column < quarter) & (which * quarter + first + column < depth)
            values = tl.load(x, valid[None, :], other=0)
        four = tl.load(packed, in_row(first + k, quarter, DEPTH)[:, None] & col_mask[None, :], other=0)
        weights = ((four[None, :, :] >> shift[:, None, None]) & 3).to(tl.int8) - 1
        weights = tl.reshape(weights, (4 * DEPTH, COLS))
        total = tl.dot(values, weights, total, out_dtype=tl.int32)
        x += DEPTH
        packed += DEPTH * k_stride
    out = OUT + row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(out, total, (row < rows)[:, None] & col_mask[None, :])


@raw(lambda x, packed: x.new_empty((*x.shape[:-1], packed.shape[1]), dtype=torch.int32))
def _int2_product(x: torch.Tensor, packed: torch.Tensor, *, y):
    depth, cols, rows = x.shape[-1], packed.shape[1], x.shape[:-1].numel()
    x, x_stride = rows_of(x.reshape(rows, depth))
    if 1 not in packed.stride():
        packed = packed.contiguous()
    # whole vectors, in each quarter of a row
    vectors = in_vectors(x, 16) and in_vectors(packed, 16) and depth % 64 == 0
    tile_rows = power_of_2(min(max(rows, 16), 128))
    config = int2_product_config(tile_rows, vectors, device_of(x))
    programs = -(-rows // config["ROWS"]) * -(-cols // config["COLS"])
    launch(int2_product, (programs, 1, 1), config, x, packed, y, rows, x_stride, *packed.stride(), depth, cols)


int2_matmul.register("triton")(_int2_product)
