"""Run tasks in processes, of which some may die.

A compiler crashes, or a kernel breaks the context of its device.
"""

import multiprocessing
import multiprocessing.util
import os
import queue
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool


class Died(RuntimeError):
    """The process of a task ended without a result."""


def _begin(begin):
    # Where Python ends as usual, Triton 3.9's bindings print what they leaked (nanobind).
    multiprocessing.util.Finalize(None, os._exit, (0,), exitpriority=-1)
    if begin:
        begin()


class Workers:
    """A pool of processes: if one dies, only its task fails.

    A new process takes the next task. Leaving the context waits for the tasks, or ends the processes if an exception
    leaves it, such as Ctrl-C. Processes do not see Ctrl-C themselves, not even while they import.

    Args:
        count: the number of processes; None means one for each core.
        begin: a function that each process calls first.
    """

    def __init__(self, count: int | None = None, begin: Callable[[], None] | None = None):
        count = count or len(os.sched_getaffinity(0))
        self._begin = begin
        self._others = set(multiprocessing.active_children())
        self._starting = threading.Lock()
        self._pools = queue.SimpleQueue()
        for _ in range(count):
            self._pools.put(None)
        self._threads = ThreadPoolExecutor(count)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        self._threads.shutdown(wait=not error, cancel_futures=bool(error))
        if not error:
            while not self._pools.empty():
                if pool := self._pools.get():
                    pool.shutdown()  # a pool whose process is terminated may print an error when Python exits
        for process in set(multiprocessing.active_children()) - self._others:
            process.terminate()

    def submit(self, function: Callable, *args) -> Future:
        """Call `function(*args)` in a process. The future raises what it raises, or `Died`."""
        return self._threads.submit(self._run, function, args)

    def _run(self, function, args):
        pool = self._pools.get()
        try:
            with self._starting:
                if pool is None:
                    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin, (self._begin,))
                # Here, as the first pool starts multiprocessing's tracker, which unblocks them. The process inherits
                # what its thread blocks; the main thread still receives Ctrl-C.
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
                future = pool.submit(function, *args)
            return future.result()
        except BrokenProcessPool:
            pool = None
            raise Died("its process crashed") from None
        finally:
            self._pools.put(pool)
