"""Time functions on the device, in their kernels alone, and on the host."""

import statistics
import time

import torch

FLUSH = 2**28  # bytes written before each call: 5 times the largest L2 (H200: 50 MiB); and 65 us of lead for the host
FEWEST, MOST = 11, 61  # rounds
HOST_CALLS, HOST_ROUNDS = 60, 15  # a queue holds 1024 launches; 60 calls of ten kernels do not wait for it


def spread(seconds: list[float]) -> dict:
    """Return the median and the 20th and 80th percentile of times."""
    ordered = sorted(seconds)
    low, high = (ordered[min(round(share * (len(ordered) - 1)), len(ordered) - 1)] for share in (0.2, 0.8))
    return {"median": statistics.median(ordered), "p20": low, "p80": high, "rounds": len(ordered)}


class Clock:
    """Time functions on one device, interleaved.

    On an accelerator events on the stream give the time, from a cold L2; where the host is slower than the device, this
    is the host's time. On a CPU the wall clock gives the time, from warm caches.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.on_cpu = device.type == "cpu"
        self._flushed = None if self.on_cpu else torch.empty(FLUSH, dtype=torch.int8, device=device)

    def synchronize(self):
        if not self.on_cpu:
            torch.accelerator.synchronize(self.device)

    def interleave(self, functions: dict, seconds: float) -> dict:
        """Time rounds of one call of each function.

        Args:
            functions: name -> function without arguments; the caller has called each before.
            seconds: the aim for all rounds together; there are 11 rounds at least and 61 at most.

        Returns:
            name -> `spread` of its seconds.
        """
        names = list(functions)
        for name in 2 * names:
            functions[name]()
        self.synchronize()
        start = time.perf_counter()
        self._round(functions, names)
        self.synchronize()
        rounds = min(max(int(seconds / (time.perf_counter() - start)), FEWEST), MOST)
        taken = {name: [] for name in names}
        for number in range(rounds):
            shift = number % len(names)  # no function always follows the same one
            for name, measured in self._round(functions, names[shift:] + names[:shift]):
                taken[name].append(measured)
        self.synchronize()
        return {name: spread([measured() for measured in times]) for name, times in taken.items()}

    def _round(self, functions, names) -> list:
        return [(name, self._once(functions[name])) for name in names]

    def _once(self, function):
        """Call `function`; return a function that gives its seconds after a synchronisation."""
        if self.on_cpu:
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
            return lambda: seconds
        start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        self._flushed.zero_()
        start.record()
        function()
        end.record()
        return lambda: start.elapsed_time(end) / 1e3

    def seconds(self, function) -> float:
        """Return the median time of one function."""
        function()
        return self.interleave({"it": function}, 0.3)["it"]["median"]

    def graph(self, function):
        """Capture `function` in a graph and return its replay, whose time has no host time.

        Returns None without CUDA or ROCm, and if capture fails because `function` waits for the device.
        """
        if self.device.type != "cuda":  # torch calls AMD's devices "cuda" too
            return None
        stream, graph = torch.cuda.Stream(self.device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(2):
                    function()
                self.synchronize()
                graph.capture_begin()  # torch.cuda.graph empties the allocator's cache each time, which costs 100 ms
                try:
                    function()
                finally:
                    graph.capture_end()
        except Exception:  # the library's own error, torch's, or the driver's
            self.synchronize()
            return None
        return graph.replay

    def host(self, functions: dict) -> dict:
        """Time the host's part of one call of each function.

        Returns:
            name -> `spread` of seconds. The device is idle before each block of calls.
        """
        taken = {name: [] for name in functions}
        for _ in range(HOST_ROUNDS):
            for name, function in functions.items():
                function()
                self.synchronize()
                start = time.perf_counter()
                for _ in range(HOST_CALLS):
                    function()
                taken[name].append((time.perf_counter() - start) / HOST_CALLS)
                self.synchronize()
        return {name: spread(times) for name, times in taken.items()}

    def ceilings(self, dtype: torch.dtype) -> dict:
        """Measure a large copy and a large matrix product.

        Returns:
            Bytes per second, read and written, and operations per second.
        """
        size, side = (2**26, 1024) if self.on_cpu else (2**30, 8192)
        one, other = (torch.zeros(size, dtype=torch.int8, device=self.device) for _ in range(2))
        copy = 2 * size / self.seconds(lambda: one.copy_(other))
        a, b = (torch.randn(side, side, device=self.device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        product = 2 * side**3 / self.seconds(lambda: torch.mm(a, b, out=out))
        return {"bytes_per_second": copy, "flops_per_second": product}
