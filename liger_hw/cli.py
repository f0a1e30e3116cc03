"""The command `liger-hw`: info, demo, tune, bench."""

import argparse
import dataclasses
import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from liger_hw import __version__, backends, dispatch, shapes, tuning
from liger_hw._text import table
from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.kernels import load_all

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
META = torch.device("meta")


def main(argv=None) -> int:
    """Run the command line `argv` (the process's own by default); its exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:2] == ["bench", "train"]:  # a command of its own: its arguments are not those of ops
        argv[:2] = ["bench train"]
    args = _parser().parse_args(argv)
    load_all()
    try:
        return args.run(args) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, NotImplementedError, torch.OutOfMemoryError) as error:
        print(f"liger-hw {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("liger-hw", description="Fused Triton kernels for training language models.")
    parser.add_argument("--version", action="version", version=f"liger_hw {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    add = commands.add_parser("info", help="what was detected here, and what each op would use")
    add.set_defaults(run=info)
    add.add_argument("--json", action="store_true", help="print one JSON object instead of tables")

    add = commands.add_parser("demo", help="train a small Llama on real text, plain and patched, and compare")
    add.set_defaults(run=demo)
    add.add_argument("--model", choices=("tiny", "1b", "8b"), default="tiny", help="its shape; weights are random")
    add.add_argument("--steps", type=_positive, metavar="N", help="optimiser steps of each run")
    add.add_argument("--batch", type=_positive, metavar="N", help="sequences in a batch")
    add.add_argument("--seq", type=_positive, metavar="N", help="tokens in a sequence")
    add.add_argument("--dtype", choices=("fp32", "bf16"), help="fp32 on a CPU, bf16 elsewhere")
    add.add_argument("--text", nargs="+", metavar="PATH", help="files or folders (the standard library's source)")
    add.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")
    add.add_argument("--against", choices=("liger",), help="add a run patched by the package liger-kernel")

    add = commands.add_parser("tune", help="search better launch configurations for this machine")
    add.set_defaults(run=tune)
    add.add_argument("ops", nargs="*", metavar="OP", help="ops to tune (all)")
    add.add_argument("--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose label contains one")
    add.add_argument("--dtype", choices=DTYPES, default="bf16")
    add.add_argument("--output", type=Path, metavar="FILE", help="the table to write (this user's cache)")

    add = commands.add_parser("bench", help="measure every op against its peers and this machine's limits")
    add.set_defaults(run=bench)
    add.add_argument("ops", nargs="*", metavar="OP", help="ops to measure (all); `bench train` measures training steps")
    add.add_argument(
        "--against", default="", metavar="NAMES", help="liger,compile,torch,eager,cce,quack (what is here)"
    )
    add.add_argument("--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose label contains one")
    add.add_argument("--modes", default="fwd,bwd,full,host", metavar="NAMES", help="some of fwd,bwd,full,host (all)")
    add.add_argument("--dtype", choices=DTYPES, help="fp32 on a CPU, bf16 elsewhere")
    add.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")
    add.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="two results: print what changed, and end")

    add = commands.add_parser("bench train", help="measure training steps of whole models")
    add.set_defaults(run=bench_train)
    add.add_argument(
        "models", nargs="*", metavar="MODEL", help="llama-1b, llama-8b, gemma2-2b, qwen2.5-0.5b, moe (all)"
    )
    add.add_argument("--against", default="", metavar="NAMES", help="eager,compile,liger (what is installed here)")
    add.add_argument("--batch", type=_positive, metavar="N", help="sequences in a batch (each model's own)")
    add.add_argument("--seq", type=_positive, nargs="+", metavar="N", help="tokens in a sequence (each model's own)")
    add.add_argument("--checkpointing", choices=("on", "off", "both"), help="of gradients (each model's own)")
    add.add_argument("--steps", type=_positive, default=10, metavar="N", help="timed steps of a run (10)")
    add.add_argument("--dtype", choices=DTYPES, help="fp32 on a CPU, bf16 elsewhere")
    add.add_argument("--longest", action="store_true", help="search the longest sequence that fits the memory, instead")
    add.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: a positive integer")
    return int(text)


def _require(command: str, *packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        source = "liger-kernel" if missing == ["liger_kernel"] else "'liger_hw[bench]'"
        raise ValueError(f"needs {', '.join(missing)}, which is not installed here: pip install {source}")


def _accelerators() -> list[torch.device]:
    kind = torch.accelerator.current_accelerator()
    return [torch.device(kind.type, i) for i in range(torch.accelerator.device_count())] if kind else []


# info ----------------------------------------------------------------------------------------------------------------


def info(args) -> None:
    """Print what was detected, what is forced, and what each op would use, as tables or as JSON."""
    found = gather()
    print(json.dumps(found, indent=1) if args.json else _show(found))


def gather() -> dict:
    """Everything `liger-hw info` tells, as plain data."""
    return {
        "versions": {
            "liger_hw": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,  # with its build, which the package's metadata leaves out
            **{package: _version(package) for package in ("triton", "transformers")},
        },
        "forced": backends.forced(),
        "interpreter": interpreting(),
        "autotune": tuning.autotuning(),
        "devices": [_about(device) for device in _accelerators() or [torch.device("cpu")]],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _about(device: torch.device) -> dict:
    configured = backends.device_of(torch.empty(0, device=device))
    return {
        "device": str(device),
        "detected": dataclasses.asdict(backends.detected(device)),
        "configured_as": dataclasses.asdict(configured),
        "tables": {
            tuning.SHIPPED: str(tuning.shipped_file(configured)),
            tuning.LOCAL: str(tuning.cache_file(configured)),
        },
        "ops": {name: _served(op, device) for name, op in sorted(dispatch.OPS.items())},
        "configurations": _configurations(device),
    }


def _served(op, device) -> dict:
    try:
        return {"implementation": op.choose(device)}
    except RuntimeError as error:
        return {"implementation": None, "error": str(error)}


def _configurations(device) -> list[dict]:
    """The launch configurations at three shapes of each op, found by running the op on tensors without data."""
    found = {}
    with backends.meta_tensors_are_on(device):
        if backends.device_of(torch.empty(0, device=META)).vendor == "cpu":
            return []
        for name, op in sorted(dispatch.OPS.items()):
            cases = shapes.cases([name])
            for case in (cases[0], cases[len(cases) // 2], cases[-1]):
                try:
                    serving = op.implementations[op.choose(META)]
                except RuntimeError:
                    continue
                inputs = case.make(META, torch.bfloat16)
                run = lambda: shapes.step(serving, inputs, case.options)  # noqa: B023, E731 - called at once
                for config, shape, target in tuning.configurations_of(run):
                    chosen = config(*shape, target)
                    entry = {"op": name, "shape": case.label, "key": config.key(*shape), **chosen.to_json()}
                    found.setdefault((name, entry["key"]), entry | {"source": chosen.source})
    return list(found.values())


def _show(found: dict) -> str:
    lines = ["   ".join(f"{name} {number or 'not installed'}" for name, number in found["versions"].items())]
    forced = f"{found['forced']} (LIGER_HW_BACKEND)" if found["forced"] else "nothing"
    kernels = "run in Triton's interpreter" if found["interpreter"] else "compile"
    lines += [f"forced: {forced}   kernels {kernels if AVAILABLE else 'need the package triton'}   "
              f"first-use tuning: {'on' if found['autotune'] else 'off'}"]  # fmt: skip
    rows = []
    for about in found["devices"]:
        rows.append([about["device"], *_facts(about["detected"])])
        if about["configured_as"] != about["detected"]:
            rows.append(["  configured as", *_facts(about["configured_as"])])
    lines += ["", table(["device", *FACTS], rows)]
    described = []
    for about in found["devices"]:
        what = {key: about[key] for key in ("configured_as", "ops", "configurations")}
        if what in described:  # the second of two equal GPUs
            continue
        described.append(what)
        ops = [[name, served["implementation"] or "none"] for name, served in about["ops"].items()]
        lines += ["", table([f"op on {about['device']}", "implementation"], ops)]
        lines += sorted({served["error"] for served in about["ops"].values() if "error" in served})
        launches = [
            [c["op"], c["shape"], c["key"], _parameters(c["meta"]),
             c["num_warps"], c["num_stages"], c["programs"], c["source"]]
            for c in about["configurations"]
        ]  # fmt: skip
        header = ["op", "shape (bf16)", "configuration", "parameters", "warps", "stages", "programs a core", "source"]
        if launches:
            lines += ["", table(header, launches)]
            lines += ["", *(f"{kind} winners: {file}" for kind, file in about["tables"].items())]
        else:
            lines += ["", "No op launches a kernel here. LIGER_HW_BACKEND=nvidia, amd or intel shows what one would."]
    return "\n".join(lines)


FACTS = {  # column -> what it shows of a Device
    "vendor": lambda d: d["vendor"],
    "arch": lambda d: d["arch"],
    "name": lambda d: d["name"] or "-",
    "cores": lambda d: d["num_cores"],
    "warp": lambda d: d["warp_size"],
    "threads/program": lambda d: d["max_threads"],
    "threads/core": lambda d: d["core_threads"],
    "registers/lane": lambda d: d["registers"],
    "shared": lambda d: f"{d['shared_memory'] // 1024} KiB",
    "L2": lambda d: f"{d['l2'] / 2**20:.0f} MiB" if d["l2"] else "-",
    "GB/s": lambda d: d["bandwidth"] or "-",
    "async copy": lambda d: "yes" if d["async_copy"] else "no",
    "launch options": lambda d: ", ".join(f"{k}={v}" for k, v in d["launch_options"].items()) or "-",
}


def _facts(device: dict) -> list:
    return [show(device) for show in FACTS.values()]


# demo ----------------------------------------------------------------------------------------------------------------


def demo(args) -> None:
    """Train plain and patched, print the table, write the report."""
    _require("demo", "matplotlib", "rich", "tokenizers", "transformers", *(["liger_kernel"] if args.against else []))
    import transformers
    from rich.console import Console

    from liger_hw import demo, report

    transformers.logging.set_verbosity_error()
    console = Console()
    with _progress(console) as progress:
        found = demo.compare(args, progress)
    report.show(found, console)
    console.print(f"report: [bold]{report.write(found, args.report)}[/bold]", highlight=False, soft_wrap=True)


# bench ---------------------------------------------------------------------------------------------------------------


def bench(args) -> int | None:
    """Measure, print the table, write bench.json and bench.html; or compare two results."""
    from liger_hw.bench import tables

    if args.compare:
        print(tables.compare(*map(_results, args.compare)))
        return None
    _require("bench", "matplotlib", "rich")
    from liger_hw.bench import operations, page, peers

    device = _here()
    modes = _names("--modes", args.modes, operations.MODES)
    providers = peers.choose([name for name in args.against.split(",") if name], device)
    cases = operations.select(args.ops, args.shapes, modes, device)
    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    with _progress() as progress:
        found = operations.run(cases, providers, modes, dtype, device, progress, args.report / "bench.json")
    print(f"{args.report / 'bench.json'}, {page.write(found, args.report / 'bench.html')}\n")
    print(tables.show(found))
    if not found["complete"]:
        return 130
    return 1 if any(result["error"] for result in found["parity"].values()) else None


def bench_train(args) -> int | None:
    """Measure training, print the table, write train.json and train.html."""
    _require("bench train", "matplotlib", "rich", "transformers")
    from liger_hw.bench import page, tables, training

    device = _here()
    if args.longest and device.type == "cpu":
        raise ValueError("--longest: needs an accelerator, whose memory ends somewhere")
    checkpointing = {"on": [True], "off": [False], "both": [False, True], None: None}[args.checkpointing]
    dtype = DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    providers = training.choose([name for name in args.against.split(",") if name], device)
    models = args.models or training.DEFAULT
    runs = training.plan(
        models, providers, args.batch, args.seq, checkpointing, args.steps, dtype, args.longest
    )  # fmt: skip
    file = args.report / ("longest.json" if args.longest else "train.json")
    with _progress() as progress:
        found = training.run(runs, device, progress, file)
    print(f"{file}, {page.write_training(found, file.with_suffix('.html'))}\n")
    print(tables.show_training(found))
    return None if found["complete"] else 130


def _here() -> torch.device:
    return next(iter(_accelerators()), torch.device("cpu"))


def _names(option: str, text: str, allowed) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in allowed:
            raise ValueError(f"{option}: got {name}, allowed: {', '.join(allowed)}, with commas between")
    return names


def _results(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare: got {file}, allowed: a bench.json ({error})") from None


def _progress(console=None):
    """What happens now, how much of it is done, and a note beside it."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description:<18}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    return Progress(*columns, TextColumn("{task.fields[note]}"), console=console)


# tune ----------------------------------------------------------------------------------------------------------------


def tune(args) -> int | None:
    """Search around the heuristics at the shapes of real models; write winners as they are found."""
    _require("tune", "rich")
    cases = [c for c in shapes.cases(args.ops) if not args.shapes or any(text in c.label for text in args.shapes)]
    cases = [case for case in cases if case.op in dispatch.OPS]
    if not cases:
        raise ValueError(f"--shapes: got {', '.join(args.shapes)}, which no label of these ops contains")
    devices = _accelerators()
    if not devices:
        raise ValueError("measures launches on an accelerator, and torch finds none here")
    if backends.forced():
        raise ValueError(f"measures this machine: unset LIGER_HW_BACKEND, which forces {backends.forced()}")
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console, report, interrupted = Console(), {}, False
    columns = SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn()
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        bar = progress.add_task("shapes", total=len(cases), note="")
        try:
            for case in cases:
                _tune_case(case, devices[0], args, report, lambda note: progress.update(bar, note=note), console)
                progress.advance(bar)
        except KeyboardInterrupt:
            interrupted = True
    print(_tuned(report))
    print(f"winners: {args.output or tuning.cache_file(backends.detected(devices[0]))}")
    return 130 if interrupted else None


def _tune_case(case, device, args, report, note, console) -> None:
    """Tune what one op's forward and backward launch, launch by launch; results go into `report` as they come."""
    op = dispatch.OPS[case.op]
    serving = op.implementations[op.choose(device)]

    def progress(key, tried, best):
        note(f"{key}: {tried} tried")

    try:
        inputs = case.make(device, DTYPES[args.dtype])
        for call in tuning.calls_within(lambda: shapes.step(serving, inputs, case.options)):
            keys = {config.key(*shape) for config, shape, _ in tuning.configurations_of(call)}
            report |= tuning.tune(call, args.output, only=keys - report.keys(), progress=progress)
    except torch.OutOfMemoryError:
        console.print(f"{case.op} {case.label}: skipped, it does not fit this device's memory")


def _tuned(report: dict) -> str:
    rows = []
    for key, found in sorted(report.items()):
        won = "meta" in found
        rows.append([
            key, f"{found['heuristic_ms']:.4f}", f"{found['ms']:.4f}",
            f"{found['heuristic_ms'] / found['ms'] - 1:+.1%}" if won else "", found["candidates"],
            f"{_parameters(found['meta'])}, {found['num_warps']} warps" if won else "the heuristic",
        ])  # fmt: skip
    return table(["configuration", "heuristic ms", "best ms", "gain", "tried", "winner"], rows)


def _parameters(meta: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in meta.items())


if __name__ == "__main__":
    sys.exit(main())
