"""Adapters on two ranks learn as the plain model on one device; those of ZeRO-3 are in test_deepspeed.py."""

import functools
from unittest import mock

import pytest
import tiny
import torch
from engines import accelerate_fsdp2, ddp, fsdp2, learn_alike
from old_torch import shards_integers
from quantised import in_4_bits, in_8_bits
from ranks import device

from liger_hw._triton import interpreting
from liger_hw.kernels.linear.lora_linear import lora_linear_group
from liger_hw.patching import projection, shared_inputs

peft = pytest.importorskip("peft", reason="the package peft is not installed")

BASES = {"plain": lambda model: model, "8 bits": in_8_bits, "4 bits": in_4_bits}
ENGINES = {"ddp": ddp, "fsdp2": fsdp2, "accelerate": accelerate_fsdp2}
BACKENDS = [None, "triton"] if interpreting() else [None]


def adapt(model, base="plain"):
    """Adapters of every projection, of ranks that let query, key and value, and gate and up, share a gradient."""
    model = BASES[base](model)
    if base != "plain":
        model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    options = {"target_modules": "all-linear", "init_lora_weights": False, "rank_pattern": {"k_proj": 3}}
    torch.manual_seed(0)  # PEFT draws the adapters, on each rank by itself
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **options))


def learn_in_groups(engine, forced, quantised=None, **options):
    has_kernels = (forced is not None or device().type != "cpu") and quantised != "8 bits"
    sizes = set()

    def counted(x, *layers):
        sizes.add(len(layers))
        return lora_linear_group(x, *layers)

    with (
        mock.patch.object(projection, "lora_linear_group", counted),
        mock.patch.object(shared_inputs, "lora_linear_group", counted),
    ):
        learn_alike(engine, num_hidden_layers=1, **options)
    assert bool(sizes) == has_kernels and sizes <= {2, 3}


@pytest.mark.parametrize("checkpointed", [None, False, pytest.param(True, marks=tiny.fails_in_4)])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("forced", BACKENDS)
def test_groups_of_layers(forced, engine, checkpointed, ranks):
    ranks(
        2, functools.partial(learn_in_groups, ENGINES[engine], forced, change=adapt, checkpointed=checkpointed),
        backend=forced,
    )  # fmt: skip


@pytest.mark.parametrize("base", ["4 bits", "8 bits"])
@pytest.mark.parametrize("forced", BACKENDS)
def test_quantised_layers(forced, base, ranks):
    change = functools.partial(adapt, base=base)
    ranks(2, functools.partial(learn_in_groups, ddp, forced, base, change=change), backend=forced)


@shards_integers
def test_layers_of_8_bits_in_shards(ranks):
    change = functools.partial(adapt, base="8 bits")
    ranks(2, functools.partial(learn_in_groups, fsdp2, None, "8 bits", change=change))
