"""Merge and show the evidence for each GPU, or compile to make it: `liger-hw matrix`."""

import contextlib
import json
import sys
from pathlib import Path

from liger_hw import backends, dispatch
from liger_hw.cli.common import add_command, show
from liger_hw.console import table
from liger_lab.cli import common

EVIDENCE = Path("lab/results/evidence")  # in a checkout


def add(commands) -> None:
    command = add_command(
        commands, "matrix", matrix, "show the evidence for each op on each GPU, or compile for absent GPUs",
        "Merge files of evidence from tests, compilers, the doctor and benchmarks, and show which ops are compiled, "
        "interpreted, executed and measured on each GPU. With --compile, build every kernel for every architecture of "
        "NVIDIA and AMD with Triton's own compiler, without a GPU, and check registers, memory and accesses. With "
        "--emulate, execute AMD machine code on this CPU and compare with the definitions.",
        {"": "the evidence in lab/results/evidence of a checkout",
         "--compile --archs sm90 gfx942 --ops rms_norm": "one op for two architectures"},
        "a few seconds. --compile takes ten minutes on two cores for all architectures, and seconds where the "
        "kernels have not changed since; --search, --mend and --emulate take longer.",
    )  # fmt: skip
    command.add_argument(
        "files", nargs="*", type=Path, metavar="PATH", help="files of evidence, or folders (./lab/results/evidence)"
    )
    command.add_argument("--complete", action="store_true", help="fail if an op lacks evidence that another has")
    command.add_argument("--compile", action="store_true", help="compile every kernel for every architecture instead")
    command.add_argument(
        "--mend",
        action="store_true",
        help="with --compile: replace choices that miss a gate, in liger_hw/tuning/tables",
    )
    command.add_argument(
        "--search", action="store_true", help="compile neighbours of each launch configuration, and compare"
    )
    command.add_argument(
        "--emulate", action="store_true", help="execute AMD machine code of every op instead, without an AMD GPU"
    )
    command.add_argument(
        "--few", action="store_true", help="with --emulate: only cases that reach another kernel, loop or tail; no fp16"
    )
    command.add_argument(
        "--remove", type=common.positive, default=0, metavar="N",
        help="with --emulate: also remove N instructions of each op, one at a time; 90%% must be noticed",
    )  # fmt: skip
    command.add_argument("--backends", action="store_true", help="list every architecture as JSON instead")
    command.add_argument("--archs", nargs="+", default=[], metavar="ARCH", help="architectures to compile for (all)")
    command.add_argument("--ops", nargs="+", default=[], metavar="OP", help="ops to compile (all)")
    command.add_argument("--jobs", type=common.positive, metavar="N", help="compiling processes (one a core)")
    common.add_report(command)


def matrix(args) -> int | None:
    """Merge evidence, print the matrix, write matrix.json and matrix.html; or compile; or search.

    Returns 1 if a case failed.
    """
    if args.backends:
        print(json.dumps(list(backends.ARCHITECTURES)))
        return None
    if args.mend and not args.compile:
        raise ValueError("--mend: got it without --compile, allowed: --compile --mend")
    if (args.few or args.remove) and not args.emulate:
        raise ValueError("--few, --remove: got one without --emulate, allowed: --emulate --few --remove N")
    if args.emulate:
        from liger_lab.levels import emulated

        return _build(args, emulated.run, "emulated_kernels.json", args.few, args.remove)
    if args.compile:
        from liger_lab.levels import compiled, mend

        return _build(args, (mend if args.mend else compiled).run, "kernels.json")
    if args.search:
        from liger_lab.levels import ratings

        return _build(args, ratings.run, "search.json")
    from liger_lab.levels import evidence, page

    files = args.files or [EVIDENCE]
    if not args.files and not EVIDENCE.is_dir():
        raise ValueError(f"PATH: got none, and there is no {EVIDENCE} here, allowed: files of pytest --evidence FILE, "
                         "liger-hw matrix --compile, liger-hw doctor and liger-hw bench")  # fmt: skip
    runs, cells = evidence.read(files)
    if not cells:
        raise ValueError(f"PATH: got {', '.join(map(str, files))}, in which there is no evidence")
    problems = page.problems(cells, runs) + (evidence.missing(cells, dispatch.OPS) if args.complete else [])
    files = (
        evidence.write(args.report / "matrix.json", runs, cells),
        page.write(runs, cells, args.report / "matrix.html"),
    )
    results = {"runs": runs, "cells": [vars(cell) for cell in cells], "problems": problems}
    levels = [f"{level}: {text}" for level, text in evidence.SAYS.items()]
    lines = table(page.HEADER, page.rows(cells)), "", *levels, "", *problems, ", ".join(map(str, files))
    show(args, results, *lines)
    return 1 if problems else None


def _build(args, run, name: str, *options) -> int:
    """Compile by `run`, which prints its table; with --json print its file `name` instead."""
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        code = run(args.archs, args.ops, args.jobs, args.report, *options)
    if not args.json:
        return code
    print((args.report / name).read_text(), end="")
    return code
