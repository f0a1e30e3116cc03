"""Patched models under tensor parallelism have the losses and gradients of the unpatched, unsharded model."""

import copy

import alike
import pytest
import tiny
import torch
import transformers
from old_torch import gathers_strided_shards
from packaging.version import Version
from ranks import device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import liger_hw
from liger_hw._triton import interpreting

BACKENDS = ["nvidia"] if interpreting() else [None]
VERSION = Version(transformers.__version__)


def tokens():
    return {name: x.to(device()) for name, x in tiny.tokens(length=10).items()}


def plan(layers, sequence_parallel):
    shard = Shard(1)
    plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
    if sequence_parallel:
        plan = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=shard),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=shard, output_layouts=Replicate()),
        }
    for i in range(layers):
        of_layer = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        of_layer |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        ends = {"output_layouts": shard} if sequence_parallel else {}
        of_layer |= {name: RowwiseParallel(**ends) for name in ("self_attn.o_proj", "mlp.down_proj")}
        if sequence_parallel:
            of_layer |= {name: SequenceParallel() for name in ("input_layernorm", "post_attention_layernorm")}
            of_layer["mlp"] = PrepareModuleInput(input_layouts=(shard,), desired_input_layouts=(Replicate(),))
            of_layer["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": shard},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        plan |= {f"model.layers.{i}.{name}": style for name, style in of_layer.items()}
    return plan


def step(model, inputs):
    """The training step of a sharded model, with whole gradients."""
    found = alike.step(model, lambda model: tiny.call(model, **inputs))
    gradients = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found.gradients]
    return alike.Step(found.outputs, gradients)


def assert_same_without_logits(reference, found):
    reference.assert_same(found)
    with pytest.raises(RuntimeError, match="whose head is sharded, computes its loss without logits"):
        found.outputs.logits.sum()


def learn_alike_by_a_plan(sequence_parallel, patch_first):
    mesh = init_device_mesh(device().type, (torch.distributed.get_world_size(),))
    inputs = tokens()
    inputs["position_ids"] = torch.arange(10, device=device())[None]  # else transformers counts a rank's part
    plain = tiny.model(num_hidden_layers=1).to(device())
    reference = alike.Reference(plain, lambda model: tiny.call(model, **inputs))
    model = copy.deepcopy(plain)
    if patch_first:
        liger_hw.patch(model)
    parallelize_module(model, mesh, plan(len(model.model.layers), sequence_parallel))
    if not patch_first:
        liger_hw.patch(model)
    assert_same_without_logits(reference, step(model, inputs))


@pytest.mark.parametrize("patch_first", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("forced", BACKENDS)
def test_plans_of_torch(sequence_parallel, patch_first, forced, ranks):
    if sequence_parallel and VERSION < Version("5"):
        pytest.skip("transformers 4.57 makes a mask of the rank's part of the sequence, unpatched too")
    ranks(2, learn_alike_by_a_plan, sequence_parallel, patch_first, backend=forced)


def learn_alike_by_auto(folder):
    inputs = tokens()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).train().to(device())
    reference = alike.Reference(plain, lambda model: tiny.call(model, **inputs))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").train()
    assert isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor), "the model is not sharded"
    liger_hw.patch(model)
    assert_same_without_logits(reference, step(model, inputs))
    whole = tiny.call(model, **inputs, skip_logits=False).logits
    torch.testing.assert_close(whole, reference.step.outputs.logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "family", [*("llama", "qwen3", "gemma3_text"), pytest.param("mixtral", marks=gathers_strided_shards)]
)
@pytest.mark.parametrize("forced", BACKENDS)
def test_plans_of_transformers(family, forced, ranks, tmp_path):
    if VERSION < Version("5.16"):
        pytest.skip(
            "transformers 5.6 and older leave the head whole and shard into plain tensors; 4.57 adds up no gradients "
            "of norms of heads, unpatched too"
        )
    tiny.model(family, num_hidden_layers=1).save_pretrained(tmp_path)
    ranks(2, learn_alike_by_auto, str(tmp_path), backend=forced)
