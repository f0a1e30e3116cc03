"""Copy methods that call a rotary function, so that they call the op `rope`."""

import functools

from liger_hw.patching.match import Match
from liger_hw.patching.probing import agree
from liger_hw.patching.rebinding import innermost, methods_of_model_code, with_globals
from liger_hw.patching.rotation import prove_rotation, replacement


class RotaryMatch(Match):
    """Match of a class whose methods call rotary functions; `names`: global name -> `Rotation`."""

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
    """Return name -> function for globals named "*rotary*" that methods of `cls` call.

    It looks functions up in the globals of each method's file, as the method does.
    """
    functions = {}
    for method in map(innermost, methods_of_model_code(cls).values()):
        for name in method.__code__.co_names:
            if "rotary" in name and callable(method.__globals__.get(name)):
                functions[name] = method.__globals__[name]
    return functions


def match_rotary(cls):
    """Return (`RotaryMatch` or None, names of rotary functions that the op does not compute)."""
    functions = {name: function for name, function in rotary_functions(cls).items() if not isinstance(function, type)}
    rotations = {name: match_rotation(function) for name, function in functions.items()}
    proved = {name: rotation for name, rotation in rotations.items() if rotation is not None}
    others = [name for name in rotations if name not in proved]
    return (RotaryMatch("rope", names=tuple(sorted(proved.items()))) if proved else None), others


@functools.cache
def match_rotation(function):
    """Return the `Rotation` that a rotary function provably computes, or None."""

    def agree_on(original, op_rotation, cases):
        def as_tuple(*args):
            rotated = original(*args)
            return tuple(rotated) if isinstance(rotated, (tuple, list)) else rotated

        return agree(as_tuple, op_rotation, cases)

    return prove_rotation(function, agree_on)
