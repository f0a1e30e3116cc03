"""Steps of training: Hugging Face models of published shapes with random weights, as they are and under each library.

Every run is a process of its own, so that none inherits another's memory, compiled code or patches. It prints its
result as the last line of its output.
"""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from liger_hw import demo
from liger_hw.bench import tables
from liger_hw.bench.measure import spread
from liger_hw.bench.operations import about, write
from liger_hw.bench.peers import OURS

EAGER, COMPILE, LIGER = "eager", "compile", "liger"
PROVIDERS = (EAGER, COMPILE, LIGER, OURS)
WARM_UP = 4
POSITIONS = 2**22  # the longest context that is ever tried


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model as it is trained here. `seqs`: tokens of a sequence, each measured by itself."""

    model: demo.Model
    seqs: tuple[int, ...]


def _model(family, *sizes, batch=8, **more):
    return demo.Model(demo.llama(*sizes, **more), batch, 1024, 10, 1e-4, family=family)


SETTINGS = {
    "llama-1b": Setting(demo.MODELS["1b"], (1024, 4096)),
    "llama-8b": Setting(demo.MODELS["8b"], (4096,)),
    "gemma2-2b": Setting(
        _model("gemma2", 2304, 9216, 26, 8, 4, 256000, batch=4, head_dim=256, tie_word_embeddings=True), (2048,)
    ),
    "qwen2.5-0.5b": Setting(_model("qwen2", 896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True), (2048,)),
    "moe": Setting(  # Mixtral's parts at a quarter of its width
        _model("mixtral", 1024, 3584, 16, 16, 4, 32000, num_local_experts=8, num_experts_per_tok=2), (2048,)
    ),
    "tiny": Setting(demo.MODELS["tiny"], (256,)),
}
DEFAULT = tuple(name for name in SETTINGS if name != "tiny")


def choose(names, device) -> list[str]:
    """The runs to compare, ours last.

    Raises:
        ValueError: one is unknown, not installed, or needs an accelerator that is not here.
    """
    allowed = PROVIDERS[:-1]
    for name in names:
        if name not in allowed:
            raise ValueError(f"--against: got {name}, allowed: {', '.join(allowed)}")
        if name == LIGER and (device.type == "cpu" or find_spec("liger_kernel") is None):
            raise ValueError("--against: got liger, which needs an accelerator and pip install liger-kernel")
    if not names:
        names = [EAGER] if device.type == "cpu" else [EAGER, COMPILE, *([LIGER] if find_spec("liger_kernel") else [])]
    return [*dict.fromkeys(names), OURS]


def plan(models, providers, batch, seqs, checkpointing, steps, dtype, longest) -> list[dict]:
    """The runs, each as what its process is told.

    Args:
        models: names of SETTINGS.
        batch, seqs: instead of the models' own, or None.
        checkpointing: a list of booleans, or None for each model's own.
        steps: timed steps of a run.
        dtype: of parameters and computation.
        longest: search the longest sequence of a batch of one that fits the memory, instead of timing.

    Raises:
        ValueError: a model is unknown.
    """
    unknown = [name for name in models if name not in SETTINGS]
    if unknown:
        raise ValueError(f"MODELS: got {', '.join(unknown)}, allowed: {', '.join(SETTINGS)}")
    runs = []
    for name in models:
        setting = SETTINGS[name]
        for checkpointed in checkpointing or [setting.model.checkpointing]:
            for seq in [None] if longest else seqs or setting.seqs:  # None: the longest that fits
                for provider in providers:
                    runs.append({
                        "model": name, "batch": 1 if longest else batch or setting.model.batch, "seq": seq,
                        "checkpointing": checkpointed, "provider": provider, "steps": steps,
                        "dtype": str(dtype).removeprefix("torch."),
                    })  # fmt: skip
    return runs


def run(runs, device, progress, file: Path) -> dict:
    """Make every run of a `plan`; the results, which are also written to `file` after each."""
    found = about(device) | {"results": [], "complete": False}
    bar = progress.add_task("training", total=len(runs), note="")
    try:
        for asked in runs:
            progress.update(bar, note=f"{tables.setting(asked)}, {asked['provider']}")
            found["results"].append(asked | _in_a_process(asked))
            write(found, file)
            progress.advance(bar)
        found["complete"] = True
    except KeyboardInterrupt:
        pass
    write(found, file)
    return found


def _in_a_process(asked) -> dict:
    environment = dict(os.environ)
    if asked["seq"] is None:  # or holes between segments end the search early
        environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    command = [sys.executable, "-m", "liger_hw.bench.training", json.dumps(asked)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


# in that process -----------------------------------------------------------------------------------------------------


def main(asked: dict) -> dict:
    """One run: its steps' times and their peak memory, or its longest sequence."""
    kind = torch.accelerator.current_accelerator()
    device = torch.device(kind.type, 0) if kind else torch.device("cpu")
    names = {EAGER: demo.PLAIN, COMPILE: demo.PLAIN, LIGER: demo.PEER, OURS: demo.PATCHED}
    shape = dataclasses.replace(SETTINGS[asked["model"]].model, checkpointing=asked["checkpointing"])
    positions = asked["seq"] or POSITIONS
    made = demo.build(names[asked["provider"]], shape, positions, getattr(torch, asked["dtype"]), device)
    if asked["provider"] == COMPILE:
        made.model.compile()
    with demo.active(made):
        if asked["seq"] is None:
            return {"longest": _longest(made, device)}
        batch = _tokens(made, asked["batch"], asked["seq"], device)
        try:
            return _timed(made, batch, asked["steps"])
        except torch.OutOfMemoryError:
            return {"error": "out of memory"}


def _tokens(made, batch, seq, device):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(made.model.config.vocab_size, (batch, seq), generator=generator).to(device)


def _timed(made, batch, steps) -> dict:
    device = batch.device
    for _ in range(WARM_UP):
        made.step(batch)
    seconds = []
    for _ in range(steps):
        demo.synchronize(device)
        start = time.perf_counter()
        loss = made.step(batch)
        demo.synchronize(device)
        seconds.append(time.perf_counter() - start)
    found = spread(seconds)
    return {
        "tokens_per_second": batch.numel() / found["median"],
        **{key: value * 1e3 if key != "rounds" else value for key, value in found.items()},
        "peak_bytes": demo.step_bytes(made, batch),
        "loss": float(loss),
    }


def _longest(made, device) -> int:
    """Tokens of the longest sequence of which two steps fit, to within a sixteenth; 0 if not even 1,024 fit."""

    def fits(seq) -> bool:
        try:
            for _ in range(2):  # the second has the optimiser's state beside it
                made.step(_tokens(made, 1, seq, device))
            demo.synchronize(device)
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            made.optimizer.zero_grad()
            gc.collect()
            torch.accelerator.empty_cache()

    good, bad, seq = 0, None, 1024
    while seq <= POSITIONS:
        if fits(seq):
            good = seq
        else:
            bad = seq
        if bad is None:
            seq *= 2
        elif bad - good > max(1024, good // 16):
            seq = (good + bad) // 2 // 1024 * 1024
        else:
            break
    return good


if __name__ == "__main__":
    import transformers

    transformers.logging.set_verbosity_error()
    print(json.dumps(main(json.loads(sys.argv[1]))))
