"""Tables of winners as people hand them on: what is wrong with one, and the one that this machine's winners make."""

import ast
import inspect
import json
import re
from pathlib import Path

from liger_hw import backends, tuning
from liger_hw.backends.device import Device

SHIPPED = Path(backends.__file__).parent
FIELDS = {"meta", "num_warps", "num_stages", "programs", "knobs", "kernel", "triton", "device", "date", "ms",
          "heuristic_ms"}  # fmt: skip


def shipped() -> list[Path]:
    """The tables that this package brings."""
    return sorted(SHIPPED.glob("*.json"))


def problems(file: Path) -> list[str]:
    """Why `file` cannot be shipped, in sentences; none if it can.

    Its name says for which architecture it is, its keys which kernel at which numbers; each entry must be launchable
    there, faster than the heuristic, and say where and when it was measured. Whether the kernel's code and Triton are
    still those is not looked at: an entry that they are not is ignored when it is read.
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
        return [f"{file}: got {type(table).__name__} of {len(table or ())}, allowed: an object of winners"]
    return [f"{file}: {key}: {wrong}" for key, entry in table.items() for wrong in _wrong(key, entry, device)]


def stale(file: Path) -> list[str]:
    """Keys of the entries in a valid table that were measured on other code or another Triton than is here."""
    table = json.loads(file.read_text())
    return [key for key, entry in table.items() if not _current(key, entry)]


def _current(key: str, entry: dict) -> bool:
    config = tuning.CONFIGS[key.partition("(")[0]]
    return tuning.measured_on(entry, tuning.kernel_hash(config.kernel()))


def _device(file: Path) -> Device | None:
    vendor, _, arch = file.stem.partition("-")
    found = backends.VENDORS[vendor].ARCHS.get(arch) if vendor in backends.VENDORS else None
    return found if file.suffix == ".json" else None


def _wrong(key: str, entry, device: Device) -> list[str]:
    match = re.fullmatch(r"(\w+)\(([^()]*)\)", key)
    config = tuning.CONFIGS.get(match[1]) if match else None
    if config is None:
        return ["no configuration is called so"]
    try:
        shape = ast.literal_eval(f"({match[2]},)") if match[2] else ()
    except (SyntaxError, ValueError):
        return ["its numbers are none"]
    wanted = list(inspect.signature(config).parameters)[:-1]
    if len(shape) != len(wanted):
        return [f"got {len(shape)} numbers, allowed: {', '.join(wanted)}"]
    if not isinstance(entry, dict):
        return [f"got {type(entry).__name__}, allowed: an object"]
    found = []
    if missing := (FIELDS - {"knobs"}) - entry.keys():
        found.append(f"without {', '.join(sorted(missing))}")
    if unknown := entry.keys() - FIELDS:
        found.append(f"got {', '.join(sorted(unknown))}, allowed: {', '.join(sorted(FIELDS))}")
    if found:
        return found
    try:
        tuning.launchable(entry, config.heuristic(*shape, device), tuning.SHIPPED)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        found.append(str(error))
    times = entry["ms"], entry["heuristic_ms"]
    if not all(type(n) in (int, float) and n > 0 for n in times) or times[0] >= times[1]:
        found.append(f"ms={times[0]} and heuristic_ms={times[1]}, allowed: a winner that is faster")
    for name, pattern in (("kernel", "[0-9a-f]{16}"), ("triton", r"\d+\.\d+.*"), ("device", ".*[A-Za-z].*"),
                          ("date", r"\d{4}-\d\d-\d\d")):  # fmt: skip
        if not re.fullmatch(pattern, str(entry[name])):
            found.append(f"{name}={entry[name]!r}, allowed: {pattern}")
    return found


def contribute(table: Path, device: Device, folder: Path) -> Path | None:
    """Write those winners of `table` that may be shipped to a file of the name they would be shipped under.

    Args:
        table: this machine's, or the one that `liger-hw tune --output` wrote.
        device: where they were measured.
        folder: where the file goes.

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
    kept = {key: entry for key, entry in tuning.read_table(table).items()
            if not _wrong(key, entry, device) and _current(key, entry)}  # fmt: skip
    if not kept:
        return None
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    return file
