"""`liger-hw matrix`: what was proven for which GPU, and how."""

from pathlib import Path

from liger_hw.cli import common


def add(commands) -> None:
    command = commands.add_parser("matrix", help="what was proven for which GPU, and how; or prove what a compiler can")
    command.set_defaults(run=matrix)
    command.add_argument("files", nargs="*", type=Path, metavar="PATH", help="evidence: files, or folders of them")
    command.add_argument("--compile", action="store_true", help="compile every kernel for every architecture, first")
    command.add_argument("--archs", nargs="+", default=[], metavar="ARCH", help="with --compile: only these (all)")
    command.add_argument("--ops", nargs="+", default=[], metavar="OP", help="with --compile: only these (all)")
    command.add_argument("--jobs", type=common.positive, metavar="N", help="with --compile: processes (all cores)")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")


def matrix(args) -> int | None:
    """Compile, if asked; merge evidence, print the matrix, write matrix.json and matrix.html."""
    if args.compile:
        from liger_hw.matrix import compiled

        return compiled.run(args.archs, args.ops, args.jobs, args.report)
    raise ValueError("PATH: got nothing")
