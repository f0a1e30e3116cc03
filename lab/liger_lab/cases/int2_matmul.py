"""Cases of products with packed 2-bit weights: every byte holds four of them."""

import torch

from liger_hw.testing.case import WIDE_ROWS, OpCases, Shape
from liger_lab.models import MODELS


def tensors(new, *sizes):
    """Draw x (..., K) and packed weights (R, N) from all values of their dtypes."""
    *rows, depth, cols = sizes
    return new.integers(*rows, depth, dtype=torch.int8), new.integers(-(-depth // 4), cols, dtype=torch.uint8)


def small(new):
    for sizes in [
        (5, 123, 33), (2, 3, 130, 40), (130, 257, 140), (7, 64, 32), (33, 1, 5), (3, 2, 1), (1, 63, 3), (300, 16),
        (1, 1100, 20), (0, 16, 8), (4, 0, 8), (4, 16, 0),
    ]:  # fmt: skip
        yield tensors(new, *sizes), {}
    x, packed = tensors(new, 20, 80, 24)
    yield (x, packed.t().contiguous().t()), {}


def wide(new):
    for depth, cols in [(4096, 4096), (1024, 128), (4098, 1001), (1001, 4096), (14336, 4096)]:
        for rows in (1, 4 * WIDE_ROWS, 16 * WIDE_ROWS):
            yield tensors(new, rows, depth, cols), {}
    x, packed = tensors(new, WIDE_ROWS, 4096, 4096)
    yield (x, packed.t().contiguous().t()), {}


def shape(rows, depth, cols):
    return Shape(f"{rows}x{depth}x{cols}", lambda new: tensors(new, rows, depth, cols))


SMALL, LARGE = MODELS[0], MODELS[6]
CASES = {
    "int2_matmul": OpCases(
        small, wide,
        [
            shape(1, LARGE.hidden, LARGE.hidden), shape(64, LARGE.hidden, LARGE.intermediate),
            shape(2048, LARGE.hidden, LARGE.intermediate),
        ],
        [
            shape(1, LARGE.intermediate, LARGE.hidden), shape(16, LARGE.hidden, LARGE.intermediate),
            shape(2048, LARGE.intermediate, LARGE.hidden), shape(2048, SMALL.hidden, SMALL.intermediate),
            shape(2048, 4098, 1001),
        ],
    ),
}  # fmt: skip
