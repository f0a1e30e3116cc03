"""Share options, argument types, devices and dtypes among the laboratory's commands."""

import argparse
import contextlib
import sys
from pathlib import Path

import torch

from liger_hw.cli.common import accelerators

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
META = torch.device("meta")


def add_report(parser) -> None:
    """Add the option of the folder for files."""
    parser.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where to write (./report)")


def say(args):
    """Return a function that prints a line of progress, to stderr beside JSON."""
    return lambda line: print(line, file=sys.stderr if args.json else sys.stdout, flush=True)


def positive(text: str) -> int:
    """Return the positive integer in `text`; argparse shows the error."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: a positive integer")
    return int(text)


def here() -> torch.device:
    """Return the first accelerator, or the CPU."""
    return next(iter(accelerators()), torch.device("cpu"))


def add_build(parser) -> None:
    """Add the options of commands that compile kernels."""
    parser.add_argument("--archs", nargs="+", default=[], metavar="ARCH", help="architectures to compile for (all)")
    parser.add_argument("--ops", nargs="+", default=[], metavar="OP", help="ops to compile (all)")
    parser.add_argument("--jobs", type=positive, metavar="N", help="compiling processes (one a core)")
    add_report(parser)


def build(args, run, name: str, *options) -> int:
    """Compile by `run`, which prints its table; with --json print its file `name` instead."""
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        code = run(args.archs, args.ops, args.jobs, args.report, *options)
    if args.json:
        print((args.report / name).read_text(), end="")
    return code
