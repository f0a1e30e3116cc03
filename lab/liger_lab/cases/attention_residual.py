"""Cases of the attention over the outputs of earlier layers."""

import torch

from liger_hw.testing.case import PARTIAL_WIDTHS, WIDE_ROWS, OpCases, Shape


def inputs(new, *shape):
    """Make blocks and weights whose scores differ by a few, as those of models."""
    w_query = new.randn(shape[-1], grad=False) * (2 * max(shape[-1], 1) ** -0.5)
    return new.randn(*shape), w_query.requires_grad_(), new.randn(shape[-1])


def small(new):
    # A row has one error of its weights, so with few rows chance decides which version is closer: where there is more
    # than one block, 30 rows.
    for shape in [(3, 3, 11, 24), (1, 123), (33, 30, 40), (100, 30, 40), (2, 31, 17), (4, 33, 64)]:
        yield inputs(new, *shape), {}
    yield inputs(new, 2, 9, 33001), {}  # looped
    blocks, w_query, w_norm = inputs(new, 3, 31, 40)
    yield (blocks, w_query.detach().float().requires_grad_(), w_norm.detach()), {"eps": 1e-2}
    for learns in range(3):
        yield tuple(x if i == learns else x.detach() for i, x in enumerate((blocks, w_query, w_norm))), {}
    yield (new.randn(5, 31, 1), new.randn(1, grad=False), new.randn(1, grad=False)), {}
    yield inputs(new, 3, 0, 16), {}
    yield inputs(new, 3, 4, 0), {}


def wide(new):
    for cols in (128, 1024, 4096, 8192, 16384, 1001, *PARTIAL_WIDTHS):
        yield inputs(new, 8, WIDE_ROWS, cols), {}
    weights = (new.randn(4096, dtype=torch.float32) for _ in range(2))
    yield (new.randn(8, WIDE_ROWS, 4096), *weights), {}


def shape(*sizes):
    def tensors(new):
        return new.large(*sizes), new.large(sizes[-1], scale=sizes[-1] ** -0.5), new.large(sizes[-1])

    return Shape("x".join(map(str, sizes)), tensors)


CASES = {
    "attention_residual": OpCases(
        small, wide,
        [shape(8, 4, 2048, 2304), shape(8, 4, 2048, 4096)],  # Kimi Linear 48B in blocks of layers; the width of an 8B
        [shape(2, 4, 2048, 4096), shape(32, 2048, 2048), shape(8, 1, 16, 2048)],
    ),
}  # fmt: skip
