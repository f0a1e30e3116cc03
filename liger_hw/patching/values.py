"""Tell whose code a value is, and whether it may change or compute."""

import enum
import functools
import inspect
import sys
import types

import torch

MISSING = object()  # value of a pin whose name does not exist
KNOWN_PACKAGES = ("torch", "liger_hw")
KNOWN_LIBRARY = {
    "math",
    "operator",
    "functools",
    "itertools",
    "typing",
    "types",
    "collections",
    "abc",
    "enum",
    "numbers",
}
GENERATED = {  # members of a class by which it does not compute when code reads an object
    "__init__", "__post_init__", "__repr__", "__str__", "__new__", "__slotnames__", "__getstate__", "__setstate__",
    "__replace__",
}  # fmt: skip
WRITTEN_BY_PYTHON = {  # methods of dataclasses and named tuples; a notebook's file may begin with "<", too
    *GENERATED, "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__", "__setattr__", "__delattr__", "_make",
    "_replace", "_asdict", "__getnewargs__",
}  # fmt: skip
TRUSTED = ("torch", "transformers", "numpy", "liger_hw")  # packages whose properties of configurations change nothing
HEAP_TYPE = 1 << 9  # flag of classes that code defines, unlike most of Python's: Py_TPFLAGS_HEAPTYPE
DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
PLAIN_CLASSES = (int, float, bool, str, bytes, complex, tuple, type(None), types.FunctionType, types.ModuleType)
ENUM_ATTRIBUTES = {"_value_", "_name_", "__objclass__", "_sort_order_", "_hashable_values_"}
CONSTANT = (
    int, float, complex, str, bytes, type(None), type(Ellipsis), type, torch.dtype, torch.device, torch.Size,
    torch.layout, torch.memory_format, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, slice,
    types.MethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
    types.UnionType, types.GenericAlias,
)  # fmt: skip


def is_known(function):
    """Tell whether a function or class is torch's, this package's or Python's."""
    return package(function) in (*KNOWN_PACKAGES, "builtins") or is_known_library(function)


def replaced_function(pins, packages=("torch",)):
    """Return the name of the first function in `pins` of another package, or None."""
    others = type, types.MethodDescriptorType
    functions = (pin for pin in pins if callable(pin.value) and not isinstance(pin.value, others))
    return next((pin.name for pin in functions if package(pin.value) not in packages), None)


def is_zero3_linear(function):
    """Tell whether `function` is that by which ZeRO-3 replaces `torch.nn.functional.linear`.

    It computes the same, and keeps no gathered weight until the backward.
    """
    module = sys.modules.get("deepspeed.runtime.zero.linear")
    return module is not None and function is module.zero3_linear_wrap


def is_constant(value):
    """Tell whether a value cannot change as long as it is the same object."""
    if isinstance(value, (tuple, frozenset)):
        return (
            not may_compute(value)
            and not any(isinstance(v, types.ModuleType) for v in value)
            and all(is_constant(v) and not (isinstance(v, type) and is_model_class(v)) for v in value)
        )
    return isinstance(value, CONSTANT) and not is_bound(value) and not may_compute(value)


def is_bound(value):
    """Tell whether a function in C is a method of an object, such as `{}.get`."""
    holder = getattr(value, "__self__", None) if isinstance(value, types.BuiltinFunctionType) else None
    return holder is not None and not isinstance(holder, (types.ModuleType, type))


def may_compute(value):
    """Tell whether a value may compute, or change, when code reads it."""
    cls = type(value)
    if cls in PLAIN_CLASSES:
        return False
    if isinstance(value, (int, float, complex, str, bytes, tuple, frozenset)) and getattr(value, "__dict__", None):
        return not isinstance(value, enum.Enum) or not vars(value).keys() <= ENUM_ATTRIBUTES
    return any(_computes(base) or _holds_values(base) for base in cls.__mro__)


def _holds_values(cls):
    """Tell whether a program's class of numbers or strings has attributes, which it may change."""
    if not issubclass(cls, (int, float, complex, str, bytes)) or issubclass(cls, enum.Enum) or not is_model_class(cls):
        return False
    return any(not name.startswith("_") and not hasattr(type(member), "__get__") for name, member in vars(cls).items())


def computes(value, name):
    """Tell whether an object computes an attribute by code of a program's class."""
    if isinstance(value, (types.ModuleType, type, types.FunctionType)):
        return False
    member = inspect.getattr_static(type(value), name, MISSING)
    held = name in getattr(value, "__dict__", ())
    owners = [cls for cls in type(value).__mro__ if name in vars(cls) or not held and "__getattr__" in vars(cls)]
    if member is not MISSING and not hasattr(type(member), "__get__") or held and member is MISSING:
        owners = []
    owners += [cls for cls in type(value).__mro__ if "__getattribute__" in vars(cls)]
    return any(
        package(cls) not in TRUSTED
        and not is_known(cls)
        and cls not in (object,)
        and package(cls) not in sys.stdlib_module_names
        for cls in owners
    )


def _computes(cls):
    """Tell whether a program's class has functions that run when code uses its instances."""
    if is_known(cls) or package(cls) in (*TRUSTED, *sys.stdlib_module_names):
        return False
    return any(
        name not in GENERATED
        and (hasattr(type(member), "__get__") or isinstance(member, functools.partial))
        and not isinstance(member, (type, *DESCRIPTORS, types.BuiltinFunctionType, types.MethodDescriptorType))
        and not _is_generated(getattr(member, "__func__", member))  # enum's is a staticmethod since Python 3.12
        for name, member in vars(cls).items()
    )


def _is_generated(function):
    """Tell whether dataclasses, namedtuple or enum made a method."""
    if not isinstance(function, types.FunctionType):
        return False
    name = function.__name__
    is_written = function.__code__.co_filename.startswith("<") and name == function.__code__.co_name
    return is_written and name in WRITTEN_BY_PYTHON or is_known(function)


def content(cell):
    """Return what a cell holds."""
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return MISSING


def is_model_class(cls):
    return not is_known(cls) and package(cls) not in sys.stdlib_module_names


def is_known_module(value):
    return isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] in KNOWN_PACKAGES


def package(value):
    name = getattr(value, "__module__", None)
    if isinstance(value, types.FunctionType):  # functools.wraps copies `__module__` to other functions
        name = value.__globals__.get("__name__", "")  # code that ran by exec may have none
    if name is None:
        owner = getattr(value, "__self__", None) or getattr(value, "__objclass__", None)
        name = owner.__name__ if isinstance(owner, (types.ModuleType, type)) else "builtins"
    if isinstance(value, type) and value.__flags__ & HEAP_TYPE and not _is_held(value, str(name)):
        name = ""  # a class of code that ran by exec, or that a function of Python made
    return str(name).partition(".")[0]


def _is_held(cls, module):
    """Tell whether a class that names one of Python's modules is there."""
    if module.partition(".")[0] not in {"builtins", *KNOWN_LIBRARY}:
        return True
    holder = sys.modules.get(module)
    for name in cls.__qualname__.split("."):
        holder = getattr(holder, name, None)
    return holder is cls and module != "builtins"


def is_known_library(value):
    name = package(value)
    return name in KNOWN_LIBRARY or name.removeprefix("_") in KNOWN_LIBRARY and name in sys.stdlib_module_names
