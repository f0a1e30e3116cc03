"""Copy functions and replace some of their global names."""

import inspect
import itertools
import types

from liger_hw.patching.values import content


def model_methods(cls):
    """Return name -> method that `cls` defines, or inherits from a class outside torch."""
    methods = {}
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.", "builtins")):
            continue
        for name, member in vars(base).items():
            if isinstance(member, types.FunctionType) and not name.startswith("__"):
                methods.setdefault(name, member)
    return methods


def innermost(function):
    """Return the function below all decorators that use functools.wraps."""
    while isinstance(getattr(function, "__wrapped__", None), types.FunctionType):
        function = function.__wrapped__
    return function


def with_globals(function, replaced):
    """Copy `function` and its decorators, and replace globals that it calls.

    The copy reads the same dictionary of globals, so that it sees all changes in a call, and so do functions that it
    makes. The dictionary holds the new functions by names of their own.

    Args:
        replaced: name of a global -> the function that the copy calls.
    """
    wrapped = getattr(function, "__wrapped__", None)
    code, closure, more = function.__code__, function.__closure__, {}
    if isinstance(wrapped, types.FunctionType):
        inner = with_globals(wrapped, replaced)
        closure = tuple(types.CellType(inner) if content(cell) is wrapped else cell for cell in closure or ())
        more = {"__wrapped__": inner}
    else:
        new = {name: _add(function.__globals__, name, replaced[name]) for name in {*replaced} & {*code.co_names}}
        code = code.replace(co_names=tuple(new.get(name, name) for name in code.co_names))
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(vars(function) | more)
    share_attributes(copy, function)
    for name in ("__doc__", "__annotations__", "__module__", "__qualname__"):
        setattr(copy, name, getattr(function, name))
    return copy


def share_attributes(copy, function):
    """Let `copy` have the attributes of a decorated function, whose decorator may count in one."""
    if not isinstance(function, types.FunctionType):
        return
    names, takes_anything = vars(function).keys(), inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    # the signature, which programs read, is that of `__wrapped__` or says nothing
    is_decorated = "__wrapped__" in names or function.__code__.co_flags & takes_anything == takes_anything
    if is_decorated and names - {"__wrapped__"}:
        copy.__dict__ = vars(function)


def _add(namespace, name, function):
    """Return the name by which globals hold a replacement; one that equals `function` stays."""
    names = (f"_liger_hw_{number}_{name}" for number in itertools.count())
    return next(n for n in names if namespace.setdefault(n, function).replaces == function.replaces)
