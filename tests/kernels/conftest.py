import pytest

from liger_hw.kernels import _math


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Lower the size for one program, so that half of the samples take several."""
    monkeypatch.setattr(_math, "ONE_PROGRAM", 1000)
