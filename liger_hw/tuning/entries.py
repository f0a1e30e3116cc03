"""Read and write tables: their files, the widths of an entry, and its validity.

A table is a JSON file for one architecture: key -> entry. A key is a kernel and the numbers that its heuristic takes,
"rms_norm_forward(4608, 2)", or a class of widths in the place of `cols`, "rms_norm_forward(<=8192 aligned, 2)". The
origin of an entry says how it was found: "measured" by `liger-hw tune` on the hardware, at one width, or "compiled" by
`liger-hw compile --mend` because the compiler refused the heuristic's choice, for a class of widths.
"""

import ast
import functools
import hashlib
import inspect
import json
import logging
import math
import os
import stat
import tempfile
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from liger_hw import backends
from liger_hw.backends.device import Device
from liger_hw.tuning.config import Config, power_of_2

logger = logging.getLogger(__name__)

LARGEST_FILE = 16 * 2**20  # bytes of a cache file that is read; tables of every kernel and shape have some 100 KB


def _user():
    return os.getuid() if hasattr(os, "getuid") else 0  # Windows gives every file to user 0


def cache_folder() -> Path:
    """Return the folder of this user's winners and compiled results: LIGER_HW_CACHE_DIR, or ~/.cache/liger_hw."""
    chosen = os.environ.get("LIGER_HW_CACHE_DIR")
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "liger_hw"
    except RuntimeError:  # a container's user without a name or a home
        return _private_temporary_folder(Path(tempfile.gettempdir()) / f"liger_hw-{_user()}")


@functools.cache
def _private_temporary_folder(folder: Path) -> Path:
    """Make `folder` for this user alone, or return another where that fails."""
    try:
        if not os.path.lexists(folder):
            folder.mkdir(mode=0o700)
        facts = folder.lstat()
    except OSError:  # nothing to read, and writing says why
        return folder
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == _user() and not facts.st_mode & 0o077:
        return folder
    private = Path(tempfile.mkdtemp(prefix="liger_hw-"))
    warn_once(
        f"{folder} is not used: it is no folder that this user alone may write to. Until this process ends, "
        f"{private} is used; set LIGER_HW_CACHE_DIR to a folder of your own to keep results"
    )
    return private


def read_owned(file: Path, largest: int = LARGEST_FILE) -> str:
    """Return the text of a file of winners or results.

    Raises:
        OSError: it is absent or unreadable; no regular file, as reading a pipe may wait for ever; larger than
            `largest` bytes; or neither of this user, nor of root, nor of the user who installed this library.
    """
    facts = file.stat()
    if not stat.S_ISREG(facts.st_mode):
        raise OSError("it is not a regular file")
    if facts.st_size > largest:
        raise OSError(f"it has {facts.st_size} bytes, allowed: {largest}")
    if facts.st_uid not in (_user(), 0, os.stat(__file__).st_uid):
        raise OSError(f"it belongs to user {facts.st_uid}, allowed: this user ({_user()}) or root")
    return file.read_text()


def cache_file(device: Device) -> Path:
    return cache_folder() / f"{device.vendor}-{device.arch}.json"


SHIPPED_TABLES = Path(__file__).parent / "tables"


def shipped_file(device: Device) -> Path:
    return SHIPPED_TABLES / f"{device.vendor}-{device.arch}.json"


def key_of(name: str, arguments: Iterable) -> str:
    """Return the key of a kernel's entry for one shape."""
    return f"{name}({', '.join(map(str, arguments))})"


def class_key_of(name: str, arguments: dict) -> str:
    """Return the key of a kernel's entry for the class of widths of `cols`.

    The class is the next power of two, and whether rows of that many columns begin at multiples of 16 values, which is
    what Triton distinguishes. A power of two is a class of its own, and so is a shape without `cols`: the key is
    `key_of`'s.
    """
    cols = arguments.get("cols", 1)
    if cols == power_of_2(cols):
        return key_of(name, arguments.values())
    width_class = f"<={power_of_2(cols)} {'odd' if cols % 16 else 'aligned'}"
    return key_of(name, (arguments | {"cols": width_class}).values())


def read_table(file: Path) -> dict:
    """Read the entries of `file` by key.

    An absent file is empty; so is an unreadable or malformed one, with one warning.
    """
    try:
        table = json.loads(read_owned(file))
        if not isinstance(table, dict):
            raise ValueError(f"expected an object of entries, got {type(table).__name__}")
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
    """Hash the code of a Triton kernel, of its jit functions and their constants.

    Comments, docstrings, layout, names of variables and the modules that these are in do not count.
    """
    seen, todo = {}, [kernel.fn]
    while todo:
        function = todo.pop()
        name = f"{function.__module__}.{function.__qualname__}"
        if name in seen:
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        body = tree.body[0].body
        if ast.get_docstring(tree.body[0]) and len(body) > 1:
            del body[0]
        words = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & set(function.__globals__))
        named = {word: function.__globals__[word] for word in words}
        constants = {word: value for word, value in named.items() if isinstance(value, (int, float, str))}
        _number_variables(tree.body[0])
        seen[name] = f"{ast.unparse(tree)}{constants}"  # not ast.dump, whose output changes with Python's version
        todo += [value.fn for value in named.values() if inspect.isfunction(getattr(value, "fn", None))]
    return hashlib.sha256("".join(sorted(seen.values())).encode()).hexdigest()[:16]


def _number_variables(function):
    """Name a function's variables, but no arguments, by the order of their assignments."""
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name) and node.id not in arguments]
    numbers = {}
    for node in names:
        if isinstance(node.ctx, ast.Store):
            numbers.setdefault(node.id, f"v{len(numbers)}")
    for node in names:
        node.id = numbers.get(node.id, node.id)


_LARGEST_TILE = 2**20  # elements of one Triton tensor


def launchable(entry: dict, like: Config, source: str) -> Config:
    """Make the Config of a table's entry, with the device and the parameters of `like`.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: what is wrong with it.
    """
    if entry["meta"].keys() != like.meta.keys():
        raise ValueError(f"meta={entry['meta']}, allowed: {', '.join(like.meta)}")
    meta = {name: entry["meta"][name] for name in like.meta}  # in the kernel's order
    launch = {name: entry[name] for name in ("num_warps", "num_stages", "programs")}
    if not isinstance(entry["triton"], str):
        raise ValueError(f"triton={entry['triton']!r}, allowed: a version")
    config = replace(like, meta=meta, source=source, triton=entry["triton"], knobs=entry.get("knobs", {}), **launch)
    tile = [size for name, size in config.meta.items() if name != "STAGES"]
    counts = [config.meta.get("STAGES", 1), config.num_stages, config.programs]
    if not all(type(n) is int and 0 < n <= _LARGEST_TILE for n in (*tile, *counts, config.num_warps)):
        raise ValueError(f"{config.to_json()}, allowed: positive integers")
    # tensors have two dimensions: of a product of matrices, with a depth, no tensor has all sizes
    if math.prod(sorted(tile)[-2:]) > _LARGEST_TILE or any(n & (n - 1) for n in (*tile, config.num_warps)):
        raise ValueError(f"{config.to_json()}, allowed: powers of two, {_LARGEST_TILE} elements of a tile at most")
    allowed = backends.knobs(like.device)
    if any(value not in allowed.get(name, ()) for name, value in config.knobs.items()):
        raise ValueError(f"knobs={config.knobs}, allowed: {allowed}")
    if config.launch_error():
        raise ValueError(config.launch_error())
    return config


def write_table(file: Path, table: dict) -> None:
    """Write a table as readable JSON, in one step."""
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
