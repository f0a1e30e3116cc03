"""Predict memory and communication of a training step from a model's sizes: `liger-hw plan`.

Nothing runs on a GPU. Bytes are those of one GPU. Letters, with t = GPUs of a tensor-parallel group (1 without) and
s = GPUs that share the shards (GPUs / t):

    N  tokens of a batch on one GPU             H  hidden size        I  intermediate size     L  layers
    Q  query heads x head size                  K  key heads x head size                       V  vocabulary
    P  parameters of one GPU of a group of t: matrices of layers and the head / t, norms and the embedding whole
    R  parameters outside the layers: embedding, head (none if tied), last norm
    A = (P - R) / L, the parameters of a layer
    E  experts of a mixture                     k  experts of a token    I  intermediate size of one expert

Resident bytes for each parameter of P, as (parameters + gradients + AdamW's two states):

    fsdp2  mixed: (4 + 4 + 8) / s     bf16: (2 + 2 + 4) / s          torch's fully_shard; gradients grow in the backward
    ddp    bf16:  2 + 2 + 4, and 2 of DDP's buckets from 2 GPUs      gradient_as_bucket_view=False, torch's default
    zero2  2 + (2 + 12) / s,  zero3  (2 + 2 + 12) / s                "model states" of ZeRO, arXiv:1910.02054, section 3

AdamW's states of bitsandbytes in 8 bits, with ddp, take 2 + 2 x 4 / 256 bytes (a byte each, and an fp32 scale for 256
of them) instead of 4. GaLore's, with ddp, of a layer's matrix of m x n take 4 r max(m, n) and its projection
2 r min(m, n), r = 128; of the rest 4 as AdamW's. --offload optimizer moves the states, DeepSpeed's fp32 copy and the
gradients of zero2 and zero3 to the host; --offload parameters also the weights of zero3, which no peak was measured of.

Buffers of the engine, in bytes (b = 2: bf16; r = 4 for mixed, 2 for bf16):

    fsdp2  b R from the forward to the end of the backward, b A of the layer in work, b A of the prefetched layer, and
           r A of the last reduce-scatter's input (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py)
    zero2  two buckets of 5e8 elements (reduce_bucket_size with overlap_comm) in the backward; in the optimizer instead
           the shard's gradients flat, 2 / s, and in fp32, 4 / s
    galore the square root and the update of the embedding, 4 V H, in the optimizer; the SVD's memory is in RESERVE
    zero3  one such bucket, and from 2 GPUs 1e9 live parameters (stage3_max_live_parameters); the gradients' shards are
           there in the whole step. The numbers are DeepSpeed's defaults, and not above P. Offloaded parameters are
           live on one GPU, too

Kept activations, in bytes of a token of a layer, where nothing is recomputed:

    liger_hw  8 H + 2 (2 Q + 2 K) / t + 4 I / t + statistics      inputs of norms and projections, q, k, v, gate, up
    eager     16 H + 2 (2 Q + 2 K) / t + 8 I / t + statistics     each norm keeps fp32 and bf16 rows, the MLP also
                                                                  SiLU(gate) and the product
    statistics: 4 for each head / t (attention's log-sum-exp) and 4 for each row that a norm sees
    a norm of q and k keeps 2 (Q + K) / t more, eager's 6 (Q + K) / t
    experts, instead of the MLP's: liger_hw k (4 I + 12), gate, up and indices; eager k (4 H + 8 I + 36), also the
    gathered input and the output of each pair of a token and an expert; both 4 E, the router's probabilities

With activation checkpointing a layer keeps its input, 2 H, and the layer in the backward keeps the above once more.
In its MLP's backward it also holds the gradient of its output, 2 H, liger_hw 2 I / t (dy, over which y is
recomputed; under zero3 y is kept, 2 I / t more), eager 4 I / t (two gradients beside the product's), and the gradient
of the last projection's weight. Experts have the same 2 H a token, and beside it, with G = 2 E H I for the gradient of
one of their three weights, the larger of two moments: liger_hw 2 k (I + H) a token and G (the product and the gathered
gradient of each pair), or 2 k H a token and 3 G; eager 6 k H a token, or 3 G less 4 k I a token, free by then.
Plain and patched steps on one H200 reach these formulas to 0.1%; with checkpointing or on several GPUs no peak of
experts was measured.

Loss layer, in bytes; M rows are a chunk, as `kernels.chunked_head.chunk_rows` chooses them:

    liger_hw  2 M V / t (a chunk's logits) + 2 V H / t (dW; 6 V H / t over more than 32 chunks, summed in fp32)
              + 6 N H (input, normed rows and their gradient)
    eager     12 N V (the backward of log_softmax holds its fp32 result, the incoming and the new gradient; no option
              of transformers' tensor parallelism splits them) + 8 N H (rows of the last norm)

The peak is the largest of these moments: the loss, the MLP's backward in the last, the second last and the first
layer, the reduce-scatter of R, the optimizer. Beside it torch keeps 64 MiB of cuBLAS workspaces on NVIDIA: 32 MiB for
each of the forward's and the backward's threads, the size that measured FSDP2 peaks left unexplained. RESERVE,
outside of the allocator, adds CUDA context, NCCL and fragmentation: on an H200 of 139.8 GiB a measured step with
136.8 GiB of tensors ran.

Communication, in bytes that one GPU sends in a step, each times (s - 1) / s or (t - 1) / t:

    fsdp2  all-gather 2 (2 A L + R), reduce-scatter r P              forward and backward; R once
    ddp    2 x 2 P                                                   an all-reduce of gradients
    zero2  2 P + 2 P,  zero3  3 x 2 P                                arXiv:1910.02054, section 7
    tp     2 x 2 N H for each all-reduce of a layer (4; 5 with checkpointing) and of the head's input gradient;
           eager gathers the logits instead, 2 N V

Seconds are bytes over the link's rate: NVLink within a node, and across nodes the smaller of NVLink and the network
cards that the group's GPUs of a node share. They are a bound without overlap; FSDP2 overlaps most of them. The loss
layer takes 6 N V H / t operations, over the rate of matrix products.

Source of the rates: 783 TFLOP/s is this package's measurement of torch.mm in bf16 on an H200 (lab/results/h200.json);
450 GB/s a direction is the data sheet of NVLink 4 (H100, H200), 50 GB/s a network card of 400 Gbit/s for each GPU.
"""

import dataclasses
import json
from pathlib import Path

import torch

from liger_hw import backends
from liger_hw.checks import check
from liger_hw.console import require, table
from liger_hw.kernels.vocabulary.chunked_head import ROUNDINGS, MiB, chunk_rows
from liger_hw.losses.engine import CHUNK_MEMORY
from liger_hw.spelling import check_known
from liger_lab.bench import demo, training
from liger_lab.bench.peers import OURS
from liger_lab.bench.training import EAGER

GIB = 2**30
WORKSPACE = 64 * MiB
RESERVE = 2 * GIB
BUCKET, LIVE = 5 * 10**8, 10**9  # elements: DeepSpeed's defaults
ENGINES = ("fsdp2", "zero2", "zero3", "ddp")
PROVIDERS = (OURS, EAGER)
OUTSIDE = ("accumulation", "activations", "objective", "lora", "qlora", "precision")  # options that no formula covers
OPTIMIZERS = ("adamw", "adamw8bit", "galore")
RANK = 128  # of GaLore, as in `training.OPTIMIZERS`
OFFLOADS = ("optimizer", "parameters")
LAUNCHERS = ("accelerate", "torchrun", "deepspeed")
STEP = 256  # the longest sequence is a multiple of it
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")  # whose measured peaks the formulas reach
MIXTURES = ("mixtral", "qwen3_moe")  # of FAMILIES
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def _named() -> dict[str, tuple[str, dict]]:
    """Return name -> (family, config) of covered `bench train` models and of larger Llamas."""
    known = {name: (setting.model.family, setting.model.config) for name, setting in training.SETTINGS.items()}
    known = {name: entry for name, entry in known.items() if entry[0] in FAMILIES}
    larger = {  # Llama-3.2-3B, Llama-3.1-70B and Llama-3.1-405B; Mixtral-8x7B and Qwen3-30B-A3B
        "llama-3b": demo.llama(3072, 8192, 28, 24, 8, 128256, head_dim=128, tie_word_embeddings=True),
        "llama-70b": demo.llama(8192, 28672, 80, 64, 8, 128256),
        "llama-405b": demo.llama(16384, 53248, 126, 128, 8, 128256),
    }
    mixtral = demo.llama(4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)
    qwen = demo.llama(2048, 6144, 48, 32, 4, 151936, head_dim=128, moe_intermediate_size=768, num_experts=128,
                      num_experts_per_tok=8)  # fmt: skip
    mixtures = {"mixtral-8x7b": ("mixtral", mixtral), "qwen3-30b-a3b": ("qwen3_moe", qwen)}
    return known | {name: ("llama", config) for name, config in larger.items()} | mixtures


MODELS = _named()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a decoder with gated MLPs, or with gated experts in every layer."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    projection_bias: bool  # of q, k and v
    norms_heads: bool  # a norm of each head of q and k
    experts: int = 0  # E, whose intermediate size is `intermediate`; 0: an MLP
    chosen: int = 1  # k

    @property
    def query_width(self) -> int:
        """Return Q."""
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        """Return K."""
        return self.key_heads * self.head_size

    def layer_parameters(self, parts: int = 1) -> int:
        """Return A, of one GPU of a tensor-parallel group of `parts`."""
        projected = self.query_width + 2 * self.key_width
        matrices = self.hidden * (projected + self.query_width + 3 * self.intermediate * max(self.experts, 1))
        matrices += self.hidden * self.experts  # the router
        matrices += projected * self.projection_bias
        return matrices // parts + 2 * self.hidden + 2 * self.head_size * self.norms_heads

    def other_parameters(self, parts: int = 1) -> int:
        """Return R, of one GPU of a tensor-parallel group of `parts`.

        The group splits the head, not the embedding. Of a tied head it holds a part beside the whole embedding.
        """
        head = self.vocabulary * self.hidden // parts if parts > 1 or not self.tied else 0
        return self.vocabulary * self.hidden + head + self.hidden

    def parameters(self, parts: int = 1) -> int:
        """Return P."""
        return self.layers * self.layer_parameters(parts) + self.other_parameters(parts)

    def active_parameters(self) -> int:
        """Return the parameters that compute with one token."""
        idle = max(self.experts - self.chosen, 0) * 3 * self.intermediate
        return self.parameters() - self.layers * self.hidden * idle


def read_model(model: str) -> Sizes:
    """Return the sizes of a model of MODELS, of FAMILIES' default, or of a config.json.

    Raises:
        ValueError: neither a name nor a file; no JSON; a field is missing; another family than FAMILIES.
    """
    file = Path(model)
    if file.is_dir():
        file /= "config.json"
    if model in MODELS:
        family, config = MODELS[model]
    elif file.is_file():
        try:
            config = json.loads(file.read_text())
        except ValueError as error:
            raise ValueError(f"--model: got {file}, allowed: a config.json of transformers ({error})") from None
        family = config.get("model_type") if isinstance(config, dict) else None
    else:
        check_known("model", model, [*MODELS, *FAMILIES], "Models, or the path of a config.json")
        require("transformers")
        from transformers import AutoConfig

        family, config = model, AutoConfig.for_model(model).to_dict()
    check(family in FAMILIES, "--model", f"{model} of model_type {family}", f"model_type {', '.join(FAMILIES)}")
    for field in FIELDS:
        fits = isinstance(config.get(field), int) and config[field] > 0
        check(fits, "--model", f"{model} with {field} {config.get(field)}", f"a positive {field}")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    width, chosen = config["intermediate_size"], config.get("num_experts_per_tok") or 0
    if family in MIXTURES:
        width = config.get("moe_intermediate_size") or width
        dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
        check(not dense, "--model", f"{model} with layers without experts", "experts in every layer")
        fits = 0 < chosen <= experts
        check(fits, "--model", f"{model} with {experts} experts, {chosen} a token", "num_experts, num_experts_per_tok")
    return Sizes(
        hidden, width, config["num_hidden_layers"], heads,
        config.get("num_key_value_heads") or heads, config.get("head_dim") or hidden // heads, config["vocab_size"],
        config.get("tie_word_embeddings", False), family == "qwen2", family in ("qwen3", "qwen3_moe"),
        *((experts, chosen) if family in MIXTURES else ()),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A training run.

    Attributes:
        sizes: of the model.
        gpus: of all nodes.
        gpus_per_node: of one node; fewer if `gpus` are fewer.
        engine: one of ENGINES.
        parts: GPUs of a tensor-parallel group; 1 without one.
        provider: "liger_hw", the patched model, or "eager", plain Hugging Face.
        batch: sequences on one GPU; the GPUs of a tensor-parallel group have the same ones.
        seq: tokens of a sequence.
        checkpointing: of activations, each layer.
        mixed: fp32 parameters, gradients and states, bf16 layers; else all in bf16. ZeRO: fp32 copies and states,
            bf16 parameters and gradients.
    """

    sizes: Sizes
    gpus: int
    gpus_per_node: int
    engine: str
    parts: int
    provider: str
    batch: int
    seq: int
    checkpointing: bool
    mixed: bool
    optimizer: str
    offload: str | None

    @property
    def shards(self) -> int:
        """Return s."""
        return self.gpus // self.parts

    @property
    def tokens(self) -> int:
        """Return N."""
        return self.batch * self.seq


def make_run(
    model, gpus, gpus_per_node, parallel, provider, batch, seq, checkpointing, dtype, optimizer="adamw", offload=None
) -> PlannedRun:
    """Check the arguments of a command line and return the run.

    Args:
        model: as in `read_model`. parallel: one of ENGINES, or "tp:N", N GPUs with FSDP2 over the others.
        dtype: "mixed", "bf16", or None for the engine's own: bf16 under DDP, else mixed.
        optimizer: one of OPTIMIZERS. offload: one of OFFLOADS, what the host holds, or None.

    Raises:
        ValueError: an argument is unknown, or does not fit another.
    """
    sizes = read_model(model)
    engine, colon, number = parallel.partition(":")
    if engine == "tp":
        fits = number.isdecimal() and int(number) >= 2
        check(fits, "--parallel", parallel, "tp:N with N of at least 2")
        engine, parts = "fsdp2", int(number)
    else:
        check_known("plan", parallel, (*ENGINES, "tp:N"), "Plans of --parallel")
        parts = 1
    for name, value in (("batch", batch), ("seq", seq), ("gpus", gpus), ("gpus-per-node", gpus_per_node)):
        check(value >= 1, f"--{name}", value, "a positive integer")
    check(gpus <= 4096, "--gpus", gpus, "1 to 4096")
    per_node = min(gpus_per_node, gpus)
    check(gpus % per_node == 0, "--gpus", gpus, f"a multiple of {per_node}, the GPUs of a node (--gpus-per-node)")
    check(gpus % parts == 0, "--gpus", gpus, f"a multiple of {parts}, the GPUs of --parallel {parallel}")
    across = per_node % parts if parts <= per_node else parts % per_node
    check(not across, "--parallel", parallel, f"groups that fill nodes of {per_node} GPUs evenly (--gpus-per-node)")
    mixture = "a mixture of experts, which no formula covers"
    check(parts == 1 or not sizes.experts, "--parallel", f"{parallel} of {mixture}", "another")
    check(optimizer != "galore" or not sizes.experts, "--optimizer", f"galore of {mixture}", "another")
    for what in ("heads", "key_heads", "intermediate", "vocabulary"):
        size = getattr(sizes, what)
        label = what.replace("_", " ")
        check(size % parts == 0, "--parallel", parallel, f"a divisor of the model's {label}, {size:,}")
    dtype = dtype or ("bf16" if engine == "ddp" else "mixed")
    check_known("dtype", dtype, ("mixed", "bf16"))
    if engine != "fsdp2":
        only = "bf16" if engine == "ddp" else "mixed"
        why = "no formula covers torch.autocast" if engine == "ddp" else "DeepSpeed keeps fp32 copies"
        check(dtype == only, "--dtype", f"{dtype} with {engine}", f"{only}: {why}")
    check_known("provider", provider, PROVIDERS)
    check_known("optimizer", optimizer, OPTIMIZERS)
    check(engine == "ddp" or optimizer == "adamw", "--optimizer", f"{optimizer} with {engine}", f"{optimizer} with ddp")
    if offload is not None:
        check_known("offload", offload, OFFLOADS)
        allowed = ("zero2", "zero3") if offload == "optimizer" else ("zero3",)
        check(engine in allowed, "--offload", f"{offload} with {engine}", f"{offload} with {' or '.join(allowed)}")
    mixed = dtype == "mixed"
    return PlannedRun(
        sizes, gpus, per_node, engine, parts, provider, batch, seq, checkpointing, mixed, optimizer, offload
    )


# memory ---------------------------------------------------------------------------------------------------------------


def kept_bytes(run: PlannedRun) -> int:
    """Return the bytes that autograd keeps of one layer without checkpointing.

    The layer's input counts for liger_hw alone: eager keeps the fp32 copy of its norm instead.
    """
    sizes, parts = run.sizes, run.parts
    attention = 2 * 2 * (sizes.query_width + sizes.key_width) // parts
    ours = run.provider == OURS
    rows, mlp = (8 * sizes.hidden, 4) if ours else (16 * sizes.hidden, 8)
    kept = mlp * sizes.intermediate // parts
    if sizes.experts:
        kept = sizes.chosen * (kept + (12 if ours else 4 * sizes.hidden + 36)) + 4 * sizes.experts
    statistics = 4 * sizes.heads // parts + 2 * 4
    if sizes.norms_heads:
        attention += (2 if ours else 6) * (sizes.query_width + sizes.key_width) // parts
        statistics += 4 * (sizes.heads + sizes.key_heads) // parts
    return run.tokens * (rows + attention + kept + statistics)


def mlp_backward(run: PlannedRun) -> int:
    """Return the bytes of an MLP's or the experts' backward, beside the kept."""
    sizes, tokens, ours = run.sizes, run.tokens, run.provider == OURS
    hidden, width = sizes.hidden, sizes.intermediate // run.parts
    if not sizes.experts:
        in_work = tokens * (2 if ours else 4) * width + 2 * hidden * width
        if run.engine == "zero3" and ours:  # its hooks on the last projection need the input, which others recompute
            in_work += 2 * tokens * width
        return 2 * tokens * hidden + in_work
    pairs, gradient = tokens * sizes.chosen, 2 * sizes.experts * hidden * width
    if ours:
        in_work = 2 * pairs * hidden + max(2 * pairs * width + gradient, 3 * gradient)
    else:
        in_work = max(6 * pairs * hidden, 3 * gradient - 4 * pairs * width)
    return 2 * tokens * hidden + in_work


def state_bytes(run: PlannedRun) -> float:
    """Return the optimizer's bytes of one parameter, with DeepSpeed's fp32 copy."""
    if run.optimizer == "galore":
        return galore_bytes(run.sizes) / run.sizes.parameters()
    states = 2 + 2 * 4 / 256 if run.optimizer == "adamw8bit" else 2 * (4 if run.mixed else 2)
    return states + (4 if run.engine.startswith("zero") else 0)


def galore_bytes(sizes: Sizes) -> int:
    """Return the bytes of GaLore's states and projections of all parameters."""
    widths = [sizes.query_width] * 2 + [sizes.key_width] * 2 + [sizes.intermediate] * 3  # q, o, k, v, gate, up, down
    pairs = [sorted((width, sizes.hidden)) for width in widths]
    others = sizes.parameters() - sizes.layers * sum(small * large for small, large in pairs)
    return 4 * others + sizes.layers * sum(2 * RANK * small + 4 * RANK * large for small, large in pairs)


def host_bytes(run: PlannedRun) -> float:
    """Return the bytes of the host that one GPU's shards take."""
    sizes = {None: 0, "optimizer": state_bytes(run) + 2, "parameters": state_bytes(run) + 4}
    return sizes[run.offload] * run.sizes.parameters() / run.shards


def loss_layer(run: PlannedRun) -> int:
    """Return the bytes of the loss layer at its peak."""
    sizes, vocabulary, tokens = run.sizes, run.sizes.vocabulary // run.parts, run.tokens
    if run.provider == EAGER:
        return tokens * (12 * sizes.vocabulary + 8 * sizes.hidden)
    rows = chunk_rows(tokens, 2 * vocabulary, CHUNK_MEMORY, backends.ARCHITECTURES["nvidia:sm90"].device)
    weight = (6 if tokens > ROUNDINGS * rows else 2) * vocabulary * sizes.hidden
    return 2 * rows * vocabulary + weight + 6 * tokens * sizes.hidden


PARTS = (
    "parameters", "gradients", "optimizer", "unsharded and buffers", "kept activations", "layer in the backward",
    "loss layer", "workspace",
)  # fmt: skip


def moments(run: PlannedRun) -> dict[str, dict[str, float]]:
    """Return moment of a step -> part of PARTS -> bytes of one GPU."""
    sizes, parts, engine, ours = run.sizes, run.parts, run.engine, run.provider == OURS
    layer, other, every = sizes.layer_parameters(parts), sizes.other_parameters(parts), sizes.parameters(parts)
    zero3 = engine == "zero3"
    wide = 4 if run.mixed else 2
    states = 0 if run.offload else state_bytes(run) / run.shards
    if engine == "fsdp2":
        weights, gradient = wide / run.shards, wide / run.shards
    elif engine == "ddp":
        weights, gradient, states = 2, 2, state_bytes(run)
    else:
        weights = 2 if engine == "zero2" else 0 if run.offload == "parameters" else 2 / run.shards
        gradient = 0 if run.offload else 2 / run.shards
    resident = {"parameters": weights * every, "optimizer": states * every, "workspace": WORKSPACE}
    if zero3:
        resident["gradients"] = gradient * every
    fsdp = engine == "fsdp2"
    if engine == "ddp":
        buffers = 2 * every if run.gpus > 1 else 0
    elif fsdp:
        buffers = 2 * other
    elif zero3:
        buffers = 2 * min(BUCKET, every) + (2 * min(LIVE, every) if run.gpus > 1 or not weights else 0)
    else:
        buffers = 2 * 2 * min(BUCKET, every)
    hidden = 2 * run.tokens * sizes.hidden
    kept = hidden if run.checkpointing else kept_bytes(run)
    head_gradient = sizes.vocabulary // parts * sizes.hidden * 2
    in_work = mlp_backward(run)
    if run.checkpointing:
        in_work += kept_bytes(run) - (hidden if ours else 0)  # its input counts among the kept

    def at_layer(index):
        after = sizes.layers - 1 - index  # layers whose backward is over
        layer_buffers = 0
        if fsdp:
            layer_buffers = 2 * layer * (2 if index else 1) + (wide * layer if after else 0)
        gradients = resident.get("gradients", gradient * layer * after) + head_gradient
        return resident | {
            "gradients": gradient * every if engine == "zero2" else gradients,
            "unsharded and buffers": buffers + layer_buffers, "kept activations": kept * (index + 1),
            "layer in the backward": in_work,
        }  # fmt: skip

    step_buffers = 0 if fsdp or engine == "zero2" else buffers
    if run.optimizer == "galore":
        step_buffers += 4 * sizes.vocabulary * sizes.hidden
    prefetched = 2 * layer if fsdp and not ours else 0  # at the loss of eager the backward has begun
    last = sizes.layers - 1
    by_moment = {
        "loss": resident | {
            "unsharded and buffers": buffers + prefetched, "kept activations": kept * sizes.layers,
            "loss layer": loss_layer(run),
        },
        "backward of the last layer": at_layer(last), "backward of the second last layer": at_layer(max(last - 1, 0)),
        "backward of the first layer": at_layer(0),
        "optimizer": resident | {
            "gradients": gradient * every * (4 if engine == "zero2" else 1),  # flat and in fp32, too
            "unsharded and buffers": step_buffers,
        },
    }  # fmt: skip
    if fsdp:  # the gradients of the root in bf16, its reduce-scatter's input and output, and the embedding's gradient
        by_moment["reduce-scatter of embedding and head"] = resident | {
            "gradients": gradient * every, "unsharded and buffers": (2 + wide) * other,
            "layer in the backward": hidden,
        }  # fmt: skip
    return by_moment


def peak(run: PlannedRun) -> tuple[str, dict[str, float]]:
    """Return the moment of a step with the most memory, and its bytes by part."""
    every = moments(run)
    moment = max(every, key=lambda name: sum(every[name].values()))
    return moment, {part: every[moment].get(part, 0) for part in PARTS}


def longest(run: PlannedRun, memory: float) -> int:
    """Return the longest sequence that fits `memory` bytes with the reserve.

    It is a multiple of STEP, or 0 if none fits.
    """

    def fits(steps):
        return sum(peak(dataclasses.replace(run, seq=steps * STEP))[1].values()) + RESERVE <= memory

    low, high = 0, 1
    while high * STEP <= training.POSITIONS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * STEP


# time -----------------------------------------------------------------------------------------------------------------


def traffic(run: PlannedRun) -> dict[str, float]:
    """Return "shards" and "tensor parallel" -> bytes that one GPU sends in a step."""
    sizes, parts, shards = run.sizes, run.parts, run.shards
    layer, other, every = sizes.layer_parameters(parts), sizes.other_parameters(parts), sizes.parameters(parts)
    sharded_by_engine = {
        "fsdp2": 2 * (2 * layer * sizes.layers + other) + (4 if run.mixed else 2) * every,
        "ddp": 4 * every, "zero2": 4 * every, "zero3": 6 * every,
    }  # fmt: skip
    hidden = 2 * run.tokens * sizes.hidden
    reduced = 2 * hidden * (sizes.layers * (5 if run.checkpointing else 4) + 1)
    gathered = 0 if run.provider == OURS else 2 * run.tokens * sizes.vocabulary
    return {
        "shards": sharded_by_engine[run.engine] * (shards - 1) / shards,
        "tensor parallel": (reduced + gathered) * (parts - 1) / parts,
    }  # fmt: skip


def seconds(run: PlannedRun, nvlink: float, network: float, tflops: float) -> dict[str, float]:
    """Return the loss layer's time, and that of communication without overlap.

    Args:
        nvlink: GB/s that a GPU sends to others of its node. network: GB/s of a GPU's network card.
        tflops: rate of matrix products in 1e12 operations a second.
    """
    node, parts = run.gpus_per_node, run.parts
    sharing = max(node // parts, 1)  # GPUs of a group of shards in one node, whose cards one ring uses
    shards_rate = nvlink if run.gpus == node else min(nvlink, network * sharing)
    parts_rate = nvlink if parts <= node else min(nvlink, network * node)
    sent = traffic(run)
    sizes = run.sizes
    return {
        "loss": 6 * run.tokens * sizes.vocabulary * sizes.hidden / parts / (tflops * 1e12),
        "shards": sent["shards"] / (shards_rate * 1e9), "tensor parallel": sent["tensor parallel"] / (parts_rate * 1e9),
    }  # fmt: skip


# output ---------------------------------------------------------------------------------------------------------------


def report(run: PlannedRun, memory: float, nvlink: float, network: float, tflops: float) -> dict:
    """Return bytes of one GPU by part, and seconds of a step, as plain data.

    Args:
        memory: bytes of one GPU. nvlink, network, tflops: as in `seconds`.
    """
    for name, rate in (("memory", memory), ("nvlink", nvlink), ("network", network), ("tflops", tflops)):
        check(rate > 0, f"--{'gpu-memory' if name == 'memory' else name}", rate, "a positive number")
    moment, by_part = peak(run)
    total = sum(by_part.values()) + RESERVE
    return {
        "run": dataclasses.asdict(run), "moment": moment, "bytes": by_part | {"reserve": RESERVE},
        "peak_bytes": total - RESERVE, "total_bytes": total, "gpu_bytes": memory, "fits": total <= memory,
        "longest": longest(run, memory), "host_bytes": host_bytes(run), "sent_bytes": traffic(run),
        "seconds": seconds(run, nvlink, network, tflops),
    }  # fmt: skip


WITHOUT_LORA = (
    "This is full fine-tuning. LoRA takes less, and is not planned: measure it by `liger-hw bench train MODEL --lora`."
)
SMALLER = "--recipe, with a number of GPUs, lists the steps that save memory, and the first that fits."


def show(planned: dict) -> str:
    """Format a `report` as text."""
    sizes, run = Sizes(**planned["run"]["sizes"]), planned["run"]
    rows = [[part, f"{amount / GIB:,.2f}"] for part, amount in planned["bytes"].items() if amount]
    rows.append(["total", f"{planned['total_bytes'] / GIB:,.2f} of {planned['gpu_bytes'] / GIB:,.1f}"])
    times = planned["seconds"]
    active = f", {sizes.active_parameters() / 1e9:,.2f} for a token" if sizes.experts else ""
    lines = [
        f"{sizes.parameters() / 1e9:,.2f} billion parameters{active}, {run['batch']} x {run['seq']:,} tokens "
        f"on each of {run['gpus']:,} GPUs, {run['provider']}",
        "", table(["memory of one GPU", "GiB"], rows), "",
        f"{'fits' if planned['fits'] else 'does not fit'}; peak: {planned['moment']}",
        f"longest sequence that fits: {planned['longest']:,} tokens",
        f"loss layer: {times['loss'] * 1e3:,.1f} ms of matrix products a step",
    ]  # fmt: skip
    if planned["host_bytes"]:
        lines.append(f"host: {planned['host_bytes'] / GIB:,.1f} GiB for each GPU")
    for name, label in (("shards", "shards and gradients"), ("tensor parallel", "tensor parallelism")):
        if planned["sent_bytes"][name]:
            sent = planned["sent_bytes"][name] / 1e9
            lines.append(f"{label}: {sent:,.1f} GB sent a step, {times[name] * 1e3:,.1f} ms without overlap")
    if not planned["fits"]:
        lines.append(SMALLER if run["checkpointing"] else f"Try --checkpointing. {SMALLER}")
    return "\n".join([*lines, *([WITHOUT_LORA] if run["gpus"] == 1 else [])])


STEPS = (  # each step's name, and its options; the cheapest first
    ("plain, DDP, all in bf16", {"provider": EAGER, "parallel": "ddp"}),
    ("kernels", {"parallel": "ddp"}),
    ("checkpointing", {"parallel": "ddp", "checkpointing": True}),
    ("ZeRO-2, fp32 states", {"parallel": "zero2"}),
    ("ZeRO-2, checkpointing", {"parallel": "zero2", "checkpointing": True}),
    ("ZeRO-3", {"parallel": "zero3", "checkpointing": True}),
    ("FSDP2, fp32 states", {"parallel": "fsdp2", "checkpointing": True}),
    ("FSDP2, all in bf16", {"parallel": "fsdp2", "checkpointing": True, "dtype": "bf16"}),
    ("GaLore, DDP", {"parallel": "ddp", "checkpointing": True, "optimizer": "galore"}),
    ("8-bit optimizer, DDP", {"parallel": "ddp", "checkpointing": True, "optimizer": "adamw8bit"}),
    ("optimizer on the host", {"parallel": "zero3", "checkpointing": True, "offload": "optimizer"}),
    ("parameters, too", {"parallel": "zero3", "checkpointing": True, "offload": "parameters"}),
)


def recipe(model, gpus, gpus_per_node, batch, seq, memory: float) -> list[dict]:
    """Compute the memory and traffic of every step of STEPS, against `memory` bytes."""
    rows, mixture = [], read_model(model).experts
    for name, options in STEPS:
        if mixture and options.get("optimizer") == "galore":
            continue
        settings = {"provider": OURS, "checkpointing": False, "dtype": None} | options
        run = make_run(model, gpus, gpus_per_node, batch=batch, seq=seq, **settings)
        total = sum(peak(run)[1].values()) + RESERVE
        rows.append({
            "step": name, "options": options, "total_bytes": total, "host_bytes": host_bytes(run),
            "sent_bytes": traffic(run)["shards"], "longest": longest(run, memory), "fits": total <= memory,
        })  # fmt: skip
    return rows


def show_recipe(rows: list[dict]) -> str:
    """Format the rows of `recipe` as text, and name the first that fits."""
    lines = [
        [
            row["step"], f"{row['total_bytes'] / GIB:,.1f}", f"{row['host_bytes'] / GIB:,.1f}",
            f"{row['sent_bytes'] / 1e9:,.1f}", "yes" if row["fits"] else "no", f"{row['longest']:,}",
        ]
        for row in rows
    ]  # fmt: skip
    header = ["step", "GiB of a GPU", "of the host", "GB sent", "fits", "longest sequence"]
    fitting = next((row["options"] for row in rows if row["fits"]), None)
    words = [f"--{name}" + ("" if value is True else f" {value}") for name, value in (fitting or {}).items()]
    last = "the first that fits: " + " ".join(words) if fitting else "no step fits: more GPUs, or fewer tokens"
    return f"{table(header, lines)}\n\n{last}"


def launch(run: PlannedRun, launcher: str) -> str:
    """Return the configuration or the command of a launcher.

    Raises:
        ValueError: the launcher has no configuration for this engine.
    """
    check_known("launcher", launcher, LAUNCHERS)
    nodes = run.gpus // run.gpus_per_node
    zero = run.engine.startswith("zero")
    if launcher == "torchrun":
        several = f" --nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500" if nodes > 1 else ""
        return f"torchrun --nproc-per-node {run.gpus_per_node}{several} train.py"
    if launcher == "deepspeed":
        check(zero, "--print", f"deepspeed with {run.engine}", "deepspeed with --parallel zero2 or zero3")
        return json.dumps(_deepspeed(run), indent=1)
    check(run.parts == 1, "--print", f"accelerate with tp:{run.parts}", "torchrun with tensor parallelism")
    kinds = {"fsdp2": "FSDP", "ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
    kind = "'NO'" if run.gpus == 1 and run.engine == "ddp" else kinds[run.engine]
    lines = ["compute_environment: LOCAL_MACHINE", f"distributed_type: {kind}"]
    if run.engine == "fsdp2":
        lines += [
            "fsdp_config:", "  fsdp_version: 2", "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            "  fsdp_reshard_after_forward: true", f"  fsdp_activation_checkpointing: {str(run.checkpointing).lower()}",
        ]  # fmt: skip
    elif zero:
        stage = run.engine[-1]
        lines += ["deepspeed_config:", "  gradient_accumulation_steps: 1", f"  zero_stage: {stage}"]
        moved = {None: (), "optimizer": ("optimizer",), "parameters": ("optimizer", "param")}[run.offload]
        lines += [f"  offload_{name}_device: cpu" for name in moved]
    precision = "bf16" if run.mixed else "'no'"  # a model in bf16 needs no autocast; YAML reads a bare no as false
    lines.append(f"mixed_precision: {precision}")
    if nodes > 1:
        lines += ["machine_rank: 0", "main_process_ip: HOST", "main_process_port: 29500"]
    return "\n".join([*lines, f"num_machines: {nodes}", f"num_processes: {run.gpus}"])


def _deepspeed(run: PlannedRun) -> dict:
    zero = {"stage": int(run.engine[-1]), "overlap_comm": True, "reduce_bucket_size": BUCKET}
    if run.engine == "zero3":
        zero |= {"stage3_max_live_parameters": LIVE}
    if run.offload:
        zero |= {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    if run.offload == "parameters":
        zero |= {"offload_param": {"device": "cpu", "pin_memory": True}}
    return {
        "train_micro_batch_size_per_gpu": run.batch, "gradient_accumulation_steps": 1,
        "zero_optimization": zero, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def detected_memory() -> float | None:
    """Return the bytes of the first accelerator's memory, or None without one."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return getattr(torch, kind.type).get_device_properties(0).total_memory if kind else None


# against measurements -------------------------------------------------------------------------------------------------


def run_from_record(record: dict) -> PlannedRun:
    """Return the run of a record of `bench train` or `bench distributed`.

    `bench train` runs on one GPU, all in bf16.
    """
    sharded = "engine" in record
    return make_run(
        record["model"], record.get("gpus", 1), 8, record["engine"] if sharded else "ddp", record["provider"],
        record["batch"], record["seq"], sharded or record["checkpointing"], "mixed" if sharded else "bf16",
        record.get("optimizer", OPTIMIZERS[0]), record.get("offload"),
    )  # fmt: skip


def against(results: list[dict]) -> list[dict]:
    """Add predicted bytes to the records of benchmarks that the formulas cover.

    Args:
        results: records of `bench train` and `bench distributed`.

    Records of other models, engines, losses, libraries and options, and without a peak are left out. `bench train`
    measures parameters, states and a step's allocations, so its prediction is without WORKSPACE. A later record of a
    run replaces an earlier one.
    """
    compared = {}
    for record in results:
        covered = record["model"] in MODELS and record["provider"] in PROVIDERS
        covered &= record.get("engine", ENGINES[0]) in ENGINES
        covered &= record.get("optimizer", OPTIMIZERS[0]) in OPTIMIZERS
        covered &= "engine" in record or not record.get("offload")
        covered &= not any(record.get(name) for name in OUTSIDE)
        if covered and record.get("peak_bytes"):
            run = run_from_record(record)
            moment, by_part = peak(run)
            predicted = sum(by_part.values()) - (0 if "engine" in record else WORKSPACE)
            compared[run, "engine" in record] = record | {"predicted_bytes": predicted, "moment": moment}
    return list(compared.values())


def show_against(compared: list[dict]) -> str:
    """Format the records of `against` as text."""
    rows = [
        [
            record["model"], f"{record['gpus']}, {record['engine']}" if "engine" in record else "1",
            f"{record['batch']} x {record['seq']:,}", record["provider"],
            f"{record['predicted_bytes'] / GIB:.2f}", f"{record['peak_bytes'] / GIB:.2f}",
            f"{record['predicted_bytes'] / record['peak_bytes'] - 1:+.1%}", record["moment"],
        ]
        for record in compared
    ]  # fmt: skip
    return table(["model", "GPUs", "tokens", "provider", "predicted GiB", "measured", "miss", "peak"], rows)
