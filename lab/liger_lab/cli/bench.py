"""Measure ops, losses and training steps beside their peers: `liger-hw bench`."""

import json
from pathlib import Path

import torch

from liger_hw import console
from liger_hw.cli.common import add_command, show
from liger_hw.spelling import check_known, nearest
from liger_lab import terminal
from liger_lab.cases import CASES
from liger_lab.cli import common

SUBJECTS = ("train", "distributed", "losses")  # `liger-hw bench SUBJECT` is a command of its own
ACCELERATOR_OPTIONS = ("longest", "sweep", "snapshot", "memory_limit")  # options of `bench train`
APART = {  # its options that exclude others
    "longest": ("sweep", "snapshot", "offload", "accumulation"), "lora": ("qlora", "kbit", "offload"),
    "qlora": ("offload",), "offload": ("activations", "compile", "optimizer", "accumulation"),
}  # fmt: skip
OPTIMIZERS = {  # of --optimizer -> package
    "adamw8bit": "bitsandbytes", "paged_adamw8bit": "bitsandbytes", "galore": "galore_torch",
}  # fmt: skip
NEEDED = {"lora": ["peft"], "qlora": ["peft", "bitsandbytes"], "offload": ["deepspeed"]}  # its options -> packages


def add(commands) -> None:
    def command(name, function, peers, *texts):
        command = add_command(commands, name, function, *texts)
        command.add_argument("--against", default="", metavar="NAMES", help=f"{peers} (all that are installed)")
        common.add_report(command)
        return command.add_argument

    def dtype(argument):
        argument("--dtype", choices=common.DTYPES, help="fp32 on a CPU, bf16 elsewhere")

    option = command(
        "bench", bench, "liger,compile,torch,eager,cce,quack",
        "measure ops at real models' shapes beside peers and this machine's limits",
        "Time each op forward, backward and both, with a cold L2 and interleaved with its peers, and the host's time "
        "of small calls. Compare with the copy rate and the matrix product rate that it measures here. An op is timed "
        "only after its parity cases pass. It writes bench.json and bench.html. On a CPU, only small shapes run.",
        {"rms_norm --shapes 16384x4096 --modes full": "one op at one shape",
         "cross_entropy --sweep vocab --modes fwd,full": "growing vocabularies",
         "--compare before/bench.json after/bench.json": "the changes between two runs"},
        "one to three seconds for each shape and mode, after the kernels are compiled.",
    )  # fmt: skip
    option("ops", nargs="*", metavar="OP",
           help="ops to measure (all); `bench train`, `bench losses` and `bench distributed` are commands")  # fmt: skip
    option("--shapes", nargs="+", default=[], metavar="TEXT", help="only shapes whose label contains one")
    option("--modes", default="fwd,bwd,full,host", metavar="NAMES", help="some of fwd,bwd,full,host (all)")
    option("--sweep", choices=("vocab", "width", "tokens"), help="draw speed and memory over growing sizes")
    option("--sizes", type=common.positive, nargs="+", default=[], metavar="N",
           help="its sizes (vocabularies of 40960 to 163840, widths of 4096 to 16384, or 1024 to 16384 tokens)",
           )  # fmt: skip
    option("--compare", nargs=2, type=Path, metavar="FILE", help="compare two bench.json files, and measure nothing")
    dtype(option)

    option = command(
        "bench losses", bench_losses, "torch,liger", "measure every loss of a head beside plain torch",
        "Time forward and backward of the losses of language models, from hidden states to gradients, with their peak "
        "memory, beside plain torch and the matrix products that each loss needs. It writes losses.json.",
        {"DPO GRPO": "losses whose name contains one of these", "--against torch": "beside plain torch alone"},
        "a few seconds for each loss and library, after the kernels are compiled.",
    )  # fmt: skip
    option("losses", nargs="*", metavar="TEXT", help="only losses whose name or shape contains one (all)")
    dtype(option)

    option = command(
        "bench train", bench_train,
        "eager,compile,liger; liger_hw: none; unsloth: by name alone, with --lora or --qlora of Llamas",
        "measure training steps of whole models",
        "Time steps of Hugging Face models of published sizes with random weights, plain, compiled and patched, with "
        "their peak memory. With --longest, search the longest sequence that fits. It writes train.json and "
        "train.html, or longest.json.",
        {"llama-1b --batch 8 --seq 1024 4096": "one model at two lengths",
         "llama-1b --longest": "the longest context that fits this GPU",
         "llama-1b --sweep seq --ablate": "growing sequences, and the fused loss alone beside everything",
         "llama-8b --lora --batch 4 --seq 2048 --against eager,liger": "LoRA of rank 16 on one GPU",
         "llama-1b --dtype fp16 --offload --checkpointing on --memory-limit 24GiB --sweep batch "
         "--batch 1 8 16 32 64 112 --seq 1024 --ablate": "growing batches on a card of 24 GB"},
        "minutes for each model and library, most of them to build and compile; --steps sets the timed steps.",
    )  # fmt: skip
    option("models", nargs="*", metavar="MODEL", help="llama-1b, gemma2-2b, ... (all but tiny)")
    option("--batch", type=common.positive, nargs="+", metavar="N", help="sequences in a batch (each model's own)")
    option("--seq", type=common.positive, nargs="+", metavar="N", help="tokens in a sequence (each model's own)")
    option("--checkpointing", choices=("on", "off", "both"), help="of activations (each model's own)")
    option("--compile", choices=("layers", "graphs", "model"),
           help="compile every model after its patch: layer by layer, the same into CUDA graphs, or whole")  # fmt: skip
    option("--activations", metavar="BUDGET",
           help="train the patched model within this memory: 100GiB, a share such as 0.9, or auto")  # fmt: skip
    option("--sweep", choices=("batch", "seq"),
           help="grow the batch or the sequence until memory ends: over several values of --batch or --seq, or doubled "
           "from one (1 and 1024)")  # fmt: skip
    option("--ablate", action="store_true",
           help="also measure liger_hw's fused loss alone, and with torch.compile where that is measured")  # fmt: skip
    for name, what in (("--lora", "LoRA"), ("--qlora", "LoRA on weights in 4 bits (bitsandbytes' nf4)")):
        option(name, type=common.positive, nargs="?", const=16, metavar="RANK",
               help=f"train PEFT's {what}, on every linear layer but the head (rank 16)")  # fmt: skip
    option("--kbit", action="store_true",
           help="with --qlora: peft.prepare_model_for_kbit_training keeps the rest of the model in fp32")  # fmt: skip
    option("--optimizer", choices=OPTIMIZERS,
           help="bitsandbytes' AdamW of 8 bits, its paged one, or GaLore of rank 128 (torch's AdamW)")  # fmt: skip
    option("--accumulation", type=common.positive, metavar="N", help="batches of a step, whose gradients add up (1)")
    option("--offload", nargs="?", const="cpu", metavar="FOLDER",
           help="keep weights and optimizer on the CPU, by DeepSpeed's ZeRO-3, or in a folder of a disk")  # fmt: skip
    option("--memory-limit", metavar="SIZE",
           help="let torch allocate no more than this on the device, as on a smaller card: 24GiB")  # fmt: skip
    option("--snapshot", action="store_true",
           help="write the memory of a step of each library, for docs.pytorch.org/memory_viz, and draw it")  # fmt: skip
    option("--steps", type=common.positive, default=10, metavar="N", help="timed steps of a run (10)")
    option("--longest", action="store_true", help="search the longest sequence that fits the memory, without timing")
    dtype(option)

    option = command(
        "bench distributed", bench_distributed, "eager,liger; of a head alone eager,loss_parallel; liger_hw: none",
        "measure training steps of a sharded model",
        "Time steps of a model sharded over the GPUs of this host by FSDP2 or ZeRO-3, or the loss of a head alone that "
        "is sharded by vocabulary, for growing sequences until memory ends, and check that the libraries' losses "
        "agree. It writes distributed.json and distributed.html.",
        {"--seq 4096 8192": "Llama-8B on all GPUs", "--model llama-1b --gpus 2 --engine zero3": "ZeRO-3 on two GPUs",
         "--loss dpo --seq 2048": "DPO instead of cross entropy",
         "--engine vocabulary --batch 1 --seq 8192": "a head sharded by vocabulary, against gathered logits"},
        "minutes for each length and library; a length ends after 15 seconds of timed steps.",
    )  # fmt: skip
    option("--model", default="llama-8b", metavar="MODEL", help="llama-8b, llama-1b, ... (llama-8b)")
    option("--gpus", type=common.positive, nargs="+", default=[], metavar="N",
           help="GPUs to use (all; 2 processes on a CPU)")  # fmt: skip
    option("--seq", type=common.positive, nargs="+", default=[], metavar="N",
           help="tokens in a sequence (2048 4096 8192 16384 32768, until out of memory)")  # fmt: skip
    option("--engine", choices=("fsdp2", "zero2", "zero3", "vocabulary"), default="fsdp2",
           help="fsdp2, zero2, zero3, or vocabulary: the loss of a head alone, sharded by vocabulary (fsdp2)",
           )  # fmt: skip
    option("--offload", choices=("optimizer", "parameters"),
           help="what the host holds: the optimizer, with zero2 or zero3; parameters, too, with zero3")  # fmt: skip
    option("--loss", choices=("dpo", "grpo"), help="of hidden states, instead of cross entropy of the next token")
    option("--activations", metavar="BUDGET",
           help="train the model that liger_hw patches within this memory: 100GiB, a share such as 0.9, or auto",
           )  # fmt: skip
    option("--batch", type=common.positive, default=8, metavar="N", help="sequences of a process (8)")
    option("--steps", type=common.positive, default=3, metavar="N", help="timed steps of a length (3)")


def _dtype(args, device):
    return common.DTYPES[args.dtype or ("fp32" if device.type == "cpu" else "bf16")]


def _peers(args) -> list[str]:
    return [name for name in args.against.split(",") if name]


def _write_pictures(args, figures) -> list[Path]:
    from liger_lab.bench import charts, formatting

    files = []
    for name, figure in figures:
        files.append(args.report / formatting.file_name(name, "png"))
        files[-1].write_bytes(charts.picture(figure, "png"))
    return files


def bench(args) -> int | None:
    """Measure ops, print the table, write bench.json and bench.html; or compare two results."""
    from liger_lab.bench import formatting

    if args.compare:
        changes = formatting.changes(*map(_read, args.compare))
        show(args, changes, formatting.show_changes(changes))
        return None
    for name in args.ops[:1]:
        if not nearest(name, CASES) and (subject := nearest(name, SUBJECTS, least_share=0.75)):
            raise ValueError(f"unknown op {name!r}; did you mean the command `liger-hw bench {subject}`?")
    console.require("matplotlib", "rich")
    from liger_lab.bench import charts, operations, peers

    device, modes, file = common.here(), args.modes.split(","), args.report / "bench.json"
    for mode in modes:
        check_known("mode", mode, operations.MODES, "Modes, with commas between")
    if args.shapes and args.sweep or args.sizes and not args.sweep:
        raise ValueError("--sweep: allowed with --sizes, which needs it, and without --shapes")
    providers, sweep = peers.choose(_peers(args), device), (args.sweep, args.sizes) if args.sweep else None
    cases = operations.select(args.ops, args.shapes, modes, device, sweep)
    with terminal.progress() as progress:
        benchmark = operations.run(cases, providers, modes, _dtype(args, device), device, progress, file, sweep)
    files = [file, charts.write(benchmark, file.with_suffix(".html"))]
    files += _write_pictures(args, charts.sweep_figures(benchmark) if sweep else ())
    files = ", ".join(map(str, files)) + "\n"
    show(args, benchmark, files, formatting.show(benchmark, formatting.HEADER, formatting.rows(benchmark)))
    if not benchmark["complete"]:
        return 130
    return 1 if any(result["error"] for result in benchmark["parity"].values()) else None


def bench_losses(args) -> int | None:
    """Measure losses, print the table, write losses.json."""
    console.require("rich")
    from liger_lab.bench import formatting, losses

    device, file = common.here(), args.report / "losses.json"
    chosen, providers = losses.select(args.losses, device), losses.choose(_peers(args))
    with terminal.progress() as progress:
        benchmark = losses.run(chosen, providers, _dtype(args, device), device, progress, file)
    show(args, benchmark, f"{file}\n", formatting.show(benchmark, losses.HEADER, losses.rows(benchmark)))
    return None if benchmark["complete"] else 130


def _check_train(args, device) -> None:
    """Raise a ValueError for an option of `bench train` that cannot be met."""
    given = {name for name, value in vars(args).items() if value}
    for name in ACCELERATOR_OPTIONS:
        if name in given and device.type == "cpu":
            raise ValueError(f"--{name.replace('_', '-')}: needs an accelerator, and torch finds none here")
    if "memory_limit" in given and not hasattr(getattr(torch, device.type), "set_per_process_memory_fraction"):
        raise ValueError(f"--memory-limit: got a device of {device.type}, whose memory this torch does not limit")
    for name, others in APART.items():
        for other in others:
            if {name, other} <= given:
                raise ValueError(f"--{name}: got --{other} as well, allowed: one of the two")
    if args.kbit and not args.qlora:
        raise ValueError("--kbit: got no --qlora, allowed: with --qlora")
    llamas = args.models and all(name.startswith("llama") for name in args.models)
    if "unsloth" in _peers(args) and not (llamas and given & {"lora", "qlora"}):
        raise ValueError("--against: got unsloth, allowed: with --lora or --qlora of llama-1b or llama-8b alone")
    for name in given & {"compile", "offload"}:
        if "compile" in _peers(args):
            raise ValueError(f"--against: got compile with --{name}, allowed: one of the two")
    needed = [package for name in NEEDED if name in given for package in NEEDED[name]]
    console.require(*needed, *([OPTIMIZERS[args.optimizer]] if args.optimizer else []))


def bench_train(args) -> int | None:
    """Measure training, print the table, write train.json and train.html."""
    console.require("matplotlib", "rich", "transformers")
    from liger_lab.bench import charts, formatting, training
    from liger_lab.bench.peers import LOSS_ALONE, LOSS_COMPILED

    device = common.here()
    _check_train(args, device)
    providers = training.choose(_peers(args), device)
    if args.compile or args.offload:
        providers = [name for name in providers if name != training.COMPILE]
    if args.ablate:
        providers[-1:-1] = [LOSS_ALONE, *([LOSS_COMPILED] if training.COMPILE in providers else [])]
    checkpointing = {"on": [True], "off": [False], "both": [False, True], None: None}[args.checkpointing]
    runs = training.plan(
        args.models or training.DEFAULT, providers, args.batch, args.seq, checkpointing, args.steps,
        _dtype(args, device), args.longest, args.sweep, activations=args.activations, compiled=args.compile,
        snapshots=str(args.report) if args.snapshot else None, lora=args.lora, qlora=args.qlora, kbit=args.kbit,
        offload=args.offload, optimizer=args.optimizer, accumulation=args.accumulation, limit=args.memory_limit,
    )  # fmt: skip
    file = args.report / ("longest.json" if args.longest else "train.json")
    with terminal.progress() as progress:
        benchmark = training.run(runs, device, progress, file)
    lead = f"Steps of training, random weights and tokens, {args.optimizer or 'fused AdamW'}; every library in its own \
process."
    rows = formatting.training_rows(benchmark)
    files = [file, charts.write_training(benchmark, file.with_suffix(".html"), lead, formatting.TRAINING, rows)]
    files += _write_pictures(args, charts.memory_figures(benchmark))
    files += [args.report / run["snapshot"] for run in benchmark["results"] if "snapshot" in run]
    shown = formatting.show(benchmark, formatting.TRAINING, rows)
    show(args, benchmark, ", ".join(map(str, files)) + "\n", shown)
    return None if benchmark["complete"] else 130


def bench_distributed(args) -> int | None:
    """Measure sharded training, print the table, write distributed.json and distributed.html."""
    console.require("matplotlib", "rich", "transformers")
    from liger_lab.bench import charts, distributed, formatting

    device, file = common.here(), args.report / "distributed.json"
    seqs = args.seq or distributed.SEQS
    groups = distributed.plan(
        args.model, args.gpus, args.engine, _peers(args), args.batch, seqs, args.steps, device, args.loss,
        args.activations, args.offload,
    )  # fmt: skip
    with terminal.progress() as progress:
        benchmark = distributed.run(groups, device, progress, file)
    problems, table = distributed.disagreements(benchmark), (distributed.HEADER, distributed.rows(benchmark))
    html = charts.write_training(benchmark, file.with_suffix(".html"), distributed.LEAD, *table, problems)
    show(args, benchmark, f"{file}, {html}\n", formatting.show(benchmark, *table, *problems))
    if not benchmark["complete"]:
        return 130
    return 1 if problems else None


def _read(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--compare: got {file}, allowed: a bench.json ({error})") from None
