"""Share arguments, model, text, Trainer and speedometer among the examples.

Every example trains with `--provider plain`, `liger_hw` or `liger-kernel`. Its last line is JSON, with the tokens per
second and the peak memory of each GPU. With `--tiny` it takes seconds on a CPU.
"""

import argparse
import ast
import json
import os
import statistics
import time
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)  # fmt: skip

import liger_hw
from liger_hw import integrations
from liger_lab.bench import demo

PLAIN, OURS, PEER = "plain", "liger_hw", "liger-kernel"
TINY = {"batch": 2, "seq": 64, "steps": 4}
TINY_TEXT = 60_000  # characters: enough for a tokenizer of two thousand entries
WARM_UP = 2  # steps that compile and allocate; the meter excludes them


def arguments(description, batch=4, seq=2048, steps=12, shape="1b", **options):
    """Parse the command line, and join the processes of torchrun.

    Args:
        batch, seq, steps, shape: the defaults without --tiny.
        options: names of the example's own options, and their defaults; False makes a flag.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--model", help="folder or name of a pretrained model (default: random weights of --shape)")
    parser.add_argument(
        "--shape", choices=("0.5b", "1b", "8b"), default=shape,
        help=f"sizes of Qwen2.5-0.5B, Llama-3.2-1B or Llama-3-8B ({shape})",
    )  # fmt: skip
    parser.add_argument("--tiny", action="store_true", help="a tiny model, little text, few steps: for a CPU")
    parser.add_argument(
        "--provider", choices=(PLAIN, OURS, PEER), default=OURS, help="library that computes (liger_hw)"
    )
    parser.add_argument("--checkpointing", action="store_true", help="recompute the layers' activations")
    parser.add_argument(
        "--bf16-states",
        action="store_true",
        help="train weights and AdamW's states in bf16 on GPUs, without fp32 copies",
    )
    parser.add_argument("--batch", type=int, help=f"sequences in a batch ({batch})")
    parser.add_argument("--seq", type=int, help=f"tokens in a sequence ({seq})")
    parser.add_argument("--steps", type=int, help=f"optimiser steps ({steps})")
    parser.add_argument("--text", nargs="+", default=[], help="files or folders (the standard library's source)")
    parser.add_argument("--output", default="output", help="folder for checkpoints and logs (./output)")
    parser.add_argument("--json", type=Path, help="file for the result")
    for name, default in options.items():
        kind = {"action": "store_true"} if default is False else {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind, help=f"default: {default}")
    args = parser.parse_args()
    for name, value in (TINY if args.tiny else {"batch": batch, "seq": seq, "steps": steps}).items():
        setattr(args, name, getattr(args, name) or value)
    transformers.set_seed(0)
    if "WORLD_SIZE" in os.environ:
        join_ranks()
    return args


def gpus() -> int:
    """Return the number of processes, each of which has a GPU."""
    return int(os.environ.get("WORLD_SIZE", 1))


def device() -> torch.device:
    return torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")


def join_ranks() -> None:
    """Take an accelerator for this process, and join the others."""
    if device().type != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group(dist.get_default_backend_for_device(device()))


def model_and_tokenizer(args):
    """Load the model of `args` and its tokenizer; a random model gets a new tokenizer."""
    dtype = torch.float32 if device().type == "cpu" else torch.bfloat16
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device())
        return checkpointed(args, model), tokenizer_of(args)
    tokenizer = tokenizer_of(args)
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = demo.MODELS[args.shape].config
    if args.tiny:
        config = demo.llama(64, 128, 2, 4, 2, len(tokenizer))
    with device():
        model = AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**config, **special, max_position_embeddings=4096), dtype=dtype
        )
    return checkpointed(args, model), tokenizer


def checkpointed(args, model):
    if args.checkpointing:
        model.gradient_checkpointing_enable()
    return model


def tokenizer_of(args):
    """Load the model's tokenizer, or train a byte-level BPE on the text."""
    if args.model:
        return AutoTokenizer.from_pretrained(args.model)
    tokenizer = demo.train_tokenizer(text(args))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def text(args) -> list[str]:
    return demo.read_text(args.text, TINY_TEXT if args.tiny else demo.SAMPLE)


def sequences(args, tokenizer) -> list[dict]:
    """Cut the text into rows of `args.seq` tokens, enough for every step."""
    joined = [token for file in text(args) for token in tokenizer(file)["input_ids"]]
    starts = range(0, len(joined) - args.seq, args.seq)
    rows = [{"input_ids": joined[i : i + args.seq], "labels": joined[i : i + args.seq]} for i in starts]
    return [rows[i % len(rows)] for i in range(args.batch * args.steps)]


def functions(args) -> list[tuple[str, str]]:
    """Split the text's Python functions into (head, body): a prompt and a long answer."""
    enough, split = 6 * args.seq, []  # characters; a token of code is three or four
    for source in text(args):
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.body[0].lineno > node.lineno:
                body = node.body[0].lineno - 1
                answer = "".join(lines[body : body + enough])[:enough]
                if len(answer) == enough:
                    split.append(("".join(lines[node.lineno - 1 : body]), answer))
    return split


def preferences(args) -> list[dict]:
    """Make rows of a function's head (prompt), its body (chosen) and another's (rejected)."""
    pairs = functions(args)
    shifted = pairs[1:] + pairs[:1]
    rows = [{"prompt": head, "chosen": body, "rejected": other} for (head, body), (_, other) in zip(pairs, shifted)]
    return [rows[i % len(rows)] for i in range(args.batch * args.steps)]


def provide(args, model, **flags):
    """Patch `model` with the library `args.provider`; plain stays unpatched."""
    if args.provider == OURS:
        print(liger_hw.patch(model, **flags))
    elif args.provider == PEER:
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model, **flags)
    return model


def provide_trl(args, meter, *models):
    """Patch models for TRL; return callbacks and adapters of its trainer."""
    more = {"callbacks": [meter]}
    if args.provider == OURS:
        integrations.accelerate_trl()  # TRL's function of log-probabilities, which it has since 1.15
    adapted = args.lora or getattr(args, "qlora", False)
    if adapted:
        more["peft_config"] = lora_config()
    if adapted and args.provider == OURS:  # patches after TRL has added the adapters
        more["callbacks"].append(integrations.LigerHwCallback())
    else:
        for model in models:
            provide(args, model)
    return more


def lora_config():
    """Return the adapters of --lora and of QLoRA, for all layers but the head."""
    from peft import LoraConfig

    return LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")


def train_ranks(args, example, model, rows, step, replicas):
    """Train on several ranks, on whose sequences `step(input_ids, labels)` returns (loss, gradient norm).

    Args:
        rows: the sequences of all steps; a step takes `args.batch` of them.
        replicas: the ranks whose sequences differ: each takes its share of a batch, the others the same one.
    """
    meter = Meter(args, args.batch * args.seq / dist.get_world_size())
    for i in range(args.steps):
        mine = rows[i * args.batch : (i + 1) * args.batch][dist.get_rank() % replicas :: replicas]
        ids = torch.tensor([row["input_ids"] for row in mine], device=device())
        meter.on_step_begin()
        loss, norm = step(input_ids=ids, labels=ids)
        meter.on_step_end()
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        meter.on_log(None, None, None, {"loss": loss.item() / dist.get_world_size(), "grad_norm": float(norm)})
    return meter.finish(example, model)


def gradient_norm(model) -> torch.Tensor:
    """Return the norm of all gradients, of which a rank may hold parts."""
    norms = [p.grad.norm() for p in model.parameters()]
    return torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()


class Meter(TrainerCallback):
    """Measure time and peak memory of training steps, as a callback of Hugging Face's Trainer.

    Args:
        tokens: of one GPU in a step (a batch's).
    """

    def __init__(self, args, tokens=None):
        self.args, self.tokens = args, tokens or args.batch * args.seq
        self.seconds, self.losses, self.gradient_norms, self.started = [], [], [], 0.0

    def on_step_begin(self, *_, **__):
        if not self.seconds and device().type != "cpu":  # a rank may have built the whole model before it is sharded
            torch.accelerator.reset_peak_memory_stats()
        demo.synchronize(device())
        self.started = time.perf_counter()

    def on_step_end(self, *_, **__):
        demo.synchronize(device())
        self.seconds.append(time.perf_counter() - self.started)

    def on_log(self, arguments, state, control, logs, **_):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.gradient_norms.append(logs["grad_norm"])

    def finish(self, example, model):
        """Print the result as a line of JSON; write it to the file of --json."""
        seconds = statistics.median(self.seconds[WARM_UP:] or self.seconds)
        on_cpu = device().type == "cpu"
        result = {
            "example": example, "model": self.args.model or ("tiny" if self.args.tiny else self.args.shape),
            "parameters": count(model), "provider": self.args.provider, "gpus": gpus(),
            "batch": self.args.batch, "seq": self.args.seq, "steps": len(self.seconds),
            "tokens_per_second": self.tokens / seconds, "losses": self.losses, "gradient_norms": self.gradient_norms,
            "peak_bytes": None if on_cpu else torch.accelerator.max_memory_allocated(device()),
        }  # fmt: skip
        if dist.is_initialized() and not on_cpu:  # tokens of a second are of each GPU, the peak is the highest
            peaks = [0] * gpus()
            dist.all_gather_object(peaks, result["peak_bytes"])
            result["peak_bytes"] = max(peaks)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(json.dumps(result))
            if self.args.json:
                self.args.json.write_text(json.dumps(result))
        return result


def count(model) -> int:
    """Count the parameters.

    DeepSpeed leaves a rank empty ones; bitsandbytes packs two in a byte.
    """
    packed = {p: p.quant_state.shape.numel() for p in model.parameters() if getattr(p, "quant_state", None)}
    return sum(packed.get(p, getattr(p, "ds_numel", p.numel())) for p in model.parameters())


def trainer_arguments(args, **more):
    """Return the arguments that all Hugging Face and TRL configurations share."""
    on_cpu = device().type == "cpu"
    return {
        "output_dir": args.output, "max_steps": args.steps, "per_device_train_batch_size": args.batch,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "optim": "adamw_torch_fused", "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "bf16": not (on_cpu or args.bf16_states), "use_cpu": on_cpu,
        "disable_tqdm": True, "seed": 0, "gradient_checkpointing": False, "fsdp": gpus() > 1,
        "fsdp_config": {"version": 2},
    } | more  # fmt: skip


class Sharded(Trainer):
    """Shard the model over ranks by FSDP2, on CPUs too."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if gpus() > 1:
            shard_on_cpus(self.accelerator.state, **self.args.fsdp_plugin_args)
            self.is_fsdp_enabled = True


def shard_on_cpus(state, **options) -> None:
    """Make accelerate shard on CPUs, where it would replicate."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin

    if device().type == "cpu":
        plugin = FullyShardedDataParallelPlugin(**options)
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin


def train(args, example, model, rows, collate=default_data_collator, tokens=None):
    """Train by Hugging Face's Trainer, with FSDP2 on several GPUs."""
    meter = Meter(args, tokens)
    settings = TrainingArguments(**trainer_arguments(args), remove_unused_columns=False)
    Sharded(model, settings, train_dataset=rows, data_collator=collate, callbacks=[meter]).train()
    return meter.finish(example, model)
