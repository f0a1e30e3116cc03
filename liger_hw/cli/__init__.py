"""Parse the command line of `liger-hw`: one file for each command."""

import argparse
import os
import sys

import torch

from liger_hw import __version__
from liger_hw.cli import bench, demo, doctor, info, matrix, patch_report, tune
from liger_hw.kernels import load_all


def main(argv=None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["bench"] and argv[1:2] in (["train"], ["distributed"], ["losses"]):  # commands of two words
        argv[:2] = [" ".join(argv[:2])]
    args = _parser().parse_args(argv)
    load_all()
    try:
        code = args.run(args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output has enough: `liger-hw patch-report llama | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the end
        return 0
    except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
        print(f"liger-hw {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("liger-hw", description="Fused Triton kernels for training language models.")
    parser.add_argument("--version", action="version", version=f"liger_hw {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (info, demo, doctor, tune, bench, matrix, patch_report):
        command.add(commands)
    return parser
