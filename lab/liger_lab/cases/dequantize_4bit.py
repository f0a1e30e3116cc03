"""Cases of weights of 4 bits: every byte holds two, and blocks share a scale."""

import math

import torch

from liger_hw.testing.case import OpCases, Shape
from liger_lab.models import MODELS


def tensors(new, shape, block_size=64, nested=True):
    """Draw packed weights, their scales and the tables that give both values."""
    values = math.prod(shape)
    blocks = -(-values // block_size)
    packed, code = new.integers(-(-values // 2), 1, dtype=torch.uint8), new.rand(16)
    if not nested:
        return packed, new.rand(blocks), code
    absmax = new.integers(blocks, dtype=torch.uint8)
    return packed, absmax, code, new.rand(-(-blocks // 256)), new.rand(256), new.rand()


def case(new, shape, dtype=torch.float16, block_size=64, nested=True):
    options = {"shape": shape, "dtype": dtype, "block_size": block_size}
    return tensors(new, shape, block_size, nested), options


def small(new):
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        for nested in (False, True):
            yield case(new, (33, 65), dtype, 64, nested)
    for block_size in (32, 128, 512, 4096):
        yield case(new, (9, 1001), torch.float16, block_size)
    for shape in [(40, 1024), (3, 5, 7), (1, 1), (2,), (0, 16)]:
        yield case(new, shape)
    packed, *scales = tensors(new, (6, 96))
    yield (packed, *scales), {"dtype": torch.float32, "nested_block_size": 256}


def wide(new):
    for dtype in (torch.bfloat16, torch.float32):
        for nested in (False, True):
            for block_size in (32, 64, 256, 4096):
                yield case(new, (128, 4096), dtype, block_size, nested)
    yield case(new, (101, 1001), torch.bfloat16)


def shape(rows, cols, nested=True, dtype=torch.bfloat16):
    label = f"{rows}x{cols}" + " nested" * nested + " fp32" * (dtype == torch.float32)
    return Shape(label, lambda new: tensors(new, (rows, cols), nested=nested), {"shape": (rows, cols), "dtype": dtype})


SMALL, LARGE = MODELS[1], MODELS[6]
CASES = {
    "dequantize_4bit": OpCases(
        small, wide,
        [shape(SMALL.intermediate, SMALL.hidden), shape(LARGE.hidden, LARGE.hidden),
         shape(LARGE.intermediate, LARGE.hidden), shape(LARGE.intermediate, LARGE.hidden, nested=False)],
        [shape(LARGE.intermediate, LARGE.hidden, dtype=torch.float32), shape(1024, LARGE.hidden), shape(4098, 1001)],
    ),
}  # fmt: skip
