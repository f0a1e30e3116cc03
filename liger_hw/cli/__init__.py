"""Parse the command line of `liger-hw`: one file for each command.

The laboratory adds its commands where it is installed. This is the one place where the product imports it.
"""

import argparse
import os
import re
import sys

import torch

from liger_hw import __version__
from liger_hw.cli import info, patch_report
from liger_hw.kernels import load_all
from liger_hw.spelling import check_known

LAB_COMMANDS = (
    "demo", "doctor", "launches", "tune", "bench", "bench losses", "bench train", "bench distributed", "plan",
    "evidence", "compile", "neighbours", "emulate", "architectures",
)  # fmt: skip
LAB = "pip install -e lab (in a clone; 'liger_hw[lab]' of a release)"


def main(argv=None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output has enough: `liger-hw patch-report llama | head`
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for what is flushed at the end
        return 0


def _run(argv: list[str]) -> int:
    command = "liger-hw"
    try:
        args = _parse(argv)
        command += f" {args.command}"
        load_all()
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line.

    Raises:
        ValueError: a command or an option is unknown, and the error names the nearest; or the command is of the
            laboratory, which is not installed.
    """
    parser, names = make_parser()
    if " ".join(argv[:2]) in LAB_COMMANDS:  # a command of two words, such as `bench train`
        argv = [" ".join(argv[:2]), *argv[2:]]
    if argv[:1] == ["matrix"]:
        raise ValueError("unknown command 'matrix'. It is five commands: evidence, compile (also --mend), neighbours "
                         "(was --search), emulate, architectures (was --backends)")  # fmt: skip
    if argv and not argv[0].startswith("-"):
        check_known("command", argv[0], [*names, *LAB_COMMANDS])
        if argv[0] not in names:
            raise ValueError(f"{argv[0]}: is a command of the laboratory: {LAB}")
    args, unknown = parser.parse_known_args(argv)
    for word in unknown:
        if word.startswith("--"):
            options = dict.fromkeys(re.findall(r"--[a-z][a-z-]+", args.parser.format_help()))
            check_known("option", word.partition("=")[0], list(options))
    if unknown:
        args.parser.error(f"got {' '.join(unknown)}, which it does not take")
    return args


def make_parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """Return the parser and the names of the installed commands."""
    parser = argparse.ArgumentParser(
        "liger-hw", description="Fused Triton kernels for training language models.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"liger_hw {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (info, patch_report):
        command.add(commands)
    parser.epilog = "`liger-hw COMMAND --help` has examples and tells how long the command takes."
    try:
        from liger_lab import cli as lab
    except ModuleNotFoundError as error:
        if error.name != "liger_lab":
            raise
        parser.epilog += f"\n{LAB} adds: {', '.join(LAB_COMMANDS)}"
    else:
        lab.add_commands(commands)
    return parser, list(commands.choices)
