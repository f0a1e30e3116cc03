import itertools

import pytest
import torch

from liger_hw._triton import interpreting
from liger_hw.kernels import _partials
from liger_lab import cases

# The first case and the step of a dtype: each case has fp32 or fp16, and every third has bf16, too, in which the
# interpreter truncates.
TURNS = {torch.float32: (0, 2), torch.float16: (1, 2), torch.bfloat16: (1, 3)}


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Lower the size for one program, so that half of the samples take several."""
    monkeypatch.setattr(_partials, "ONE_PROGRAM", 1000)


@pytest.fixture
def small_cases(request):
    """Yield an op's small cases; with `--archs turns` the interpreter takes them in one dtype or two, in turn."""
    if not interpreting() or request.config.getoption("--archs") != "turns":
        return cases.small_cases

    def in_turn(op, dtype, device="cpu"):
        first, step = TURNS[dtype]
        return itertools.islice(cases.small_cases(op, dtype, device), first, None, step)

    return in_turn
