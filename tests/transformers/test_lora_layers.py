"""PEFT's LoRA layers in every state: patched ones beside plain ones, by the parity rule against float64."""

import copy
import functools

import pytest
import tiny
import torch
from torch.utils.checkpoint import checkpoint

import liger_hw
from liger_hw.kernels.linear.lora_linear import lora_linear_group
from liger_hw.patching import projection, swapping
from liger_hw.testing.parity import compare

peft = pytest.importorskip("peft", reason="the package peft is not installed")
dora, layer = (pytest.importorskip(f"peft.tuners.lora.{name}") for name in ("dora", "layer"))

COLS, FEATURES = 40, 24
BOTH = ["default", "second"]


def config(**options):
    return peft.LoraConfig(**{"target_modules": ["0"], "r": 4, "lora_alpha": 3, "init_lora_weights": False} | options)


def model(second=None, bias=True, **options):
    """A PEFT model of one layer with its adapters, equal in each call."""
    torch.manual_seed(3)
    wrapped = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(COLS, FEATURES, bias)), config(**options))
    if second is not None:
        add_second(wrapped, **second)
    return wrapped


def add_second(wrapped, **options):
    torch.manual_seed(4)
    wrapped.add_adapter("second", config(r=3, **options))
    wrapped.base_model.set_adapter(BOTH)


def layer_of(wrapped):
    return wrapped.base_model.model[0]


def cast(wrapped, dtype, adapters):
    for name, parameter in wrapped.named_parameters():
        parameter.data = parameter.data.to(adapters if "lora" in name else dtype)
    return wrapped


def pair(dtype=torch.float32, adapters=torch.float32, **options):
    plain, patched = (cast(model(**options), dtype, adapters) for _ in range(2))
    liger_hw.patch(patched)
    assert swapping.is_swapped(layer_of(patched))
    return plain, patched


def step(wrapped, dtype, call=lambda module, x: module(x), autocast=None, module=None):
    """Return a result of `module`, or the layer, and the gradients of the input and of what the model trains."""
    torch.manual_seed(1)
    device = next(wrapped.parameters()).device
    x = torch.randn(2, 7, COLS, dtype=torch.float64).to(device, dtype).requires_grad_()
    with autocasting(device, autocast):
        y = call(module or layer_of(wrapped), x)
    if y.requires_grad:
        y.backward(torch.randn(y.shape, dtype=torch.float64).to(y))
    trained = [p for p in wrapped.parameters() if p.requires_grad]
    gradients = [x.grad, *(p.grad for p in trained)]
    wrapped.zero_grad()
    return [y.detach(), *gradients]


def autocasting(device, dtype):
    return torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None)


def assert_same(plain, patched, dtype=torch.float32, is_served=True, **options):
    x = torch.zeros(2, 7, COLS, dtype=dtype, device=layer_of(plain).base_layer.weight.device)
    with autocasting(x.device, options.get("autocast")):
        assert (layer_of(patched).liger_adapted(x) is not None) == is_served
    exact = step(copy.deepcopy(plain).double(), torch.float64)
    compare(exact, step(plain, dtype, **options), step(patched, dtype, **options), "LoRA", [x])


STATES = {
    "bias": {"lora_bias": True},
    "bias alone": {"lora_bias": True, "bias": False},
    "rank of 70": {"r": 70},
    "two": {"second": {}},
    "two with biases": {"second": {"lora_bias": True}, "lora_bias": True},
    "DoRA": {"use_dora": True},
    "DoRA without a bias": {"use_dora": True, "bias": False, "r": 70},
    "two with a rank of 70": {"second": {}, "r": 70, "use_rslora": True},
}
DTYPES = {
    "fp32": (torch.float32, torch.float32), "fp16": (torch.float16, torch.float16),
    "fp16 and fp32": (torch.float16, torch.float32), "bf16": (torch.bfloat16, torch.bfloat16),
    "bf16 and fp32": (torch.bfloat16, torch.float32),
}  # fmt: skip


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("state", STATES)
def test_states(state, dtypes):
    dtype, adapters = DTYPES[dtypes]
    assert_same(*pair(dtype, adapters, **STATES[state]), dtype)


@pytest.mark.parametrize("dtypes", ["fp16", "fp16 and fp32", "bf16 and fp32"])
@pytest.mark.parametrize("state", STATES)
def test_states_on_kernels(state, dtypes, backend, device):
    dtype, adapters = DTYPES[dtypes]
    models = (wrapped.to(device) for wrapped in pair(dtype, adapters, **STATES[state]))
    with liger_hw.use_backend(backend):
        assert_same(*models, dtype)


@pytest.mark.parametrize("state", STATES)
def test_states_under_autocast(state):
    assert_same(*pair(**STATES[state]), autocast=torch.float16)


@pytest.mark.parametrize("state", STATES)
def test_states_recomputed(state):
    assert_same(*pair(**STATES[state]), call=lambda *args: checkpoint(*args, use_reentrant=False))


def test_changes_of_state(tmp_path):
    models = pair(lora_bias=True)

    def change(function, is_served=True):
        for wrapped in models:
            function(wrapped)
        assert_same(*models, is_served=is_served)

    change(lambda m: m.base_model.disable_adapter_layers(), False)
    change(lambda m: m.base_model.enable_adapter_layers())
    change(lambda m: m.merge_adapter(), False)
    change(lambda m: m.unmerge_adapter())
    change(lambda m: layer_of(m).set_scale("default", 0.3))
    change(lambda m: add_second(m, lora_bias=True))
    change(lambda m: layer_of(m).scale_layer(2))
    change(lambda m: m.merge_adapter(["second"]), False)
    change(lambda m: m.unmerge_adapter())
    plain, patched = models
    assert_same(plain, copy.deepcopy(patched))
    patched.save_pretrained(tmp_path)
    loaded = model()
    liger_hw.patch(loaded)
    loaded.load_adapter(tmp_path / "second", "second", is_trainable=True)
    loaded.set_adapter("second")
    for wrapped in models:
        wrapped.base_model.set_adapter("second")
    layer_of(loaded).set_scale("second", 2)  # as `scale_layer` left it, which PEFT does not save
    torch.testing.assert_close(*(layer_of(wrapped)(torch.ones(2, COLS)) for wrapped in (loaded, patched)))
    change(lambda m: m.delete_adapter("default"))
    assert "default" not in layer_of(patched).lora_A


@pytest.mark.parametrize(
    "options, change",
    [
        ({"second": {"lora_dropout": 0.1}, "lora_dropout": 0.1}, lambda layer: None),
        ({"second": {}}, lambda layer: [part["second"].bfloat16() for part in (layer.lora_A, layer.lora_B)]),
        ({"use_dora": True, "lora_dropout": 0.1}, lambda layer: None),
        ({"second": {"use_dora": True}}, lambda layer: None),
        ({"second": {}}, lambda layer: layer.scaling.update(second=torch.tensor(0.5))),
        ({"second": {}}, lambda layer: layer.lora_B["second"].register_forward_hook(lambda _, args, y: 2 * y)),
        ({"lora_dropout": 0.1}, lambda layer: vars(layer.lora_dropout["default"]).update(inplace=True)),
    ],
    ids=[
        *("dropout of two", "another dtype", "DoRA with dropout", "DoRA of two", "a tensor as scaling", "a hook"),
        "a dropout that writes to its input",
    ],
)  # fmt: skip
def test_states_that_peft_computes(options, change):
    plain, patched = pair(**options)
    results = []
    for wrapped in (plain, patched):
        change(layer_of(wrapped))
        torch.manual_seed(2)
        x = torch.ones(2, COLS)
        results.append((layer_of(wrapped)(x), x))
    assert layer_of(patched).liger_adapted(x) is None and all(map(torch.equal, *results))


@pytest.mark.parametrize("learns", [True, False], ids=["input learns", "input is data"])
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_adapters_of_two_written_before_the_backward(autocast, part, counted, learns):
    """The backward fails where PEFT's does, or mixes two states; else it gives PEFT's gradients."""
    gradients, errors = [], []
    for wrapped in pair(second={}):
        with autocasting(torch.device("cpu"), autocast):
            y = layer_of(wrapped)(torch.ones(2, COLS, requires_grad=learns))
        weight = getattr(layer_of(wrapped), part)["second"].weight
        with torch.no_grad():
            (weight if counted else weight.data).mul_(2)
        try:
            y.float().sum().backward()
            errors.append(None)
        except RuntimeError as error:
            errors.append("by an inplace operation" in str(error) or "an adapter's weights changed" in str(error))
        gradients.append([p.grad for p in wrapped.parameters() if p.requires_grad])
    reads = autocast is None and (learns or part == "lora_B")
    assert errors == [reads and counted or None, reads or None]
    if not reads:
        torch.testing.assert_close(*gradients, rtol=2e-2 if autocast else 1e-5, atol=1e-2 if autocast else 1e-5)


@pytest.mark.parametrize("weights, cast", [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)], ids=str)
def test_two_adapters_under_autocast_to_the_other_16_bits(weights, cast):
    outputs = []
    for wrapped in pair(second={}):
        with autocasting(torch.device("cpu"), cast):
            outputs.append(layer_of(wrapped.to(weights))(torch.ones(2, COLS, dtype=weights)))
    torch.testing.assert_close(*outputs, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("kind", ["nested", "sparse"])
def test_other_rows_run_pefts_forward(kind):
    rows = torch.ones(2, COLS)
    x = torch.nested.nested_tensor([rows, rows[:1]]) if kind == "nested" else rows.to_sparse()
    plain, patched = (layer_of(wrapped) for wrapped in pair())
    outputs = [layer(x) for layer in (plain, patched)]
    assert patched.liger_adapted(x) is None
    assert all(torch.equal(*rows) for rows in (zip(*outputs) if kind == "nested" else [outputs]))


def test_forward_derivatives_of_two_adapters():
    tangents = []
    for wrapped in pair(second={}):
        weight = layer_of(wrapped).lora_B["second"].weight
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
            y = torch.func.functional_call(layer_of(wrapped), {"lora_B.second.weight": dual}, torch.ones(2, COLS))
            tangents.append(torch.autograd.forward_ad.unpack_dual(y).tangent)
    torch.testing.assert_close(*tangents)


def test_dropout_of_two_in_evaluation():
    models = pair(second={"lora_dropout": 0.1}, lora_dropout=0.1)
    assert_same(*(wrapped.eval() for wrapped in models))


def test_every_adapter_of_a_layer_counts():
    """The first decides nothing: the summary names the one that is left, and a call serves the other."""

    class Unknown:
        pass

    for unknown in BOTH:
        wrapped = model(second={})
        layer_of(wrapped).lora_variant[unknown] = Unknown()
        summary = liger_hw.patch(wrapped)
        (reason,) = (reason for name, reason in summary.left if name == "Linear")
        assert reason == "an adapter computes Unknown, which no op does"
        assert summary.replaced["Linear", "lora_linear"] == 1
        for name in BOTH:
            wrapped.base_model.set_adapter(name)
            is_served = layer_of(wrapped).liger_adapted(torch.ones(2, COLS)) is not None
            assert is_served == (name != unknown)


class MLP(torch.nn.Module):
    """A gated MLP, as in a Llama."""

    def __init__(self):
        super().__init__()
        self.gate, self.up = (torch.nn.Linear(COLS, FEATURES, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(FEATURES, COLS, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def gated(dtype, adapters, change, **options):
    torch.manual_seed(3)
    options = {"target_modules": ["gate", "up", "down"], "rank_pattern": {"up": 6}} | options
    wrapped = peft.get_peft_model(torch.nn.Sequential(MLP()), config(**options))
    cast(wrapped, dtype, adapters)
    change(wrapped, wrapped.base_model.model[0])
    return wrapped


def with_second(wrapped, mlp):
    torch.manual_seed(4)
    wrapped.add_adapter("second", config(r=3, target_modules=["gate", "up", "down"]))
    cast(wrapped, mlp.gate.base_layer.weight.dtype, mlp.gate.lora_A["default"].weight.dtype)
    wrapped.base_model.set_adapter(BOTH)


def twice(module, args, out):
    return 2 * out


# state -> options of the adapter, change of (model, MLP), whether gate and up share their gradient of x
GATED = {
    "one adapter": ({}, lambda wrapped, mlp: None, True),
    "two adapters": ({}, with_second, True),
    "scaled": ({}, lambda wrapped, mlp: mlp.up.scale_layer(3), True),
    "frozen factors": ({}, lambda wrapped, mlp: mlp.gate.lora_A.requires_grad_(False), True),
    "dropout": ({"lora_dropout": 0.2}, lambda wrapped, mlp: None, False),
    "DoRA": ({"use_dora": True}, lambda wrapped, mlp: None, False),
    "large ranks": ({"r": 40, "rank_pattern": {}}, lambda wrapped, mlp: None, False),
    "disabled": ({}, lambda wrapped, mlp: wrapped.base_model.disable_adapter_layers(), False),
    "merged": ({}, lambda wrapped, mlp: mlp.gate.merge(), False),
    "trained weight": ({}, lambda wrapped, mlp: mlp.up.base_layer.requires_grad_(), False),
    "no adapter on up": ({"target_modules": ["gate", "down"]}, lambda wrapped, mlp: None, False),
    "a hook": ({}, lambda wrapped, mlp: mlp.up.register_forward_hook(twice), False),
    "a hook inside": ({}, lambda wrapped, mlp: mlp.gate.lora_A.default.register_forward_hook(twice), False),
}  # fmt: skip


WAYS = [(state, "plain") for state in GATED]
WAYS += [(state, way) for state in ("one adapter", "two adapters") for way in ("recomputed", "autocast")]


@pytest.mark.parametrize("state, way", WAYS)
def test_gate_and_up(state, way, backend, device, monkeypatch):
    options, change, is_shared = GATED[state]
    dtypes = (torch.float16, torch.float32) if way != "autocast" else (torch.float32,) * 2
    plain, patched = (gated(*dtypes, change, **options).to(device) for _ in range(2))
    liger_hw.patch(patched)
    calls = []
    monkeypatch.setattr(projection, "lora_linear_group", lambda *args: calls.append(0) or lora_linear_group(*args))

    def call(mlp, x):
        torch.manual_seed(5)
        return checkpoint(mlp, x, use_reentrant=False) if way == "recomputed" else mlp(x)

    autocast = torch.float16 if way == "autocast" else None
    with liger_hw.use_backend(backend):
        expected, found = (
            step(wrapped, dtypes[0], call, autocast, wrapped.base_model.model[0]) for wrapped in (plain, patched)
        )
    assert len(calls) == is_shared * (2 if way == "recomputed" else 1) and len(found) == len(expected) >= 2
    for a, b in zip(found, expected):
        assert a is b is None or (a - b).abs().max() <= 0.01 * b.abs().max()


def registered_again(linear):
    weight = linear.weight
    del linear.weight
    linear.register_parameter("weight", weight)


def generated(linear):
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = weight  # as a hypernetwork sets it


@pytest.mark.parametrize("part", ["base_layer", "lora_A", "lora_B"])
@pytest.mark.parametrize("change", [torch.nn.utils.weight_norm, registered_again, generated])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_layers_with_their_weight_elsewhere(change, part):
    plain, patched = pair()
    for wrapped in (plain, patched):
        holder = getattr(layer_of(wrapped), part)
        change(holder if part == "base_layer" else holder["default"])
    for a, b in zip(step(plain, torch.float32), step(patched, torch.float32), strict=True):
        torch.testing.assert_close(b, a)


def test_replicas_of_data_parallel():
    plain, patched = pair()
    results = []
    for wrapped in (plain, patched):
        replica = layer_of(wrapped)._replicate_for_data_parallel()
        replica._modules = dict(replica._modules)
        base = replica._modules["base_layer"] = layer_of(wrapped).base_layer._replicate_for_data_parallel()
        for name, parameter in layer_of(wrapped).base_layer._parameters.items():
            setattr(base, name, parameter * 1)  # a copy with a graph, as `torch.nn.parallel.replicate` sets it
        results.append(step(wrapped, torch.float32, module=replica))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


def test_dropout_of_rows_that_are_not_contiguous(backend, device):
    plain, patched = (m.to(device) for m in pair(lora_dropout=0.3))

    def call(module, x):
        torch.manual_seed(6)
        return module(x.transpose(0, 1))

    with liger_hw.use_backend(backend):
        for a, b in zip(step(plain, torch.float32, call), step(patched, torch.float32, call), strict=True):
            torch.testing.assert_close(b, a)


def test_dora_of_one_row():
    plain, patched = pair(use_dora=True)
    x = torch.randn(COLS)
    torch.testing.assert_close(layer_of(patched)(x), layer_of(plain)(x))


def doubled(function):
    return lambda *args, **kwargs: function(*args, **kwargs) * 2


class OtherNorms(dora.DoraLinearLayer):
    def get_weight_norm(self, *args, **kwargs):
        return super().get_weight_norm(*args, **kwargs) * 2


OtherNorms.__name__ = "DoraLinearLayer"


def set_class(wrapped):
    layer_of(wrapped).lora_magnitude_vector["default"].__class__ = OtherNorms


def set_norms(wrapped):
    magnitudes = layer_of(wrapped).lora_magnitude_vector["default"]
    magnitudes.get_weight_norm = doubled(magnitudes.get_weight_norm)


def set_cast(wrapped):
    layer_of(wrapped)._cast_input_dtype = lambda x, dtype: x * 2


class Twice(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs) * 2


class Gated(torch.nn.ModuleDict):
    """PEFT's container with an adapter's strength, as a program may write it."""

    def __getitem__(self, name):
        return Twice(super().__getitem__(name))


class Box(torch.nn.Module):
    """A container that is no ModuleDict."""

    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def __getattr__(self, name):
        return getattr(super().__getattr__("layers"), name) if name == "keys" else super().__getattr__(name)

    def __contains__(self, name):
        return name in self.layers

    def __getitem__(self, name):
        return Twice(self.layers[name])


def set_container(wrapped, name, cls):
    inner = layer_of(wrapped)._modules[name]
    setattr(layer_of(wrapped), name, cls(inner))
    if cls is Gated:
        layer_of(wrapped)._modules[name]._modules = inner._modules


SET_CONTAINERS = [
    functools.partial(set_container, name=name, cls=cls)
    for name in ("lora_B", "lora_dropout") for cls in (Gated, Box)  # PEFT reads the weight of "lora_A"
]  # fmt: skip


@pytest.mark.parametrize("change", [set_class, set_norms, set_cast, *SET_CONTAINERS])
def test_code_replaced_on_a_layer(change):
    plain, patched = pair(use_dora=True)
    for wrapped in (plain, patched):
        change(wrapped)
    for a, b in zip(step(plain, torch.float32), step(patched, torch.float32), strict=True):
        torch.testing.assert_close(b, a)


REPLACED = {
    "cast": (layer.Linear, "_cast_input_dtype", lambda self, x, dtype: x * 2),
    "identity": (torch.nn.Identity, "forward", lambda self, x: x * 3),
    "norms": (dora.DoraLinearLayer, "get_weight_norm", doubled(dora.DoraLinearLayer.get_weight_norm)),
    "torch's norm": (torch.linalg, "norm", doubled(torch.linalg.norm)),
    "transposition": (dora, "transpose", lambda weight, is_transposed: weight * 2),
    "cached norms": (dora, "ENABLE_DORA_CACHING", True),
}


@pytest.mark.parametrize("name", REPLACED)
def test_code_of_peft_replaced(name, monkeypatch):
    plain, patched = pair(use_dora=True)
    monkeypatch.setattr(*REPLACED[name])
    results = []
    for wrapped in (plain.eval(), patched.eval()):
        results.append(step(wrapped, torch.float32))
        layer_of(wrapped).lora_A["default"].weight.data.mul_(1.5)
        results[-1] += step(wrapped, torch.float32)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


class Keeps:
    """A LoRA variant of a program that keeps its results."""

    def __init__(self, kept):
        self.kept = kept

    def forward(self, module, active_adapter, x, result, **options):
        self.kept.append(result + module.lora_B[active_adapter](module.lora_A[active_adapter](x)))
        return self.kept[-1]


@pytest.mark.parametrize("through", ["forward of the class", "variant"])
def test_outputs_that_a_program_keeps_are_not_written_over(through, backend, device, monkeypatch):
    wrapped = peft.get_peft_model(
        tiny.model("llama", num_hidden_layers=1), config(target_modules=["gate_proj", "up_proj"])
    )
    liger_hw.patch(wrapped.to(device))
    kept, original = [], layer.Linear.forward
    if through == "variant":
        for module in wrapped.modules():
            if isinstance(module, layer.LoraLayer):
                module.lora_variant["default"] = Keeps(kept)
    else:

        def forward(self, *args, **kwargs):
            kept.append(original(self, *args, **kwargs))
            return kept[-1]

        monkeypatch.setattr(layer.Linear, "forward", forward)
    with liger_hw.use_backend(backend):
        loss = wrapped(**{name: rows.to(device) for name, rows in tiny.tokens().items()}).loss
        before = [rows.detach().clone() for rows in kept]
        loss.backward()
    assert len(kept) == 2 and all(map(torch.equal, kept, before))
