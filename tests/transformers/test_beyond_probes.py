"""Check code that equals an op at the widths, dtypes and numbers of a probe, and not at others."""

import contextlib
import copy
import functools
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import liger_hw
from liger_hw.patching import rotation
from liger_hw.patching.recognition import recognise
from liger_hw.patching.rotary import find_rotation

DEVICE = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of sums of 64 to 128 products
moe = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
if not hasattr(moe, "Qwen3MoeExperts"):
    pytest.skip("transformers 4 has no class of experts", allow_module_level=True)


class Bare(nn.Module):
    def __init__(self, eps=1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x):
        return self.normal(x, self.eps)

    def normal(self, x, eps):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Norm(Bare):
    def __init__(self, eps=1e-6):
        super().__init__(eps)
        self.weight = nn.Parameter(torch.rand(64) + 0.5)

    def forward(self, x):
        return self.weight * self.normal(x, self.eps)


class MLP(nn.Module):
    def __init__(self, hidden=64, intermediate=128, out=None):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(intermediate, out or hidden, bias=False)
        self.scale, self.dropout = 3.0, 0.75

    def product(self, x):
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        return self.down_proj(self.product(x))


def module_like(base, forward, *args, **kwargs):
    cls = type("Part", (base,), {"__module__": __name__, "forward": forward})
    return cls(*args, **kwargs)


def results(module, x):
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    y = module(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def hold(plain, x, patched=None):
    """Check that the patched module computes what the plain one does."""
    plain, x = plain.to(DEVICE), x.to(DEVICE)
    patched = copy.deepcopy(plain) if patched is None else patched.to(DEVICE)
    liger_hw.patch(patched)
    for actual, expected in zip(results(patched, x), results(plain, x), strict=True):
        assert actual.dtype == expected.dtype
        tolerance = TOLERANCES[actual.dtype] * (1 + expected.abs().max().item())
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


WITHOUT_WEIGHT = {
    "groups": lambda self, x: self.normal(x.unflatten(-1, (-1, 64)), self.eps).flatten(-2),
    "a part": lambda self, x: torch.cat((self.normal(x[..., :64], self.eps), x[..., 64:]), -1),
    "a factor": lambda self, x: self.normal(x, self.eps) * (x.shape[-1] / 64) ** 0.5,
    "a table": lambda self, x: self.normal(x, self.eps) * {256: 2.0}.get(x.shape[-1], 1.0),
}


@pytest.mark.parametrize("forward", WITHOUT_WEIGHT.values(), ids=WITHOUT_WEIGHT)
def test_widths_of_norms_without_a_weight(forward):
    hold(module_like(Bare, forward), torch.randn(2, 5, 256))


def test_a_norm_without_a_weight_is_patched():
    assert liger_hw.patch(nn.Sequential(Bare())).replaced


def test_a_norm_that_states_its_width():
    patched = nn.RMSNorm(64, elementwise_affine=False)
    hold(nn.RMSNorm(64, elementwise_affine=False), torch.randn(2, 64), patched)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        patched(torch.randn(2, 32, device=DEVICE))


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_a_norm_whose_weight_has_another_width(norm):
    module = norm(64)
    module.normalized_shape = (32,)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        module(torch.randn(2, 64))
    liger_hw.patch(module)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        module(torch.randn(2, 64))


class SignOfZero(Bare):
    def forward(self, x):
        return self.normal(x, self.eps) * math.copysign(1.0, self.held)


class SignOfHeldZero(Bare):
    def forward(self, x):
        return self.normal(x, self.eps) * math.copysign(1.0, self.held[0])


@pytest.mark.parametrize(("cls", "held"), [(SignOfZero, float), (SignOfHeldZero, lambda zero: (zero,))])
def test_the_sign_of_a_zero(cls, held):
    plain = cls()
    plain.held = held(0.0)
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    rows = torch.randn(2, 64)
    torch.testing.assert_close(patched(rows), plain(rows))
    plain.held = patched.held = held(-0.0)
    torch.testing.assert_close(patched(rows), plain(rows))
    built_later = copy.deepcopy(plain)
    liger_hw.patch(built_later)
    torch.testing.assert_close(built_later(rows), plain(rows))


OF_PARTS = {
    "a part of the gate": lambda self, x: self.down_proj(
        torch.cat((F.silu(self.gate_proj(x)[..., :64]), self.gate_proj(x)[..., 64:]), -1) * self.up_proj(x)
    ),
    "a part of the product": lambda self, x: self.down_proj(
        torch.cat((self.product(x)[..., :64], 2 * self.product(x)[..., 64:]), -1)
    ),
    "a factor": lambda self, x: self.down_proj(self.product(x) * (self.gate_proj(x).shape[-1] / 46) ** 0.5),
    "a comparison": lambda self, x: self.down_proj(self.product(x) * (2.0 if int(x.shape[-1]) > 60 else 1.0)),
}


@pytest.mark.parametrize("forward", OF_PARTS.values(), ids=OF_PARTS)
def test_columns_of_mlps(forward):
    hold(module_like(MLP, forward), torch.randn(2, 5, 64))


def test_an_mlp_that_leaves_out_columns():
    mlp = module_like(MLP, lambda self, x: self.down_proj(self.product(x)[..., :96]))
    mlp.down_proj = nn.Linear(96, 64, bias=False)
    hold(mlp, torch.randn(2, 5, 64))


@pytest.mark.parametrize("sizes", [(64, 128), (64, 64), (38, 46), (32, 96, 16), (46, 92)], ids=str)
def test_mlps_of_all_sizes_are_patched(sizes):
    mlp = MLP(*sizes)
    assert recognise(mlp).match is not None
    hold(mlp, torch.randn(2, 5, sizes[0]))


NUMBERS = {
    "a bound of the scale": lambda self, x: self.down_proj(self.product(x)) * min(self.scale, 1.0),
    "a scale or one": lambda self, x: self.down_proj(self.product(x)) * (self.scale or 1.0),
    "a bound of the dropout": lambda self, x: self.down_proj(
        F.dropout(self.product(x), min(self.dropout, 0.5), self.training)
    ),
}


@pytest.mark.parametrize("scale", [3.0, 0.0])
@pytest.mark.parametrize("forward", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_mlps(forward, scale):
    mlp = module_like(MLP, forward)
    mlp.scale = scale
    hold(mlp, torch.randn(2, 5, 64))


EPS = {
    "a lower bound": lambda self, x: self.weight * (self.normal(x, max(self.eps, 1e-3))),
    "an upper bound": lambda self, x: self.weight * (self.normal(x, min(self.eps, 0.1))),
    "a bound by the dtype": lambda self, x: self.weight * (self.normal(x, max(self.eps, torch.finfo(x.dtype).eps))),
    "eps or more": lambda self, x: self.weight * (self.normal(x, self.eps or 0.5)),
    "rounded": lambda self, x: self.weight * (self.normal(x, round(self.eps, 2))),
    "by sign": lambda self, x: self.weight * (self.normal(x, self.eps if self.eps > 0 else 1.0)),
}


@pytest.mark.parametrize("eps", [1e-6, 0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("forward", EPS.values(), ids=EPS)
def test_uses_of_eps(forward, dtype, eps):
    hold(module_like(Norm, forward, eps).to(dtype), (torch.randn(2, 5, 64) / 100).to(dtype))


def test_eps_of_a_subclass_of_layer_norm():
    forward = lambda self, x: F.layer_norm(x, (64,), 1 + self.weight, self.bias, max(self.eps, 1e-3))  # noqa: E731
    hold(module_like(nn.LayerNorm, forward, 64), torch.randn(2, 5, 64) / 100)


def to_half_with_half_weights(self, x):
    dtype = torch.float16 if self.weight.dtype == torch.float16 else x.dtype
    return self.weight * self.normal(x, self.eps).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("forward", [Norm.forward, to_half_with_half_weights], ids=lambda f: f.__name__)
def test_dtypes_of_norms_and_weights(forward, weight, dtype):
    x = torch.randn(2, 5, 64)
    for rows in (x, x.to(dtype)):
        hold(module_like(Norm, forward).to(weight), rows)


class Turned(nn.Module):
    """A norm of each head, tokens behind heads, whose result is read as tokens."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        batch, tokens, _ = x.shape
        heads = x.view(batch, tokens, -1, 64).transpose(1, 2)
        return self.norm(heads).transpose(1, 2).view(batch, tokens, -1)


@pytest.mark.parametrize("norm", [Norm, Bare])
def test_results_have_the_memory_order_of_the_input(norm):
    hold(Turned(norm()), torch.randn(2, 5, 256))
    plain = norm().to(DEVICE)
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    x = torch.randn(3, 4, 5, 64, device=DEVICE)
    views = [x.transpose(0, 1), x.transpose(1, 2), x.permute(2, 0, 1, 3), x.permute(1, 2, 0, 3)[:, ::2]]
    for rows in (*views, x[:, :, :3].transpose(0, 1), x[0], x[:, 0], x[:1].transpose(1, 2)):
        actual, expected = patched(rows), plain(rows)
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual, expected)


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin for x in (q, k))


def with_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    if position_ids is not None:
        cos, sin = cos[0][position_ids], sin[0][position_ids]
    return rotate(q, k, cos, sin, unsqueeze_dim)


def without_positions(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return rotate(q, k, cos, sin, unsqueeze_dim)


def of_one_axis(q, k, cos, sin, unsqueeze_dim=1):
    return rotate(q, k, cos, sin, 1)


def of_64_columns(q, k, cos, sin, unsqueeze_dim=1):
    turned = rotate(q[..., :64], k[..., :64], cos[..., :64], sin[..., :64], unsqueeze_dim)
    return tuple(torch.cat((part, x[..., 64:]), -1) for part, x in zip(turned, (q, k)))


def scaled_by_width(q, k, cos, sin, unsqueeze_dim=1):
    return tuple(x * (q.shape[-1] / 16) ** 0.5 for x in rotate(q, k, cos, sin, unsqueeze_dim))


def in_half(q, k, cos, sin, unsqueeze_dim=1):
    dtype = torch.float16 if cos.dtype == torch.float16 else q.dtype
    return tuple(x.to(dtype) for x in rotate(q, k, cos, sin, unsqueeze_dim))


def as_list(q, k, cos, sin, unsqueeze_dim=1):
    return [*rotate(q, k, cos, sin, unsqueeze_dim)]


POSITIONS = torch.tensor([[2, 0, 1, 3], [3, 2, 1, 0]], device=DEVICE)
CALLS = [{}, {"unsqueeze_dim": 1}, {"unsqueeze_dim": 2}, {"position_ids": POSITIONS}, {"position_ids": POSITIONS[0]}]


@pytest.mark.parametrize(
    "function, is_patched",
    [(rotate, True), (with_positions, True), (without_positions, True), (of_one_axis, True), (of_64_columns, False),
     (scaled_by_width, False), (in_half, True), (as_list, False)],
    ids=lambda x: getattr(x, "__name__", None),
)  # fmt: skip
def test_arguments_of_rotary_functions(function, is_patched):
    found = find_rotation(function)[0]
    assert (found is not None) == is_patched
    if found is None:
        return
    ours = rotation.replacement(function, found)
    for tables in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        q, k, angle = (torch.randn(*shape, 4, 128, device=DEVICE) for shape in ((2, 4), (2, 4), (2,)))
        for options in CALLS:
            if "position_ids" in options and "positions" not in function.__name__:
                continue
            args = q, k, angle.cos().to(tables), angle.sin().to(tables)
            for actual, expected in zip(ours(*args, **options), function(*args, **options), strict=True):
                assert actual.dtype == expected.dtype
                torch.testing.assert_close(actual, expected)


def test_positions_that_are_shown_to_be_ignored():
    assert find_rotation(without_positions)[0].ignores_positions
    assert not find_rotation(with_positions)[0].ignores_positions


class Tap(nn.Module):
    calls = []

    def forward(self, x):
        self.calls.append(1), random.random(), np.random.rand()
        return F.silu(x)


def tapped(self, x, more=None):
    return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def tap(x):
    Tap.calls.append(1)
    return F.silu(x)


def experts(act_fn=None, cls=moe.Qwen3MoeExperts):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 4, "num_hidden_layers": 1}
    config = moe.Qwen3MoeConfig(**sizes, intermediate_size=64, num_attention_heads=4, vocab_size=64)
    config._experts_implementation = "grouped_mm"
    module = cls(config)
    if act_fn is not None:
        del module.act_fn
        module.act_fn = act_fn
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


def without_a_gate(act_fn):
    module = experts(act_fn)
    module.has_gate = False
    module.up_proj = nn.Parameter(torch.randn(4, 48, 64))
    del module.gate_up_proj
    return module


def counting_mlp(act, forward=lambda self, x: tapped(self, x)):
    mlp = module_like(MLP, forward)
    mlp.act = act
    return mlp


def sorted_experts(before=lambda gate: gate):
    def forward(self, x):
        gate, up = torch.bmm(x.view(self.experts, -1, self.hidden), self.first).chunk(2, -1)
        return torch.bmm(F.silu(before(gate)) * up, self.second).view(-1, self.hidden)

    module = module_like(nn.Module, forward)
    module.experts, module.hidden = 4, 64
    module.first, module.second = nn.Parameter(torch.randn(4, 64, 96)), nn.Parameter(torch.randn(4, 48, 64))
    return module


def gated_norm():
    def forward(self, x, gate=None):
        Tap.calls.append(1)
        return Norm.forward(self, x)

    return module_like(Norm, forward)


COUNTING = {
    "MLP": lambda: counting_mlp(Tap()),
    "MLP with a function": lambda: counting_mlp(tap),
    "MLP with a partial function": lambda: counting_mlp(functools.partial(tap)),
    "experts with a function": lambda: experts(tap),
    "MLP of two inputs": lambda: counting_mlp(Tap(), tapped),
    "norm of two inputs": gated_norm,
    "experts": lambda: experts(Tap()),
    "experts without a gate": lambda: without_a_gate(Tap()),
    "sorted experts": lambda: sorted_experts(lambda gate: (Tap.calls.append(1), gate)[1]),
}


@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_code_with_effects_does_not_run_on_probes(make):
    module, states = nn.Sequential(make()), (random.getstate(), str(np.random.get_state()))
    Tap.calls.clear()
    liger_hw.patch(module)
    assert not Tap.calls and states == (random.getstate(), str(np.random.get_state()))


def test_a_group_size_that_the_code_does_not_read():
    def forward(self, x, gate=None):
        wide = x.float() * F.silu(gate.float())
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

    plain = module_like(Norm, forward)
    plain.group_size = 64
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    plain.group_size = patched.group_size = 32
    x, gate = torch.randn(2, 2, 5, 64)
    torch.testing.assert_close(patched(x, gate), plain(x, gate))


def test_columns_of_sorted_experts():
    assert recognise(sorted_experts()).match is not None
    changed = sorted_experts(lambda gate: torch.cat((gate[..., :47], 2 * gate[..., 47:]), -1))
    hold(changed, torch.randn(20, 64))


class Capped(nn.Module):
    def forward(self, x):
        return F.silu(x).clamp(max=1e3)


class ByTokens(nn.Module):
    def forward(self, x):
        return F.silu(x) if x.shape[0] < 30 else F.gelu(x)


@pytest.mark.parametrize("act_fn, reason", [(Capped(), "clamp"), (ByTokens(), "tokens")], ids=["clamp", "tokens"])
def test_activations_of_experts_without_a_gate(act_fn, reason):
    assert recognise(without_a_gate(nn.SiLU())).match is not None
    assert reason in recognise(without_a_gate(act_fn)).reason


class Limited(moe.Qwen3MoeExperts):
    def __init__(self, config):
        super().__init__(config)
        self.limit = 7.0

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        limit = min(self.limit, 1.0)
        return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Clamped(Limited):
    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@pytest.mark.parametrize("limit", [7.0, 0.0])
def test_a_limit_that_the_op_does_not_take(limit):
    plain = experts(cls=Clamped)
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    plain.limit = patched.limit = limit
    x = torch.randn(5, 96)
    torch.testing.assert_close(patched._apply_gate(x), plain._apply_gate(x))


def test_a_limit_of_experts():
    assert "limit otherwise" in recognise(experts(cls=Limited)).reason


class Twice(moe.Qwen3MoeExperts):
    def forward(self, x, index, weights):
        return super().forward(x, index, 2 * weights)


def test_a_forward_of_experts_is_transformers():
    assert recognise(experts()).match.is_whole
    match = recognise(experts(cls=Twice)).match
    assert match is not None and not match.is_whole


def test_a_gate_of_the_instance():
    module = experts()
    liger_hw.patch(module)
    x, index, weights = torch.randn(5, 64), torch.randint(4, (5, 2)), torch.rand(5, 2)
    module._apply_gate = lambda gate_up: gate_up.chunk(2, -1)[0]
    plain = experts()
    plain.load_state_dict(module.state_dict())
    plain._apply_gate = module._apply_gate
    with liger_hw.use_backend("triton") if torch.cuda.is_available() else contextlib.nullcontext():
        torch.testing.assert_close(module(x, index, weights), plain(x, index, weights))


LISTS = {
    "append": lambda seq: seq.append(nn.Tanh()),
    "extend": lambda seq: seq.extend([nn.Dropout(0.5)]),
    "insert": lambda seq: seq.insert(1, nn.Tanh()),
    "slice": lambda seq: seq[:2],
    "pop": lambda seq: (seq.pop(-1), seq)[1],
    "order": lambda seq: (seq.__delattr__("1"), seq.__setattr__("1", nn.GELU()), seq)[2],
}


@pytest.mark.parametrize("change", LISTS.values(), ids=LISTS)
def test_a_list_of_layers_that_changes(change):
    plain = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    plain, patched = change(plain), change(patched)
    for actual, expected in zip(results(patched, torch.ones(3, 64)), results(plain, torch.ones(3, 64)), strict=True):
        torch.testing.assert_close(actual, expected)


def test_names_in_torchs_classes_that_take_the_place_of_others(monkeypatch):
    """Names are compared, not their number."""
    norm = nn.Sequential(Norm())
    plain = copy.deepcopy(norm)
    liger_hw.patch(norm)
    x = torch.randn(2, 64)
    with monkeypatch.context() as context:
        context.setattr(torch.Tensor, "never_read", 1, raising=False)
        torch.testing.assert_close(norm(x), plain(x))
    with monkeypatch.context() as context:
        context.setattr(torch.Tensor, "float", lambda x: 3 + torch.Tensor.to(x, torch.float32), raising=False)
        torch.testing.assert_close(norm(x), plain(x))


def test_a_graph_module_is_left():
    graph = torch.fx.symbolic_trace(MLP())
    summary = liger_hw.patch(nn.Sequential(graph))
    assert not summary.replaced
    copy.deepcopy(graph)(torch.randn(2, 64))


class Raises(Bare):
    @property
    def normalized_shape(self):
        raise RuntimeError("no shape")


def test_code_that_raises_while_it_is_recognised():
    model = nn.Sequential(Norm(), Raises())
    summary = liger_hw.patch(model)
    assert sum(summary.replaced.values()) == 1 and "no shape" in str(summary)


@pytest.mark.parametrize("make", [Norm, Bare, MLP])
def test_rows_from_inference_mode(make):
    plain = make()
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    with torch.inference_mode():
        x = torch.randn(2, 5, 64)
        torch.testing.assert_close(patched(x), plain(x))
    if make is Norm:
        plain(x).sum().backward(), patched(x).sum().backward()
        torch.testing.assert_close(patched.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("make", [Norm, MLP, lambda: nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))])
def test_saved_tensors_that_may_change(make):
    plain = make().to(DEVICE)
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    found = []
    for module in (patched, plain):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            x = torch.ones(3, 64, device=DEVICE, requires_grad=True)
            rows = x * 1
            y = module(rows)
            rows.zero_()
            y.sum().backward()
        found.append([x.grad, *(p.grad for p in module.parameters())])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "make", [lambda: nn.RMSNorm(64), lambda: nn.LayerNorm(64), Norm], ids=["rms", "layer", "written"]
)
def test_memory_order_of_permuted_rows(make):
    plain = make().to(DEVICE)
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(nn.Sequential(patched)).replaced
    x = torch.randn(5, 2, 64, device=DEVICE).transpose(0, 1)
    assert patched(x).stride() == plain(x).stride()
