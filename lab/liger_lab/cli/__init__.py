"""Add the laboratory's commands to `liger-hw`: one file for each command."""

from liger_lab.cli import bench, demo, doctor, launches, matrix, plan, tune


def add_commands(commands) -> None:
    """Add every command of the laboratory to the parser of `liger-hw`."""
    for command in (demo, doctor, launches, tune, bench, matrix, plan):
        command.add(commands)
