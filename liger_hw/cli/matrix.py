"""`liger-hw matrix`: what was proven for which GPU, and how."""

import json
from pathlib import Path

from liger_hw import backends, dispatch
from liger_hw.cli import common
from liger_hw.console import table

EVIDENCE = Path("benchmarks/evidence")  # of a checkout


def add(commands) -> None:
    command = commands.add_parser("matrix", help="what was proven for which GPU, and how; or prove what a compiler can")
    command.set_defaults(run=matrix)
    command.add_argument("files", nargs="*", type=Path, metavar="PATH", help="evidence: files, or folders of them")
    command.add_argument("--complete", action="store_true", help="fail if an op lacks what another has")
    command.add_argument("--compile", action="store_true", help="compile every kernel for every architecture instead")
    command.add_argument("--search", action="store_true", help="compile what is near each choice too, and compare")
    command.add_argument("--backends", action="store_true", help="list every architecture as JSON instead")
    command.add_argument("--archs", nargs="+", default=[], metavar="ARCH", help="to compile for: only these (all)")
    command.add_argument("--ops", nargs="+", default=[], metavar="OP", help="to compile: only these (all)")
    command.add_argument("--jobs", type=common.positive, metavar="N", help="processes that compile (all cores)")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")


def matrix(args) -> int | None:
    """Merge evidence, print the matrix, write matrix.json and matrix.html; or compile, which makes evidence; or search.

    Ends with 1 where a case failed.
    """
    if args.backends:
        print(json.dumps(list(backends.ARCHITECTURES)))
        return None
    if args.compile:
        from liger_hw.proof import compiled

        return compiled.run(args.archs, args.ops, args.jobs, args.report)
    if args.search:
        from liger_hw.proof import search

        return search.run(args.archs, args.ops, args.jobs, args.report)
    from liger_hw.proof import evidence, page

    files = args.files or [EVIDENCE]
    if not args.files and not EVIDENCE.is_dir():
        raise ValueError(f"PATH: got none, and there is no {EVIDENCE} here, allowed: what pytest --evidence FILE, "
                         "liger-hw matrix --compile, liger-hw doctor and liger-hw bench wrote")  # fmt: skip
    runs, cells = evidence.read(files)
    if not cells:
        raise ValueError(f"PATH: got {', '.join(map(str, files))}, in which there is no evidence")
    print(table(page.HEADER, page.rows(cells)), end="\n\n")
    for level, text in evidence.SAYS.items():
        print(f"{level}: {text}")
    problems = page.problems(cells, runs) + (evidence.missing(cells, dispatch.OPS) if args.complete else [])
    print("", *problems, sep="\n")
    merged = evidence.write(args.report / "matrix.json", runs, cells)
    print(f"{merged}, {page.write(runs, cells, args.report / 'matrix.html')}")
    return 1 if problems else None
