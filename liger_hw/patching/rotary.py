"""Copy methods that call a rotary function, so that they call the op `rope`."""

import functools
import types

import torch
from torch.compiler import is_compiling

from liger_hw.patching.match import Match, compiles_by_itself
from liger_hw.patching.pins import code_guard
from liger_hw.patching.probing import agree
from liger_hw.patching.reading import Pin, function_pins, read_function, read_globals
from liger_hw.patching.rebinding import innermost, model_methods, with_globals
from liger_hw.patching.rotation import by_op, case_of, prove_rotation, replacement
from liger_hw.patching.shared_inputs import Sharing, groups_in
from liger_hw.patching.values import content
from liger_hw.patching.witnesses import Proof

NO_ROTATION = "the op rope does not compute the rotation of {}"


class RotaryMatch(Match):
    """Match of a class whose methods call rotary functions; `names`: global name -> `Rotation`."""

    kind = "rope"

    def pins(self, original):
        functions, pins = rotary_functions(original), []
        for name, method in _methods(original, dict(self.names)).items():
            pins += [Pin(original, name, method), *read_globals(innermost(method), dict(self.names)).pins]
            pins += _decoration_pins(method)
        return [*pins, *(pin for name, _ in self.names for pin in read_function(functions[name]).pins)], set()

    def guard(self, original):
        return code_guard(self.pins(original)[0])

    def members(self, original, unchanged):
        functions = rotary_functions(original)
        replaced = {name: replacement(functions[name], rotation) for name, rotation in self.names}
        return {
            name: _guarded(original, name, with_globals(method, replaced), unchanged)
            for name, method in _methods(original, replaced).items()
        }

    def shown_options(self):
        return "; ".join(sorted({str(rotation) for _, rotation in self.names} - {""}))


def _methods(cls, names):
    """Return name -> method of `cls` that calls one of the global `names`."""
    methods = model_methods(cls).items()
    return {name: method for name, method in methods if set(innermost(method).__code__.co_names) & set(names)}


def _decoration_pins(function):
    """Return pins of the decorators around a function, of which a patched method has copies."""
    pins = []
    while isinstance(wrapped := getattr(function, "__wrapped__", None), types.FunctionType):
        cells = [cell for cell in function.__closure__ or () if content(cell) is wrapped]
        pins += [*function_pins(function), *(Pin(cell, "cell_contents", wrapped) for cell in cells)]
        function = wrapped
    return pins


def _guarded(original, name, copied, unchanged):
    """Return a method that calls the copy, or the class's method if code was replaced."""
    groups = groups_in(innermost(copied))

    @functools.wraps(copied)
    def method(self, *args, **kwargs):
        if is_compiling() and compiles_by_itself(args, kwargs) or not unchanged():
            return getattr(original, name)(self, *args, **kwargs)
        if not groups or is_compiling():
            return copied(self, *args, **kwargs)
        with Sharing(self, groups):
            return copied(self, *args, **kwargs)

    return method


def rotary_functions(cls):
    """Return name -> function for globals named "*rotary*" that methods of `cls` call.

    It looks functions up in the globals of each method's file, as the method does.
    """
    functions = {}
    for method in map(innermost, model_methods(cls).values()):
        for name in method.__code__.co_names:
            if "rotary" in name and callable(method.__globals__.get(name)):
                functions[name] = method.__globals__[name]
    return functions


def match_rotary(cls, find=None):
    """Return (`RotaryMatch` or None, why a rotary function is left or None).

    Args:
        find: a function that remembers the results of `find_rotation`.
    """
    functions = {name: function for name, function in rotary_functions(cls).items() if not isinstance(function, type)}
    results = {name: (find or find_rotation)(function) for name, function in functions.items()}
    proved = {name: rotation for name, (rotation, _) in results.items() if rotation is not None}
    reason = "; ".join(why.replace("{}", name) for name, (_, why) in results.items() if why) or None
    for method in _methods(cls, proved).values():
        if copied := read_globals(innermost(method), proved).reason:
            return None, f"{method.__name__} {copied}"
    return (RotaryMatch("rope", names=tuple(sorted(proved.items()))) if proved else None), reason


def match_rotation(function):
    """Return the `Rotation` that a rotary function computes, or None."""
    return find_rotation(function)[0]


def find_rotation(function):
    """Return (the `Rotation` of a rotary function or None, why it is left or None).

    The reason contains {} in place of the function's name.
    """

    if not hasattr(getattr(function, "__func__", function), "__code__"):
        return None, NO_ROTATION
    code = read_function(function)
    if isinstance(function, types.MethodType) or code.registries:
        code.refuse("reads an object whose contents may change")
    if code.reason:
        return None, f"{{}} {code.reason}"
    rotation = prove_rotation(function, agree)
    if rotation is None:
        return None, NO_ROTATION
    proof = Proof(
        lambda training, *args: function(*args),
        lambda training, *args: by_op(rotation)(*args),
        lambda dtype, shape: case_of(rotation, dtype, dtype, batch=shape[0], length=shape[1]),
        other_shapes=(),
        learned=2 if rotation.form.startswith("q") else 1,
        at_width=lambda width: case_of(rotation, torch.float32, torch.float32, batch=1, length=2, width=width),
    )
    reason = proof.objection(code.constants)
    return (None, f"{{}} {reason}") if reason else (rotation, None)
