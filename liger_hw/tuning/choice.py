"""Choose a launch configuration: from this machine's table, the shipped table, or the heuristic."""

import functools
import inspect
import json
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

from liger_hw._triton import AVAILABLE, triton
from liger_hw.tuning import entries
from liger_hw.tuning.config import LOCAL, SHIPPED, Config

CONFIGS = {}  # name of the kernel -> tuned function, for the tools
_overrides: dict[str, Config] = {}
_recorded: set | None = None  # (tuned function, numbers, device) of each look-up; None while nothing records


def tuned(heuristic, name=None):
    """Make a heuristic the default of a configuration that tables override.

    `liger_hw/tuning/__init__.py` describes heuristics, tables, and the order of the choice.

    Args:
        heuristic: takes numbers, such as a width and an item size, and the device.
        name: of a kernel in the heuristic's file; by default the heuristic's without `_config`.

    Raises:
        ValueError: two modules have a heuristic of this name.
    """
    module, name = heuristic.__module__, name or heuristic.__name__.removesuffix("_config")
    if name in CONFIGS and CONFIGS[name].__module__ != module:
        raise ValueError(f"two kernels are called {name}: in {CONFIGS[name].__module__} and in {module}")

    parameters = list(inspect.signature(heuristic).parameters)[:-1]  # the last is the device

    @functools.cache
    def look_up(*numbers_and_device) -> Config:
        *numbers, device = numbers_and_device
        exact = config.key(*numbers)
        default = replace(heuristic(*numbers, device), device=device, key=exact)
        if exact in _overrides:
            return replace(_overrides[exact], device=device)
        if AVAILABLE:
            for file, source in ((entries.cache_file(device), LOCAL), (entries.shipped_file(device), SHIPPED)):
                for key in (exact, config.class_key(*numbers)):
                    winner = _valid(config, _table(file).get(key), default, source)
                    if winner is not None:
                        return winner
        return default

    @functools.wraps(heuristic)
    def config(*numbers_and_device) -> Config:
        if _recorded is not None:
            _recorded.add((config, numbers_and_device[:-1], numbers_and_device[-1]))
        return look_up(*numbers_and_device)

    config.heuristic = lambda *a: replace(heuristic(*a), device=a[-1])  # without a key: no launch uses it
    config.key = lambda *numbers: entries.key_of(name, numbers)
    config.class_key = lambda *numbers: entries.class_key_of(name, dict(zip(parameters, numbers)))
    config.kernel = lambda: getattr(sys.modules[module], name)
    config.forget = look_up.cache_clear
    CONFIGS[name] = config
    return config


_table = functools.cache(entries.read_table)


def is_current(key: str, entry: dict) -> bool:
    """Tell whether an entry was written for the code that its kernel has here."""
    config = CONFIGS.get(key.partition("(")[0])
    known = config is not None and isinstance(entry, dict)
    return known and entry.get("kernel") == entries.kernel_hash(config.kernel())


def other_code(table: dict) -> list[str]:
    """List the keys of entries whose kernels have other code here."""
    return [key for key, entry in table.items() if not is_current(key, entry)]


def other_triton(table: dict) -> dict[str, int]:
    """Count the valid entries of each version of Triton that differs from the installed version."""
    versions = Counter(str(entry.get("triton")) for key, entry in table.items() if is_current(key, entry))
    return {version: count for version, count in sorted(versions.items()) if version != triton.__version__}


def forget() -> None:
    """Read the tables again at the next launch."""
    _table.cache_clear()
    for config in CONFIGS.values():
        config.forget()


@contextmanager
def recorded_lookups():
    """Yield a set that collects each look-up in the block as (tuned function, numbers, device)."""
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
    """Launch with `config` wherever a kernel looks up the configuration `key`.

    Blocks of one key do not nest.
    """
    _overrides[key] = config
    CONFIGS[key.partition("(")[0]].forget()
    try:
        yield
    finally:
        del _overrides[key]
        CONFIGS[key.partition("(")[0]].forget()


def _valid(tuned_function, entry, like: Config, source: str) -> Config | None:
    """Return an entry's Config, or None if it is absent, outdated or withdrawn."""
    if entry is None:
        return None
    code_hash = entries.kernel_hash(tuned_function.kernel())
    try:
        if entry["kernel"] != code_hash:
            return None
        config = entries.launchable(entry, like, source)
        return None if _identity(config) in _withdrawn else config
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        entries.warn_once(f"ignoring a malformed {source} winner of the tuning table: {error!r}")
        return None


class LaunchFailed(Exception):
    """A table's configuration that cannot be launched: the caller asks again and gets another."""


_withdrawn: set[str] = set()  # winners whose launch failed, each with its key and device


def _identity(config: Config) -> str:
    return f"{config.device.vendor}-{config.device.arch} {config.key} {json.dumps(config.to_json())}"


def withdraw(config: Config, error: Exception) -> LaunchFailed:
    """Take a table's configuration out of use in this process; return the error to raise."""
    _withdrawn.add(_identity(config))
    entries.warn_once(
        f"ignoring the {config.source} winner {_identity(config)}, which cannot be launched here: {error!r}"[:500]
    )
    CONFIGS[config.key.partition("(")[0]].forget()
    return LaunchFailed(_identity(config))
