"""The other decorator. The body it wraps is the heuristic; measurements override it.

    @tuned
    def rms_norm_forward_config(cols, itemsize, device) -> Config:      # pure: numbers and a Device in, Config out
        return ...

Order: a winner measured on this machine, a winner shipped with the package, the heuristic. `X_config` is the
configuration of the kernel `X` in the same file, "X(4096, 2)" the key of its winners for one shape; a winner is used
only while that kernel's code and Triton are what was measured.
"""

import ast
import functools
import hashlib
import inspect
import json
import logging
import math
import os
import sys
import tempfile
import textwrap
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from liger_hw import backends
from liger_hw._triton import AVAILABLE, triton
from liger_hw.backends.device import Device

logger = logging.getLogger(__name__)

CONFIGS = {}  # name of the kernel -> tuned function, for the tools
HEURISTIC, SHIPPED, LOCAL = "heuristic", "shipped", "local"


@dataclass(frozen=True, eq=False)  # by identity: it is part of every launch's key
class Config:
    """How to launch one kernel.

    Attributes:
        meta: Triton meta-parameters by name, in the order of the kernel's last parameters: powers of two that span a
            tile, and STAGES, how far a kernel's own loop loads ahead.
        num_warps: warps per program.
        num_stages: stages of the compiler's loop pipeliner.
        programs: for kernels whose grid does not grow with the rows: programs per core.
        knobs: options of the device's own compiler that differ from the device's launch options.
        fp_fusion: whether a product and a sum may be rounded once. False where a kernel promises to round both: the
            compiler also takes bf16(a * b) + c for one bf16 operation.
        device: the Device it was made for; `tuned` fills this in.
        source: "heuristic", "shipped" or "local".
        key: what tables call it: "rms_norm_forward(4096, 2)"; `tuned` fills this in.
    """

    meta: dict
    num_warps: int = 4
    num_stages: int = 1
    programs: int = 1
    knobs: dict = field(default_factory=dict)
    fp_fusion: bool = True
    device: Device | None = None
    source: str = HEURISTIC
    key: str = ""

    def __getitem__(self, name):
        return self.meta[name]

    def grid_for(self, tiles: int) -> int:
        """Programs of a grid that strides over `tiles`: a fixed number, but no idle ones; at least one."""
        return max(min(self.programs * self.device.num_cores, tiles), 1)

    def options(self, here: Device) -> dict:
        """Launch options for the compiler of `here`. Another vendor's knobs would be unknown keywords to it."""
        mine = self.device.launch_options | self.knobs if self.device.vendor == here.vendor else {}
        # The default of enable_fp_fusion changes with Triton 3.10; stating it keeps the numbers.
        fusion = {"enable_fp_fusion": self.fp_fusion}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **fusion, **mine}

    def to_json(self) -> dict:
        return {
            "meta": self.meta, "num_warps": self.num_warps, "num_stages": self.num_stages, "programs": self.programs,
            **({"knobs": self.knobs} if self.knobs else {}),
        }  # fmt: skip

    def refusal(self) -> str | None:
        """Why its device could not be launched on so, or None."""
        return backends.refusal(self.device, self.num_warps, self.device.launch_options | self.knobs)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`. (Here, so that heuristics need no Triton.)"""
    return 1 << max(n - 1, 0).bit_length()


def row_warps(elements: int, device: Device, per_lane: int = 8, most: int | None = None) -> int:
    """Warps for a block of `elements`, `per_lane` to a lane, between one warp and `most` (or the device's limit)."""
    limit = min(most or device.max_warps, device.max_warps)
    return min(max(power_of_2(elements) // (per_lane * device.warp_size), 1), limit)


def cache_folder() -> Path:
    """Where this user's winners and compiled results are kept: LIGER_HW_CACHE_DIR, or ~/.cache/liger_hw."""
    chosen = os.environ.get("LIGER_HW_CACHE_DIR")
    if chosen:
        return Path(chosen)
    try:
        return Path.home() / ".cache" / "liger_hw"
    except RuntimeError:  # a container's user without a name or a home
        return Path(tempfile.gettempdir()) / f"liger_hw-{os.getuid()}"


def cache_file(device: Device) -> Path:
    return cache_folder() / f"{device.vendor}-{device.arch}.json"


def shipped_file(device: Device) -> Path:
    return Path(__file__).parent / "backends" / f"{device.vendor}-{device.arch}.json"


def read_table(file: Path) -> dict:
    """The winners in `file`: key -> entry. Absent is empty; unreadable or malformed is empty with one warning."""
    try:
        table = json.loads(file.read_text())
        if not isinstance(table, dict):
            raise ValueError(f"expected an object of winners, got {type(table).__name__}")
        return table
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warn_once(f"ignoring the tuning table {file}: {error}")
        return {}


@functools.cache
def warn_once(message: str) -> None:
    logger.warning(message)


def kernel_hash(kernel) -> str:
    """A hash of a Triton kernel's code, of the jit functions it calls and of the constants they name; comments and
    layout do not count."""
    seen, todo = {}, [kernel.fn]
    while todo:
        function = todo.pop()
        name = f"{function.__module__}.{function.__qualname__}"
        if name in seen:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        words = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(function.__globals__))
        named = {word: function.__globals__[word] for word in words}
        constants = {word: value for word, value in named.items() if isinstance(value, (int, float, str))}
        seen[name] = f"{ast.unparse(tree)}{constants}"  # not ast.dump, whose output changes with Python's version
        todo += [value.fn for value in named.values() if inspect.isfunction(getattr(value, "fn", None))]
    return hashlib.sha256("".join(seen[name] for name in sorted(seen)).encode()).hexdigest()[:16]


_LARGEST_TILE = 2**20  # elements of one Triton tensor


def launchable(entry: dict, like: Config, source: str) -> Config:
    """The Config in a table's entry for the device of `like`, whose parameters it must have.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: what is wrong with it.
    """
    if entry["meta"].keys() != like.meta.keys():
        raise ValueError(f"meta={entry['meta']}, allowed: {', '.join(like.meta)}")
    meta = {name: entry["meta"][name] for name in like.meta}  # in the kernel's order
    launch = {name: entry[name] for name in ("num_warps", "num_stages", "programs")}
    config = replace(like, meta=meta, source=source, knobs=entry.get("knobs", {}), **launch)
    tile = [size for name, size in config.meta.items() if name != "STAGES"]
    counts = [config.meta.get("STAGES", 1), config.num_stages, config.programs]
    if not all(type(n) is int and 0 < n <= _LARGEST_TILE for n in (*tile, *counts, config.num_warps)):
        raise ValueError(f"{config.to_json()}, allowed: positive integers")
    if math.prod(tile) > _LARGEST_TILE or any(n & (n - 1) for n in (*tile, config.num_warps)):
        raise ValueError(f"{config.to_json()}, allowed: powers of two, {_LARGEST_TILE} elements at most")
    allowed = backends.knobs(like.device)
    if any(value not in allowed.get(name, ()) for name, value in config.knobs.items()):
        raise ValueError(f"knobs={config.knobs}, allowed: {allowed}")
    if config.refusal():
        raise ValueError(config.refusal())
    return config


def _valid(entry, like: Config, source: str, kernel: str) -> Config | None:
    """The Config in a table's entry, if it was measured on this code, can be launched, and was not refused before."""
    try:
        if (entry["kernel"], entry["triton"]) != (kernel, triton.__version__):
            return None
        config = launchable(entry, like, source)
        return None if _name(config) in _refused else config
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        warn_once(f"ignoring a malformed {source} winner of the tuning table: {error!r}")
        return None


class Refused(Exception):
    """A winner that the compiler or the driver could not launch: the caller asks again and gets another."""


_refused: set[str] = set()  # such winners, each with its key and device


def _name(config: Config) -> str:
    return f"{config.device.vendor}-{config.device.arch} {config.key} {json.dumps(config.to_json())}"


def refuse(config: Config, error: Exception) -> Refused:
    """Take a winner of a table out of use, for this process; what to raise in place of `error`."""
    _refused.add(_name(config))
    warn_once(f"ignoring the {config.source} winner {_name(config)}, which cannot be launched here: {error!r}"[:500])
    CONFIGS[config.key.partition("(")[0]].forget()
    return Refused(_name(config))


_overrides: dict[str, Config] = {}
_asked: set | None = None  # (tuned function, shape, device) looked up while recording


def tuned(heuristic):
    """Make a heuristic the default of a configuration that tables override. See the module's docstring."""
    module, name = heuristic.__module__, heuristic.__name__.removesuffix("_config")
    if name in CONFIGS and CONFIGS[name].__module__ != module:
        raise ValueError(f"two kernels are called {name}: in {CONFIGS[name].__module__} and in {module}")

    def key(*shape) -> str:
        return f"{name}({', '.join(map(str, shape))})"

    def kernel():
        return getattr(sys.modules[module], name)

    @functools.cache
    def look_up(*shape_and_device) -> Config:
        *shape, device = shape_and_device
        default = replace(heuristic(*shape, device), device=device, key=key(*shape))
        if key(*shape) in _overrides:
            return replace(_overrides[key(*shape)], device=device)
        if AVAILABLE:
            for file, source in ((cache_file(device), LOCAL), (shipped_file(device), SHIPPED)):
                entry = _table(file).get(key(*shape))
                winner = None if entry is None else _valid(entry, default, source, kernel_hash(kernel()))
                if winner is not None:
                    return winner
        return default

    @functools.wraps(heuristic)
    def config(*shape_and_device) -> Config:
        if _asked is not None:
            _asked.add((config, shape_and_device[:-1], shape_and_device[-1]))
        return look_up(*shape_and_device)

    config.heuristic = lambda *a: replace(heuristic(*a), device=a[-1])
    config.key, config.kernel, config.forget = key, kernel, look_up.cache_clear
    CONFIGS[name] = config
    return config


@functools.cache
def _table(file: Path) -> dict:
    return read_table(file)


def forget() -> None:
    """Read the tables again at the next launch."""
    _table.cache_clear()
    for config in CONFIGS.values():
        config.forget()


@contextmanager
def override(key: str, config: Config):
    """Launch with `config` wherever the configuration called `key` is asked for."""
    _overrides[key] = config
    CONFIGS[key.partition("(")[0]].forget()
    try:
        yield
    finally:
        del _overrides[key]
        CONFIGS[key.partition("(")[0]].forget()


def entry_for(config, shape, winner: Config, seconds: float, default_seconds: float) -> dict:
    """What a table keeps of a winner, and how it was found."""
    return {
        **winner.to_json(),
        "kernel": kernel_hash(config.kernel()),
        "triton": triton.__version__,
        "device": winner.device.name,
        "date": time.strftime("%Y-%m-%d"),
        "ms": _ms(seconds),
        "heuristic_ms": _ms(default_seconds),
    }


def record(file: Path, entries: dict) -> None:
    """Merge winners into a table, and take out those given as None: readable JSON, under a lock, replaced in one step.

    A full disk or a read-only folder costs the winners and one warning, nothing else.
    """
    from filelock import FileLock  # a dependency of torch

    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=60):
            merged = {key: entry for key, entry in (read_table(file) | entries).items() if entry is not None}
            part.write_text(json.dumps(merged, indent=1, sort_keys=True) + "\n")
            part.replace(file)
    except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
        warn_once(f"the tuning table {file} could not be written, so its winners are lost: {error}")
        with suppress(OSError):
            part.unlink()
    forget()


def neighbours(config: Config) -> list[Config]:
    """What lies one halving or doubling away from `config` in one number, in one number and the warps together, or in
    one option of its compiler; nothing that the device would refuse."""
    found = []

    def add(meta, **changes):
        candidate = replace(config, meta=config.meta | meta, **changes)
        if min([candidate.num_warps, *candidate.meta.values()]) >= 1 and not candidate.refusal():
            found.append(candidate)

    for scale in (0.5, 2):
        num_warps = int(config.num_warps * scale)
        add({}, num_warps=num_warps)
        add({}, programs=max(int(config.programs * scale), 1))
        add({}, num_stages=max(int(config.num_stages * scale), 1))
        for name, value in config.meta.items():
            add({name: int(value * scale)})
            add({name: int(value * scale)}, num_warps=num_warps)
    options = config.device.launch_options | config.knobs
    for name, values in backends.knobs(config.device).items():
        for value in values:
            if value != options.get(name):
                add({}, knobs=config.knobs | {name: value})
    return found


def bench(function) -> float:
    """Seconds of one call on the device: the median of repeated runs with a cold L2."""
    return triton.testing.do_bench(function, warmup=10, rep=50, return_mode="median") / 1e3


def configurations_of(function) -> list[tuple]:
    """(tuned function, shape, device) of every configuration that `function()` looks up, in the order of their keys."""
    global _asked
    _asked = set()
    try:
        function()
        return sorted(_asked, key=lambda item: item[0].key(*item[1]))
    finally:
        _asked = None


def tune(function, file: Path | None = None, only=None, progress=lambda key, tried, best: None, margin=0.03) -> dict:
    """Search, for every configuration that `function()` looks up, from its heuristic downhill, and keep the winners.

    A winner is written as soon as it is found, so an interrupted search loses only the one it was at.

    Args:
        function: runs the op; must be safe to repeat.
        file: the table to write; the user's cache by default.
        only: the keys to search for; all by default.
        progress: called with (key, candidates tried, the best Config so far) after each candidate.
        margin: a winner is kept only if it beats the heuristic by more than this share, twice; the tables stay small.

    Returns:
        key -> {"ms", "heuristic_ms", "candidates"}, and the whole entry of the table where a winner was kept.
    """
    report = {}
    for config, shape, device in configurations_of(function):
        key = config.key(*shape)
        if only is not None and key not in only:
            continue
        default = config.heuristic(*shape, device)
        times = {}  # candidate as text -> seconds

        def seconds(candidate, key=key, times=times):
            name = json.dumps(candidate.to_json())
            if name not in times:
                times[name] = _seconds(function, key, candidate)
            return times[name]

        best, found = None, default
        while found is not best:
            best = found
            for candidate in (best, *neighbours(best)):
                if seconds(candidate) < seconds(found):
                    found = candidate
                progress(key, len(times), found)
        file = file or cache_file(device)
        kept = None
        if seconds(best) < seconds(default) * (1 - margin):
            again, default_again = _seconds(function, key, best), _seconds(function, key, default)
            if again < default_again * (1 - margin):
                kept = entry_for(config, shape, best, again, default_again)
        if kept or key in read_table(file):  # a winner of old may have lost to the heuristic
            record(file, {key: kept})
        measured = {"ms": _ms(seconds(best)), "heuristic_ms": _ms(seconds(default))}
        report[key] = (kept or measured) | {"candidates": len(times)}
    return report


compiled_kernels = list  # all that are, which liger_hw.launch knows: it needs this module, so it tells it how to ask


def _seconds(function, key, candidate) -> float:
    before = {id(kernel) for kernel in compiled_kernels()}
    try:
        with override(key, candidate):
            seconds = bench(function)
        # one that spills may win at the shape that was measured, and is the first to lose where memory is busy
        spills = any(kernel.n_spills for kernel in compiled_kernels() if id(kernel) not in before)
        return math.inf if spills else seconds
    except Exception as error:  # compilers reject a candidate in many ways; none of them may end the search
        logger.debug("%s cannot run %s: %s", key, candidate, error)
        return math.inf


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 5)


def calls_within(function) -> list:
    """What `function()` launches, as one repeatable callable for each `raw` function it runs."""
    global observer
    calls, before = [], observer

    def remember(launches, args, repeatable):
        calls.append(functools.partial(launches, *args))
        return launches(*args)

    observer = remember
    try:
        function()
        return calls
    finally:
        observer = before


_tried = set()


def _call_and_tune(launches, args, repeatable: bool):
    """`launches(*args)`; then tune what it looked up for its own device, unless a winner is known or was sought."""
    global _asked
    if not repeatable or args[0].device.type in ("cpu", "meta") or _asked is not None or _overrides:
        return launches(*args)
    _asked = set()
    try:
        result = launches(*args)
        wanted = _asked
    finally:
        _asked = None
    here = backends.detected(args[0].device)
    mine = {config.key(*shape): config(*shape, device) for config, shape, device in wanted if device is here}
    new = {key for key, chosen in mine.items() if chosen.source != LOCAL} - _tried
    if new:
        _tried.update(new)
        tune(functools.partial(launches, *args), only=new)
    return result


def autotuning() -> bool:
    """Whether LIGER_HW_AUTOTUNE=1 asks for tuning at first use."""
    return os.environ.get("LIGER_HW_AUTOTUNE") == "1"


def _first_call(launches, args, repeatable: bool):
    """The environment is read at the first launch, once, and not at import."""
    global observer
    observer = _call_and_tune if autotuning() else None
    return launches(*args) if observer is None else observer(launches, args, repeatable)


# Called as (function, its arguments, whether it may be repeated) in place of every `raw` function, unless it is None.
observer = _first_call
