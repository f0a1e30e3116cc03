"""Weights that change within one block of autocast, which keeps its first casts of them until the block ends."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import tiny
import torch

import liger_hw
from liger_hw.dispatch import autocast_as, kept_casts, uncast

peft = pytest.importorskip("peft", reason="the package peft is not installed")

LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
LAYERS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
MODELS = {
    "tied": ({"tie_word_embeddings": True}, None),
    "with biases": ({"mlp_bias": True}, None),
    "LoRA": ({}, {"target_modules": LAYERS}),
    "LoRA with dropout": ({}, {"target_modules": LAYERS, "lora_dropout": 0.3}),
    "DoRA": ({}, {"target_modules": LAYERS, "use_dora": True}),
    "LoRA of the head": ({}, {"target_modules": ["o_proj", "lm_head"]}),
    "LoRA beside a trained head": ({}, {"target_modules": LAYERS, "modules_to_save": ["lm_head"]}),
}


def pair(name):
    options, lora = MODELS[name]
    plain = tiny.model("llama", num_hidden_layers=1, **options)
    if lora is not None:
        torch.manual_seed(0)
        plain = peft.get_peft_model(plain, peft.LoraConfig(**LORA | lora))
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    return plain, patched


def step(model):
    """Return the loss, the logits and the gradients."""
    model.zero_grad()
    device = next(model.parameters()).device
    out = tiny.call(model, **{name: x.to(device) for name, x in tiny.tokens().items()})
    out.loss.backward()
    return [out.loss.detach(), out.logits.detach() * 1, *(p.grad for p in model.parameters() if p.requires_grad)]


def two_steps(model, before=contextlib.nullcontext, **autocast):
    """Return results of a step after all weights changed, of which another step, after `before`, had casts made."""
    trained = [p for p in model.parameters() if p.requires_grad]
    device = trained[0].device
    with torch.autocast(device.type, torch.bfloat16, **autocast):
        with before():
            tiny.call(model, input_ids=tiny.tokens()["input_ids"].to(device))
        step(model)
        for p in trained:
            p.grad = 7.5 * p.detach()
        torch.optim.SGD(trained, lr=0.2, fused=True).step()  # writes -p / 2, and changes no version number
        return step(model)


def assert_alike(found, expected):
    for x, y in zip(expected, found, strict=True):
        assert (y - x).norm() <= 0.1 * x.norm()  # a fresh cast is 150% off, gradients of LoRA in bf16 4%


@pytest.mark.parametrize("before", [contextlib.nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", MODELS)
def test_casts_of_a_block_stay(name, before):
    plain, patched = pair(name)
    assert_alike(two_steps(patched, before), two_steps(plain, before))


@pytest.mark.parametrize("name", ["with biases", "LoRA", "DoRA", "LoRA of the head"])
def test_casts_of_a_block_stay_with_kernels(name, backend, device):
    plain, patched = (model.to(device) for model in pair(name))
    with liger_hw.use_backend(backend):
        assert_alike(two_steps(patched), two_steps(plain))


def test_contexts_in_another_thread_drop_no_casts():
    """On a GPU autograd runs a backward in a thread of its own, with the state of autocast."""
    weight = torch.randn(4, 4, requires_grad=True)

    def backward():
        torch.set_autocast_enabled("cpu", True)
        with uncast(weight):
            assert not torch.is_autocast_enabled("cpu")
        with autocast_as("cpu", torch.float16):
            assert torch.get_autocast_dtype("cpu") == torch.float16
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16

    with torch.autocast("cpu", torch.bfloat16), ThreadPoolExecutor() as threads:
        (kept,) = kept_casts(weight)
        threads.submit(backward).result()
        assert kept_casts(weight)[0].data_ptr() == kept.data_ptr()


def test_casts_of_a_context_do_not_outlive_it():
    weight = torch.ones(4, 4, requires_grad=True)
    with autocast_as("cpu", torch.bfloat16):
        torch.nn.functional.linear(weight, weight)
    weight.data.fill_(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert kept_casts(weight)[0].eq(2).all()


def test_casts_that_autocast_does_not_keep():
    plain, patched = pair("tied")
    assert_alike(two_steps(patched, cache_enabled=False), two_steps(plain, cache_enabled=False))


def test_logits_of_before_a_step_under_autocast():
    """The head keeps its cast, so a later write to the weight changes nothing."""
    results = []
    for model in pair("tied"):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(input_ids=tiny.tokens()["input_ids"])
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        results.append([out.logits * 1])
    assert_alike(*reversed(results))
