r"""Read weights that bitsandbytes stores in 4 bits (QLoRA, arXiv:2305.14314).

    y_i = code[q_i] s_b                                 b = floor(i / block_size)
    s_b = absmax_b, or nested_code[absmax_b] t_c + offset    c = floor(b / nested_block_size)

Letters: N values of 4-bit numbers q, two in a byte, the first in the high bits; s are the scales of blocks, t those of
blocks of scales, which "double quantisation" stores in 8 bits. Each operation rounds to fp32, and the result to its
dtype: bitwise equal to bitsandbytes 0.50.2, where no value is denormal (its kernel for NVIDIA makes those 0).

Traffic: N / 2 bytes, a scale for each block (4 bytes, nested 1), and the result. With blocks of 64 in bf16 these are
2.56 bytes a value, nested 2.52. There is no gradient: such weights are frozen.

A program has a tile of bytes: whole blocks, or a part of one. A lane writes 16 bytes. It loads as many packed bytes as
these take, and looks their numbers up in the 16 values of `code`, which stay in the nearest cache: four instructions
beside the load on sm90 (compiled), where a choice by comparisons takes at least 15.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_hw._torch import without_torch_function
from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import KERNEL_DTYPES, check, refuse
from liger_hw.dispatch import Cost, op, raw
from liger_hw.kernels._rows import contiguous
from liger_hw.launch import launch
from liger_hw.tuning import Config, tuned

BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


class Scales(NamedTuple):
    """The arguments of `dequantize_4bit` that give the values of 4-bit numbers."""

    absmax: torch.Tensor
    code: torch.Tensor
    nested_absmax: torch.Tensor | None
    nested_code: torch.Tensor | None
    offset: torch.Tensor | None
    block_size: int
    nested_block_size: int


def _validate(
    packed, absmax, code, nested_absmax, nested_code, offset, shape, dtype, block_size, nested_block_size, out
):
    check(packed.dtype == torch.uint8, "packed", packed, "uint8, two values a byte")
    check(block_size in BLOCK_SIZES, "block_size", block_size, BLOCK_SIZES)
    check(nested_block_size > 0, "nested_block_size", nested_block_size, "a positive number")
    check(dtype in KERNEL_DTYPES, "dtype", dtype, KERNEL_DTYPES)
    check(shape is None or isinstance(shape, Sequence), "shape", shape, "a sequence of sizes")
    device, values = packed.device, 2 * packed.numel() if shape is None else math.prod(shape)
    if packed.numel() != (values + 1) // 2:
        refuse("packed", packed, f"{(values + 1) // 2} bytes for {tuple(shape)}")
    blocks, nested = -(-values // block_size), nested_absmax is not None
    _check_table("absmax", absmax, blocks, torch.uint8 if nested else torch.float32, device)
    _check_table("code", code, 16, torch.float32, device)
    if nested:
        _check_table("nested_absmax", nested_absmax, -(-blocks // nested_block_size), torch.float32, device)
        _check_table("nested_code", nested_code, 256, torch.float32, device)
        _check_table("offset", offset, 1, torch.float32, device)
    elif nested_code is not None or offset is not None:
        name = "offset" if nested_code is None else "nested_code"
        refuse(name, offset if nested_code is None else nested_code, "None without `nested_absmax`")
    if out is not None:
        fits = out.dtype == dtype and out.device == device and out.is_contiguous()
        sizes = (values,) if shape is None else tuple(shape)
        if not fits or out.shape != sizes:
            refuse("out", out, f"contiguous memory of shape {sizes} and {dtype} on {device}")


def _check_table(name, table, size, dtype, device):
    if table is None or table.dtype != dtype or table.numel() != size or table.device != device:
        refuse(name, table, f"{size} values of {dtype} on {device}")


@op(validate=_validate, dtypes=(torch.uint8,))
def dequantize_4bit(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    code: torch.Tensor,
    nested_absmax: torch.Tensor | None = None,
    nested_code: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    block_size: int = 64,
    nested_block_size: int = 256,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the weight that bitsandbytes stores as nf4 or fp4 numbers, in one pass.

    `dequantize_arguments` in this file reads these arguments from a parameter of bitsandbytes.

    Args:
        packed: uint8, any shape; two values a byte, the first in the high bits.
        absmax: the scale of each block, fp32; with double quantisation uint8, indices of `nested_code`.
        code: the 16 values, fp32.
        nested_absmax: with double quantisation the scale of each `nested_block_size` scales, fp32; else None.
        nested_code: its 256 values, fp32. offset: one fp32 value, added to each scale.
        shape: of the result; an odd number of values leaves the last 4 bits unused. None: one row of all values.
        dtype: fp32, fp16 or bf16.
        block_size: values that share a scale: 32 to 4,096, a power of 2.
        out: contiguous memory of this shape and dtype for the result.

    Returns:
        a tensor of `shape` and `dtype`, contiguous; `out` if given. It has no gradient.

    Raises:
        ValueError: sizes, dtypes or devices do not fit.

    Examples:
        >>> packed, scale, code = torch.tensor([0x0F], dtype=torch.uint8), torch.tensor([2.0]), torch.arange(16.0)
        >>> liger_hw.dequantize_4bit(packed, scale, code, dtype=torch.float32)
        tensor([ 0., 30.])
    """
    with torch.no_grad():
        if nested_absmax is not None:
            absmax = _times(nested_code[absmax.reshape(-1).int()], nested_absmax, nested_block_size) + offset
        numbers = torch.stack([packed >> 4, packed & 15], -1).reshape(-1)
        shape = numbers.shape if shape is None else tuple(shape)
        y = _times(code[numbers[: math.prod(shape)].int()], absmax, block_size).to(dtype).reshape(shape)
        return y if out is None else out.copy_(y)


def _times(values, scales, block_size):
    """Multiply each block of `values` by its scale."""
    return values * scales.reshape(-1).repeat_interleave(block_size)[: values.numel()]


def dequantize_arguments(weight):
    """Return the arguments of `dequantize_4bit` that a weight of bitsandbytes holds.

        dequantize_4bit(*dequantize_arguments(linear.weight))

    Attributes tell such a weight; nothing imports bitsandbytes. The dtype is that of the weight before quantisation.

    Args:
        weight: a `bitsandbytes.nn.Params4bit`, or any tensor.

    Returns:
        `dequantize_4bit.arguments`, or None for another tensor, one not yet quantised, or one in the layout that
        bitsandbytes has for inference on a CPU.
    """
    state = getattr(weight, "quant_state", None)
    if getattr(state, "quant_type", None) not in ("nf4", "fp4") or getattr(state, "packing_format_for_cpu", False):
        return None
    nested = state.state2
    if nested is not None and (nested.dtype, nested.nested) != (torch.float32, False):
        return None
    with without_torch_function():  # a plain tensor of the same memory
        packed = weight.data if weight.dtype == torch.uint8 else weight.data.contiguous().view(torch.uint8)
    return dequantize_4bit.arguments(
        packed, state.absmax, state.code, nested and nested.absmax, nested and nested.code, state.offset,
        tuple(state.shape), state.dtype, state.blocksize, nested.blocksize if nested else 256,
    )  # fmt: skip


@dequantize_4bit.cost
def _(packed, absmax, code, *others, shape=None, dtype=torch.bfloat16, out=None, **named):
    tensors = [x for x in (packed, absmax, code, *others, *named.values()) if torch.is_tensor(x)]
    values = 2 * packed.numel() if shape is None else math.prod(shape)
    return Cost(sum(x.nbytes for x in tensors) + values * dtype.itemsize, 0, values, 0)


@tuned
def dequantize_blocks_config(block_size, itemsize, device):
    # Each lane writes 16 bytes. Wider loads would need a way through shared memory between the layouts of both.
    lanes = 256
    return Config({"BYTES": lanes * 8 // itemsize}, lanes // device.warp_size, fp_fusion=False)


@triton.jit
def _write_tile(PACKED, CODE, OUT, scale, byte, byte_mask, value, value_mask):
    both = tl.load(PACKED + byte, byte_mask).to(tl.int32)
    high, low = tl.load(CODE + (both >> 4)), tl.load(CODE + (both & 15))
    tl.store(OUT + value, tl.interleave(high * scale, low * scale), value_mask)


@triton.jit
def dequantize_blocks(
    PACKED, ABSMAX, CODE, NESTED_ABSMAX, NESTED_CODE, OFFSET, OUT, values,
    block_size: tl.constexpr, nested_block_size: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    half: tl.constexpr = block_size // 2
    COLS: tl.constexpr = min(half, BYTES)
    row = tl.arange(0, BYTES // COLS)[:, None]  # a block, or a part of one
    first = tl.program_id(0).to(tl.int64) * BYTES
    left = values - 2 * first
    block = (first + row * COLS) // half
    inside = row * (2 * COLS) < left
    scale = tl.load(ABSMAX + block, inside, other=0)
    if NESTED_ABSMAX is not None:
        scale = tl.load(NESTED_CODE + scale.to(tl.int32))
        scale = scale * tl.load(NESTED_ABSMAX + block // nested_block_size, inside, other=0.0) + tl.load(OFFSET)
    # In one dimension bytes, lookups and values have one layout; in two, Triton 3.6 lays lookups across the rows.
    scale = tl.reshape(tl.broadcast_to(scale, (BYTES // COLS, COLS)), (BYTES,))
    byte, value = tl.arange(0, BYTES), tl.arange(0, 2 * BYTES)
    PACKED += first
    OUT += 2 * first
    if left >= 2 * BYTES:  # at an odd number of values a mask would make every access one value wide
        _write_tile(PACKED, CODE, OUT, scale, byte, None, value, None)
    else:
        _write_tile(PACKED, CODE, OUT, scale, byte, 2 * byte < left, value, value < left)


def _launch(packed, scales, out):
    tensors = map(contiguous, (packed, *scales[:5]))
    config = dequantize_blocks_config(scales.block_size, out.element_size(), device_of(packed))
    grid = (-(-packed.numel() // config["BYTES"]), 1, 1)
    launch(dequantize_blocks, grid, config, *tensors, out, out.numel(), *scales[5:])


@raw(lambda packed, shape, dtype: packed.new_empty(shape, dtype=dtype))
def _dequantize_4bit(packed: torch.Tensor, scales: Scales, shape: Sequence[int], dtype: torch.dtype, *, y):
    _launch(packed, scales, y)


@raw(mutates=("out",))
def _dequantize_4bit_into(packed: torch.Tensor, scales: Scales, out: torch.Tensor) -> None:
    _launch(packed, scales, out)


@dequantize_4bit.register("triton")
def _(packed, absmax, code, nested_absmax, nested_code, offset, shape, dtype, block_size, nested_block_size, out):
    scales = Scales(absmax, code, nested_absmax, nested_code, offset, block_size, nested_block_size)
    if out is None:
        return _dequantize_4bit(packed, scales, [2 * packed.numel()] if shape is None else list(shape), dtype)
    _dequantize_4bit_into(packed, scales, out)
    torch.autograd.graph.increment_version(out)  # so that a function that saved it raises an error
    return out
