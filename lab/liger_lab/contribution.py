"""Check tables before they are shipped, and make the table that ships this machine's winners."""

import ast
import inspect
import json
import re
from pathlib import Path

from liger_hw import backends, tuning
from liger_hw.backends.device import Device

FIELDS = {"meta", "num_warps", "num_stages", "programs", "kernel", "triton", "origin", "date"}
MAY_HAVE = {  # origin -> fields that an entry of it may have beside FIELDS
    tuning.MEASURED: {"knobs", "device", "ms", "heuristic_ms"},
    tuning.COMPILED: {"knobs", "heuristic_missed"},
}
PATTERNS = {"kernel": "[0-9a-f]{16}", "triton": r"\d+\.\d+.*", "date": r"\d{4}-\d\d-\d\d", "device": ".*[A-Za-z].*",
            "heuristic_missed": ".+"}  # fmt: skip


def shipped() -> list[Path]:
    """List the tables of this package."""
    return sorted(tuning.entries.SHIPPED_TABLES.glob("*.json"))


def problems(file: Path) -> list[str]:
    """List the reasons why `file` cannot be shipped, in sentences.

    Its name says for which architecture it is, its keys which kernel at which numbers. Each entry must be launchable
    there and say how and when it was found: a measured one on which device, and faster than the heuristic where it has
    times; a compiled one which gate the heuristic's choice missed. Whether the kernel's code is still the same is not
    checked here: `tuning.choice.other_code` lists entries of which it is not, which are ignored when they are read.
    """
    device = _device(file)
    if device is None:
        known = ", ".join(f"{v}-{arch}.json" for v, module in backends.VENDORS.items() for arch in module.ARCHS)
        return [f"{file}: got this name, allowed: {known}"]
    try:
        table = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        return [f"{file}: {error}"]
    if not isinstance(table, dict) or not table:
        return [f"{file}: got {type(table).__name__} of {len(table or ())}, allowed: an object of entries"]
    return [f"{file}: {key}: {wrong}" for key, entry in table.items() for wrong in _wrong(key, entry, device)]


def _device(file: Path) -> Device | None:
    vendor, _, arch = file.stem.partition("-")
    device = backends.VENDORS[vendor].ARCHS.get(arch) if vendor in backends.VENDORS else None
    return device if file.suffix == ".json" else None


def _wrong(key: str, entry, device: Device) -> list[str]:
    match = re.fullmatch(r"(\w+)\(([^()]*)\)", key)
    config = tuning.choice.CONFIGS.get(match[1]) if match else None
    if config is None:
        return ["no configuration is called so"]
    try:
        numbers = numbers_of(key)
    except (SyntaxError, ValueError):
        return ["its numbers are none"]
    names = list(inspect.signature(config).parameters)[:-1]
    if len(numbers) != len(names):
        return [f"got {len(numbers)} numbers, allowed: {', '.join(names)}"]
    if not isinstance(entry, dict):
        return [f"got {type(entry).__name__}, allowed: an object"]
    origin = entry.get("origin")
    if origin not in MAY_HAVE:
        return [f"origin={origin!r}, allowed: {', '.join(MAY_HAVE)}"]
    needed = FIELDS | ({"device"} if origin == tuning.MEASURED else {"heuristic_missed"})
    faults = []
    if missing := needed - entry.keys():
        faults.append(f"without {', '.join(sorted(missing))}")
    if unknown := entry.keys() - (allowed := FIELDS | MAY_HAVE[origin]):
        faults.append(f"got {', '.join(sorted(unknown))}, allowed: {', '.join(sorted(allowed))}")
    if "<=" in key and origin == tuning.MEASURED:
        faults.append("measured for a class of widths, allowed: one width")
    if faults:
        return faults
    try:
        tuning.entries.launchable(entry, config.heuristic(*numbers, device), tuning.SHIPPED)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        faults.append(str(error))
    times = [entry[name] for name in ("ms", "heuristic_ms") if name in entry]
    if times and not (len(times) == 2 and all(type(n) in (int, float) for n in times) and 0 < times[0] < times[1]):
        faults.append(f"ms={times[0]} and heuristic_ms={times[-1]}, allowed: a winner that is faster")
    for name, pattern in PATTERNS.items():
        if name in entry and not re.fullmatch(pattern, str(entry[name])):
            faults.append(f"{name}={entry[name]!r}, allowed: {pattern}")
    return faults


def numbers_of(key: str) -> tuple:
    """Return the numbers in a key; for a class of widths its power of two.

    Raises:
        SyntaxError, ValueError: the key holds something else.
    """
    numbers = re.sub(r"<=(\d+) (?:aligned|odd)(?=[,)])", r"\1", key).partition("(")[2].removesuffix(")")
    return ast.literal_eval(f"({numbers},)") if numbers else ()


def contribute(table: Path, device: Device, folder: Path) -> Path | None:
    """Merge the winners of `table` that may be shipped into the shipped table.

    Args:
        table: this machine's, or the output of `liger-hw tune --output`.
        device: where they were measured.
        folder: where the file goes, under the name that it would be shipped under.

    Returns:
        The file, or None if there is no such winner.

    Raises:
        ValueError: this package does not know the device's architecture, so no table of it would be read.
    """
    file = folder / f"{device.vendor}-{device.arch}.json"
    if _device(file) is None:
        raise ValueError(
            f"{device.arch} is not among {device.vendor}'s architectures in liger_hw/backends: add it first"
        )
    kept = {key: entry for key, entry in tuning.entries.read_table(table).items()
            if not _wrong(key, entry, device) and tuning.choice.is_current(key, entry)}  # fmt: skip
    if not kept:
        return None
    tuning.entries.write_table(file, tuning.entries.read_table(tuning.entries.shipped_file(device)) | kept)
    return file
