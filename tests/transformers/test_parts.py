"""Check which rotary functions, experts and gated norms `patch` recognises."""

import copy
import dataclasses
import enum
import functools
import itertools
import types

import pytest
import tiny
import torch

import liger_hw
from liger_hw.kernels.mlp import glu
from liger_hw.kernels.norms.gated_rms_norm import gated_rms_norm
from liger_hw.patching import gated_norms, probing, rotation, swapping
from liger_hw.patching.flags import FLAG_OF, FLAGS
from liger_hw.patching.rebinding import innermost
from liger_hw.patching.rotary import match_rotation

transformers = tiny.transformers


def half(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin

    return turned(q), turned(k)


def half_scaled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = half(q, k, cos, sin, unsqueeze_dim)
    return q * 1.0001, k


def tail_of_a_wider_head(q, k, cos, sin, unsqueeze_dim=1):
    rest = q.shape[-1] - cos.shape[-1]
    outs = half(q[..., rest:], k[..., rest:], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((x[..., :rest], out), -1) for x, out in zip((q, k), outs))


def flat_in_fp32(q, k, cos, sin):
    cos, sin = cos.unsqueeze(-2).float(), sin.unsqueeze(-2).float()
    turned = (
        x.float() * cos + torch.cat((-x.float().chunk(2, -1)[1], x.float().chunk(2, -1)[0]), -1) * sin for x in (q, k)
    )
    return tuple(out.to(q.dtype) for out in turned)


def with_other_parameters(q, k, cos, sin, sections):
    return half(q, k, cos, sin)


@pytest.mark.parametrize(
    "function, shown",
    [(half, ""), (flat_in_fp32, "wide=True"), (half_scaled, None), (tail_of_a_wider_head, None),
     (with_other_parameters, None)],
    ids=lambda x: getattr(x, "__name__", str(x)),
)  # fmt: skip
def test_rotary_functions_are_proved(function, shown):
    found = match_rotation(function)
    assert found is None if shown is None else str(found) == shown


def complex_pairs(q, k, freqs_cis):
    turned = (torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * freqs_cis[:, :, None] for x in (q, k))
    return tuple(torch.view_as_real(out).flatten(3).type_as(q) for out in turned)


def test_conjugated_rotations():
    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    freqs = torch.polar(torch.ones(2, 5, 8), torch.randn(2, 5, 8)).conj()
    replaced = rotation.replacement(complex_pairs, match_rotation(complex_pairs))
    for found, expected in zip(replaced(q, k, freqs), complex_pairs(q, k, freqs)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_no_proof(default):
    """Probes are in fp32 and bf16 under any default dtype."""

    def half_again(q, k, cos, sin, unsqueeze_dim=1):
        return half_scaled(q, k, cos, sin, unsqueeze_dim)

    torch.set_default_dtype(default)
    try:
        assert match_rotation(complex_pairs) is not None and match_rotation(half_again) is None
        rows = probing.random_rows(torch.Generator().manual_seed(0), 64)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(rows, probing.random_rows(torch.Generator().manual_seed(0), 64))


def inputs(dtype, table_dtype, batch=2, tables=None):
    q, k = torch.randn(batch, 4, 5, 16, dtype=dtype), torch.randn(batch, 2, 5, 16, dtype=dtype)
    angle = torch.randn(batch if tables is None else tables, 5, 16)
    return q, k, angle.cos().to(table_dtype), angle.sin().to(table_dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_replacement_is_the_function(dtype, table_dtype):
    ours = rotation.replacement(half, match_rotation(half))
    q, k, cos, sin = inputs(dtype, table_dtype)
    calls = [((q, k, cos, sin), {}), ((q, k), {"cos": cos, "sin": sin, "unsqueeze_dim": 1})]
    calls.append(((q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2), {}))
    calls.append((inputs(dtype, table_dtype, tables=1), {}))
    for args, kwargs in calls:
        for found, expected in zip(ours(*args, **kwargs), half(*args, **kwargs)):
            assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_what_was_not_proved_goes_to_the_function(monkeypatch):
    proved = match_rotation(half)
    monkeypatch.setattr(rotation, "rope", None)
    ours = rotation.replacement(half, proved)
    q, k, cos, sin = inputs(torch.float32, torch.float32)
    learned = cos.clone().requires_grad_()
    for args in [(q, k, learned, sin), (q, k.double(), cos, sin), (q[0], k[0], cos[0], sin[0], 0)]:
        for found, expected in zip(ours(*args), half(*args)):
            assert torch.equal(found, expected)


def half_of_keys_or_none(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    turned = half(q, q if k is None else k, cos, sin, unsqueeze_dim)
    return turned[0] if k is None else turned


def test_queries_alone():
    ours = rotation.replacement(half_of_keys_or_none, match_rotation(half_of_keys_or_none))
    q, k, cos, sin = inputs(torch.float32, torch.float32)
    assert torch.equal(ours(q, cos=cos, sin=sin), half_of_keys_or_none(q, cos=cos, sin=sin))
    assert torch.equal(ours(q, k, cos, sin)[1], half(q, k, cos, sin)[1])


def test_flat_tokens_of_a_vision_tower():
    proved = match_rotation(flat_in_fp32)
    q, k, cos, sin = (x[0].transpose(0, 1) if x.ndim == 4 else x[0] for x in inputs(torch.bfloat16, torch.bfloat16))
    args = q, k, cos, sin
    for found, expected in zip(rotation.replacement(flat_in_fp32, proved)(*args), flat_in_fp32(*args)):
        assert torch.equal(found, expected)


RANDOM = torch.randn(4, 2, 4, 6, 16, generator=torch.Generator().manual_seed(0))
Q, K, COS, SIN = RANDOM[0], RANDOM[1, :, :2], RANDOM[2, :, 0], RANDOM[3, :, 0]


@pytest.mark.parametrize(
    "args",
    {
        "a sine that is learned": (Q, K, COS, SIN.clone().requires_grad_()),
        "a sine for all rows": (Q, K, COS, SIN[:1]),
        "keys of one token": (Q, K[:, :, :1], COS, SIN),
        "keys of one row": (Q, K[:1], COS, SIN),
        "keys of five dimensions": (Q, K[None], COS, SIN),
        "an odd width": tuple(x[..., :15] for x in (Q, K, COS, SIN)),
        "whole numbers": tuple((10 * x).long() for x in (Q, K, COS, SIN)),
        "complex heads": (Q + 0j, K + 0j, COS, SIN),
    }.items(),
    ids=lambda item: item[0],
)
def test_arguments_that_the_op_does_not_take_run_the_models_function(args):
    function = tiny.transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    ours = rotation.replacement(function, match_rotation(function))
    for found, expected in zip(ours(*args[1]), function(*args[1]), strict=True):
        assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad


def test_decorated_methods_call_the_replacement():
    import functools

    def decorator(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    namespace = {"__name__": "remote", "apply_rotary_pos_emb": half, "decorator": decorator, "torch": torch}
    code = """
class Attention(torch.nn.Module):
    @decorator
    def forward(self, *args):
        return apply_rotary_pos_emb(*args)
"""
    exec(code, namespace)  # noqa: S102
    module = namespace["Attention"]()
    summary = liger_hw.patch(module)
    assert summary.replaced["Attention", "rope"] == 1
    assert innermost(type(module).forward).__code__.co_names == ("_liger_hw_0_apply_rotary_pos_emb",)
    args = inputs(torch.float32, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(module(*args), half(*args)))


class Plain(torch.nn.Module):
    """fc, dropout, activation, dropout, fc, dropout."""

    def __init__(self, activation, **chances):
        super().__init__()
        self.first, self.last = torch.nn.Linear(32, 48), torch.nn.Linear(48, 32, bias=False)
        self.act, self.has_two = activation, "activation_dropout" in chances
        for name, p in (chances | {"dropout": chances.get("dropout", 0.0)}).items():
            setattr(self, name, p)

    def forward(self, x):
        before = self.activation_dropout if self.has_two else self.dropout
        x = torch.nn.functional.dropout(self.act(self.first(x)), before, self.training)
        return torch.nn.functional.dropout(self.last(x), self.dropout, self.training)


CHANCES = [
    {}, {"dropout": 0.3}, {"activation_dropout": 0.2, "dropout": 0.3}, {"dropout": 0.3, "activation_dropout": 0.2},
    {"other_dropout": 0.5, "dropout": 0.1, "activation_dropout": 0.2},
]  # fmt: skip


ACTIVATIONS = ["relu2", "gelu_new", "gelu_pytorch_tanh", "gelu", "quick_gelu", "silu", "gelu_accurate"]


def pytest_generate_tests(metafunc):
    if "chances" in metafunc.fixturenames:
        cases = list(itertools.product(ACTIVATIONS, CHANCES))
        if metafunc.config.getoption("models", "few") == "few":  # one activation with every place of a dropout
            cases = [(name, chances) for name, chances in cases if not chances or name == "quick_gelu"]
        metafunc.parametrize("name, chances", cases, ids=[f"{name}-{chances}" for name, chances in cases])


def test_mlps_without_a_gate(name, chances):
    plain = Plain(transformers.activations.ACT2FN[name], **chances)
    patched = copy.deepcopy(plain)
    summary = liger_hw.patch(patched)
    assert [n for n, _ in summary.replaced] == ["Plain"] and not summary.left
    for dtype in (torch.float32, torch.bfloat16):
        x = 3 * torch.randn(5, 32, dtype=dtype)
        assert torch.equal(seeded(patched.to(dtype), x), seeded(plain.to(dtype), x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(seeded(patched, x), seeded(plain, x))
    patched.last.float(), plain.last.float()  # an error of torch's, as before
    for module in (plain, patched):
        with pytest.raises(RuntimeError, match="dtype"):
            module(x)


def seeded(module, x):
    torch.manual_seed(0)
    return module(x)


@pytest.mark.parametrize("name", ["relu", "gelu_fast", "mish", "tanh", "sigmoid"])
def test_other_activations_are_left(name):
    module = Plain(transformers.activations.ACT2FN[name])
    summary = liger_hw.patch(module)
    assert not summary.replaced and not swapping.is_swapped(module)


def test_a_projection_in_another_dtype_gets_what_the_model_makes_of_it():
    """T5 keeps its last projection in fp32."""
    config = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": 64}
    for kind in ("gated-gelu", "gated-silu"):
        plain = transformers.T5EncoderModel(transformers.T5Config(**config, feed_forward_proj=kind)).bfloat16().eval()
        plain.encoder.block[0].layer[1].DenseReluDense.wo.float()
        patched = copy.deepcopy(plain)
        assert any(match.kind == "mlp" for match in (getattr(type(m), "liger_match", None) for m in patches(patched)))
        ids = torch.arange(6)[None]
        assert torch.equal(patched(ids).last_hidden_state, plain(ids).last_hidden_state)


def patches(model):
    liger_hw.patch(model)
    return [m for m in model.modules() if swapping.is_swapped(m)]


def test_activations_in_operations_are_served_where_no_mlp_is():
    act = transformers.activations.ACT2FN["gelu_new"]
    name = type(act).__name__
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), act, transformers.activations.ACT2FN["gelu"])
    plain = copy.deepcopy(module)
    summary = liger_hw.patch(module)
    assert dict(summary.replaced) == {(name, "activate(activation='gelu_new')"): 1}
    x = torch.randn(3, 8)
    assert torch.equal(module(x), plain(x))
    assert liger_hw.patch(module, geglu=False).left == {(name, "geglu=False"): 1}
    liger_hw.unpatch(module)
    assert type(module[1]) is type(act) and module[1] is act


@pytest.mark.parametrize("flag, name", [("relu_squared", "relu2"), ("geglu", "gelu"), ("swiglu", "silu")])
def test_flags_of_mlps_without_a_gate(flag, name):
    module = Plain(transformers.activations.ACT2FN[name])
    assert liger_hw.patch(module, **{flag: False}).left["Plain", f"{flag}=False"] == 1
    others = {other: False for other in ("relu_squared", "geglu", "swiglu") if other != flag}
    assert liger_hw.patch(module, **others).replaced


def mixtral(implementation):
    model = tiny.model("mixtral", num_local_experts=4, num_experts_per_tok=2)
    if not hasattr(model, "set_experts_implementation"):
        pytest.skip("this transformers has no experts interface")
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere"])
def test_fp64_has_the_models_own_roundings(family):
    """Many models round rows to fp32 there, which no op does."""
    plain = tiny.model(family).double()
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    ids = torch.arange(3, 11)[None]
    gradients = []
    for model in (plain, patched):
        model(input_ids=ids).logits.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(map(torch.equal, *gradients))


def test_each_activation_has_a_flag():
    assert {FLAG_OF.get(name, name) for name in glu.ACTIVATIONS} <= set(FLAGS)


def test_experts_of_an_implementation_that_gates_by_itself_are_left():
    model = mixtral("eager")
    summary = liger_hw.patch(model)
    assert summary.left["MixtralExperts", "experts implementation 'eager' does not call the module's gate"] == 2
    assert not any(swapping.is_swapped(m) for m in model.modules() if type(m).__name__.endswith("Experts"))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_experts_are_of_one_model_only(implementation):
    plain, patched = mixtral(implementation), mixtral(implementation)
    liger_hw.patch(patched)
    ours, theirs = (m.model.layers[0].mlp.experts for m in (patched, plain))
    assert swapping.is_swapped(ours) and not swapping.is_swapped(theirs)
    assert patched.config._experts_implementation == plain.config._experts_implementation == implementation
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())
    liger_hw.unpatch(patched)
    assert type(ours) is type(theirs)


def test_limits_are_read_where_the_model_keeps_them():
    plain, patched = tiny.pair("gpt_oss", num_local_experts=4, num_experts_per_tok=2)
    for model in (plain, patched):
        for layer in model.model.layers:
            layer.mlp.experts.limit = 0.3
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())


class ClampedMLP(torch.nn.Module):
    """gpt_oss's gate in a dense MLP."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            torch.nn.Linear(*size, bias=False) for size in ((16, 40), (16, 40), (40, 16))
        )
        self.limit, self.alpha = 0.5, 1.702

    def forward(self, x):
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj((up + 1) * (gate * torch.sigmoid(gate * self.alpha)))


@pytest.mark.parametrize("alpha", [1.702, 0.0, 0.5])
def test_a_clamped_mlp_follows_its_alpha(alpha):
    plain, x = torch.nn.Sequential(ClampedMLP()), torch.randn(3, 16)
    patched = copy.deepcopy(plain)
    assert "clamped_swiglu(offset=1.0)" in str(liger_hw.patch(patched))
    plain[0].alpha = patched[0].alpha = alpha
    assert torch.equal(patched(x), plain(x))


class GatedNorm(torch.nn.Module):
    def __init__(self, form):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.randn(64)), 1e-6
        self.options = tuple(form.items())

    def forward(self, hidden_states, gate=None):
        return gated_rms_norm.reference(hidden_states, gate, self.weight, self.variance_epsilon, **dict(self.options))


@pytest.mark.parametrize("form", gated_norms.FORMS, ids=str)
def test_gated_norms_of_every_form(form):
    """Each combination of the op's options is recognised as itself."""
    patched = GatedNorm(form)
    plain = copy.deepcopy(patched)
    assert dict(gated_norms.match_gated_norm(patched).options) == form
    assert patches(patched) == [patched]
    x, gate = torch.randn(2, 3, 64).bfloat16()
    assert torch.equal(patched.bfloat16()(x, gate), plain.bfloat16()(x, gate))


class GatedBy(torch.nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))
        self.activation = activation

    def forward(self, x):
        functions = self.activation["own"] if isinstance(self.activation, dict) else self.activation
        return self.down_proj(functions(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("kind", [lambda function: function, lambda function: {"own": function}], ids=["it", "in dict"])
def test_functions_that_a_module_keeps_are_facts_about_it(kind):
    """Modules of one class are recognised apart if they differ in a function only."""
    x = torch.randn(3, 64)
    for activation in (torch.nn.functional.silu, torch.nn.functional.gelu, torch.sin):
        patched = GatedBy(kind(activation))
        plain = copy.deepcopy(patched)
        liger_hw.patch(patched)
        assert torch.equal(patched(x), plain(x))
        served = activation in (torch.nn.functional.silu, torch.nn.functional.gelu)
        assert swapping.is_swapped(patched) == served


@dataclasses.dataclass
class Settings:
    centred: bool

    def read(self):
        return self.centred


@dataclasses.dataclass
class PlainSettings:
    centred: bool


@dataclasses.dataclass(slots=True)
class Slots:
    centred: bool


class Held:
    def __init__(self, centred):
        self.centred = centred


@dataclasses.dataclass
class PerLayer(Settings):
    """Configuration whose layers differ: an attribute read by name is refused, as `Gemma4TextConfig` does."""

    def __getattribute__(self, name):
        if name == "centred":
            raise ValueError("centred may vary across layers")
        return super().__getattribute__(name)


class Centre(enum.Enum):
    ROWS = True
    NOTHING = False


HOLDERS = {  # an attribute that holds a fact, and how a forward reads the fact
    "dataclass": (Settings, lambda held: held.centred),
    "per layer": (PerLayer, lambda held: vars(held)["centred"]),
    "slots": (Slots, lambda held: held.centred),
    "plain dataclass": (PlainSettings, lambda held: held.centred),
    "object": (Held, lambda held: held.centred),
    "namespace": (lambda centred: types.SimpleNamespace(centred=centred), lambda held: held.centred),
    "dict": (lambda centred: {"norm": [Held(centred)]}, lambda held: held["norm"][0].centred),
    "partial": (lambda centred: functools.partial(bool, centred), lambda held: held()),
    "method": (lambda centred: Settings(centred).read, lambda held: held()),
    "enum": (Centre, lambda held: held.value),
    "tensor": (torch.tensor, bool),
}
# no call could notice that their contents, or what vars() lists, changed; or their class has code of its own
UNSEEN = ("slots", "tensor", "per layer", "dataclass", "method")


class Configured(torch.nn.Module):
    """RMSNorm, or a norm that no op computes, as an attribute says."""

    def __init__(self, held, read):
        super().__init__()
        self.held, self.read, self.weight = held, read, torch.nn.Parameter(torch.rand(64))

    def forward(self, x):
        wide = x.float()
        rows = wide - wide.median() if self.read(self.held) else wide
        return self.weight * (rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class WithoutWeight(torch.nn.Module):
    """A norm without a weight, which calls one of torch's functions to reduce the squares."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(self.reduce(wide.pow(2), -1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("reduce, name", [(torch.sum, "l2_norm"), (torch.mean, "rms_norm")])
def test_norms_without_a_weight(reduce, name):
    patched = WithoutWeight(reduce)
    plain, x = copy.deepcopy(patched), torch.randn(3, 64, dtype=torch.bfloat16)
    assert dict(liger_hw.patch(patched, rms_norm=False).replaced) == {}
    ((match, count),) = liger_hw.patch(patched).replaced.items()
    assert count == 1 and name in str(match)
    assert torch.equal(patched(x), plain(x))


@pytest.mark.parametrize("holder", HOLDERS)
def test_what_a_module_holds_tells_it_apart(holder):
    x = torch.randn(3, 64)
    hold, read = HOLDERS[holder]
    for centred in (False, True, False):
        patched = Configured(hold(centred), read)
        plain = copy.deepcopy(patched)
        liger_hw.patch(patched)
        assert torch.equal(patched(x), plain(x))
        assert swapping.is_swapped(patched) == (not centred and holder not in UNSEEN)


def test_what_a_child_holds_tells_a_module_apart():
    class Scaled(torch.nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.scale = scale

        def forward(self, x):
            return torch.nn.functional.silu(x) * self.scale

    x = torch.randn(3, 64)
    for scale in (1.0, 2.0):
        patched = GatedBy(torch.nn.functional.silu)
        patched.activation = Scaled(scale)
        plain = copy.deepcopy(patched)
        liger_hw.patch(patched)
        assert torch.equal(patched(x), plain(x))
