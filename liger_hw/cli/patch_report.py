"""`liger-hw patch-report`: what `liger_hw.patch` would replace in a model, and what it would leave and why."""

import json
import sys

from liger_hw import console


def add(commands) -> None:
    command = commands.add_parser("patch-report", help="what patching a model would replace, and what not and why")
    command.set_defaults(run=patch_report)
    command.add_argument("model", metavar="MODEL", help="a model type of transformers, or a folder with a config.json")
    command.add_argument("--trust-remote-code", action="store_true", help="run the model's own code from that folder")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def patch_report(args) -> None:
    """Build the model without its weights, patch it and print what was done."""
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
    """Show on a terminal what happens now, in place of the step before; an empty one clears the line."""
    if sys.stderr.isatty():
        print(f"\r\033[K{step and step + ' ...'}", end="", file=sys.stderr, flush=True)
