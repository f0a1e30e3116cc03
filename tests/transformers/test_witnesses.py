"""Check that `patch` leaves modules that equal an op on ordinary rows only."""

import copy
import types

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

import liger_hw
from liger_hw.patching import probing
from liger_hw.patching.recognition import NO_OP
from liger_hw.patching.rotary import find_rotation, match_rotary


class MLP(nn.Module):
    limit = None

    class Nested:
        one = 1.0

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.act_fn = nn.SiLU()

    def product(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        return self.down_proj(self.product(x))


class Clamped(MLP):
    def forward(self, x):
        return self.down_proj(self.product(x).clamp(-1000.0, 1000.0))


class Limited(MLP):
    def __init__(self):
        super().__init__()
        self.limit = 30

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=self.limit)) * self.up_proj(x))


class Fp16Guard(MLP):
    def forward(self, x):
        product = self.product(x)
        return self.down_proj(product.clamp(-60000, 60000) if product.dtype == torch.float16 else product)


class NanGuard(MLP):
    def forward(self, x):
        return self.down_proj(torch.nan_to_num(self.product(x), posinf=1e4, neginf=-1e4))


class InEvaluation(MLP):
    def forward(self, x):
        return self.down_proj(self.product(x) * (1.0 if self.training else 0.9))


class OneToken(MLP):
    def forward(self, x):
        return self.down_proj(self.product(x) * (0.5 if x.shape[-2] == 1 else 1.0))


class LongInputs(MLP):
    def forward(self, x):
        return self.down_proj(self.product(x) * (0.5 if 2 * x.size(1) > 4000 else 1.0))


class FirstTokens(MLP):
    def forward(self, x):
        return self.down_proj(self.product(x[:, :100]))


class Catches(MLP):
    def forward(self, x):
        try:
            x.view(77, -1)
            factor = 0.5
        except RuntimeError:
            factor = 1.0
        return self.down_proj(self.product(x) * factor)


class DataDependent(MLP):
    def forward(self, x):
        return self.down_proj(self.product(x) if x.abs().max() < 1e9 else x)


class Counted(MLP):
    steps = 0

    def forward(self, x):
        self.steps += 1
        return self.down_proj(self.product(x))


class KeepsActivations(MLP):
    def __init__(self):
        super().__init__()
        self.kept = []

    def forward(self, x):
        self.kept.append(x)
        return self.down_proj(self.product(x))


class Masked(MLP):
    def forward(self, x):
        product = self.product(x)
        return self.down_proj(torch.where(product.isnan(), 0.0, product))


class SoftCapped(MLP):
    def forward(self, x):
        return self.down_proj(1e12 * torch.tanh(self.product(x) / 1e12))


class Detached(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


class SkipsHooks(MLP):
    def forward(self, x):
        return F.linear(self.product(x), self.down_proj.weight, self.down_proj.bias)


class NestedActivation(MLP):
    def __init__(self):
        super().__init__()
        self.act_fn = nn.Sequential(nn.SiLU())


class OnGPU(MLP):
    def forward(self, x):
        return self.down_proj(self.product(x) * (0.5 if x.is_cuda else 1.0))


class WritesItsInput(MLP):
    def forward(self, x):
        out = self.down_proj(self.product(x))
        x.add_(0)
        return out


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return F.silu(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class OtherBackward(MLP):
    def forward(self, x):
        return self.down_proj(Straight.apply(self.gate_proj(x)) * self.up_proj(x))


class Constant(MLP):
    def forward(self, x):
        return torch.zeros_like(x)


def scaled(x, by=[1.0]):  # noqa: B006
    return x * by[0]


def flagged(x):
    return x


flagged.flag = ONE = torch.tensor(1.0)
FACTORS = (1.0,) * 16 + (0.5,) * 16


library = torch.library.Library("liger_test", "DEF")  # of an operation that has the name of torch's
library.define("mul(Tensor x, Tensor y) -> Tensor")
library.impl("mul", torch.mul, "CompositeImplicitAutograd")


class Factors:
    one = 1.0

    @classmethod
    def factor(cls):
        return cls.one


def asking(cls):
    return lambda module: 2.0 if isinstance(module, cls) else 1.0


asks = asking(nn.Conv1d)


def matches(module):
    match module:
        case nn.Conv1d():
            return 2.0
    return 1.0


class Held:
    one = 1.0

    def factor(self):
        return self.one


HELD = Held()
FACTOR = HELD.factor


class Doubled(property):
    def __get__(self, holder, owner=None):
        return 2 * super().__get__(holder, owner)


def other(name, factor, base=MLP):
    """Return a class whose result has a factor, the value of an expression."""
    source = f"lambda self, x: self.down_proj(self.product(x) * ({factor}))"
    return type(name, (base,), {"forward": eval(source, globals()), "doubled": Doubled(lambda self: 0.5)})


STATE = {  # an expression in a forward -> words of the reason
    "0.5 if x.ndim == 2 else 1.0": "differs from the op for inputs of 2 dimensions",
    "0.5 if len(x.shape) > 3 else 1.0": "differs from the op for inputs of 4 dimensions",
    "1.0 if x.is_contiguous() else 0.5": "reads is_contiguous of a tensor",
    "1.0 if x.stride(-1) == 1 else 0.5": "reads stride of a tensor",
    "0.5 if x.nbytes > 1e9 else 1.0": "reads nbytes of a tensor",
    "0.5 if x.device.type == 'cuda' else 1.0": "reads the type of a device",
    "(lambda d: 0.5 if d.type == 'cuda' else 1.0)(x.device)": "reads the type of a device",
    "0.5 if 'cuda' in str(x.device) else 1.0": "reads the type of a device",
    "0.5 if x.device == torch.device('cuda') else 1.0": "reads the type of a device",
    "0.5 if x.device in (torch.device('cuda'),) else 1.0": "reads the type of a device",
    "0.5 if torch.is_inference_mode_enabled() else 1.0": "calls is_inference_mode_enabled()",
    "0.5 if torch.is_autocast_enabled('cpu') else 1.0": "calls is_autocast_enabled()",
    "0.5 if torch.backends.cudnn.benchmark else 1.0": "calls backends()",
    "HELD.factor()": "reads the global 'HELD', whose contents may change",
    "FACTOR()": "calls FACTOR, a method of an object whose contents may change",
    "1.0 + (x.float().pow(0).sum() * 1e-4) ** 8": "differs from the op for rows of shape (2, ",
    "2.0 if torch._C._get_deterministic_algorithms() else 1.0": "calls _get_deterministic_algorithms()",
    "(lambda m: 1.0 if m.training else 2.0)(self.down_proj)": "reads training of ",
    "2.0 if isinstance(self.down_proj, nn.Conv1d) else 1.0": "tells classes of modules apart",
    "[1.0, self.register_forward_hook(print)][0]": "calls register_forward_hook()",
    "2.0 if isinstance(self.down_proj, (nn.Conv1d, nn.Identity)) else 1.0": "tells classes of modules apart",
    "asks(self.down_proj)": "tells classes of modules apart",
    "matches(self.down_proj)": "tells classes of modules apart",
    "[1.0, self.eval()][0]": "calls eval()",
    "1.0 + 0 * x.flatten()[5:].sum()": "computes a part of the rows",
    "1.0 + 0 * x.mT[..., 1:].sum()": "computes a part of the rows",
    "self.doubled": "reads the class attribute 'doubled', whose contents may change",
    "scaled(1.0)": "has a default argument in scaled() whose contents may change",
    "flagged.flag": "reads the attribute 'flag' of the function flagged",
    "(lambda f: f.flag)(flagged)": "reads the attribute 'flag' of the function flagged",
    "torch.manual_seed(0).initial_seed() + 1": "calls manual_seed()",
    "(lambda f: f.relu(ONE))(torch.nn.functional)": "gives the module 'torch' another name",
    "torch.ops.liger_test.mul(x, x)": "calls the operation liger_test.mul, which torch does not define",
    "ONE": "reads the global 'ONE', whose contents may change",
    "{(3, 7): 0.5}.get(x.shape[:2], 1.0)": "compares the number of its tokens",
    "{16: 0.5}.get(len(x), 1.0)": "reads __len__ of a tensor",
    "1 + x.shape[0] // 16": "computes with the number of its tokens",
    "1 + x.numel() // 51200": "computes with the number of its tokens",
    "FACTORS[x.shape[0]]": "reads the number of its tokens",
    "divmod(x.shape[0], 16)[0] + 1": "reads the number of its tokens",
    "1 + (x.shape[0] >> 4)": "reads the number of its tokens",
    "1 + int(float(x.size(0)) / 16)": "reads the number of its tokens",
    "0.5 if 'Size([16' in str(x.shape) else 1.0": "reads the number of its tokens",
    "1 + sum(i == 15 for i in range(x.shape[0]))": "reads the number of its tokens",
    "1 + bytes(x.shape[0]).count(1)": "reads the number of its tokens",
    "getattr(self, 'fac' + 'tor'[:x.ndim], 1.0)": "computes the name of an attribute",
    "getattr(dict(), 'factor', 1.0)": "computes the object whose attribute it looks up",
    "getattr(x, 'factor', 1.0)": "looks up 'factor' of x by name",
    "getattr(self.down_proj.weight, 'factor', 1.0)": "looks up 'factor' of down_proj.weight by name",
    "self.down_proj.in_features / 48": "reads down_proj.in_features",
    "getattr(copy, 'other', 1.0)": "looks up 'other' of copy by name",
    "getattr(Factors, 'other', 1.0)": "looks up 'other' of Factors by name",
    "Factors.factor()": "calls the class method Factors.factor",
    "Factors().one": "uses the class Factors, whose attributes may change",
    "(lambda c: c.one)(Factors)": "uses the class Factors, whose attributes may change",
    "self.Nested.one": "reads the class attribute 'Nested', whose contents may change",
    "len(vars(self).get('factors', 'x'))": "calls vars()",
    "len(self.down_proj._buffers) + 1": "reads _buffers",
    "1 + len(self._forward_hooks)": "reads _forward_hooks",
    "2.0 if self.gate_proj is self.up_proj else 1.0": "compares objects by identity",
    "2.0 if self.gate_proj.weight is self.up_proj.weight else 1.0": "compares objects by identity",
    "2.0 if self.gate_proj == self.up_proj else 1.0": "compares up_proj with another object",
    "2.0 if isinstance(x, nn.Parameter) else 1.0": "a row with 0.0 in a parameter",
    "2.0 if type(x) is nn.Parameter else 1.0": "compares objects by identity",
    "2.0 if x.shape[-1] == 33 else 1.0": "compares the width of its inputs",
    "2.0 if 2 * x.size(-1) > 999 else 1.0": "compares the width of its inputs",
}


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(32)), 1e-6

    def rows(self, x):
        return x.float()

    def forward(self, x):
        y = self.rows(x)
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class GuardedNorm(Norm):
    def rows(self, x):
        return x.float().clamp(-1e4, 1e4)


class NoisyNorm(Norm):
    def forward(self, x):
        y = super().forward(x)
        return y + 0.1 * torch.randn_like(y) if self.training else y


class TensorEps(Norm):
    def __init__(self):
        super().__init__()
        self.eps = torch.tensor(1e-6)


class DetachedNorm(Norm):
    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True).detach() + self.eps)).to(x.dtype)


class DetachedInHalf(Norm):
    def rows(self, x):
        return x.float().detach() if x.dtype == torch.bfloat16 else x.float()


class DetachedInEvaluation(Norm):
    def rows(self, x):
        return x.float() if self.training else x.float().detach()


class DetachesOneSequence(Norm):
    def rows(self, x):
        return x.float().detach() if x.dim() == 2 else x.float()


class WritesItsWeight(Norm):
    def forward(self, x):
        self.weight.data.copy_(self.weight.data / 2)
        return super().forward(x)


class Imports(MLP):
    def forward(self, x):
        from torch.nn.functional import silu

        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class ShiftedNorm(Norm):
    def forward(self, x):
        y = x.float() + 1e-9
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


LEFT = {  # class -> words of the reason
    Clamped: "computes clamp, which the op does not",
    Limited: "clamp",
    Fp16Guard: "clamp",
    NanGuard: "nan_to_num",
    InEvaluation: "evaluation",
    OneToken: "compares the number of its tokens",
    LongInputs: "compares the number of its tokens",
    FirstTokens: "takes a part of its tokens",
    Catches: "catches exceptions",
    DataDependent: "which the op does not",
    Counted: "writes the attribute 'steps'",
    KeepsActivations: "calls append()",
    Masked: "which the op does not",
    SoftCapped: "",
    Detached: "reads detach of a tensor",
    SkipsHooks: "computes with its projections without a call of them",
    NestedActivation: "its act_fn has children of its own",
    OnGPU: "reads is_cuda of a tensor",
    WritesItsInput: "computes add_, which the op does not",
    OtherBackward: "calls the class method Straight.apply",
    GuardedNorm: "clamp",
    NoisyNorm: "does not run",
    TensorEps: "a tensor that is no parameter",
    DetachedNorm: "reads detach of a tensor",
    DetachedInHalf: "reads detach of a tensor",
    DetachedInEvaluation: "reads detach of a tensor",
    DetachesOneSequence: "reads detach of a tensor",
    WritesItsWeight: "reads data of a tensor",
    Imports: "imports torch.nn.functional",
    ShiftedNorm: "rows",
}


@pytest.mark.parametrize("cls", LEFT, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("training", [True, False])
def test_modules_that_equal_an_op_on_ordinary_rows_only_are_left(cls, training):
    summary = liger_hw.patch(nn.Sequential(cls()).train(training))
    assert not summary.replaced
    reason = "".join(why for _, why in summary.left)
    assert LEFT[cls] in reason or reason == NO_OP


@pytest.mark.parametrize("factor", STATE)
def test_modules_that_read_other_state_are_left(factor):
    summary = liger_hw.patch(other("OtherMLP", factor)())
    (reason,) = [reason for _, reason in summary.left]
    assert STATE[factor] in reason or "calls" in STATE[factor] and reason == NO_OP


class Boosted(MLP):
    """A factor from a threshold of a float attribute on, which a probe's value does not reach."""

    boost = 0.5

    def forward(self, x):
        return self.down_proj(self.product(x)) * (2.0 if self.boost > 0.5 else 1.0)


class BoostedNorm(Norm):
    def forward(self, x):
        return super().forward(x) * (2.0 if self.boost > 0.5 else 1.0)


@pytest.mark.parametrize("cls", [Boosted, BoostedNorm])
@pytest.mark.parametrize("boost", [0.2, 0.7])
def test_float_attributes_are_compared_with_their_values(cls, boost):
    module = cls()
    module.boost = boost
    summary = liger_hw.patch(nn.Sequential(module))
    assert len(summary.replaced) == (boost == 0.2)
    assert boost == 0.2 or [reason.endswith("by its boost") for _, reason in summary.left] == [True]


SETTINGS = types.ModuleType("settings")
SETTINGS.MODE, SETTINGS.FACTORS, SETTINGS.DTYPE, SETTINGS.Kept = "single", (1.0, 2.0), torch.float32, Held


@pytest.mark.parametrize(
    "factor, name, value",
    [
        ("2.0 if SETTINGS.MODE.startswith('double') else 1.0", "MODE", "double"),
        ("1.0 + SETTINGS.FACTORS.index(1.0)", "FACTORS", (2.0, 1.0)),
        ("torch.ones((), dtype=SETTINGS.DTYPE).itemsize / 4", "DTYPE", torch.float64),
        ("SETTINGS.Kept.one", "Kept", type("Kept", (), {"one": 2.0})),
    ],
)
def test_settings_of_a_module_that_change_later(factor, name, value, monkeypatch):
    plain, x = nn.Sequential(other("SetMLP", factor)()), torch.randn(2, 5, 32)
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    torch.testing.assert_close(patched(x), plain(x))
    monkeypatch.setattr(SETTINGS, name, value)
    torch.testing.assert_close(patched(x), plain(x))


@pytest.mark.parametrize(
    "factor",
    [
        "1.0 if isinstance(x, torch.Tensor) else 2.0", "nn.Identity()(1.0) if isinstance(x, torch.Tensor) else 2.0",
        "1.0 if isinstance(self.act_fn, nn.Module) else 2.0", "1.0 if self.register_n else 2.0",
    ],
)  # fmt: skip
def test_code_that_asks_for_other_classes_is_replaced(factor):
    module = other("AsksMLP", factor)()
    module.register_n = 1
    assert liger_hw.patch(nn.Sequential(module)).replaced


def test_a_class_with_getattr_of_its_own_is_left():
    class Reads(MLP):
        def __getattr__(self, name):
            return ONE if name == "factor" else super().__getattr__(name)

    summary = liger_hw.patch(other("ReadsMLP", "self.factor", Reads)())
    assert list(summary.left) == [("ReadsMLP", "its code defines __getattr__()")]


@pytest.mark.parametrize("cls", [MLP, Norm])
@pytest.mark.parametrize("training", [True, False])
def test_their_plain_forms_are_replaced(cls, training):
    patched = nn.Sequential(cls()).train(training)
    plain = copy.deepcopy(patched)
    assert liger_hw.patch(patched).replaced
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for size in (1e-3, 1.0, 1e4):
            x = (size * torch.randn(2, 5, 32)).to(dtype)
            assert probing.equal(patched.to(dtype)(x), plain.to(dtype)(x))


def test_a_function_that_ignores_its_inputs_agrees_with_none():
    assert not liger_hw.patch(nn.Sequential(Constant())).replaced
    zeros = [(torch.randn(3),)]
    assert not probing.agree(torch.zeros_like, torch.zeros_like, zeros)


def rotate(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def turned(x):
        x1, x2 = x.chunk(2, -1)
        return x * cos + torch.cat((-x2, x1), -1) * sin

    return turned(q), turned(k)


apply_rotary = rotate


def rotate_short(q, k, cos, sin, unsqueeze_dim=1):
    return rotate(q * 0.5 if q.shape[-2] > 100 else q, k, cos, sin, unsqueeze_dim)


def rotate_clamped(q, k, cos, sin, unsqueeze_dim=1):
    return rotate(q.clamp(-1e6, 1e6), k, cos, sin, unsqueeze_dim)


def test_rotary_functions_have_two_witnesses():
    assert find_rotation(rotate)[0] is not None
    assert "number of its tokens" in find_rotation(rotate_short)[1]
    assert "clamp" in find_rotation(rotate_clamped)[1]


def rotates(forward):
    return type("Attention", (nn.Module,), {"__module__": __name__, "forward": forward})


@pytest.mark.parametrize(
    "reason, forward",
    [
        (None, lambda self, *args: apply_rotary(*args)),
        (None, lambda self, *args: apply_rotary(*args) if __name__ else None),
        ("does more with apply_rotary than call it", lambda self, *args: list(map(apply_rotary, *zip(args)))),
        ("does more with apply_rotary than call it", lambda self, *args: apply_rotary.factor * apply_rotary(*args)),
    ],
)
def test_a_method_that_a_copy_cannot_stand_for_is_left(reason, forward):
    match, why = match_rotary(rotates(forward))
    assert (match is None) == (reason is not None) and (why or "").endswith(reason or "")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x, cos, sin, **options):
        count_call()
        q, k = self.qkv_proj(x).view(2, 5, 2, 8).transpose(1, 2).split(1, 1)
        try:
            q, k = apply_rotary(q, k, cos, sin, **options)
        except TypeError:
            return x
        return CALLS, lambda: self.o_proj(q + k) * CALLS


CALLS = 0


def count_call():
    global CALLS
    CALLS += 1


def test_an_attention_reads_live_globals_and_no_probe_runs_it(monkeypatch):
    """Also in its call, and in functions that outlive it."""
    monkeypatch.setitem(globals(), "CALLS", 0)
    plain, args = Attention(), (torch.rand(2, 5, 8), torch.rand(2, 5, 8), torch.rand(2, 5, 8))
    patched = copy.deepcopy(plain)
    assert str(liger_hw.patch(patched).replaced) == "Counter({('Attention', 'rope'): 1})" and CALLS == 0
    (first, result), (second, expected) = patched(*args), plain(*args)
    assert (first, second) == (1, 2)
    torch.testing.assert_close(result(), expected())


@pytest.mark.parametrize("options", [{"unknown": 1}, {"q": None}])
def test_wrong_arguments_of_a_rotary_function_are_errors(options):
    patched = Attention()
    liger_hw.patch(patched)
    x = torch.rand(2, 5, 8)
    assert patched(x, x, x, **options) is x


def test_hooks_on_all_modules_do_not_see_probes():
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        model = tiny.model()
        assert liger_hw.patch(model).replaced and not seen
        model(**tiny.tokens())
        assert seen
    finally:
        handle.remove()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_patch_within_a_mode_of_autograd(mode):
    with mode():
        summary = liger_hw.patch(tiny.model("llama"))
    assert not summary.left


@pytest.mark.parametrize("factor", ["2.0 if x.dtype == torch.float64 else 1.0", "2.0 if x.dim() > 4 else 1.0"])
def test_rows_that_no_witness_saw_run_the_own_forward(factor):
    plain = other("Seldom", factor)()
    patched = copy.deepcopy(plain)
    assert liger_hw.patch(patched).replaced
    x = torch.randn(1, 1, 1, 3, 32)
    assert torch.equal(patched(x), plain(x))
    assert torch.equal(patched.double()(x[0].double()), plain.double()(x[0].double()))


def test_lengths_that_shape_tensors_are_no_objection():
    class Flat(MLP):
        def forward(self, x):
            batch, length, width = x.shape
            y = self.product(x.reshape(batch * length, width)).view(*x.shape[:-1], -1)
            return self.down_proj(y).view(x.size())

    assert liger_hw.patch(Flat()).replaced
