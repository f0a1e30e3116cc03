"""In fp16 every op takes incoming gradients from the least that fp16 holds to near its largest, as a loss scale moves
them.

The losses themselves are in tests/losses/test_loss_scale.py.
"""

import itertools

import pytest
import torch

from liger_hw import use_backend
from liger_hw.dispatch import OPS
from liger_hw.testing import parity
from liger_hw.testing.cases import CASES, small_cases

CASES_OF_AN_OP = 3


class Scaled(torch.autograd.Function):
    """The identity, whose incoming gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.scale, None


def scaled(op, scale):
    def run(*inputs, **options):
        outputs = op(*inputs, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(y if y is None or not y.requires_grad else Scaled.apply(y, scale) for y in outputs)

    return run


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**8])
@pytest.mark.parametrize("op", CASES)
def test_incoming_gradients_of_any_size(op, scale, backend, device):
    op = OPS[op]
    for inputs, options in itertools.islice(small_cases(op.__name__, torch.float16, device), CASES_OF_AN_OP):
        wide = [
            x.detach().double().requires_grad_(x.requires_grad) if torch.is_tensor(x) and x.is_floating_point() else x
            for x in inputs
        ]
        exact, plain = (parity.run(scaled(op.reference, scale), of, options) for of in (wide, inputs))
        with use_backend(backend):
            ours = parity.run(scaled(op, scale), inputs, options)
        parity.compare(exact, plain, ours, f"{op.__name__} on {backend}, incoming gradients times {scale:g}")
