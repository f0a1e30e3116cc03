"""`liger-hw patch-report`: what `liger_hw.patch` would replace in a model, and what it would leave and why."""

import json

from liger_hw import console


def add(commands) -> None:
    command = commands.add_parser("patch-report", help="what patching a model would replace, and what not and why")
    command.set_defaults(run=patch_report)
    command.add_argument("model", metavar="MODEL", help="a model type of transformers, or a folder with a config.json")
    command.add_argument("--trust-remote-code", action="store_true", help="run the model's own code from that folder")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def patch_report(args) -> None:
    """Build the model without its weights, patch it and print what was done."""
    console.require("transformers", "rich")
    from liger_hw.patching.report import patch_report as report

    name, summary = report(args.model, args.trust_remote_code)
    replaced = [{"class": cls, "modules": n, "op": op} for (cls, op), n in summary.replaced.items()]
    left = [{"class": cls, "modules": n, "reason": why} for (cls, why), n in summary.left.items()]
    if args.json:
        print(json.dumps({"model": name, "replaced": replaced, "left": left}, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name, title_justify="left")
    table.add_column("class", overflow="fold")
    table.add_column("modules", justify="right")
    table.add_column("now", overflow="fold")
    for row in replaced:
        table.add_row(row["class"], str(row["modules"]), row["op"])
    for row in left:
        table.add_row(row["class"], str(row["modules"]), f"as it was: {row['reason']}", style="dim")
    Console().print(table)
    print(
        f"{sum(row['modules'] for row in replaced)} modules replaced, {sum(row['modules'] for row in left)} left alone"
    )
