"""Measure ops, losses and training steps beside their peers: `liger-hw bench`."""

import json
from pathlib import Path

from liger_hw import console
from liger_hw.cli import common
from liger_hw.spelling import check_known


def add(commands) -> None:
    command = commands.add_parser("bench", help="measure every op against its peers and this machine's limits")
    command.set_defaults(run=bench)
    command.add_argument(
        "ops",
        nargs="*",
        metavar="OP",
        help="ops to measure (all); `bench train`, `bench losses` and `bench distributed` are commands",
    )
    command.add_argument(
        "--against", default="", metavar="NAMES", help="liger,compile,torch,eager,cce,quack (all that are installed)"
    )
    command.add_argument("--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose label contains one")
    command.add_argument(
        "--modes", default="fwd,bwd,full,host", metavar="NAMES", help="some of fwd,bwd,full,host (all)"
    )
    command.add_argument("--dtype", choices=common.DTYPES, help="fp32 on a CPU, bf16 elsewhere")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where to write (./report)")
    command.add_argument(
        "--compare", nargs=2, type=Path, metavar="FILE", help="compare two bench.json files, and measure nothing"
    )

    command = commands.add_parser("bench losses", help="measure every loss of an output layer")
    command.set_defaults(run=bench_losses)
    command.add_argument("losses", nargs="*", metavar="TEXT", help="only losses whose name or shape contains one (all)")
    command.add_argument("--against", default="", metavar="NAMES", help="torch,liger (all that are installed)")
    command.add_argument("--dtype", choices=common.DTYPES, help="fp32 on a CPU, bf16 elsewhere")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where to write (./report)")

    command = commands.add_parser("bench train", help="measure training steps of whole models")
    command.set_defaults(run=bench_train)
    command.add_argument("models", nargs="*", metavar="MODEL", help="llama-1b, gemma2-2b, ... (all but tiny)")
    command.add_argument("--against", default="", metavar="NAMES", help="eager,compile,liger (all that are installed)")
    command.add_argument("--batch", type=common.positive, metavar="N", help="sequences in a batch (each model's own)")
    command.add_argument(
        "--seq", type=common.positive, nargs="+", metavar="N", help="tokens in a sequence (each model's own)"
    )
    command.add_argument("--checkpointing", choices=("on", "off", "both"), help="of activations (each model's own)")
    command.add_argument("--steps", type=common.positive, default=10, metavar="N", help="timed steps of a run (10)")
    command.add_argument("--dtype", choices=common.DTYPES, help="fp32 on a CPU, bf16 elsewhere")
    command.add_argument(
        "--longest", action="store_true", help="search the longest sequence that fits the memory, instead of timing"
    )
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where to write (./report)")

    command = commands.add_parser("bench distributed", help="measure training steps of a sharded model")
    command.set_defaults(run=bench_distributed)
    command.add_argument("--model", default="llama-8b", metavar="MODEL", help="llama-8b, llama-1b, ... (llama-8b)")
    command.add_argument(
        "--gpus",
        type=common.positive,
        nargs="+",
        default=[],
        metavar="N",
        help="GPUs to use (all; 2 processes on a CPU)",
    )
    command.add_argument(
        "--seq", type=common.positive, nargs="+", default=[], metavar="N",
        help="tokens in a sequence (2048 4096 8192 16384 32768, until out of memory)",
    )  # fmt: skip
    command.add_argument("--engine", choices=("fsdp2", "zero3"), default="fsdp2", help="sharding engine (fsdp2)")
    command.add_argument("--against", default="", metavar="NAMES", help="eager,liger (all that are installed)")
    command.add_argument("--batch", type=common.positive, default=8, metavar="N", help="sequences of a process (8)")
    command.add_argument("--steps", type=common.positive, default=3, metavar="N", help="timed steps of a length (3)")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where to write (./report)")


def bench(args) -> int | None:
    """Measure ops, print the table, write bench.json and bench.html; or compare two results."""
    from liger_hw.bench import formatting

    if args.compare:
        print(formatting.compare(*map(_read, args.compare)))
        return None
    console.require("matplotlib", "rich")
    from liger_hw.bench import charts, operations, peers

    device = common.here()
    modes = args.modes.split(",")
    for mode in modes:
        check_known("mode", mode, operations.MODES, "Modes, with commas between")
    providers = peers.choose([name for name in args.against.split(",") if name], device)
    cases = operations.select(args.ops, args.shapes, modes, device)
    dtype = common.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    with console.progress() as progress:
        benchmark = operations.run(cases, providers, modes, dtype, device, progress, args.report / "bench.json")
    print(f"{args.report / 'bench.json'}, {charts.write(benchmark, args.report / 'bench.html')}\n")
    print(formatting.show(benchmark))
    if not benchmark["complete"]:
        return 130
    return 1 if any(result["error"] for result in benchmark["parity"].values()) else None


def bench_losses(args) -> int | None:
    """Measure losses, print the table, write losses.json."""
    console.require("rich")
    from liger_hw.bench import losses

    device = common.here()
    chosen = losses.select(args.losses, device)
    providers = losses.choose([name for name in args.against.split(",") if name])
    dtype = common.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    with console.progress() as progress:
        benchmark = losses.run(chosen, providers, dtype, device, progress, args.report / "losses.json")
    print(f"{args.report / 'losses.json'}\n")
    print(losses.show(benchmark))
    return None if benchmark["complete"] else 130


def bench_train(args) -> int | None:
    """Measure training, print the table, write train.json and train.html."""
    console.require("matplotlib", "rich", "transformers")
    from liger_hw.bench import charts, formatting, training

    device = common.here()
    if args.longest and device.type == "cpu":
        raise ValueError("--longest: needs an accelerator, and torch finds none here")
    checkpointing = {"on": [True], "off": [False], "both": [False, True], None: None}[args.checkpointing]
    dtype = common.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    providers = training.choose([name for name in args.against.split(",") if name], device)
    models = args.models or training.DEFAULT
    runs = training.plan(
        models, providers, args.batch, args.seq, checkpointing, args.steps, dtype, args.longest
    )  # fmt: skip
    file = args.report / ("longest.json" if args.longest else "train.json")
    with console.progress() as progress:
        benchmark = training.run(runs, device, progress, file)
    lead = "Steps of training, random weights and tokens, fused AdamW; every model in its own process."
    rows = formatting.training_rows(benchmark)
    html = charts.write_training(benchmark, file.with_suffix(".html"), lead, formatting.TRAINING, rows)
    print(f"{file}, {html}\n")
    print(formatting.show_training(benchmark))
    return None if benchmark["complete"] else 130


def bench_distributed(args) -> int | None:
    """Measure sharded training, print the table, write distributed.json and distributed.html."""
    console.require("matplotlib", "rich", "transformers")
    from liger_hw.bench import charts, distributed

    device = common.here()
    against = [name for name in args.against.split(",") if name]
    seqs = args.seq or distributed.SEQS
    groups = distributed.plan(args.model, args.gpus, args.engine, against, args.batch, seqs, args.steps, device)
    file = args.report / "distributed.json"
    with console.progress() as progress:
        benchmark = distributed.run(groups, device, progress, file)
    problems, rows = distributed.disagreements(benchmark), distributed.rows(benchmark)
    html = charts.write_training(
        benchmark, file.with_suffix(".html"), distributed.LEAD, distributed.HEADER, rows, problems
    )
    print(f"{file}, {html}\n")
    print(distributed.show(benchmark))
    if not benchmark["complete"]:
        return 130
    return 1 if problems else None


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare: got {file}, allowed: a bench.json ({error})") from None
