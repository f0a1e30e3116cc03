"""Processes that run functions of tests on an accelerator each, or on the CPU where there are fewer accelerators.

Gloo joins processes of a CPU, the vendor's library (NCCL) those of accelerators. The processes stay, because a start
imports torch for seconds.
"""

import datetime
import multiprocessing.connection
import os
import tempfile
import traceback

import fast_interpreter  # noqa: F401
import torch

from liger_hw._triton import interpreting

HUNG, DIED = "no answer", "died"
SECONDS = 300  # of one function, before the ranks count as hung
SECONDS_AFTER_AN_ERROR = 30  # of the other ranks: a busy machine


def device():
    """Return this rank's device."""
    return _device


_device = torch.device("cpu")


class Ranks:
    def __init__(self, count):
        context = torch.multiprocessing.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, theirs = zip(*(context.Pipe() for _ in range(count)))
        place = os.path.join(self.folder.name, "store")
        self.processes = [
            context.Process(target=_serve, args=(pipe, place, rank, count), daemon=True)
            for rank, pipe in enumerate(theirs)
        ]
        for process in self.processes:
            process.start()

    def alive(self):
        return all(process.is_alive() for process in self.processes)

    def run(self, function, args, backend=None):
        """Call `function(*args)` on every rank; raise an AssertionError with the traces of those that fail."""
        for pipe in self.pipes:
            pipe.send((function, args, backend))
        errors, waiting = {}, list(self.pipes)
        while waiting:
            ready = multiprocessing.connection.wait(waiting, SECONDS if not errors else SECONDS_AFTER_AN_ERROR)
            for pipe in ready or waiting:
                try:
                    error = pipe.recv() if ready else HUNG
                except EOFError:
                    error = DIED
                if error is not None:
                    errors[self.pipes.index(pipe)] = error
            waiting = [pipe for pipe in waiting if ready and pipe not in ready]
        if len(errors) < len(self.pipes) and errors or set(errors.values()) & {HUNG, DIED}:
            self.stop()
        if errors:
            raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))

    def stop(self):
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _serve(pipe, place, rank, count):
    global _device

    import torch.distributed as dist

    from liger_hw import use_backend

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    if not interpreting() and torch.accelerator.is_available() and torch.accelerator.device_count() >= count:
        torch.accelerator.set_device_index(rank)
        _device = torch.device(torch.accelerator.current_accelerator(check_available=True).type, rank)
    backends = dist.get_default_backend_for_device(_device)
    if _device.type != "cpu":  # a test's model may stay on the host
        backends = f"cpu:gloo,{_device.type}:{backends}"
    dist.init_process_group(
        backends, store=dist.FileStore(place, count), rank=rank, world_size=count,
        timeout=datetime.timedelta(seconds=200), device_id=None if _device.type == "cpu" else _device,
    )  # fmt: skip
    while True:
        try:
            function, args, backend = pipe.recv()
        except EOFError:
            return
        before = dict(os.environ)
        try:
            torch.manual_seed(0)
            with use_backend(backend):
                function(*args)
            pipe.send(None)
        except BaseException:
            pipe.send(traceback.format_exc())
        for name in os.environ.keys() - before:  # as accelerate's of DeepSpeed, which the next function would obey
            del os.environ[name]
        os.environ |= before
