"""Search better launch configurations for this machine: `liger-hw tune`."""

from pathlib import Path

import torch

from liger_hw import backends, console, dispatch, tuning
from liger_hw.checkpointing.operations import tensors_in
from liger_hw.cli.common import accelerators, add_command, show
from liger_hw.hooks import hooks
from liger_lab import contribution, terminal
from liger_lab.cases import model_cases, step
from liger_lab.cli import common


def add(commands) -> None:
    command = add_command(
        commands, "tune", tune, "search better launch configurations for this machine",
        "Measure launch configurations around each heuristic at the shapes of real models on this GPU, and keep "
        "winners in a table that later programs use. Ctrl-C keeps the winners so far. With --check, say whether tables "
        "are fit to ship, and measure nothing.",
        {"rms_norm --shapes 8192x4096": "one op at one shape",
         "--contribute": "every op, with a table for all GPUs of this architecture"},
        "minutes for an op: it compiles the candidates on every core and times each. --check takes seconds.",
    )  # fmt: skip
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
        return _check(args, args.check or contribution.shipped())
    console.require("rich")
    cases = [c for c in model_cases(args.ops) if not args.shapes or any(text in c.label for text in args.shapes)]
    if not cases:
        raise ValueError(f"--shapes: got {', '.join(args.shapes)}, which no label of these ops contains")
    devices = accelerators()
    if not devices:
        raise ValueError("it measures launches on an accelerator, and torch finds none here")
    if backends.forced():
        raise ValueError(f"it measures this machine: unset LIGER_HW_BACKEND, which forces {backends.forced()}")
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    screen, report, interrupted = Console(stderr=args.json), {}, False
    columns = SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=screen) as progress:
        bar = progress.add_task("shapes", total=len(cases), note="")
        try:
            for case in cases:
                _tune_case(case, devices[0], args, report, lambda note: progress.update(bar, note=note), screen)
                progress.advance(bar)
        except KeyboardInterrupt:
            interrupted = True
    device = backends.detected(devices[0])
    table = args.output or tuning.entries.cache_file(device)
    lines = [_tuned(report), f"winners: {table}"]
    if args.contribute:
        file = contribution.contribute(table, device, Path())
        lines += [f"{file}: put it into liger_hw/tuning/tables/, and send it (docs/guides/your_gpu.md)"
                  if file else "nothing to contribute: no winner beat its heuristic"]  # fmt: skip
    show(args, {"table": str(table), "configurations": report}, *lines)
    return 130 if interrupted else None


def _check(args, files: list[Path]) -> int | None:
    problems, lines = {str(file): contribution.problems(file) for file in files}, []
    for file in files:
        if not problems[str(file)]:
            ignored = len(tuning.choice.other_code(tuning.entries.read_table(file)))
            note = f"; {ignored} measured on other code, and ignored" if ignored else ""
            lines.append(f"{file}: fit to ship{note}")
    every = [line for file_problems in problems.values() for line in file_problems]
    show(args, problems, *lines, "", *every, *([] if files else ["the package has no table"]))
    return 1 if every else None


class Call:
    """A call of a `raw` function with its arguments, to be repeated.

    Attributes:
        written: the tensors among its arguments, if it writes to some of them.
    """

    def __init__(self, launches, args, repeatable):
        self.launches, self.args = launches, args
        self.written = () if repeatable else list(tensors_in(args))

    @torch.no_grad()  # as within an autograd.Function
    def __call__(self):
        return self.launches(*self.args)


def calls_within(function) -> list[Call]:
    """Run `function()`; return its calls of `raw` functions, as functions without arguments."""
    calls = []

    def remember(launches, args, repeatable):
        calls.append(Call(launches, args, repeatable))
        return launches(*args)

    with hooks.observe(remember):
        function()
    return calls


def _tune_case(case, device, args, report, note, screen) -> None:
    """Tune the launches of one op's forward and backward one by one; fill in `report`."""
    op = dispatch.OPS[case.op]
    serving = op.implementations[op.choose(device)]

    def progress(key, tried, best):
        note(f"{key}: {tried} tried")

    try:
        inputs = case.make(device, common.DTYPES[args.dtype])
        for call in calls_within(lambda: step(serving, inputs, case.options)):
            keys = {config.key(*shape) for config, shape, _ in tuning.search.configurations_of(call)}
            report |= tuning.search.tune(call, args.output, only=keys - report.keys(), progress=progress)
    except torch.OutOfMemoryError:
        screen.print(f"{case.op} {case.label}: skipped, it does not fit this device's memory")


def _tuned(report: dict) -> str:
    rows = []
    for key, result in sorted(report.items()):
        won = "meta" in result
        rows.append([
            key, f"{result['heuristic_ms']:.4f}", f"{result['ms']:.4f}",
            f"{result['heuristic_ms'] / result['ms'] - 1:+.1%}" if won else "", result["candidates"],
            f"{terminal.parameters(result['meta'])}, {result['num_warps']} warps" if won else "the heuristic",
        ])  # fmt: skip
    return console.table(["configuration", "heuristic ms", "best ms", "gain", "tried", "winner"], rows)
