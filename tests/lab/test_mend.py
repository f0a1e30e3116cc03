"""The search for what replaces a choice that the compiler refuses, with a made-up compiler."""

import dataclasses
import os

import pytest

from liger_hw import tuning
from liger_lab.levels import compiled, mend
from liger_lab.levels.assembly import Access
from liger_lab.levels.crosscompile import Resources

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

CLASS = "rms_norm_forward(<=1024 odd, 2)"
KEY = "rms_norm_forward(1001, 2)"


@pytest.fixture(scope="module")
def uses():
    """RMSNorm's forward of 1,001 columns, and of 1,024."""
    found = compiled.uses("sm80", ["rms_norm"], ["bf16"], [compiled.WIDE])
    kept = [use for use in found if use.launch.kernel == "rms_norm_forward" and use.launch.constants["cols"] < 1025]
    assert {use.launch.constants["cols"] for use in kept} == {128, 1001, 1024}
    return kept


class Compiler:
    """Registers spill where an odd row has fewer than `warps` warps, or every row where the meta says so."""

    def __init__(self, warps=0, rows=None):
        self.warps, self.rows, self.compiled = warps, rows, 0

    def __call__(self, launches):
        return {launch.key: self.result(launch) for launch in launches}

    def result(self, launch):
        self.compiled += 1
        refused = launch.constants["cols"] % 16 and (
            launch.options["num_warps"] < self.warps or launch.constants["ROWS"] == self.rows
        )
        tile = launch.constants["ROWS"] * launch.constants["COLS"]
        access = Access("k", "load", "X", tile, launch.constants["COLS"], 2, 1, {16: 1})
        return Resources(64, 8, 8 if refused else 0, 0, accesses=(access,))


def mended(uses, compiler, table=()):
    results = {use.launch.key: compiler.result(use.launch) for use in uses}
    return mend.mended(uses, results, dict(table), compiler)


def heuristic():
    return tuning.choice.CONFIGS["rms_norm_forward"].heuristic(1001, 2, mend.DEVICES["sm80"])


def test_choices_that_pass_need_no_entry(uses):
    compiler = Compiler()
    assert mended(uses, compiler) == {} and compiler.compiled == len(uses), "nothing is searched"


def test_a_refused_choice_becomes_the_nearest_that_passes(uses):
    for steps, warps in enumerate((2, 4), 1):
        ((key, entry),) = mended(uses, Compiler(warps * heuristic().num_warps)).items()
        assert key == CLASS and entry["origin"] == "compiled" and "spills: 8 spilled" in entry["heuristic_missed"]
        assert entry["num_warps"] == warps * heuristic().num_warps, "and no further"
        near = [entry["meta"][name] != size for name, size in heuristic().meta.items()]
        assert sum(near) <= steps and entry["programs"] == heuristic().programs
        config = tuning.choice.CONFIGS["rms_norm_forward"]
        assert entry["kernel"] == tuning.entries.kernel_hash(config.kernel())
        tuning.entries.launchable(entry, heuristic(), tuning.SHIPPED)


def test_where_nothing_near_passes_nothing_is_written(uses, capsys):
    assert mended(uses, Compiler(10**6)) == {}
    assert f"sm80: {KEY}: nothing within 2 steps passes" in capsys.readouterr().out


def test_an_entry_that_the_heuristic_no_longer_needs_is_taken_out(uses):
    assert mended(uses, Compiler(), {CLASS: {"origin": "compiled"}}) == {CLASS: None}


def test_an_entry_that_another_triton_needs_stays(uses):
    """It is replaced where it misses a gate here, also by a choice other than the heuristic's, which passes here."""
    shipped = [dataclasses.replace(use, launch=from_table(use.launch)) for use in uses]
    table = {CLASS: {"origin": "compiled", "triton": "another", "heuristic_missed": "spills there"}}
    assert mended(shipped, Compiler(), table) == {}, "it passes"
    assert mended(uses, Compiler(), table) == {CLASS: None}, "it is of other code"
    ((key, entry),) = mended(shipped, Compiler(rows=7), table).items()
    assert key == CLASS and entry["heuristic_missed"] == "spills there" and entry["triton"] == "another"
    assert (entry["meta"], entry["num_warps"]) != (heuristic().meta, heuristic().num_warps)


def test_a_measured_entry_of_other_code_waits_for_the_hardware(uses):
    """It is not what is launched."""
    assert mended(uses, Compiler(), {"rms_norm_forward(1024, 2)": {"origin": "measured"}}) == {}


def test_a_measured_entry_that_is_refused_is_taken_out(uses):
    shipped = [dataclasses.replace(use, launch=from_table(use.launch)) for use in uses]
    table = {KEY: {"origin": "measured"}}
    assert mended(shipped, Compiler(), table) == {}, "it passes"
    assert mended(shipped, Compiler(rows=7), table) == {KEY: None}, "the heuristic passes"


def from_table(launch):
    """The launch with seven rows in a program, as an entry of a table asks for."""
    if launch.constants["cols"] != 1001:
        return launch
    constants = launch.constants | {"ROWS": 7}
    return dataclasses.replace(launch, constants=constants, config=launch.config | {"source": tuning.SHIPPED})
