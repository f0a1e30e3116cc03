"""Search better launch configurations for this machine: `liger-hw tune`."""

from pathlib import Path

import torch

from liger_hw import backends, console, dispatch, tuning
from liger_hw.cli import common
from liger_hw.testing.cases import model_cases, step
from liger_hw.tuning import contribution


def add(commands) -> None:
    command = commands.add_parser("tune", help="search better launch configurations for this machine")
    command.set_defaults(run=tune)
    command.add_argument("ops", nargs="*", metavar="OP", help="ops to tune (all)")
    command.add_argument("--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose label contains one")
    command.add_argument("--dtype", choices=common.DTYPES, default="bf16")
    command.add_argument("--output", type=Path, metavar="FILE", help="table to write (the user's cache)")
    command.add_argument(
        "--contribute", action="store_true", help="also write ./VENDOR-ARCH.json, a table for the package"
    )
    command.add_argument("--check", nargs="*", type=Path, metavar="FILE", help="are these tables (the package's own) "
                         "fit to ship? Tunes nothing")  # fmt: skip


def tune(args) -> int | None:
    """Search around the heuristics at the shapes of real models; write each winner at once."""
    if args.check is not None:
        return _check(args.check or contribution.shipped())
    console.require("rich")
    cases = [c for c in model_cases(args.ops) if not args.shapes or any(text in c.label for text in args.shapes)]
    if not cases:
        raise ValueError(f"--shapes: got {', '.join(args.shapes)}, which no label of these ops contains")
    devices = common.accelerators()
    if not devices:
        raise ValueError("it measures launches on an accelerator, and torch finds none here")
    if backends.forced():
        raise ValueError(f"it measures this machine: unset LIGER_HW_BACKEND, which forces {backends.forced()}")
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    terminal, report, interrupted = Console(), {}, False
    columns = SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=terminal) as progress:
        bar = progress.add_task("shapes", total=len(cases), note="")
        try:
            for case in cases:
                _tune_case(case, devices[0], args, report, lambda note: progress.update(bar, note=note), terminal)
                progress.advance(bar)
        except KeyboardInterrupt:
            interrupted = True
    print(_tuned(report))
    device = backends.detected(devices[0])
    table = args.output or tuning.cache_file(device)
    print(f"winners: {table}")
    if args.contribute:
        file = contribution.contribute(table, device, Path())
        print(f"{file}: put it into liger_hw/tuning/tables/ and open a pull request, or attach it to an issue" if file
              else "nothing to contribute: no winner beat its heuristic")  # fmt: skip
    return 130 if interrupted else None


def _check(files: list[Path]) -> int | None:
    problems = [line for file in files for line in contribution.problems(file)]
    for file in files:
        if not any(line.startswith(f"{file}:") for line in problems):
            ignored = len(contribution.other_code(tuning.read_table(file)))
            print(f"{file}: fit to ship" + (f"; {ignored} measured on other code, and ignored" if ignored else ""))
    print("", *problems, sep="\n")
    if not files:
        print("the package has no table")
    return 1 if problems else None


def _tune_case(case, device, args, report, note, terminal) -> None:
    """Tune the launches of one op's forward and backward one by one; fill in `report`."""
    op = dispatch.OPS[case.op]
    serving = op.implementations[op.choose(device)]

    def progress(key, tried, best):
        note(f"{key}: {tried} tried")

    try:
        inputs = case.make(device, common.DTYPES[args.dtype])
        for call in tuning.calls_within(lambda: step(serving, inputs, case.options)):
            keys = {config.key(*shape) for config, shape, _ in tuning.configurations_of(call)}
            report |= tuning.tune(call, args.output, only=keys - report.keys(), progress=progress)
    except torch.OutOfMemoryError:
        terminal.print(f"{case.op} {case.label}: skipped, it does not fit this device's memory")


def _tuned(report: dict) -> str:
    rows = []
    for key, result in sorted(report.items()):
        won = "meta" in result
        rows.append([
            key, f"{result['heuristic_ms']:.4f}", f"{result['ms']:.4f}",
            f"{result['heuristic_ms'] / result['ms'] - 1:+.1%}" if won else "", result["candidates"],
            f"{console.parameters(result['meta'])}, {result['num_warps']} warps" if won else "the heuristic",
        ])  # fmt: skip
    return console.table(["configuration", "heuristic ms", "best ms", "gain", "tried", "winner"], rows)
