"""Measure training steps of Hugging Face models of published sizes, unpatched and under each library.

Every setting runs in its own process, so that none inherits another's memory or compiled code. The process builds one
model with random weights and trains it unpatched, compiled, patched by liger_hw and, last because nothing undoes it,
patched by the peer.
"""

import dataclasses
import gc
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch

import liger_hw
from liger_hw.checkpointing.budget import BudgetTooSmall, bytes_of
from liger_hw.patching.flags import FLAGS
from liger_hw.spelling import check_known
from liger_lab.bench import demo, formatting, snapshots
from liger_lab.bench.measure import spread
from liger_lab.bench.peers import LOSS_ALONE, OURS
from liger_lab.bench.run_file import environment, saved_at_end, write

EAGER, COMPILE, LIGER = "eager", "compile", "liger"
PEERS = (EAGER, COMPILE, LIGER)
ORDER = (EAGER, COMPILE, LOSS_ALONE, OURS, LIGER)  # the peer is last because nothing undoes its changes to the model
SWEEPS = {"batch": (1, 2**10), "seq": (1024, 2**20)}  # what is doubled -> its first and last value
WARM_UP = 3
PLANNING = 5  # steps in which `liger_hw.activations` measures, plans and checks
POSITIONS = 2**22  # the longest context that the search tries
IMAGE_SIDE = 32  # patches of 14 pixels: an image of 448x448


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model with the sequences it trains on.

    Attributes:
        model: its sizes.
        seqs: lengths of sequences, each a measurement.
        images: every sequence begins with an image of 448x448 pixels.
    """

    model: demo.Model
    seqs: tuple[int, ...]
    images: bool = False


def _family(family, *sizes, batch=4, seqs=(2048,), **more):
    """Make the `Setting` of a text model from the arguments of `demo.llama`."""
    return Setting(demo.Model(demo.llama(*sizes, **more), batch, seqs[0], 10, 1e-4, family=family), seqs)


TIED = {"tie_word_embeddings": True}
QWEN2_5_VL = {
    "text_config": demo.llama(
        2048, 11008, 36, 16, 2, 151936, rope_parameters={
            "rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]
        },
    ),
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 2048,
    },
}  # fmt: skip
SETTINGS = {
    "llama-1b": Setting(demo.MODELS["1b"], (1024, 4096)),
    "llama-8b": Setting(demo.MODELS["8b"], (4096,)),
    "qwen2.5-0.5b": _family("qwen2", 896, 4864, 24, 14, 2, 151936, batch=8, **TIED),
    "qwen3-4b": _family("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, **TIED),
    "gemma2-2b": _family("gemma2", 2304, 9216, 26, 8, 4, 256000, head_dim=256, **TIED),
    "gemma3-4b": _family(  # its language model
        "gemma3_text", 2560, 10240, 34, 8, 4, 262208, head_dim=256, sliding_window=1024, **TIED
    ),
    "mistral-7b": _family("mistral", 4096, 14336, 32, 32, 8, 32768, sliding_window=None),
    "mixtral-small": _family(  # Mixtral's parts at a quarter of its width and half its depth
        "mixtral", 1024, 3584, 16, 16, 4, 32000, batch=8, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3-moe-small": _family(  # Qwen3-30B-A3B's parts at half its width and a quarter of its depth and experts
        "qwen3_moe", 1024, 3072, 12, 16, 4, 151936, head_dim=128, moe_intermediate_size=768, num_local_experts=32,
        num_experts_per_tok=8,
    ),
    "phi3-mini": _family("phi3", 3072, 8192, 32, 32, 32, 32064),
    "olmo2-1b": _family("olmo2", 2048, 8192, 16, 16, 16, 100352),
    "granite-2b": _family(
        "granite", 2048, 8192, 40, 32, 8, 49155, embedding_multiplier=12.0, attention_multiplier=1 / 64,
        residual_multiplier=0.22, logits_scaling=8.0, **TIED,
    ),
    "qwen2.5-vl-3b": Setting(demo.Model(QWEN2_5_VL | TIED, 4, 2048, 10, 1e-4, family="qwen2_5_vl"), (2048,), True),
    "tiny": Setting(demo.MODELS["tiny"], (256,)),
}  # fmt: skip
DEFAULT = tuple(name for name in SETTINGS if name != "tiny")


def choose(names, device) -> list[str]:
    """Return the providers to compare, ours last.

    Raises:
        ValueError: a provider is unknown, not installed, or needs an accelerator.
    """
    for name in names:
        check_known("peer", name, PEERS)
        if name == LIGER and (device.type == "cpu" or find_spec("liger_kernel") is None):
            raise ValueError("--against: got liger, which needs an accelerator and pip install liger-kernel")
    if not names:
        names = [EAGER] if device.type == "cpu" else [EAGER, COMPILE, *([LIGER] if find_spec("liger_kernel") else [])]
    return [*dict.fromkeys(names), OURS]


def plan(
    models, providers, batch, seqs, checkpointing, steps, dtype, longest=False, activations=None, sweep=None,
    snapshots=None, compiled=None,
) -> list[dict]:  # fmt: skip
    """List the runs: one dictionary of plain data for each.

    Args:
        models: names of SETTINGS.
        batch, seqs: sizes, or None for each model's own.
        checkpointing: a list of booleans, or None for each model's own.
        steps: timed steps of a run.
        dtype: dtype of parameters and computation.
        longest: search the longest sequence that fits the memory with a batch of one, instead of timing.
        activations: budget of `liger_hw.activations` for the model that liger_hw patches, or None.
        sweep: "batch" or "seq", which doubles from `batch`, or the first of `seqs`, until no step fits the memory.
        snapshots: folder for the memory of a step of each run, or None.
        compiled: what torch.compile gets after a provider's patch: "model", "layers" (each for itself), or None.

    Raises:
        ValueError: a model is unknown, or the budget.
    """
    bytes_of(activations or "auto", None)
    for name in models:
        check_known("model", name, SETTINGS)
    runs = []
    for name in models:
        setting = SETTINGS[name]
        for checkpointed in checkpointing or [setting.model.checkpointing]:
            for size, seq in _sizes(setting, batch, seqs, longest, sweep):
                for provider in providers:
                    asked = {"activations": activations, "sweep": sweep, "snapshots": snapshots and str(snapshots),
                             "compiled": compiled}  # fmt: skip
                    runs.append({
                        "model": name, "batch": size, "seq": seq, "checkpointing": checkpointed, "provider": provider,
                        "steps": steps, "dtype": str(dtype).removeprefix("torch."),
                    } | {key: value for key, value in asked.items() if value})  # fmt: skip
    return runs


def _sizes(setting, batch, seqs, longest, sweep) -> list[tuple]:
    """List (batch, sequence length or None for the longest that fits)."""
    model_batch = batch or setting.model.batch
    if longest:
        return [(1, None)]
    if not sweep:
        return [(model_batch, seq) for seq in seqs or setting.seqs]
    first, last = SWEEPS[sweep]
    value, values = (batch if sweep == "batch" else seqs and seqs[0]) or first, []
    while value <= last:
        values.append(value)
        value *= 2
    if sweep == "batch":
        return [(value, (seqs or setting.seqs)[0]) for value in values]
    return [(model_batch, value) for value in values]


def run(runs, device, progress, file: Path) -> dict:
    """Make every run of a `plan`; write the results to `file` after each."""
    benchmark = environment(device) | {"results": [], "complete": False}
    bar = progress.add_task("training", total=len(runs), note="")
    exhausted = set()  # what failed in a sweep, usually for memory, and would again at the next size
    with saved_at_end(benchmark, file):
        for _, group in itertools.groupby(runs, key=lambda planned: planned | {"provider": ""}):
            same_size = list(group)
            group = [planned for planned in same_size if _line_of(planned) not in exhausted]
            progress.update(bar, advance=len(same_size) - len(group))
            if not group:
                continue
            group = sorted(group, key=lambda planned: ORDER.index(planned["provider"]))
            progress.update(bar, note=formatting.setting(group[0]))
            for result, planned in zip(_in_a_process(group), group):
                benchmark["results"].append(planned | result)
                if "sweep" in planned and "error" in result:
                    exhausted.add(_line_of(planned))
                write(benchmark, file)
                progress.update(bar, advance=1, note=f"{formatting.setting(planned)}, {planned['provider']}")
    return benchmark


def _line_of(planned) -> tuple:
    """Return what a line of a sweep's picture has in common."""
    return tuple(planned[name] for name in ("model", "checkpointing", "provider"))


def _in_a_process(group: list[dict]) -> Iterator[dict]:
    """Yield the results of runs that differ only in their provider, from one new process."""
    context = process_context(__name__)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=main, args=(group, sender))
    process.start()
    sender.close()
    try:
        for _ in group:
            try:
                yield receiver.recv()
            except EOFError:
                process.join()
                yield {"error": f"the process of this run ended with status {process.exitcode}"}
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()


def process_context(module: str):
    """Return the multiprocessing context for processes that run functions of `module`.

    Where the platform can, a process forks from a server that has imported the packages and has not touched a device.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # against fragmentation
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module, "transformers.modeling_utils"])
    return context


# in the process of a setting ------------------------------------------------------------------------------------------


def main(group: list[dict], answers) -> None:
    """Make the runs of one setting; send the result of each through the connection `answers`."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(kind.type, 0) if kind else torch.device("cpu")
    trained = None
    for planned in group:
        try:
            trained = trained or build(planned, device)
            with _provided(planned, trained.model):
                answers.send(_measured(trained, planned, device))
        except torch.OutOfMemoryError:
            answers.send({"error": "out of memory"})
        except Exception as error:  # a library may fail on a model in any way; the others still run
            answers.send({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        if trained:
            _free(trained)


@dataclasses.dataclass
class Trained:
    """Hold a model with its optimiser."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: dict):
        return demo.step(self.model, self.optimizer, **batch)


def build(planned: dict, device) -> Trained:
    """Build the model of a run on the device, with random weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    setting = SETTINGS[planned["model"]]
    config = setting.model.configuration()
    text = config.get_text_config()
    text.use_cache, text.max_position_embeddings = False, planned["seq"] or POSITIONS
    kind = AutoModelForImageTextToText if setting.images else AutoModelForCausalLM
    torch.manual_seed(0)
    with device:
        model = kind.from_config(config, dtype=getattr(torch, planned["dtype"]))
    model.train()
    if planned["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # at a learning rate of 0 AdamW does all its work, and every provider computes the loss of the same weights
    return Trained(model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True))


def change(provider: str, model) -> None:
    """Patch or compile `model` as a provider does; eager leaves it unchanged."""
    if provider == OURS:
        liger_hw.patch(model)
    elif provider == LOSS_ALONE:
        liger_hw.patch(model, **dict.fromkeys(FLAGS, False) | {"fused_linear_cross_entropy": True})
    elif provider == COMPILE:
        model.compile()
    elif provider == LIGER:
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)


@contextmanager
def _provided(planned, model):
    """Apply a run's provider, budget for activations and compiler to `model` within the block."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    change(planned["provider"], model)
    if planned["provider"] == OURS and planned.get("activations"):
        liger_hw.activations(model, planned["activations"])
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in {"model": [model], "layers": layers}.get(planned.get("compiled"), ()):
        module.compile()
    try:
        yield
    finally:
        liger_hw.activations(model, None)
        liger_hw.unpatch(model)
        for module in (model, *layers):
            module._compiled_call_impl = None  # torch has no method that undoes compile()
        torch._dynamo.reset()


def _free(trained):
    trained.optimizer.zero_grad()
    gc.collect()
    if trained.model.device.type != "cpu":
        torch.accelerator.empty_cache()


def _measured(trained, planned, device) -> dict:
    budget = planned.get("activations") if planned["provider"] == OURS else None
    if planned["seq"] is None:
        return {"longest": _longest(trained, device, budget)}
    warm_up = WARM_UP + (PLANNING if budget else 0)
    batch = _batch(trained, planned["batch"], planned["seq"], device)
    result = _timed(trained, batch, planned["steps"], warm_up)
    if "snapshots" in planned:
        name = formatting.file_name(f"{formatting.setting(planned)} {planned['provider']}", "pickle")
        file = Path(planned["snapshots"]) / name
        result |= {"memory": snapshots.record(lambda: trained.step(batch), device, file), "snapshot": name}
    return result


def _batch(trained, batch, seq, device) -> dict:
    """Make random tokens with labels; a vision model gets an image before the text."""
    config, generator = trained.model.config, torch.Generator().manual_seed(0)
    patch = getattr(config, "vision_config", None)
    special = [value for name, value in vars(config).items() if patch and name.endswith("token_id") and value]
    words = min([config.get_text_config().vocab_size, *special])
    ids = torch.randint(words, (batch, seq), generator=generator).to(device)
    if patch is None:
        return {"input_ids": ids, "labels": ids}
    image = torch.zeros(batch, seq, dtype=torch.bool, device=device)
    image[:, 1 : 1 + (IMAGE_SIDE // patch.spatial_merge_size) ** 2] = True
    ids[:, 0] = config.vision_start_token_id
    ids = ids.masked_fill(image, config.image_token_id)
    values = patch.in_channels * patch.temporal_patch_size * patch.patch_size**2
    pixels = torch.randn(batch * IMAGE_SIDE**2, values, generator=generator)
    return {
        "input_ids": ids, "labels": ids.masked_fill(image, -100), "mm_token_type_ids": image.int(),
        "pixel_values": pixels.to(device, trained.model.dtype),
        "image_grid_thw": torch.tensor([[1, IMAGE_SIDE, IMAGE_SIDE]] * batch, device=device),
    }  # fmt: skip


def _timed(trained, batch, steps, warm_up) -> dict:
    device, tokens = batch["input_ids"].device, batch["input_ids"].numel()
    for _ in range(warm_up):
        trained.step(batch)
    seconds = []
    for _ in range(steps):
        demo.synchronize(device)
        start = time.perf_counter()
        loss = trained.step(batch)
        demo.synchronize(device)
        seconds.append(time.perf_counter() - start)
    times = spread(seconds)
    return {
        "tokens_per_second": tokens / times["median"],
        **{key: value * 1e3 if key != "rounds" else value for key, value in times.items()},
        "peak_bytes": demo.step_bytes(trained, batch),
        "loss": float(loss),
    }


def _longest(trained, device, budget=None) -> int:
    """Return the longest sequence of which two steps fit, to within a sixteenth.

    0 if 1,024 tokens do not fit. With a `budget`, each length has a plan of its own for activations.
    """

    def fits(seq) -> bool:
        if budget:
            liger_hw.activations(trained.model, budget)
        try:
            for _ in range(2 + (PLANNING if budget else 0)):  # the second step also holds the optimiser's state
                trained.step(_batch(trained, 1, seq, device))
            demo.synchronize(device)
            return True
        except (torch.OutOfMemoryError, BudgetTooSmall):
            return False
        finally:
            _free(trained)

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
