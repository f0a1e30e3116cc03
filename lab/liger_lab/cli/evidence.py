"""Merge and show the evidence for each op on each GPU: `liger-hw evidence`."""

from pathlib import Path

from liger_hw import dispatch
from liger_hw.cli.common import add_command, show
from liger_hw.console import table
from liger_lab.cli import common

EVIDENCE = Path("lab/results")  # in a checkout


def add(commands) -> None:
    command = add_command(
        commands, "evidence", evidence, "show which ops are proven on each GPU, and how",
        "Merge files of evidence from tests, compilers, the doctor and benchmarks, and show which ops are compiled, "
        "interpreted, emulated, executed and measured on each GPU. It writes evidence.json and evidence.html.",
        {"": "the evidence in lab/results of a checkout",
         "report/doctor.json --complete": "what the doctor saw here, and whether an op lacks evidence"},
        "a few seconds.",
    )  # fmt: skip
    command.add_argument(
        "files", nargs="*", type=Path, metavar="PATH", help="files of evidence, or folders (./lab/results)"
    )
    command.add_argument("--complete", action="store_true", help="fail if an op lacks evidence that another has")
    common.add_report(command)


def evidence(args) -> int | None:
    """Merge evidence, print the table, write evidence.json and evidence.html.

    Returns 1 if a case of the given files failed; those of a checkout are known.
    """
    from liger_lab.levels import evidence, page

    sources = args.files or [EVIDENCE]
    if not args.files and not EVIDENCE.is_dir():
        raise ValueError(f"PATH: got none, and there is no {EVIDENCE} here, allowed: files of pytest --evidence FILE, "
                         "liger-hw compile, liger-hw emulate, liger-hw doctor and liger-hw bench")  # fmt: skip
    runs, cells = evidence.read(sources)
    if not cells:
        raise ValueError(f"PATH: got {', '.join(map(str, sources))}, in which there is no evidence")
    problems = page.problems(cells, runs) + (evidence.missing(cells, dispatch.OPS) if args.complete else [])
    files = (
        evidence.write(args.report / "evidence.json", runs, cells),
        page.write(runs, cells, args.report / "evidence.html"),
    )
    results = {"runs": runs, "cells": [vars(cell) for cell in cells], "problems": problems}
    levels = [f"{level}: {text}" for level, text in evidence.SAYS.items()]
    lines = table(page.HEADER, page.rows(cells)), "", *levels, "", *problems, ", ".join(map(str, files))
    show(args, results, *lines)
    return 1 if problems and (args.files or args.complete) else None
