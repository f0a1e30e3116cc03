"""Triton functions and launch configurations that several kernel files share."""

import functools

import torch

from liger_hw._triton import interpreting, tl, triton
from liger_hw.backends import device_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned

INTERPRETED = tl.constexpr(interpreting())
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """Return total + a b; the interpreter multiplies the bits of bf16 as integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round `x` to `dtype` and return it in fp32.

    No kernel computes with a 16-bit value itself.
    """
    return x.to(dtype).to(tl.float32)


@triton.jit
def reciprocal(x, dtype: tl.constexpr):
    """Compute 1 / x of positive numbers, for results that are rounded to `dtype`.

    For 16 bits it is the square of a reciprocal square root, to 2.5e-7 of its size: 2 instructions, where a division
    takes 8 on sm90, 12 on gfx942 and 27 on gfx1100 (compiled, Triton 3.9).
    """
    if dtype == tl.float32:
        return 1.0 / x
    else:
        root = tl.rsqrt(x)
        return root * root


@triton.jit
def sigmoid(x, dtype: tl.constexpr):
    """Compute 1 / (1 + e^-x), for results that are rounded to `dtype`.

    For 16 bits it has an error of 5e-7 of its size, and 4 or 5 instructions instead of 10 on sm90, 22 on gfx942 and 44
    on gfx1100: `tl.exp` takes 4 to 16 more than `tl.exp2`, for denormal results.
    """
    if dtype == tl.float32:
        return tl.sigmoid(x)
    else:
        return reciprocal(1.0 + tl.exp2(x * -LOG2_E), dtype)


@triton.jit
def tanh(x):
    """Compute tanh with an absolute error of about 1e-7.

    libdevice's differs between vendors, and the interpreter has none.
    """
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activated(x, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return f(x), rounded to `dtype` after each of torch's operations; in fp32."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu_erf":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_new":
        cube = rounded(rounded(x * x, dtype) * x, dtype)
        u = rounded(0.7978845608028654 * rounded(x + rounded(0.044715 * cube, dtype), dtype), dtype)
        y = rounded(0.5 * x, dtype) * rounded(1.0 + rounded(tanh(u), dtype), dtype)
    elif ACTIVATION == "quick_gelu":
        y = x * rounded(tl.sigmoid(rounded(1.702 * x, dtype)), dtype)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        y = tl.where(x < 0.0, 0.0, x)  # keeps NaN, unlike a maximum
        y *= y
    return rounded(y, dtype)


@triton.jit
def activated_with_slope(x, ACTIVATION: tl.constexpr):
    """Return f(x) and f'(x), not rounded."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu_tanh" or ACTIVATION == "gelu_new":
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        half = 0.5 * (1.0 + t)
        return x * half, half + 0.5 * x * (1.0 - t * t) * (0.7978845608028654 + 0.1070322243 * x * x)
    elif ACTIVATION == "gelu_erf":
        half = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * half, half + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        return x * s, s * (1.0 + 1.702 * x * (1.0 - s))
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        y = tl.where(x < 0.0, 0.0, x)
        return y * y, 2.0 * y


@triton.jit
def in_row(col, cols: tl.constexpr, COLS: tl.constexpr):
    """Mask the columns that exist.

    There is no mask where COLS divides the width, so that accesses keep their full vectors.
    """
    if cols % COLS == 0:
        return tl.full(col.shape, True, tl.int1)
    else:
        return col < cols


@triton.jit
def in_tile(row, col, rows, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Mask the elements of a tile that exist.

    Only the last tile of rows can exceed the rows, and none does where ROWS is 1.
    """
    if ROWS == 1:
        return in_row(col, cols, COLS)
    else:
        return (row < rows)[:, None] & in_row(col, cols, COLS)


@triton.jit
def load_parameter(P, at, absent, cols: tl.constexpr, COLS: tl.constexpr):
    """Load the columns `at` of a weight or bias; return `absent` without one.

    Its own dtype takes fewer registers across a loop than fp32.
    """
    if P is not None:
        return tl.load(P + at, in_row(at, cols, COLS), other=0.0)
    else:
        return tl.full((1, 1), absent, tl.float32)


def widest_block(device, rows_live):
    """Return the widest one-block row of which `rows_live` fp32 copies fit the registers."""
    values = min(32, device.registers // (2 * rows_live))
    return device.max_threads * power_of_2(values + 1) // 2


def row_block(cols, device, rows_live):
    """Return a block for a whole row, else half of the widest, for a loop."""
    widest = widest_block(device, rows_live)
    return power_of_2(cols) if cols <= widest else widest // 2


def two_on_a_core(block, device):
    """Return the least values a lane with which two programs share a core."""
    return power_of_2(2 * block // device.core_threads)


def norm_forward_config(cols, device, rows_live=1):
    """Return the configuration (ROWS, COLS) of a kernel that reduces a row and writes another.

    `rows_live` fp32 copies of a row in one block fit the registers.
    """
    # A row in one block has 32 values a lane, and short rows share a program: on an H200 within 1% of any other choice
    # from 1,024 to 16,384 columns. A row read in a loop has 8 values a lane, in half of the block where registers hold
    # the loads ahead: on an H200 65,536 columns take 0.166 ms on 32 warps and 0.199 on 16.
    block, per_lane = row_block(cols, device, rows_live), 32
    if cols > block:
        block = (8 if device.async_copy else 4) * device.max_threads
        per_lane = max(8, two_on_a_core(block, device))
    rows = max(1, min(16, 4096 // block))
    return Config({"ROWS": rows, "COLS": block}, row_warps(rows * block, device, per_lane))


def norm_backward_config(cols, itemsize, device, read=2):
    """Return the configuration of a norm's backward, whose programs stride over rows.

    A program reads two or three tensors, writes one and sums over rows. The meta-parameters are ROWS, COLS and the
    STAGES of its loop over rows. A row wider than COLS takes several blocks.
    """
    widest, block = widest_block(device, 4), power_of_2(cols)
    if cols > widest:  # RMSNorm of 16,384 columns on an H200: 87% of the copy rate with 32 values a lane, 68% with 64
        return Config({"ROWS": 1, "COLS": widest // 2, "STAGES": 1}, row_warps(block, device, 32))
    staged = _staged_rows_config(cols, block, itemsize, device, read) if device.async_copy else None
    if staged:
        return staged
    # Loads through registers: 16 values a lane, short rows share a program, and many programs hide the latency. Not
    # measured on a GPU without asynchronous copies; nothing spills (compiled).
    rows = max(1, min(32, 2048 // block))
    warps = row_warps(rows * block, device, max(16, two_on_a_core(rows * block, device)))
    return Config({"ROWS": rows, "COLS": block, "STAGES": 1}, warps, programs=max(1, 16384 // (rows * block)))


def _staged_rows_config(cols, block, itemsize, device, read):
    """Return the configuration that loads rows ahead; None if three stages do not fit."""
    # Four warps take 64 bytes of short rows a lane, and half of that where more than 16 rows would share them (they
    # spill) or a row fills 8 or 16 KiB. Three stages are in flight (RMSNorm of 8,192 columns on an H200: 94% of the
    # copy rate, 72% with 2), four where a quarter of a long row's block is empty (6 to 21% faster), each of 16 KiB of a
    # tensor a core: at least 64 KiB in all; a B200 needs 43.
    row = block * itemsize
    long = 8192 <= row <= 16384
    sparse = long and 4 * cols <= 3 * block
    lane = 32 if 8192 // row > 16 or (long and not sparse) else 64
    tile = block * max(1, min(32, 128 * lane // row))
    # shared memory holds all stages but one, 1 KiB of the driver's, sums, and an fp32 tile for rows of broken vectors
    step, reserved = read * tile * itemsize, 1280 + (4 * tile if cols % 8 else 0)
    stages = min(4 if sparse else 3, 1 + (device.shared_memory - reserved) // step)
    if stages < 3:
        return None
    programs = min(max(1, 16384 // (tile * itemsize)), device.shared_memory // ((stages - 1) * step + reserved))
    warps = row_warps(tile, device, max(lane // itemsize, two_on_a_core(tile, device)))
    return Config({"ROWS": tile // block, "COLS": block, "STAGES": stages}, warps, programs=programs)


def norm_wide_sums_config(device, per_lane):
    """Return the configuration (COLS, STAGES) of a kernel that reduces one row of two tensors."""
    block = device.max_threads * 8
    return Config({"COLS": block, "STAGES": 1}, row_warps(block, device, per_lane))


@functools.cache
def in_registers(cols, itemsize, device):
    """Tell whether a program of a norm's backward holds two rows in registers.

    Several blocks need 16 bits and whole vectors: 16,383 columns spill (compiled for an A100 to an RTX 50).
    """
    widest = widest_block(device, 4)
    return cols <= widest or (cols <= 2 * widest and itemsize == 2 and cols % 8 == 0)


def wide_grid(config, rows, cols):
    """Return the blocks of columns and groups of rows of a wide norm's backward."""
    blocks = -(-cols // config["COLS"])
    return blocks, max(config.grid_for(blocks * -(-rows // config["ROWS"])) // blocks, 1)


@tuned
def sum_partials_config(cols, device):
    # Many narrow programs: on an H200, 64 rows of 16 columns instead of 32 of 64 make the whole backward of layer norm
    # 24% faster at 768 columns, of RMSNorm 8% at 2,048. From 8,192 columns on both take the same time.
    rows, block, per_lane = (64, 16, 4) if cols < 8192 else (32, 64, 16)
    return Config({"ROWS": rows, "COLS": block}, row_warps(rows * block, device, per_lane))


@triton.jit(do_not_specialize=["rows"])
def sum_partials(PARTIAL, OUT, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        total += tl.load(PARTIAL + row[:, None].to(tl.int64) * cols + col[None, :], mask, other=0.0)
    tl.store(OUT + col, tl.sum(total, 0), col < cols)


# Elements that one program handles alone. RMSNorm's backward of 16 rows of 2,048 (H200) takes 9.0 us on the device, and
# 3.5 with a program a row plus a launch to add their sums; that launch costs the host 24 us of a step's 133.
ONE_PROGRAM = 2**15


def programs_for(config, rows, cols):
    """Return how many programs stride over `rows`, ROWS at a time.

    A few rows take one program, whose partial sums are the sums. Rows of several blocks do not: with 16-bit sums 16,384
    columns spill 32 bytes a lane on an H200. Without columns the result is 0, as there is no weight to read.
    """
    few = rows * cols <= ONE_PROGRAM and cols <= config["COLS"]
    return min(cols, 1) if few else config.grid_for(-(-rows // config["ROWS"]))


def programs_for_blocks(config, elements, rows, blocks):
    """Return how many programs stride over `rows` in each block; few elements take one."""
    return 1 if elements <= ONE_PROGRAM else max(config.grid_for(blocks * -(-rows // config["ROWS"])) // blocks, 1)


def partial_sums(gradient: torch.Tensor | None, programs: int) -> torch.Tensor | None:
    """Return memory for partial sums: (programs, values) fp32, or `gradient` itself for one program."""
    if gradient is None or programs <= 1:
        return gradient
    return gradient.new_empty((programs, gradient.numel()), dtype=torch.float32)


def add_partials(partial: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
    """Sum `partial_sums` over programs, always in the same order, into `gradient`."""
    if gradient is None or partial is gradient:
        return
    rows, cols = partial.shape
    config = sum_partials_config(cols, device_of(partial))
    launch(sum_partials, (-(-cols // config["COLS"]), 1, 1), config, partial, gradient, rows, cols)


def in_order(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Return a weight or bias with unit stride; copy one with other strides."""
    return parameter if parameter is None or parameter.is_contiguous() else parameter.contiguous()


def rows_and_cols(x: torch.Tensor) -> tuple[int, int]:
    """Return the number of rows of the last dimension of `x`, and their width."""
    cols = x.shape[-1]
    return (x.numel() // cols if cols else 0), cols


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return `x` as rows with unit stride inside a row, and the stride between rows.

    The result is a view where the strides allow it. Do not use its shape.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    return x, x.stride(0)
