"""PEFT's LoRA of experts' parameters: patched models beside plain ones, by the parity rule against float64."""

import copy
import functools

import pytest
import tiny
import torch

import liger_hw
from liger_hw.patching import lora_parameters, swapping

peft = pytest.importorskip("peft", reason="the package peft is not installed")
layer = pytest.importorskip("peft.tuners.lora.layer")
if not hasattr(layer, "ParamWrapper"):
    pytest.skip("this PEFT has no target_parameters", allow_module_level=True)

EXPERTS = {"num_hidden_layers": 1, "num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
MODELS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, **EXPERTS},
    "mixtral": {"num_local_experts": 4, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, **EXPERTS},
}
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def config(parameters=BOTH, **options):
    options = {"target_modules": [], "r": 4, "lora_alpha": 6, "init_lora_weights": False} | options
    return peft.LoraConfig(target_parameters=list(parameters), **options)


def adapted(family="qwen3_moe", parameters=BOTH, second=False, before=None, **options):
    """A tiny model with LoRA on its experts' parameters, equal in each call.

    Args:
        second: whether it has two active adapters.
        before: what changes the model before it gets them.
    """
    model = tiny.model(family, **MODELS[family])
    if not hasattr(model, "set_experts_implementation"):
        pytest.skip("this transformers has no experts interface")
    if before is not None:
        before(model)
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(model, config(parameters, **options))
    if second:
        wrapped.add_adapter("second", config(parameters, r=3, lora_alpha=4))
        wrapped.base_model.set_adapter(["default", "second"])
    for name, parameter in wrapped.named_parameters():
        if "lora" in name:
            parameter.data.mul_(0.3)
    return wrapped


def wrappers(model):
    return [module for module in model.modules() if isinstance(module, layer.ParamWrapper)]


@pytest.fixture
def served(monkeypatch):
    """Calls that `experts` computes with factors, one for each."""
    calls, join = [], lora_parameters._join_factors
    monkeypatch.setattr(lora_parameters, "_join_factors", lambda *args: calls.append(args) or join(*args))
    return calls


def rescale(model):
    wrappers(model)[0].set_scale("default", 0.7)


def freeze(model):
    for wrapper in wrappers(model):
        wrapper.lora_A.requires_grad_(False)


def train_weights(model):
    wrappers(model)[0].get_base_layer().requires_grad_()


def hook(model):
    inner = wrappers(model)[0].base_layer
    assert isinstance(inner, layer.ParamWrapper)
    inner.register_forward_hook(lambda module, args, y: 2 * y)


def experts_in(model):
    return wrappers(model)[0].get_base_layer()


def double_gradient(model):
    model.get_input_embeddings().requires_grad_()  # the hook changes the gradient of the experts' input
    experts_in(model).register_full_backward_hook(lambda module, grads, _: (2 * grads[0], *grads[1:]))


def double_gradient_before(model):
    experts_in(model).register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],))


def watch_gradient(model):
    experts_in(model).register_backward_hook(lambda module, grads, _: None)


def double_call(model):
    experts = experts_in(model)
    call = type(experts)._call_impl  # with a partial function a copy of the model calls itself
    experts._call_impl = functools.partial(lambda module, *args: 2 * call(module, *args), experts)


def scale_by_tensor(model):
    for wrapper in wrappers(model):
        wrapper.scaling["default"] = torch.tensor(1.5)


def disable(model):
    model.base_model.disable_adapter_layers()
    model.get_input_embeddings().requires_grad_()  # a backward needs one


def merge(model):
    model.merge_adapter()
    model.get_input_embeddings().requires_grad_()


# state -> options of the adapters, a change of the model, whether `experts` computes it
STATES = {
    "both": ({}, None, True),
    "one, of rank 20": ({"parameters": BOTH[:1], "r": 20}, None, True),
    "down alone, rsLoRA": ({"parameters": BOTH[1:], "use_rslora": True}, None, True),
    "two adapters": ({"second": True}, None, True),
    "other scalings": ({}, rescale, True),
    "frozen A": ({}, freeze, True),
    "trained weights": ({}, train_weights, True),
    "with layers": ({"family": "mixtral", "target_modules": ["q_proj", "v_proj"]}, None, True),
    "a hook": ({}, hook, False),
    "a backward hook on experts": ({}, double_gradient, False),
    "a backward pre-hook on experts": ({"parameters": BOTH[:1]}, double_gradient_before, False),
    "a legacy hook on experts": ({}, watch_gradient, False),
    "another call of experts": ({}, double_call, False),
    "a tensor as scaling": ({}, scale_by_tensor, False),
    "disabled": ({}, disable, False),
    "merged": ({}, merge, False),
}


@pytest.mark.parametrize("state", STATES)
def test_states(state, backend, device, served):
    options, change, is_served = STATES[state]
    plain, patched = (adapted(**options).to(device) for _ in range(2))
    summary = liger_hw.patch(patched)
    assert summary.replaced["ParamWrapper", "experts with LoRA"] == len(wrappers(plain))
    for model in (plain, patched):
        if change is not None:
            change(model)
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **inputs)
    assert len(served) == is_served


def test_without_gradients_and_recomputed(backend, device, served):
    plain, patched = adapted().to(device), adapted(before=liger_hw.patch).to(device)  # PEFT wraps a patched model
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    with torch.no_grad(), liger_hw.use_backend(backend):
        torch.testing.assert_close(patched(**inputs).loss, plain(**inputs).loss)
    assert len(served) == 1
    for reentrant in (False, True):
        for model in (plain, patched):
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with liger_hw.use_backend(backend):
            tiny.assert_learns_alike(plain, patched, **inputs)
    assert len(served) == 5


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
@pytest.mark.parametrize("second", [False, True], ids=["one", "two"])
def test_adapters_written_before_the_backward(second, part, counted, backend, device, served):
    """The backward fails where PEFT's does, and on a CPU where PEFT's mixes two states."""
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 9).items()}
    plain, patched = (adapted(second=second).to(device) for _ in range(2))
    liger_hw.patch(patched)
    for model in (plain, patched):
        with liger_hw.use_backend(backend):
            loss = tiny.call(model, **inputs).loss
        weight = getattr(wrappers(model)[0], part)["default"].weight
        with torch.no_grad():
            (weight if counted else weight.data).mul_(2)
        if counted or model is patched and device == "cpu":
            with pytest.raises(RuntimeError, match="by an inplace operation" if counted else "weights changed between"):
                loss.backward()
        else:
            loss.backward()
    assert len(served) == 1


def test_merged_before_the_backward(backend, device, served):
    """PEFT's forward kept a copy of the weights, the kernels read those into which the program merges."""
    patched = adapted().to(device)
    liger_hw.patch(patched)
    with liger_hw.use_backend(backend):
        loss = tiny.call(patched, **{name: x.to(device) for name, x in tiny.tokens(1, 9).items()}).loss
    merge(patched)
    with pytest.raises(RuntimeError, match="merge after the backward"):
        loss.backward()
    assert len(served) == 1


def test_changes_of_state(backend, device, served, tmp_path):
    plain, patched = adapted().to(device), adapted().to(device)
    liger_hw.patch(patched)
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 9).items()}

    def same(found, is_served=True):
        served.clear()
        with torch.no_grad(), liger_hw.use_backend(backend):
            torch.testing.assert_close(found(**inputs).loss, plain(**inputs).loss)
        assert len(served) == is_served

    for change, is_served in ((disable, False), (lambda m: m.base_model.enable_adapter_layers(), True), (merge, False),
                              (lambda m: m.unmerge_adapter(), True)):  # fmt: skip
        for model in (plain, patched):
            change(model)
        same(patched, is_served)
    same(copy.deepcopy(patched))
    patched.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(tiny.model("qwen3_moe", **MODELS["qwen3_moe"]), tmp_path).to(device)
    liger_hw.patch(loaded.train())
    same(loaded)
    liger_hw.unpatch(patched)
    assert not any(map(swapping.is_swapped, patched.modules()))
    same(patched, False)
    same(loaded.merge_and_unload(), False)


def test_what_is_left_runs_their_forward():
    """gpt_oss: experts with biases; a router's weight; and no op for a CPU's tensors."""
    for family, parameters in (("gpt_oss", BOTH), ("qwen3_moe", ["mlp.gate.weight"]), ("qwen3_moe", BOTH)):
        plain, patched = adapted(family, parameters), adapted(family, parameters)
        summary = liger_hw.patch(patched)
        inside = type(wrappers(plain)[0].get_base_layer()).__name__
        reason = lora_parameters.NOT_EXPERTS.format(inside)
        assert summary.left["ParamWrapper", reason] == (inside != "Qwen3MoeExperts") * len(parameters), summary
        tiny.assert_learns_alike(plain, patched, **tiny.tokens(1, 7))
    assert liger_hw.patch(patched, lora=False).left["ParamWrapper", "lora=False"] == 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["__call__", "_call_impl"])
def test_a_call_of_experts_that_a_program_replaced(name, when, backend, device, monkeypatch):
    plain, patched = adapted().to(device), adapted().to(device)
    if when == "after":
        liger_hw.patch(patched)
    cls = type(experts_in(plain))
    call = getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self, *args: 2 * call(self, *args), raising=False)
    if when == "before":
        reason = lora_parameters.NOT_EXPERTS.format(cls.__name__)
        assert liger_hw.patch(patched).left["ParamWrapper", reason] == 2
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **{key: x.to(device) for key, x in tiny.tokens(1, 7).items()})


def test_a_function_that_experts_call_is_replaced(monkeypatch):
    histc = torch.histc
    monkeypatch.setattr(torch, "histc", lambda *args, **options: histc(*args, **options))
    reason = "a program replaced histc, which grouped experts call"
    assert liger_hw.patch(adapted()).left["ParamWrapper", reason] == 2


@pytest.mark.parametrize("name", ["_activate_lora", "get_delta_weight", "forward"])
def test_code_of_peft_replaced(name, backend, device, served, monkeypatch):
    """A program's own method runs, and a probe refuses to match another sum."""
    patched, original = adapted().to(device), getattr(layer.ParamWrapper, name)
    liger_hw.patch(patched)
    monkeypatch.setattr(layer.ParamWrapper, name, lambda self, *args, **options: original(self, *args, **options))
    with liger_hw.use_backend(backend), torch.no_grad():
        patched(**{key: x.to(device) for key, x in tiny.tokens(1, 9).items()})
    assert not served
    if name == "get_delta_weight":
        monkeypatch.setattr(layer.ParamWrapper, name, lambda self, *args, **options: 2 * original(self, *args))
        assert liger_hw.patch(adapted()).left["ParamWrapper", lora_parameters.OTHERWISE] == 2
