"""Test processes of which one may die."""

import multiprocessing
import os
import signal
import time
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from types import SimpleNamespace

import pytest

from liger_lab import terminal
from liger_lab.levels import compile_cache, emulated, workers
from liger_lab.levels.workers import Died, Workers


def work(n):
    if n == 3:
        os._exit(1)
    if n == 4:
        raise ValueError("four")
    return n, os.environ.get("BEGUN")


def begin():
    os.environ["BEGUN"] = "yes"


def test_a_process_that_dies_fails_its_task_only():
    results = {}
    with Workers(2, begin) as pool:
        futures = {pool.submit(work, n): n for n in range(8)}
        for future in as_completed(futures):
            results[futures[future]] = future.exception() or future.result()
    assert isinstance(results.pop(3), Died) and str(results.pop(4)) == "four"
    assert results == {n: (n, "yes") for n in (0, 1, 2, 5, 6, 7)}


def blocked_signals():
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


class Unblocking(ProcessPoolExecutor):
    """As the first pool of a program, which starts multiprocessing's tracker."""

    def __init__(self, *args):
        super().__init__(*args)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def test_processes_begin_without_interrupts(monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", Unblocking)
    before = blocked_signals()
    with Workers(1) as pool:
        assert signal.SIGINT in pool.submit(blocked_signals).result()
    assert blocked_signals() == before


def test_an_exception_ends_the_processes():
    others = set(multiprocessing.active_children())
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), Workers(2) as pool:
        assert pool.submit(work, 1).result() == (1, None)
        pool.submit(time.sleep, 300)
        raise KeyboardInterrupt
    while set(multiprocessing.active_children()) - others:
        assert time.monotonic() - began < 60
        time.sleep(0.05)


class Crashing:
    """A pool in which a batch that holds "bad" kills its process."""

    def submit(self, function, launches):
        future = Future()
        if any(launch.key == "bad" for launch in launches):
            future.set_exception(Died("its process crashed"))
        else:
            future.set_result([f"result of {launch.key}" for launch in launches])
        return future


def test_a_crash_of_the_compiler_is_the_result_of_its_launch_alone(tmp_path):
    launches = [SimpleNamespace(key=key, arch="gfx942", what=1) for key in ("good", "bad", "fine")]
    with terminal.progress() as progress:
        results = compile_cache.compile_all(launches, Crashing(), compile_cache.Cache(tmp_path), progress)
    assert results == {"good": "result of good", "bad": "its process crashed", "fine": "result of fine"}


def test_a_crash_during_emulation_is_a_failed_case():
    future = Future()
    future.set_exception(Died("its process crashed"))
    (row,) = emulated._result(future, "rope", "gfx942", "bf16")
    assert (row["op"], row["error"]) == ("rope", "its process crashed")
    (cell,) = emulated._cells([row], "run")
    assert (cell.passed, cell.failed) == (0, 1)
