"""Run a program that imports `liger_kernel` on this library instead.

    python -m liger_hw.run train.py --its-arguments
    python -m liger_hw.run -m llamafactory.cli train config.yaml
    torchrun --nproc-per-node 8 -m liger_hw.run train.py

Every Python process that the program starts (launchers, workers, data loaders) gets the stand-in too. An installed
liger_kernel is an error, unless `--replace` before the program, or LIGER_HW_STAND_IN=replace, hides it.
`--activations BUDGET` before the program plans what the patched models keep (`liger_hw.activations`).
"""

import argparse
import os
import runpy
import sys

from liger_hw.integrations import install


def main(argv=None):
    """Run the program that `argv` names, in this process; by default the process's own arguments."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        "python -m liger_hw.run", usage="%(prog)s [--replace] [--activations BUDGET] (SCRIPT | -m MODULE) ..."
    )
    parser.add_argument("--replace", action="store_true", help="hide the liger_kernel that is installed here")
    parser.add_argument(
        "--activations", metavar="BUDGET",
        help="plan the activations of the models that the program patches: 100GiB, a share such as 0.9, or auto",
    )  # fmt: skip
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("program", metavar="SCRIPT | MODULE")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    args = parser.parse_args(argv)
    if not args.is_module and not os.path.exists(args.program):
        parser.error(f"no such file: {args.program}")
    try:
        if args.activations is not None:
            plan_activations(args.activations)
        install(args.replace or None, children=True)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    sys.argv = [args.program, *args.rest]
    if args.is_module:
        runpy.run_module(args.program, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(args.program))
        runpy.run_path(args.program, run_name="__main__")


def plan_activations(budget: str):
    """Let this process and its children plan the activations of the models that they patch.

    Raises:
        ValueError: `budget` is none of `liger_hw.activations`.
    """
    from liger_hw.checkpointing.budget import BUDGET_VARIABLE, bytes_of

    bytes_of(budget, None)
    os.environ[BUDGET_VARIABLE] = budget


if __name__ == "__main__":
    main()
