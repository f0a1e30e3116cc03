"""Search for winners, measured and downhill from the heuristic; write them to tables.

A candidate wins only with the heuristic's results: a fast one may be fast because it computes something else.
"""

import functools
import logging
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from liger_hw import backends
from liger_hw._torch import tree_leaves
from liger_hw._triton import triton
from liger_hw.hooks import hooks
from liger_hw.tuning import choice, entries
from liger_hw.tuning.config import LOCAL, MEASURED, Config

LEAST_GAIN = 0.03  # a winner is kept only if it is faster than the heuristic by more than this share, twice

logger = logging.getLogger(__name__)


def entry_for(config, winner: Config, origin: str, **evidence) -> dict:
    """Return the entry of a configuration, with its evidence.

    Args:
        config: the kernel's tuned function.
        winner: what it shall return.
        origin: MEASURED or COMPILED.
        evidence: what else the entry says of how it was found.
    """
    return {
        **winner.to_json(),
        "kernel": entries.kernel_hash(config.kernel()),
        "triton": triton.__version__,
        "origin": origin,
        "date": time.strftime("%Y-%m-%d"),
        **evidence,
    }


def measured_entry(config, winner: Config, seconds: float, default_seconds: float) -> dict:
    """Return the entry of a winner that was measured beside the heuristic's choice."""
    times = {"ms": _ms(seconds), "heuristic_ms": _ms(default_seconds)}
    return entry_for(config, winner, MEASURED, device=winner.device.name, **times)


def record(file: Path, changes: dict) -> None:
    """Merge entries into a table, and remove those given as None.

    This happens under a lock and replaces the file in one step. A full disk or a read-only folder costs the entries and
    one warning.
    """
    from filelock import FileLock  # a dependency of torch

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=60):
            merged = {key: entry for key, entry in (entries.read_table(file) | changes).items() if entry is not None}
            entries.write_table(file, merged)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        entries.warn_once(f"the tuning table {file} could not be written, so its winners are lost: {error}")
    choice.forget()


def neighbours(config: Config) -> list[Config]:
    """List the launchable configurations one step from `config`.

    A step halves or doubles one number, or one number and the warps together, moves by one stage, or takes another
    value of a compiler's option.
    """
    near = []

    def add(meta, **changes):
        candidate = replace(config, meta=config.meta | meta, **changes)
        if min([candidate.num_warps, *candidate.meta.values()]) >= 1 and not candidate.launch_error():
            near.append(candidate)

    for scale in (0.5, 2):
        num_warps = int(config.num_warps * scale)
        add({}, num_warps=num_warps)
        add({}, programs=max(int(config.programs * scale), 1))
        add({}, num_stages=max(int(config.num_stages * scale), 1))
        for name, value in config.meta.items():
            # RMSNorm's backward of 3,072 columns on an H200: four are 4% faster than three, and six 2% slower
            if name == "STAGES":
                add({name: value + (1 if scale > 1 else -1)})
            else:
                add({name: int(value * scale)})
                add({name: int(value * scale)}, num_warps=num_warps)
    options = config.device.launch_options | config.knobs
    for name, values in backends.knobs(config.device).items():
        for value in values:
            if value != options.get(name):
                add({}, knobs=config.knobs | {name: value})
    return near


def bench(function) -> float:
    """Return the seconds of one call on the device: the median with a cold L2."""
    return triton.testing.do_bench(function, warmup=10, rep=50, return_mode="median") / 1e3


def configurations_of(function) -> list[tuple]:
    """List (tuned function, numbers, device) of each look-up in `function()`, ordered by key."""
    with choice.recorded_lookups() as lookups:
        function()
    return sorted(lookups, key=lambda item: item[0].key(*item[1]))


def tune(function, file: Path | None = None, only=None, progress=lambda key, tried, best: None) -> dict:
    """Search downhill from the heuristic of each configuration of `function()`, and keep winners.

    A winner is written as soon as it is found, so an interrupted search loses only the one it was at.

    Args:
        function: runs the op and returns its results; must be safe to repeat. If it has an attribute `written`, the
            tensors that it writes to, they are results too.
        file: the table to write; the user's cache by default.
        only: the keys to search for; all by default.
        progress: called with (key, candidates tried, the best Config so far) after each candidate.

    Returns:
        key -> {"ms", "heuristic_ms", "candidates"}, and the whole entry of the table where a winner was kept.
    """
    report = {}
    for config, numbers, device in configurations_of(function):
        key = config.key(*numbers)
        if only is not None and key not in only:
            continue
        search = _Search(function, key, config.heuristic(*numbers, device))
        if search.seconds(search.default) == math.inf:  # the compiler refuses it here, and a table may have another
            search.default = config(*numbers, device)
        best, fastest, default = None, search.default, search.default
        while fastest is not best:
            best = fastest
            near = [best, *neighbours(best)]
            _compile_ahead(function, key, [c for c in near if c not in search.times])
            for candidate in near:
                if search.wins(candidate, fastest):
                    fastest = candidate
                progress(key, len(search.times), fastest)
        file = file or entries.cache_file(device)
        kept = None
        if search.seconds(best) < search.seconds(default) * (1 - LEAST_GAIN):
            again, default_again = _seconds(function, key, best), _seconds(function, key, default)
            if again < default_again * (1 - LEAST_GAIN):
                kept = measured_entry(config, best, again, default_again)
        if kept or key in entries.read_table(file):  # a winner of old may have lost to the heuristic
            record(file, {key: kept})
        measured = {"ms": _ms(search.seconds(best)), "heuristic_ms": _ms(search.seconds(default))}
        report[key] = (kept or measured) | {"candidates": len(search.times)}
    return report


def _compile_ahead(function, key, candidates) -> None:
    """Compile each candidate's launches in `function()`, on every core; `_seconds` meets those that fail."""
    from triton import AsyncCompileMode

    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        with hooks.replace_launches(_compile):
            for candidate in candidates:
                with suppress(Exception), choice.override(key, candidate):
                    function()


def _compile(kernel, grid, config, *args) -> None:
    """Compile a launch of `kernel` without launching it."""
    device = args[0].device
    if device.type != "meta":  # of which a launch computes nothing
        with torch.accelerator.device_index(device.index):
            kernel.warmup(*args, *config.meta.values(), grid=grid, **config.options(backends.detected(device)))


def _seconds(function, key, candidate) -> float:
    try:
        with choice.override(key, candidate), hooks.collect_kernels() as kernels:
            seconds = bench(function)
        # one that spills may win at the shape that was measured, and is the first to lose where memory is busy
        return math.inf if any(kernel.n_spills for kernel in kernels) else seconds
    except Exception as error:  # compilers reject a candidate in many ways; none of them may end the search
        logger.debug("%s cannot run %s: %s", key, candidate, error)
        return math.inf


class _Search:
    """Time candidates, and compare their results with the default's.

    It copies the tensors that the function writes to before the first call.

    Attributes:
        times: candidate -> its seconds; infinite if it cannot run, or computes something else.
    """

    def __init__(self, function, key, default):
        self.function, self.key, self.default, self.expected, self.times = function, key, default, None, {}
        self.written = getattr(function, "written", ())
        self.before = [x.clone() for x in self.written]

    def seconds(self, candidate) -> float:
        """Return the seconds of a candidate, measured once."""
        if candidate not in self.times:
            self.times[candidate] = _seconds(self.function, self.key, candidate)
        return self.times[candidate]

    def wins(self, candidate, fastest) -> bool:
        """Tell whether `candidate` is faster than `fastest`, with the default's results."""
        if self.seconds(candidate) >= self.seconds(fastest):
            return False
        right = self._is_right(candidate)
        if not right:
            self.times[candidate] = math.inf
        return right

    def _is_right(self, candidate) -> bool:
        """Tell whether `candidate` runs, with the default's results; warn if they differ."""
        try:
            if self.expected is None:
                self.expected = self._results(self.default)
            right = _equal_but_for_roundings(self._results(candidate), self.expected)
        except Exception as error:  # as in `_seconds`
            logger.debug("the results of %s are unknown for %s: %s", self.key, candidate, error)
            return False
        if not right:
            entries.warn_once(f"{self.key} computes other results with {candidate.to_json()}, which is not used")
        return right

    def _results(self, config) -> list[torch.Tensor]:
        for x, before in zip(self.written, self.before):
            x.copy_(before)
        with choice.override(self.key, config):
            returned = tree_leaves(self.function())
        return [*filter(torch.is_tensor, returned), *(x.clone() for x in self.written)]


def _equal_but_for_roundings(results, expected) -> bool:
    """Tell whether two configurations computed the same, but for the order of their sums.

    The largest difference may be four units in the last place of the largest value, in fp32 those of 12 bits: the tests
    of parity hold an op to much less, and what a wrong mask or a race writes differs by more.
    """
    if [(x.shape, x.dtype) for x in results] != [(x.shape, x.dtype) for x in expected]:
        return False
    for x, y in zip(results, expected):
        if x.is_meta:  # shapes alone, as launches of meta tensors compute nothing
            continue
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return False
            continue
        parts = list(zip(x.flatten().split(_PART), y.flatten().split(_PART)))  # in wider numbers the whole may not fit
        largest = max(b.double().nan_to_num(0, 0, 0).abs().max().item() if b.numel() else 0 for _, b in parts)
        most = 4 * max(torch.finfo(x.dtype).eps, 2**-12) * largest
        if not all(torch.allclose(a.double(), b.double(), rtol=0, atol=most, equal_nan=True) for a, b in parts):
            return False
    return True


_PART = 2**24  # values


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 5)


_tried = set()  # keys that `_call_and_tune` has tuned in this process


def _call_and_tune(launches, args, repeatable: bool):
    """Call `launches(*args)`, then tune the configurations that it looked up for its own device.

    A configuration is tuned once in a process, and not where this machine has a winner of it.
    """
    if not repeatable or args[0].device.type in ("cpu", "meta") or choice.being_measured():
        return launches(*args)
    with choice.recorded_lookups() as lookups:
        result = launches(*args)
    here = backends.detected(args[0].device)
    chosen = {config.key(*numbers): config(*numbers, device) for config, numbers, device in lookups if device is here}
    untuned = {key for key, config in chosen.items() if config.source != LOCAL} - _tried
    if untuned:
        _tried.update(untuned)
        tune(functools.partial(launches, *args), only=untuned)
    return result


def autotuning() -> bool:
    """Tell whether LIGER_HW_AUTOTUNE=1 asks for tuning at first use.

    Raises:
        ValueError: the variable is neither 1, 0 nor empty.
    """
    value = os.environ.get("LIGER_HW_AUTOTUNE", "")
    if value not in ("", "0", "1"):
        raise ValueError(f"LIGER_HW_AUTOTUNE={value!r}: 1 searches at each shape's first use; 0 or nothing does not")
    return value == "1"


def _first_call(launches, args, repeatable: bool):
    """Read the environment once, at the first call of a `raw` function."""
    observer = _call_and_tune if autotuning() else None
    hooks.observe_always(observer)
    return launches(*args) if observer is None else observer(launches, args, repeatable)


hooks.observe_always(_first_call)
