"""Classes whose methods call a rotary function of their file: copies of the methods call the op `rope` instead."""

import functools

from liger_hw.patching.match import Match
from liger_hw.patching.probing import agree
from liger_hw.patching.rebinding import innermost, methods_of_model_code, with_globals
from liger_hw.patching.rotation import prove_rotation, replacement


class RotaryMatch(Match):
    """The match of a class by the rotary functions that its methods call: `names` maps global name to `Rotation`."""

    kind = "rope"

    def members(self, original):
        functions = rotary_functions(original)
        replaced = {name: replacement(functions[name], rotation) for name, rotation in self.names}
        return {
            name: with_globals(function, replaced)
            for name, function in methods_of_model_code(original).items()
            if set(innermost(function).__code__.co_names) & set(replaced)
        }

    def shown_options(self):
        return "; ".join(sorted({str(rotation) for _, rotation in self.names} - {""}))


def rotary_functions(cls):
    """name -> function of every global whose name says rotary and that a method of `cls` calls.

    A function is looked up where the method would find it, in the globals of its file.
    """
    functions = {}
    for method in map(innermost, methods_of_model_code(cls).values()):
        for name in method.__code__.co_names:
            if "rotary" in name and callable(method.__globals__.get(name)):
                functions[name] = method.__globals__[name]
    return functions


def match_rotary(cls):
    """(`RotaryMatch` or None, names of rotary functions that the op does not compute) of a class."""
    functions = {name: function for name, function in rotary_functions(cls).items() if not isinstance(function, type)}
    rotations = {name: match_rotation(function) for name, function in functions.items()}
    proved = {name: rotation for name, rotation in rotations.items() if rotation is not None}
    others = [name for name in rotations if name not in proved]
    return (RotaryMatch("rope", names=tuple(sorted(proved.items()))) if proved else None), others


@functools.cache
def match_rotation(function):
    """The `Rotation` that a rotary function was proved to compute, or None."""

    def agree_on(original, op_rotation, cases):
        def as_tuple(*args):
            rotated = original(*args)
            return tuple(rotated) if isinstance(rotated, (tuple, list)) else rotated

        return agree(as_tuple, op_rotation, cases)

    return prove_rotation(function, agree_on)
