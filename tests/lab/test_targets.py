"""Check without a GPU that every kernel builds, fits and reads whole vectors.

The configurations are exactly those a launch on that architecture would use. Here: the wide and odd shapes, in bf16,
for an architecture of each kind (`--archs all`: for all; `--archs turns`: each op for one of them). `liger-hw evidence
--compile` holds every shape and dtype on every architecture to the same gates.
"""

import dataclasses
import os
import re

import pytest

from liger_hw.dispatch import OPS
from liger_lab.cases import CASES, DIFFERENTIABLE
from liger_lab.levels import compile_cache, compiled, crosscompile, occupancy
from liger_lab.levels.crosscompile import DEVICES

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")


@pytest.fixture(scope="module")
def cache():
    return compile_cache.Cache()


def test_every_op_has_cases():
    assert set(CASES) == set(OPS)


@pytest.mark.parametrize("op", sorted(CASES))
def test_passes_every_gate(op, compiled_arch, cache):
    found = compiled.uses(compiled_arch, [op], ["bf16"], [compiled.WIDE])
    assert any(use.backward for use in found) == (op in DIFFERENTIABLE)
    for use in found:
        key = use.launch.key
        if key not in cache.known:
            cache.add(key, compile_cache.attempt(use.launch))
        result = cache.known[key]
        assert not compiled.judge(use.launch, result), (use.launch.kernel, use.shapes, use.launch.config)
        # LLVM leaves room for a few registers on CDNA: 7 waves of 61 to 63 registers, which the limits alone make 8.
        # Scalar registers, which they leave out, allow 6 waves even if a kernel uses all (embedding_backward).
        modelled = occupancy.warps_by_registers(DEVICES[compiled_arch].core, result.registers)
        counted = result.waves is None or min(modelled - 1, 6) <= result.waves <= modelled
        assert counted, f"LLVM counts {result.waves} waves, the limits allow {modelled}"


def pytest_generate_tests(metafunc):
    if "of_relatives" in metafunc.fixturenames:
        few = metafunc.config.getoption("--archs") == "turns"
        metafunc.parametrize("of_relatives", ["rms_norm"] if few else ["rms_norm", "cross_entropy"])


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_shared_stages_give_each_relative_its_own_code(vendor, of_relatives):
    archs = [arch for arch in compiled.ARCHS if DEVICES[arch].vendor == vendor]
    uses = compiled.uses(archs[0], [of_relatives], ["bf16"], [compiled.WIDE])
    launch = max(uses, key=lambda use: use.backward).launch
    launches = [dataclasses.replace(launch, arch=arch) for arch in archs]
    own = []
    for job in launches:
        crosscompile._last_built.clear()
        own.append(crosscompile.built(job))
    crosscompile._last_built.clear()
    for job, its_own in zip(launches, own):
        shares, _ = crosscompile._relative_code(job, its_own[0])
        assert bool(shares) == (job is not launches[0])
        built = crosscompile.built(job)
        assert crosscompile.read(*built) == crosscompile.read(*its_own), job.arch
        assert instructions(built[0]) == instructions(its_own[0]), job.arch


def instructions(text: dict) -> list[str]:
    """Drop the source lines from assembly, because reading IR from text loses some."""
    code, comment = (text["ptx"], "//") if "ptx" in text else (text["amdgcn"], ";")
    found = [line.partition(comment)[0].strip() for line in code.splitlines() if re.match(r"\s+[a-z@]", line)]
    assert len(found) > 100
    return found
