"""Choose a launch configuration: from this machine's table, the shipped table, or the heuristic."""

import functools
import inspect
import json
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from liger_hw._triton import AVAILABLE
from liger_hw.tuning import entries
from liger_hw.tuning.config import LOCAL, SHIPPED, Config

CONFIGS = {}  # name of the kernel -> tuned function, for the tools
_overrides: dict[str, Config] = {}
_recorded: set | None = None  # (tuned function, shape, device) of each look-up; None while nothing records


def tuned(heuristic):
    """Make a heuristic the default of a configuration that tables override.

    `liger_hw/tuning/__init__.py` describes heuristics, tables, and the order of the choice.

    Raises:
        ValueError: two modules have a heuristic of this name.
    """
    module, name = heuristic.__module__, heuristic.__name__.removesuffix("_config")
    if name in CONFIGS and CONFIGS[name].__module__ != module:
        raise ValueError(f"two kernels are called {name}: in {CONFIGS[name].__module__} and in {module}")

    parameters = list(inspect.signature(heuristic).parameters)[:-1]  # the last is the device

    def key(*shape) -> str:
        return entries.key_of(name, shape)

    def class_key(*shape) -> str:
        return entries.class_key_of(name, dict(zip(parameters, shape)))

    def kernel():
        return getattr(sys.modules[module], name)

    @functools.cache
    def look_up(*shape_and_device) -> Config:
        *shape, device = shape_and_device
        exact = key(*shape)
        default = replace(heuristic(*shape, device), device=device, key=exact)
        if exact in _overrides:
            return replace(_overrides[exact], device=device)
        if AVAILABLE:
            for file, source in ((entries.cache_file(device), LOCAL), (entries.shipped_file(device), SHIPPED)):
                for name_in_table in (exact, class_key(*shape)):
                    entry = _table(file).get(name_in_table)
                    winner = None if entry is None else _valid(entry, default, source, entries.kernel_hash(kernel()))
                    if winner is not None:
                        return winner
        return default

    @functools.wraps(heuristic)
    def config(*shape_and_device) -> Config:
        if _recorded is not None:
            _recorded.add((config, shape_and_device[:-1], shape_and_device[-1]))
        return look_up(*shape_and_device)

    config.heuristic = lambda *a: replace(heuristic(*a), device=a[-1])
    config.key, config.class_key, config.kernel, config.forget = key, class_key, kernel, look_up.cache_clear
    CONFIGS[name] = config
    return config


@functools.cache
def _table(file: Path) -> dict:
    return entries.read_table(file)


def forget() -> None:
    """Read the tables again at the next launch."""
    _table.cache_clear()
    for config in CONFIGS.values():
        config.forget()


@contextmanager
def recorded_lookups():
    """Yield a set that collects each look-up in the block as (tuned function, shape, device)."""
    global _recorded
    before, _recorded = _recorded, set()
    try:
        yield _recorded
    finally:
        _recorded = before


def being_measured() -> bool:
    """Return whether a block records or overrides configurations."""
    return _recorded is not None or bool(_overrides)


@contextmanager
def override(key: str, config: Config):
    """Launch with `config` wherever a kernel looks up the configuration `key`."""
    _overrides[key] = config
    CONFIGS[key.partition("(")[0]].forget()
    try:
        yield
    finally:
        del _overrides[key]
        CONFIGS[key.partition("(")[0]].forget()


def _valid(entry, like: Config, source: str, kernel: str) -> Config | None:
    """Return an entry's Config; None if its code differs or a launch refused it."""
    try:
        if entry["kernel"] != kernel:
            return None
        config = entries.launchable(entry, like, source)
        return None if _name(config) in _refused else config
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        entries.warn_once(f"ignoring a malformed {source} winner of the tuning table: {error!r}")
        return None


class Refused(Exception):
    """A table's configuration that cannot be launched: the caller asks again and gets another."""


_refused: set[str] = set()  # winners that a launch refused, each with its key and device


def _name(config: Config) -> str:
    return f"{config.device.vendor}-{config.device.arch} {config.key} {json.dumps(config.to_json())}"


def refuse(config: Config, error: Exception) -> Refused:
    """Take a table's configuration out of use in this process; return the error to raise."""
    _refused.add(_name(config))
    entries.warn_once(
        f"ignoring the {config.source} winner {_name(config)}, which cannot be launched here: {error!r}"[:500]
    )
    CONFIGS[config.key.partition("(")[0]].forget()
    return Refused(_name(config))
