"""Measure one mixture of experts, with and without LoRA, beside other libraries.

    python -m liger_lab.tools.expert_steps run lab/results/experts-h200.json [--tiny] [NAME ...]
    python -m liger_lab.tools.expert_steps table lab/results/experts-h200.json

The experts of Qwen3-30B-A3B are one module of transformers in bf16, with PEFT's LoRA of rank 16 on both of its
parameters (`target_parameters`) or trained whole. Each library changes it in a process of its own. "unsloth" (torch's
grouped products, its choice on an H200) and "unsloth, its Triton kernels" replace classes of transformers and PEFT, so
they are named: they run in an environment of their own, and add to the file of the others. "full" is forward and
backward, with a gradient of the tokens. Errors are distances of the result from the op's reference in fp32, relative to
its norm.
"""

import json
import multiprocessing
import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

import liger_hw
from liger_lab.bench import memory
from liger_lab.bench.formatting import number
from liger_lab.bench.measure import Clock
from liger_lab.bench.run_file import environment, write
from liger_lab.cases.experts import MIXTURES, Mixture
from liger_lab.tools.readme import insert, markdown

PAGE = Path(__file__).resolve().parents[3] / "docs" / "adapters_and_trainers.md"
REAL, TOKENS = MIXTURES[0], 8192
TINY, TINY_TOKENS = Mixture("tiny", 4, 2, 64, 32), 48
RANK, SCALING = 16, 0.5
WEIGHTS = {"gate_up_proj": "gate_up_lora", "down_proj": "down_lora"}
SECONDS = 1.5  # the aim for all rounds of one measurement


class ExpertLayer(torch.nn.Module):
    """Hold the experts, as a model does."""

    def __init__(self, mixture, dtype):
        from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

        super().__init__()
        config = qwen.Qwen3MoeConfig(
            hidden_size=mixture.hidden, moe_intermediate_size=mixture.intermediate, num_experts=mixture.experts,
            num_experts_per_tok=mixture.per_token,
        )  # fmt: skip
        config._experts_implementation = "grouped_mm"
        self.experts = qwen.Qwen3MoeExperts(config).to(dtype)
        for weight in self.experts.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[2] ** -0.5)

    def forward(self, *inputs):
        return self.experts(*inputs)


def build(mixture, has_lora, device):
    """Return the layer; with LoRA, with frozen weights and factors in fp32, as PEFT's."""
    import peft

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    with device:
        layer = ExpertLayer(mixture, dtype)
    if has_lora:
        config = peft.LoraConfig(
            r=RANK, lora_alpha=SCALING * RANK, target_modules=[], init_lora_weights=False,
            target_parameters=[f"experts.{name}" for name in WEIGHTS],
        )  # fmt: skip
        peft.inject_adapter_in_model(config, layer)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_("lora" in name)
            if "lora" in name:
                parameter.data = parameter.data.float()
    return layer


def inputs_of(mixture, tokens, layer):
    """Return tokens, their experts and routing weights."""
    weight = next(layer.parameters())
    device, dtype = weight.device, torch.float32 if weight.device.type == "cpu" else torch.bfloat16
    x = torch.randn(tokens, mixture.hidden, device=device, dtype=dtype).requires_grad_()
    scores, index = torch.randn(tokens, mixture.experts, device=device).softmax(-1).topk(mixture.per_token)
    return x, index, (scores / scores.sum(-1, keepdim=True)).to(dtype)


def use_liger(layer):
    from liger_kernel.ops import LigerFusedMoEFunction

    experts = next(module for module in layer.modules() if type(module).__name__ == "Qwen3MoeExperts")
    experts.forward = lambda x, *routing: LigerFusedMoEFunction.apply(
        x, experts.gate_up_proj, experts.down_proj, *routing
    )


def use_unsloth(layer, backend="grouped_mm"):
    os.environ["UNSLOTH_MOE_BACKEND"] = backend
    if backend == "unsloth_triton":
        import_module("unsloth")
    import_module("unsloth_zoo.temporary_patches.qwen3_moe").patch_qwen3_moe()
    chosen = import_module("unsloth_zoo.temporary_patches.moe_utils").select_moe_backend()
    if chosen != backend:
        raise RuntimeError(f"unsloth chooses {chosen} instead of {backend}")


PROVIDERS = {
    "transformers": lambda layer: None, "liger_hw": liger_hw.patch, "liger-kernel": use_liger,
    "unsloth": use_unsloth, "unsloth, its Triton kernels": partial(use_unsloth, backend="unsloth_triton"),
}  # fmt: skip


def expected(layer, inputs):
    """Return the result of the op's reference in fp32."""
    stored = {name: p.detach().float() for name, p in layer.named_parameters()}
    weights = {w: next(p for name, p in stored.items() if name.endswith(w)) for w in WEIGHTS}
    lora, count = {}, len(weights["down_proj"])
    for wrapper in layer.modules():
        if hasattr(wrapper, "parameter_name"):
            a, b = (getattr(wrapper, part)["default"].weight.detach().float() for part in ("lora_A", "lora_B"))
            factors = a.view(count, RANK, -1), b.view(len(b), RANK, count).permute(2, 0, 1)
            lora[WEIGHTS[wrapper.parameter_name]] = factors
    x, index, routing = (t.detach() if t.dtype == torch.int64 else t.detach().float() for t in inputs)
    return liger_hw.experts.reference(x, *weights.values(), index, routing, **lora, lora_scale=SCALING)


def step(layer, inputs):
    """Make a forward and a backward; leave no gradient."""
    y = layer(*inputs)
    y.backward(y.detach())
    layer.zero_grad(set_to_none=True)
    inputs[0].grad = None
    return y


def measure(provider, mixture, tokens, answers):
    """Send the records of one library through the connection `answers`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")
    records = []
    for has_lora in (False, True):
        record = {"provider": provider, "lora": has_lora}
        try:
            layer = build(mixture, has_lora, device)
            inputs = inputs_of(mixture, tokens, layer)
            exact = expected(layer, inputs)
            PROVIDERS[provider](layer)
            calls = {"forward": torch.no_grad()(partial(layer, *inputs)), "full": partial(step, layer, inputs)}
            record["error_of_result"] = ((calls["forward"]().float() - exact).norm() / exact.norm()).item()
            del exact
            calls["full"]()
            record["peak_bytes"] = memory.peak(calls["full"], device)
            for mode, call in calls.items():
                times = Clock(device).interleave({mode: call}, 0 if device.type == "cpu" else SECONDS)[mode]
                record[mode] = times | {key: times[key] * 1e3 for key in ("median", "p20", "p80")}
            del layer, inputs, calls, call
        except Exception as error:  # a library may fail in any way; the others still run
            record["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        records.append(record)
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    answers.send((environment(device), records))


def run(file: Path, names, is_tiny) -> None:
    """Measure libraries, each in a process of its own; write or extend the file."""
    mixture, tokens = (TINY, TINY_TOKENS) if is_tiny else (REAL, TOKENS)
    measured = json.loads(file.read_text()) if file.exists() else None
    context = multiprocessing.get_context("spawn")
    for provider in names or [name for name in PROVIDERS if not name.startswith("unsloth")]:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(provider, mixture, tokens, sender))
        process.start()
        sender.close()
        try:
            described, records = receiver.recv()
        except EOFError:
            process.join()
            described, records = None, [{"provider": provider, "error": f"its process ended with {process.exitcode}"}]
        process.join()
        measured = measured or described | {"sizes": vars(mixture) | {"tokens": tokens}, "results": []}
        measured["command"] = "python -m liger_lab.tools.expert_steps run ..."
        for package, version in (described or measured)["versions"].items():
            measured["versions"][package] = measured["versions"][package] or version
        measured["results"] = [r for r in measured["results"] if r["provider"] != provider] + records
        write(measured, file)


HEADER = ["experts", "library", "forward", "forward and backward", "memory of a step", "error of the result"]


def table(measured: dict) -> str:
    """Return the table of a measured file."""
    lines = []
    for has_lora in (False, True):
        for r in (r for r in measured["results"] if r.get("lora", has_lora) == has_lora):
            row = ["LoRA of rank 16" if has_lora else "trained whole", r["provider"]]
            if "error" in r:
                lines.append([*row, f"fails: {r['error']}", "", "", ""])
                continue
            times = [f"{number(r[mode]['median'])} ms" for mode in ("forward", "full")]
            lines.append([*row, *times, f"{r['peak_bytes'] / 2**30:.2f} GiB", f"{r['error_of_result']:.1e}"])
    sizes, versions = measured["sizes"], measured["versions"]
    packages = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
    lead = (
        f"{measured['device']['name']}, {measured['date']}. {packages}. {sizes['tokens']:,} tokens, "
        f"{sizes['hidden']:,} features, {sizes['experts']} experts of {sizes['intermediate']}, "
        f"{sizes['per_token']} a token."
    )
    return f"{lead}\n\n{markdown(HEADER, lines)}"


def main(arguments) -> None:
    command, file, *names = [a for a in arguments if a != "--tiny"] + ["", ""]
    if command == "run" and file:
        return run(Path(file), [name for name in names if name], "--tiny" in arguments)
    if command == "table" and file:
        return insert(PAGE, table(json.loads(Path(file).read_text())), "liger_lab.tools.expert_steps")
    raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
