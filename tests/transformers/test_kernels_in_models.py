"""Compare a patched model whose ops run as Triton kernels with the plain model."""

import copy
import importlib
import warnings

import pytest
import tiny
import torch
from saved import saved_bytes
from torch.utils.checkpoint import checkpoint

import liger_hw
from liger_hw.kernels.mlp import _in_place

glu_linear_module = importlib.import_module("liger_hw.kernels.mlp.glu_linear")
FAMILIES = "glm4 gpt_oss mixtral llama gemma2 phi3 stablelm nemotron phi llama4_text".split()


@pytest.mark.parametrize("family", FAMILIES)
def test_model_learns_as_theirs(family, backend, device):
    plain, patched = (m.to(device) for m in tiny.pair(family))
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **inputs)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_a_trace_of_torch_jit_has_the_models_operations(family, backend, device):
    def logits(model, ids):
        return model.eval()(input_ids=ids, use_cache=False).logits

    plain, patched = (m.to(device).requires_grad_(False) for m in tiny.pair(family))
    ids = tiny.tokens()["input_ids"].to(device)
    with liger_hw.use_backend(backend), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda ids: logits(patched, ids), ids, check_trace=False)
    torch.testing.assert_close(traced(ids.flip(0)), logits(plain, ids.flip(0)), rtol=1e-4, atol=1e-4)


def test_half_precision(backend, device):
    plain, patched = (m.to(device) for m in tiny.pair("llama", torch.float16))
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    expected = tiny.call(plain, **inputs)
    with liger_hw.use_backend(backend):
        found = tiny.call(patched, **inputs)
        found.loss.backward()
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-2, atol=0)
    assert all(p.grad.isfinite().all() for p in patched.parameters())


def test_a_second_backward_says_why_it_cannot(backend, device):
    _, patched = tiny.pair("llama", num_hidden_layers=1)
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    with liger_hw.use_backend(backend):
        loss = patched.to(device)(**inputs).loss
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second"):
            loss.backward()


class Keeping(torch.nn.Linear):
    """A projection that keeps its output."""

    def forward(self, x):
        self.kept = super().forward(x)
        return self.kept


class Fixed(torch.nn.Linear):
    """A projection that returns a parameter, whatever its input is: an ablation."""

    def forward(self, x):
        return self.weight[:, 0].expand(*x.shape[:-1], -1)


def hook_that_keeps(mlp, name, kept):
    mlp.get_submodule(name).register_forward_hook(lambda module, args, out: kept.append(out.detach()))


def hook_with_a_penalty(mlp, name, kept):
    mlp.get_submodule(name).register_forward_hook(lambda module, args, out: kept.append(out.square().mean()))


def hook_with_a_numpy_view(mlp, name, kept):
    mlp.get_submodule(name).register_forward_hook(
        lambda module, args, out: kept.append(torch.from_numpy(out.detach().cpu().numpy()))
    )


def hook_that_patches_in(mlp, name, kept):
    shape = 1, 7, mlp.get_submodule(name).out_features
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(next(mlp.parameters()).device)
    kept.append(value := value.requires_grad_() * 1)
    mlp.get_submodule(name).register_forward_hook(lambda module, args, out: value)


def forward_on_the_instance(mlp, name, kept):
    projection = mlp.get_submodule(name)
    original = projection.forward
    projection.forward = lambda x: (kept.append(out := original(x)), out)[1]


def subclass_that_keeps(mlp, name, kept):
    mlp.get_submodule(name).__class__ = Keeping
    mlp.register_forward_hook(lambda module, args, out: kept.append(module.get_submodule(name).kept))


def hook_on_every_module(mlp, name, kept):
    projection = mlp.get_submodule(name)
    return torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: kept.append(out) if module is projection else None
    )


WATCHERS = [
    hook_that_keeps, hook_with_a_penalty, hook_with_a_numpy_view, hook_that_patches_in, forward_on_the_instance,
    subclass_that_keeps, hook_on_every_module,
]  # fmt: skip


@pytest.mark.parametrize("watch", WATCHERS)
@pytest.mark.parametrize(
    "family, name", [("llama", "gate_proj"), ("llama", "up_proj"), ("phi3", "gate_up_proj"), ("phi", "fc1")]
)
def test_a_backward_writes_over_nothing_that_the_program_keeps(family, name, watch, backend, device):
    plain, patched = tiny.pair(family, num_hidden_layers=1)
    inputs, results = {key: x.to(device) for key, x in tiny.tokens(1, 7).items()}, []
    for model, by in ((plain, "reference"), (patched, backend)):
        kept = []
        mlp = model.to(device).model.layers[0].mlp
        with liger_hw.use_backend(by):
            handle = watch(mlp, name, kept)
            loss = model(**inputs, use_cache=False).loss
            penalty = kept[0] if watch is hook_with_a_penalty else 0
            (loss + penalty).backward()
            if handle is not None:
                handle.remove()
        results.append([loss.detach(), *(x.detach().clone() for x in kept), *(p.grad for p in mlp.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4) if expected is not None else None


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_a_projection_that_returns_a_parameter(name, backend, device):
    plain, patched = tiny.pair(num_hidden_layers=1)
    inputs = {key: x.to(device) for key, x in tiny.tokens(1, 7).items()}
    for model in (plain.to(device), patched.to(device)):
        model.model.layers[0].mlp.get_submodule(name).__class__ = Fixed
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **inputs)


class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        return self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.mlp = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), MLP()

    def forward(self, x):
        q, k, y = self.q_proj(x), self.k_proj(x), self.mlp(x)
        q *= 2
        y += q.add_(k)
        return y


def adapted(module):
    peft = pytest.importorskip("peft")
    options = peft.LoraConfig(target_modules=["q_proj", "k_proj", "gate_proj", "down_proj"], r=4)
    return peft.get_peft_model(torch.nn.Sequential(module), options).base_model.model[0]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("build", [Layer, lambda: adapted(Layer())], ids=["plain", "adapted"])
def test_a_program_writes_to_the_results_of_layers(build, checkpointed, backend, device):
    plain = build().to(device)
    patched, results = copy.deepcopy(plain), []
    assert liger_hw.patch(patched).replaced
    for module, by in ((plain, "reference"), (patched, backend)):
        x = torch.ones(2, 3, 16, device=device, requires_grad=True)
        with liger_hw.use_backend(by):
            y = checkpoint(module, x, use_reentrant=False) if checkpointed else module(x)
            y.mul_(2)
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in module.parameters() if p.grad is not None)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_write_to_what_a_backward_needs_says_what_to_do(backend, device):
    norm = torch.nn.RMSNorm(16, device=device)
    liger_hw.patch(norm)
    x = torch.ones(2, 16, device=device, requires_grad=True) * 1
    with liger_hw.use_backend(backend):
        x += norm(x)
        with pytest.raises(
            RuntimeError,
            match="RmsNormFunction keeps for its backward was modified by an inplace operation: write to a copy",
        ):
            x.sum().backward()


def test_projections_of_a_model_are_written_over(backend, device, monkeypatch):
    """The memory that the decision saves: nobody watches plain layers."""
    decisions = []
    decide = _in_place.writes_over
    monkeypatch.setattr(
        glu_linear_module, "writes_over", lambda *args: decisions.append(decide(*args)) or decisions[-1]
    )
    _, patched = tiny.pair(num_hidden_layers=2)
    inputs = {key: x.to(device) for key, x in tiny.tokens(1, 7).items()}
    with liger_hw.use_backend(backend):
        patched.to(device)(**inputs).loss.backward()
    assert decisions == [True, True]


MIXTURES = {"num_experts_per_tok": 2, "experts_implementation": "grouped_mm"}
MIXTURES_OF = {
    "mixtral": {"num_local_experts": 4, "num_hidden_layers": 1},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_hidden_layers": 1},
    "nemotron_h": {  # without a gate
        "layers_block_type": ["moe"], "n_routed_experts": 4, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
CHECKPOINTED = {  # family -> configuration of one layer whose parts go backward in memory of their forward, or are new
    "glm4": {},
    "gpt_oss": {"num_local_experts": 4, **MIXTURES},
    "mixtral": {"num_local_experts": 4, **MIXTURES},
    "nemotron": {},
    "qwen3_next": {"layer_types": ["linear_attention"], "num_experts": 4, "moe_intermediate_size": 32, **MIXTURES},
}


@pytest.mark.parametrize("family", CHECKPOINTED)
def test_gradient_checkpointing(family, backend, device):
    plain, patched = (m.to(device) for m in tiny.pair(family, num_hidden_layers=1, **CHECKPOINTED[family]))
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    for reentrant in (False, True):
        for model in (plain, patched):
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with liger_hw.use_backend(backend):
            tiny.assert_learns_alike(plain, patched, **inputs)


@pytest.fixture
def calls_of_experts(monkeypatch):
    """The arguments with which the op sorted tokens by expert, once for each forward."""
    from liger_hw.kernels.moe import experts

    calls, sort = [], experts.sort_pairs
    monkeypatch.setattr(experts, "sort_pairs", lambda *args: calls.append(args) or sort(*args))
    return calls


def test_experts_of_a_model_built_under_another_default_dtype(backend, device, calls_of_experts):
    plain, patched = (tiny.model("mixtral", **MIXTURES_OF["mixtral"], **MIXTURES).to(device) for _ in range(2))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        liger_hw.patch(patched)
    finally:
        torch.set_default_dtype(before)
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **{key: x.to(device) for key, x in tiny.tokens(1, 7).items()})
    assert len(calls_of_experts) == 1


@pytest.mark.parametrize("frozen", ["", "gate_up_proj", "down_proj", "mlp.gate."], ids=str)
@pytest.mark.parametrize("family", MIXTURES_OF)
def test_experts_learn_as_theirs(family, frozen, backend, device, calls_of_experts):
    plain, patched = (m.to(device) for m in tiny.pair(family, **MIXTURES_OF[family], **MIXTURES))
    for model in (plain, patched):
        for name, p in model.named_parameters():
            p.requires_grad_(not frozen or frozen not in name)
    inputs = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **inputs)
    assert len(calls_of_experts) == 1


def moved(function):
    """Return a function whose result, a tensor, has its last column first."""

    def roll(*args, **kwargs):
        result = function(*args, **kwargs)
        return result.roll(1, -1) if torch.is_tensor(result) else result

    return roll


REPLACED = {  # what transformers' grouped experts call, or what calls them
    "_grouped_linear": "transformers.integrations.moe",
    "_grouped_mm": "transformers.integrations.moe",
    "grouped_mm": "torch.nn.functional",
    "histc": "torch",
    "cumsum": "torch",
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", REPLACED)
def test_a_function_that_experts_call_is_replaced(name, when, backend, device, monkeypatch):
    plain, patched = (tiny.model("mixtral", **MIXTURES_OF["mixtral"], **MIXTURES).to(device) for _ in range(2))
    place = importlib.import_module(REPLACED[name])
    inputs = {key: x.to(device) for key, x in tiny.tokens(2, 7).items()}
    before = tiny.call(plain, **inputs).loss
    if when == "after":
        liger_hw.patch(patched)
    monkeypatch.setattr(place, name, moved(getattr(place, name)))
    if when == "before":
        reason = f"a program replaced {name}, which grouped experts call"
        assert liger_hw.patch(patched).left["MixtralExperts", reason] == 1
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **inputs)
    assert tiny.call(plain, **inputs).loss != before


@pytest.mark.parametrize("when", ["before", "after"])
def test_another_choice_among_implementations_of_experts(when, backend, device, monkeypatch):
    from transformers.integrations import moe

    plain, patched = (tiny.model("mixtral", **MIXTURES_OF["mixtral"], **MIXTURES).to(device) for _ in range(2))
    if when == "after":
        liger_hw.patch(patched)
    choose = moe.ExpertsInterface.get_interface
    monkeypatch.setattr(moe.ExpertsInterface, "get_interface", lambda *args: moved(choose(*args)))
    if when == "before":
        liger_hw.patch(patched)
    with liger_hw.use_backend(backend):
        tiny.assert_learns_alike(plain, patched, **{key: x.to(device) for key, x in tiny.tokens(1, 7).items()})


def patched_experts(device):
    """Return a plain and a patched group of experts, and its arguments for 7 tokens."""
    pair = tiny.pair("mixtral", **MIXTURES_OF["mixtral"], **MIXTURES)
    x = torch.randn(7, tiny.TINY["hidden_size"], device=device)
    index = torch.arange(14, device=device).view(7, 2) % 4
    experts = (model.to(device).model.layers[0].mlp.experts for model in pair)
    return *experts, x, index, torch.rand(7, 2, device=device)


@pytest.mark.parametrize("shape", [(7, 2, 1), (14,), (2, 7), (8, 2)], ids=str)
def test_routing_weights_in_other_shapes(shape, backend, device):
    plain, patched, x, index, weights = patched_experts(device)
    weights = torch.cat((weights, weights[:1])) if shape == (8, 2) else weights.view(shape)
    with liger_hw.use_backend(backend):
        torch.testing.assert_close(patched(x, index, weights), plain(x, index, weights))


def test_another_number_of_experts_than_the_weights_have(backend, device):
    *both, x, index, weights = patched_experts(device)
    for experts in both:
        experts.num_experts = 5
        with liger_hw.use_backend(backend), pytest.raises(RuntimeError, match="batch"):
            experts(x, index, weights)


@pytest.mark.parametrize("family", ["mixtral", "nemotron_h"])
def test_hooks_on_the_activation_of_patched_experts_fire(family, backend, device):
    _, patched = tiny.pair(family, **MIXTURES_OF[family], **MIXTURES)
    (experts,) = [m for m in patched.to(device).modules() if type(m).__name__.endswith("Experts")]
    inputs, seen = {name: x.to(device) for name, x in tiny.tokens(1, 7).items()}, []
    with liger_hw.use_backend(backend):
        handle = experts.act_fn.register_forward_hook(lambda *_: seen.append(1))
        tiny.call(patched, **inputs).loss.backward()
        assert seen
        handle.remove()
        seen.clear()
        tiny.call(patched, **inputs)
    assert not seen


def test_checkpointing_projects_no_experts_again(backend, device, monkeypatch):
    from liger_hw.kernels.moe import experts

    _, patched = tiny.pair("mixtral", num_local_experts=4, num_hidden_layers=1, **MIXTURES)
    patched.to(device).gradient_checkpointing_enable({"use_reentrant": False})
    calls = []
    for name in ("multiply_rows", "multiply_groups"):
        multiply = getattr(experts, name)
        monkeypatch.setattr(experts, name, lambda *args, multiply=multiply: calls.append(args) or multiply(*args))
    with liger_hw.use_backend(backend):
        loss = tiny.call(patched, **{name: x.to(device) for name, x in tiny.tokens(1, 7).items()}).loss
        assert len(calls) == 2
        loss.backward()
    assert len(calls) == 2 + 1 + 4  # forward, gate and up again, and the gradients of two products


def test_experts_keep_gate_and_up_alone(backend, device):
    plain, patched = tiny.pair("mixtral", num_local_experts=4, num_hidden_layers=1, **MIXTURES)
    tokens, hidden, intermediate = 64, tiny.TINY["hidden_size"], tiny.TINY["intermediate_size"]
    x = torch.randn(tokens, hidden, device=device, requires_grad=True)
    index = torch.arange(2 * tokens, device=device).view(tokens, 2) % 4
    weights = torch.rand(tokens, 2, device=device)
    with liger_hw.use_backend(backend):
        theirs, ours = (
            saved_bytes(lambda m=m: m(x, index, weights), x, index, weights, *m.parameters())
            for m in (model.to(device).model.layers[0].mlp.experts for model in (plain, patched))
        )
        pairs = 2 * tokens * 4  # bytes of one value of every pair of a token and an expert
        assert ours < pairs * (2 * intermediate + 8)
        assert theirs > pairs * (2 * hidden + 3 * intermediate)
        out = patched.model.layers[0].mlp.experts(x, index, weights).sum()
        for kept in (True, False):  # a backward that keeps its graph does not write over them
            (dx,) = torch.autograd.grad(out, x, retain_graph=kept)
            (expected,) = torch.autograd.grad(plain.model.layers[0].mlp.experts(x, index, weights).sum(), x)
            torch.testing.assert_close(dx, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("part", ["norm", "activation"])
@pytest.mark.parametrize("dims", [(1, 0), (1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0)], ids=str)
def test_results_keep_the_memory_order(part, dims, backend, device):
    plain, patched = (m.to(device) for m in tiny.pair("llama", num_hidden_layers=1))
    if part == "norm":
        plain, patched = plain.model.norm, patched.model.norm
    else:
        gelu = tiny.transformers.activations.NewGELUActivation
        plain, patched = gelu(), torch.nn.Sequential(gelu())
        assert liger_hw.patch(patched).replaced
    sizes = [0] * len(dims)
    for dim, place in enumerate(dims):  # x.permute(dims) ends with the hidden size
        sizes[place] = (5, 3, 64)[dim + 3 - len(dims)]
    x = torch.randn(sizes, device=device).permute(dims)
    with liger_hw.use_backend(backend):
        found = patched(x)
    torch.testing.assert_close(found, plain(x))
    assert found.stride() == plain(x).stride()
