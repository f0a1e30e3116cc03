"""Check that a patched model equals its unpatched copy after a program replaced code."""

import copy
import functools
import gc
import inspect
import pickle
import sys
import types
import weakref

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import liger_hw
from liger_hw.patching import pins, reading, swapping

transformers = tiny.transformers
llama = transformers.models.llama.modeling_llama
loss_utils = pytest.importorskip("transformers.loss.loss_utils", reason="this transformers has no loss functions")


def assert_same_loss(plain, patched):
    expected, found = (tiny.call(m, **tiny.tokens()).loss for m in (plain, patched))
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def half(function):
    """Return a function whose result, or first result, is halved."""

    def halved(*args, **kwargs):
        result = function(*args, **kwargs)
        return (result[0].div(2), *result[1:]) if isinstance(result, tuple) else result.div(2)

    return halved


REPLACED = {  # what a program replaces by a function with half the result
    "class's forward": (llama.LlamaMLP, "forward"),
    "norm's forward": (llama.LlamaRMSNorm, "forward"),
    "attention's forward": (llama.LlamaAttention, "forward"),
    "activation's forward": (transformers.activations.ACT2FN["silu"].__class__, "forward"),
    "linear's forward": (nn.Linear, "forward"),
    "rotary function": (llama, "apply_rotary_pos_emb"),
    "helper of the rotary function": (llama, "rotate_half"),
    "attention function": (llama, "eager_attention_forward"),
    "function of torch": (F, "silu"),
    "linear function": (F, "linear"),
    "method of tensors": (torch.Tensor, "pow"),
    "operator of tensors": (torch.Tensor, "__mul__"),
    "loss": (F, "cross_entropy"),
    "loss of transformers": (loss_utils, "fixed_cross_entropy"),
}


@pytest.mark.parametrize("replaced", REPLACED)
def test_code_replaced_after_patch_counts(replaced, monkeypatch):
    owner, name = REPLACED[replaced]
    plain, patched = tiny.pair(attn_implementation="eager")
    before = tiny.call(plain, **tiny.tokens()).loss
    with monkeypatch.context() as context:
        context.setattr(owner, name, half(getattr(owner, name)), raising=False)
        assert_same_loss(plain, patched)
        assert not torch.equal(tiny.call(plain, **tiny.tokens()).loss, before), "the replacement shows"
    assert tiny.is_lazy(tiny.call(patched, **tiny.tokens())), "the ops compute again"


@pytest.mark.parametrize("replaced", REPLACED)
def test_code_replaced_between_two_patches_counts(replaced, monkeypatch):
    """Remember nothing that one call of `patch` saw for the next."""
    owner, name = REPLACED[replaced]
    liger_hw.patch(tiny.model(attn_implementation="eager"))
    with monkeypatch.context() as context:
        context.setattr(owner, name, half(getattr(owner, name)), raising=False)
        plain, patched = tiny.pair(attn_implementation="eager", seed=1)
        assert_same_loss(plain, patched)


@pytest.mark.parametrize(
    ("family", "owner", "name"),
    [("cohere", F, "layer_norm"), ("gemma2", F, "gelu"), ("gpt2", torch, "tanh"), ("llama", torch, "rsqrt")],
)
def test_a_function_that_an_op_alone_calls(family, owner, name, monkeypatch):
    """Cohere's LayerNorm is written out, and Gemma's activation keeps torch's function."""
    plain, patched = tiny.pair(family)
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: original(*args, **options) * 1.5)
    expected, found = (tiny.call(model, **tiny.tokens()).loss for model in (plain, patched))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("patched_before", [True, False])
def test_the_product_of_zero3_is_torchs(patched_before, monkeypatch):
    """DeepSpeed's, which computes the same, replaces torch's for the rest of the process."""
    module = types.ModuleType("deepspeed.runtime.zero.linear")
    module.zero3_linear_wrap = lambda x, weight, bias=None: torch._C._nn.linear(x, weight, bias)
    if patched_before:
        _, patched = tiny.pair()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(F, "linear", module.zero3_linear_wrap)
    if not patched_before:
        _, patched = tiny.pair()
    assert tiny.is_lazy(tiny.call(patched, **tiny.tokens()))


@pytest.mark.parametrize("name", ["__new__", "pow"])
def test_methods_of_tensors_that_were_put_back(name, monkeypatch):
    """DeepSpeed leaves torch's own `__new__` in torch.Tensor once it has built a model in shards."""
    _, patched = tiny.pair()
    own = getattr(torch.Tensor, name)
    monkeypatch.setattr(torch.Tensor, name, own)
    assert tiny.is_lazy(tiny.call(patched, **tiny.tokens()))
    monkeypatch.setattr(torch.Tensor, name, lambda *args, **kwargs: own(*args, **kwargs))
    assert not tiny.is_lazy(tiny.call(patched, **tiny.tokens())), "a later change counts"
    monkeypatch.setattr(torch.Tensor, name, own)
    assert tiny.is_lazy(tiny.call(patched, **tiny.tokens()))


def test_a_patched_model_that_is_patched_again_sees_replaced_code(monkeypatch):
    plain, patched = tiny.pair()
    liger_hw.unpatch(patched)
    monkeypatch.setattr(llama.LlamaMLP, "forward", half(llama.LlamaMLP.forward))
    liger_hw.patch(patched)
    assert_same_loss(plain, patched)


def test_a_function_that_counts_calls_sees_them(monkeypatch):
    """Profilers count operations by wrapping functions of torch."""
    plain, patched = tiny.pair()
    counts = []
    for model in (plain, patched):
        count, linear = [0], F.linear

        def counted(x, weight, bias=None, count=count, linear=linear):
            count[0] += x.numel() * weight.shape[0]
            return linear(x, weight, bias)

        with monkeypatch.context() as context:
            context.setattr(F, "linear", counted)
            tiny.call(model, **tiny.tokens())
        counts += count
    assert counts[0] == counts[1] > 0


class MLP(nn.Module):
    factor = 1.0

    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)
        self.act_fn = nn.SiLU() if act is None else act
        self.enabled, self.limits, self.on_call = True, {"upper": 2}, F.silu
        self.config = types.SimpleNamespace(scale=1)

    def product(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        if not self.enabled:
            return torch.zeros_like(x)
        return self.down_proj(self.product(x)) * self.factor * (self.limits["upper"] - 1) * self.config.scale


class Above(MLP):
    def product(self, x):
        return super().product(x)


class Below(Above):
    def product(self, x):
        return super().product(x)

    def forward(self, x):
        y = super().forward(x)
        return -y if hasattr(self, "negative") else y


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.unit_offset = nn.Parameter(torch.randn(64)), 1e-6, False

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight + 1 if self.unit_offset else self.weight) * wide.to(x.dtype)


def pair(module):
    plain = nn.Sequential(module)
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    assert torch.equal(patched(ROWS), plain(ROWS))
    return plain, patched


ROWS = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
CHANGES = {  # what a program does to a module
    "flag": (MLP, lambda m: setattr(m, "enabled", False)),
    "class attribute hidden": (MLP, lambda m: setattr(m, "factor", 2.0)),
    "contents of a dictionary": (MLP, lambda m: m.limits.update(upper=4)),
    "configuration": (MLP, lambda m: setattr(m.config, "scale", 3)),
    "method hidden": (MLP, lambda m: setattr(m, "product", lambda x: torch.ones(3, 96))),
    "attribute looked up": (Below, lambda m: setattr(m, "negative", True)),
    "child hidden": (MLP, lambda m: vars(m).update(act_fn=F.gelu)),
    "compiled call of a child": (MLP, lambda m: setattr(m.act_fn, "_compiled_call_impl", F.gelu)),
    "child": (MLP, lambda m: setattr(m, "act_fn", nn.Tanh())),
    "attribute of a child": (lambda: MLP(nn.GELU()), lambda m: setattr(m.act_fn, "approximate", "tanh")),
    "function": (lambda: MLP(F.silu), lambda m: setattr(m, "act_fn", F.gelu)),
    "norm's flag": (Norm, lambda m: setattr(m, "unit_offset", True)),
    "eps": (Norm, lambda m: setattr(m, "eps", 0.5)),
    "eps that is a tensor": (Norm, lambda m: setattr(m, "eps", torch.tensor(0.5))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_that_code_reads_count_when_they_change(change):
    build, apply = CHANGES[change]
    plain, patched = pair(build())
    before = plain(ROWS)
    for model in (plain, patched):
        apply(model[0])
    assert torch.equal(patched(ROWS), plain(ROWS))
    assert not torch.equal(plain(ROWS), before)


def act(x, scale=1.0, *, offset=0.0):
    return F.silu(x) * (scale * SCALE) + offset


SCALE = 1.0
IN_PLACE = {  # what a program replaces in a function or beside it
    "code": (act, "__code__", (lambda x, scale=1.0, *, offset=0.0: F.gelu(x)).__code__),
    "default": (act, "__defaults__", (2.0,)),
    "keyword default": (act, "__kwdefaults__", {"offset": 1.0}),
    "code of a method": (MLP.product, "__code__", (lambda self, x: self.up_proj(x)).__code__),
    "call of the activation's class": (nn.SiLU, "__call__", lambda self, x: 2 * x),
    "call of linear layers": (nn.Linear, "__call__", lambda self, x: 2 * self.forward(x)),
    "method of the class above": (Above, "product", lambda self, x: self.up_proj(x)),
    "call of all modules": (nn.Module, "_call_impl", lambda self, x: self.forward(2 * x)),
}


@pytest.mark.parametrize("replaced", IN_PLACE)
def test_functions_that_a_program_changes_in_place_count(replaced, monkeypatch):
    owner, name, value = IN_PLACE[replaced]
    build = Below if owner is Above else MLP
    plain, patched = pair(build(None if "all" in replaced or owner is nn.SiLU else act))
    before = plain(ROWS)
    monkeypatch.setattr(owner, name, value, raising=False)
    assert torch.equal(patched(ROWS), plain(ROWS)) and not torch.equal(plain(ROWS), before)


def test_a_global_of_a_function_in_an_attribute_counts(monkeypatch):
    plain, patched = pair(MLP(act))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert torch.equal(patched(ROWS), plain(ROWS))


def test_a_class_attribute_that_changed_between_two_patches_counts(monkeypatch):
    liger_hw.patch(MLP())
    monkeypatch.setattr(MLP, "factor", 2.0)
    plain = MLP()
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    assert torch.equal(patched(ROWS), plain(ROWS))


def guard_of(module):
    """Return a new guard of a patched module."""
    unchanged = type(module).liger_match.guard(type(module).liger_original)
    unchanged.members.watch(type(module))
    return unchanged


def test_an_attribute_that_no_code_reads_may_change():
    _, patched = pair(Norm())
    patched[0].steps, patched[0].history = 3, [patched]
    assert guard_of(patched[0])(patched[0], (ROWS,), {})


@pytest.mark.parametrize("is_known", [True, False])
def test_the_name_that_torch_compile_leaves_in_classes_is_known(is_known):
    """Another name makes every call compare all names and kernels, which takes 45 us."""

    class Doubles(nn.Module):
        def forward(self, x):
            return 2 * x

    torch.compile(Doubles(), backend="eager")(ROWS)
    (name,) = (name for name in vars(nn.Module) if name.endswith("generation_tag_patch"))
    name = name if is_known else "name_of_a_library"
    members = pins.Members([Doubles])
    members.classes = [(vars(Doubles), frozenset(vars(Doubles)), None)]  # tests leave names in others
    setattr(Doubles, name, None)
    assert members.are_unchanged() and (members.count is not None) is is_known


class HalvesProducts(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else result


class HalvesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func in (F.silu, torch.rsqrt, F.cross_entropy) else result


@pytest.mark.parametrize("mode", [HalvesProducts, HalvesFunctions])
def test_modes_of_a_program_see_the_operations(mode):
    plain, patched = tiny.pair()
    before = tiny.call(plain, **tiny.tokens()).loss
    with mode():
        assert_same_loss(plain, patched)
        assert not torch.equal(tiny.call(plain, **tiny.tokens()).loss, before)


class HalvesALossesBackward(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten._log_softmax_backward_data.default else result


@pytest.mark.parametrize("mode", [HalvesProducts, HalvesALossesBackward])
def test_modes_around_the_backward_alone_see_those_of_the_head_and_its_loss(mode):
    plain, patched = tiny.pair(num_hidden_layers=1)
    for model in (plain, patched):
        loss = tiny.call(model, **tiny.tokens()).loss
        with mode():
            loss.backward()
    torch.testing.assert_close(patched.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(patched.model.norm.weight.grad, plain.model.norm.weight.grad, rtol=1e-4, atol=1e-6)


def test_modes_of_torch_change_nothing():
    from torch.utils.flop_counter import FlopCounterMode

    _, patched = tiny.pair()
    with FlopCounterMode(display=False):
        assert pins.only_harmless_modes()
    with torch.device("cpu"):
        assert tiny.is_lazy(tiny.call(patched, **tiny.tokens()))


def round_to_8_bits(x):
    return x if isinstance(x, nn.Parameter) or not x.is_floating_point() else x.to(torch.float8_e5m2).to(x.dtype)


@pytest.mark.filterwarnings("ignore:patched modules run their own code")
@pytest.mark.parametrize("pack", [functools.partial(round_to_8_bits), torch.round, F.relu], ids=["own", "C", "F"])
def test_hooks_of_a_program_change_what_the_modules_code_saves(pack):
    plain, patched = tiny.pair()
    for model in (plain, patched):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.detach):
            loss = model(**tiny.tokens()).loss
        loss.backward()
    for p, q in zip(plain.parameters(), patched.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5)


def test_a_wrapper_around_a_hook_that_keeps_values_may_round():
    hooks = torch.autograd.graph.save_on_cpu()
    pack = functools.wraps(hooks.pack_hook)(lambda x: hooks.pack_hook(round_to_8_bits(x)))
    with pytest.warns(UserWarning, match="may round values"), torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert not pins.hooks_keep_values()


def test_hooks_of_checkpointing_keep_values():
    _, patched = tiny.pair()
    seen = []
    patched.model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(pins.hooks_keep_values()))
    patched.gradient_checkpointing_enable({"use_reentrant": False})
    patched(**tiny.tokens()).loss.backward()
    assert seen == [True, True]


def test_hooks_that_keep_values_change_nothing():
    _, patched = tiny.pair()
    with torch.autograd.graph.save_on_cpu():
        assert tiny.is_lazy(tiny.call(patched, **tiny.tokens()))

    def keep(x):
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, keep):
        with pytest.warns(UserWarning, match="set pack.keeps_values = unpack.keeps_values = True"):
            assert not tiny.is_lazy(tiny.call(patched, **tiny.tokens()))
        keep.keeps_values = True
        assert tiny.is_lazy(tiny.call(patched, **tiny.tokens()))


class AlwaysSilu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return F.silu(args[0]) if func is torch.relu else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["fake", AlwaysSilu])
def test_a_probe_leaves_every_mode(mode):
    from torch._subclasses.fake_tensor import FakeTensorMode

    module = MLP(torch.relu)
    with FakeTensorMode(allow_non_fake_inputs=True) if mode == "fake" else mode():
        assert not liger_hw.patch(copy.deepcopy(module)).replaced
        assert liger_hw.patch(MLP()).replaced
    assert not liger_hw.patch(module).replaced and liger_hw.patch(MLP()).replaced


def test_a_model_is_built_patched_and_trained_within_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = transformers.LlamaConfig(**tiny.TINY)
    with FakeTensorMode():
        model = transformers.LlamaForCausalLM(config)
        assert liger_hw.patch(model).replaced
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        model(tokens, labels=tokens).loss.backward()
        assert all(p.grad.shape == p.shape for p in model.parameters())


def test_patched_classes_of_local_code_do_not_stay():
    def build():
        large = torch.zeros(10)

        class Local(Norm):
            def report(self):
                return large

        model = nn.Sequential(Local())
        model[0].on_forward = lambda: model
        assert liger_hw.patch(model).replaced
        return weakref.ref(large), weakref.ref(model)

    kept = build()
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


def test_a_class_with_required_arguments_of_subclasses_is_patched_unseen():
    class Base(nn.Module):
        registry = {}

        def __init_subclass__(cls, *, kind, **options):
            super().__init_subclass__(**options)
            Base.registry[kind] = cls

    class Registered(Norm, Base, kind="rms"):
        pass

    plain, patched = pair(Registered())
    assert Base.registry == {"rms": Registered}
    assert torch.equal(patched(ROWS), plain(ROWS))
    with pytest.raises(TypeError, match="kind"):
        type("Derived", (type(patched[0]),), {})


def test_a_metaclass_that_registers_classes_sees_no_patched_one():
    class Meta(type):
        classes = []

        def __new__(mcs, name, bases, namespace):
            cls = super().__new__(mcs, name, bases, namespace)
            Meta.classes.append(cls)
            return cls

    class Registered(Norm, metaclass=Meta):
        pass

    pair(Registered())
    assert Meta.classes == [Registered]


def test_patched_classes_have_the_originals_names():
    _, patched = tiny.pair()
    norm = patched.model.norm
    assert (type(norm).__name__, type(norm).__qualname__) == ("LlamaRMSNorm", "LlamaRMSNorm")
    assert type(norm).__module__ == llama.__name__ and repr(norm).startswith("LigerLlamaRMSNorm(")


def test_deeply_nested_attributes_are_no_obstacle():
    module = MLP()
    module.history = []
    for _ in range(3000):
        module.history = [module.history]
    assert liger_hw.patch(nn.Sequential(module)).replaced


COLUMNS = slice(None)


def times(y, factor=1.0):
    return y[..., COLUMNS] * factor


def times_exchanged(factor, y=1.0):
    return factor[..., COLUMNS] * y


class RemoteNorm(Norm):
    FACTORS = (1.0,)

    def forward(self, x):
        return times(super().forward(x)) * self.FACTORS[0]


@pytest.mark.parametrize(
    "owner, name, value",
    [
        (RemoteNorm, "forward", lambda self, x: Norm.forward(self, x) / 2),
        (RemoteNorm, "FACTORS", (2.0,)),
        (times, "__defaults__", (2.0,)),
        (times, "__code__", times_exchanged.__code__),
        (sys.modules[__name__], "COLUMNS", slice(0, 64)),
    ],
    ids=["forward", "FACTORS", "default", "names of parameters", "slice"],
)
def test_a_pickle_of_code_that_changed_comes_back_unpatched(owner, name, value, monkeypatch):
    _, patched = pair(RemoteNorm())
    stored = pickle.dumps(patched)
    assert swapping.is_swapped(pickle.loads(stored)[0])
    del patched
    gc.collect()
    monkeypatch.setattr(owner, name, value)
    loaded = pickle.loads(stored)
    assert not swapping.is_swapped(loaded[0])


def write_and_import(tmp_path, monkeypatch, name, changes):
    """Import a copy of transformers' Llama with changes, as remote code."""
    source = open(llama.__file__).read().replace("from ...", "from transformers.")
    source = source.replace("from .configuration", "from transformers.models.llama.configuration")
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    return __import__(name)


ATTENTION = "        hidden_shape = (*input_shape, -1, self.head_dim)"


def test_globals_of_remote_code_are_live(tmp_path, monkeypatch):
    changes = [(ATTENTION, f"        hidden_states = hidden_states * SCALE\n{ATTENTION}")]
    remote = write_and_import(tmp_path, monkeypatch, "remote_scale", [*changes, ("logger =", "SCALE = 1.0\nlogger =")])
    plain = remote.LlamaForCausalLM(tiny.model().config).train()
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced["LlamaAttention", "rope"] == 2
    remote.SCALE = 0.3
    assert_same_loss(plain, patched)


def test_a_method_writes_globals(tmp_path, monkeypatch):
    changes = [
        (ATTENTION, f"        global CALLS\n        CALLS += 1\n{ATTENTION}"),
        ("logger =", "CALLS = 0\nlogger ="),
    ]
    remote = write_and_import(tmp_path, monkeypatch, "remote_counter", changes)
    patched = remote.LlamaForCausalLM(tiny.model().config).train()
    assert liger_hw.patch(patched).replaced["LlamaAttention", "rope"] == 2
    for _ in range(2):
        tiny.call(patched, **tiny.tokens())
    assert remote.CALLS == 4


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.reads = 0

    def forward(self, weight):
        self.reads += 1
        return weight * (1 + 0.1 * self.reads)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_parametrizations_compute_as_often(family):
    plain, patched = tiny.pair(family, num_hidden_layers=1)
    counts = []
    for model in (plain, patched):
        for module in list(model.modules()):
            for name in [name for name, p in module.named_parameters(recurse=False)]:
                torch.nn.utils.parametrize.register_parametrization(module, name, Counted(), unsafe=True)
                module.parametrizations[name][0].reads = 0
        tiny.call(model, **tiny.tokens()).loss.backward()
        counts.append([m.reads for m in model.modules() if isinstance(m, Counted)])
    assert counts[0] == counts[1]


class Scaled(torch.nn.Module):
    scale = 1.0

    def curve(self, x):
        return torch.nn.functional.silu(x)

    def forward(self, x):
        return self.curve(x * self.scale)


@pytest.mark.parametrize("name, value", [("scale", 3.0), ("curve", torch.tanh)])
def test_an_attribute_that_hides_one_of_an_activations_class(name, value):
    plain = tiny.model("llama")
    for layer in plain.model.layers:
        layer.mlp.act_fn = Scaled()
    patched = copy.deepcopy(plain)
    assert "swiglu" in str(liger_hw.patch(patched))
    ids = torch.arange(3, 11)[None]
    for model in (plain, patched):
        for layer in model.model.layers:
            setattr(layer.mlp.act_fn, name, value)
    torch.testing.assert_close(patched(ids).logits, plain(ids).logits)


class InTraining(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.silu(x) if self.training else torch.nn.functional.silu(x) * 1.0


def test_an_activation_that_reads_its_own_mode_is_left_alone():
    model = tiny.model("llama")
    for layer in model.model.layers:
        layer.mlp.act_fn = InTraining()
    assert "the code of its act_fn reads training" in str(liger_hw.patch(model))


@pytest.mark.parametrize(
    "owner, name", [(torch, "where"), (torch, "cat"), (torch.Tensor, "sum"), (torch.Tensor, "gather")]
)
def test_functions_of_torch_that_the_loss_calls(owner, name, monkeypatch):
    plain, patched = tiny.pair()
    inputs, function = tiny.tokens(), getattr(owner, name)
    with monkeypatch.context() as context:
        context.setattr(owner, name, lambda *args, **kwargs: function(*args, **kwargs), raising=False)
        out = tiny.call(patched, **inputs)
        assert not tiny.is_lazy(out) and torch.equal(out.loss, tiny.call(plain, **inputs).loss)
        summary = liger_hw.patch(tiny.model())
        assert owner is torch.Tensor or any(f"a program replaced {name}" in reason for _, reason in summary.left)
    assert tiny.is_lazy(tiny.call(patched, **inputs))


def counted(function, hides=False):
    """Decorate a forward by one that counts its calls in an attribute of its own."""

    def call(*args, **kwargs):
        call.calls += 1
        return function(*args, **kwargs)

    if not hides:
        functools.update_wrapper(call, function)
    call.calls = 0
    return call


@pytest.mark.parametrize("hides", [False, True], ids=["functools.wraps", "plain"])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaAttention", "LlamaMLP"])
def test_a_decorator_counts_in_the_forward(name, hides, monkeypatch):
    cls = getattr(llama, name)
    monkeypatch.setattr(cls, "forward", counted(cls.forward, hides))
    plain, patched = tiny.model(), tiny.model()
    liger_hw.patch(patched)
    ids, counts = torch.arange(3, 9)[None], []
    for model in (plain, patched):
        cls.forward.calls = 0
        part = next(module for module in model.modules() if isinstance(module, cls))
        signature = inspect.signature(part.forward).parameters.keys() - {"self", "skip_logits"}
        model(input_ids=ids, labels=ids)
        counts.append((part.forward.calls, cls.forward.calls, signature))
    assert counts[1] == counts[0] and counts[0][0] > 0
    liger_hw.unpatch(patched)
    assert part.forward.calls == cls.forward.calls


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("name", ["smoothed", "ForMaskedLMLoss"])
def test_another_loss_by_both_of_its_names(name, before, monkeypatch):
    def smoothed(logits, labels, vocab_size, **_):
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(logits.float().view(-1, vocab_size), labels.reshape(-1), label_smoothing=0.2)

    loss = smoothed if name == "smoothed" else loss_utils.ForMaskedLMLoss
    plain, patched = (None, None) if before else tiny.pair()
    monkeypatch.setattr(loss_utils, "ForCausalLMLoss", loss)
    monkeypatch.setitem(loss_utils.LOSS_MAPPING, "ForCausalLM", loss)
    if before:
        plain, patched = tiny.pair()
    assert_same_loss(plain, patched)


class TorchsNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x):
        return F.layer_norm(x, (64,), self.weight)


def test_defaults_of_torchs_functions(monkeypatch):
    plain, patched = pair(TorchsNorm())
    monkeypatch.setattr(F.layer_norm, "__defaults__", (None, None, 3.0))
    assert torch.equal(patched(ROWS), plain(ROWS)) and not torch.equal(plain(ROWS), F.layer_norm(ROWS, (64,), eps=1e-5))


def test_functions_in_c_that_torchs_functions_call_are_pinned():
    assert any(pin.owner is torch and pin.name == "layer_norm" for pin in reading.read(TorchsNorm).pins)


@pytest.mark.parametrize("base", [False, True], ids=["class", "its base"])
@pytest.mark.parametrize(
    "value", [property(lambda self: torch.relu), staticmethod(torch.relu)], ids=["property", "static"]
)
def test_a_new_name_in_place_of_a_deleted_one(value, base):
    class Marked(MLP):
        mark = None

    class Derived(Marked):
        pass

    plain, patched = pair(Derived())
    before, owner = plain(ROWS), Marked if base else Derived
    del Marked.mark  # so that the classes have as many names as before
    owner.act_fn = value
    assert torch.equal(patched(ROWS), plain(ROWS)) and not torch.equal(plain(ROWS), before)


@pytest.mark.parametrize("attribute", ["__defaults__", "__code__"])
def test_a_loss_that_a_program_changed_in_place_before_patch(attribute, monkeypatch):
    def summed(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs):
        return logits.sum()

    values = {"__defaults__": (None, 3, None), "__code__": summed.__code__}
    monkeypatch.setattr(loss_utils.ForCausalLMLoss, attribute, values[attribute])
    ids = tiny.tokens()["input_ids"]
    expected, found = (tiny.call(model, input_ids=ids, labels=ids).loss for model in tiny.pair())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("owner", [nn.Module, nn.Linear], ids=["nn.Module", "nn.Linear"])
def test_calls_of_linear_layers_that_a_program_replaced_before_the_first_patch(owner, monkeypatch):
    call = nn.Module.__call__

    def rounded(self, *args, **kwargs):
        result = call(self, *args, **kwargs)
        return result.bfloat16().to(result.dtype) if isinstance(self, nn.Linear) else result

    monkeypatch.setattr(owner, "__call__", rounded, raising=False)
    monkeypatch.setattr(pins, "COMMON", tuple(pin._replace(value=getattr(pin.owner, pin.name)) for pin in pins.COMMON))
    plain, patched = tiny.pair()
    assert_same_loss(plain, patched)
    expected, found = (tiny.call(m, **tiny.tokens()).logits for m in (plain, patched))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_forward_of_linear_layers_that_is_no_function(monkeypatch):
    monkeypatch.setattr(nn.Linear, "forward", functools.partialmethod(half(nn.Linear.forward)))
    assert_same_loss(*tiny.pair())


def test_a_decorator_of_attention_that_changes_later(monkeypatch):
    def switchable(function):
        @functools.wraps(function)
        def call(*args, factor=1.0, **kwargs):
            result, *others = function(*args, **kwargs)
            return result * factor, *others

        return call

    own = llama.LlamaAttention.forward
    for name, value in (
        ("cell_contents", half(own)), ("__kwdefaults__", {"factor": 0.5}), ("__code__", half(own).__code__),
    ):  # fmt: skip
        with monkeypatch.context() as context:
            context.setattr(llama.LlamaAttention, "forward", switchable(own))
            call = llama.LlamaAttention.forward
            plain, patched = tiny.pair()
            before = tiny.call(plain, **tiny.tokens()).loss
            context.setattr(call.__closure__[0] if name == "cell_contents" else call, name, value)
            assert_same_loss(plain, patched)
            assert not torch.equal(tiny.call(plain, **tiny.tokens()).loss, before), "the change shows"


def test_a_model_is_patched_where_another_device_is_the_default():
    model = tiny.model()
    with torch.device("meta"):
        summary = liger_hw.patch(model)
    assert not summary.left and tiny.is_lazy(tiny.call(model, **tiny.tokens()))
