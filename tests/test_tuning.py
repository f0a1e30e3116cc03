import contextlib
import dataclasses
import json
import linecache
import logging
import math
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import filelock
import pytest
import torch

from liger_hw import backends, dispatch, launch, shapes, tuning
from liger_hw._triton import AVAILABLE, tl, triton
from liger_hw.backends import VENDORS, nvidia
from liger_hw.kernels import glu, load_all
from liger_hw.tuning import HEURISTIC, LOCAL, SHIPPED, Config, power_of_2, row_warps, tuned

pytestmark = pytest.mark.skipif(
    not AVAILABLE, reason="tables hold only for a version of Triton, and there is none here"
)
H200 = nvidia.ARCHS["sm90"]
FACTOR = 3
load_all()


@triton.jit
def _twice(x):
    return FACTOR * x


@triton.jit
def made_up(X, rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    at = tl.arange(0, COLS)
    tl.store(X + at, _twice(tl.load(X + at)))


@tuned
def made_up_config(cols, itemsize, device):
    return Config({"ROWS": 2, "COLS": cols}, num_warps=4, programs=2)


del tuning.CONFIGS["made_up"]  # it is there for the tests below alone


@pytest.fixture(autouse=True)
def tables(monkeypatch, tmp_path):
    """Empty folders for local and shipped tables, and nothing remembered."""
    monkeypatch.setitem(tuning.CONFIGS, "made_up", made_up_config)
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path / "local"))
    monkeypatch.setattr(tuning, "shipped_file", lambda device: tmp_path / "shipped.json")
    monkeypatch.setattr(tuning, "_tried", set())
    tuning.forget()
    tuning.warn_once.cache_clear()
    yield tmp_path
    tuning.forget()


def entry(**changes):
    found = Config({"ROWS": 4, "COLS": 512}, num_warps=8, device=H200)
    return tuning.entry_for(made_up_config, (1024, 2), found, 1e-3, 2e-3) | changes


KEY = made_up_config.key(1024, 2)


def ship(table):
    tuning.shipped_file(H200).write_text(json.dumps(table))
    tuning.forget()


def test_the_key_is_readable():
    assert KEY == "made_up(1024, 2)"


def test_local_before_shipped_before_heuristic():
    found = made_up_config(1024, 2, H200)
    assert (found.source, found.meta, found.device) == (HEURISTIC, {"ROWS": 2, "COLS": 1024}, H200)
    ship({KEY: entry()})
    found = made_up_config(1024, 2, H200)
    assert (found.source, found.meta, found.num_warps) == (SHIPPED, {"ROWS": 4, "COLS": 512}, 8)
    tuning.record(tuning.cache_file(H200), {KEY: entry(num_warps=16)})
    found = made_up_config(1024, 2, H200)
    assert (found.source, found.num_warps) == (LOCAL, 16)
    assert made_up_config(2048, 2, H200).source == HEURISTIC


def test_the_same_value_every_time():
    """Launches are remembered by it."""
    assert made_up_config(1024, 2, H200) is made_up_config(1024, 2, H200)


def test_a_recorded_winner_serves_this_very_process():
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    tuning.record(tuning.cache_file(H200), {KEY: entry()})
    assert made_up_config(1024, 2, H200).source == LOCAL


def test_other_architectures_have_other_tables():
    tuning.record(tuning.cache_file(H200), {KEY: entry()})
    assert made_up_config(1024, 2, nvidia.ARCHS["sm80"]).source == HEURISTIC
    assert tuning.cache_file(H200).name == "nvidia-sm90.json"


@pytest.mark.parametrize("stale", [{"kernel": "0123456789abcdef"}, {"triton": "3.0.0"}], ids=["kernel", "triton"])
def test_stale_winners_are_ignored_without_a_word(stale, caplog):
    tuning.record(tuning.cache_file(H200), {KEY: entry(**stale)})
    ship({KEY: entry()})
    assert made_up_config(1024, 2, H200).source == SHIPPED
    assert not caplog.records


def hash_of(source, constants):
    """The hash of `kernel` in a module of this source."""
    space = {"triton": triton, "tl": tl, "__name__": "made_up_module", **constants}
    file = f"<made up {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), space)
    return tuning.kernel_hash(space["kernel"])


SOURCE = """
@triton.jit
def helper(x):
    return x * SCALE

@triton.jit
def kernel(X, COLS: tl.constexpr):
    tl.store(X, helper(tl.load(X)))
"""


def test_the_kernel_hash():
    def changed(before, after, scale=2):
        assert before in SOURCE
        return hash_of(SOURCE.replace(before, after), {"SCALE": scale})

    same = hash_of(SOURCE, {"SCALE": 2})
    assert same == changed("    tl.store", "    # why\n\n    tl.store")
    assert same == changed("(X, helper(tl.load(X)))", "(\n        X, helper(tl.load(X)),\n    )")
    assert same != changed("x * SCALE", "x + SCALE")  # in a function it calls
    assert same != changed("tl.load(X)", "tl.load(X + 1)")
    assert same != changed("X", "X", scale=3)


def test_every_configuration_belongs_to_a_kernel():
    for name, config in tuning.CONFIGS.items():
        assert config.kernel().__name__ == name
        assert len(tuning.kernel_hash(config.kernel())) == 16


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "NaN", "\x00\xff", '{"made_up(1024, 2)": 3}', '{"made_up(1024, 2)": {}}', "[" * 9999],
    ids=lambda text: text[:20] or "empty",
)
def test_a_corrupt_table_costs_one_warning(text, caplog):
    file = tuning.cache_file(H200)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    ship({KEY: entry()})
    for _ in range(3):
        tuning.forget()
        assert made_up_config(1024, 2, H200).source == SHIPPED
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING


def test_a_table_that_is_no_text(caplog):
    file = tuning.cache_file(H200)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe\x00")
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len(caplog.records) == 1 and str(file) in caplog.text


def test_recording_replaces_a_corrupt_table():
    file = tuning.cache_file(H200)
    file.parent.mkdir(parents=True)
    file.write_text("{")
    tuning.record(file, {KEY: entry()})
    assert made_up_config(1024, 2, H200).source == LOCAL


@pytest.mark.parametrize(
    "poison",
    [
        {"meta": {"ROWS": 4}}, {"meta": {"ROWS": 4, "COLS": 512, "X": 1}},
        {"meta": {"ROWS": 4, "COLS": 500}}, {"meta": {"ROWS": 0, "COLS": 512}}, {"meta": {"ROWS": -4, "COLS": 512}},
        {"meta": {"ROWS": "4", "COLS": 512}}, {"meta": {"ROWS": True, "COLS": 512}}, {"meta": [4, 512]}, {"meta": None},
        {"meta": {"ROWS": 4.0, "COLS": 512}}, {"meta": {"ROWS": 2**16, "COLS": 2**16}},
        {"meta": {"ROWS": 1, "COLS": 2**40}},
        {"num_warps": 64}, {"num_warps": 3}, {"num_warps": 0}, {"num_warps": "8"}, {"num_warps": None},
        {"num_stages": 0}, {"num_stages": 1.5}, {"programs": 0}, {"programs": -1}, {"programs": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_poisoned_winner_costs_one_warning(poison, caplog):
    ship({KEY: entry(**poison)})
    for _ in range(3):
        tuning.forget()
        assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len(caplog.records) == 1 and "malformed" in caplog.text


@pytest.mark.parametrize("missing", ["meta", "num_warps", "num_stages", "programs", "kernel", "triton"])
def test_a_winner_with_a_part_missing(missing, caplog):
    ship({KEY: {name: value for name, value in entry().items() if name != missing}})
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written_costs_one_warning(tables, caplog):
    (tables / "local").write_text("a file where the folder should be")
    for _ in range(2):
        tuning.record(tuning.cache_file(H200), {KEY: entry()})
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len([r for r in caplog.records if "could not be written" in r.message]) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_full_disk_costs_one_warning_and_no_table(error, monkeypatch, caplog):
    file = tuning.cache_file(H200)
    tuning.record(file, {KEY: entry()})

    def fail(self, text):
        Path.write_bytes(self, text[:20].encode())
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        tuning.record(file, {KEY: entry(num_warps=16)})
    assert len(caplog.records) == 1 and error.strerror in caplog.text
    assert made_up_config(1024, 2, H200).num_warps == 8  # the old table is whole
    assert [path.name for path in file.parent.iterdir() if path.suffix == ".part"] == []


def _record_many(folder, first):
    for i in range(first, first + 25):
        tuning.record(Path(folder) / "table.json", {f"key {i}": {"n": i}})
    tuning.CONFIGS["made_up"] = made_up_config
    tuning.bench = lambda function: 1e-3 / made_up_config(1024 + first, 2, H200).num_warps * (function() or 1)
    tuning.tune(lambda: made_up_config(1024 + first, 2, H200) and None, Path(folder) / "tuned.json")


def test_processes_that_record_and_tune_at_once_lose_nothing(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_record_many, args=(str(tmp_path), first)) for first in (0, 25)]
    for worker in workers:
        worker.start()
    seen = 0
    while any(worker.is_alive() for worker in workers):
        table = tuning.read_table(tmp_path / "table.json")  # whole at every moment
        assert len(table) >= seen
        seen = len(table)
        time.sleep(0.005)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert tuning.read_table(tmp_path / "table.json") == {f"key {i}": {"n": i} for i in range(50)}
    found = tuning.read_table(tmp_path / "tuned.json")
    assert {key: entry["num_warps"] for key, entry in found.items()} == {
        "made_up(1024, 2)": 32, "made_up(1049, 2)": 32,
    }  # fmt: skip


KILLED = """
import os, pathlib, signal, sys
from liger_hw import tuning
def die(self, target):
    print(self.name, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
pathlib.Path.replace = die
tuning.record(pathlib.Path(sys.argv[1]), {"mine": {"n": 1}})
"""


def test_a_killed_tuner_leaves_the_table_and_no_lock(tmp_path):
    file = tmp_path / "table.json"
    tuning.record(file, {"before": {"n": 0}})
    killed = subprocess.run([sys.executable, "-c", KILLED, str(file)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / killed.stdout.strip()).exists()  # it died with the new table written and the lock held
    assert tuning.read_table(file) == {"before": {"n": 0}}
    start = time.perf_counter()
    tuning.record(file, {"after": {"n": 2}})
    assert time.perf_counter() - start < 30  # a lock that is still held is waited for a minute
    assert tuning.read_table(file) == {"before": {"n": 0}, "after": {"n": 2}}


def test_a_file_system_without_locks_costs_one_warning(monkeypatch, caplog):
    def fail(self, *args, **kwargs):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    for _ in range(2):
        tuning.record(tuning.cache_file(H200), {KEY: entry()})
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len(caplog.records) == 1 and "does not appear to support flock" in caplog.text


def test_a_folder_where_the_table_should_be_costs_one_warning(caplog):
    tuning.cache_file(H200).mkdir(parents=True)
    for _ in range(2):
        tuning.forget()
        assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len(caplog.records) == 1


def test_a_user_without_a_home(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LIGER_HW_CACHE_DIR")
    monkeypatch.setattr(Path, "home", nobody)
    assert made_up_config(1024, 2, H200).source == HEURISTIC


# winners that look right and cannot be launched ----------------------------------------------------------------------


class Compiler:
    """A stand-in for a kernel and its compiler, which builds it with 4 warps and nothing else."""

    params = [SimpleNamespace(name="X", is_constexpr=False)]

    def __init__(self):
        self.asked = []

    def __getitem__(self, grid):
        def launch(x, *meta, num_warps, **options):
            self.asked.append(num_warps)
            if num_warps != 4:
                raise triton.runtime.errors.OutOfResources(10**6, 232448, "shared memory")
            x += 1
            return SimpleNamespace(run=None, function=None, packed_metadata=None)

        return launch


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch._triton, "load", lambda: None)
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(tuning, "_refused", set())
    return Compiler()


@pytest.mark.parametrize("mutates", [[], ["x"]], ids=["out", "in place"])
@pytest.mark.parametrize("path", ["eager", "observed", "registered"])
def test_a_winner_that_cannot_be_launched_costs_one_warning(mutates, path, compiler, monkeypatch, caplog):
    def _launches(x: torch.Tensor) -> torch.Tensor:
        y = x if mutates else x.clone()
        launch.launch(compiler, (1, 1, 1), made_up_config(1024, 2, H200), y)
        return y.clone()

    _launches.__name__ = f"launches_{path}_{len(mutates)}"
    by_call = dispatch.raw(lambda x: torch.empty_like(x), mutates)(_launches)
    monkeypatch.setattr(tuning, "observer", (lambda f, args, again: f(*args)) if path == "observed" else None)
    function = by_call.opaque if path == "registered" else by_call
    tuning.record(tuning.cache_file(H200), {KEY: entry()})
    ship({KEY: entry(num_warps=16)})
    assert made_up_config(1024, 2, H200).num_warps == 8
    x = torch.ones(3)
    assert torch.equal(function(x), torch.full((3,), 2.0))
    assert compiler.asked == [8, 16, 4]  # this machine's, the shipped one, the heuristic
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    tuning.forget()
    assert made_up_config(1024, 2, H200).source == HEURISTIC  # not again, whoever tunes in this process
    assert len(caplog.records) == 2 and all("cannot be launched here" in r.message for r in caplog.records)


def test_a_heuristic_that_cannot_be_launched_is_an_error(compiler):
    config = dataclasses.replace(made_up_config(1024, 2, H200), num_warps=8)
    with pytest.raises(triton.runtime.errors.OutOfResources):
        launch.launch(compiler, (1, 1, 1), config, torch.ones(3))


def test_what_writes_to_its_arguments_launches_one_kernel(monkeypatch):
    """So that it may run again after a launch that was refused."""
    meta = torch.device("meta")
    monkeypatch.setitem(backends._devices, meta, H200)
    monkeypatch.setattr(backends, "_forced", None)
    launched, counts = [], {}
    monkeypatch.setattr(launch, "_first_launch", lambda *args: launched.append(1))
    monkeypatch.setattr(glu, "_disjoint", lambda a, b: True)  # all tensors without data are at address 0

    def observer(launches, args, repeatable):
        before = len(launched)
        result = launches(*args)
        if not repeatable:
            counts.setdefault(launches.__wrapped__.__name__, set()).add(len(launched) - before)
        return result

    monkeypatch.setattr(tuning, "observer", observer)
    for case in shapes.cases(further=True):
        op = dispatch.OPS[case.op]
        inputs = [x.clone() for x in case.make(meta, torch.bfloat16)]  # what is written over may not be a leaf
        shapes.step(op.implementations[op.choose(meta)], inputs, case.options)
    assert len(counts) >= 4 and set.union(*counts.values()) <= {0, 1}, counts


EVERY = [device for vendor in VENDORS.values() for device in vendor.ARCHS.values()]


@pytest.mark.parametrize("device", EVERY, ids=lambda d: d.arch)
def test_neighbours_are_near_and_launchable(device):
    config = Config({"ROWS": 1, "COLS": 4096, "STAGES": 3}, num_warps=device.max_warps, programs=1, device=device)
    for found in tuning.neighbours(config):
        assert list(found.meta) == list(config.meta) and found.device is device and found.refusal() is None
        assert found.num_warps >= 1 and found.programs >= 1 and found.num_stages >= 1
        steps = [math.log2(found.meta[n] / config.meta[n]) for n in ("ROWS", "COLS")]
        assert sum(map(abs, steps)) + len(found.knobs) <= 1 and 1 <= found.meta["STAGES"] <= 6


@pytest.mark.parametrize("device", VENDORS["intel"].ARCHS.values(), ids=lambda d: d.arch)
def test_what_intels_compiler_refuses_never_leaves_the_tuner(device):
    """From every corner of the space, as `validate_options` and `make_spv` of its backend have it."""
    for num_warps in (1, 8, 16, 32):
        for knobs in ({}, {"grf_mode": "256"}, {"warp_size": 16}, {"warp_size": 16, "grf_mode": "256"}):
            config = Config({"ROWS": 1}, num_warps=num_warps, knobs=knobs, device=device)
            for found in tuning.neighbours(config):
                options = found.options(device)
                assert options["warp_size"] in device.warp_sizes
                assert options["warp_size"] * options["num_warps"] <= 1024
                assert options["grf_mode"] in ("default", "128", "256", "auto")
                assert options["grf_mode"] != "256" or options["num_warps"] <= 32
    far = tuning.neighbours(Config({"ROWS": 1}, num_warps=8, device=device))
    assert {"256", "128", "auto"} <= {found.knobs.get("grf_mode") for found in far}


@pytest.mark.parametrize("device", EVERY, ids=lambda d: f"{d.vendor}-{d.arch}")
def test_no_heuristic_is_refused(device, monkeypatch):
    """At every shape of a model, on every GPU: its compiler knows every option, and takes every value."""
    meta = torch.device("meta")
    monkeypatch.setitem(backends._devices, meta, device)
    monkeypatch.setattr(backends, "_forced", None)
    seen = {}
    for case in shapes.cases():
        op = dispatch.OPS[case.op]
        inputs = case.make(meta, torch.bfloat16)
        serving = op.implementations[op.choose(meta)]
        for config, shape, where in tuning.configurations_of(lambda: shapes.step(serving, inputs, case.options)):  # noqa: B023
            seen[config.key(*shape)] = config.heuristic(*shape, where)
    known = {"num_warps", "num_stages", "enable_fp_fusion", *backends.knobs(device)}
    assert len(seen) > 30
    for key, config in seen.items():
        assert config.refusal() is None, key
        assert config.options(device).keys() <= known, key
        if device.vendor == "intel":  # one tile in half the registers: no compiler is here to say that it spills
            tile = math.prod(size for name, size in config.meta.items() if name != "STAGES")
            assert tile <= config.num_warps * device.warp_size * device.registers // 2, key


def test_knobs_in_a_table(caplog):
    """An option of the compiler is kept with a winner, and no other compiler ever sees it."""
    bmg = VENDORS["intel"].ARCHS["bmg"]
    tuned_for = Config({"ROWS": 4, "COLS": 512}, num_warps=8, knobs={"grf_mode": "256"}, device=bmg)
    tuning.record(tuning.cache_file(bmg), {KEY: tuning.entry_for(made_up_config, (1024, 2), tuned_for, 1e-3, 2e-3)})
    found = made_up_config(1024, 2, bmg)
    assert found.source == LOCAL and found.options(bmg)["grf_mode"] == "256"
    assert "grf_mode" not in found.options(H200)
    poison = tuning.read_table(tuning.cache_file(bmg))[KEY]
    for knobs in ({"grf_mode": "large"}, {"maxnreg": 64}, {"warp_size": 8}, ["grf_mode"], {"grf_mode": ["256"]}, 3):
        tuning.warn_once.cache_clear()
        caplog.clear()
        tuning.record(tuning.cache_file(bmg), {KEY: poison | {"knobs": knobs}})
        assert made_up_config(1024, 2, bmg).source == HEURISTIC, knobs
        assert len(caplog.records) == 1


class Bench:
    """A stand-in for the clock: `cost(config)` of whatever configuration the function looks up."""

    def __init__(self, monkeypatch, cost):
        self.cost, self.tried = cost, 0
        monkeypatch.setattr(tuning, "bench", self)

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
    report = tuning.tune(bench.function, progress=lambda key, tried, best: seen.append((key, tried, best)))
    found = report[KEY]
    assert (found["meta"], found["num_warps"]) == ({"ROWS": 1, "COLS": 4096}, 16)
    assert (found["ms"], found["heuristic_ms"]) == (1.0, 6.0)
    assert found["kernel"] == tuning.kernel_hash(made_up) and found["triton"] == triton.__version__
    assert found["candidates"] == seen[-1][1] < 60 and seen[-1][2].num_warps == 16
    chosen = made_up_config(1024, 2, H200)
    assert (chosen.source, chosen.num_warps) == (LOCAL, 16)


def test_a_heuristic_that_is_best_is_not_recorded(monkeypatch):
    bench = Bench(monkeypatch, distance(ROWS=2, COLS=1024, num_warps=4))
    report = tuning.tune(bench.function)
    assert report == {KEY: {"ms": 1.0, "heuristic_ms": 1.0, "candidates": report[KEY]["candidates"]}}
    assert not tuning.cache_file(H200).exists()


def test_a_gain_within_the_margin_is_not_recorded(monkeypatch):
    bench = Bench(monkeypatch, lambda config: 0.98 if config.num_warps == 8 else 1.0)
    assert "meta" not in tuning.tune(bench.function)[KEY]


def test_a_winner_that_was_luck_is_not_recorded(monkeypatch):
    """A candidate measured fast once must be fast again, beside the heuristic."""
    lucky = {}

    def cost(config):
        first = lucky.setdefault(config.num_warps, True)
        lucky[config.num_warps] = False
        return 0.5 if first and config.num_warps == 8 else 1.0

    assert "meta" not in tuning.tune(Bench(monkeypatch, cost).function)[KEY]


def test_a_winner_of_old_gives_way_to_the_heuristic(monkeypatch):
    tuning.record(tuning.cache_file(H200), {KEY: entry(), "other": {}})
    tuning.tune(Bench(monkeypatch, distance(ROWS=2, COLS=1024, num_warps=4)).function)
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert list(tuning.read_table(tuning.cache_file(H200))) == ["other"]


def test_candidates_that_cannot_run_do_not_end_the_search(monkeypatch):
    def cost(config):
        if config.num_warps > 4:
            raise RuntimeError("out of resources")
        return distance(num_warps=1)(config)

    assert tuning.tune(Bench(monkeypatch, cost).function)[KEY]["num_warps"] == 1


def test_an_interrupted_search_keeps_what_it_found(monkeypatch):
    bench = Bench(monkeypatch, distance(num_warps=16))

    def function():
        bench.function()
        made_up_config(2048, 2, H200)

    def progress(key, tried, best):
        if "2048" in key and tried > 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.tune(function, progress=progress)
    assert list(tuning.read_table(tuning.cache_file(H200))) == [KEY]
    assert made_up_config(2048, 2, H200).source == HEURISTIC  # no candidate is left behind


def test_a_table_of_ones_own(monkeypatch, tmp_path):
    bench = Bench(monkeypatch, distance(num_warps=16))
    assert tuning.tune(bench.function, tmp_path / "mine.json", only={"another"}) == {}
    tuning.tune(bench.function, tmp_path / "mine.json")
    assert list(tuning.read_table(tmp_path / "mine.json")) == [KEY] and not tuning.cache_file(H200).exists()


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

    assert tuning._call_and_tune(launches, (tensor,), repeatable=False) == 4 and bench.tried == 0
    assert tuning._call_and_tune(launches, (tensor,), repeatable=True) == 4 and bench.tried > 0
    tried = bench.tried
    assert tuning._call_and_tune(launches, (tensor,), repeatable=True) == 16 and bench.tried == tried


def test_no_tuning_for_a_device_that_is_not_here(monkeypatch):
    """With another vendor forced, times on this one would go into the other's table."""
    tensor, bench = on_a_gpu(monkeypatch), Bench(monkeypatch, distance(num_warps=16))
    monkeypatch.setitem(backends._devices, tensor.device, nvidia.ARCHS["sm80"])
    tuning._call_and_tune(lambda x: bench.function(), (tensor,), repeatable=True)
    assert bench.tried == 0


def test_the_observer_sees_every_launch(monkeypatch):
    before = tuning.observer
    made = []

    @dispatch.raw(lambda x: torch.empty_like(x))
    def _observed(x: torch.Tensor) -> torch.Tensor:
        made.append(x)
        return x + 1

    calls = tuning.calls_within(lambda: _observed(torch.ones(3)))
    assert len(calls) == 1 and len(made) == 1 and tuning.observer is before
    assert torch.equal(calls[0](), torch.full((3,), 2.0)) and len(made) == 2


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
