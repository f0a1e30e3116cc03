import os

import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting


# in the interpreter the default would be that of a CPU again
@pytest.fixture(params=["kernels"] if interpreting() else ["default", "kernels"])
def engine(request):
    """The test runs on what serves the device by default, and on the Triton kernels."""
    if request.param == "kernels" and not interpreting() and not torch.accelerator.is_available():
        pytest.skip("no accelerator here and TRITON_INTERPRET is not set")
    forced = os.environ.get("LIGER_HW_BACKEND") or "triton"
    with use_backend(forced if request.param == "kernels" else None):
        yield request.param


@pytest.fixture
def device(request):
    """An accelerator for the kernels; the default is a CPU's, which takes float64 too."""
    kernels = "engine" in request.fixturenames and request.getfixturevalue("engine") == "kernels"
    return torch.accelerator.current_accelerator(check_available=True).type if kernels and not interpreting() else "cpu"
