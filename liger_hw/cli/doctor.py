"""`liger-hw doctor`: whether the ops are right on this machine, and whether it is what we take it for."""

from pathlib import Path

from liger_hw import backends
from liger_hw.cli import common, info
from liger_hw.console import table
from liger_hw.proof import doctor


def add(commands) -> None:
    command = commands.add_parser(
        "doctor", help="check the ops on this machine; the report is for a bug or a pull request"
    )
    command.set_defaults(run=run)
    command.add_argument("ops", nargs="*", metavar="OP", help="ops to check (all)")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")


def run(args) -> int | None:
    """Examine, print what differs and what to do, write doctor.json; end with 1 if something was computed wrongly."""
    if common.accelerators() and backends.forced():
        raise ValueError(f"examines this machine: unset LIGER_HW_BACKEND, which forces {backends.forced()}")
    found = doctor.examine(
        doctor.ops_here(args.ops), common.here(), info.gather(), lambda line: print(line, flush=True)
    )
    header, *rows = doctor.rows(found)
    if rows:
        print("", table(header, rows), sep="\n")
    wrong = doctor.failures(found)
    print("", *wrong, *found["advice"], f"report: {doctor.write(found, args.report)}", sep="\n")
    return 1 if wrong else None
