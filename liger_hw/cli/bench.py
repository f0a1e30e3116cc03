"""Measure ops, losses and training steps beside their peers: `liger-hw bench`."""

import json
from pathlib import Path

from liger_hw import console
from liger_hw.cli import common
from liger_hw.spelling import check_known


def add(commands) -> None:
    def command(name, text, function, peers):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=function)
        command.add_argument("--against", default="", metavar="NAMES", help=f"{peers} (all that are installed)")
        command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="folder (./report)")
        return command.add_argument

    def dtype(argument):
        argument("--dtype", choices=common.DTYPES, help="fp32 on a CPU, bf16 elsewhere")

    option = command(
        "bench", "measure every op against its peers and this machine's limits", bench,
        "liger,compile,torch,eager,cce,quack",
    )  # fmt: skip
    option("ops", nargs="*", metavar="OP",
           help="ops to measure (all); `bench train`, `bench losses` and `bench distributed` are commands")  # fmt: skip
    option("--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose label contains one")
    option("--modes", default="fwd,bwd,full,host", metavar="NAMES", help="some of fwd,bwd,full,host (all)")
    option("--compare", nargs=2, type=Path, metavar="FILE", help="compare two bench.json files, and measure nothing")
    dtype(option)

    option = command("bench losses", "measure every loss of an output layer", bench_losses, "torch,liger")
    option("losses", nargs="*", metavar="TEXT", help="only losses whose name or shape contains one (all)")
    dtype(option)

    option = command("bench train", "measure training steps of whole models", bench_train, "eager,compile,liger")
    option("models", nargs="*", metavar="MODEL", help="llama-1b, gemma2-2b, ... (all but tiny)")
    option("--batch", type=common.positive, metavar="N", help="sequences in a batch (each model's own)")
    option("--seq", type=common.positive, nargs="+", metavar="N", help="tokens in a sequence (each model's own)")
    option("--checkpointing", choices=("on", "off", "both"), help="of activations (each model's own)")
    option("--steps", type=common.positive, default=10, metavar="N", help="timed steps of a run (10)")
    option("--longest", action="store_true", help="search the longest sequence that fits the memory, without timing")
    dtype(option)

    option = command("bench distributed", "measure training steps of a sharded model", bench_distributed, "eager,liger")
    option("--model", default="llama-8b", metavar="MODEL", help="llama-8b, llama-1b, ... (llama-8b)")
    option("--gpus", type=common.positive, nargs="+", default=[], metavar="N",
           help="GPUs to use (all; 2 processes on a CPU)")  # fmt: skip
    option("--seq", type=common.positive, nargs="+", default=[], metavar="N",
           help="tokens in a sequence (2048 4096 8192 16384 32768, until out of memory)")  # fmt: skip
    option("--engine", choices=("fsdp2", "zero3"), default="fsdp2", help="sharding engine (fsdp2)")
    option("--batch", type=common.positive, default=8, metavar="N", help="sequences of a process (8)")
    option("--steps", type=common.positive, default=3, metavar="N", help="timed steps of a length (3)")


def _dtype(args, device):
    return common.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]


def _peers(args) -> list[str]:
    return [name for name in args.against.split(",") if name]


def bench(args) -> int | None:
    """Measure ops, print the table, write bench.json and bench.html; or compare two results."""
    from liger_hw.bench import formatting

    if args.compare:
        print(formatting.compare(*map(_read, args.compare)))
        return None
    console.require("matplotlib", "rich")
    from liger_hw.bench import charts, operations, peers

    device, modes, file = common.here(), args.modes.split(","), args.report / "bench.json"
    for mode in modes:
        check_known("mode", mode, operations.MODES, "Modes, with commas between")
    providers = peers.choose(_peers(args), device)
    cases = operations.select(args.ops, args.shapes, modes, device)
    with console.progress() as progress:
        benchmark = operations.run(cases, providers, modes, _dtype(args, device), device, progress, file)
    print(f"{file}, {charts.write(benchmark, file.with_suffix('.html'))}\n")
    print(formatting.show(benchmark, formatting.HEADER, formatting.rows(benchmark)))
    if not benchmark["complete"]:
        return 130
    return 1 if any(result["error"] for result in benchmark["parity"].values()) else None


def bench_losses(args) -> int | None:
    """Measure losses, print the table, write losses.json."""
    console.require("rich")
    from liger_hw.bench import formatting, losses

    device, file = common.here(), args.report / "losses.json"
    chosen, providers = losses.select(args.losses, device), losses.choose(_peers(args))
    with console.progress() as progress:
        benchmark = losses.run(chosen, providers, _dtype(args, device), device, progress, file)
    print(f"{file}\n")
    print(formatting.show(benchmark, losses.HEADER, losses.rows(benchmark)))
    return None if benchmark["complete"] else 130


def bench_train(args) -> int | None:
    """Measure training, print the table, write train.json and train.html."""
    console.require("matplotlib", "rich", "transformers")
    from liger_hw.bench import charts, formatting, training

    device = common.here()
    if args.longest and device.type == "cpu":
        raise ValueError("--longest: needs an accelerator, and torch finds none here")
    checkpointing = {"on": [True], "off": [False], "both": [False, True], None: None}[args.checkpointing]
    runs = training.plan(
        args.models or training.DEFAULT, training.choose(_peers(args), device), args.batch, args.seq, checkpointing,
        args.steps, _dtype(args, device), args.longest,
    )  # fmt: skip
    file = args.report / ("longest.json" if args.longest else "train.json")
    with console.progress() as progress:
        benchmark = training.run(runs, device, progress, file)
    lead = "Steps of training, random weights and tokens, fused AdamW; every model in its own process."
    rows = formatting.training_rows(benchmark)
    html = charts.write_training(benchmark, file.with_suffix(".html"), lead, formatting.TRAINING, rows)
    print(f"{file}, {html}\n")
    print(formatting.show(benchmark, formatting.TRAINING, rows))
    return None if benchmark["complete"] else 130


def bench_distributed(args) -> int | None:
    """Measure sharded training, print the table, write distributed.json and distributed.html."""
    console.require("matplotlib", "rich", "transformers")
    from liger_hw.bench import charts, distributed, formatting

    device, file = common.here(), args.report / "distributed.json"
    seqs = args.seq or distributed.SEQS
    groups = distributed.plan(args.model, args.gpus, args.engine, _peers(args), args.batch, seqs, args.steps, device)
    with console.progress() as progress:
        benchmark = distributed.run(groups, device, progress, file)
    problems, table = distributed.disagreements(benchmark), (distributed.HEADER, distributed.rows(benchmark))
    html = charts.write_training(benchmark, file.with_suffix(".html"), distributed.LEAD, *table, problems)
    print(f"{file}, {html}\n")
    print(formatting.show(benchmark, *table, *problems))
    if not benchmark["complete"]:
        return 130
    return 1 if problems else None


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare: got {file}, allowed: a bench.json ({error})") from None
