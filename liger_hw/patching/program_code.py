"""Read the code of a program that a model's forward may call with its logits."""

import functools
import inspect
import sys
import types

import torch

from liger_hw.patching import values
from liger_hw.patching.reading import all_code, instructions_of

ATTRIBUTES = {"__class__", "__dict__", "grad_fn"}
ASKING = {"LOAD_GLOBAL": {"type", "vars", "dir"}, "LOAD_ATTR": ATTRIBUTES, "LOAD_CONST": ATTRIBUTES}
UNREAD = {*values.TRUSTED, *sys.stdlib_module_names}


def may_ask_for_class(model, head):
    """Tell whether a forward, or code that it calls, may ask what its logits are.

    Functions of torch, transformers and Python are not read. Nor are the layers before the head, which see no logits.
    """
    before = [child for child in model.children() if child is model.base_model or head in set(child.modules())]
    waiting, seen = [(type(model).forward, model)], set()
    while waiting:
        value, owner = waiting.pop()
        if any(value is child for child in before):
            continue
        for function, holder in _functions(value, owner):
            if function in seen:
                continue
            seen.add(function)
            is_trusted = values.package(function) in UNREAD
            names = set()
            for instruction in _instructions(function):
                name, kind = instruction.argval, instruction.opname.replace("METHOD", "ATTR")
                if not is_trusted and (name in ASKING.get(kind, ()) or str(name).startswith("has_torch_function")):
                    return True
                names.add(name)
            waiting += _named(function, names, holder, is_trusted)
    return False


def _instructions(function):
    return (i for code in all_code(function.__code__) for i in instructions_of(code) if isinstance(i.argval, str))


def _functions(value, owner):
    """Yield (function, the object of whose attributes it may call) of something that code names."""
    if isinstance(value, torch.nn.Module):
        yield from ((type(part).forward, part) for part in value.modules())
        return
    value = _unwrapped(value)
    members = []
    for cls in (value if isinstance(value, type) else type(value)).__mro__:
        if values.package(cls) not in (*UNREAD, "builtins"):
            members += (member for name, member in vars(cls).items() if name not in values.WRITTEN_BY_PYTHON)
    members = [(_unwrapped(member), None) for member in members]
    wrapped = []  # a program may wrap a function by itself
    while value is not None and not any(value is function for function in wrapped):
        wrapped.append(value)
        value = inspect.getattr_static(value, "__wrapped__", None)
    members += [(value, owner) for value in wrapped]
    for value in wrapped:
        registry = vars(value).get("registry") if isinstance(value, types.FunctionType) else None
        if isinstance(registry, types.MappingProxyType):  # of functools.singledispatch
            members += ((function, None) for function in registry.values())
    yield from ((member, holder) for member, holder in members if isinstance(member, types.FunctionType))


def _unwrapped(value):
    value = value.func if isinstance(value, functools.partial) else value
    value = value.fget if isinstance(value, property) else value
    return value.__func__ if isinstance(value, (types.MethodType, staticmethod, classmethod)) else value


def _named(function, names, owner, is_trusted):
    """Yield (value, owner) of what a function's code names; trusted code may call the model's."""
    classes = type(owner).__mro__ if owner is not None else ()
    held = []
    if not is_trusted:
        held += (values.content(cell) for cell in function.__closure__ or ())
        held += (function.__globals__.get(name) for name in names)
    for value in held:
        if isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in UNREAD:
            yield from ((vars(value).get(name), None) for name in names)
        elif not any(value is cls for cls in classes):  # the cell of super()
            yield value, None
    for name in names if owner is not None else ():
        yield from ((vars(cls).get(name), owner) for cls in classes)
        yield from ((place.get(name), None) for place in (vars(owner), owner._modules))
