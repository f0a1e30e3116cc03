"""Compare each launch configuration with its neighbours, compiled: `liger-hw neighbours`."""

from liger_hw.cli.common import add_command
from liger_lab.cli import common


def add(commands) -> None:
    command = add_command(
        commands, "neighbours", neighbours, "compile neighbours of each launch configuration, and compare",
        "Compile each choice of a heuristic and the configurations one step away, for GPUs that are absent, and rate "
        "them by what the compilers print. It writes neighbours.json.",
        {"--archs gfx942": "one architecture", "--archs sm90 --ops rms_norm": "one op"},
        "ten minutes or more for an architecture on two cores.",
    )  # fmt: skip
    common.add_build(command)


def neighbours(args) -> int:
    """Compile and rate each choice beside its neighbours."""
    from liger_lab.levels import ratings

    return common.build(args, ratings.run, "neighbours.json")
