"""Winners that look right and cannot be launched."""

import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
import torch
from made_up import H200, KEY, NEEDS_TRITON, entry, made_up_config, ship

from liger_hw import backends, dispatch, launch, tuning
from liger_hw._triton import triton
from liger_hw.hooks import hooks
from liger_hw.kernels.mlp import _in_place
from liger_hw.tuning import HEURISTIC, SHIPPED
from liger_lab.cases import model_cases, step

pytestmark = NEEDS_TRITON


class Compiler:
    """A stand-in for a kernel and its compiler, which builds it with 4 warps and nothing else."""

    params = [SimpleNamespace(name="X", is_constexpr=False)]

    def __init__(self):
        self.asked, self.compiled = [], []

    def __getitem__(self, grid):
        def launch(x, *meta, num_warps, **options):
            self.asked.append(num_warps)
            if num_warps != 4:
                raise triton.runtime.errors.OutOfResources(10**6, 232448, "shared memory")
            x += 1
            return SimpleNamespace(run=None, function=None, packed_metadata=None)

        return launch

    def warmup(self, x, *meta, grid, num_warps, **options):
        self.compiled.append(num_warps)
        return SimpleNamespace(
            metadata=SimpleNamespace(shared=10**6 if num_warps == 16 else 0),
            n_spills=2 if num_warps == 8 else 0,
            _init_handles=lambda: None,
        )


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch._runtime, "load", lambda: None)
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(tuning.choice, "_withdrawn", set())
    return Compiler()


@pytest.mark.parametrize("mutates", [[], ["x"]], ids=["out", "in place"])
@pytest.mark.parametrize("path", ["eager", "observed", "registered"])
def test_a_winner_that_cannot_be_launched_costs_one_warning(mutates, path, compiler, monkeypatch, caplog):
    def _launches(x: torch.Tensor) -> torch.Tensor:
        y = x if mutates else x.clone()
        launch.launch(compiler, (1, 1, 1), made_up_config(1024, 2, H200), y)
        return y.clone()

    _launches.__name__ = f"launches_{path}_{len(mutates)}"
    by_call = dispatch.raw(lambda x: torch.empty_like(x), mutates=mutates)(_launches)
    observer = (lambda f, args, again: f(*args)) if path == "observed" else None
    function = by_call.opaque if path == "registered" else by_call
    tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry()})
    ship({KEY: entry(num_warps=16)})
    assert made_up_config(1024, 2, H200).num_warps == 8
    x = torch.ones(3)
    with hooks.observe(observer):
        assert torch.equal(function(x), torch.full((3,), 2.0))
    assert compiler.asked == [8, 16, 4]  # this machine's, the shipped one, the heuristic
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    tuning.choice.forget()
    assert made_up_config(1024, 2, H200).source == HEURISTIC  # not again, whoever tunes in this process
    assert len(caplog.records) == 2 and all("cannot be launched here" in r.message for r in caplog.records)


def test_a_winner_of_another_triton_is_checked_before_it_runs(compiler, caplog):
    """One that spills, one that takes too much shared memory, and one that is as good as it was."""

    @dispatch.raw(lambda x: torch.empty_like(x))
    def _launches_checked(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        launch.launch(compiler, (1, 1, 1), made_up_config(1024, 2, H200), y)
        return y

    tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry(triton="3.0.0")})
    ship({KEY: entry(num_warps=16, triton="3.0.1")})
    assert torch.equal(_launches_checked(torch.ones(3)), torch.full((3,), 2.0))
    assert compiler.compiled == [8, 16] and compiler.asked == [4], "neither ran, and the heuristic is not checked"
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    first, second = (record.message for record in caplog.records)
    assert "spills 2 registers" in first and "not by 3.0.0" in first and "1000000 bytes of shared memory" in second
    ship({KEY: entry(num_warps=4, triton="3.0.1", programs=4)})
    _launches_checked(torch.ones(3))
    assert compiler.compiled == [8, 16, 4] and compiler.asked == [4, 4]
    assert made_up_config(1024, 2, H200).source == SHIPPED and len(caplog.records) == 2


def test_a_heuristic_that_cannot_be_launched_is_an_error(compiler):
    config = dataclasses.replace(made_up_config(1024, 2, H200), num_warps=8)
    with pytest.raises(triton.runtime.errors.OutOfResources):
        launch.launch(compiler, (1, 1, 1), config, torch.ones(3))


def test_what_writes_to_its_arguments_launches_one_kernel(monkeypatch):
    """So that it may run again after a launch that failed."""
    meta = torch.device("meta")
    monkeypatch.setitem(backends._devices, meta, H200)
    launched, counts = [], {}
    monkeypatch.setattr(launch, "_first_launch", lambda *args: launched.append(1))
    monkeypatch.setattr(_in_place, "_disjoint", lambda a, b: True)  # all tensors without data are at address 0

    def observer(launches, args, repeatable):
        before = len(launched)
        result = launches(*args)
        if not repeatable:
            counts.setdefault(launches.__code__.co_filename, set()).add(len(launched) - before)
        return result

    for case in model_cases(further=True):
        op = dispatch.OPS[case.op]
        inputs = case.make(meta, torch.bfloat16)
        inputs = [x if x is None else x.clone() for x in inputs]  # what is written over may not be a leaf
        with hooks.observe(observer):
            step(op.implementations[op.choose(meta)], inputs, case.options)
    assert len(counts) >= 4 and set.union(*counts.values()) <= {0, 1}, counts
