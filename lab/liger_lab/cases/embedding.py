"""Cases of rows of a table."""

from liger_hw.testing.case import PARTIAL_WIDTHS, OpCases, Shape
from liger_lab.models import MODELS, TOKENS


def small(new):
    for vocabulary, cols, shape in ((40, 123, (7, 13)), (7, 8, (150,)), (300, 40, (3, 2, 11)), (1, 1, (70,))):
        yield (new.randn(vocabulary, cols), new.tokens(*shape, vocabulary=vocabulary)), {}
    for padding in (0, 3, -5):
        yield (new.randn(9, 24), new.tokens(4, 20, vocabulary=9)), {"padding_idx": padding}
    yield (new.randn(5, 2500), new.tokens(33, vocabulary=5)), {}  # several blocks of columns
    for shape in ((), (1,), (0,), (2, 0)):
        yield (new.randn(6, 16), new.tokens(*shape, vocabulary=6)), {}
    # no table without columns: torch 2.11's own backward ends in an illegal memory access there (H200)


def wide(new):
    for cols in (128, 896, 1024, 2304, 4096, 8192, 16384, 33, 1001, *PARTIAL_WIDTHS):
        yield (new.randn(64, cols), new.tokens(48, vocabulary=64)), {}


def shape(tokens, vocabulary, cols, kind="text", **options):
    """Return the shape of `tokens` of a table.

    Args:
        kind: "text" draws tokens as frequent as words. "uniform": hardly any is equal to another. "half padding": half
            of them are the token 0. "equal": all are the same.
    """

    def tensors(new):
        if kind == "uniform":
            indices = new.large_targets(tokens, vocabulary)
        else:
            indices = new.tokens(tokens, vocabulary=vocabulary)
        if kind in ("half padding", "equal"):
            indices[: tokens // 2 if kind == "half padding" else tokens] = 0
        return new.large(vocabulary, cols), indices

    label = f"{tokens}x{cols} of {vocabulary}" + f" {kind}" * (kind != "text")
    return Shape(label, tensors, options)


def model_shape(model, tokens=TOKENS, **more):
    return shape(tokens, model.vocabulary, model.hidden, **more)


SMALL, LARGE = MODELS[0], MODELS[6]
CASES = {
    "embedding": OpCases(
        small, wide,
        [model_shape(SMALL), model_shape(LARGE), model_shape(LARGE, 2 * TOKENS)],
        [
            model_shape(LARGE, 2 * TOKENS, kind="uniform"), model_shape(LARGE, 2 * TOKENS, kind="equal"),
            model_shape(LARGE, 2 * TOKENS, kind="half padding", padding_idx=0), shape(8191, 50257, 1001),
            shape(16, 32000, 2048),
        ],
    ),
}  # fmt: skip
