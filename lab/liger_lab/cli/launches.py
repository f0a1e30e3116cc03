"""Show the launch configurations of each op: `liger-hw launches`."""

import dataclasses
import inspect
import os
from collections.abc import Iterable

import torch

from liger_hw import backends, console, dispatch, tuning
from liger_hw.cli.common import accelerators, add_command, show
from liger_hw.hooks import hooks
from liger_hw.spelling import check_known
from liger_lab import terminal
from liger_lab.cases import model_cases, step

META = torch.device("meta")
HEADER = [
    "op", "shape (bf16)", "configuration", "grid", "parameters", "warps", "stages", "options", "programs a core",
    "source",
]  # fmt: skip


def add(commands) -> None:
    command = add_command(
        commands, "launches", launches, "show the launch configurations of each op at real models' shapes",
        "Show the configuration of each kernel that an op launches here, and its source: the heuristic, a shipped "
        "table or this machine's. Without names, at three shapes of each op; else at all. It starts no kernel.",
        {
            "": "every op, at three shapes", "rms_norm swiglu": "two ops, at every shape",
            "rms_norm --archs sm90 gfx942": "two GPUs that need not be here",
        },
        "a few seconds, most of them to import torch.",
    )  # fmt: skip
    command.add_argument("ops", nargs="*", metavar="OP", help="ops to show, at every shape (all, at three shapes)")
    command.add_argument("--archs", nargs="+", default=[], metavar="ARCH", help="architectures to show (those here)")


def launches(args) -> None:
    """Print the launch configurations of ops, as a table or as JSON."""
    facts = gather(args.ops, args.archs)
    show(args, facts, "\n\n".join([_text(facts), *([_heuristics(facts)] if args.ops else [])]))


def gather(ops: Iterable[str] = (), archs: Iterable[str] = ()) -> list[dict]:
    """Return the content of `liger-hw launches` as plain data, an entry for each device."""
    cases, names = _cases(list(ops)), {name.rpartition(":")[2]: name for name in backends.ARCHITECTURES}
    for arch in archs:
        check_known("architecture", arch, names)
    if not archs:
        return [_about(device, cases) for device in accelerators() or [torch.device("cpu")]]
    devices = []
    for arch in archs:
        with backends.use_backend(names[arch]):
            devices.append(_about(torch.device("cpu"), cases) | {"device": names[arch]})
    return devices


def _about(device: torch.device, cases) -> dict:
    configured = backends.device_of(torch.empty(0, device=device))
    return {
        "device": str(device),
        "configured_as": dataclasses.asdict(configured),
        "configurations": [] if configured.vendor == "cpu" else _configurations(device, cases),
    }


def _configurations(device, cases) -> list[dict]:
    """List the launch configurations of cases, which run on meta tensors and launch nothing."""
    configurations = {}
    with backends.meta_tensors_are_on(device):
        for case in cases:
            op = dispatch.OPS[case.op]
            try:
                serving = op.implementations[op.choose(META)]
            except RuntimeError:
                continue
            inputs = case.make(META, torch.bfloat16)
            grids = {}  # name of a kernel -> its grid; the configuration of a kernel has the same name

            def record(kernel, grid, config, *args, grids=grids):
                grids[kernel.__name__] = grid

            run = lambda: step(serving, inputs, case.options)  # noqa: B023, E731 - called at once
            with hooks.replace_launches(record):
                lookups = tuning.search.configurations_of(run)
            for config, shape, target in lookups:
                chosen, key = config(*shape, target), config.key(*shape)
                entry = {"op": case.op, "shape": case.label, "key": key, "grid": grids.get(key.partition("(")[0])}
                options = target.launch_options | chosen.knobs | ({} if chosen.fp_fusion else {"fp_fusion": False})
                entry |= chosen.to_json() | {"options": options}
                configurations.setdefault((case.op, entry["key"]), entry | {"source": chosen.source})
    return list(configurations.values())


def _cases(ops) -> list:
    if ops:
        return model_cases(ops)
    every = [model_cases([name]) for name in sorted(dispatch.OPS)]
    return [case for cases in every for case in (cases[0], cases[len(cases) // 2], cases[-1])]


def _facts(device: dict) -> str:
    """Return the facts of a device on which heuristics depend."""
    return (
        f"{device['num_cores']} cores, {device['warp_size']} lanes a warp, {device['max_threads']} lanes a program, "
        f"{device['registers']} registers a lane, {device['shared_memory'] // 1024} KiB of shared memory, "
        f"{'with' if device['async_copy'] else 'without'} asynchronous copies"
    )


def _heuristics(facts: list[dict]) -> str:
    """List where the heuristics of these launches are, which choose unless `source` names a table."""
    keys = {c["key"].partition("(")[0] for about in facts for c in about["configurations"]}
    codes = {key: inspect.unwrap(tuning.choice.CONFIGS[key]).__code__ for key in sorted(keys)}
    places = (f"{key}_config: {os.path.relpath(c.co_filename)}:{c.co_firstlineno}" for key, c in codes.items())
    return "\n".join(places)


def _text(facts: list[dict]) -> str:
    lines, shown = [], []
    for about in facts:
        content = {key: about[key] for key in ("configured_as", "configurations")}
        if content in shown:  # the second of two equal GPUs
            continue
        shown.append(content)
        lines += [f"{about['device']}: {about['configured_as']['name'] or about['configured_as']['arch']}"]
        if about["configurations"]:
            rows = [
                [c["op"], c["shape"], c["key"], "" if c["grid"] is None else " x ".join(map(str, c["grid"])),
                 terminal.parameters(c["meta"]), c["num_warps"], c["num_stages"], terminal.parameters(c["options"]),
                 c["programs"], c["source"]]
                for c in about["configurations"]
            ]  # fmt: skip
            lines += [_facts(about["configured_as"]), console.table(HEADER, rows)]
        else:
            lines += ["No op launches a kernel here. --archs sm90 shows that GPU's."]
    return "\n".join(lines)
