import os

import pytest
import torch

from liger_hw._triton import interpreting
from liger_hw.backends import VENDORS, detected


def _backends():
    """The backends that can run here, or one skip that says why none can."""
    forced = os.environ.get("LIGER_HW_BACKEND")
    if forced:
        return [forced]
    if interpreting():
        return list(VENDORS)
    if torch.accelerator.is_available():
        return [detected(torch.device(torch.accelerator.current_accelerator().type, 0)).vendor]
    return [pytest.param(None, marks=pytest.mark.skip(reason="no accelerator here and TRITON_INTERPRET is not set"))]


@pytest.fixture(params=_backends())
def backend(request):
    """The name of a backend that runs Triton kernels here."""
    return request.param


@pytest.fixture
def device():
    """Where that backend's tensors live."""
    return (
        "cpu"
        if interpreting() or not torch.accelerator.is_available()
        else torch.accelerator.current_accelerator().type
    )


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Memory a kernel forgets to write is NaN, not luck."""

    def poisoned(make):
        def empty(*args, **kwargs):
            out = make(*args, **kwargs)
            with torch.no_grad():  # a leaf may be asked for
                return out.fill_(float("nan")) if out.is_floating_point() else out

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
