"""Copy tensors to host memory and back, beside the computation."""

import time
import weakref
from collections import defaultdict, deque

import torch

from liger_hw._torch import tensor_version
from liger_hw.checkpointing.operations import memory_of

MEASURED_BYTES = 2**28  # of a copy that measures the link: 5 ms over PCIe 5


AT_ONCE = 2.0**50  # bytes a second: a CPU does not wait for copies
KEPT_TENSOR_CHANGED = (
    "an input or a result of a layer that liger_hw.activations kept was changed in place after the layer: undo the "
    "plan (liger_hw.activations(model, None)), or change a copy"
)


def buffer_bytes(nbytes) -> int:
    """Return the host memory of a buffer; torch rounds up to a power of two."""
    return 1 << max(nbytes - 1, 0).bit_length()


class Transfers:
    """Copy tensors of one device on a stream of its own.

    A CPU copies at once. Buffers in host memory are pinned, and reused by the next step: to pin memory takes longer
    than to copy.

    Args:
        device: the device of the tensors.
    """

    def __init__(self, device):
        self.device = device
        self.stream = None if device.type == "cpu" else torch.Stream(device)
        self.unused = defaultdict(list)  # bytes -> buffers
        self.leaving = deque()  # (end of the copy, tensor, its version, its `Offloaded`), not yet released

    def can_copy(self, x) -> bool:
        """Tell whether `x` can go to host memory as one block."""
        return type(x) is torch.Tensor and x.device == self.device and x.untyped_storage().nbytes() == x.nbytes > 0

    def buffer(self, nbytes):
        """Return host memory of `nbytes`."""
        if self.unused[nbytes]:
            return self.unused[nbytes].pop()
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self.stream is not None)

    def copy(self, target, source):
        """Start a copy after the work that the current stream has; return its end."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_event(torch.accelerator.current_stream(self.device).record_event())
        with self.stream:
            target.copy_(source, non_blocking=True)
        return self.stream.record_event()

    def wait(self, end):
        """Let the current stream wait for the end of a copy."""
        if end is not None:
            torch.accelerator.current_stream(self.device).wait_event(end)

    def release(self, count):
        """Give back the device memory of copied tensors, except of the last `count`.

        The current stream waits for their copies, so that it can reuse the memory. A tensor that the program wrote to
        before is marked: the copy may have either values.
        """
        while len(self.leaving) > count:
            end, x, version, offloaded = self.leaving.popleft()
            self.wait(end)
            if tensor_version(x) != version and offloaded() is not None:
                offloaded().changed = True

    def measure(self) -> float:
        """Return the bytes a second of the slower direction, or AT_ONCE on a CPU."""
        if self.stream is None:
            return AT_ONCE
        on_host = self.buffer(MEASURED_BYTES)
        on_device = torch.empty(MEASURED_BYTES, dtype=torch.uint8, device=self.device)
        for _ in range(2):  # the first warms up
            seconds = []
            for target, source in ((on_host, on_device), (on_device, on_host)):
                torch.accelerator.synchronize(self.device)
                start = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.accelerator.synchronize(self.device)
                seconds.append(time.perf_counter() - start)
        return MEASURED_BYTES / max(seconds)


class Offloaded:
    """Hold a tensor in host memory until the backward needs it.

    Args:
        x: a tensor that `Transfers.can_copy`.
        transfers: makes the copies.
    """

    def __init__(self, x, transfers):
        self.transfers, self.memory, self.like = transfers, memory_of(x), (x.shape, x.stride(), x.dtype)
        self.loaded, self.changed = None, False
        self.host = transfers.buffer(x.nbytes)
        end = transfers.copy(self._as_tensor(self.host), x)
        transfers.leaving.append((end, x, tensor_version(x), weakref.ref(self)))

    def _as_tensor(self, memory):
        shape, strides, dtype = self.like
        return memory.view(dtype).as_strided(shape, strides)

    def prefetch(self):
        """Start the copy back to the device."""
        if self.loaded is None:
            memory = torch.empty(self.host.nbytes, dtype=torch.uint8, device=self.transfers.device)
            self.loaded = memory, self.transfers.copy(memory, self.host)

    def take(self):
        """Return the tensor on the device; it can be taken again.

        Raises:
            RuntimeError: the program wrote to it before the copy had ended.
        """
        if self.changed:
            raise RuntimeError(KEPT_TENSOR_CHANGED)
        self.prefetch()
        (memory, end), self.loaded = self.loaded, None
        self.transfers.wait(end)
        return self._as_tensor(memory)

    def __del__(self):
        if self.loaded is not None:  # nobody took it: other tensors may get its memory
            self.transfers.wait(self.loaded[1])
        if hasattr(self, "host"):
            self.transfers.unused[self.host.nbytes].append(self.host)  # later copies wait for earlier ones
