"""Check the ops and the facts of this machine's GPU: `liger-hw doctor`."""

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
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where to write (./report)")


def run(args) -> int | None:
    """Examine this machine, print problems and advice, write doctor.json.

    Returns 1 if an op is wrong.
    """
    if common.accelerators() and backends.forced():
        raise ValueError(f"examines this machine: unset LIGER_HW_BACKEND, which forces {backends.forced()}")
    examination = doctor.examine(
        doctor.ops_here(args.ops), common.here(), info.gather(), lambda line: print(line, flush=True)
    )
    header, *rows = doctor.rows(examination)
    if rows:
        print("", table(header, rows), sep="\n")
    failures = doctor.failures(examination)
    print("", *failures, *examination["advice"], f"report: {doctor.write(examination, args.report)}", sep="\n")
    return 1 if failures else None
