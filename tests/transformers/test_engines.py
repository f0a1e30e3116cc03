"""Patched models under DDP, FSDP1 and FSDP2 learn as the plain model on one device."""

import functools

import pytest
import torch
from engines import (
    PLANS,
    accelerate_fsdp2,
    ddp,
    fsdp1,
    fsdp2,
    labels_of_one_batch,
    learn_alike,
    learn_alike_in_bf16,
    learn_the_same_with_planned_activations,
)
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy

UNITS = {"head": ("lm_head",), "norm with head": ("model.norm", "lm_head")}
TIED = {"tie_word_embeddings": True}
ENGINES = {"ddp": ddp, "fsdp1": fsdp1, "fsdp2": fsdp2, "accelerate": accelerate_fsdp2}
PRECISION = {
    "ddp": {"autocast": True},
    "fsdp1": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "fsdp2": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "accelerate": {
        "mixed_precision_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    },
}


@pytest.fixture
def check(ranks):
    """Run `learn_alike` on two ranks with an engine and its options."""

    def run(engine, options=None, **of_check):
        ranks(2, functools.partial(learn_alike, functools.partial(engine, **(options or {})), **of_check))

    return run


def test_ddp(check):
    check(ddp)


def test_ddp_that_finds_unused_parameters(check):
    check(ddp, {"find_unused_parameters": True}, **TIED)


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("config", [{}, TIED], ids=["untied", "tied"])
def test_fsdp2_with_the_head_in_the_root(layers, config, check):
    check(fsdp2, {"layers": layers}, **config)


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("unit", UNITS)
def test_fsdp2_with_the_head_in_a_unit(unit, reshard, check):
    check(fsdp2, {"unit": UNITS[unit], "reshard": reshard})


def test_fsdp2_with_the_embedding_in_the_head_s_unit(check):
    check(fsdp2, {"unit": ("model.embed_tokens", "lm_head"), "reshard": True}, **TIED)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("engine", [fsdp2, ddp])
def test_planned_activations(engine, plan, ranks):
    ranks(2, learn_the_same_with_planned_activations, engine, *PLANS[plan])


@pytest.mark.parametrize("unit", UNITS)
def test_fsdp2_evaluates_between_backward_and_step(unit, check):
    check(fsdp2, {"unit": UNITS[unit], "reshard": True}, evaluate=True)


@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("policy", [None, "layers"])
def test_fsdp1(policy, original, check):
    check(fsdp1, {"policy": policy, "use_orig_params": original})


def test_fsdp1_with_a_tied_head(check):
    check(fsdp1, **TIED)


def test_fsdp1_that_wraps_the_head_alone(check):
    check(fsdp1, {"policy": "head"})


@pytest.mark.parametrize("engine", ENGINES)
def test_divisor_of_all_ranks(engine, check):
    """`num_items_in_batch` as a tensor, two batches a step, one rank without a label."""
    check(ENGINES[engine], counted=True, of_rank=labels_of_one_batch)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_checkpointing(engine, reentrant, check):
    check(ENGINES[engine], checkpointed=reentrant)


@pytest.mark.parametrize("engine", PRECISION)
def test_bf16_with_fp32_weights(engine, ranks):
    ranks(2, learn_alike_in_bf16, ENGINES[engine], PRECISION[engine])


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="FSDP1 pins memory, for which torch needs a device")
def test_fsdp1_with_offloading(check):
    check(fsdp1, {"cpu_offload": CPUOffload(offload_params=True)})


@pytest.mark.parametrize("engine, option", [(fsdp2, "offload_policy"), (accelerate_fsdp2, "cpu_offload")])
def test_fsdp2_with_offloading(engine, option, check):
    check(engine, {option: CPUOffloadPolicy(pin_memory=torch.accelerator.is_available())})


@pytest.mark.parametrize("config", [{}, TIED], ids=["untied", "tied"])
def test_fsdp2_of_accelerate(config, check):
    check(accelerate_fsdp2, **config)


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False))


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_lora_of_the_head(engine, check):
    check(ENGINES[engine], change=with_lora, hidden_size=32)


def with_two_adapters(model):
    """Adapters of every projection, with biases and of a rank above 64; both are active."""
    from peft import LoraConfig, get_peft_model

    options = dict(target_modules="all-linear", lora_bias=True, init_lora_weights=False)
    model = get_peft_model(model, LoraConfig(r=70, **options))
    model.add_adapter("second", LoraConfig(r=3, **options))
    model.base_model.set_adapter(["default", "second"])
    return model


@pytest.mark.parametrize("checkpointed", [None, False])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_lora_layers(engine, checkpointed, check):
    check(ENGINES[engine], change=with_two_adapters, checkpointed=checkpointed)
