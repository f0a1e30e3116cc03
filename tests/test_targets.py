"""Every kernel of every op builds and fits, for every architecture, without a GPU.

The configurations are exactly those a launch on that architecture would use; shapes are real widths, aligned and not.
"""

import os

import pytest
import torch

from liger_hw.backends import amd, nvidia
from liger_hw.crosscompile import compiling_for
from liger_hw.dispatch import OPS
from liger_hw.samples import REAL

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

TARGETS = [
    "sm80",
    "sm86",
    "sm89",
    "sm90",
    "sm100",
    "sm120",
    "gfx90a",
    "gfx942",
    "gfx950",
    "gfx1100",
    "gfx1151",
    "gfx1201",
]
DEVICES = nvidia.ARCHS | amd.ARCHS


def resources(op, device):
    """What each launch of the op's real shapes, forward and backward, takes on `device`."""
    with compiling_for(device) as found:
        for inputs, options in REAL[op](torch.bfloat16):
            outputs = OPS[op](*inputs, **options)
            outputs = [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if torch.is_tensor(out)]
            torch.autograd.backward(
                [out for out in outputs if out.requires_grad], [torch.ones_like(o) for o in outputs if o.requires_grad]
            )
    return found


def test_every_op_has_real_shapes():
    assert set(REAL) == set(OPS)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", sorted(REAL))
def test_builds_and_fits(op, target):
    device = DEVICES[target]
    found = resources(op, device)
    assert found, "nothing was launched"
    for kernel in found:
        assert kernel.num_warps <= device.max_warps, kernel
        assert kernel.shared <= device.shared_memory, kernel
        assert kernel.spills == 0, kernel
        assert not kernel.forbidden, kernel
