"""Check modules whose attributes hold enums, objects or functions that a program changes after `patch`."""

import array
import copy
import ctypes
import enum
import functools
import random
import sys
import threading
import time
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import liger_hw

X = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0))
SCALE, CALLS = 1.0, []


class Norm(nn.Module):
    """RMSNorm, to whose result a derived class applies what it holds."""

    def __init__(self, held=None):
        super().__init__()
        self.weight, self.eps, self.held = nn.Parameter(torch.ones(32)), 1e-6, held

    def normed(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Scaled(Norm):
    def forward(self, x):
        held = self.held
        return self.normed(x) * held.scale


class Entry(Norm):
    def forward(self, x):
        return self.normed(x) * self.held["scale"]


class Functions(Norm):
    def forward(self, x):
        x = self.normed(x)
        for function in self.held:
            x = function(x)
        return x


class Asks(Norm):
    def forward(self, x):
        return 2 * self.normed(x) if self.held() else self.normed(x)


class AsksAsClass(Asks):
    asks = staticmethod(torch.are_deterministic_algorithms_enabled)

    def forward(self, x):
        return 2 * self.normed(x) if self.asks() else self.normed(x)


class AsksByDefault(Asks):
    def forward(self, x, asks=torch.are_deterministic_algorithms_enabled):
        return 2 * self.normed(x) if asks() else self.normed(x)


class Gated(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held
        self.gate, self.up, self.down = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x):
        return self.down(self.held(self.gate(x)) * self.up(x))


def patched(plain):
    module = copy.deepcopy(plain)
    liger_hw.patch(module)
    torch.testing.assert_close(module(X), plain(X))
    return module


class Normed(Norm):
    def forward(self, x):
        return self.normed(x)


REPLACED = {
    "LayerNorm.forward": (nn.LayerNorm, "forward", lambda: nn.LayerNorm(32)),
    "layer_norm": (F, "layer_norm", lambda: nn.LayerNorm(32, bias=False)),
    "layer_norm, no weight": (F, "layer_norm", lambda: nn.LayerNorm(32, elementwise_affine=False)),
    "rsqrt": (torch, "rsqrt", Normed),
    "pow": (torch.Tensor, "pow", Normed),
    "gelu": (F, "gelu", lambda: Gated(nn.GELU("tanh"))),
    "SiLU.forward": (nn.SiLU, "forward", lambda: Gated(nn.SiLU())),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_function_of_torch_replaced_before_patch(name, monkeypatch):
    """The op's reference may call the same function, so that a probe agrees, while a kernel computes torch's."""
    place, attribute, make = REPLACED[name]
    assert liger_hw.patch(nn.Sequential(make())).replaced
    original = getattr(place, attribute)
    monkeypatch.setattr(place, attribute, lambda *args, **kwargs: 2 * original(*args, **kwargs))
    plain = nn.Sequential(make())
    module = copy.deepcopy(plain)
    assert not liger_hw.patch(module).replaced
    torch.testing.assert_close(module(X), plain(X))


class Mode(enum.Enum):
    NUMBER = 1.0
    LIST = [1.0]  # noqa: RUF012

    def __init__(self, value):
        self.scale = 1.0


class Valued(Norm):
    def forward(self, x):
        held = self.held
        return self.normed(x) * held.value


class FirstValue(Norm):
    def forward(self, x):
        held = self.held
        return self.normed(x) * held.value[0]


@pytest.mark.parametrize(
    ("kind", "member", "write"),
    [
        (Scaled, Mode.NUMBER, lambda number: setattr(Mode.NUMBER, "scale", number)),
        (Valued, Mode.NUMBER, lambda number: setattr(Mode.NUMBER, "_value_", number)),
        (FirstValue, Mode.LIST, lambda number: Mode.LIST.value.__setitem__(0, number)),
    ],
    ids=["attribute", "value", "contents of the value"],
)
def test_members_of_an_enum(kind, member, write):
    plain = kind(member)
    module = patched(plain)
    try:
        write(2.0)
        torch.testing.assert_close(module(X), plain(X))
    finally:
        write(1.0)


def test_the_default_dtype():
    class Tensor(Norm):
        def forward(self, x):
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + torch.tensor(self.eps)))

    plain, small = Tensor(), 1e-5 * X
    plain.eps = 1e-8
    module = patched(plain)
    torch.set_default_dtype(torch.float16)
    try:
        torch.testing.assert_close(module(small), plain(small))
    finally:
        torch.set_default_dtype(torch.float32)


class Struct(ctypes.Structure):
    _fields_ = (("scale", ctypes.c_float),)


class Array(array.array):
    pass


class Box(list):
    def __init__(self):
        super().__init__([1.0])
        self.scale = 1.0


class First(Norm):
    def forward(self, x):
        held = self.held
        return self.normed(x) * held[0]


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: Scaled(Struct(1.0)), lambda held: setattr(held, "scale", 2.0)),
        (lambda: First((ctypes.c_float * 1)(1.0)), lambda held: held.__setitem__(0, 2.0)),
        (lambda: First(Array("f", [1.0])), lambda held: held.__setitem__(0, 2.0)),
        (lambda: First(np.ones(1, np.float32).view(type("Part", (np.ndarray,), {}))), lambda held: held.fill(2.0)),
        (lambda: Scaled(Box()), lambda held: setattr(held, "scale", 2.0)),
    ],
)
def test_contents_in_c(make, change):
    plain = make()
    module = type(plain)(plain.held)
    liger_hw.patch(module)
    torch.testing.assert_close(module(X), plain(X))
    change(plain.held)
    torch.testing.assert_close(module(X), plain(X))


def test_random_numbers_of_a_programs_generator():
    class Drops(Norm):
        def forward(self, x):
            held = self.held
            return 2 * self.normed(x) if held.random() < 0 else self.normed(x)

    module, untouched = Drops(random.Random(0)), random.Random(0)
    liger_hw.patch(module)
    module(X)
    untouched.random()
    assert module.held.getstate() == untouched.getstate()


def same(x):
    return x


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: Functions([same]), lambda held: held.append(nn.Identity())),
        (lambda: Functions([same]), lambda held: held.append(same.__call__)),
        (lambda: Entry({"scale": 1.0}), lambda held: held.update(scale=torch.tensor(2.0))),
        (lambda: Entry({"scale": 1.0}), lambda held: held.update(other=torch.ones(3))),
        (lambda: Scaled(types.SimpleNamespace(scale=1.0)), lambda held: setattr(held, "scale", torch.tensor(2.0))),
        (lambda: Scaled(types.SimpleNamespace(scale=1.0)), lambda held: setattr(held, "model", nn.Linear(2, 2))),
        (lambda: Scaled(types.SimpleNamespace(scale=1.0)), lambda held: setattr(held, "lock", threading.Lock())),
    ],
)
def test_contents_that_cannot_be_compared_later(make, change):
    plain = make()
    module = patched(plain)
    for each in (plain, module):
        change(each.held)
    torch.testing.assert_close(module(X), plain(X))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Asks(torch.are_deterministic_algorithms_enabled),
        lambda: Asks(functools.partial(torch.are_deterministic_algorithms_enabled)),
        AsksAsClass,
        AsksByDefault,
    ],
    ids=["attribute", "partial", "class attribute", "default"],
)
def test_functions_that_tell_a_state_of_torch(make):
    plain = make()
    module = patched(plain)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(module(X), plain(X))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("function", [sys.gettrace, time.time, torch.is_anomaly_enabled])
def test_functions_that_tell_a_state_of_python(function):
    assert not liger_hw.patch(Asks(function)).replaced


def scaled_silu(x):
    return F.silu(x) * SCALE


def counted_silu(x):
    CALLS.append(1)
    return F.silu(x)


DECORATORS = {
    "compile": lambda function: torch.compile(function, backend="eager"),
    "disable": torch.compiler.disable,
    "singledispatch": functools.singledispatch,
    "script_if_tracing": torch.jit.script_if_tracing,
    "autocast": torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("decorator", DECORATORS.values(), ids=DECORATORS)
def test_functions_within_decorators(decorator, monkeypatch):
    plain = Gated(decorator(scaled_silu))
    module = Gated(plain.held)
    module.load_state_dict(plain.state_dict())
    liger_hw.patch(module)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    torch.testing.assert_close(module(X), plain(X))

    CALLS.clear()
    module = Gated(decorator(counted_silu))
    liger_hw.patch(module)
    assert not CALLS
    module(X)
    assert len(CALLS) == 1
