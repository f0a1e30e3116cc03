"""Check that alike.py passes another order of sums and catches small mistakes."""

import contextlib

import alike
import compare
import pytest
import tiny
import torch
from torch.overrides import TorchFunctionMode

F = torch.nn.functional
FAMILIES = ["llama", "opt", "nemotron", "phi", "gpt_oss"]


class OtherOrder(TorchFunctionMode):
    """Every linear layer sums over its columns backwards, and its gradient over its rows."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, *bias = args
            return F.linear(x.flip(-2, -1), weight.flip(-1), *bias).flip(-2)
        return function(*args, **(kwargs or {}))


def run(model):
    return tiny.call(model, **tiny.tokens())


def share(plain, patched):
    """The larger of the differences of the losses and of the gradients."""
    reference, found = alike.Reference(plain, run), alike.step(patched, run)
    return max(reference.loss(found.outputs.loss), reference.gradients(found.gradients)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_another_order_of_sums_is_no_mistake(family):
    plain = tiny.model(family)
    with OtherOrder():
        other = alike.step(plain, run)
    reference = alike.Reference(plain, run)
    assert not torch.equal(other.gradients[0], reference.step.gradients[0])
    assert max(reference.loss(other.outputs.loss), reference.gradients(other.gradients)[0]) < 0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gradient_scaled_by_a_thousandth_is_a_mistake(family):
    plain, patched = tiny.pair(family)
    reference = alike.Reference(plain, run)
    found = alike.step(patched, run).gradients
    cancels = [name for name in reference.names if name.endswith("k_proj.bias")] if family == "opt" else []
    for i, name in enumerate(reference.names):
        wrong = [g * 1.001 if i == j else g for j, g in enumerate(found)]
        assert (reference.gradients(wrong)[0] > 1) == (name not in cancels), name


def test_a_gradient_that_is_missing_zero_or_not_a_number_is_a_mistake():
    plain, patched = tiny.pair("opt")
    reference, found = alike.Reference(plain, run), alike.step(patched, run).gradients
    for i, name in enumerate(reference.names):
        for wrong in (None, found[i] * float("nan"), torch.zeros_like(found[i])):
            worst = reference.gradients([*found[:i], wrong, *found[i + 1 :]])
            zero = name.endswith("k_proj.bias") and wrong is not None and not wrong.any()
            assert zero or worst[0] > 1 and worst[1] == name
    assert not reference.loss(torch.tensor(float("nan"))) <= 1


def eps_of_one_norm(model):
    assert model.model.layers[0].input_layernorm.variance_epsilon == 1e-6
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-5


def a_rounded_norm(model):
    model.model.norm.register_forward_hook(lambda module, args, out: out.half().float())


def scale_of_the_logits(model):
    model.lm_head.weight.data *= 1.0001


def rotation_one_further(model):
    model.model.rotary_emb.inv_freq[-1] *= 1.03


def no_bias(model):
    model.model.layers[0].self_attn.v_proj.bias.data.zero_()


def one_weight(model):
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3


@pytest.mark.parametrize("family, mistake", [
    ("llama", eps_of_one_norm), ("llama", a_rounded_norm), ("llama", scale_of_the_logits),
    ("llama", rotation_one_further), ("qwen2", no_bias), ("llama", one_weight),
])  # fmt: skip
def test_a_small_mistake_is_noticed(family, mistake):
    plain, patched = tiny.pair(family)
    assert share(plain, patched) < 0.5
    mistake(patched)
    assert share(plain, patched) > 1


def test_rounding_elsewhere_is_noticed_where_a_model_rounds():
    """A norm that multiplies before it rounds is equal in fp32 and differs in bf16."""
    plain, patched = tiny.pair(dtype=torch.bfloat16)
    assert not compare.round_alike(plain, patched, tiny.tokens())
    norm = patched.model.norm
    norm.forward = lambda x: F.rms_norm(x.float(), x.shape[-1:], norm.weight.float(), norm.variance_epsilon).to(x)
    assert compare.round_alike(plain, patched, tiny.tokens()) == ["model.norm"]


def test_weights_come_back():
    model = tiny.model()
    before = [p.clone() for p in model.parameters()]
    with contextlib.suppress(ValueError), alike.moved_weights(model):
        moved = [p.clone() for p in model.parameters()]
        raise ValueError
    for p, b, m in zip(model.parameters(), before, moved):
        assert torch.equal(p, b) and ((m - b).abs() <= 2 * alike.EPS * b.abs()).all() and (m != b).float().mean() > 0.9
