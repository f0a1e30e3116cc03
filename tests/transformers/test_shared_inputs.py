"""Query, key and value with adapters compute together, only where that gives what each gives alone."""

import threading
import weakref

import pytest
import tiny
import torch
from quantised import in_4_bits

import liger_hw
from liger_hw.patching import lora, shared_inputs
from liger_hw.patching.shared_inputs import Sharing, groups_in

peft = pytest.importorskip("peft", reason="the package peft is not installed")

NAMES = ("q_proj", "k_proj", "v_proj")


def model(family="llama", change=lambda attention: None, **options):
    """A model in fp16 with adapters in fp32; `change` gets its second attention."""
    config = peft.LoraConfig(**{"target_modules": "all-linear", "r": 4, "init_lora_weights": False} | options)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(tiny.model(family, torch.float16), config)
    for name, parameter in wrapped.named_parameters():
        parameter.data = parameter.data.float() if "lora" in name else parameter.data / 4
    change(wrapped.base_model.model.model.layers[1].self_attn)
    return wrapped


def step(wrapped, device, recomputes=False):
    if recomputes:
        wrapped.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = {name: ids.to(device) for name, ids in tiny.tokens(length=9).items()}
    torch.manual_seed(1)
    loss = wrapped(**inputs).loss
    (1024 * loss).backward()  # fp16
    return {"loss": loss.detach()} | {name: p.grad for name, p in wrapped.named_parameters() if p.requires_grad}


@pytest.fixture
def groups(monkeypatch):
    """The sizes of groups that compute together."""
    sizes, compute = [], shared_inputs.lora_linear_group
    monkeypatch.setattr(
        shared_inputs, "lora_linear_group", lambda x, *layers: sizes.append(len(layers)) or compute(x, *layers)
    )
    return sizes


def second_adapter(attention):
    torch.manual_seed(4)
    for name in NAMES:
        layer = getattr(attention, name)
        layer.update_layer("second", r=3, lora_alpha=5, config=peft.LoraConfig(init_lora_weights=False))
        layer.set_adapter(["default", "second"])


def halve(module, args):
    return args[0] / 2


# state -> options of the adapter, change of the second attention, whether it shares its input's gradient
STATES = {
    "one adapter": ({}, lambda attention: None, True),
    "scaled": ({}, lambda attention: attention.k_proj.scale_layer(3), True),
    "frozen factors": ({}, lambda attention: attention.v_proj.lora_A.requires_grad_(False), True),
    "two adapters": ({}, second_adapter, False),
    "bias": ({"lora_bias": True}, lambda attention: None, False),
    "dropout": ({"lora_dropout": 0.2}, lambda attention: None, False),
    "DoRA": ({"use_dora": True}, lambda attention: None, False),
    "large ranks": ({"r": 24}, lambda attention: None, False),
    "disabled": ({}, lambda attention: attention.k_proj.enable_adapters(False), False),
    "merged": ({}, lambda attention: attention.q_proj.merge(), False),
    "trained weight": ({}, lambda attention: attention.v_proj.base_layer.weight.requires_grad_(), False),
    "a hook": ({}, lambda attention: attention.k_proj.register_forward_hook(lambda module, args, y: 2 * y), False),
    "a hook of the first": ({}, lambda attention: attention.q_proj.register_forward_pre_hook(halve), False),
    "no adapter on v": ({"target_modules": ["q_proj", "k_proj"]}, lambda attention: None, False),
}  # fmt: skip
WAYS = [(state, False) for state in STATES] + [("one adapter", True), ("dropout", True)]


@pytest.mark.parametrize("state, recomputes", WAYS)
def test_attention(state, recomputes, groups, backend, device):
    options, change, is_shared = STATES[state]
    plain, patched = (model(change=change, **options).to(device) for _ in range(2))
    liger_hw.patch(patched)
    with liger_hw.use_backend(backend):
        expected, found = (step(wrapped, device, recomputes) for wrapped in (plain, patched))
    # checkpointed inputs of the first layer need gradients, too
    assert groups == [3] * is_shared * (4 if recomputes else 1)
    # biases make the gradients of q small differences: on an H100 plain's are 0.024 from float64's, in fp16
    share = 0.08 if state == "bias" else 0.02
    for name, y in expected.items():
        assert found[name] is y is None or (found[name] - y).abs().max() <= share * y.abs().max(), name


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3_text"])
def test_families(family, groups, backend, device):
    patched = model(family).to(device)
    liger_hw.patch(patched)
    with liger_hw.use_backend(backend):
        step(patched, device)
    assert groups == [3]


@pytest.mark.parametrize(
    "part, change", [("lora_A", lambda w: w[0]), ("lora_A", lambda w: w[:2]), ("lora_B", lambda w: w[:5])]
)
def test_factors_that_do_not_fit_are_plains_error(part, change, backend, device):
    messages = []
    for patches in (False, True):
        wrapped = model().to(device)
        if patches:
            liger_hw.patch(wrapped)
        factor = getattr(wrapped.base_model.model.model.layers[1].self_attn.k_proj, part)["default"].weight
        factor.data = change(factor.data).clone()
        with liger_hw.use_backend(backend), pytest.raises(RuntimeError) as error:
            step(wrapped, device)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


CHANGES = {
    "scaling": lambda key, x: key.scale_layer(3),
    "adapter": lambda key, x: key.lora_A["default"].weight.add_(1),
    "weight": lambda key, x: key.base_layer.weight.mul_(2),
    "disabled": lambda key, x: key.enable_adapters(False),
    "merged": lambda key, x: key.merge(),
    "input": lambda key, x: x.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_siblings(change, groups, backend, device):
    plain, patched = (model().to(device) for _ in range(2))
    liger_hw.patch(patched)
    results = []
    for wrapped in (plain, patched):
        attention = wrapped.base_model.model.model.layers[1].self_attn
        x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).half().to(device).requires_grad_() * 1
        with liger_hw.use_backend(backend), Sharing(attention, (NAMES,)):
            attention.q_proj(x)
            with torch.no_grad():
                CHANGES[change](attention.k_proj, x)
            results.append(attention.k_proj(x))
    assert groups == [3] and (results[0] - results[1]).abs().max() <= 0.01 * results[0].abs().max()


def test_results_belong_to_one_call(groups, backend, device):
    patched = model().to(device)
    liger_hw.patch(patched)
    attention = patched.base_model.model.model.layers[1].self_attn
    query, key = attention.q_proj, attention.k_proj
    x, other = (torch.randn(2, 5, 64, device=device).half().requires_grad_() for _ in range(2))
    in_thread = []
    with liger_hw.use_backend(backend), Sharing(attention, (NAMES,)):
        query(x)
        thread = threading.Thread(target=lambda: in_thread.append(key(x)))
        thread.start()
        thread.join()
        assert groups == [3] and type(in_thread[0].grad_fn) is not type(query(x).grad_fn)
        assert type(key(other).grad_fn) is not type(query(x).grad_fn)
        with torch.no_grad():
            assert not key(x).requires_grad
        query(x)
        abandoned = weakref.ref(shared_inputs._thread.sharing.results[key][0])
    assert abandoned() is None and shared_inputs._thread.sharing is None
    with liger_hw.use_backend(backend):
        query(x).sum().backward()
        key(x).sum().backward()  # outside of an attention each layer has its own graph


def test_backward_of_one_sibling(backend, device):
    patched = model().to(device)
    liger_hw.patch(patched)
    attention = patched.base_model.model.model.layers[1].self_attn
    x = torch.randn(2, 5, 64, device=device).half().requires_grad_() * 1
    with liger_hw.use_backend(backend):
        alone = torch.autograd.grad(attention.k_proj(x).sum(), [x, attention.k_proj.lora_B["default"].weight])
        with Sharing(attention, (NAMES,)):
            attention.q_proj(x)
            y = attention.k_proj(x)
        factors = [getattr(attention, name).lora_B["default"].weight for name in NAMES]
        dx, *others = torch.autograd.grad(y.sum(), [x, *factors], allow_unused=True)
    assert others[0] is others[2] is None
    torch.testing.assert_close((dx, others[1]), alone)


class Calls:
    def both(self, x, y):
        return self.a(x) + self.b(x) + self.c(y)

    def changed(self, x):
        first = self.a(x)
        x = x + 1
        return first + self.b(x)

    def twice(self, x, y):
        return self.a(x) + self.b(x) + self.b(y)

    def options(self, x):
        return self.a(x) + self.b(x, 1) + self.c(x, scale=2)


def test_weights_in_4_bits_are_multiplied_once(groups, backend, device, monkeypatch):
    model = in_4_bits(tiny.model("llama", torch.float32).to(device))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=NAMES))
    wrapped.enable_input_require_grads()
    liger_hw.patch(wrapped.to(device).train())
    alone, compute = [], lora.lora_linear
    monkeypatch.setattr(lora, "lora_linear", lambda *args: alone.append(args) or compute(*args))
    with liger_hw.use_backend(backend):
        step(wrapped, device)
    assert groups == [3, 3] and not alone


def test_what_code_shares():
    expected = {"both": (("a", "b"),), "changed": (), "twice": (), "options": ()}
    assert {name: groups_in(getattr(Calls, name)) for name in expected} == expected
    assert groups_in(len) == ()
