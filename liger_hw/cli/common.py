"""Share the form of commands and of their output, and the devices of this machine."""

import argparse
import json
import textwrap

import torch

WIDTH = 100  # columns of a help
COMMANDS = textwrap.TextWrapper(WIDTH - 2, "  ", " " * 6, break_long_words=False, break_on_hyphens=False)


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
    if max(map(len, lines)) > WIDTH:  # each effect above its command
        commands_of = {f"liger-hw {name} {words}".strip(): text for words, text in examples.items()}
        lines = [f"  # {text}\n" + " \\\n".join(COMMANDS.wrap(command)) for command, text in commands_of.items()]
    parser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter,
        help=summary, description=textwrap.fill(about, WIDTH),
        epilog="\n".join(["examples:", *lines, "", textwrap.fill(f"time: {time}", WIDTH)]),
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
