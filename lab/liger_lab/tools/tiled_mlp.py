"""Measure a gated MLP whole, checkpointed and in recomputed pieces of the sequence.

    python -m liger_lab.tools.tiled_mlp --report lab/results/tiled-mlp-h200  # writes .json and .md; on an accelerator
    python -m liger_lab.tools.tiled_mlp --hidden 256 --intermediate 704 --tokens 2048 4096

"plain" is Hugging Face's LlamaMLP, "whole" this library's without a recomputation. Time is that of a forward and a
backward, interleaved, the median. Memory is the peak that both allocate, with the result and the gradients.
"""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from liger_hw import console
from liger_hw.transformers import LigerSwiGLUMLP, LigerTiledSwiGLUMLP
from liger_lab.bench import measure, memory, run_file

MIB = 2**20


def modules(config):
    """Return name -> module, all with the same weights."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    whole = LigerSwiGLUMLP(config)
    variants = {"plain": LlamaMLP(config), "whole": whole, "pieces": LigerTiledSwiGLUMLP(config)}
    if torch.accelerator.is_available() and find_spec("liger_kernel"):
        from liger_kernel.transformers import LigerTiledSwiGLUMLP as Peers

        variants["liger-kernel's pieces"] = Peers(config)
    for module in variants.values():
        module.load_state_dict(whole.state_dict())
    return variants


def steps_of(variants, x, dy):
    """Return name -> function that runs a forward and a backward."""

    def step(module, checkpointed=False):
        y = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
        y.backward(dy)  # not torch.autograd.grad: the peer's pieces write the gradients of weights themselves
        for tensor in (x, *module.parameters()):
            tensor.grad = None

    steps = {name: lambda module=module: step(module) for name, module in variants.items()}
    return steps | {"whole, checkpointed": lambda: step(variants["whole"], True)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--report", type=Path, help="path of the two files, without suffix")
    arguments = parser.parse_args()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")
    config = SimpleNamespace(
        hidden_size=arguments.hidden, intermediate_size=arguments.intermediate, hidden_act="silu", mlp_bias=False
    )
    torch.manual_seed(0)
    variants = {name: module.to(device, torch.bfloat16) for name, module in modules(config).items()}
    clock, rows = measure.Clock(device), []
    for tokens in arguments.tokens:
        x, dy = (torch.randn(1, tokens, arguments.hidden, device=device).bfloat16() for _ in range(2))
        steps = steps_of(variants, x.requires_grad_(), dy)
        times = clock.interleave(steps, seconds=2.0)
        rows += [
            {"tokens": tokens, "kind": name, "ms": times[name]["median"] * 1e3, "bytes": memory.peak(step, device)}
            for name, step in steps.items()
        ]
        print(f"{tokens} tokens measured", flush=True)
    about = run_file.environment(device) | {"command": f"python {' '.join(sys.argv)}", "dtype": "bfloat16"}
    about |= {key: getattr(arguments, key) for key in ("hidden", "intermediate")}
    cells = [(f"{r['tokens']:,}", r["kind"], f"{r['ms']:.2f} ms", f"{r['bytes'] / MIB:,.0f} MiB") for r in rows]
    header = "tokens", "MLP", "forward and backward", "peak memory"
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.with_suffix(".json").write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
        lines = [" | ".join(line) for line in (header, ["---"] * len(header), *cells)]
        arguments.report.with_suffix(".md").write_text("".join(f"| {line} |\n" for line in lines))
    print(console.table(header, cells))


if __name__ == "__main__":
    main()
