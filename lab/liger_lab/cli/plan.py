"""Predict memory and communication of training on several GPUs: `liger-hw plan`."""

import json
from pathlib import Path

from liger_hw.checks import check
from liger_hw.cli.common import add_command, show
from liger_lab.cli import common


def add(commands) -> None:
    command = add_command(
        commands, "plan", plan, "predict memory and communication of training on several GPUs",
        "Compute a training step's memory on each GPU by part, whether it fits, the longest sequence that fits, and "
        "the time of the loss layer and of communication, by the formulas of liger_lab/bench/plan.py. It needs no GPU. "
        "docs/distributed.md compares predictions with measurements.",
        {"--model llama-70b --gpus 64 --gpu-memory 139.8 --seq 8192 --checkpointing": "FSDP2 on 8 nodes",
         "--model ./my-model --gpus 8 --parallel zero3 --gpu-memory 79 --print deepspeed": "DeepSpeed's JSON"},
        "about ten seconds, most of them to import torch.",
    )  # fmt: skip
    option = command.add_argument
    option("--model", metavar="MODEL",
           help="llama-1b, -3b, -8b, -70b, -405b, qwen2.5-0.5b, -7b, qwen3-4b, mistral-7b, mixtral-8x7b, "
           "qwen3-30b-a3b; llama, mistral, qwen2, qwen3, mixtral or qwen3_moe in transformers' default configuration; "
           "or a config.json of these types")  # fmt: skip
    option("--gpus", type=lambda word: word if word == "auto" else common.positive(word), default=1, metavar="N",
           help="GPUs of all nodes, 1 to 4096; auto: the least power of two that fits (1)")  # fmt: skip
    option("--gpus-per-node", type=common.positive, default=8, metavar="N", help="GPUs of a node (8)")
    option("--parallel", default="fsdp2", metavar="PLAN",
           help="fsdp2, zero2, zero3, ddp, or tp:N: tensor parallelism of N GPUs, FSDP2 beyond (fsdp2)")  # fmt: skip
    option("--gpu-memory", type=float, metavar="GIB", help="memory of one GPU (the first GPU's here)")
    option("--seq", type=common.positive, default=4096, metavar="N", help="tokens of a sequence (4096)")
    option("--batch", type=common.positive, default=1, metavar="N",
           help="sequences on one GPU; with tp:N, of N GPUs together (1)")  # fmt: skip
    option("--checkpointing", action="store_true", help="recompute every layer's activations in the backward")
    option("--no-checkpointing", dest="checkpointing", action="store_false", help="keep them (the default)")
    option("--dtype", metavar="POLICY", help="mixed: fp32 parameters, gradients and states, bf16 layers; bf16: all in "
           "bf16 (mixed; bf16 with ddp)")  # fmt: skip
    option("--optimizer", default="adamw", metavar="NAME",
           help="adamw; with ddp also adamw8bit, bitsandbytes' states of 8 bits, or galore, of rank 128")  # fmt: skip
    option("--offload", metavar="WHAT", help="what the host holds: optimizer, with zero2 or zero3; parameters, with "
           "zero3, and the optimizer")  # fmt: skip
    option("--recipe", action="store_true",
           help="show the steps that save memory, and the first that fits these GPUs, batch and sequence")  # fmt: skip
    option("--provider", default="liger_hw", metavar="NAME",
           help="liger_hw: patched, with its fused loss; eager: plain, with all logits (liger_hw)")  # fmt: skip
    option("--nvlink", type=float, default=450, metavar="GB/S", help="rate of a GPU to others of its node (450)")
    option("--network", type=float, default=50, metavar="GB/S", help="rate of a GPU's network card (50)")
    option("--tflops", type=float, default=783, metavar="N", help="rate of bf16 matrix products (783, of an H200)")
    option("--against", nargs="+", type=Path, metavar="FILE",
           help="only compare with measured memory: results of `bench train` and `bench distributed`")  # fmt: skip
    option("--print", dest="launcher", metavar="LAUNCHER",
           help="print only the configuration for accelerate or deepspeed, or the command of torchrun")  # fmt: skip


def plan(args) -> int | None:
    """Print the prediction, or a launcher's configuration.

    Returns 1 if the run does not fit.
    """
    from liger_lab.bench import plan as model

    if args.against:
        compared = model.against([record for file in args.against for record in _results(file)])
        show(args, compared, model.show_against(compared))
        return None
    if args.model is None:
        raise ValueError(f"--model: got none, allowed: {', '.join(model.MODELS)}, or the path of a config.json")
    parts = args.parallel.partition(":")[2]  # a group of tensor parallelism needs all its GPUs
    fewest = int(parts) if parts.isdecimal() and int(parts) else 1
    counts = [fewest * 2**i for i in range((4096 // fewest).bit_length())] if args.gpus == "auto" else [args.gpus]
    settings = args.gpus_per_node, args.parallel, args.provider, args.batch, args.seq, args.checkpointing, args.dtype
    runs = [model.make_run(args.model, gpus, *settings, args.optimizer, args.offload) for gpus in counts]
    if args.launcher:
        check(args.gpus != "auto", "--gpus", "auto with --print", "a positive integer")
        text = model.launch(runs[0], args.launcher)
        show(args, {"launcher": args.launcher, "text": text}, text)
        return None
    memory = args.gpu_memory * model.GIB if args.gpu_memory is not None else model.detected_memory()
    if memory is None:
        raise ValueError("--gpu-memory: got none, and torch finds no GPU here, allowed: the GiB of one GPU, such as 80")
    if args.recipe:
        check(args.gpus != "auto", "--gpus", "auto with --recipe", "a positive integer")
        rows = model.recipe(args.model, args.gpus, args.gpus_per_node, args.batch, args.seq, memory)
        show(args, rows, model.show_recipe(rows))
        return None if any(row["fits"] for row in rows) else 1
    for run in runs:
        planned = model.report(run, memory, args.nvlink, args.network, args.tflops)
        if planned["fits"]:
            break
    show(args, planned, model.show(planned))
    return None if planned["fits"] else 1


def _results(file: Path) -> list[dict]:
    try:
        return json.loads(file.read_text())["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = "results of `bench train` or `bench distributed`"
        raise ValueError(f"--against: got {file}, allowed: {allowed} ({error!r})") from None
