"""`liger-hw info`: what was detected here, and what each op would use."""

import dataclasses
import json
import platform
from pathlib import Path

import torch

from liger_hw import __version__, backends, console, dispatch, tuning
from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.cli import common
from liger_hw.testing.cases import model_cases, step


def add(commands) -> None:
    command = commands.add_parser("info", help="what was detected here, and what each op would use")
    command.set_defaults(run=info)
    command.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def info(args) -> None:
    """Print what was detected, what is forced, and what each op would use, as tables or as JSON."""
    found = gather()
    print(json.dumps(found, indent=1) if args.json else _show(found))


def gather() -> dict:
    """Everything `liger-hw info` tells, as plain data."""
    return {
        "versions": {
            "liger_hw": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,  # with its build, which the package's metadata leaves out
            **{package: console.installed_version(package) for package in ("triton", "transformers")},
        },
        "forced": backends.forced(),
        "interpreter": interpreting(),
        "autotune": tuning.autotuning(),
        "devices": [_about(device) for device in common.accelerators() or [torch.device("cpu")]],
    }


def _about(device: torch.device) -> dict:
    configured = backends.device_of(torch.empty(0, device=device))
    return {
        "device": str(device),
        "detected": dataclasses.asdict(backends.detected(device)),
        "configured_as": dataclasses.asdict(configured),
        "tables": {
            tuning.SHIPPED: str(tuning.shipped_file(configured)),
            tuning.LOCAL: str(tuning.cache_file(configured)),
        },
        "ops": {name: _served(op, device) for name, op in sorted(dispatch.OPS.items())},
        "configurations": _configurations(device),
    }


def _served(op, device) -> dict:
    try:
        return {"implementation": op.choose(device)}
    except RuntimeError as error:
        return {"implementation": None, "error": str(error)}


def _configurations(device) -> list[dict]:
    """The launch configurations at three shapes of each op, found by running the op on tensors without data."""
    found = {}
    with backends.meta_tensors_are_on(device):
        if backends.device_of(torch.empty(0, device=common.META)).vendor == "cpu":
            return []
        for name, op in sorted(dispatch.OPS.items()):
            cases = model_cases([name])
            for case in (cases[0], cases[len(cases) // 2], cases[-1]):
                try:
                    serving = op.implementations[op.choose(common.META)]
                except RuntimeError:
                    continue
                inputs = case.make(common.META, torch.bfloat16)
                run = lambda: step(serving, inputs, case.options)  # noqa: B023, E731 - called at once
                for config, shape, target in tuning.configurations_of(run):
                    chosen = config(*shape, target)
                    entry = {"op": name, "shape": case.label, "key": config.key(*shape), **chosen.to_json()}
                    found.setdefault((name, entry["key"]), entry | {"source": chosen.source})
    return list(found.values())


def _show(found: dict) -> str:
    lines = ["   ".join(f"{name} {number or 'not installed'}" for name, number in found["versions"].items())]
    forced = f"{found['forced']} (LIGER_HW_BACKEND)" if found["forced"] else "nothing"
    kernels = "run in Triton's interpreter" if found["interpreter"] else "compile"
    lines += [f"forced: {forced}   kernels {kernels if AVAILABLE else 'need the package triton'}   "
              f"first-use tuning: {'on' if found['autotune'] else 'off'}"]  # fmt: skip
    rows = []
    for about in found["devices"]:
        if about["configured_as"]["vendor"] == "cpu":
            lines.append(f"{about['device']}: no accelerator")
            continue
        rows.append([about["device"], *_facts(about["detected"])])
        if about["configured_as"] != about["detected"]:
            rows.append(["  configured as", *_facts(about["configured_as"])])
    if rows:
        lines += ["", console.table(["device", *FACTS], rows)]
    described = []
    for about in found["devices"]:
        what = {key: about[key] for key in ("configured_as", "ops", "configurations")}
        if what in described:  # the second of two equal GPUs
            continue
        described.append(what)
        ops = [[name, served["implementation"] or "none"] for name, served in about["ops"].items()]
        lines += ["", console.table([f"op on {about['device']}", "implementation"], ops)]
        lines += sorted({served["error"] for served in about["ops"].values() if "error" in served})
        launches = [
            [c["op"], c["shape"], c["key"], console.parameters(c["meta"]),
             c["num_warps"], c["num_stages"], c["programs"], c["source"]]
            for c in about["configurations"]
        ]  # fmt: skip
        header = ["op", "shape (bf16)", "configuration", "parameters", "warps", "stages", "programs a core", "source"]
        if launches:
            lines += ["", console.table(header, launches)]
            tables = [f"{kind} winners: {file}" for kind, file in about["tables"].items() if Path(file).is_file()]
            lines += ["", *(tables or ["no table of winners is here: every configuration is the heuristic's"])]
        else:
            lines += ["", "No op launches a kernel here. LIGER_HW_BACKEND=nvidia, amd or intel shows what one would."]
    return "\n".join(lines)


FACTS = {  # column -> what it shows of a Device
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
    return [show(device) for show in FACTS.values()]
