"""Record the memory of one training step, for torch's memory viewer and for a picture."""

import pickle
from contextlib import contextmanager
from pathlib import Path

import torch

POINTS = 1000  # of a curve in a picture


@contextmanager
def recorded_memory(device, stacks: bool):
    """Record allocations on a device within the block, and yield a function.

    It returns torch's snapshot of them.

    Raises:
        ValueError: torch has no such record for this kind of device.
    """
    memory = getattr(getattr(torch, device.type), "memory", None)
    if not hasattr(memory, "_record_memory_history"):
        raise ValueError(f"torch {torch.__version__} records no allocations on {device.type}")
    memory._record_memory_history(context="all" if stacks else None, stacks="python")
    try:
        yield memory._snapshot
    finally:
        memory._record_memory_history(enabled=None)


def record(step, device, file: Path, stacks: bool = True) -> list[tuple[float, int]]:
    """Run `step()`, write the snapshot of its memory to `file`, and return its curve.

    `file` is what https://docs.pytorch.org/memory_viz shows.

    Returns:
        `curve` of the step.
    """
    torch.accelerator.synchronize(device)
    before = torch.accelerator.memory_allocated(device)
    with recorded_memory(device, stacks) as snapshot_of:
        step()
        torch.accelerator.synchronize(device)
        snapshot = snapshot_of()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps(snapshot))
    return curve(snapshot["device_traces"][device.index or 0], before)


def curve(trace: list[dict], before: int) -> list[tuple[float, int]]:
    """Return (seconds since the first event, allocated bytes) over a step.

    Of more than POINTS events, stretches of equal length keep their highest and their lowest value, and the last stays.

    Args:
        trace: events of torch's snapshot. before: bytes that were allocated at its start.
    """
    held, points = before, []
    for event in trace:
        if event["action"] == "alloc":
            held += event["size"]
        elif event["action"] == "free_requested":
            held -= event["size"]
        else:
            continue
        points.append(((event["time_us"] - trace[0]["time_us"]) / 1e6, held))
    if len(points) <= POINTS:
        return points
    stretch = -(-2 * len(points) // (POINTS - 1))
    kept = {points[-1]}
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        kept |= {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
    return sorted(kept)
