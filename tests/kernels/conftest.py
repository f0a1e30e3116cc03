import pytest

from liger_hw.kernels import _math


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    """Samples are so small that one program would take each; so that others see several, half of them are too large."""
    monkeypatch.setattr(_math, "ONE_PROGRAM", 1000)
