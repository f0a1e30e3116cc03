"""Share the form of commands and of their output, and the devices of this machine."""

import argparse
import json
import textwrap

import torch


def add_command(commands, name: str, run, summary: str, about: str, examples: dict, time: str):
    """Add a command with `--json` and return its parser.

    Args:
        commands: of the parser of `liger-hw`.
        name: of the command, one word or two.
        run: function of the parsed arguments that returns the exit status.
        summary: one line of the list of commands.
        about: the description in its own help.
        examples: arguments -> their effect.
        time: how long it takes, as a sentence.
    """
    width = max(map(len, examples)) + len(name)
    lines = [f"  liger-hw {f'{name} {words}'.strip():<{width + 1}}   {text}" for words, text in examples.items()]
    parser = commands.add_parser(
        name, help=summary, description=textwrap.fill(about, 100), formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["examples:", *lines, "", textwrap.fill(f"time: {time}", 100)]),
    )  # fmt: skip
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    return parser


def show(args, results, *lines: str) -> None:
    """Print `results` as JSON if the command line asks for it, and else `lines`."""
    print(json.dumps(results, indent=1) if args.json else "\n".join(lines))


def accelerators() -> list[torch.device]:
    """Return every accelerator that torch sees."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []
