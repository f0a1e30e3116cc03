"""The search around heuristics: what a rating sees, and which choices it calls dominated."""

import dataclasses

import pytest

from liger_hw import tuning
from liger_lab.levels import compiled, ratings
from liger_lab.levels.assembly import Access
from liger_lab.levels.crosscompile import DEVICES, Launch, Resources
from liger_lab.levels.ratings import Rating

PERFECT = Rating(1.0, 1.0, 1.0, 1.0, 1.0, 1)


def launched(arch="sm90", warps=8, cols=4096, stages=4, programs=1, kernel="cross_entropy_forward"):
    module = f"liger_hw.kernels.{'norms.rms_norm' if kernel.startswith('rms') else 'vocabulary.cross_entropy'}.kernels"
    meta = {"COLS": cols, "STAGES": stages}
    config = {
        "meta": meta,
        "num_warps": warps,
        "num_stages": 1,
        "programs": programs,
        "source": "heuristic",
        "key": "k",
    }
    options = tuning.Config(meta, warps, device=DEVICES[arch]).options(DEVICES[arch])
    return Launch(module, kernel, arch, {}, {"cols": 32000, **meta}, {}, options, config, True, ("X",))


def found(registers=64, width=16, elements=4096, shared=0, **more):
    access = Access("k", "load", "X", elements, elements, 2, 1, {width: 1})
    return Resources(registers, 0, 0, shared, accesses=(access,), **more)


def test_enough_of_all():
    assert ratings.rate(launched(), found()) == PERFECT
    assert PERFECT.perfect and str(PERFECT) == "enough of all"


def test_a_missed_gate_is_worth_nothing():
    assert ratings.rate(launched(), "CompilationError: no") == ratings.NOTHING
    assert not ratings.rate(launched(), dataclasses.replace(found(), scratch=4)).clean


def test_narrow_accesses_count_in_part():
    assert ratings.rate(launched(), found(width=8)) == dataclasses.replace(PERFECT, width=0.5)


def test_a_kernel_whose_largest_tile_is_stored_can_be_rated():
    """A product of matrices loads tiles smaller than its result."""
    result = found()
    stored = dataclasses.replace(result.accesses[0], kind="store", elements=2 * result.accesses[0].elements)
    result = dataclasses.replace(result, accesses=(*result.accesses, stored))
    assert ratings.rate(launched(), result).width == 1


def test_registers_and_stages_decide_what_is_under_way():
    few = ratings.rate(launched(warps=16, stages=1), found(registers=128))  # one program, 8 KiB, of 29 KB
    more = ratings.rate(launched(warps=16, stages=1), found(registers=64))  # two programs
    assert few.under_way == pytest.approx(more.under_way / 2) and 0.2 < few.under_way < 0.3
    assert ratings.rate(launched(warps=16, stages=5), found(registers=128)).under_way == 1
    # registers hold what is ahead where loads do not go to shared memory, and the model counts one tile
    tile = {"registers": 250, "elements": 256}
    assert ratings.rate(launched("gfx942", 4, 256, stages=5), found(**tile)).under_way < 1


def test_a_fixed_number_of_programs_is_no_more_than_that():
    one, two = (launched(warps=4, stages=1, programs=n, kernel="rms_norm_backward") for n in (1, 2))
    assert ratings.rate(two, found()).waves == 2 * ratings.rate(one, found()).waves == 1.0


def test_dominated_is_as_good_in_all_and_clearly_better_in_one():
    short = dataclasses.replace(PERFECT, under_way=0.85)
    for this, that, wanted in [
        (PERFECT, short, True),
        (PERFECT, PERFECT, False),
        (dataclasses.replace(PERFECT, waves=0.9), short, False),  # a trade is not a win
        (dataclasses.replace(PERFECT, reads=2), short, False),  # nor is a row read twice
        (PERFECT, dataclasses.replace(PERFECT, under_way=0.95), False),  # nothing that a planning number decides
    ]:
        assert ratings.dominates([this], [that]) is wanted
    assert ratings.dominates([PERFECT, PERFECT], [PERFECT, short])
    assert not ratings.dominates([PERFECT, short], [short, PERFECT]), "a choice is one for every launch of its key"


def test_one_program_on_a_core_has_nothing_to_overlap_with():
    alone = ratings.rate(launched(warps=32, stages=1, cols=16384), found(registers=64, elements=16384))
    assert alone == dataclasses.replace(PERFECT, overlap=0.5)
    assert ratings.rate(launched(warps=32, stages=2), found(registers=64)).overlap == 0.5, "measured: it gains nothing"
    assert ratings.rate(launched(warps=32, stages=3), found(registers=64)).overlap == 1, "the next tiles are under way"
    assert ratings.rate(launched("gfx1100", warps=32, stages=3), found(registers=192)).overlap == 0.5, "in registers"


def test_one_program_that_asks_for_twice_enough_needs_no_second():
    one = launched(warps=32, stages=1, cols=32768)  # 64 KiB and 32, where an H200 wants 29 KB
    assert ratings.rate(one, found(registers=64, elements=32768)).overlap == 1
    assert ratings.rate(one, found(registers=64, elements=16384)).overlap == 0.5


def test_one_program_has_its_core_s_cache_for_a_row_that_it_reads_twice():
    once = found(registers=64)
    twice = dataclasses.replace(once, accesses=(dataclasses.replace(once.accesses[0], loops=2),))
    both = dataclasses.replace(once, accesses=(*once.accesses, dataclasses.replace(once.accesses[0], pointer="Y")))
    walked, whole = launched(warps=32, stages=1), launched(warps=32, stages=1, cols=32768)
    assert [ratings.rate(walked, of).overlap for of in (once, twice, both)] == [0.5, 1, 0.5]
    assert ratings.rate(whole, dataclasses.replace(twice, registers=64)).overlap == 0.5, "it is in registers"


def test_candidates_are_the_tuners():
    launch = launched()
    near = ratings.candidates(launch).values()
    assert {(n.config["meta"]["COLS"], n.config["num_warps"]) for n in near} >= {(2048, 4), (4096, 4), (8192, 16)}
    for n in near:
        assert n.constants["COLS"] == n.config["meta"]["COLS"] and n.options["num_warps"] == n.config["num_warps"]
        assert n.options.keys() == launch.options.keys() and n.constants["cols"] == 32000
    whole = launched(cols=32768)
    assert {n.config["meta"]["COLS"] for n in ratings.candidates(whole).values()} == {32768}, "one block stays one"


def test_the_best_neighbour_is_found():
    use = compiled.Use(launched(warps=16, stages=1), "cross_entropy", "bf16", False, "model", ["8192x32000"])
    results = {near.key: found(registers=128) for near in [use.launch, *ratings.candidates(use.launch).values()]}
    wanted = {"COLS": 4096, "STAGES": 1}, 8
    better = next(
        n for n in ratings.candidates(use.launch).values() if (n.config["meta"], n.config["num_warps"]) == wanted
    )
    results[better.key] = found(registers=64)
    (line,) = ratings.dominated([use], results)
    assert line["better"]["num_warps"] == 8 and line["better_rating"]["under_way"] > line["rating"]["under_way"]
    results[use.launch.key] = found(registers=40)
    assert ratings.dominated([dataclasses.replace(use, launch=launched())], {launched().key: found()}) == []


def test_a_neighbour_must_be_as_good_at_every_launch_of_the_key():
    few = launched(warps=16, stages=1)
    other = dataclasses.replace(few, constants=few.constants | {"ALIGNED": True})
    uses = [
        compiled.Use(of, "cross_entropy", "bf16", False, "model", [label]) for of, label in ((few, "a"), (other, "b"))
    ]
    results = {near.key: found(registers=128) for of in (few, other) for near in [of, *ratings.candidates(of).values()]}
    name = next(n for n, of in ratings.candidates(few).items() if of.options["num_warps"] == 8)
    results[ratings.candidates(few)[name].key] = found(registers=64)
    results[ratings.candidates(other)[name].key] = found(registers=64)
    (line,) = ratings.dominated(uses, results)
    assert line["better"]["num_warps"] == 8
    results |= {n.key: "does not compile" for n in ratings.candidates(other).values() if n.key != other.key}
    (line,) = ratings.dominated(uses, results)
    assert line["better"] is None


def test_what_was_measured_is_not_searched_around():
    few = launched(warps=16, stages=1)
    winner = dataclasses.replace(few, config=few.config | {"source": "shipped"})
    use = compiled.Use(winner, "cross_entropy", "bf16", False, "model", ["8192x32000"])
    assert ratings.dominated([use], {few.key: found(registers=128)}) == []
