"""Show which modules of a model `liger_hw.patch` would replace: `liger-hw patch-report`."""

import json
import sys

from liger_hw import console


def add(commands) -> None:
    command = commands.add_parser(
        "patch-report", help="show which modules of a model patching replaces, and why it leaves the others"
    )
    command.set_defaults(run=patch_report)
    command.add_argument("model", metavar="MODEL", help="a model type of transformers, or a folder with a config.json")
    command.add_argument("--trust-remote-code", action="store_true", help="run the model's own code from that folder")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def patch_report(args) -> None:
    """Build the model without its weights, patch it and print the summary."""
    _say("importing transformers")
    console.require("transformers")
    from liger_hw.patching.report import patch_report as report

    name, summary = report(args.model, args.trust_remote_code, on_step=_say)
    _say("")
    if args.json:
        replaced = [{"class": cls, "modules": n, "op": op} for (cls, op), n in summary.replaced.items()]
        left = [{"class": cls, "modules": n, "reason": why} for (cls, why), n in summary.left.items()]
        print(json.dumps({"model": name, "replaced": replaced, "left": left}, indent=1))
        return
    print(f"{name}\n\n{summary}\n")
    print(f"{summary.replaced.total()} modules replaced, {summary.left.total()} left alone")


def _say(step: str) -> None:
    """Show the current step on a terminal, in place of the last."""
    if sys.stderr.isatty():
        print(f"\r\033[K{step and step + ' ...'}", end="", file=sys.stderr, flush=True)
