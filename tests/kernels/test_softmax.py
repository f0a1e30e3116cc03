"""softmax and sparsemax."""

import pytest
import torch

from liger_hw import use_backend
from liger_hw.kernels.attention.softmax import softmax, sparsemax
from liger_hw.testing.parity import check, compare, run
from liger_hw.transformers.functional import liger_sparsemax

OPS = {"softmax": softmax, "sparsemax": sparsemax}
ops = pytest.mark.parametrize("op", OPS)


@ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parity(op, dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases(op, dtype, device):
        check(OPS[op], inputs, options, backend)


@ops
def test_strided(op, backend, device):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 6, 70, device=device, dtype=torch.float16, requires_grad=True)]

    def through(op):
        return lambda x: op(x.transpose(0, 1)[..., 5:])

    reference = OPS[op].reference
    exact = run(through(reference), [inputs[0].detach().double().requires_grad_()], {})
    plain = run(through(reference), inputs, {})
    with use_backend(backend):
        found = run(through(OPS[op]), inputs, {})
    compare(exact, plain, found, f"strided {op} on {backend}")


@ops
@pytest.mark.parametrize("cols", [6, 9000, 33000, 33001])  # the last two are looped
def test_infinite_scores(op, cols, backend, device):
    """-inf is a masked score; a row of nothing else, or with NaN or inf, is NaN as torch's softmax makes it."""
    torch.manual_seed(0)
    x = torch.randn(6, cols, device=device)
    x[0, 1::2] = -float("inf")
    x[1, 1:] = -float("inf")
    x[2] = -float("inf")
    x[3, 2] = float("nan")
    x[4, 3] = float("inf")
    with use_backend(backend):
        y = OPS[op](x)
    torch.testing.assert_close(y, OPS[op].reference(x), equal_nan=True)
    assert y[2:5].isnan().all() and y[1, 0] == 1 and (y[0, 1::2] == 0).all()


@pytest.mark.parametrize("spread", [1e-6, 1e-2, 1.0, 30.0, 1e4])
def test_sparsemax_finds_the_support(spread, backend, device):
    """Rows whose support is all, some or one; equal values; one of 40,000 columns, which Newton's steps approach."""
    torch.manual_seed(0)
    x = torch.cat([torch.randn(3, 700), torch.linspace(0, 1, 700)[None].square(), torch.zeros(1, 700)]) * spread
    with use_backend(backend):
        for rows in (x, torch.randn(1, 40000) * spread):
            y = sparsemax(rows.to(device))
            expected = sparsemax.reference(rows.double())
            torch.testing.assert_close(y.cpu().double(), expected, rtol=1e-5, atol=2e-7 * max(spread, 1))
            torch.testing.assert_close(y.sum(-1).cpu(), torch.ones(len(rows)), rtol=1e-3, atol=0)


@ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_nothing(op, dtype, backend, device):
    x = torch.randn(3, 40, device=device, dtype=dtype)
    for which in (backend, "reference"):
        with use_backend(which):
            expected = OPS[op](x)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                torch.testing.assert_close(OPS[op](x), expected, rtol=0, atol=0)


def test_along_another_dimension():
    x = torch.randn(3, 4, 5)
    torch.testing.assert_close(liger_sparsemax(x, 1), sparsemax.reference(x.transpose(1, 2)).transpose(1, 2))


@ops
def test_bad_input(op):
    with pytest.raises(ValueError, match="x: got"):
        OPS[op](torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="x: got"):
        OPS[op](torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_the_lowest_number(dtype, backend, device):
    """Models mask scores with it; a row of nothing else is uniform."""
    x = torch.full((2, 40000), torch.finfo(dtype).min, dtype=dtype, device=device)
    x[1, 7] = -torch.inf
    with use_backend(backend):
        torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
