"""Copy functions and replace some of their global names."""

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
    """Copy `function` and its decorators, with `replaced` (name -> object) among the innermost globals."""
    wrapped = getattr(function, "__wrapped__", None)
    namespace, closure, more = function.__globals__, function.__closure__, {}
    if isinstance(wrapped, types.FunctionType):
        inner = with_globals(wrapped, replaced)
        closure = tuple(types.CellType(inner) if content(cell) is wrapped else cell for cell in closure or ())
        more = {"__wrapped__": inner}
    else:
        namespace = {**namespace, **replaced}
        # with a __name__, Dynamo would look up the old objects in the module of that name
        namespace.pop("__name__", None)
    copy = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(vars(function) | more)
    for name in ("__doc__", "__annotations__", "__module__", "__qualname__"):
        setattr(copy, name, getattr(function, name))
    return copy
