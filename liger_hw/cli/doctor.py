"""Check the ops and the facts of this machine's GPU: `liger-hw doctor`."""

import json
import os
from pathlib import Path

from liger_hw import backends, console, dispatch
from liger_hw.cli import common, info
from liger_hw.console import table
from liger_hw.proof import doctor


def add(commands) -> None:
    command = commands.add_parser(
        "doctor", help="check the ops on this machine; the report is for a bug or a pull request"
    )
    command.set_defaults(run=run)
    command.add_argument("ops", nargs="*", metavar="OP | MODEL", help="ops to check (all); or a model type or a folder "
                         "with a config.json: each kernel beside the class that it replaces")  # fmt: skip
    command.add_argument("--trust-remote-code", action="store_true", help="run the model's own code from that folder")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where to write (./report)")


def run(args) -> int | None:
    """Examine this machine, print problems and advice, write doctor.json.

    Returns 1 if an op is wrong.
    """
    if len(args.ops) == 1 and args.ops[0] not in dispatch.OPS and _names_a_model(args.ops[0]):
        return _run_model(args)
    if common.accelerators() and backends.forced():
        raise ValueError(f"examines this machine: unset LIGER_HW_BACKEND, which forces {backends.forced()}")
    examination = doctor.examine(
        doctor.ops_here(args.ops), common.here(), info.gather(), lambda line: print(line, flush=True)
    )
    header, *rows = doctor.rows(examination)
    if rows:
        print("", table(header, rows), sep="\n")
    failures = doctor.failures(examination)
    interrupted = examination["interrupted"]
    last = [interrupted] if interrupted else examination["advice"]
    print("", *failures, *last, f"report: {doctor.write(examination, args.report)}", sep="\n")
    return 1 if failures else 130 if interrupted else None


def _names_a_model(name: str) -> bool:
    if (Path(name) / "config.json").is_file() or console.installed_version("transformers") is None:
        return os.sep in name or Path(name).is_dir()
    from transformers import CONFIG_MAPPING

    return name in CONFIG_MAPPING or Path(name).is_dir()


def _run_model(args) -> int | None:
    """Compare each kernel with the class that it replaces; return 1 if one fails."""
    console.require("transformers")
    from liger_hw.proof import models

    device, rows = common.here(), []
    for row in models.compare(args.ops[0], device, args.trust_remote_code, lambda line: print(line, flush=True)):
        rows.append(row)
    wrong = models.failures(rows)
    args.report.mkdir(parents=True, exist_ok=True)
    file = args.report / "doctor-model.json"
    file.write_text(json.dumps({"model": args.ops[0], "device": str(device), "info": info.gather(), "rows": rows}))
    print("", table(models.HEADER, models.table_rows(rows)), "", *wrong, *models.advice(device), f"report: {file}",
          sep="\n")  # fmt: skip
    return 1 if wrong else None
