"""Show the detected hardware and each op's implementation: `liger-hw info`."""

import dataclasses
import platform
from pathlib import Path

import torch

from liger_hw import __version__, backends, console, dispatch, tuning
from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.cli.common import accelerators, add_command, show


def add(commands) -> None:
    add_command(
        commands, "info", info, "show the detected hardware, and the implementation of each op",
        "Show versions, the hardware as the driver and the tables describe it, the implementation that serves each op "
        "here, and the tables of launch configurations that are in use. It starts no kernel.",
        {"": "this machine", "--json": "the same for a program, and for a report"},
        "a few seconds, most of them to import torch.",
    )  # fmt: skip


def info(args) -> None:
    """Print the detected hardware, the forced backend and the ops, as tables or as JSON."""
    facts = gather()
    show(args, facts, _text(facts))


def gather() -> dict:
    """Return the content of `liger-hw info` as plain data."""
    return {
        "versions": {
            "liger_hw": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,  # with its build, which the package's metadata leaves out
            **{package: console.installed_version(package) for package in ("triton", "transformers")},
        },
        "forced": backends.forced(),
        "interpreter": interpreting(),
        "autotune": tuning.search.autotuning(),
        "devices": [_about(device) for device in accelerators() or [torch.device("cpu")]],
    }


def _about(device: torch.device) -> dict:
    configured = backends.device_of(torch.empty(0, device=device))
    return {
        "device": str(device),
        "detected": dataclasses.asdict(backends.detected(device)),
        "configured_as": dataclasses.asdict(configured),
        "tables": {
            tuning.SHIPPED: _table(tuning.entries.shipped_file(configured)),
            tuning.LOCAL: _table(tuning.entries.cache_file(configured)),
        },
        "ops": {name: _served(op, device) for name, op in sorted(dispatch.OPS.items())},
    }


def _table(file: Path) -> dict:
    """Return counts of a table: all entries, ignored ones, and those of another Triton."""
    table = tuning.entries.read_table(file)
    return {
        "file": str(file),
        "entries": len(table),
        "other_code": tuning.choice.other_code(table) if AVAILABLE else [],
        "other_triton": tuning.choice.other_triton(table) if AVAILABLE else {},
    }


def _served(op, device) -> dict:
    try:
        return {"implementation": op.choose(device)}
    except RuntimeError as error:
        return {"implementation": None, "error": str(error)}


def _text(facts: dict) -> str:
    lines = ["   ".join(f"{name} {number or 'not installed'}" for name, number in facts["versions"].items())]
    forced = f"{facts['forced']} (LIGER_HW_BACKEND)" if facts["forced"] else "nothing"
    kernels = "run in Triton's interpreter" if facts["interpreter"] else "compile"
    lines += [f"forced: {forced}   kernels {kernels if AVAILABLE else 'need the package triton'}   "
              f"first-use tuning: {'on' if facts['autotune'] else 'off'}"]  # fmt: skip
    rows = []
    for about in facts["devices"]:
        if about["configured_as"]["vendor"] == "cpu":
            lines.append(f"{about['device']}: no accelerator")
            if facts["interpreter"] and not facts["forced"]:
                lines.append("TRITON_INTERPRET=1 alone runs no kernel on a CPU: set LIGER_HW_BACKEND=triton, too")
            continue
        rows.append([about["device"], *_facts(about["detected"])])
        if about["configured_as"] != about["detected"]:
            rows.append(["  configured as", *_facts(about["configured_as"])])
    if rows:
        lines += ["", console.table(["device", *DEVICE_COLUMNS], rows)]
    shown = []
    for about in facts["devices"]:
        content = {key: about[key] for key in ("configured_as", "ops")}
        if content in shown:  # the second of two equal GPUs
            continue
        shown.append(content)
        ops = [[name, served["implementation"] or "none"] for name, served in about["ops"].items()]
        lines += ["", console.table([f"op on {about['device']}", "implementation"], ops)]
        lines += sorted({served["error"] for served in about["ops"].values() if "error" in served})
        if about["configured_as"]["vendor"] == "cpu":
            lines += ["", "No op launches a kernel here. LIGER_HW_BACKEND=nvidia, amd or intel shows that vendor's."]
        else:
            lines += ["", *(_about_table(kind, table) for kind, table in about["tables"].items())]
    return "\n".join(lines)


def _about_table(kind: str, table: dict) -> str:
    notes = [f"{table['entries']} entries"] if table["entries"] else ["none"]
    if table["other_code"]:
        notes.append(f"{len(table['other_code'])} found on other code and ignored: {', '.join(table['other_code'])}")
    for version, count in table["other_triton"].items():
        notes.append(f"{count} found with Triton {version}, checked at their first launch")
    return f"{kind} table: {table['file']}: {'; '.join(notes)}"


DEVICE_COLUMNS = {  # column -> its text for a Device as a dictionary
    "vendor": lambda d: d["vendor"],
    "arch": lambda d: d["arch"],
    "name": lambda d: d["name"] or "-",
    "cores": lambda d: d["num_cores"],
    "warp": lambda d: d["warp_size"],
    "threads/program": lambda d: d["max_threads"],
    "threads/core": lambda d: d["core_threads"],
    "registers/lane": lambda d: d["registers"],
    "shared": lambda d: f"{d['shared_memory'] // 1024} KiB",
    "L2": lambda d: f"{d['l2'] / 2**20:.0f} MiB" if d["l2"] else "-",
    "GB/s": lambda d: d["bandwidth"] or "-",
    "async copy": lambda d: "yes" if d["async_copy"] else "no",
    "launch options": lambda d: ", ".join(f"{k}={v}" for k, v in d["launch_options"].items()) or "-",
}


def _facts(device: dict) -> list:
    return [text(device) for text in DEVICE_COLUMNS.values()]
