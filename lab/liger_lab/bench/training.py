"""Measure training steps of Hugging Face models of published sizes, unpatched and under each library.

Every library has its own process for each model, so that none inherits another's memory, compiled code or changes. The
process builds the model with random weights, changes it as the library does, and trains it at growing sizes.
"""

import dataclasses
import gc
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

import liger_hw
from liger_hw.checkpointing.budget import BudgetTooSmall, bytes_of
from liger_hw.checks import check
from liger_hw.patching.flags import FLAGS
from liger_hw.spelling import check_known
from liger_lab.bench import demo, formatting, memory, snapshots
from liger_lab.bench.measure import spread
from liger_lab.bench.peers import LOSS_ALONE, LOSS_COMPILED, OURS
from liger_lab.bench.run_file import environment, saved_at_end, write

EAGER, COMPILE, LIGER, UNSLOTH = "eager", "compile", "liger", "unsloth"
PEERS = (EAGER, COMPILE, LIGER, UNSLOTH)
RANK = 16  # of adapters
SWEEPS = {"batch": (1, 2**10), "seq": (1024, 2**20)}  # what is doubled -> its first and last value
WARM_UP = 3  # steps before the first size of a process, which compile; later sizes need one
DISK_BUFFER = 6 * 10**8  # elements of each buffer for weights on a disk: the head of Llama-8B has 5.3e8
PLANNING = 7  # steps in which `liger_hw.activations` measures, plans and checks, a second plan at most
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

    model: demo.DemoModel
    seqs: tuple[int, ...]
    images: bool = False


def _family(family, *sizes, batch=4, seqs=(2048,), **more):
    """Make the `Setting` of a text model from the arguments of `demo.llama`."""
    return Setting(demo.DemoModel(demo.llama(*sizes, **more), batch, seqs[0], 10, 1e-4, family=family), seqs)


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
    "qwen2.5-7b": _family("qwen2", 3584, 18944, 28, 28, 4, 152064),
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
    "qwen2.5-vl-3b": Setting(demo.DemoModel(QWEN2_5_VL | TIED, 4, 2048, 10, 1e-4, family="qwen2_5_vl"), (2048,), True),
    "tiny": Setting(demo.MODELS["tiny"], (256,)),
}  # fmt: skip
DEFAULT = tuple(name for name in SETTINGS if name != "tiny")


def choose(names, device) -> list[str]:
    """Return the providers to compare, ours last.

    Raises:
        ValueError: a provider is unknown, not installed, or needs an accelerator.
    """
    for name in names:
        check_known("peer", name, (*PEERS, OURS))
        if name == LIGER and (device.type == "cpu" or find_spec("liger_kernel") is None):
            raise ValueError("--against: got liger, which needs an accelerator and pip install liger-kernel")
        if name == UNSLOTH and (device.type == "cpu" or find_spec("unsloth") is None):
            raise ValueError("--against: got unsloth, which needs an accelerator and pip install unsloth")
    if not names:
        names = [EAGER] if device.type == "cpu" else [EAGER, COMPILE, *([LIGER] if find_spec("liger_kernel") else [])]
    return [*dict.fromkeys(name for name in names if name != OURS), OURS]


def plan(
    models, providers, batches, seqs, checkpointing, steps, dtype, longest=False, sweep=None, **options
) -> list[dict]:
    """List the runs: one dictionary of plain data for each.

    Args:
        models: names of SETTINGS.
        batches, seqs: lists of sizes, or None for each model's own.
        checkpointing: a list of booleans, or None for each model's own.
        steps: timed steps of a run.
        dtype: dtype of computation, and of parameters; fp16 trains with a loss scale, and parameters that learn are
            fp32.
        longest: search the longest sequence that fits the memory with a batch of one, instead of timing.
        sweep: "batch" or "seq", which grows until no step fits the memory. One size or none is doubled; several are
            the sizes.
        options: what is asked for; empty values are as absent.
            activations: budget of `liger_hw.activations` for the model that liger_hw patches.
            snapshots: folder for the memory of a step of each run.
            compiled: what torch.compile gets after a provider's patch: "model", "layers" or "graphs".
            lora, qlora: rank of PEFT's adapters on all linear layers; with `qlora` these layers have 4 bits.
            kbit: `peft.prepare_model_for_kbit_training` prepares the model, and keeps the rest in fp32.
            offload: DeepSpeed's ZeRO-3 keeps weights and optimizer on the "cpu", or in this folder of a disk.
            optimizer: a name of OPTIMIZERS, if another than AdamW.
            accumulation: batches of a step, whose gradients add up.
            limit: memory of the device that torch may allocate, such as "24GiB".

    Raises:
        ValueError: a model is unknown, or a budget.
    """
    bytes_of(options.get("activations") or "auto", None)
    if limit := options.get("limit"):
        check(isinstance(bytes_of(limit, None), int), "--memory-limit", limit, 'a size such as "24GiB"')
    for name in models:
        check_known("model", name, SETTINGS)
    options |= {"sweep": sweep, "precision": "fp16 with a loss scale" if dtype == torch.float16 else None}
    asked = {key: value for key, value in options.items() if value}
    return [
        {
            "model": name, "batch": batch, "seq": seq, "checkpointing": checkpointed, "provider": provider,
            "steps": steps, "dtype": str(dtype).removeprefix("torch."), **asked,
        }
        for name in models
        for checkpointed in checkpointing or [SETTINGS[name].model.checkpointing]
        for provider in providers
        for batch, seq in _sizes(SETTINGS[name], batches, seqs, longest, sweep)
    ]  # fmt: skip


def _sizes(setting, batches, seqs, longest, sweep) -> list[tuple]:
    """List (batch, sequence length or None for the longest that fits)."""
    if longest:
        return [(1, None)]
    sizes = {"batch": batches or [setting.model.batch], "seq": seqs or setting.seqs}
    if sweep:
        given, (first, last) = {"batch": batches, "seq": seqs}[sweep] or [], SWEEPS[sweep]
        first = given[0] if given else first
        doubled = [first * 2**power for power in range((last // first).bit_length())]
        sizes = {name: values[:1] for name, values in sizes.items()}
        sizes[sweep] = sorted(given) if len(given) > 1 else doubled
    return list(itertools.product(sizes["batch"], sizes["seq"]))


def groups(runs) -> list[list[dict]]:
    """Split the runs of a `plan` into processes, whose runs differ in their sizes alone."""
    return [list(group) for _, group in itertools.groupby(runs, lambda planned: planned | {"batch": 0, "seq": 0})]


def run(runs, device, progress, file: Path) -> dict:
    """Make every run of a `plan`; write the results to `file` after each."""
    benchmark = environment(device) | {"results": [], "complete": False}
    bar = progress.add_task("training", total=len(runs), note="")
    with saved_at_end(benchmark, file):
        for group in groups(runs):
            for number, (planned, result) in enumerate(zip(group, _in_a_process(group)), 1):
                progress.update(bar, advance=1, note=f"{formatting.setting(planned)}, {planned['provider']}")
                benchmark["results"].append(planned | result)
                write(benchmark, file)
                if "sweep" in planned and "error" in result:  # usually out of memory, and larger sizes would be too
                    progress.update(bar, advance=len(group) - number)
                    break
    return benchmark


def _in_a_process(group: list[dict]) -> Iterator[dict]:
    """Yield the results of a group of runs, from one new process."""
    # unsloth changes transformers at its import, which must come first
    is_unsloth = group[0]["provider"] == UNSLOTH
    context = multiprocessing.get_context("spawn") if is_unsloth else process_context(__name__)
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


# in the process of a group --------------------------------------------------------------------------------------------


def main(group: list[dict], answers) -> None:
    """Make the runs of a group; send the result of each through the connection `answers`."""
    if group[0]["provider"] == UNSLOTH:
        import_module("liger_lab.bench.unsloth")
    import transformers

    transformers.logging.set_verbosity_error()
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(kind.type, 0) if kind else torch.device("cpu")
    trained = None
    for planned in group:
        try:
            trained = trained or build(planned, max(run["seq"] or POSITIONS for run in group), device)
            answers.send(_measured(trained, planned, device, WARM_UP if planned is group[0] else 1))
        except Exception as error:  # a library may fail on a model in any way; the others still run
            out = isinstance(error, torch.OutOfMemoryError)
            message = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            answers.send({"error": "out of memory" if out else message})
            trained = None  # an engine may be left in the middle of its step
        torch._dynamo.reset()  # each size is compiled as the first
        _free(trained, device)


def _galore(model):
    from galore_torch import GaLoreAdamW

    head = model.get_output_embeddings()
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head]
    projected = {"params": [module.weight for module in linear], "rank": 128, "update_proj_gap": 200, "scale": 0.25,
                 "proj_type": "std"}  # fmt: skip
    inside = {id(weight) for weight in projected["params"]}
    others = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    return GaLoreAdamW([{"params": others}, projected], 0.0, no_deprecation_warning=True)


def _learned(model) -> list:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# at a learning rate of 0 AdamW does all its work, and every provider computes the loss of the same weights
OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(_learned(model), lr=0.0, fused=True),
    "adamw8bit": lambda model: import_module("bitsandbytes").optim.AdamW8bit(_learned(model), lr=0.0),
    "paged_adamw8bit": lambda model: import_module("bitsandbytes").optim.PagedAdamW8bit(_learned(model), lr=0.0),
    "galore": _galore,
}


class Trained:
    """Hold a model with its optimizer; fp16 trains under autocast with a loss scale."""

    def __init__(self, model, device, fp16: bool, planned: dict):
        self.model, self.batches = model, planned.get("accumulation", 1)
        self.optimizer = OPTIMIZERS[planned.get("optimizer", "adamw")](model)
        self.autocast = torch.autocast(device.type, torch.float16, enabled=fp16)
        self.scaler = torch.amp.GradScaler(device.type, enabled=fp16)

    def step(self, batch: dict):
        torch.compiler.cudagraph_mark_step_begin()  # compiled layers may write over what the step before returned
        self.optimizer.zero_grad()
        for _ in range(self.batches):
            with self.autocast:
                loss = self.model(**batch).loss
            self.scaler.scale(loss / self.batches).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def loss_scale(self) -> float:
        return self.scaler.get_scale()


class ZeroOffload:
    """Train by DeepSpeed's ZeRO-3 with weights and optimizer on the CPU or a disk."""

    batches = 1

    def __init__(self, model, planned):
        import deepspeed

        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}  # DeepSpeed reads them
        if not dist.is_initialized():
            backend = dist.get_default_backend_for_device(model.device)
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
        place = {"device": "cpu", "pin_memory": model.device.type != "cpu"}
        if planned["offload"] != "cpu":
            place |= {"device": "nvme", "nvme_path": planned["offload"]}
        weights = place | ({"buffer_size": DISK_BUFFER} if "nvme_path" in place else {})
        config = {
            "train_micro_batch_size_per_gpu": planned["batch"],
            "zero_optimization": {"stage": 3, "offload_param": weights, "offload_optimizer": place},
            # a scale of 2^10, which no step halves: DeepSpeed leaves out the optimizer of a step that overflows
            "fp16": {"enabled": planned["dtype"] == "float16", "initial_scale_power": 10, "hysteresis": 1},
            "bf16": {"enabled": planned["dtype"] == "bfloat16"},
            # torch's AdamW, which needs no compiler
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
        }  # fmt: skip
        optimizer = OPTIMIZERS["adamw"](model)
        self.model = model
        self.engine, self.optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step(self, batch: dict):
        return zero_step(self.engine, **batch)

    def loss_scale(self) -> float:
        return float(self.optimizer.loss_scale)


def zero_step(engine, **batch):
    """Make one step of a DeepSpeed engine; return its loss, on the device."""
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


def build(planned: dict, positions: int, device) -> Trained | ZeroOffload:
    """Build the model of a run with random weights, as its library changes it.

    Args:
        positions: tokens of the longest sequence.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    setting, dtype = SETTINGS[planned["model"]], getattr(torch, planned["dtype"])
    rank = planned.get("lora") or planned.get("qlora")
    fp16 = dtype == torch.float16 and not planned.get("offload")  # DeepSpeed keeps fp32 copies and its own scale
    config = setting.model.configuration()
    text = config.get_text_config()
    text.use_cache, text.max_position_embeddings = False, positions
    kind = AutoModelForImageTextToText if setting.images else AutoModelForCausalLM
    torch.manual_seed(0)
    if planned["provider"] == UNSLOTH:
        longest = planned | {"seq": positions}
        model = import_module("liger_lab.bench.unsloth").build(config, rank, longest, device, dtype)
        return Trained(model.train(), device, fp16, planned)
    with device:
        model = kind.from_config(config, dtype=torch.float32 if fp16 and not rank else dtype)
    if planned["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if rank:
        model = _with_adapters(model, rank, planned, device)
    model.train()
    change(planned["provider"], model)
    _compile(model, planned.get("compiled"))
    if "limit" in planned:  # after the build, which may hold the unquantised model
        share = bytes_of(planned["limit"], None) / torch.accelerator.get_memory_info(device)[1]
        torch.accelerator.empty_cache()
        getattr(torch, device.type).set_per_process_memory_fraction(share, device)
    if planned.get("offload"):
        return ZeroOffload(model, planned)
    return Trained(model, device, fp16, planned)


def _with_adapters(model, rank, planned, device):
    """Add PEFT's adapters to every linear layer but the head.

    QLoRA quantises these layers first. Adapters are fp32, as PEFT makes them, with random values: with PEFT's zeros a
    wrong one would not change the loss.
    """
    import peft

    if "qlora" in planned:
        quantise(model, device)
    if planned.get("kbit"):
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules="all-linear", init_lora_weights=False))


def quantise(model, device) -> None:
    """Store every linear layer but the head in 4 bits, as transformers does."""
    import bitsandbytes

    for name, linear in [*model.named_modules()]:
        if type(linear) is torch.nn.Linear and linear is not model.get_output_embeddings():
            new = bitsandbytes.nn.Linear4bit(
                linear.in_features, linear.out_features, linear.bias is not None, model.dtype, quant_type="nf4",
                device="meta",
            )  # fmt: skip
            new.weight = bitsandbytes.nn.Params4bit(
                linear.weight.detach(), requires_grad=False, quant_type="nf4", module=new
            )
            new.bias = linear.bias
            model.set_submodule(name, new.to(device))  # this quantises
    model.is_loaded_in_4bit = True


def change(provider: str, model) -> None:
    """Patch or compile `model` as a provider does; eager leaves it unchanged."""
    if provider == OURS:
        liger_hw.patch(model)
    elif provider in (LOSS_ALONE, LOSS_COMPILED):
        liger_hw.patch(model, **dict.fromkeys(FLAGS, False) | {"fused_linear_cross_entropy": True})
    elif provider == LIGER:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of PEFT's
        import_module("liger_kernel.transformers")._apply_liger_kernel_to_instance(model=base)
    if provider in (COMPILE, LOSS_COMPILED):
        model.compile()


def _compile(model, what: str | None):
    """Compile "model", its "layers" (each for itself), these into CUDA "graphs", or nothing."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in {"model": [model], "layers": layers, "graphs": layers, None: []}[what]:
        module.compile(mode="reduce-overhead" if what == "graphs" else None)


def _free(trained, device):
    if trained:
        trained.optimizer.zero_grad()
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()


def _measured(trained, planned, device, warm_up) -> dict:
    budget = planned.get("activations") if planned["provider"] == OURS else None
    if planned["seq"] is None:
        return {"longest": _longest(trained, device, budget)}
    activations = liger_hw.activations(trained.model, budget)
    batch = _batch(trained, planned["batch"], planned["seq"], device)
    result = _timed(trained, batch, planned["steps"], warm_up + (PLANNING if budget else 0))
    if activations is not None and activations.plan is not None:
        result["plan"] = _summary(activations.plan)
    if "precision" in planned:
        result["loss_scale"] = trained.loss_scale()
    if "snapshots" in planned:
        name = formatting.file_name(f"{formatting.setting(planned)} {planned['provider']}", "pickle")
        file = Path(planned["snapshots"]) / name
        stacks = not planned.get("offload")  # torch 2.11 fails to record those of DeepSpeed's hooks: a SystemError
        curve = snapshots.record(lambda: trained.step(batch), device, file, stacks)
        result |= {"memory": curve, "snapshot": name}
    return result


def _summary(plan) -> dict:
    """Return the predictions of a plan, and the measurements of its own pass."""
    names = "peak_bytes", "seconds", "measured_peak_bytes", "measured_seconds", "held_bytes", "offloaded_bytes"
    return {name: getattr(plan, name) for name in names} | {"text": str(plan)}


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
    device, tokens = batch["input_ids"].device, batch["input_ids"].numel() * trained.batches
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
        "peak_bytes": _step_bytes(trained, batch),
        "loss": float(loss),
    }


def _step_bytes(trained, batch) -> int:
    """Return the peak memory on the device of one more step, with all residents."""
    trained.optimizer.zero_grad()
    device = batch["input_ids"].device
    if device.type == "cpu":
        return demo.step_bytes(trained, batch)
    resident = torch.accelerator.memory_allocated(device)
    return resident + memory.peak(lambda: trained.step(batch), device)


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
            _free(trained, device)

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
