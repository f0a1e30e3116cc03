"""Execute AMD machine code of every op on this CPU: `liger-hw emulate`."""

from liger_hw.cli.common import add_command
from liger_lab.cli import common


def add(commands) -> None:
    command = add_command(
        commands, "emulate", emulate, "execute AMD machine code of every op on this CPU, without an AMD GPU",
        "Compile the launches of each parity case for AMD GPUs, execute the machine code on this CPU and compare with "
        "the definitions. It writes emulated.json, which is evidence, and emulated_kernels.json.",
        {"--few --archs gfx942": "each kernel, loop and tail once, for one architecture",
         "--archs gfx1100 --ops rms_norm --remove 50": "also remove instructions, which must be noticed"},
        "hours for every case of an architecture on two cores; --few takes minutes.",
    )  # fmt: skip
    command.add_argument("--few", action="store_true",
                         help="only cases that reach another kernel, loop or tail; no fp16")  # fmt: skip
    command.add_argument(
        "--remove", type=common.positive, default=0, metavar="N",
        help="also remove N instructions of each op, one at a time; 90%% must be noticed",
    )  # fmt: skip
    common.add_build(command)


def emulate(args) -> int:
    """Execute, compare and print the table; return 1 if a case failed."""
    from liger_lab.levels import emulated

    return common.build(args, emulated.run, "emulated_kernels.json", args.few, args.remove)
