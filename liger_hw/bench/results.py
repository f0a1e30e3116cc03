"""Results: where and when they came about, what they begin with, and how they are kept."""

import json
import os
import platform
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from liger_hw import __version__, backends
from liger_hw.console import installed_version

PACKAGES = ("torch", "triton", "liger-kernel", "quack-kernels", "cut-cross-entropy", "transformers")


def about(device) -> dict:
    """Where and when: device, versions, commit, command."""
    here = backends.detected(device)
    name = here.name or f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return {
        "device": {
            "name": name, "vendor": here.vendor, "arch": here.arch, "python": platform.python_version(),
            "clock": "wall, warm caches" if device.type == "cpu" else "events on the stream, cold L2",
        },
        "versions": {package: installed_version(package) for package in PACKAGES}
        | {"liger_hw": __version__, "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "commit": _commit(),
        "backend": backends.forced() or "automatic",
        "command": " ".join(["liger-hw", *sys.argv[1:]]),
    }  # fmt: skip


def _commit() -> str | None:
    """Of the checkout that this package lies in, with a + where something is not committed."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout else "")


def asked(dtype, notes: dict) -> dict:
    """What results begin with: what was asked for, and room for what is found. `notes`: of the providers."""
    return {
        "dtype": str(dtype).removeprefix("torch."), "providers": notes, "parity": {}, "results": [], "skipped": [],
        "complete": False,
    }  # fmt: skip


@contextmanager
def kept(found: dict, file: Path):
    """Within, Ctrl-C ends the work and not the program; what was found is written, complete or not."""
    try:
        yield
        found["complete"] = True
    except KeyboardInterrupt:
        pass
    write(found, file)


def write(found: dict, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(file)


def skip(found, case, name, error) -> None:
    why = "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {error}"
    found["skipped"].append({"op": case.op, "shape": case.label, "provider": name, "why": why[:300]})
