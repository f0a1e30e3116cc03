"""Find the op that computes a module, by running both; names prove nothing.

The module's forward on a probe (see `probing`) and an op's reference run on the same random rows in fp32 and in bf16.
They match if their results are bitwise equal, dtype included (LayerNorm allows another order of fp32 sums).
"""

import dataclasses
import functools
from typing import NamedTuple

from liger_hw._torch import CALL, without_modes
from liger_hw.patching import probing
from liger_hw.patching.activations import match_activation
from liger_hw.patching.experts import calls_gate, match_experts
from liger_hw.patching.gated_norms import match_gated_norm
from liger_hw.patching.hooks import original_class
from liger_hw.patching.lora import match_lora
from liger_hw.patching.match import Match, remember
from liger_hw.patching.mlp import is_mlp_like, match_mlp, unknown_operation
from liger_hw.patching.norms import match_norm
from liger_hw.patching.pins import Incomparable, attribute_pins, fact, functions_in, reads
from liger_hw.patching.probing import direct_parameters, positional_inputs
from liger_hw.patching.projection import is_projection
from liger_hw.patching.reading import read, read_function
from liger_hw.patching.rotary import find_rotation, match_rotary, rotary_functions
from liger_hw.patching.sorted_experts import match_sorted_experts
from liger_hw.patching.swapping import patched_class
from liger_hw.patching.values import is_known
from liger_hw.patching.witnesses import Objection

MATCHERS = (match_norm, match_gated_norm, match_mlp, match_experts, match_sorted_experts, match_activation)
NO_OP = "no op that patch tries computes the same bits"
EXPERT_LOOP = "runs a loop of its own over its experts, not transformers' experts interface"
NO_ACTIVATION = "no supported activation between its two linear layers"


class Recognition(NamedTuple):
    """Match of a module or None, and the reason for leaving it or None."""

    match: Match | None = None
    reason: str | None = None


class Memory:
    """Results of one call of `patch`, within which no program replaces code."""

    def __init__(self):
        self.matches, self.rotations, self.codes, self.classes = {}, {}, {}, {}

    def code(self, cls, methods=("forward",)):
        """Return the `Code` of a class."""
        return remember(self.codes, (cls, methods), lambda: read(cls, methods))

    def rotation(self, function):
        """Return the result of `find_rotation`."""
        return remember(self.rotations, function, lambda: find_rotation(function))

    def patched_class(self, original, match):
        """Return the subclass of `original` that computes with `match`'s op."""
        return remember(self.classes, (original, match), lambda: patched_class(original, match))


def recognise(module, memory=None):
    """Return the `Recognition` of a module; a `Memory` probes equal modules once."""
    with without_modes():
        return _recognise(module, Memory() if memory is None else memory)


def _recognise(module, memory):
    lora = match_lora(module, functools.partial(remember, memory.matches))
    if lora is not None:
        return Recognition(*lora)
    try:
        result = remember(memory.matches, _facts(module, memory), lambda: _first_match(module, memory))
    except (Incomparable, TypeError, RuntimeError):  # an attribute without comparison or hash; a lazy parameter
        result = _first_match(module, memory)
    match = result.match
    if match is not None and match.kind == "experts" and not calls_gate(module):
        implementation = module.config._experts_implementation
        return Recognition(reason=f"experts implementation {implementation!r} does not call the module's gate")
    if match is not None or result.reason is not None:
        return result
    cls = type(module)
    match, reason = remember(memory.matches, cls, lambda: match_rotary(cls, memory.rotation))
    return Recognition(match, reason or (None if match else reason_for_leaving(module, memory)))


def _first_match(module, memory):
    if is_mlp_like(module) and rotary_functions(type(module)):
        return Recognition()  # an attention, whose code no probe runs
    if reason := _reason_against_probes(module, memory):
        if is_mlp_like(module) and len(positional_inputs(module)) != 1:
            return Recognition(reason=reason_for_leaving(module, memory))
        dims = [p.ndim for p in direct_parameters(module).values()]
        has_form = dims in ([1], [3, 3]) or is_mlp_like(module) or hasattr(type(module), "_apply_gate")
        is_shown = has_form and "attention" not in type(module).__name__.lower() or reason_for_leaving(module, memory)
        return Recognition(reason=reason if is_shown else None)
    try:
        match = next((match for matcher in MATCHERS if (match := matcher(module)) is not None), None)
    except Objection as error:
        return Recognition(reason=str(error))
    return Recognition() if match is None else _with_pins(module, match, memory)


def _reason_against_probes(module, memory):
    """Return why the code of a module must not run on a probe, or None.

    It may count its calls, or draw random numbers. That is asked of every form of module that a matcher runs.
    """
    methods, dims = ("forward",), [p.ndim for p in direct_parameters(module).values()]
    is_flat = not module._modules and all(dim == 1 for dim in dims)
    if hasattr(type(module), "_apply_gate"):
        methods = ("_apply_gate",)
    elif not (is_flat or is_mlp_like(module) or dims == [3, 3]):
        return None
    if is_known(type(module)):
        return None
    code = memory.code(type(module), methods)
    if (is_flat or is_mlp_like(module)) and len(positional_inputs(module)) == 1:
        try:
            attribute_pins(module, code, probing.float_attributes(module))
        except Incomparable as error:
            return f"its code {code.reason or error}"
    if code.reason:
        return f"its code {code.reason}"
    for name, child in module.named_children():
        cls = original_class(child)
        if not (is_projection(child) or is_known(cls)) and (reason := memory.code(cls).reason):
            return f"the code of its {name} {reason}"
    for name, value in vars(module).items():
        for function in _functions_held(value) if reads(code.names, name) else ():
            if reason := read_function(function).reason:
                return f"the code of its {name} {reason}"
    return None


def _functions_held(value):
    """Return the functions that an attribute is or holds."""
    try:
        return [*functions_in(fact(value))]
    except (Incomparable, RecursionError):
        return []


def _with_pins(module, match, memory):
    """Return a match with pinned attributes, or why the module is left."""
    code = memory.code(type(module), match.methods)
    if code.reason:
        return Recognition(reason=f"its code {code.reason}")
    exempt = {name for _, name in match.names if isinstance(name, str)}
    try:
        pinned = attribute_pins(module, code, exempt)
        for name, cls in match.bypassed:
            if (cls.__call__, cls._call_impl) != CALL:
                return Recognition(reason=f"its {name} replaces the call of a module")
            if module._modules[name]._modules:
                return Recognition(reason=f"its {name} has children of its own")
            child = memory.code(cls)
            if child.reason:
                return Recognition(reason=f"the code of its {name} {child.reason}")
            if ("training",) in child.chains and not is_known(cls):
                return Recognition(reason=f"the code of its {name} reads training")
            if name not in exempt:
                pinned += attribute_pins(module._modules[name], child, children=(name,))
    except Incomparable as error:
        return Recognition(reason=f"its code {error}")
    match = dataclasses.replace(match, pinned=match.pinned + pinned)
    reason = next((f"its code {code.reason}" for code in match.codes(type(module)) if code.reason), None)
    reason = reason or match.reason_against(type(module))
    return Recognition(reason=reason) if reason else Recognition(match)


def _facts(module, memory, names=frozenset()):
    """Return what determines a probe's result: class, shapes, children, attributes that code reads.

    Raises:
        Incomparable: it holds a buffer or another value that cannot be compared.
    """
    if any(buffer is not None for buffer in module._buffers.values()):
        raise Incomparable
    names = names | memory.code(type(module)).names
    shapes = tuple((name, p if p is None else p.shape) for name, p in module._parameters.items())
    children = tuple((name, _facts(child, memory, names)) for name, child in module.named_children())
    attributes = tuple((name, fact(value)) for name, value in vars(module).items() if reads(names, name))
    return type(module), module.training, shapes, children, attributes


def reason_for_leaving(module, memory):
    """Return why no op computes a module; None where its name suggests no op."""
    name = type(module).__name__.lower()
    if "experts" in name:
        return NO_OP if hasattr(module, "has_gate") else EXPERT_LOOP
    if "norm" in name and not module._modules:
        return NO_OP
    if not any(part in name for part in ("mlp", "feedforward")):
        return None
    projections = [child for child in module.children() if is_projection(child)]
    if not projections:
        return None
    if tensors := [*direct_parameters(module), *module._buffers]:
        return f"has tensors of its own beside its linear layers: {', '.join(tensors)}"
    if (inputs := len(positional_inputs(module))) != 1:
        return f"its forward takes {inputs} inputs, and an MLP's op takes one"
    if not _reason_against_probes(module, memory) and (operation := unknown_operation(module)):
        return f"computes {operation}, which no op does"
    return NO_ACTIVATION if len(projections) == 2 else NO_OP
