"""The search for winners, tuning at first use, and what a configuration is."""

import math

import pytest
import torch
from made_up import H200, KEY, NEEDS_TRITON, entry, made_up, made_up_config

from liger_hw import backends, dispatch, tuning
from liger_hw._triton import triton
from liger_hw.backends import VENDORS, nvidia
from liger_hw.hooks import hooks
from liger_hw.tuning import HEURISTIC, LOCAL, Config, power_of_2, row_warps
from liger_lab.cases import model_cases, step
from liger_lab.cli.tune import Call, calls_within

pytestmark = NEEDS_TRITON


EVERY = [device for vendor in VENDORS.values() for device in vendor.ARCHS.values()]


@pytest.mark.parametrize("device", EVERY, ids=lambda d: d.arch)
def test_neighbours_are_near_and_launchable(device):
    config = Config({"ROWS": 1, "COLS": 4096, "STAGES": 3}, num_warps=device.max_warps, programs=1, device=device)
    for found in tuning.search.neighbours(config):
        assert list(found.meta) == list(config.meta) and found.device is device and found.launch_error() is None
        assert found.num_warps >= 1 and found.programs >= 1 and found.num_stages >= 1
        steps = [math.log2(found.meta[n] / config.meta[n]) for n in ("ROWS", "COLS")]
        assert sum(map(abs, steps)) + len(found.knobs) <= 1 and 1 <= found.meta["STAGES"] <= 6


@pytest.mark.parametrize("device", VENDORS["intel"].ARCHS.values(), ids=lambda d: d.arch)
def test_what_intels_compiler_refuses_never_leaves_the_tuner(device):
    """From every corner of the space, as `validate_options` and `make_spv` of its backend have it."""
    for num_warps in (1, 8, 16, 32):
        for knobs in ({}, {"grf_mode": "256"}, {"warp_size": 16}, {"warp_size": 16, "grf_mode": "256"}):
            config = Config({"ROWS": 1}, num_warps=num_warps, knobs=knobs, device=device)
            for found in tuning.search.neighbours(config):
                options = found.options(device)
                assert options["warp_size"] in device.warp_sizes
                assert options["warp_size"] * options["num_warps"] <= 1024
                assert options["grf_mode"] in ("default", "128", "256", "auto")
                assert options["grf_mode"] != "256" or options["num_warps"] <= 32
    far = tuning.search.neighbours(Config({"ROWS": 1}, num_warps=8, device=device))
    assert {"256", "128", "auto"} <= {found.knobs.get("grf_mode") for found in far}


@pytest.mark.parametrize("device", EVERY, ids=lambda d: f"{d.vendor}-{d.arch}")
def test_no_heuristic_is_refused(device, monkeypatch):
    """At every shape of a model, on every GPU: its compiler knows every option, and takes every value."""
    meta = torch.device("meta")
    monkeypatch.setitem(backends._devices, meta, device)
    seen = {}
    for case in model_cases():
        op = dispatch.OPS[case.op]
        inputs = case.make(meta, torch.bfloat16)
        serving = op.implementations[op.choose(meta)]
        for config, shape, where in tuning.search.configurations_of(lambda: step(serving, inputs, case.options)):  # noqa: B023
            seen[config.key(*shape)] = config.heuristic(*shape, where)
    known = {"num_warps", "num_stages", "enable_fp_fusion", *backends.knobs(device)}
    assert len(seen) > 30
    for key, config in seen.items():
        assert config.launch_error() is None, key
        assert config.options(device).keys() <= known, key
        tuning.entries.launchable(config.to_json() | {"triton": "3.6.0"}, config, LOCAL)  # as an entry of a table
        if device.vendor == "intel":  # one tile in half the registers: no compiler is here to say that it spills
            # a matrix product keeps its sums alone; a group of streams is no part of a tile, a vector is one of COLS
            others = ("STAGES", "DEPTH", "BAND", "GROUP", "VECTOR")
            tile = math.prod(size for name, size in config.meta.items() if name not in others)
            assert tile <= config.num_warps * device.warp_size * device.registers // 2, key


def test_knobs_in_a_table(caplog):
    """An option of the compiler is kept with a winner, and no other compiler ever sees it."""
    bmg = VENDORS["intel"].ARCHS["bmg"]
    tuned_for = Config({"ROWS": 4, "COLS": 512}, num_warps=8, knobs={"grf_mode": "256"}, device=bmg)
    tuning.search.record(
        tuning.entries.cache_file(bmg), {KEY: tuning.search.measured_entry(made_up_config, tuned_for, 1e-3, 2e-3)}
    )
    found = made_up_config(1024, 2, bmg)
    assert found.source == LOCAL and found.options(bmg)["grf_mode"] == "256"
    assert "grf_mode" not in found.options(H200)
    poison = tuning.entries.read_table(tuning.entries.cache_file(bmg))[KEY]
    for knobs in ({"grf_mode": "large"}, {"maxnreg": 64}, {"warp_size": 8}, ["grf_mode"], {"grf_mode": ["256"]}, 3):
        tuning.entries.warn_once.cache_clear()
        caplog.clear()
        tuning.search.record(tuning.entries.cache_file(bmg), {KEY: poison | {"knobs": knobs}})
        assert made_up_config(1024, 2, bmg).source == HEURISTIC, knobs
        assert len(caplog.records) == 1


class Bench:
    """A stand-in for the clock: `cost(config)` of whatever configuration the function looks up."""

    def __init__(self, monkeypatch, cost):
        self.cost, self.tried = cost, 0
        monkeypatch.setattr(tuning.search, "bench", self)

    def function(self):
        self.config = made_up_config(1024, 2, H200)

    def __call__(self, function):
        function()
        self.tried += 1
        return self.cost(self.config)


def distance(**best):
    """A cost that grows with every doubling away from `best`."""

    def cost(config):
        numbers = config.meta | {"num_warps": config.num_warps}
        return 1e-3 * (1 + sum(abs(math.log2(numbers[name] / value)) for name, value in best.items()))

    return cost


def test_the_search_walks_to_the_best_and_uses_it(monkeypatch):
    bench = Bench(monkeypatch, distance(ROWS=1, COLS=4096, num_warps=16))
    seen = []
    report = tuning.search.tune(bench.function, progress=lambda key, tried, best: seen.append((key, tried, best)))
    found = report[KEY]
    assert (found["meta"], found["num_warps"]) == ({"ROWS": 1, "COLS": 4096}, 16)
    assert (found["ms"], found["heuristic_ms"]) == (1.0, 6.0)
    assert found["kernel"] == tuning.entries.kernel_hash(made_up) and found["triton"] == triton.__version__
    assert found["candidates"] == seen[-1][1] < 60 and seen[-1][2].num_warps == 16
    chosen = made_up_config(1024, 2, H200)
    assert (chosen.source, chosen.num_warps) == (LOCAL, 16)


def test_a_heuristic_that_is_best_is_not_recorded(monkeypatch):
    bench = Bench(monkeypatch, distance(ROWS=2, COLS=1024, num_warps=4))
    report = tuning.search.tune(bench.function)
    assert report == {KEY: {"ms": 1.0, "heuristic_ms": 1.0, "candidates": report[KEY]["candidates"]}}
    assert not tuning.entries.cache_file(H200).exists()


def test_a_gain_within_the_margin_is_not_recorded(monkeypatch):
    bench = Bench(monkeypatch, lambda config: 0.98 if config.num_warps == 8 else 1.0)
    assert "meta" not in tuning.search.tune(bench.function)[KEY]


def test_a_winner_that_was_luck_is_not_recorded(monkeypatch):
    """A candidate measured fast once must be fast again, beside the heuristic."""
    lucky = {}

    def cost(config):
        first = lucky.setdefault(config.num_warps, True)
        lucky[config.num_warps] = False
        return 0.5 if first and config.num_warps == 8 else 1.0

    assert "meta" not in tuning.search.tune(Bench(monkeypatch, cost).function)[KEY]


def test_a_winner_of_old_gives_way_to_the_heuristic(monkeypatch):
    tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry(), "other": {}})
    tuning.search.tune(Bench(monkeypatch, distance(ROWS=2, COLS=1024, num_warps=4)).function)
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert list(tuning.entries.read_table(tuning.entries.cache_file(H200))) == ["other"]


def test_candidates_that_cannot_run_do_not_end_the_search(monkeypatch):
    def cost(config):
        if config.num_warps > 4:
            raise RuntimeError("out of resources")
        return distance(num_warps=1)(config)

    assert tuning.search.tune(Bench(monkeypatch, cost).function)[KEY]["num_warps"] == 1


def test_an_interrupted_search_keeps_what_it_found(monkeypatch):
    bench = Bench(monkeypatch, distance(num_warps=16))

    def function():
        bench.function()
        made_up_config(2048, 2, H200)

    def progress(key, tried, best):
        if "2048" in key and tried > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.search.tune(function, progress=progress)
    assert list(tuning.entries.read_table(tuning.entries.cache_file(H200))) == [KEY]
    assert made_up_config(2048, 2, H200).source == HEURISTIC  # no candidate is left behind


def test_a_table_of_ones_own(monkeypatch, tmp_path):
    bench = Bench(monkeypatch, distance(num_warps=16))
    assert tuning.search.tune(bench.function, tmp_path / "mine.json", only={"another"}) == {}
    tuning.search.tune(bench.function, tmp_path / "mine.json")
    assert (
        list(tuning.entries.read_table(tmp_path / "mine.json")) == [KEY]
        and not tuning.entries.cache_file(H200).exists()
    )


class Computing(Bench):
    """A function of a tensor whose results depend on the configuration, as those of a miscompiled kernel do."""

    def __init__(self, monkeypatch, cost, result, written=()):
        super().__init__(monkeypatch, cost)
        self.result, self.written = result, written
        self.function = Call(self.launches, (torch.ones(3), *written), not written)

    def launches(self, x, *written):
        self.config = made_up_config(1024, 2, H200)
        return self.result(self.config, x, *written)


WRONG = [
    lambda x: x * 1.01,
    lambda x: torch.tensor([1.0, 1.0, 0.0]),
    lambda x: torch.tensor([1.0, torch.nan, 1.0]),
    lambda x: x[:2],
    lambda x: x.half(),
    lambda x: (x, x),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_fast_candidate_with_other_results_does_not_win(wrong, monkeypatch, caplog):
    bench = Computing(
        monkeypatch, distance(num_warps=16), lambda config, x: wrong(x) if config.num_warps == 16 else x.clone()
    )
    assert tuning.search.tune(bench.function)[KEY]["num_warps"] == 8
    assert caplog.records
    for record in caplog.records:
        assert record.message.startswith(f"{KEY} computes other results with {{'meta': ")


def test_sums_in_another_order_win(monkeypatch, caplog):
    bench = Computing(monkeypatch, distance(num_warps=16), lambda config, x: x * (1 + 1e-6 * config.num_warps))
    assert tuning.search.tune(bench.function)[KEY]["num_warps"] == 16 and not caplog.records


@pytest.mark.parametrize("wrong", [False, True])
def test_what_a_candidate_writes_is_its_result(wrong, monkeypatch):
    """Each candidate gets the tensors as they were before the search, which writes to them many times."""

    def add(config, x, total):
        total += x * (2 if wrong and config.num_warps == 16 else 1)

    bench = Computing(monkeypatch, distance(num_warps=16), add, [torch.zeros(3)])
    assert tuning.search.tune(bench.function)[KEY]["num_warps"] == (8 if wrong else 16)


def test_infinities_and_integers_are_compared():
    equal = tuning.search._equal_but_for_roundings
    infinite = torch.tensor([1.0, torch.inf, torch.nan])
    assert equal([infinite], [infinite.clone()])
    for other in ([1.0, -torch.inf, torch.nan], [1.0, torch.inf, 0.0], [1.0, 1.0, torch.nan], [torch.nan] * 3):
        assert not equal([torch.tensor(other)], [infinite])
    assert equal([torch.arange(3)], [torch.arange(3)]) and not equal([torch.arange(3)], [torch.tensor([0, 1, 3])])
    assert equal([torch.empty(0)], [torch.empty(0)])


def on_a_gpu(monkeypatch):
    """A tensor that says it is on the first GPU, which is an H200."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setitem(backends._devices, gpu, H200)
    return type("OnGPU", (), {"device": gpu})()


def test_tuning_at_first_use(monkeypatch):
    tensor, bench = on_a_gpu(monkeypatch), Bench(monkeypatch, distance(num_warps=16))

    def launches(x):
        bench.function()
        return bench.config.num_warps

    assert tuning.search._call_and_tune(launches, (tensor,), repeatable=False) == 4 and bench.tried == 0
    assert tuning.search._call_and_tune(launches, (tensor,), repeatable=True) == 4 and bench.tried > 0
    tried = bench.tried
    assert tuning.search._call_and_tune(launches, (tensor,), repeatable=True) == 16 and bench.tried == tried


def test_no_tuning_for_a_device_that_is_not_here(monkeypatch):
    """With another vendor forced, times on this one would go into the other's table."""
    tensor, bench = on_a_gpu(monkeypatch), Bench(monkeypatch, distance(num_warps=16))
    monkeypatch.setitem(backends._devices, tensor.device, nvidia.ARCHS["sm80"])
    tuning.search._call_and_tune(lambda x: bench.function(), (tensor,), repeatable=True)
    assert bench.tried == 0


@pytest.mark.parametrize("value, asked", [("", False), ("0", False), ("1", True)])
def test_whether_the_environment_asks_for_tuning(monkeypatch, value, asked):
    monkeypatch.setenv("LIGER_HW_AUTOTUNE", value)
    assert tuning.search.autotuning() is asked


def test_no_other_word_in_the_environment_is_taken_for_an_answer(monkeypatch):
    monkeypatch.setenv("LIGER_HW_AUTOTUNE", "yes")
    with hooks.observe(tuning.search._first_call):
        for _ in range(2):  # not at the first launch alone
            with pytest.raises(ValueError, match="LIGER_HW_AUTOTUNE='yes': 1 searches"):
                hooks.observer(lambda x: x, (torch.ones(3),), False)


def test_the_observer_sees_every_launch(monkeypatch):
    before = hooks.observer
    made = []

    @dispatch.raw(lambda x: torch.empty_like(x))
    def _observed(x: torch.Tensor) -> torch.Tensor:
        made.append(x)
        return x + 1

    calls = calls_within(lambda: _observed(torch.ones(3)))
    assert len(calls) == 1 and len(made) == 1 and hooks.observer is before
    assert torch.equal(calls[0](), torch.full((3,), 2.0)) and len(made) == 2


def test_what_is_repeated_needs_no_gradients():
    """Products into memory that is there (the loss's chunks of logits) refuse inputs that want some."""

    @dispatch.raw(lambda x: torch.empty_like(x))
    def _product(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, x, out=torch.empty_like(x))

    x = torch.eye(3, requires_grad=True)
    with torch.no_grad():
        (call,) = calls_within(lambda: _product(x))
    assert torch.equal(call(), torch.eye(3))


def test_arithmetic():
    assert [power_of_2(n) for n in (0, 1, 2, 3, 1000, 1024)] == [1, 1, 2, 4, 1024, 1024]
    assert row_warps(4096, H200) == 16 and row_warps(64, H200) == 1 and row_warps(2**20, H200) == 32
    assert row_warps(2**20, VENDORS["amd"].ARCHS["gfx942"]) == 16
    config = Config({}, programs=2, device=H200)
    assert [config.grid_for(n) for n in (0, 1, 264, 10**6)] == [1, 1, 264, 264]


def test_launch_options_are_for_the_compiler_that_is_here():
    config = Config({}, num_warps=8, device=VENDORS["intel"].ARCHS["pvc"])
    assert config.options(VENDORS["intel"].ARCHS["bmg"])["grf_mode"] == "default"
    assert config.options(H200) == {"num_warps": 8, "num_stages": 1, "enable_fp_fusion": True}
