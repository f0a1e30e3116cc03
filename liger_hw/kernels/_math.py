"""Triton pieces that more than one kernel file uses."""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, tuned


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x` rounded to `dtype`, back in fp32: a 16-bit value never takes part in arithmetic as such."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def tanh(x):
    """No libdevice: it is CUDA's alone and the interpreter lacks it. Absolute error about 1e-7."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def in_row(col, cols: tl.constexpr, COLS: tl.constexpr):
    """Mask of the columns that exist; no mask where COLS divides the width, so that accesses keep their full vectors."""
    if cols % COLS == 0:
        return tl.full(col.shape, True, tl.int1)
    else:
        return col < cols


@triton.jit
def in_tile(row, col, rows, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Mask of a tile; the last tile of rows alone can hold rows that do not exist, and none does where ROWS is 1."""
    if ROWS == 1:
        return in_row(col, cols, COLS)
    else:
        return (row < rows)[:, None] & in_row(col, cols, COLS)


@tuned
def sum_partials_config(cols, device):
    return Config({"ROWS": 32, "COLS": 64}, num_warps=4)


@triton.jit(do_not_specialize=["rows"])
def sum_partials(PARTIAL, OUT, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    total = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < cols)[None, :]
        total += tl.load(PARTIAL + row[:, None].to(tl.int64) * cols + col[None, :], mask, other=0.0)
    tl.store(OUT + col, tl.sum(total, 0), col < cols)


def reduce_partials(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum over rows of fp32 partial sums (programs, cols), as `dtype`: (cols,). In a fixed order, so bit-identical."""
    rows, cols = partial.shape
    out = torch.empty(cols, dtype=dtype, device=partial.device)
    config = sum_partials_config(cols, device_of(partial))
    launch(sum_partials, (-(-cols // config["COLS"]), 1, 1), config, partial, out, rows, cols)
    return out


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """`x` as rows of its last dimension with unit stride inside a row, and the stride between rows.

    A view wherever the strides allow it; the shape of what is returned is not for use.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    return x, x.stride(0)
