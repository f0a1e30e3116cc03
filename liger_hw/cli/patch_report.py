"""Show which modules of a model `liger_hw.patch` would replace: `liger-hw patch-report`."""

import sys

from liger_hw import console
from liger_hw.cli.common import add_command, show


def add(commands) -> None:
    command = add_command(
        commands, "patch-report", patch_report, "show which modules of a model patching replaces",
        "Build a model without its weights, patch it, and list the modules that it replaces by op and those that it "
        "leaves, with the reason. It downloads nothing and reads no weight.",
        {"qwen3": "a model type of transformers, in its default configuration", "./my-model": "a folder"},
        "about ten seconds, most of them to import transformers.",
    )  # fmt: skip
    command.add_argument("model", metavar="MODEL", help="a model type of transformers, or a folder with a config.json")
    command.add_argument("--trust-remote-code", action="store_true", help="run the model's own code from that folder")


def patch_report(args) -> None:
    """Build the model without its weights, patch it and print the summary."""
    _say("importing transformers")
    console.require("transformers")
    from liger_hw.patching.report import patch_report as report

    name, summary = report(args.model, args.trust_remote_code, on_step=_say)
    _say("")
    replaced = [{"class": cls, "modules": n, "op": op} for (cls, op), n in summary.replaced.items()]
    left = [{"class": cls, "modules": n, "reason": why} for (cls, why), n in summary.left.items()]
    show(args, {"model": name, "replaced": replaced, "left": left}, f"{name}\n", str(summary))


def _say(step: str) -> None:
    """Show the current step on a terminal, in place of the last."""
    if sys.stderr.isatty():
        print(f"\r\033[K{step and step + ' ...'}", end="", file=sys.stderr, flush=True)
