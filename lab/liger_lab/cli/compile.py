"""Compile every kernel for GPUs that are absent, and check the result: `liger-hw compile`."""

from liger_hw.cli.common import add_command
from liger_lab.cli import common


def add(commands) -> None:
    command = add_command(
        commands, "compile", compile, "compile every kernel for GPUs that are absent, and check registers and memory",
        "Build every kernel for every architecture of NVIDIA and AMD with Triton's own compiler, without a GPU, and "
        "check spills, shared memory and accesses. It writes compiled.json, which is evidence, kernels.json and "
        "compiled.html.",
        {"--archs sm90 gfx942 --ops rms_norm": "one op for two architectures",
         "--mend --ops rms_norm": "replace choices that miss a gate, in liger_hw/tuning/tables"},
        "ten minutes on two cores for all architectures, and seconds where the kernels have not changed since; --mend "
        "takes longer.",
    )  # fmt: skip
    command.add_argument(
        "--mend", action="store_true", help="replace choices that miss a gate, in liger_hw/tuning/tables"
    )
    common.add_build(command)


def compile(args) -> int:
    """Compile, check and print the table; return 1 if a kernel misses a gate."""
    from liger_lab.levels import compiled, mend

    return common.build(args, (mend if args.mend else compiled).run, "kernels.json")
