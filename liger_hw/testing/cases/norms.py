"""Cases of RMSNorm, with and without the residual addition, and of layer norm."""

import torch

from liger_hw.testing.case import OpCases, Shape
from liger_hw.testing.models import MODELS, TOKENS

SMALL = ((5, 123), (3, 1024), (1, 8), (33, 64), (0, 16))
HIDDEN = [(TOKENS, model.hidden) for model in MODELS]
HEADS = (TOKENS * 32, 128)  # query heads of one layer whose norm is per head, as Qwen3's
LONG_ROWS = ((2048, 65536), (512, 262144))
LAYER_NORMS = [(TOKENS, cols) for cols in (768, 1024, 4608, 8192)]  # GPT-2, BERT-large, StarCoder2-7B, Command R
FURTHER = (
    (32768, 1024), (16384, 4096), (16384, 8192), (8192, 16384), HEADS, *LONG_ROWS, (8192, 1001), (4099, 3001),
    (16, 2048),
)  # fmt: skip


def rms_norms(new):
    for rows, cols in SMALL:
        x, w = new.randn(rows, cols), new.randn(cols)
        yield (x, w), {}
        yield (x, w), {"offset": 1.0, "casting_mode": "gemma"}
        yield (x, None), {}
    yield (new.randn(2, 7, 257), new.randn(257, dtype=torch.float32)), {}
    for cols in (12008, 33001):  # several blocks in registers; a looped row
        yield (new.randn(2, cols), new.randn(cols)), {}


def wide_rms_norms(new):
    for cols in (128, 1024, 4096, 5120, 8192, 16384, 262144, 1001):
        yield (new.randn(2, cols), new.randn(cols)), {}
    yield (new.randn(2, 4096), new.randn(4096, dtype=torch.float32)), {"offset": 1.0, "casting_mode": "gemma"}
    yield (new.randn(2, 8192, dtype=torch.float32), new.randn(8192, dtype=torch.float32)), {}


def with_residual(cases):
    """Add a residual to the cases of an op of x and weight."""

    def cases_with_residual(new):
        for (x, w), options in cases(new):
            yield (x, new.randn(*x.shape, dtype=x.dtype), w), options

    return cases_with_residual


def layer_norms(new):
    for rows, cols in SMALL:
        x, w, b = new.randn(rows, cols), new.randn(cols), new.randn(cols)
        yield (x, w, b), {}
        yield (x, None, None), {"eps": 1e-3}
    yield (x := new.randn(2, 7, 40), new.randn(40, dtype=torch.float32), None), {}
    yield (x, None, new.randn(40, dtype=torch.float32)), {}
    yield (x.detach(), new.randn(40), new.randn(40, grad=False)), {}
    yield (x.detach(), new.randn(40, grad=False), new.randn(40)), {}
    yield (new.randn(2, 33001), new.randn(33001), None), {}  # looped


def wide_layer_norms(new):
    for cols in (128, 1024, 4096, 8192, 16384, 262144, 1001):
        yield (new.randn(2, cols), new.randn(cols), new.randn(cols)), {}
    yield (new.randn(2, 4096), None, None), {}


def shapes(sizes, matrices, parameters):
    """Make the shapes of an op of `matrices` tensors (rows, cols) and `parameters` tensors (cols,)."""

    def shape(rows, cols):
        def tensors(new):
            return *(new.large(rows, cols) for _ in range(matrices)), *(new.large(cols) for _ in range(parameters))

        return Shape(f"{rows}x{cols}", tensors)

    return [shape(*size) for size in sizes]


CASES = {
    "rms_norm": OpCases(rms_norms, wide_rms_norms, shapes([HEADS, *HIDDEN, *LONG_ROWS], 1, 1), shapes(FURTHER, 1, 1)),
    "fused_add_rms_norm": OpCases(
        with_residual(rms_norms), with_residual(wide_rms_norms), shapes(HIDDEN, 2, 1), shapes(FURTHER, 2, 1)
    ),
    "layer_norm": OpCases(
        layer_norms, wide_layer_norms, shapes([*LAYER_NORMS, *LONG_ROWS], 1, 2), shapes(FURTHER, 1, 2)
    ),
}
