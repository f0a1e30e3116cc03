"""The parity rule notices planted errors in the results of every op, in every dtype."""

import pytest
import torch

from liger_hw._triton import interpreting
from liger_hw.dispatch import OPS
from liger_hw.testing import parity
from liger_lab.cases import DIFFERENTIABLE, small_cases

pytestmark = pytest.mark.skipif(
    interpreting(), reason="there the rule allows bf16's truncation; references need no kernel"
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LARGEST = 4_000  # values of a result: larger ones take longer, and show nothing more
ROWS = 1000


def scaled(exact, result):
    """Multiply by 1.005, as a constant with three digits does."""
    return exact, result, (result.double() * 1.005).to(result.dtype)


def biased(exact, result):
    """Add half a rounding to the mean of the values, rounding up or down at random.

    Where the reference itself rounds several times, it is half of its error. In fp32, where GPUs do not round
    exponentials, roots and quotients correctly, it is 16 times as much.
    """
    x, roundoff = result.double(), torch.finfo(result.dtype).eps / 2
    own = (x - exact).norm() / exact.norm()
    share = max(own.item(), roundoff) * (8 if result.dtype == torch.float32 else 0.5)
    unit = torch.exp2(torch.frexp(x).exponent) * roundoff  # in the last place
    drawn = torch.rand(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return exact, result, (torch.floor(x * (1 + share) / unit + drawn) * unit).to(result.dtype)


def wrong_last_column(exact, result):
    """Put the last column but one in the place of the last, as a wrong mask does."""
    planted = result.clone()
    planted[..., -1] = result[..., -2]
    return exact, result, planted


def wrong_row(exact, result):
    """Repeat the rows until there are a thousand, and replace one by its neighbour."""
    exact, result = (t.reshape(-1, t.shape[-1]) for t in (exact, result))
    exact, result = (t.repeat(-(-ROWS // len(t)), 1) for t in (exact, result))
    planted = result.clone()
    planted[ROWS // 2] = result[ROWS // 2 + 1]
    return exact, result, planted


SMALLEST = {  # planted error -> values of the smallest result that must show it
    scaled: parity.FEW, biased: 4 * parity.FEW, wrong_last_column: 0, wrong_row: 0,
}  # fmt: skip


def can_have(mistake, result):
    """Tell whether a result has the values, columns and rows that an error needs."""
    if result.numel() < SMALLEST[mistake]:
        return False
    has_columns = result.ndim > 0 and result.shape[-1] > 1
    return {wrong_last_column: has_columns, wrong_row: has_columns and result.numel() > result.shape[-1]}.get(
        mistake, True
    )


def results(op, dtype):
    """Yield (number of the output, exact value, the reference's) of each result of the op's cases."""
    torch.manual_seed(0)
    for inputs, options in small_cases(op, dtype):
        for number, (exact, result) in enumerate(zip(*parity.expected(OPS[op], inputs, options))):
            if result is None or not result.is_floating_point() or not 0 < result.numel() <= LARGEST:
                continue
            if result.isfinite().all() and result.any():
                yield number, exact, result


def noticed(exact, result, planted):
    try:
        parity.compare([exact], [result], [planted], "planted")
    except AssertionError:
        return True
    return False


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_planted_errors_are_noticed(op, dtype):
    """A wrong scale, column or row in a case of every output; a bias in one output at least."""
    seen = {}  # (planted error, number of the output, dtype) -> whether a case showed it
    for number, exact, result in results(op, dtype):
        for mistake in SMALLEST:
            key = mistake.__name__, number, result.dtype
            if can_have(mistake, result) and not seen.get(key):
                seen[key] = noticed(*mistake(exact, result))
    assert all(shown for (name, *_), shown in seen.items() if name != "biased"), seen
    for mistake in SMALLEST:
        assert any(shown for (name, *_), shown in seen.items() if name == mistake.__name__), seen


def test_what_the_interpreter_truncates_passes_there_alone(monkeypatch):
    """It drops the last 16 bits of fp32, where hardware rounds to the nearest bf16."""
    exact = torch.randn(8, 100, dtype=torch.float64)
    rounded = exact.bfloat16()
    truncated = (exact.float().view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    assert noticed(exact, rounded, truncated)
    monkeypatch.setattr(parity, "interpreting", lambda: True)
    assert not noticed(exact, rounded, truncated)
    assert noticed(exact, rounded, truncated * 1.05)
    half = exact.half()
    assert noticed(exact, half, (half.double() * 1.001).half())  # which the interpreter rounds


def test_a_factor_of_all_values_may_be_an_approximation_in_fp32():
    exact = torch.randn(8, 100, dtype=torch.float64)
    for share, error in ((2**-22, False), (2**-19, True)):
        assert noticed(exact, exact.float(), (exact * (1 + share)).float()) == error


def test_values_below_the_normal_ones_round_to_a_fixed_distance():
    exact = torch.randn(8, 100, dtype=torch.float64) * 1e-6
    other = torch.where(torch.rand(8, 100) < 0.5, exact + 2**-25, exact - 2**-25).half()
    assert not noticed(exact, exact.half(), other)
    assert noticed(exact, exact.half(), torch.zeros_like(other))
