"""Build a model or a head in shards and measure its steps, in one process."""

import gc
import math
import os
import time
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

import liger_hw
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_lab.bench import demo, loss_cases, training
from liger_lab.bench.peers import OURS

LOSS_PARALLEL = "loss_parallel"
WARM_UP = 2  # steps before the first length, which compile; later lengths need one; a plan of activations needs more
SECONDS = 15  # a length ends after this time, with at least one timed step


def main(rank: int, world: int, cells: list[dict], folder: str, answers) -> None:
    """Measure `cells`, which differ only in their length; send each answer through `answers`.

    Args:
        rank: this process's rank.
        world: number of processes, one for each accelerator.
        cells: lengths in ascending order, as `distributed.plan` makes them.
        folder: an empty folder for the processes' rendezvous.
        answers: a connection. An answer is the result of `_measure`, or {"error": reason}, which is the last one.
    """
    try:
        _run(rank, world, cells, folder, answers)
    except Exception as error:  # a library may fail on a model in any way; the driver ends the other processes
        # NCCL's own allocations fail with an error of another type
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            answers.send({"error": "out of memory"})
        else:
            answers.send({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})


def _run(rank, world, cells, folder, answers):
    import transformers

    transformers.logging.set_verbosity_error()
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind:
        torch.accelerator.set_device_index(rank)
        device = torch.device(kind.type, rank)
    else:
        torch.set_num_threads(max(1, os.cpu_count() // world))
        device = torch.device("cpu")
    # DeepSpeed reads the first three, liger_hw.activations the last
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    dist.init_process_group(
        dist.get_default_backend_for_device(device), init_method=f"file://{folder}/store", rank=rank, world_size=world,
        device_id=device if kind else None,
    )  # fmt: skip
    trained = ENGINES[cells[0]["engine"]](cells, device)
    for cell in cells:
        warm_up = (WARM_UP if cell is cells[0] else 1) + (training.PLANNING if _planned(cell) else 0)
        answers.send(_measure(trained, cell, warm_up, device))


def _planned(cell) -> bool:
    return cell["provider"] == OURS and cell["activations"] is not None


@contextmanager
def _parameters_on_meta():
    """Build modules with parameters on meta within the block; buffers get values."""
    register = torch.nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def _model(cells):
    """Build the model of `cells`, patched by the provider, with activation checkpointing."""
    from transformers import AutoModelForCausalLM

    config = training.SETTINGS[cells[0]["model"]].model.configuration(max_position_embeddings=cells[-1]["seq"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    training.change(cells[0]["provider"], model)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def _model_on_meta(cells):
    with _parameters_on_meta():
        model = _model(cells)
    model.tie_weights()  # each registration within the block made another parameter
    return model


def _on_device(model, device):
    """Give parameters on meta memory of the device, without values; buffers keep theirs."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=device)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return model


def _initialise(shards, config, device):
    """Fill this rank's shards, (name, shard, ndim of the parameter), with random values."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    for name, shard, ndim in shards:
        if ndim > 1:
            values = torch.empty(shard.shape, dtype=shard.dtype, device=device)
            shard.copy_(values.normal_(0, config.initializer_range, generator=generator))
        else:
            shard.fill_(0 if name.endswith("bias") else 1)


class PostTraining(torch.nn.Module):
    """Compute DPO or GRPO from a model's hidden states.

    As the root unit of FSDP2 it has the whole head within its forward.

    Args:
        model: the trained model.
        cell: its "objective" is "dpo" or "grpo"; "provider" chooses who computes it.
        reference: a model of the same class, which DPO compares with; GRPO gets its log-probabilities instead.
    """

    def __init__(self, model, cell, reference=None):
        super().__init__()
        self.model, self.reference = model, reference
        config, batch, length = model.config, cell["batch"], cell["seq"]
        sizes = loss_cases.LossSizes(
            batch, length, length, config.hidden_size, config.hidden_size, config.vocab_size, config.vocab_size
        )
        case, *_ = loss_cases.cases([cell["objective"]], sizes)
        self.loss = case.providers[loss_cases.TORCH if cell["provider"] == training.EAGER else cell["provider"]]

    def forward(self, input_ids, labels):
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        if self.reference is not None:
            with torch.no_grad():
                ref_hidden = self.reference.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
            more = ref_hidden, self.reference.lm_head.weight.detach()
        else:
            generator = torch.Generator(hidden.device).manual_seed(0)
            advantages = torch.randn(len(labels), generator=generator, device=hidden.device)
            log_probs = torch.full(labels.shape, -0.5 - math.log(self.model.config.vocab_size), device=hidden.device)
            more = advantages, log_probs, log_probs  # of the tokens when they were sampled, and of a reference
        # each token is predicted by the state before it; the first, for equal shapes, by the last
        loss = self.loss(hidden, self.model.lm_head.weight, labels.roll(-1, 1), *more)
        return CausalLMOutput(loss=loss)  # FSDP looks for tensors in containers that it knows


class FSDP2:
    """Shard by torch's `fully_shard`: each decoder layer is a unit, the rest another.

    Parameters, gradients and optimizer states are fp32. Layers compute in bf16 on an accelerator, in fp32 on a CPU.
    DPO adds a reference model, sharded in the same way.
    """

    def __init__(self, cells, device):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        objective = cells[0]["objective"]
        trained = root = _model_on_meta(cells)
        reference = _model_on_meta(cells).requires_grad_(False) if objective == "dpo" else None
        if objective:
            root = PostTraining(trained, cells[0], reference)
        precision = MixedPrecisionPolicy(param_dtype=compute_dtype(device), reduce_dtype=torch.float32)
        options = {"mesh": dist.init_device_mesh(device.type, (dist.get_world_size(),)), "mp_policy": precision}
        for model in (trained, reference) if reference else (trained,):
            for layer in model.base_model.layers:
                fully_shard(layer, **options)
        fully_shard(root, **options)
        _on_device(root, device)
        for model in (trained, reference) if reference else (trained,):
            model.tie_weights()
        with torch.no_grad():
            shards = ((name, p.to_local(), p.ndim) for name, p in trained.named_parameters())
            _initialise(shards, trained.config, device)
            if reference:
                for p, trained_p in zip(reference.parameters(), trained.parameters()):
                    p.to_local().copy_(trained_p.to_local())
        self.model = root
        if _planned(cells[0]):
            liger_hw.activations(trained, cells[0]["activations"])
        # at a learning rate of 0 AdamW does all its work, and every provider computes the loss of the same weights
        self.optimizer = torch.optim.AdamW(trained.parameters(), lr=0.0, fused=True)

    def batch(self, cell, device):
        return random_tokens(cell, dist.get_rank(), device)

    def step(self, ids):
        return demo.step(self.model, self.optimizer, input_ids=ids, labels=ids)

    def release(self):
        """Free the gradients."""
        self.optimizer.zero_grad()


class ZeRO:
    """Shard by DeepSpeed's stage 2 or 3, with the precisions of `FSDP2`."""

    def __init__(self, cells, device):
        import deepspeed

        dtype, stage = compute_dtype(device), int(cells[0]["engine"][-1])
        place = {"device": "cpu", "pin_memory": device.type != "cpu"}
        names = {None: (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[cells[0]["offload"]]
        config = {
            "train_micro_batch_size_per_gpu": cells[0]["batch"],
            "zero_optimization": {"stage": stage} | {f"offload_{name}": place for name in names},
            "bf16": {"enabled": dtype == torch.bfloat16}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # torch's AdamW needs no compiler
        }  # fmt: skip
        deepspeed.init_distributed(dist_backend=dist.get_backend())
        if stage == 3:
            with deepspeed.zero.Init(config_dict_or_path=config, dtype=dtype):
                model = _model(cells)
            shards = [(name, p.ds_tensor, len(p.ds_shape)) for name, p in model.named_parameters()]
        else:
            model = _on_device(_model_on_meta(cells).to(dtype), device)
            model.tie_weights()
            shards = [(name, p, p.ndim) for name, p in model.named_parameters()]
        with torch.no_grad():
            _initialise(shards, model.config, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
        self.model, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def batch(self, cell, device):
        return random_tokens(cell, dist.get_rank(), device)

    def step(self, ids):
        return training.zero_step(self.model, input_ids=ids, labels=ids)

    def release(self):
        """Do nothing: DeepSpeed frees gradients in its step."""


class Vocabulary:
    """Compute the loss of a head alone, whose vocabulary is sharded, as under tensor parallelism.

    "eager" gathers the logits, as transformers' `tp_plan` does; "loss_parallel" is torch's, which does not. The ranks
    have the same hidden states and labels. A step is forward and backward, to the gradients of hidden states and head.
    """

    def __init__(self, cells, device):
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        self.provider, self.dtype = cells[0]["provider"], compute_dtype(device)
        config = training.SETTINGS[cells[0]["model"]].model.config
        self.features = config["hidden_size"]
        head = torch.nn.Linear(self.features, config["vocab_size"], bias=False, device=device, dtype=self.dtype)
        with torch.no_grad():
            generator = torch.Generator(device).manual_seed(1)  # other numbers than the hidden states
            head.weight.normal_(0, self.features**-0.5, generator=generator)
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        gathers = self.provider == training.EAGER
        output = Replicate() if gathers else Shard(-1)
        style = ColwiseParallel(output_layouts=output, use_local_output=gathers)
        self.head = parallelize_module(head, mesh, style)

    def batch(self, cell, device):
        generator = torch.Generator(device).manual_seed(0)
        rows = cell["batch"] * cell["seq"]
        hidden = torch.randn(rows, self.features, generator=generator, device=device).to(self.dtype)
        return hidden.requires_grad_(), random_tokens(cell, 0, device).flatten()

    def step(self, batch):
        from torch.distributed.tensor.parallel import loss_parallel

        hidden, labels = batch
        self.release()
        hidden.grad = None
        if self.provider == OURS:
            loss = fused_linear_cross_entropy(hidden, self.head.weight, labels)
            loss.backward()
        else:
            with loss_parallel() if self.provider == LOSS_PARALLEL else nullcontext():
                loss = torch.nn.functional.cross_entropy(self.head(hidden).float(), labels)
                loss.backward()
        return loss.full_tensor().detach() if self.provider == LOSS_PARALLEL else loss.detach()

    def release(self):
        """Free the gradient of the head."""
        self.head.weight.grad = None


ENGINES = {"fsdp2": FSDP2, "zero2": ZeRO, "zero3": ZeRO, "vocabulary": Vocabulary}


def random_tokens(cell, seed, device) -> torch.Tensor:
    """Return (batch, tokens) indices of the cell's model."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = training.SETTINGS[cell["model"]].model.config["vocab_size"]
    return torch.randint(vocabulary, (cell["batch"], cell["seq"]), generator=generator).to(device)


def compute_dtype(device) -> torch.dtype:
    """Return the dtype of the layers' arithmetic."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _measure(trained, cell, warm_up, device) -> dict:
    """Measure the seconds of timed steps, the loss of every step and the allocator's peak.

    The peak is None on a CPU.
    """
    trained.release()
    gc.collect()
    on_cpu = device.type == "cpu"
    if not on_cpu:
        torch.accelerator.empty_cache()  # memory that earlier lengths reserved
    batch = trained.batch(cell, device)
    losses = [trained.step(batch) for _ in range(warm_up)]
    if not on_cpu:
        torch.accelerator.reset_peak_memory_stats()
    seconds, longest = [], torch.zeros((), device=device)
    while len(seconds) < cell["steps"] and longest.item() < SECONDS:
        demo.synchronize(device)
        start = time.perf_counter()
        losses.append(trained.step(batch))
        demo.synchronize(device)
        seconds.append(time.perf_counter() - start)
        longest.fill_(sum(seconds))
        dist.all_reduce(longest, dist.ReduceOp.MAX)  # all ranks make the same number of steps
    return {
        "seconds": seconds, "losses": torch.stack(losses).tolist(),
        "peak_bytes": None if on_cpu else torch.accelerator.max_memory_allocated(),
        "reserved_bytes": None if on_cpu else torch.accelerator.max_memory_reserved(),
    }  # fmt: skip
