"""`liger-hw bench`: every op, and training steps of whole models, against their peers."""

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
        help="ops to measure (all); not train, losses or distributed, which are commands",
    )
    command.add_argument(
        "--against", default="", metavar="NAMES", help="liger,compile,torch,eager,cce,quack (what is here)"
    )
    command.add_argument("--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose label contains one")
    command.add_argument(
        "--modes", default="fwd,bwd,full,host", metavar="NAMES", help="some of fwd,bwd,full,host (all)"
    )
    command.add_argument("--dtype", choices=common.DTYPES, help="fp32 on a CPU, bf16 elsewhere")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")
    command.add_argument(
        "--compare", nargs=2, type=Path, metavar="FILE", help="two results: print what changed, and end"
    )

    command = commands.add_parser("bench losses", help="measure every loss of an output layer")
    command.set_defaults(run=bench_losses)
    command.add_argument("losses", nargs="*", metavar="TEXT", help="only losses whose name or shape contains one (all)")
    command.add_argument("--against", default="", metavar="NAMES", help="torch,liger (what is installed here)")
    command.add_argument("--dtype", choices=common.DTYPES, help="fp32 on a CPU, bf16 elsewhere")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")

    command = commands.add_parser("bench train", help="measure training steps of whole models")
    command.set_defaults(run=bench_train)
    command.add_argument("models", nargs="*", metavar="MODEL", help="llama-1b, gemma2-2b, ... (all; others are listed)")
    command.add_argument("--against", default="", metavar="NAMES", help="eager,compile,liger (what is installed here)")
    command.add_argument("--batch", type=common.positive, metavar="N", help="sequences in a batch (each model's own)")
    command.add_argument(
        "--seq", type=common.positive, nargs="+", metavar="N", help="tokens in a sequence (each model's own)"
    )
    command.add_argument("--checkpointing", choices=("on", "off", "both"), help="of gradients (each model's own)")
    command.add_argument("--steps", type=common.positive, default=10, metavar="N", help="timed steps of a run (10)")
    command.add_argument("--dtype", choices=common.DTYPES, help="fp32 on a CPU, bf16 elsewhere")
    command.add_argument(
        "--longest", action="store_true", help="search the longest sequence that fits the memory, instead"
    )
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")

    command = commands.add_parser("bench distributed", help="measure training steps of a sharded model")
    command.set_defaults(run=bench_distributed)
    command.add_argument("--model", default="llama-8b", metavar="MODEL", help="llama-8b, llama-1b, ... (llama-8b)")
    command.add_argument(
        "--gpus", type=common.positive, nargs="+", default=[], metavar="N", help="how many (all; 2 processes on a CPU)"
    )
    command.add_argument(
        "--seq", type=common.positive, nargs="+", default=[], metavar="N",
        help="tokens in a sequence (2048 4096 8192 16384 32768, until out of memory)",
    )  # fmt: skip
    command.add_argument("--engine", choices=("fsdp2", "zero3"), default="fsdp2", help="what shards (fsdp2)")
    command.add_argument("--against", default="", metavar="NAMES", help="eager,liger (what is installed here)")
    command.add_argument("--batch", type=common.positive, default=8, metavar="N", help="sequences of a process (8)")
    command.add_argument("--steps", type=common.positive, default=3, metavar="N", help="timed steps of a length (3)")
    command.add_argument("--report", type=Path, default=Path("report"), metavar="DIR", help="where it goes (./report)")


def bench(args) -> int | None:
    """Measure, print the table, write bench.json and bench.html; or compare two results."""
    from liger_hw.bench import tables

    if args.compare:
        print(tables.compare(*map(_results, args.compare)))
        return None
    console.require("matplotlib", "rich")
    from liger_hw.bench import operations, page, peers

    device = common.here()
    modes = args.modes.split(",")
    for mode in modes:
        check_known("mode", mode, operations.MODES, "Modes, with commas between")
    providers = peers.choose([name for name in args.against.split(",") if name], device)
    cases = operations.select(args.ops, args.shapes, modes, device)
    dtype = common.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    with console.progress() as progress:
        found = operations.run(cases, providers, modes, dtype, device, progress, args.report / "bench.json")
    print(f"{args.report / 'bench.json'}, {page.write(found, args.report / 'bench.html')}\n")
    print(tables.show(found))
    if not found["complete"]:
        return 130
    return 1 if any(result["error"] for result in found["parity"].values()) else None


def bench_losses(args) -> int | None:
    """Measure losses, print the table, write losses.json."""
    console.require("rich")
    from liger_hw.bench import losses

    device = common.here()
    chosen = losses.select(args.losses, device)
    providers = losses.choose([name for name in args.against.split(",") if name])
    dtype = common.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    with console.progress() as progress:
        found = losses.run(chosen, providers, dtype, device, progress, args.report / "losses.json")
    print(f"{args.report / 'losses.json'}\n")
    print(losses.show(found))
    return None if found["complete"] else 130


def bench_train(args) -> int | None:
    """Measure training, print the table, write train.json and train.html."""
    console.require("matplotlib", "rich", "transformers")
    from liger_hw.bench import page, tables, training

    device = common.here()
    if args.longest and device.type == "cpu":
        raise ValueError("--longest: needs an accelerator, whose memory ends somewhere")
    checkpointing = {"on": [True], "off": [False], "both": [False, True], None: None}[args.checkpointing]
    dtype = common.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]
    providers = training.choose([name for name in args.against.split(",") if name], device)
    models = args.models or training.DEFAULT
    runs = training.plan(
        models, providers, args.batch, args.seq, checkpointing, args.steps, dtype, args.longest
    )  # fmt: skip
    file = args.report / ("longest.json" if args.longest else "train.json")
    with console.progress() as progress:
        found = training.run(runs, device, progress, file)
    lead = "Steps of training, random weights and tokens, fused AdamW; every model in a process of its own."
    html = page.write_training(found, file.with_suffix(".html"), lead, tables.TRAINING, tables.training_rows(found))
    print(f"{file}, {html}\n")
    print(tables.show_training(found))
    return None if found["complete"] else 130


def bench_distributed(args) -> int | None:
    """Measure sharded training, print the table, write distributed.json and distributed.html."""
    console.require("matplotlib", "rich", "transformers")
    from liger_hw.bench import distributed, page

    device = common.here()
    against = [name for name in args.against.split(",") if name]
    seqs = args.seq or distributed.SEQS
    groups = distributed.plan(args.model, args.gpus, args.engine, against, args.batch, seqs, args.steps, device)
    file = args.report / "distributed.json"
    with console.progress() as progress:
        found = distributed.run(groups, device, progress, file)
    wrong = distributed.disagreements(found)
    html = page.write_training(
        found, file.with_suffix(".html"), distributed.LEAD, distributed.HEADER, distributed.rows(found), wrong
    )
    print(f"{file}, {html}\n")
    print(distributed.show(found))
    if not found["complete"]:
        return 130
    return 1 if wrong else None


def _results(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare: got {file}, allowed: a bench.json ({error})") from None
