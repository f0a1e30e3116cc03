"""Sum gradients over rows: a partial sum for each program, added in a fixed order."""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, row_warps, tuned

# Elements that one program handles alone. RMSNorm's backward of 16 rows of 2,048 (H200) takes 9.0 us on the device, and
# 3.5 with a program a row plus a launch to add their sums; that launch costs the host 24 us of a step's 133.
ONE_PROGRAM = 2**15


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
