"""Steps of training: Hugging Face models of published shapes with random weights, as they are and under each library.

Every setting has a process of its own, so that none inherits another's memory or compiled code. In it one model is
trained as it is, compiled, patched by liger_hw and, last because it cannot be undone, patched by the peer: the same
weights for all, built once.
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
from liger_hw.bench import demo, tables
from liger_hw.bench.measure import spread
from liger_hw.bench.peers import OURS
from liger_hw.bench.results import about, kept, write
from liger_hw.spelling import check_known

EAGER, COMPILE, LIGER = "eager", "compile", "liger"
PROVIDERS = (EAGER, COMPILE, LIGER, OURS)
ORDER = (EAGER, COMPILE, OURS, LIGER)  # in a process: the peer's changes to a model are not undone
WARM_UP = 3
POSITIONS = 2**22  # the longest context that is ever tried
IMAGE_SIDE = 32  # patches of 14 pixels: an image of 448x448


@dataclasses.dataclass(frozen=True)
class Setting:
    """One model as it is trained here.

    Attributes:
        model: its shape.
        seqs: tokens of a sequence, each measured by itself.
        images: every sequence begins with an image of 448x448 pixels.
    """

    model: demo.Model
    seqs: tuple[int, ...]
    images: bool = False


def _family(family, *sizes, batch=4, seqs=(2048,), **more):
    """A `Setting` of a text model with `demo.llama`'s sizes."""
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
    """The runs to compare, ours last.

    Raises:
        ValueError: one is unknown, not installed, or needs an accelerator that is not here.
    """
    for name in names:
        check_known("peer", name, PROVIDERS[:-1])
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
    for name in models:
        check_known("model", name, SETTINGS)
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
    with kept(found, file):
        for _, group in itertools.groupby(runs, key=lambda asked: asked | {"provider": ""}):
            group = sorted(group, key=lambda asked: ORDER.index(asked["provider"]))
            progress.update(bar, note=tables.setting(group[0]))
            for result, asked in zip(_in_a_process(group), group):
                found["results"].append(asked | result)
                write(found, file)
                progress.update(bar, advance=1, note=f"{tables.setting(asked)}, {asked['provider']}")
    return found


def _in_a_process(group: list[dict]) -> Iterator[dict]:
    """The result of each run of a group, which differ in their provider alone."""
    context = process_context(__name__)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=main, args=(group, there))
    process.start()
    there.close()
    try:
        for _ in group:
            try:
                yield here.recv()
            except EOFError:
                process.join()
                yield {"error": f"its process ended with status {process.exitcode}"}
    except BaseException:
        process.kill()
        raise
    finally:
        process.join()


def process_context(module: str):
    """Return the multiprocessing context of processes that train, whose functions are in `module`.

    They are forked from one that has imported what they need, where that exists, and has not touched a device.
    """
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # or holes end a run early
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module, "transformers.modeling_utils"])
    return context


# in that process -----------------------------------------------------------------------------------------------------


def main(group: list[dict], answers) -> None:
    """Make the runs of one setting; what each found goes through the connection `answers`."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind = torch.accelerator.current_accelerator()
    device = torch.device(kind.type, 0) if kind else torch.device("cpu")
    made = None
    for asked in group:
        try:
            made = made or build(asked, device)
            with _provided(asked["provider"], made.model):
                answers.send(_measured(made, asked, device))
        except torch.OutOfMemoryError:
            answers.send({"error": "out of memory"})
        except Exception as error:  # a library may fail on a model in any way; the others still run
            answers.send({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})
        if made:
            _free(made)


@dataclasses.dataclass
class Trained:
    """A model with its optimiser."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, batch: dict):
        """One optimiser step; its loss, on the device."""
        self.optimizer.zero_grad()
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def build(asked: dict, device) -> Trained:
    """The model of a run, on the device, with random weights."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    setting = SETTINGS[asked["model"]]
    config = setting.model.configuration()
    text = config.get_text_config()
    text.use_cache, text.max_position_embeddings = False, asked["seq"] or POSITIONS
    kind = AutoModelForImageTextToText if setting.images else AutoModelForCausalLM
    torch.manual_seed(0)
    with device:
        model = kind.from_config(config, dtype=getattr(torch, asked["dtype"]))
    model.train()
    if asked["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # at a rate of zero AdamW does all of its work, and every provider's loss is that of the same weights
    return Trained(model, torch.optim.AdamW(model.parameters(), lr=0.0, fused=True))


def change(provider: str, model) -> None:
    """Patch or compile `model` as a provider does; eager leaves it as it is."""
    if provider == OURS:
        liger_hw.patch(model)
    elif provider == COMPILE:
        model.compile()
    elif provider == LIGER:
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=model)


@contextmanager
def _provided(provider, model):
    """`model` as a provider has it."""
    change(provider, model)
    try:
        yield
    finally:
        liger_hw.unpatch(model)
        model._compiled_call_impl = None  # torch has no method that undoes compile()
        torch._dynamo.reset()


def _free(made):
    made.optimizer.zero_grad()
    gc.collect()
    if made.model.device.type != "cpu":
        torch.accelerator.empty_cache()


def _measured(made, asked, device) -> dict:
    if asked["seq"] is None:
        return {"longest": _longest(made, device)}
    return _timed(made, _batch(made, asked["batch"], asked["seq"], device), asked["steps"])


def _batch(made, batch, seq, device) -> dict:
    """Random tokens, each predicted from those before; of a model of images, behind one image that is not."""
    config, generator = made.model.config, torch.Generator().manual_seed(0)
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
        "pixel_values": pixels.to(device, made.model.dtype),
        "image_grid_thw": torch.tensor([[1, IMAGE_SIDE, IMAGE_SIDE]] * batch, device=device),
    }  # fmt: skip


def _timed(made, batch, steps) -> dict:
    device, tokens = batch["input_ids"].device, batch["input_ids"].numel()
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
        "tokens_per_second": tokens / found["median"],
        **{key: value * 1e3 if key != "rounds" else value for key, value in found.items()},
        "peak_bytes": demo.step_bytes(made, batch),
        "loss": float(loss),
    }


def _longest(made, device) -> int:
    """Tokens of the longest sequence of which two steps fit, to within a sixteenth; 0 if not even 1,024 fit."""

    def fits(seq) -> bool:
        try:
            for _ in range(2):  # the second has the optimiser's state beside it
                made.step(_batch(made, 1, seq, device))
            demo.synchronize(device)
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            _free(made)

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
