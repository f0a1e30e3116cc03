"""Check the ops and the facts of this machine's GPU: `liger-hw doctor`."""

import json
import os
import shutil
from pathlib import Path

from liger_hw import backends, console, dispatch
from liger_hw.cli import info
from liger_hw.cli.common import accelerators, add_command, show
from liger_hw.console import table
from liger_hw.spelling import nearest
from liger_lab.cli import common, launches
from liger_lab.levels import doctor


def add(commands) -> None:
    command = add_command(
        commands, "doctor", run, "check the ops or a model on this machine; write a report to send",
        "Run the parity cases of every op here and compare the driver's facts, spilled registers, the copy rate and a "
        "time of each op with expectations. On a CPU, run plain torch and the kernels in Triton's interpreter. With "
        "the name of a model, run each kernel beside the class of the model that it replaces. The report is "
        "doctor.json or doctor-model.json; docs/guides/your_gpu.md says where to send it.",
        {"rms_norm swiglu": "two ops", "qwen3": "the kernels that replace classes of this model type"},
        "about a minute for each op on two CPU cores, and for a model; a GPU also compiles the kernels first.",
    )  # fmt: skip
    command.add_argument("ops", nargs="*", metavar="OP | MODEL", help="ops to check (all); or a model type or a folder "
                         "with a config.json: each kernel beside the class that it replaces")  # fmt: skip
    command.add_argument("--trust-remote-code", action="store_true", help="run the model's own code from that folder")
    command.add_argument("--binaries", action="store_true", help="also write the machine code of every kernel to "
                         "binaries.zip in the report's folder, for machines without this GPU")  # fmt: skip
    common.add_report(command)


def run(args) -> int | None:
    """Examine this machine, print problems and advice, write doctor.json.

    Returns 1 if an op is wrong.
    """
    if len(args.ops) == 1 and args.ops[0] not in dispatch.OPS and _names_a_model(args.ops[0]):
        if args.binaries:
            raise ValueError("--binaries: got a model, allowed: ops")
        return _run_model(args)
    if accelerators() and backends.forced():
        raise ValueError(f"examines this machine: unset LIGER_HW_BACKEND, which forces {backends.forced()}")
    if len(args.ops) == 1 and console.installed_version("transformers") and not nearest(args.ops[0], dispatch.OPS):
        if model := nearest(args.ops[0], _model_types(), least_share=0.75):
            raise ValueError(f"unknown op or model {args.ops[0]!r}; did you mean the model {model!r}?")
    if args.binaries and not accelerators():
        raise ValueError("--binaries: needs a GPU; on a CPU kernels are interpreted")
    binaries = args.report / "binaries" if args.binaries else None
    examination = doctor.examine(doctor.ops_here(args.ops), common.here(), _facts(), common.say(args), binaries)
    if binaries and binaries.is_dir():
        shutil.make_archive(binaries, "zip", binaries)
    header, *rows = doctor.rows(examination)
    checks = ["", table(header, rows)] if rows else []
    failures, file = doctor.failures(examination), doctor.write(examination, args.report)
    interrupted = examination["interrupted"]
    last = [interrupted] if interrupted else examination["advice"]
    show(args, json.loads(file.read_text()), *checks, "", *failures, *last, f"report: {file}")
    return 1 if failures else 130 if interrupted else None


def _facts() -> dict:
    """Return the content of `liger-hw info` and of `liger-hw launches`."""
    return info.gather() | {"launches": launches.gather()}


def _names_a_model(name: str) -> bool:
    if (Path(name) / "config.json").is_file() or console.installed_version("transformers") is None:
        return os.sep in name or Path(name).is_dir()
    return name in _model_types() or Path(name).is_dir()


def _model_types():
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING.keys()


def _run_model(args) -> int | None:
    """Compare each kernel with the class that it replaces; return 1 if one fails.

    Ctrl-C keeps the rows so far, and returns 130.
    """
    console.require("transformers")
    from liger_lab.levels import models

    device, rows, interrupted = common.here(), [], None
    try:
        for row in models.compare(args.ops[0], device, args.trust_remote_code, common.say(args)):
            rows.append(row)
    except KeyboardInterrupt:
        interrupted = f"interrupted after {len(rows)} comparisons: the others are missing"
    wrong = models.failures(rows)
    args.report.mkdir(parents=True, exist_ok=True)
    file = args.report / "doctor-model.json"
    results = {
        "model": args.ops[0], "device": str(device), "info": _facts(), "rows": rows, "interrupted": interrupted,
    }  # fmt: skip
    file.write_text(json.dumps(results))
    last = [interrupted] if interrupted else models.advice(device)
    lines = table(models.HEADER, models.table_rows(rows)), "", *wrong, *last, f"report: {file}"
    show(args, results, "", *lines)
    return 1 if wrong else 130 if interrupted else None
