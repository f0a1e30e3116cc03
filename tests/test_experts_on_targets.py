"""Check the kernels of experts, which no op calls, as `test_targets.py` checks the ops'."""

import os

import pytest
import torch

from liger_hw.kernels.expert_glu import expert_glu_backward_in_place
from liger_hw.kernels.gathered_sum import sum_gathered
from liger_hw.proof import compiled, crosscompile

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


def test_passes_every_gate(compiled_arch):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    with crosscompile.launches_on(crosscompile.DEVICES[compiled_arch]) as launches:
        for dtype, cols in ((torch.bfloat16, 3584), (torch.float32, 2048)):
            halves, weights = meta(2, 2 * cols, dtype=dtype), meta(2, dtype=torch.float32)
            expert_glu_backward_in_place(*halves.chunk(2, 1), meta(2, cols, dtype=dtype), weights, "gelu_tanh")
        for k, cols in ((2, 1024), (10, 7168)):
            sum_gathered(meta(k, cols), meta(1, k, dtype=torch.int64), meta(k))
        found = list(launches)
    assert len(found) == 4
    for launch in found:
        assert not compiled.judge(launch, crosscompile.compiled(launch)), (launch.kernel, launch.config)
