"""Find the op that computes a module, by running both; names prove nothing.

The module's forward on a probe (see `probing`) and an op's reference run on the same random rows in fp32 and in bf16.
They match if their results are bitwise equal, dtype included (LayerNorm allows another order of fp32 sums).
"""

import enum
import functools
import numbers
import types
from typing import NamedTuple

import torch

from liger_hw.patching.activations import match_activation
from liger_hw.patching.experts import calls_gate, match_experts
from liger_hw.patching.gated_norms import match_gated_norm
from liger_hw.patching.match import Match
from liger_hw.patching.mlp import match_mlp
from liger_hw.patching.norms import match_norm
from liger_hw.patching.projection import is_projection
from liger_hw.patching.rotary import match_rotary
from liger_hw.patching.sorted_experts import match_sorted_experts

MATCHERS = (match_norm, match_gated_norm, match_mlp, match_experts, match_sorted_experts, match_activation)
NO_OP = "no op computes the same bits"
OWN_LOOP = "runs a loop of its own over its experts, not transformers' experts interface"
NO_ACTIVATION = "no supported activation between its two linear layers"

OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))  # training, hooks, parameters, children
PLAIN = (
    numbers.Number, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device, types.FunctionType,
    types.BuiltinFunctionType, types.ModuleType,
)  # fmt: skip


class _Unknown(Exception):
    """Report a value that cannot be compared: a probe of its module is not remembered."""


remembered = {}  # all facts that determine a probe's result -> the result


class Recognition(NamedTuple):
    """Match of a module or None, and the reason for leaving it or None."""

    match: Match | None = None
    reason: str | None = None


def recognise(module):
    """Return the `Recognition` of a module; a process probes equal modules once."""
    try:
        match = _remember(("module", *_facts(module)), lambda: _first_match(module))
    except _Unknown:
        match = _first_match(module)
    if match is not None:
        if match.kind == "experts" and not calls_gate(module):
            implementation = module.config._experts_implementation
            return Recognition(reason=f"experts implementation {implementation!r} does not call the module's gate")
        return Recognition(match)
    cls = type(module)
    match, others = _remember(("rotary", cls), lambda: match_rotary(cls))
    if others:
        return Recognition(match, f"the op rope does not compute the rotation of {', '.join(others)}")
    return Recognition(match, None if match else reason_for_leaving(module))


def _first_match(module):
    return next((match for matcher in MATCHERS if (match := matcher(module)) is not None), None)


def _remember(key, find):
    if key not in remembered:
        remembered[key] = find()
    return remembered[key]


def _facts(module):
    """Return class, parameter shapes, children and attributes, which determine a probe's result.

    Raises:
        _Unknown: it holds a buffer or another value that cannot be compared.
    """
    if any(buffer is not None for buffer in module._buffers.values()):
        raise _Unknown
    shapes = tuple((name, p if p is None else p.shape) for name, p in module._parameters.items())
    children = tuple((name, _facts(child)) for name, child in module.named_children())
    attributes = tuple((name, _fact(value)) for name, value in vars(module).items() if name not in OF_EVERY_MODULE)
    return type(module), shapes, children, attributes


def _fact(value, within=()):
    """Return what tells a value from others.

    That is a plain value itself, and the contents of an object or a container.
    """
    if isinstance(value, PLAIN):
        return type(value), value
    if id(value) in within:
        return type(value)
    within = *within, id(value)
    if isinstance(value, functools.partial):
        held = value.func, value.args, value.keywords
    elif isinstance(value, types.MethodType):
        held = value.__func__, value.__self__
    elif isinstance(value, dict):
        held = tuple(value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        held = tuple(value)
    elif isinstance(value, (torch.Tensor, torch.nn.Module)) or not _is_all_in_vars(value):
        raise _Unknown
    else:
        held = tuple(vars(value).items())
    return type(value), tuple(_fact(item, within) for item in held)


def _is_all_in_vars(value):
    """Return whether an object holds nothing outside its `__dict__`.

    Attributes are not read by name: a configuration with layers of different widths refuses that.
    """
    return hasattr(value, "__dict__") and not any(vars(cls).get("__slots__") for cls in type(value).__mro__)


def reason_for_leaving(module):
    """Return why no op computes a module; None where its name suggests no op."""
    name = type(module).__name__.lower()
    if "experts" in name:
        return NO_OP if hasattr(module, "has_gate") else OWN_LOOP
    if "norm" in name and not module._modules:
        return NO_OP
    if not any(part in name for part in ("mlp", "feedforward")):
        return None
    projections = [child for child in module.children() if is_projection(child)]
    if not projections:
        return None
    return NO_ACTIVATION if len(projections) == 2 else NO_OP
