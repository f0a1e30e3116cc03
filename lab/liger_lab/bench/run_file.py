"""Describe the environment of a benchmark run and write its results as JSON."""

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

PACKAGES = (
    "torch", "triton", "liger-kernel", "quack-kernels", "cut-cross-entropy", "transformers", "peft", "bitsandbytes",
    "deepspeed", "trl", "accelerate", "lightning", "unsloth",
)  # fmt: skip


def environment(device) -> dict:
    """Describe the device, versions, date, commit and command of this run."""
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
    """Return the commit of this checkout, "+" after it if files differ; else None."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root)]
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip() + ("+" if changed.stdout else "")


def new_benchmark(dtype, notes: dict) -> dict:
    """Return the empty results of a benchmark; `notes` maps each provider to a remark."""
    return {
        "dtype": str(dtype).removeprefix("torch."), "providers": notes, "parity": {}, "results": [], "skipped": [],
        "complete": False,
    }  # fmt: skip


@contextmanager
def saved_at_end(benchmark: dict, file: Path):
    """Write the results when the block ends; Ctrl-C ends the block, not the program."""
    try:
        yield
        benchmark["complete"] = True
    except KeyboardInterrupt:
        pass
    write(benchmark, file)


def write(benchmark: dict, file: Path) -> None:
    replace(file, json.dumps(benchmark, indent=1) + "\n")


def replace(file: Path, text: str) -> Path:
    """Replace the file in one step: readers see the old text or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(text)
    return part.replace(file)


def record_skip(benchmark, case, name, error) -> None:
    """Record why the provider `name` has no time for `case`."""
    why = "out of memory" if isinstance(error, torch.OutOfMemoryError) else f"{type(error).__name__}: {error}"
    benchmark["skipped"].append({"op": case.op, "shape": case.label, "provider": name, "why": why[:300]})
