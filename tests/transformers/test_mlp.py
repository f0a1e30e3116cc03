"""Check when an MLP drops the input of its last projection, and that only memory changes."""

import copy
import types

import pytest
import torch
from saved import saved_bytes
from torch import nn

import liger_hw
from liger_hw.patching import mlp as mlp_matches
from liger_hw.patching.projection import is_plain_linear, project_by_op
from liger_hw.transformers import LigerGEGLUMLP, LigerSwiGLUMLP

CONFIG = types.SimpleNamespace(hidden_size=16, intermediate_size=40, hidden_act="silu")
ROWS = 6
PRODUCT = ROWS * CONFIG.intermediate_size * 4  # bytes


def mlp(device, cls=LigerSwiGLUMLP):
    torch.manual_seed(0)
    return cls(CONFIG).to(device)


def rows(device):
    return torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()


class Observed(nn.Linear):
    """A subclass may do anything in its forward."""


def gradients(module, x):
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("cls", [LigerSwiGLUMLP, LigerGEGLUMLP], ids=lambda cls: cls.__name__)
def test_keeps_less_and_computes_the_same(cls, backend, device):
    module, x = mlp(device, cls), rows(device)
    two_steps = copy.deepcopy(module)
    two_steps.down_proj.register_forward_hook(lambda *_: None)
    with liger_hw.use_backend(backend):
        assert saved_bytes(lambda: module(x)) == saved_bytes(lambda: two_steps(x)) - PRODUCT
        for a, b in zip(gradients(module, x), gradients(two_steps, x)):
            assert torch.equal(a, b)


def test_a_tiny_llama_keeps_less(backend, device):
    import tiny

    _, model = tiny.pair("llama")
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    layers = model.to(device).model.layers
    with liger_hw.use_backend(backend):
        less = saved_bytes(lambda: tiny.call(model, **inputs))
        hooks = [layer.mlp.down_proj.register_forward_hook(lambda *_: None) for layer in layers]
        more = saved_bytes(lambda: tiny.call(model, **inputs))
        for hook in hooks:
            hook.remove()
        assert saved_bytes(lambda: tiny.call(model, **inputs)) == less
    assert more - less == len(layers) * 7 * tiny.TINY["intermediate_size"] * 4


@pytest.mark.parametrize("activation, tensors", [("relu2", 2), ("gelu", 2), ("quick_gelu", 3), ("gelu_new", 5)])
def test_an_mlp_without_a_gate_keeps_one_tensor(activation, tensors, backend, device):
    import tiny

    plain, patched = (m.model.layers[0].mlp.to(device) for m in tiny.pair("nemotron", hidden_act=activation))
    x = torch.randn(ROWS, 64, device=device, requires_grad=True)
    with liger_hw.use_backend(backend):
        weights = sum(p.nbytes for p in plain.parameters())
        one = ROWS * tiny.TINY["intermediate_size"] * 4
        assert saved_bytes(lambda: plain(x)) >= x.nbytes + tensors * one
        assert saved_bytes(lambda: patched(x)) == x.nbytes + weights + one
        for a, b in zip(gradients(patched, x), gradients(plain, x)):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_hooks_on_the_projection_see_its_input(backend, device):
    module, x, seen = mlp(device), rows(device), []
    with liger_hw.use_backend(backend):
        expected = module(x)
        module.down_proj.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
        module.down_proj.register_full_backward_hook(lambda *_: seen.append("backward"))
        assert torch.equal(module(x), expected)
        module(x).sum().backward()
    assert seen == [(ROWS, 40), (ROWS, 40), "backward"]


def _replaced_forward(linear):
    linear.forward = lambda x: nn.functional.linear(x, linear.weight)
    return linear


def _parametrised(linear):
    return nn.utils.parametrizations.weight_norm(linear)


def _observed(linear):
    return Observed(40, 16, bias=False)


def _foreign_weight(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Foreign))
    return linear


class Foreign(torch.Tensor):
    """A weight that knows how it is multiplied, as quantised ones do."""


def _hooked(kind):
    def hook(linear):
        getattr(linear, f"register_{kind}_hook")(lambda *_: None)
        return linear

    hook.__name__ = kind
    return hook


@pytest.mark.parametrize("make", [
    _replaced_forward, _parametrised, _observed, _foreign_weight, _hooked("forward"), _hooked("forward_pre"),
    _hooked("full_backward"), _hooked("full_backward_pre"),
], ids=lambda f: f.__name__.strip("_"))  # fmt: skip
def test_more_than_a_linear_layer_is_called(make):
    linear = nn.Linear(40, 16, bias=False)
    assert is_plain_linear(linear) and is_plain_linear(nn.Linear(4, 4))
    assert not is_plain_linear(make(linear))


def test_global_hooks_are_called():
    linear = nn.Linear(4, 4)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not is_plain_linear(linear)
    finally:
        hook.remove()
    assert is_plain_linear(linear)


def test_frozen_projection(backend, device):
    """Nothing keeps the product then, so nothing computes it again."""
    module, x = mlp(device), rows(device)
    module.down_proj.requires_grad_(False)
    with liger_hw.use_backend(backend):
        out = module(x)
        assert "GluLinear" not in out.grad_fn.name()
        out.sum().backward()
    assert module.down_proj.weight.grad is None and x.grad.isfinite().all()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant, backend, device):
    from torch.utils.checkpoint import checkpoint

    module, x = mlp(device), rows(device)

    def learned(function):
        x.grad = module.down_proj.weight.grad = None
        function().square().sum().backward()
        return x.grad, module.down_proj.weight.grad

    with liger_hw.use_backend(backend):
        expected = learned(lambda: module(x))
        found = learned(lambda: checkpoint(module, x, use_reentrant=reentrant))
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_a_copy_learns_with_its_own_weights(backend, device):
    module, x = mlp(device), rows(device)
    copied = copy.deepcopy(module)
    with liger_hw.use_backend(backend):
        with torch.no_grad():
            copied.down_proj.weight.mul_(2)
        assert torch.equal(copied(x), 2 * module(x))
        copied(x).sum().backward()
    assert module.down_proj.weight.grad is None and copied.down_proj.weight.grad is not None


def test_compiles_whole(backend, device):
    module, x = mlp(device), rows(device)
    torch._dynamo.reset()
    with liger_hw.use_backend(backend):
        expected = gradients(module, x)
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        out = compiled(x)
        found = [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_an_adapter_on_the_projection_takes_part(backend, device):
    peft = pytest.importorskip("peft", reason="the package peft is not installed")
    module, x = mlp(device), rows(device)
    with liger_hw.use_backend(backend):
        config = peft.LoraConfig(target_modules=["down_proj"], init_lora_weights=False)
        adapted = peft.get_peft_model(module, config)
        adapted(x).sum().backward()
        assert all(p.grad is not None for name, p in adapted.named_parameters() if "lora" in name)
        with adapted.disable_adapter():
            plain = adapted(x)
    assert not torch.equal(adapted(x), plain)


def hooked(module, seen):
    return module.register_forward_hook(lambda *_: seen.append(module))


@pytest.mark.parametrize("family", ["llama", "gpt2", "nemotron", "t5"])
def test_hooks_on_the_activation_of_a_patched_mlp_fire(family, monkeypatch):
    """Set before or after patching. Once they are gone the op computes again."""
    import tiny

    plain = mlp_of(tiny, family)
    names = [name for name, child in plain.named_children() if not hasattr(child, "weight")]
    x = torch.randn(3, plain_width(plain))
    expected = plain.eval()(x)
    for when in ("before", "after"):
        module = mlp_of(tiny, family)
        module.load_state_dict(plain.state_dict())
        module.eval()
        seen = []
        if when == "before":
            handles = [hooked(getattr(module, name), seen) for name in names]
            summary = liger_hw.patch(module)
            assert summary.replaced and not seen
        else:
            liger_hw.patch(module)
            handles = [hooked(getattr(module, name), seen) for name in names]
        torch.testing.assert_close(module(x), expected)
        assert len(seen) == len(names) > 0
        for handle in handles:
            handle.remove()
        calls = []
        with monkeypatch.context() as counted:
            counted.setattr(mlp_matches, "project_by_op", _counting(calls))
            torch.testing.assert_close(module(x), expected)
        assert len(seen) == len(names) and len(calls) == 1


def _counting(calls):
    return lambda *args: calls.append(args) or project_by_op(*args)


def mlp_of(tiny, family):
    if family == "t5":
        sizes = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": 64}
        config = tiny.transformers.T5Config(**sizes, feed_forward_proj="gated-gelu")
        model = tiny.transformers.T5EncoderModel(config)
    else:
        model = tiny.model(family)
    return next(m for m in model.modules() if type(m).__name__.endswith(("MLP", "DenseGatedActDense")))


def plain_width(module):
    first = next(child for child in module.children() if hasattr(child, "weight"))
    return getattr(first, "in_features", None) or first.weight.shape[0]


def test_an_activation_that_was_exchanged_is_the_one_that_counts():
    import tiny

    plain, patched = (m.model.layers[0].mlp for m in tiny.pair("llama"))
    x = torch.randn(3, 64)
    for module in (plain, patched):
        module.act_fn = nn.Tanh()
    assert torch.equal(patched(x), plain(x))


def test_hooks_on_the_activation_of_patched_experts_fire():
    import tiny

    model = tiny.model("mixtral", num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm")
    if not hasattr(model, "set_experts_implementation"):
        pytest.skip("this transformers has no experts interface")
    liger_hw.patch(model)
    experts, seen = model.model.layers[0].mlp.experts, []
    assert "_apply_gate" in vars(type(experts))
    handle = hooked(experts.act_fn, seen)
    expected = tiny.call(model, **tiny.tokens()).loss
    assert len(seen) == 1
    handle.remove()
    assert torch.equal(tiny.call(model, **tiny.tokens()).loss, expected) and len(seen) == 1


@pytest.mark.parametrize("weights, cast", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)], ids=str)
def test_a_cast_to_the_weights_dtype_under_autocast(weights, cast):
    """T5 casts the product to its last weight's dtype, and autocast casts that again."""
    from transformers.models.t5 import modeling_t5

    config = modeling_t5.T5Config(d_model=32, d_ff=48, feed_forward_proj="gated-silu", dropout_rate=0.0)
    torch.manual_seed(0)
    plain = nn.Sequential(modeling_t5.T5DenseGatedActDense(config)).to(weights)
    patched, x = copy.deepcopy(plain), (1000 * torch.randn(5, 32)).to(weights)
    assert liger_hw.patch(patched).replaced
    with torch.autocast("cpu", cast):
        torch.testing.assert_close(patched(x), plain(x), rtol=0, atol=0, equal_nan=True)


def test_powers_under_autocast_are_the_modules(monkeypatch):
    """On a GPU autocast computes them in fp32: the module's own activation runs there, and by itself."""
    from transformers.models.t5 import modeling_t5

    config = modeling_t5.T5Config(d_model=32, d_ff=48, feed_forward_proj="gated-gelu", dropout_rate=0.0)
    patched, calls = nn.Sequential(modeling_t5.T5DenseGatedActDense(config)), []
    assert liger_hw.patch(patched).replaced
    gate_and_up = mlp_matches._gate_and_up
    monkeypatch.setattr(mlp_matches, "_gate_and_up", lambda *args: calls.append(args) or gate_and_up(*args))
    for cast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            patched(torch.randn(5, 32))
    assert len(calls) == 1


class CastsProduct(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return self.down_proj((torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)).to(x.dtype))


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_a_hook_that_returns_fp32_before_a_cast(name):
    plain = nn.Sequential(CastsProduct()).bfloat16()
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    for model in (plain, patched):
        getattr(model[0], name).register_forward_hook(lambda module, args, y: y.float())
    x = torch.randn(3, 32, dtype=torch.bfloat16)
    assert torch.equal(patched(x), plain(x))


def test_a_cast_to_the_other_dtype_of_16_bits_than_autocasts():
    plain = nn.Sequential(CastsProduct())
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    x = 3000 * torch.randn(3, 32).half()  # the products are infinite in fp16
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(patched(x), plain(x), equal_nan=True)
