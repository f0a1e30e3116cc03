"""Cases of linear layers with adapters, alone and at the end of a gated MLP."""

import torch

from liger_hw.kernels.linear.lora_linear.products import MOST_ROWS
from liger_hw.testing.case import OpCases, Shape
from liger_lab.models import MODELS, TOKENS


def tensors(new, rows, features, rank, *, glu=0, bias=False, wide=True, learns=(True, False, True, True)):
    """Draw the arguments before scaling.

    `glu`: 0 for x, 1 for gate without up, 2 for both.
    `learns`: whether input, weight, A and B want gradients.
    """
    cols, (x_grad, weight_grad, a_grad, b_grad) = rows[-1], learns
    inputs = [new.randn(*rows, grad=x_grad) for _ in range(max(glu, 1))] + [None] * (glu == 1)
    adapters = {"dtype": torch.float32} if wide else {}
    return (
        *inputs,
        new.randn(features, cols, grad=weight_grad),
        new.randn(features, grad=weight_grad) if bias else None,
        new.randn(rank, cols, grad=a_grad, **adapters),
        new.randn(features, rank, grad=b_grad, **adapters),
    )


def small(glu):
    def cases(new):
        for rows, features, rank in [((5, 123), 7, 3), ((2, 3, 260), 24, 16), ((9,), 4, 1), ((0, 16), 8, 4)]:
            for wide in (False, True):
                yield tensors(new, rows, features, rank, glu=glu, wide=wide, bias=rank == 3), {"scaling": 0.6}
        for learns in [(True, True, True, True), (True, True, False, False), (True, False, False, True), (False,) * 4]:
            yield tensors(new, (4, 64), 8, 4, glu=glu, learns=learns), {}
        yield tensors(new, (4, 64), 8, 4, glu=glu, learns=(False, False, True, True)), {"scaling": 0.5}
        if glu:
            yield tensors(new, (4, 64), 8, 4, glu=1), {"activation": "gelu_erf"}

    return cases


def large(glu):
    def cases(new):
        for rows, rank in [((2, 4096), 64), ((1, 1001), 8), ((70, 512), 100), ((3, 64), 130)]:
            yield tensors(new, rows, 72, rank, glu=glu), {}
        yield tensors(new, (MOST_ROWS + 7, 24), 8, 4, glu=glu, bias=True), {"scaling": 0.5}

    return cases


def shape(rows, cols, features, rank=16, glu=0):
    def arguments(new):
        inputs = [new.large(rows, cols) for _ in range(max(glu, 1))]
        weight = new.large(features, cols, scale=cols**-0.5).detach()
        factors = new.large(rank, cols, scale=cols**-0.5), new.large(features, rank, scale=rank**-0.5)
        return *inputs, weight, None, *(factor.detach().float().requires_grad_() for factor in factors)

    return Shape(f"{rows}x{cols}x{features} rank {rank}", arguments)


SMALL, LARGE = MODELS[1], MODELS[6]
CASES = {
    "lora_linear": OpCases(
        small(0), large(0),
        [
            shape(TOKENS, LARGE.hidden, LARGE.hidden), shape(TOKENS, LARGE.hidden, LARGE.intermediate),
            shape(2048, SMALL.hidden, SMALL.hidden),
        ],
        [shape(TOKENS, LARGE.intermediate, LARGE.hidden), shape(TOKENS, LARGE.hidden, LARGE.hidden, rank=64)],
    ),
    "lora_glu_linear": OpCases(
        small(2), large(2),
        [
            shape(TOKENS, LARGE.intermediate, LARGE.hidden, glu=2),
            shape(2048, SMALL.intermediate, SMALL.hidden, glu=2),
        ],
    ),
}  # fmt: skip
