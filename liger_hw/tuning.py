"""The other decorator. The body it wraps is the heuristic; measurements override it.

    @tuned
    def rms_norm_forward_config(cols, itemsize, device) -> Config:      # pure: numbers and a Device in, Config out
        return ...

Order: a winner measured on this machine, a winner shipped with the package, the heuristic. `X_config` is the
configuration of the kernel `X` in the same file; a winner is used only while that kernel's code is what was measured.
"""

import ast
import functools
import hashlib
import inspect
import json
import logging
import os
import sys
import textwrap
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from liger_hw._triton import AVAILABLE, triton
from liger_hw.backends.device import Device

logger = logging.getLogger(__name__)

CONFIGS = {}  # name -> tuned function, for the tools
HEURISTIC, SHIPPED, LOCAL = "heuristic", "shipped", "local"


@dataclass(frozen=True, eq=False)  # by identity: it is part of every launch's key
class Config:
    """How to launch one kernel.

    Attributes:
        meta: Triton meta-parameters by name, in the order of the kernel's last parameters.
        num_warps: warps per program.
        num_stages: stages of the compiler's loop pipeliner.
        programs: for kernels whose grid does not grow with the rows: programs per core.
        device: the Device it was made for; `tuned` fills this in.
        source: "heuristic", "shipped" or "local".
    """

    meta: dict
    num_warps: int = 4
    num_stages: int = 1
    programs: int = 1
    device: Device | None = None
    source: str = HEURISTIC

    def __getitem__(self, name):
        return self.meta[name]

    def grid_for(self, tiles: int) -> int:
        """Programs of a grid that strides over `tiles`: a fixed number, but no idle ones; at least one."""
        return max(min(self.programs * self.device.num_cores, tiles), 1)

    def options(self, here: Device) -> dict:
        """Launch options for the compiler of `here`. Another vendor's knobs would be unknown keywords to it."""
        mine = self.device.launch_options if self.device.vendor == here.vendor else {}
        # The default of enable_fp_fusion changes with Triton 3.10; stating it keeps the numbers.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **mine}

    def to_json(self) -> dict:
        return {
            "meta": self.meta, "num_warps": self.num_warps, "num_stages": self.num_stages, "programs": self.programs,
        }  # fmt: skip


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`. (Here, so that heuristics need no Triton.)"""
    return 1 << max(n - 1, 0).bit_length()


def row_warps(elements: int, device: Device, per_lane: int = 8, most: int | None = None) -> int:
    """Warps for a block of `elements`, `per_lane` to a lane, between one warp and `most` (or the device's limit)."""
    limit = min(most or device.max_warps, device.max_warps)
    return min(max(power_of_2(elements) // (per_lane * device.warp_size), 1), limit)


def cache_file(device: Device) -> Path:
    root = os.environ.get("LIGER_HW_CACHE_DIR") or Path.home() / ".cache" / "liger_hw"
    return Path(root) / f"{device.vendor}-{device.arch}.json"


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
    except (OSError, ValueError) as error:
        logger.warning("ignoring the tuning table %s: %s", file, error)
        return {}


def kernel_hash(kernel) -> str:
    """A hash of a Triton kernel's code and of the jit functions it calls; comments and layout do not count."""
    seen, todo = {}, [kernel]
    while todo:
        function = todo.pop().fn
        if function.__qualname__ in seen:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        seen[function.__qualname__] = ast.dump(tree)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        called = (function.__globals__.get(name) for name in sorted(names))
        todo += [f for f in called if f is not todo and hasattr(f, "fn") and inspect.isfunction(f.fn)]
    return hashlib.sha256("".join(seen[name] for name in sorted(seen)).encode()).hexdigest()[:16]


def _valid(entry, like: Config, source: str, kernel: str) -> Config | None:
    """The Config in a table's entry if it was measured on this code, can be launched and has the kernel's parameters."""
    try:
        if (entry["kernel"], entry["triton"]) != (kernel, triton.__version__):
            return None
        config = Config(entry["meta"], entry["num_warps"], entry["num_stages"], entry["programs"], like.device, source)
        numbers = [*config.meta.values(), config.num_warps, config.num_stages, config.programs]
        if list(config.meta) != list(like.meta) or not all(type(n) is int and 0 < n < 2**31 for n in numbers):
            raise ValueError(f"expected positive integers for {list(like.meta)}")
        if config.num_warps > like.device.max_warps or config.num_warps & (config.num_warps - 1):
            raise ValueError(f"num_warps={config.num_warps}, allowed: powers of two up to {like.device.max_warps}")
        return config
    except (KeyError, TypeError, ValueError) as error:
        logger.warning("ignoring a malformed %s winner of the tuning table: %r", source, error)
        return None


_overrides: dict[str, Config] = {}
_asked: set | None = None  # (tuned function, shape, device) looked up while recording


def tuned(heuristic):
    """Make a heuristic the default of a configuration that tables override. See the module's docstring."""
    module = heuristic.__module__
    name = f"{module.rpartition('.')[2]}.{heuristic.__name__}"

    def key(*shape) -> str:
        return f"{name}({', '.join(map(str, shape))})"

    def kernel():
        return getattr(sys.modules[module], heuristic.__name__.removesuffix("_config"))

    @functools.cache
    def look_up(*shape_and_device) -> Config:
        *shape, device = shape_and_device
        default = replace(heuristic(*shape, device), device=device)
        if key(*shape) in _overrides:
            return replace(_overrides[key(*shape)], device=device)
        if AVAILABLE:
            for file, source in ((cache_file(device), LOCAL), (shipped_file(device), SHIPPED)):
                entry = _table(file).get(key(*shape))
                winner = entry and _valid(entry, default, source, kernel_hash(kernel()))
                if winner:
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
        "ms": round(seconds * 1e3, 5),
        "heuristic_ms": round(default_seconds * 1e3, 5),
    }


def record(file: Path, entries: dict) -> None:
    """Merge winners into a table: readable JSON, under a lock, replaced in one step.

    A full disk or a read-only folder costs the winners and one warning, nothing else.
    """
    from filelock import FileLock  # a dependency of torch

    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            part.write_text(json.dumps(read_table(file) | entries, indent=1, sort_keys=True) + "\n")
            part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True) if part.exists() else None
        logger.warning("the tuning table %s could not be written, so its winners are lost: %s", file, error)
    forget()


def neighbours(config: Config) -> list[Config]:
    """The search space: the heuristic's choice and what lies one doubling away from it in each number."""
    device = config.device
    found = {}
    for scale in (0.5, 1, 2):
        for parameter in config.meta:
            meta = config.meta | {parameter: int(config.meta[parameter] * scale)}
            for num_warps in (config.num_warps // 2, config.num_warps, config.num_warps * 2):
                for programs in {config.programs, 2 * config.programs, max(config.programs // 2, 1)}:
                    for num_stages in {config.num_stages, config.num_stages + 1}:
                        if min(meta.values()) >= 1 and 1 <= num_warps <= device.max_warps:
                            candidate = replace(
                                config, meta=meta, num_warps=num_warps, programs=programs, num_stages=num_stages
                            )
                            found.setdefault(json.dumps(candidate.to_json()), candidate)
    return list(found.values())


def bench(function) -> float:
    """Seconds of one call on the device: the median of repeated runs with a cold L2."""
    return triton.testing.do_bench(function, warmup=10, rep=50, return_mode="median") / 1e3


def tune(function, file: Path | None = None, progress=lambda done, total: None, margin: float = 0.03) -> dict:
    """Measure the neighbours of every configuration that `function()` looks up and keep the winners.

    Args:
        function: runs the op; must be safe to repeat.
        file: the table to write; the user's cache by default.
        progress: called with (candidates done, candidates in all) after each.
        margin: a winner is kept only if it beats the heuristic by more than this share; the tables stay small.

    Returns:
        key -> entry, for every configuration asked for; entries without "meta" kept the heuristic.
    """
    global _asked
    _asked = set()
    try:
        function()
        asked = sorted(_asked, key=lambda item: item[0].key(*item[1]))
    finally:
        _asked = None
    spaces = [(config, shape, neighbours(config.heuristic(*shape, device))) for config, shape, device in asked]
    total, done, kept, report = sum(len(space) for _, _, space in spaces), 0, {}, {}
    for config, shape, space in spaces:
        times = []
        for candidate in space:
            try:
                with override(config.key(*shape), candidate):
                    times.append(bench(function))
            except Exception as error:  # compilers reject a candidate in many ways; none of them may end the search
                logger.debug("%s cannot run %s: %s", config.key(*shape), candidate, error)
                times.append(float("inf"))
            done += 1
            progress(done, total)
        best = min(range(len(space)), key=times.__getitem__)
        key = config.key(*shape)
        report[key] = {"ms": times[best] * 1e3, "heuristic_ms": times[0] * 1e3, "candidates": len(space)}
        if times[best] < times[0] * (1 - margin):
            kept[key] = report[key] = entry_for(config, shape, space[best], times[best], times[0])
    if kept:
        record(file or cache_file(asked[0][2]), kept)
    return report


@functools.cache
def autotuning() -> bool:
    """Whether LIGER_HW_AUTOTUNE=1 asks to measure each configuration at its first use. Read once."""
    return os.environ.get("LIGER_HW_AUTOTUNE") == "1"


_tried = set()


def tune_first_use(function, device: torch.device) -> None:
    """Under LIGER_HW_AUTOTUNE=1: tune `function`'s configurations unless this machine has winners or tried before."""
    global _asked
    if not autotuning() or device.type == "cpu" or _asked is not None or _overrides:
        return
    _asked = set()
    try:
        function()
        keys = {config.key(*shape) for config, shape, _ in _asked}
        known = {c.key(*s) for c, s, d in _asked if c(*s, d).source == LOCAL}
    finally:
        _asked = None
    if keys - known - _tried:
        _tried.update(keys)
        tune(function)
