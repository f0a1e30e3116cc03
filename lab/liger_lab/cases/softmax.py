"""Cases of softmax and sparsemax."""

from math import inf, nan

from liger_hw.testing.case import PARTIAL_WIDTHS, WIDE_ROWS, OpCases, Shape
from liger_hw.testing.inputs import put

SCORES = ((65536, 1024), (32768, 2048), (16384, 8192))  # rows of attention scores, by context
VOCABULARIES = ((8192, 32000), (4096, 128256))


def score_rows(new):
    for shape in [(5, 123), (3, 1024), (1, 8), (33, 64), (7, 1), (2, 3, 2500), (0, 16), (9,)]:
        yield (new.randn(*shape),), {}
    yield (new.randn(2, 33001),), {}  # looped
    yield (new.randn(2, 33000),), {}  # looped, in whole vectors
    yield (new.randn(3, 40, grad=False),), {}
    masked = ((0, slice(1, None, 2)), -inf), ((1, slice(1, None)), -inf), (2, -inf)
    yield (put(new.randn(6, 40), *masked, ((3, 2), nan), ((4, 3), inf)),), {}


def wide_rows(new):
    for cols in (128, 1024, 4096, 8192, 16384, 32768, 262144, 1001, *PARTIAL_WIDTHS):
        yield (new.randn(WIDE_ROWS, cols),), {}


def shape(rows, cols):
    return Shape(f"{rows}x{cols}", lambda new: (new.large(rows, cols),))


CASES = {
    op: OpCases(score_rows, wide_rows, [shape(*size) for size in (*SCORES, *VOCABULARIES)], [shape(8191, 4099)])
    for op in ("softmax", "sparsemax")
}
