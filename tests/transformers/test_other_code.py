"""Compare patched modules with plain ones where objects compute, or a program replaces their code."""

import abc
import builtins
import contextlib
import copy
import copyreg
import enum
import functools
import inspect
import operator
import pickle
import random
import sys
import types
from unittest import mock

import numpy as np
import pytest
import tiny  # skips without transformers
import torch
import transformers
from test_replaced_code import guard_of, half
from torch import nn
from torch.nn import functional as F

import liger_hw
from liger_hw.patching import reading

ROWS = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
SCALE = 1
TABLE = {"one": 1, "list": [1]}
LOOK_UP = TABLE.get
SCALES = (lambda: SCALE,)
NAME = "_scale"
look, quiet = getattr, contextlib.suppress
calls = []


class Held:
    one = 1

    def scale(self):
        return SCALE

    @property
    def counted(self):
        calls.append(1)
        return 1

    def __rmul__(self, other):
        return other * SCALE


EXECUTED = {"F": F, "scale": 1}  # globals without a name
exec("def act(x): return F.silu(x) * scale", EXECUTED)
folder = types.ModuleType("folder")
folder.file, folder.other = (types.ModuleType(f"folder.{name}") for name in ("file", "other"))
folder.file.act, folder.other.act = (lambda x: F.silu(x)), (lambda x: F.relu(x))


class Kind(enum.StrEnum):
    ONE = "one"

    @property
    def scale(self):
        return SCALE


class Number(int):
    def __rmul__(self, other):
        return other * SCALE


class Entries(dict):
    def __missing__(self, name):
        return SCALE


@functools.singledispatch
def scale_of(x):
    return 1


class MLP(nn.Module):
    function = property(operator.attrgetter("_scale"))

    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.act_fn = act or nn.SiLU()
        self.held, self.kind, self.number, self.entries = Held(), Kind.ONE, Number(1), Entries()
        self.seen, self.cls, self._scale, self.look_up = {1}, Held, 1, TABLE.get
        self.bound = Held().scale

    def half(self):
        return SCALE

    @classmethod
    def of_class(cls):
        return SCALE

    def product(self, x):
        return self.act_fn(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x):
        return self.down_proj(self.product(x))


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(32)), 1e-6

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def pair(module):
    patched = copy.deepcopy(module)
    assert liger_hw.patch(patched).replaced
    return module, patched


def reason_of(module):
    """Return why `patch` leaves a module alone, without a call of its code."""
    random.seed(0)
    state = random.getstate()
    summary = liger_hw.patch(nn.Sequential(module))
    assert not summary.replaced and random.getstate() == state and not calls
    (reason,) = [reason for _, reason in summary.left]
    return reason


FACTORS = {  # an expression in a forward -> words of the reason
    "self.held.scale()": "held.scale, which other code computes",
    "self.held.counted": "held.counted, which other code computes",
    "self.held": "held, whose contents may change",
    "self.kind.scale": "kind.scale, which other code computes",
    "self.number": "number, whose contents may change",
    "self.entries['one']": "entries, whose contents may change",
    "self.look_up('one')": "look_up, whose contents may change",
    "self.bound()": "bound, whose contents may change",
    "self.cls().one": "cls, whose contents may change",
    "len(self.seen | {self.seen.add(1)}) / 2": "seen.add, which other code computes",
    "self.product.one": "reads an attribute of its method product",
    "self.function": "reads the property 'function', which is no function of Python",
    "self.half()": "SCALE",
    "self.of_class()": "reads the class attribute 'of_class'",
    "LOOK_UP('one')": "a method of an object whose contents may change",
    "random.random() ** 0": "calls random, a method of an object",
    "TABLE['list'][0]": "reads TABLE['list'], whose contents may change",
    "len(TABLE) / 2": "reads the global 'TABLE', whose contents may change",
    "(lambda f: f.relu(1))(F)": "gives the module 'F' another name",
    "scale_of(x)": "scale_of, which functools made",
    "(lambda p: p.out_features / 48)(self.gate_proj)": "reads out_features of gate_proj",
    "look(self, NAME)": "calls getattr by another name",
    "builtins.vars(self)[NAME]": "calls vars by another name",
    "float('{0._scale}'.format(self))": "reads format",
    "(2 if 'x' in f'{self}' else 1)": "writes its module as text",
    "(2 if 'x' in str(self) else 1)": "writes its module as text",
    "(lambda c: 1)(quiet(RuntimeError))": "uses the class suppress, whose attributes may change",
    "(lambda c: 1)(torch.autograd.graph.saved_tensors_hooks(half, half))": "calls saved_tensors_hooks()",
    "torch.cuda.max_memory_allocated() + 1": "calls max_memory_allocated()",
    "torch.load(NAME)": "calls load()",
    "torch.get_deterministic_debug_mode() + 1": "calls get_deterministic_debug_mode()",
    "(1 if x._base is None else 2)": "reads _base of a tensor",
    "(2 if x._is_view() else 1)": "reads _is_view of a tensor",
    "torch.enable_grad()(lambda: 1)()": "calls enable_grad()",
    "torch.autocast('cpu', enabled=False)(lambda: 1)()": "sets autocast",
}


def with_factor(factor):
    source = f"lambda self, x: self.down_proj(self.product(x) * ({factor}))"
    return type("OtherMLP", (MLP,), {"forward": eval(source, globals())})()


@pytest.mark.parametrize("factor", [factor for factor in FACTORS if factor != "self.half()"])
def test_code_and_state_that_a_module_hides_are_not_run_and_leave_it(factor):
    assert FACTORS[factor] in reason_of(with_factor(factor))


@pytest.mark.parametrize("decorate", [torch.enable_grad(), torch.inference_mode(False), torch.autocast("cpu")])
def test_a_forward_whose_decorator_sets_a_state_of_torch_is_left(decorate):
    assert "by a decorator" in reason_of(type("OtherMLP", (MLP,), {"forward": decorate(MLP.forward)})())


@pytest.mark.parametrize(
    "name, factor", [("__len__", "len(self)"), ("__getitem__", "self[0]"), ("__rmul__", "1 * self")]
)
def test_operators_of_a_module_are_code_that_no_one_reads(name, factor):
    cls = type(with_factor(factor))
    setattr(cls, name, lambda self, *others: self._scale)
    assert f"defines {name}()" in reason_of(cls())


class ReadsAParameterInACase(MLP):
    def forward(self, x):
        match self.down_proj.weight:
            case torch.Tensor(scale=scale):
                return self.down_proj(self.product(x) * scale)
        return self.down_proj(self.product(x))


def test_an_attribute_of_a_parameter_that_a_case_clause_reads():
    assert "looks up 'scale' of a tensor by name" in reason_of(ReadsAParameterInACase())


class ReadsInACase(MLP):
    def forward(self, x):
        match self:
            case nn.Module(_scale=scale):
                return self.down_proj(self.product(x) * scale)


def test_an_attribute_that_a_case_clause_reads_counts():
    plain, patched = pair(ReadsInACase())
    plain._scale = patched._scale = 3
    assert torch.equal(patched(ROWS), plain(ROWS))


class Tripled(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        changes = getattr(func, "__name__", "") in ("mean", "mul", "__mul__", "linear")
        return torch.mul(result.as_subclass(torch.Tensor), 3).as_subclass(cls) if changes else result


@pytest.mark.parametrize("module", [MLP(), Norm(), nn.LayerNorm(32)], ids=lambda m: type(m).__name__)
def test_tensors_of_a_programs_class_run_the_own_forward(module):
    plain, patched = pair(module)
    assert torch.equal(patched(ROWS.as_subclass(Tripled)), plain(ROWS.as_subclass(Tripled)))
    for part in (plain, patched):
        for child in part.modules():
            for name, parameter in child._parameters.items():
                child._parameters[name] = parameter.detach().as_subclass(Tripled)
    assert torch.equal(patched(ROWS), plain(ROWS))


@pytest.mark.parametrize("rows", [None, [ROWS]])
def test_the_error_for_what_is_no_tensor_is_the_modules(rows):
    with pytest.raises(TypeError, match="must be Tensor"):
        pair(MLP())[1](rows)


def test_nested_rows_run_the_own_forward():
    plain, patched = pair(MLP())
    rows = torch.nested.nested_tensor([ROWS[0], ROWS[1, :3]])
    assert torch.equal(patched(rows).to_padded_tensor(0.0), plain(rows).to_padded_tensor(0.0))


class Counts(MLP):
    count = 0

    def count_by_type(self):
        type(self).count += 1

    def count_by_class(self):
        self.__class__.count += 1

    @classmethod
    def count_of_class(cls):
        cls.count += 1

    def count_by_setattr(self):
        setattr(type(self), "count", self.count + 1)  # noqa: B010

    def is_exact(self):
        return type(self) is Counts

    def is_known(self):
        return self.__class__ in {Counts}

    def hides(self):
        return type(self).__dict__

    def gives_it_away(self, x, y):  # Python 3.13 joins loads and stores of names beside each other to one instruction
        return x.index(y, self.__class__)

    def is_exact_after_a_store(self, x):
        y = x
        return self.__class__ is Counts or y

    def is_exact_by_another_name(self, x):
        me = self
        return type(me) is Counts

    def is_exact_within(self):
        return lambda: type(self) is Counts


@pytest.mark.parametrize("name", [name for name in vars(Counts) if name[0] != "_" and name != "count"])
def test_a_class_that_tells_a_subclass_from_itself_is_left(name):
    cls = type("OtherMLP", (MLP,), {name: vars(Counts)[name]})
    assert reason_of(cls()) == f"its {name}() does more with the instance's class than read an attribute of it"


class Reads(MLP):
    def by_type(self):
        return type(self).__name__, type(self).mro_entries(self)

    def by_class(self, x):
        y = x
        return f"{self.__class__} {y}"

    @classmethod
    def makes(cls, x):
        return cls(x)


def test_a_class_that_reads_attributes_of_its_class_is_replaced():
    assert liger_hw.patch(Reads()).replaced


def test_a_model_that_counts_its_calls_in_its_class_is_left():
    class Counted(transformers.LlamaForCausalLM):
        calls = 0

        def forward(self, *args, **kwargs):
            type(self).calls += 1
            return super().forward(*args, **kwargs)

    model = Counted(transformers.LlamaConfig(**tiny.TINY))
    liger_hw.patch(model)
    model(**tiny.tokens())
    assert Counted.calls == 1


REPLACED = {  # what a program replaces or adds after `patch`
    "global of a method named as torch's": (with_factor("self.half()"), globals(), "SCALE", 2),
    "global of a function in a tuple": (with_factor("SCALES[0]()"), globals(), "SCALE", 2),
    "global of a function that exec made": (MLP(EXECUTED["act"]), EXECUTED, "scale", 2),
    "file of a folder": (MLP(lambda x: folder.file.act(x)), folder, "file", folder.other),
    "builtin": (with_factor("max(1, 0)"), vars(builtins), "max", lambda *args: 2),
    "name that hides a builtin": (with_factor("max(1, 0)"), globals(), "max", lambda *args: 2),
    "property in the place of a child": (MLP(), MLP, "act_fn", property(lambda self: F.relu)),
    "child in the class": (MLP(), MLP, "act_fn", nn.Tanh()),
    "look-up of attributes": (MLP(), MLP, "__getattribute__", None),
    "look-up of children": (MLP(), nn.Module, "__getattr__", None),
    "code of torch's function": (MLP(), F.silu, "__code__", (lambda input, inplace=False: input).__code__),
    "method of parameters": (Norm(), nn.Parameter, "__mul__", half(torch.Tensor.__mul__)),
}  # fmt: skip


@pytest.mark.parametrize("replaced", REPLACED)
def test_what_a_program_replaces_or_adds_counts(replaced, monkeypatch):
    module, owner, name, value = REPLACED[replaced]
    plain, patched = pair(module)
    before = plain(ROWS)
    assert torch.equal(patched(ROWS), before)
    if "look-up" in replaced:
        found = nn.Module.__getattr__ if owner is nn.Module else object.__getattribute__
        value = lambda self, key: F.relu if key == "act_fn" else found(self, key)  # noqa: E731
    with monkeypatch.context() as context:
        if isinstance(owner, dict):
            context.setitem(owner, name, value)
        else:
            context.setattr(owner, name, value, raising=False)
        after = plain(ROWS)
        assert torch.equal(patched(ROWS), after) and not torch.equal(after, before)


class Halved(MLP):
    scale = 0.5

    def forward(self, x):
        return self.down_proj(self.product(x)) * (self.scale + 0.5)


SET_BY_TYPE = {  # what a program sets by `type(module).name = value`
    "class attribute": ("scale", 0.25), "method": ("product", lambda self, x: self.act_fn(self.gate_proj(x))),
    "property": ("act_fn", property(lambda self: F.relu)),
}  # fmt: skip


@pytest.mark.parametrize("place", SET_BY_TYPE)
def test_what_a_program_sets_in_the_class_of_an_instance_counts(place, monkeypatch):
    name, value = SET_BY_TYPE[place]
    plain, patched = pair(Halved())
    for part in (plain, patched):
        type(part).unrelated = 1
        assert torch.equal(part(ROWS), plain(ROWS))
    with monkeypatch.context() as context:
        context.setattr(type(plain), name, value, raising=False)
        after = plain(ROWS)
    before = patched(ROWS)
    setattr(type(patched), name, value)
    assert torch.equal(patched(ROWS), after) and not torch.equal(after, before)
    delattr(type(patched), name)
    assert torch.equal(patched(ROWS), before)


@pytest.mark.parametrize("place", SET_BY_TYPE)
def test_a_programs_subclass_of_the_class_of_an_instance_counts(place):
    name, value = SET_BY_TYPE[place]
    plain, patched = pair(Halved())
    before = patched(ROWS)
    for part in (plain, patched):
        part.__class__ = type("Mixed", (type("Mixin", (), {name: value}), type(part)), {})
    after = plain(ROWS)
    assert torch.equal(patched(ROWS), after) and not torch.equal(after, before)


class Optional(Norm):
    def __init__(self):
        super().__init__()
        self.register_parameter("bias", None)

    def forward(self, x):
        y = super().forward(x)
        return y if self.bias is None else y + self.bias


class OptionalOfMLP(MLP):
    def __init__(self):
        super().__init__()
        self.register_module("first", None)

    def forward(self, x):
        return super().forward(x if self.first is None else self.first(x))


SET = {  # what a program sets in the place of None
    "parameter": (Optional(), "bias", nn.Parameter(ROWS[0, 0])),
    "weight": (nn.RMSNorm(32, 1e-6, elementwise_affine=False), "weight", nn.Parameter(ROWS[0, 0])),
    "child": (OptionalOfMLP(), "first", nn.Tanh()),
}


@pytest.mark.parametrize("place", SET)
def test_what_a_program_sets_in_the_place_of_none_counts(place):
    module, name, value = SET[place]
    plain, patched = pair(module)
    for part in (plain, patched):
        setattr(part, name, value)
    assert torch.equal(patched(ROWS), plain(ROWS))


class Wide(nn.Linear):
    def forward(self, x):
        return super().forward(x).double()


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
@pytest.mark.parametrize("projection", [nn.Linear(32, 1), nn.Linear(32, 48), Wide(32, 48)], ids=["one", "48", "fp64"])
def test_results_of_projections_that_torch_expands(name, projection):
    plain, patched = pair(MLP())
    for module in (plain, patched):
        setattr(module, name, projection)
    if isinstance(projection, Wide):
        with pytest.raises(RuntimeError, match="same dtype"):
            patched(ROWS)
    else:
        assert torch.equal(patched(ROWS), plain(ROWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_parameters_of_the_last_projection_that_torch_expands(dtype):
    plain, patched = pair(MLP().to(dtype))
    for module in (plain, patched):
        module.down_proj.bias = nn.Parameter(torch.ones(1, dtype=dtype))
    assert torch.equal(patched(ROWS.to(dtype)), plain(ROWS.to(dtype)))
    with torch.device("meta"):
        assert patched.to("meta")(ROWS.to("meta", dtype)).shape == ROWS.shape


class Abstract(Norm):
    """No ABC, so that Python makes instances."""

    @abc.abstractmethod
    def forward(self, x):
        return super().forward(x)


def test_an_abstract_method_of_a_class_that_is_no_abc():
    plain, patched = pair(Abstract())
    for copied in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        torch.testing.assert_close(copied(ROWS), plain(ROWS))


class Described(type):
    def __getattr__(cls, name):
        return getattr(torch, name)


class Equal(type):
    def __eq__(cls, other):
        return cls.__name__ == other.__name__

    __hash__ = type.__hash__


class AlsoEqual(Equal):
    pass


class Unhashable(Equal):
    def __eq__(cls, other):
        return cls is other


@pytest.mark.parametrize(
    "metaclass, name", [(Described, "__getattr__"), *((cls, "__eq__") for cls in (Equal, AlsoEqual, Unhashable))]
)
def test_a_class_whose_class_tells_attributes_or_equal_classes_is_left(metaclass, name):
    module = metaclass("OtherNorm", (Norm,), {})()
    assert str(liger_hw.patch(nn.Sequential(module, MLP())).left).count(f"the class of its class defines {name}()") == 2


class Lazy(MLP):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.LazyLinear(48)


def test_a_module_with_lazy_parameters_is_left_until_they_have_a_shape():
    model = nn.Sequential(Lazy(), Norm())
    assert "call the model once, then patch it" in str(liger_hw.patch(model))
    model(ROWS)
    assert type(model[1]) is not Norm and type(model[0]) is Lazy
    assert liger_hw.patch(model).replaced.total() == 2


def test_kernels_that_a_program_registers_for_torchs_operations_count():
    plain, patched = pair(MLP())
    unchanged = guard_of(patched)
    assert unchanged(patched, (ROWS,), {})
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("silu", lambda x: torch.zeros_like(x), "CPU")
        assert not unchanged(patched, (ROWS,), {})
        with torch.no_grad():
            assert torch.equal(patched(ROWS), plain(ROWS))
    finally:
        library._destroy()
    assert unchanged(patched, (ROWS,), {})


def test_kernels_that_torch_registers_for_vmap_do_not_count():
    _, patched = pair(MLP())
    torch.vmap(torch.sin)(ROWS)  # at the first call of a process
    assert guard_of(patched)(patched, (ROWS,), {})
    assert any("FuncTorchBatched" in name for name in torch.library._impls)


class UpFirst(MLP):
    def forward(self, x):
        up = self.up_proj(x)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


def test_projections_are_called_in_the_modules_order():
    orders = []
    for module in pair(UpFirst()):
        order = []
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(module, name).register_forward_hook(lambda *args, name=name, order=order: order.append(name))
        module(ROWS)
        orders.append(order)
    assert orders[0] == orders[1] == ["up_proj", "gate_proj", "down_proj"]


class InPlace(MLP):
    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x), inplace=True) * self.up_proj(x))


def test_an_mlp_that_writes_to_what_a_projection_returned_is_left():
    assert reason_of(InPlace()) == "computes silu_, which the op does not"


class Dropped(MLP):
    def __init__(self, dropout):
        super().__init__()
        self.dropout = dropout

    def forward(self, x):
        return self.down_proj(self.dropout(self.product(x)))


class DoublingDropout(nn.Module):
    def forward(self, x):
        return x if self.training else 2 * x


@pytest.mark.parametrize("dropout", [nn.Dropout(0.5), DoublingDropout()])
@pytest.mark.parametrize("samples", [True, False])
def test_a_dropout_has_a_mode_of_its_own(dropout, samples):
    results = []
    plain = Dropped(dropout)
    patched = copy.deepcopy(plain)
    liger_hw.patch(patched)
    for module in (plain, patched):
        module.train(not samples).dropout.train(samples)
        torch.manual_seed(0)
        results.append(module(ROWS))
    assert torch.equal(*results)


class Buffered(Norm):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return super().forward(x) * getattr(self, "scale", 1.0)


def test_a_norm_that_reads_a_buffer_is_left():
    assert "reads the buffer scale" in reason_of(Buffered())


@pytest.mark.parametrize("weight", [None, 2.0])
def test_a_weight_that_is_no_tensor(weight):
    plain, patched = pair(Norm())
    for module in (plain, patched):
        del module.weight
        module.weight = weight
    if weight is None:
        with pytest.raises(TypeError):
            patched(ROWS)
    else:
        assert torch.equal(patched(ROWS), plain(ROWS))


class OwnLayerNorm(Norm):
    def forward(self, x):
        return F.layer_norm(x, (32,), self.weight, None, self.eps)


def test_torchs_norms_in_a_models_class_under_autocast():
    plain, patched = pair(OwnLayerNorm())
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain(ROWS.bfloat16()), patched(ROWS.bfloat16())
    assert found.dtype == expected.dtype and torch.equal(found, expected)


class CastsBack(MLP):
    def forward(self, x):
        return self.down_proj(self.product(x)).to(x.dtype)


class CastsToWeights(MLP):
    def product(self, x):
        y = x.to(self.gate_proj.weight.dtype)
        return self.act_fn(self.gate_proj(y)).to(x.dtype) * self.up_proj(x)


@pytest.mark.parametrize("module", [CastsBack, CastsToWeights])
@pytest.mark.parametrize("autocast", [True, False])
def test_casts_of_an_mlp_where_dtypes_differ(module, autocast):
    plain, patched = pair(module())
    for part in (plain, patched):
        part.gate_proj.to(torch.bfloat16 if module is CastsToWeights and not autocast else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected, found = plain(ROWS), patched(ROWS)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def codes_of(module, rows):
    """Return the code that runs in a call."""
    codes = []
    sys.setprofile(lambda frame, *event: codes.append(frame.f_code))
    module(rows)
    sys.setprofile(None)
    return codes


def test_a_subclass_of_torch_runs_the_op():
    _, patched = pair(Halved())
    members = {"__module__": "torch.distributed.fsdp", "product": None}
    patched.__class__ = type("FSDPHalved", (type(patched),), members)
    assert Halved.forward.__code__ not in codes_of(patched, ROWS)


def test_a_subclass_that_repeats_a_member_runs_the_op(monkeypatch):
    """FSDP2's of a model has `config_class` again, and a module and a text of its own, which PEFT's DoRA reads."""
    monkeypatch.setattr(reading, "attributes_read", reading.attributes_read | {"__module__", "__doc__"})
    _, patched = pair(Halved())
    patched.__class__ = type("FSDPHalved", (type(patched),), {"product": Halved.product})
    assert Halved.forward.__code__ not in codes_of(patched, ROWS)


class RoundingNorm(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Squared(nn.Module):
    def forward(self, x):
        return F.relu(x).square()


@pytest.mark.parametrize("module", [RoundingNorm, Squared])
def test_powers_under_autocast_run_the_own_forward(module):
    """On a GPU autocast computes them in fp32, and the result is fp32."""
    _, patched = pair(module().to(torch.bfloat16))
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert (module.forward.__code__ in codes_of(patched, ROWS.bfloat16())) == enabled


class Reduced(MLP):
    def __reduce__(self):
        return rebuilt, (self.state_dict(),)


def rebuilt(state):
    module = Reduced()
    module.load_state_dict(state)
    return module


def test_a_class_with_a_reduce_of_its_own_is_copied_as_it_says():
    plain, patched = pair(Reduced())
    for copied in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert torch.equal(copied(ROWS), plain(ROWS))


class Registered(Norm):
    pass


def test_a_class_whose_reduce_is_registered_is_copied_as_it_says(monkeypatch):
    _, patched = pair(Registered())
    monkeypatch.setitem(copyreg.dispatch_table, Registered, lambda module: (nn.LayerNorm, (7,)))
    for copied in (copy.deepcopy(patched), pickle.loads(pickle.dumps(patched))):
        assert type(copied) is nn.LayerNorm


class InC(nn.Module):
    forward = staticmethod(torch.relu)


def test_a_forward_that_is_a_function_in_c_is_left():
    _, patched = pair(nn.Sequential(InC(), Norm()))
    assert torch.equal(patched[0](ROWS), ROWS.relu())


class EndlessInSubclasses(MLP):
    def train(self, mode=True):
        return super(self.__class__, self).train(mode)


def test_a_method_that_would_not_end_in_a_subclass():
    summary = liger_hw.patch(nn.Sequential(EndlessInSubclasses()).train())
    assert "its train() does more with the instance's class" in str(summary)


def test_a_patched_forward_has_the_signature_and_the_source_of_the_modules():
    plain, patched = pair(MLP())
    assert inspect.signature(patched.forward) == inspect.signature(plain.forward)
    assert inspect.getsource(type(patched).forward) == inspect.getsource(MLP.forward)


def test_an_attribute_of_the_class_of_an_object_counts(monkeypatch):
    class Settings:
        scale = 1

    def forward(self, x):
        settings = self.held
        return self.down_proj(self.product(x) * settings.scale)

    module = type("SetMLP", (MLP,), {"forward": forward})()
    module.held = Settings()
    plain, patched = pair(module)
    monkeypatch.setattr(Settings, "scale", 2)
    assert torch.equal(patched(ROWS), plain(ROWS))


def test_configurations_of_transformers_are_read_by_attribute():
    module = with_factor("self.held.factor")
    module.held = types.SimpleNamespace(factor=1)
    plain, patched = pair(module)
    for part in (plain, patched):
        part.held.factor = 3
    assert torch.equal(patched(ROWS), plain(ROWS))


def all_subclasses(cls):
    found = [cls]
    for subclass in cls.__subclasses__():
        found += all_subclasses(subclass)
    return set(found)


def test_programs_look_a_modules_class_up_in_tables():
    plain, patched = pair(nn.Sequential(nn.LayerNorm(64), MLP(), Norm()))
    table = {type(module): name for name, module in plain.named_modules()}
    for name, module in patched.named_modules():
        before, after = type(plain.get_submodule(name)), type(module)
        assert table[after] == table[before] and before in {after}
        assert after == before and not after != before
    norm, mlp, other = (type(module) for module in patched)
    assert len({norm, mlp, other, nn.LayerNorm}) == 3 and norm is not nn.LayerNorm and norm != mlp
    assert norm == mock.ANY and norm != "a name"
    originals = {nn.LayerNorm, MLP, Norm}  # a set of all subclasses, as DeepSpeed makes, has these and no patched one
    assert all(any(cls is original for cls in all_subclasses(nn.Module)) for original in originals)
    assert isinstance(type("Abstract", (abc.ABC, norm), {})(4), nn.LayerNorm)
    derived = type("Derived", (norm,), {})  # as FSDP2 and parametrizations do
    assert derived not in table and derived != norm and len({derived, norm, derived}) == 2
    assert isinstance(plain[0], norm) and issubclass(nn.LayerNorm, norm) and not issubclass(mlp, norm)
    assert not isinstance(plain[0], derived) and not issubclass(norm, derived) and issubclass(derived, norm)


class Clamped(MLP):
    def __init__(self):
        super().__init__()
        self.limit = 0.25

    def product(self, x):
        gate, up = self.gate_proj(x), self.up_proj(x)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(min=-self.limit, max=self.limit)


class Dropping(MLP):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def product(self, x):
        return self.drop(super().product(x))


def results(module, calls=2):
    """Return the results of calls of the MLP, or their errors, and the inputs of its projections."""
    kept, found = [], []
    for projection in (module.gate_proj, module.up_proj, module.down_proj):
        projection.register_forward_pre_hook(lambda _, args: kept.append(args[0].detach()))
    for _ in range(calls):
        torch.manual_seed(0)
        try:
            found.append(module(ROWS))
        except Exception as error:
            found.append(str(error))
    return found, kept


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("module", [MLP, Clamped, Dropping])
def test_an_error_of_a_hook_ends_the_call(module, name):
    seen = []

    def refuse_once(*args):
        seen.append(1)
        if len(seen) % 2:
            raise ValueError("bad values")

    models = pair(module())
    for model in models:
        getattr(model, name).register_forward_hook(refuse_once)
    expected, found = map(results, models)
    assert found[0][0] == expected[0][0] == "bad values" and len(found[1]) == len(expected[1])
    torch.testing.assert_close((found[0][1], found[1]), (expected[0][1], expected[1]))


@pytest.mark.parametrize("limit", [0.5, 2, 0, -1.0, float("nan"), torch.tensor(0.5), np.float64(0.5)], ids=repr)
def test_a_limit_that_a_program_sets(limit):
    models = pair(Clamped())
    assert type(models[1]).liger_match.op == "clamped_swiglu"
    for model in models:
        model.limit = limit
    torch.testing.assert_close(*map(results, models), equal_nan=True)


@pytest.mark.parametrize("projection", [nn.Linear(32, 1), Wide(32, 48)], ids=["one", "fp64"])
def test_results_of_a_clamped_mlps_projections_that_torch_expands(projection):
    models = pair(Clamped())
    for model in models:
        model.up_proj = copy.deepcopy(projection)
    expected, found = map(results, models)
    assert str(expected) == str(found)
