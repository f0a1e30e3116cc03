"""Every kernel of every op builds, fits and reads its rows in whole vectors, for every architecture, without a GPU.

The configurations are exactly those a launch on that architecture would use. Here: the wide and odd shapes, in bf16.
`liger-hw matrix --compile` holds every shape and dtype to the same gates.
"""

import os

import pytest

from liger_hw.dispatch import OPS
from liger_hw.matrix import compiled
from liger_hw.occupancy import LIMITS, waves_by_registers
from liger_hw.samples import REAL, SAMPLES

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.fixture(scope="module")
def cache():
    return compiled.Cache()


def test_every_op_has_real_shapes():
    assert set(REAL) == set(SAMPLES) == set(OPS)


@pytest.mark.parametrize("arch", compiled.ARCHS)
@pytest.mark.parametrize("op", sorted(REAL))
def test_passes_every_gate(op, arch, cache):
    found = compiled.uses(arch, [op], ["bf16"], [compiled.WIDE])
    assert {use.backward for use in found} == {False, True}
    for use in found:
        key = use.launch.key
        if key not in cache.known:
            cache.add(key, compiled.attempt(use.launch))
        result = cache.known[key]
        assert not compiled.judge(use.launch, result), (use.launch.kernel, use.shapes, use.launch.config)
        # LLVM leaves room for a few registers on CDNA: 7 waves of 61 to 63 registers, which the limits alone make 8
        modelled = waves_by_registers(LIMITS[arch], result.registers)
        assert result.waves in (None, modelled, modelled - 1), "not what LLVM counts"
