"""Cases of hyper-connections."""

import torch

from liger_hw.testing.case import PARTIAL_WIDTHS, OpCases, Shape
from liger_lab.models import SMALL_AND_MEDIUM, TOKENS

STREAMS = 4  # of the models of arXiv:2512.24880
SMALL = ((5, 3, 123), (2, 3, 4, 1024), (7, 1, 8), (4, 40), (3, 5, 64), (2, 16, 21), (0, 4, 16))
WIDE = [(2, STREAMS, cols) for cols in (128, 1024, 4096, 7168, 8192, 16384, 1001, *PARTIAL_WIDTHS)]
WIDE += [(2, streams, 4096) for streams in (2, 6, 8)]
SIZES = [(TOKENS, STREAMS, model.hidden) for model in SMALL_AND_MEDIUM] + [(4096, STREAMS, 7168)]
FURTHER = [(TOKENS, 2, 4096), (TOKENS, 8, 2048), (8191, STREAMS, 4099), (16, STREAMS, 2048)]


def pre_tensors(new, shape, make, grads=(True,) * 2, dtype=torch.float32):
    return make(*shape, grad=grads[0]), new.randn(*shape[:-1], dtype=dtype, grad=grads[1])


def post_res_tensors(new, shape, make, grads=(True,) * 4, dtype=torch.float32):
    f_out = make(*shape[:-2], shape[-1], grad=grads[1])
    coefficients = [
        new.randn(*sizes, dtype=dtype, grad=grad)
        for sizes, grad in zip((shape[:-1], (*shape[:-1], shape[-2])), grads[2:])
    ]
    return make(*shape, grad=grads[0]), f_out, *coefficients


def coefficient_tensors(new, shape, make, grads=(True,) * 3, dtype=torch.float32, alpha_grad=False):
    """Draw the tensors of mhc_coefficients.

    Args:
        alpha_grad: for tests that compare many draws at once, as one number's error says nothing of others.
    """
    streams, cols = shape[-2:]
    count = streams * (streams + 2)
    x, phi = make(*shape, grad=grads[0]), make(streams * cols, count, grad=False)
    phi = phi.mul_((streams * cols) ** -0.5).requires_grad_(grads[1])
    alphas = [new.randn(*sizes, dtype=dtype, grad=alpha_grad) for sizes in ((), (1,), ())]
    return x, phi, new.randn(count, dtype=dtype, grad=grads[2]), *alphas


def cases_of(tensors, inputs):
    """Return the `OpCases` of an op whose first `inputs` tensors may require a gradient."""

    def small(new):
        for shape in SMALL:
            yield tensors(new, shape, new.randn), {}
        yield tensors(new, (3, 2, 40), new.randn, dtype=new.dtype), {}
        for alone in range(inputs):
            yield tensors(new, (4, 3, 72), new.randn, [i == alone for i in range(inputs)]), {}

    def wide(new):
        for shape in WIDE:
            yield tensors(new, shape, new.randn), {}

    def of(shape):
        return Shape("x".join(map(str, shape)), lambda new: tensors(new, shape, new.large))

    return OpCases(small, wide, [of(shape) for shape in SIZES], [of(shape) for shape in FURTHER])


CASES = {
    "mhc_coefficients": cases_of(coefficient_tensors, 3),
    "mhc_pre": cases_of(pre_tensors, 2),
    "mhc_post_res": cases_of(post_res_tensors, 4),
}
