"""Add the laboratory's commands to `liger-hw`: one file for each command."""

from liger_lab.cli import (
    architectures,
    bench,
    compile,
    demo,
    doctor,
    emulate,
    evidence,
    launches,
    neighbours,
    plan,
    tune,
)  # fmt: skip

COMMANDS = demo, doctor, launches, tune, bench, plan, evidence, compile, neighbours, emulate, architectures


def add_commands(commands) -> None:
    """Add every command of the laboratory to the parser of `liger-hw`."""
    for command in COMMANDS:
        command.add(commands)
