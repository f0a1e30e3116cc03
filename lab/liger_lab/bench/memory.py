"""Measure the peak memory of a function by the allocator that serves it."""

import json
import os
import tempfile
from contextlib import contextmanager

import torch


def peak(function, device: torch.device) -> int:
    """Return the peak of bytes that `function()` allocates on `device`.

    Bytes that are allocated before the call do not count. On an accelerator the numbers are the caching allocator's
    statistics. On a CPU they are the allocator's events in torch.profiler: every tensor and every temporary inside an
    operator, but neither Python objects nor memory that a library takes from the system directly. On a CPU, memory
    allocated before the call and freed inside it does not lower the peak.
    """
    if device.type == "cpu":
        return _peak_on_cpu(function)
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    function()
    torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - before


def _peak_on_cpu(function) -> int:
    with (
        _without_stderr(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
    ):
        function()
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace.json")
        profile.export_chrome_trace(file)
        with open(file) as trace:
            events = json.load(trace)["traceEvents"]
    changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"]
    allocated = highest = 0
    for _, change in sorted(changes, key=lambda item: item[0]):
        allocated += change
        highest = max(highest, allocated)
    return highest


@contextmanager
def _without_stderr():
    """Silence stderr: Kineto prints two lines for every profile and has no setting for it."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
