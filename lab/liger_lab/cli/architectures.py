"""List the architectures that liger_hw knows: `liger-hw architectures`."""

import json

from liger_hw import backends
from liger_hw.cli.common import add_command
from liger_hw.console import table


def add(commands) -> None:
    add_command(
        commands, "architectures", architectures, "list the architectures that liger_hw knows",
        "List each architecture by the name that LIGER_HW_BACKEND takes, with its cards, and whether `liger-hw "
        "compile` compiles for it by default.",
        {"": "a table", "--json": "the names alone, for a program"},
        "a few seconds, most of them to import torch.",
    )  # fmt: skip


def architectures(args) -> None:
    """Print a table of architectures, or their names as one line of JSON."""
    if args.json:
        print(json.dumps(list(backends.ARCHITECTURES)))
        return
    rows = [[name, row.cards, "yes" if row.in_matrix else "no"] for name, row in backends.ARCHITECTURES.items()]
    print(table(["name", "cards", "compiled"], rows))
