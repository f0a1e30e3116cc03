"""Show the launch configurations of each op: `liger-hw launches`."""

import dataclasses
from collections.abc import Iterable

import torch

from liger_hw import backends, console, dispatch, tuning
from liger_hw.cli.common import accelerators, add_command, show
from liger_lab import terminal
from liger_lab.cases import model_cases, step

META = torch.device("meta")
HEADER = ["op", "shape (bf16)", "configuration", "parameters", "warps", "stages", "programs a core", "source"]


def add(commands) -> None:
    command = add_command(
        commands, "launches", launches, "show the launch configurations of each op at real models' shapes",
        "Show the configuration of each kernel that an op launches here, and its source: the heuristic, a shipped "
        "table or this machine's. Without names, at three shapes of each op; else at all. It starts no kernel.",
        {"": "every op, at three shapes", "rms_norm swiglu": "two ops, at every shape"},
        "a few seconds, most of them to import torch.",
    )  # fmt: skip
    command.add_argument("ops", nargs="*", metavar="OP", help="ops to show, at every shape (all, at three shapes)")


def launches(args) -> None:
    """Print the launch configurations of ops, as a table or as JSON."""
    facts = gather(args.ops)
    show(args, facts, _text(facts))


def gather(ops: Iterable[str] = ()) -> list[dict]:
    """Return the content of `liger-hw launches` as plain data, one entry for each device."""
    cases = _cases(list(ops))
    return [_about(device, cases) for device in accelerators() or [torch.device("cpu")]]


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
            run = lambda: step(serving, inputs, case.options)  # noqa: B023, E731 - called at once
            for config, shape, target in tuning.configurations_of(run):
                chosen = config(*shape, target)
                entry = {"op": case.op, "shape": case.label, "key": config.key(*shape), **chosen.to_json()}
                configurations.setdefault((case.op, entry["key"]), entry | {"source": chosen.source})
    return list(configurations.values())


def _cases(ops) -> list:
    if ops:
        return model_cases(ops)
    every = [model_cases([name]) for name in sorted(dispatch.OPS)]
    return [case for cases in every for case in (cases[0], cases[len(cases) // 2], cases[-1])]


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
                [c["op"], c["shape"], c["key"], terminal.parameters(c["meta"]),
                 c["num_warps"], c["num_stages"], c["programs"], c["source"]]
                for c in about["configurations"]
            ]  # fmt: skip
            lines += [console.table(HEADER, rows)]
        else:
            lines += ["No op launches a kernel here. LIGER_HW_BACKEND=nvidia, amd or intel shows that vendor's."]
    return "\n".join(lines)
