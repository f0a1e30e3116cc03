"""Swap a module's class for a subclass that computes with an op, and restore it.

Parameters, buffers, hooks and names stay where they are, and no other module changes. A copy of a patched module
computes with the copy's weights; a closure set as its `forward` would compute with the original's.
"""

import functools
import types


def swap(module, match):
    """Give `module` the subclass of its class that computes with `match`'s op."""
    module.__class__ = patched_class(type(module), match)


def restore(module):
    """Restore the class of a swapped `module`, and remove the patched class's instance attributes.

    Methods of the patched class that a library stores on the instance become those of the module's own class:
    accelerate stores the forward that it wraps.
    """
    patched = type(module)
    module.__class__ = patched.liger_original
    for name, value in list(vars(module).items()):
        if name.startswith("liger_"):
            del vars(module)[name]
        elif isinstance(value, types.MethodType) and vars(patched).get(value.__name__) is value.__func__:
            vars(module)[name] = types.MethodType(getattr(type(module), value.__name__), module)


def is_swapped(module):
    """Tell whether `module` has a class that `swap` gave it."""
    return "liger_original" in vars(type(module))


def is_changed_since(module):
    """Tell whether a parametrization, FSDP or other code derived `module`'s class from a swapped one."""
    return hasattr(type(module), "liger_original") and not is_swapped(module)


def own_class(module):
    """Return the class of `module` without the swap."""
    return type(module).liger_original if is_swapped(module) else type(module)


@functools.cache
def patched_class(original, match):
    """Return the subclass of `original` that computes with `match`'s op, one per process.

    Its name contains the original's, as other libraries look for it. It has the same `__module__`. It pickles as the
    original class and the match, and unpickles patched.
    """
    members = match.members(original)
    name = members.pop("__name__", f"Liger{original.__name__}")
    identity = {"__module__": original.__module__, "__qualname__": name, "__doc__": original.__doc__}
    cls = type(name, (original,), identity | members | {"liger_original": original, "liger_match": match})
    cls.__reduce_ex__ = functools.partialmethod(_reduce, cls)
    return cls


def _reduce(self, cls, protocol):
    if type(self) is not cls:  # a derived class, such as FSDP's, pickles in its own way
        return super(cls, self).__reduce_ex__(protocol)
    _, _, *state = super(cls, self).__reduce_ex__(max(protocol, 2))
    return _rebuild, (cls.liger_original, cls.liger_match), *state


def _rebuild(original, match):
    return object.__new__(patched_class(original, match))
