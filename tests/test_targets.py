"""Every kernel of every op builds, fits and reads its rows in whole vectors, for every architecture, without a GPU.

The configurations are exactly those a launch on that architecture would use. Here: the wide and odd shapes, in bf16.
`liger-hw matrix --compile` holds every shape and dtype to the same gates.
"""

import dataclasses
import os

import pytest

from liger_hw import crosscompile
from liger_hw.dispatch import OPS
from liger_hw.matrix import compiled
from liger_hw.matrix.wide import REAL
from liger_hw.occupancy import LIMITS, waves_by_registers
from liger_hw.samples import SAMPLES

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


@pytest.mark.parametrize("op", ["rms_norm", "cross_entropy"])
@pytest.mark.parametrize("family", crosscompile.FAMILIES, ids=lambda family: family[0])
def test_what_relatives_share_is_what_each_would_be_given(family, op):
    """LLVM's IR, made for one and renamed for another."""
    launch = max(compiled.uses(family[0], [op], ["bf16"], [compiled.WIDE]), key=lambda use: use.backward).launch
    for arch in family[1:]:
        crosscompile._made.clear()
        crosscompile.compiled(launch)
        other = dataclasses.replace(launch, arch=arch)
        shared = crosscompile._of_relative(other)
        found = crosscompile.compiled(other)
        crosscompile._made.clear()
        assert crosscompile.compiled(other) == found
        own_arch, *own = crosscompile._made[family]
        assert own_arch == arch and shared == tuple(own)
