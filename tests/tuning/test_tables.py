"""Which configuration a launch gets, and what a table may do to it."""

import linecache
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import filelock
import pytest
from made_up import H200, KEY, NEEDS_TRITON, entry, made_up_config, ship

from liger_hw import tuning
from liger_hw._triton import tl, triton
from liger_hw.backends import nvidia
from liger_hw.tuning import COMPILED, HEURISTIC, LOCAL, SHIPPED

pytestmark = NEEDS_TRITON


def test_the_key_is_readable():
    assert KEY == "made_up(1024, 2)"


def test_local_before_shipped_before_heuristic():
    found = made_up_config(1024, 2, H200)
    assert (found.source, found.meta, found.device) == (HEURISTIC, {"ROWS": 2, "COLS": 1024}, H200)
    ship({KEY: entry()})
    found = made_up_config(1024, 2, H200)
    assert (found.source, found.meta, found.num_warps) == (SHIPPED, {"ROWS": 4, "COLS": 512}, 8)
    tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry(num_warps=16)})
    found = made_up_config(1024, 2, H200)
    assert (found.source, found.num_warps) == (LOCAL, 16)
    assert made_up_config(2048, 2, H200).source == HEURISTIC


def test_the_same_value_every_time():
    """Launches are remembered by it."""
    assert made_up_config(1024, 2, H200) is made_up_config(1024, 2, H200)


def test_a_recorded_winner_serves_this_very_process():
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry()})
    assert made_up_config(1024, 2, H200).source == LOCAL


def test_other_architectures_have_other_tables():
    tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry()})
    assert made_up_config(1024, 2, nvidia.ARCHS["sm80"]).source == HEURISTIC
    assert tuning.entries.cache_file(H200).name == "nvidia-sm90.json"


def test_winners_of_other_code_are_ignored_without_a_word(caplog):
    tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry(kernel="0123456789abcdef")})
    ship({KEY: entry()})
    assert made_up_config(1024, 2, H200).source == SHIPPED
    assert not caplog.records


def test_winners_of_another_triton_serve():
    """The first launch checks them: test_launch_failures.py."""
    ship({KEY: entry(triton="3.0.0")})
    found = made_up_config(1024, 2, H200)
    assert (found.source, found.triton) == (SHIPPED, "3.0.0")
    assert made_up_config(2048, 2, H200).triton == ""


@pytest.mark.parametrize(
    "cols, key",
    [
        (4096, "made_up(4096, 2)"), (8, "made_up(8, 2)"), (4608, "made_up(<=8192 aligned, 2)"),
        (4104, "made_up(<=8192 odd, 2)"), (8191, "made_up(<=8192 odd, 2)"), (48, "made_up(<=64 aligned, 2)"),
    ],
)  # fmt: skip
def test_a_compiled_entry_serves_a_class_of_widths(cols, key):
    assert made_up_config.class_key(cols, 2) == key
    ship({key: entry(origin=COMPILED)})
    assert made_up_config(cols, 2, H200).num_warps == 8
    for other in (cols * 2, cols + 1 if cols % 16 == 0 else 4 * cols):
        assert made_up_config(other, 2, H200).source == HEURISTIC
    ship({key: entry(origin=COMPILED), made_up_config.key(cols, 2): entry(num_warps=16)})
    assert made_up_config(cols, 2, H200).num_warps == 16, "what was measured at this width comes first"


def test_only_a_width_has_classes():
    assert tuning.choice.CONFIGS["rms_norm_backward"].class_key(4608, 2, 3) == "rms_norm_backward(<=8192 aligned, 2, 3)"
    assert tuning.choice.CONFIGS["rope_rotate"].class_key(32, 64) == "rope_rotate(32, 64)"


def hash_of(source, constants, module="made_up_module"):
    """The hash of `kernel` in a module of this source."""
    space = {"triton": triton, "tl": tl, "__name__": module, **constants}
    file = f"<made up {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), space)
    return tuning.entries.kernel_hash(space["kernel"])


SOURCE = """
@triton.jit
def helper(x):
    return x * SCALE

@triton.jit
def kernel(X, COLS: tl.constexpr):
    x = tl.load(X)
    tl.store(X, helper(x))
"""


def test_the_kernel_hash():
    def changed(before, after, scale=2):
        assert before in SOURCE
        return hash_of(SOURCE.replace(before, after), {"SCALE": scale})

    same = hash_of(SOURCE, {"SCALE": 2})
    assert same == hash_of(SOURCE, {"SCALE": 2}, "another_module")
    assert same == changed("    tl.store", "    # why\n\n    tl.store")
    assert same == changed("(X, helper(x))", "(\n        X, helper(x),\n    )")
    assert same == changed(
        "x = tl.load(X)\n    tl.store(X, helper(x))", "row = tl.load(X)\n    tl.store(X, helper(row))"
    )
    assert same != changed("helper(x)", "helper(X)")
    assert same != changed("x * SCALE", "x + SCALE")  # in a function it calls
    assert same != changed("tl.load(X)", "tl.load(X + 1)")
    assert same != changed("X", "X", scale=3)


def test_every_configuration_belongs_to_a_kernel():
    for name, config in tuning.choice.CONFIGS.items():
        assert config.kernel().__name__ == name
        assert len(tuning.entries.kernel_hash(config.kernel())) == 16


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "NaN", "\x00\xff", '{"made_up(1024, 2)": 3}', '{"made_up(1024, 2)": {}}', "[" * 9999],
    ids=lambda text: text[:20] or "empty",
)
def test_a_corrupt_table_costs_one_warning(text, caplog):
    file = tuning.entries.cache_file(H200)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    ship({KEY: entry()})
    for _ in range(3):
        tuning.choice.forget()
        assert made_up_config(1024, 2, H200).source == SHIPPED
    assert len(caplog.records) == 1 and caplog.records[0].levelno == logging.WARNING


def _pipe(file):
    os.mkfifo(file)


def _device(file):
    file.symlink_to("/dev/zero")


def _enormous(file):
    with open(file, "wb") as out:
        out.truncate(2**40)  # sparse


def _of_another_user(file):
    if os.getuid() != 0:
        pytest.skip("only root gives a file away")
    file.write_text("{}")
    os.chown(file, 4242, 4242)


@pytest.mark.parametrize(
    ("make", "why"),
    [(_pipe, "not a regular file"), (_device, "not a regular file"), (_enormous, "allowed: 16777216"),
     (_of_another_user, "belongs to user 4242")],
)  # fmt: skip
def test_what_is_no_table_of_ours_is_not_read(make, why, caplog):
    """A pipe or a device would be read for ever, at the first launch."""
    file = tuning.entries.cache_file(H200)
    file.parent.mkdir(parents=True)
    make(file)
    signal.alarm(20)  # ends the whole run: nothing else ends a read of a pipe
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    signal.alarm(0)
    assert len(caplog.records) == 1 and why in caplog.text


def test_the_cache_folder_may_begin_with_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", "~/winners")
    assert tuning.entries.cache_folder() == tmp_path / "winners"


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """A container's user without a home, who has a temporary directory alone."""

    def no_home(*_):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LIGER_HW_CACHE_DIR")
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"liger_hw-{os.getuid()}"


def test_the_folder_of_a_user_without_a_home_is_the_users_alone(homeless):
    assert tuning.entries.cache_folder() == homeless
    assert homeless.stat().st_mode & 0o777 == 0o700
    assert tuning.entries.cache_folder() == homeless


@pytest.mark.parametrize("trap", ["link", "open to all", "file"])
def test_a_folder_that_another_user_could_have_made_is_not_used(trap, homeless, tmp_path, caplog):
    if trap == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        homeless.symlink_to(tmp_path / "elsewhere")
    elif trap == "open to all":
        homeless.mkdir()
        homeless.chmod(0o777)
    else:
        homeless.write_text("")
    found = tuning.entries.cache_folder()
    assert found.parent == tmp_path and found != homeless and found == tuning.entries.cache_folder()
    assert found.stat().st_mode & 0o777 == 0o700
    assert len(caplog.records) == 1 and "set LIGER_HW_CACHE_DIR" in caplog.text


def test_a_table_that_is_no_text(caplog):
    file = tuning.entries.cache_file(H200)
    file.parent.mkdir(parents=True)
    file.write_bytes(b"\xff\xfe\x00")
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len(caplog.records) == 1 and str(file) in caplog.text


def test_recording_replaces_a_corrupt_table():
    file = tuning.entries.cache_file(H200)
    file.parent.mkdir(parents=True)
    file.write_text("{")
    tuning.search.record(file, {KEY: entry()})
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
        tuning.choice.forget()
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
        tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry()})
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len([r for r in caplog.records if "could not be written" in r.message]) == 1


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_full_disk_costs_one_warning_and_no_table(error, monkeypatch, caplog):
    file = tuning.entries.cache_file(H200)
    tuning.search.record(file, {KEY: entry()})

    def fail(self, text):
        Path.write_bytes(self, text[:20].encode())
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", fail)
        tuning.search.record(file, {KEY: entry(num_warps=16)})
    assert len(caplog.records) == 1 and error.strerror in caplog.text
    assert made_up_config(1024, 2, H200).num_warps == 8  # the old table is whole
    assert [path.name for path in file.parent.iterdir() if path.suffix == ".part"] == []


def _record_many(folder, first):
    for i in range(first, first + 25):
        tuning.search.record(Path(folder) / "table.json", {f"key {i}": {"n": i}})
    tuning.choice.CONFIGS["made_up"] = made_up_config
    tuning.search.bench = lambda function: 1e-3 / made_up_config(1024 + first, 2, H200).num_warps * (function() or 1)
    tuning.search.tune(lambda: made_up_config(1024 + first, 2, H200) and None, Path(folder) / "tuned.json")


def test_processes_that_record_and_tune_at_once_lose_nothing(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=_record_many, args=(str(tmp_path), first)) for first in (0, 25)]
    for worker in workers:
        worker.start()
    seen = 0
    while any(worker.is_alive() for worker in workers):
        table = tuning.entries.read_table(tmp_path / "table.json")  # whole at every moment
        assert len(table) >= seen
        seen = len(table)
        time.sleep(0.005)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert tuning.entries.read_table(tmp_path / "table.json") == {f"key {i}": {"n": i} for i in range(50)}
    found = tuning.entries.read_table(tmp_path / "tuned.json")
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
tuning.search.record(pathlib.Path(sys.argv[1]), {"mine": {"n": 1}})
"""


def test_a_killed_tuner_leaves_the_table_and_no_lock(tmp_path):
    file = tmp_path / "table.json"
    tuning.search.record(file, {"before": {"n": 0}})
    killed = subprocess.run([sys.executable, "-c", KILLED, str(file)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / killed.stdout.strip()).exists()  # it died with the new table written and the lock held
    assert tuning.entries.read_table(file) == {"before": {"n": 0}}
    start = time.perf_counter()
    tuning.search.record(file, {"after": {"n": 2}})
    assert time.perf_counter() - start < 30  # a lock that is still held is waited for a minute
    assert tuning.entries.read_table(file) == {"before": {"n": 0}, "after": {"n": 2}}


def test_a_file_system_without_locks_costs_one_warning(monkeypatch, caplog):
    def fail(self, *args, **kwargs):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", fail)
    for _ in range(2):
        tuning.search.record(tuning.entries.cache_file(H200), {KEY: entry()})
    assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len(caplog.records) == 1 and "does not appear to support flock" in caplog.text


def test_a_folder_where_the_table_should_be_costs_one_warning(caplog):
    tuning.entries.cache_file(H200).mkdir(parents=True)
    for _ in range(2):
        tuning.choice.forget()
        assert made_up_config(1024, 2, H200).source == HEURISTIC
    assert len(caplog.records) == 1


def test_a_user_without_a_home(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LIGER_HW_CACHE_DIR")
    monkeypatch.setattr(Path, "home", nobody)
    assert made_up_config(1024, 2, H200).source == HEURISTIC
