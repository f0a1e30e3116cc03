"""Cases of multi-token attention."""

from math import inf, nan

from liger_hw.testing.case import PARTIAL_WIDTHS, OpCases, Shape
from liger_hw.testing.inputs import put


def small(new):
    def inputs(scores, weight, bias=True):
        kernel = new.randn(*weight)
        return (new.randn(*scores), kernel, new.randn(weight[0])) if bias else (new.randn(*scores), kernel)

    for sparse in (False, True):
        yield inputs((2, 3, 9, 9), (3, 3, 3, 3)), {"padding": 1, "sparse": sparse}
        yield inputs((1, 4, 37, 37), (4, 1, 3, 5), bias=False), {"padding": (1, 2), "groups": 4, "sparse": sparse}
        yield inputs((1, 2, 40, 11), (1, 2, 2, 3)), {"stride": (2, 1), "sparse": sparse}  # more queries than keys
        yield inputs((2, 2, 7, 130), (2, 1, 2, 3)), {"dilation": 2, "groups": 2, "sparse": sparse}  # and fewer
    yield inputs((1, 1, 3, 33001), (1, 1, 1, 3), bias=False), {"padding": (0, 1)}  # looped
    yield inputs((2, 2, 5, 5), (2, 2, 1, 1)), {}
    yield inputs((1, 1, 1, 1), (2, 1, 3, 3)), {"padding": 1}
    yield inputs((0, 2, 5, 5), (2, 2, 3, 3)), {}
    learned = inputs((1, 2, 12, 12), (2, 2, 3, 3))
    for learns in range(3):
        yield tuple(x if i == learns else x.detach() for i, x in enumerate(learned)), {"padding": 1}
        yield tuple(x.detach() if i == learns else x for i, x in enumerate(learned)), {"padding": 1}
    masked = ((..., 4, slice(0, None, 2)), -inf), ((..., 1, 2), nan), ((..., 0, 5), inf)
    yield (put(new.randn(1, 2, 8, 8), *masked), new.randn(1, 2, 3, 3)), {"padding": 1}


def wide(new):
    for sparse in (False, True):
        for keys in (128, 1024, 4096, 8192, 16384, 1001, *PARTIAL_WIDTHS):
            yield (new.randn(1, 1, 16, keys), new.randn(1, 1, 3, 3)), {"padding": 1, "sparse": sparse}


def shape(batch, heads, length, height, width, groups, **options):
    """Return a shape whose result has the size of the scores."""
    label = f"{batch}x{heads}x{length}x{length} {height}x{width} groups={groups}" + " sparse" * len(options)
    options = {"padding": (height // 2, width // 2), "groups": groups} | options
    taps = heads // groups * height * width

    def tensors(new):
        return new.large(batch, heads, length, length), new.large(heads, heads // groups, height, width, scale=1 / taps)

    return Shape(label, tensors, options)


CASES = {
    "multi_token_attention": OpCases(
        small, wide,
        # the paper's convolution of each head by itself, and of pairs of heads
        [shape(1, 16, 2048, 7, 11, 16), shape(1, 16, 4096, 7, 11, 16), shape(1, 16, 2048, 1, 1, 8)],
        [shape(2, 4, 1024, 3, 3, 1), shape(1, 16, 2048, 7, 11, 16, sparse=True), shape(1, 16, 1001, 3, 3, 16)],
    ),
}  # fmt: skip
