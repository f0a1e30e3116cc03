"""Read in a method's code which functions, globals and attributes it uses.

A probe shows what a module computes now. The code says what the result depends on beside the arguments: functions of
the model's file, class attributes, functions of torch. `read` lists them as pins (owner, name, value), which are
compared when a patched module is called, so that a program may replace any of them after `patch`.

The code of torch, of this package and of Python itself is not read: a pin holds its functions by identity.
"""

import builtins
import dis
import functools
import inspect
import itertools
import logging
import re
import sys
import types
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from liger_hw._torch import LINEAR, OPERATION_TYPES
from liger_hw.patching import values

UNREADABLE = {  # functions of Python whose effect the code does not show
    "globals", "locals", "eval", "exec", "compile", "open", "input", "id", "setattr", "delattr", "__import__", "print",
    "next", "iter", "vars", "dir", "repr", "ascii", "format", "hash",
}  # fmt: skip
CHANGES_CONTAINER = {
    "append", "extend", "insert", "popitem", "setdefault", "appendleft", "popleft", "update", "clear", "__setitem__",
    "__setattr__", "__delattr__", "move_to_end", "difference_update", "intersection_update",
    "symmetric_difference_update", "subtract", "eval", "train", "pop", "remove", "discard", "reverse", "setitem",
    "delitem", "iadd", "iconcat", "ior", "iand", "isub", "imul", "__iadd__", "__ior__", "__iand__", "__isub__",
    "__imul__", "__delitem__",
}  # fmt: skip
REGISTERS = {n for cls in (torch.nn.Module, torch.Tensor) for n in dir(cls) if n.startswith("register_")}
GLOBAL_STATE = {  # functions of torch whose result a program may change between two calls; also STATE_PREFIXES
    "initial_seed", "device_count", "current_device", "backends", "is_available", "is_initialized", "get_rank",
    "get_world_size", "is_grad_enabled", "is_autocast_enabled", "get_autocast_dtype", "is_compiling",
    "saved_tensors_hooks", "load", "save",
    "enable_grad", "set_grad_enabled", "inference_mode",  # under which a result needs a gradient, or is no inference's
}  # fmt: skip
STATE_PREFIXES = "is_", "are_", "get_", "has_", "set_", "use_", "manual_seed", "seed", "memory_", "max_memory_"
FACTORIES = {  # functions of torch whose results have the default dtype, unless they are told another
    "tensor", "scalar_tensor", "as_tensor", "asarray", "zeros", "ones", "full", "empty", "arange", "linspace",
    "logspace", "eye", "range", "Tensor", "finfo",
}  # fmt: skip
TENSOR_FACTS = {"is_tensor", "is_floating_point", "is_complex"}  # functions that tell of their argument alone
READS_UNSEEN = {  # attributes by which code reads others without their names
    *(name for name in vars(torch.nn.Module()) if name.startswith("_")),  # its parameters, children, hooks
    "__dict__", "__getattribute__", "__getattr__", "parameters", "buffers",
    "modules", "children", "named_parameters", "named_buffers", "named_modules", "named_children", "state_dict",
    "get_parameter", "get_buffer", "get_submodule", "attrgetter", "methodcaller", "format", "format_map",
    "__repr__", "__str__", "__format__",
}  # fmt: skip
HIDDEN = UNREADABLE | READS_UNSEEN | CHANGES_CONTAINER | {"getattr", "hasattr"}  # refused under another name, too
UNUSED = {  # special methods that no operator or function of Python calls while a forward runs
    *vars(torch.nn.Module), "__new__", "__init_subclass__", "__del__", "__copy__", "__deepcopy__", "__reduce__",
    "__reduce_ex__", "__getstate__", "__class_getitem__", "__prepare_scriptable__", "__getattribute__",
}  # fmt: skip
PURE = {"get", "keys", "values", "items", "index", "count", "copy"}  # methods of containers that change nothing
CONTEXTS = torch.no_grad.__base__.__module__, torch.autocast.__module__  # modules whose decorators set a state of torch
COMPARING = {"COMPARE_OP", "CONTAINS_OP", "FORMAT_VALUE", "FORMAT_SIMPLE", "MATCH_CLASS"}  # they tell values apart
SKIPPED = {"EXTENDED_ARG", "CACHE", "PUSH_NULL"}  # instructions that read no name
STORES = {"STORE_ATTR": "attribute", "DELETE_ATTR": "attribute", "STORE_GLOBAL": "global", "DELETE_GLOBAL": "global"}
MODULE_ATTRIBUTES = frozenset(dir(torch.nn.Module))
attributes_read = set()  # all names of attributes in code that was read
BY_OPERATOR = {"**": "__pow__", "-": "__rsub__", "/": "__rtruediv__", "//": "__floordiv__"}  # torch's in Python


class Defaults:
    """torch's defaults, which functions read where a call names no dtype."""

    dtype = property(lambda self: torch.get_default_dtype())


DEFAULTS = Defaults()


class Pin(NamedTuple):
    """Hold a value that code reads by name from globals, a class or a cell."""

    owner: object
    name: str
    value: object


@dataclass
class Code:
    """Facts about the methods of a class.

    Attributes:
        functions: the functions that may run, of the model's code.
        waiting: those that are still to read.
        pins: the values that they read, apart from the instance's attributes.
        attributes: names of attributes that they read, of any object.
        loose: those of objects that are neither the first argument nor found by a global name or a cell.
        names: these, and the identifiers among their string constants.
        constants: numbers that they contain.
        registries: dictionaries among the globals, of which the code takes an entry by name: ACT2FN["silu"].
        chains: attributes that they read from their first argument: ("config", "limit") for self.config.limit.
        compared: chains whose value they compare.
        looked_up: those that they read by getattr or hasattr, which may appear later.
        writes_in_place: they contain an operator such as +=, which may write to a container.
        without_autocast: the replacement runs the own forward under autocast, so that the code may read its state.
        tells_devices: they read an attribute `type` or `index`, or call str().
        sets_autocast: they enter torch.autocast, perhaps with enabled=False.
        reason: why a probe cannot show what the methods compute, or None.
    """

    functions: list = field(default_factory=list)
    waiting: list = field(default_factory=list)
    pins: list = field(default_factory=list)
    attributes: set = field(default_factory=set)
    loose: set = field(default_factory=set)
    names: set = field(default_factory=set)
    constants: set = field(default_factory=set)
    registries: list = field(default_factory=list)
    chains: set = field(default_factory=set)
    compared: set = field(default_factory=set)
    looked_up: set = field(default_factory=set)
    writes_in_place: bool = False
    without_autocast: bool = False
    sets_autocast: bool = False
    tells_devices: bool = False
    reason: str | None = None

    def include(self, further):
        """Add what other code reads, and why it shows too little."""
        self.pins += further.pins
        self.refuse(further.reason)
        if further.registries:
            self.refuse("takes a class whose code reads a dictionary, whose contents may change")

    def refuse_state(self, name, is_torchs=False):
        """Refuse to read the state `name` of the program."""
        public = str(name).lstrip("_")
        tells = is_torchs and public.startswith(STATE_PREFIXES) and public not in TENSOR_FACTS
        if (tells or name in GLOBAL_STATE) and not (self.without_autocast and "autocast" in name):
            self.refuse(f"calls {name}()")

    def refuse(self, reason):
        """Keep the first reason."""
        self.reason = self.reason or reason


def read(cls, methods=("forward",)):
    """Return the `Code` of methods of a class, and of all functions that they name."""
    code = Code(without_autocast=issubclass(cls, torch.nn.LayerNorm))
    for name in ("__getattr__", "__getattribute__"):
        if getattr(cls, name, None) not in (getattr(torch.nn.Module, name), object.__getattribute__):
            code.refuse(f"defines {name}()")
    members = {name for base in cls.__mro__ if not values.is_known(base) for name in vars(base) if name.endswith("__")}
    if special := next((name for name in sorted(members - UNUSED) if callable(getattr(cls, name))), None):
        code.refuse(f"belongs to a class that defines {special}()")
    for name in methods:
        method = inspect.getattr_static(cls, name, values.MISSING)
        if isinstance(method, types.FunctionType):
            code.pins.append(Pin(cls, name, method))
            code.waiting += [method, *_functions_to_read(method)]
            if values.is_known(cls) and not values.is_known(method):
                code.refuse(f"is a {name} that a program gave to {cls.__name__}")
        elif method is not values.MISSING:
            code.refuse(f"its {name} is no function of Python")
    _read_functions(code, cls, methods)
    return code


def read_function(function):
    """Return the `Code` of a function, torch's too, and of all functions that it names."""
    code = Code()
    _read_held(function.__func__ if isinstance(function, types.MethodType) else function, function.__name__, code)
    _read_functions(code)
    return code


def add_entries(code, strings):
    """Add the entries of registries whose names are among the code's strings or `strings`."""
    for name, registry in code.registries:
        keys = sorted((code.names | strings) & set(registry))
        if not keys:
            code.refuse(f"reads the global {name!r}, whose contents may change")
        for key in keys:
            entry = dict.__getitem__(registry, key)
            code.pins.append(Pin(registry, key, entry))
            if not _is_entry(entry):
                code.refuse(f"reads {name}[{key!r}], whose contents may change")
            for value in entry if isinstance(entry, tuple) else (entry,):
                if isinstance(value, type) and issubclass(value, torch.nn.Module):
                    code.include(read(value))
                elif isinstance(value, types.FunctionType):
                    code.include(read_function(value))
    code.registries = []
    return code


def _is_entry(entry):
    """Tell whether an entry is constant, or a class of modules, as in ACT2FN."""
    if isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], dict):
        return isinstance(entry[0], type)
    if isinstance(entry, type):
        return issubclass(entry, torch.nn.Module) or not values.is_model_class(entry)
    return values.is_constant(entry) and not isinstance(entry, types.ModuleType)


def read_globals(function, called):
    """Return the `Code` of the globals `called`, and why no copy may call others."""
    code, namespace = Code(pins=function_pins(function)), function.__globals__
    code.pins += [Pin(namespace, name, namespace[name]) for name in called if name in function.__code__.co_names]
    for instruction in instructions_of(function.__code__):
        is_call = instruction.opname == "LOAD_GLOBAL" and "NULL" in instruction.argrepr
        if instruction.opcode in dis.hasname and instruction.argval in called and not is_call:
            code.refuse(f"does more with {instruction.argval} than call it")
    return code


def attributes_in(*packages):
    """Return (what is loaded before, attribute) of the code in imported packages or modules."""
    modules = [module for name, module in sys.modules.items() if name.startswith(packages)]
    members = [member for module in modules for member in vars(module).values()]
    members += [member for cls in members if isinstance(cls, type) for member in vars(cls).values()]
    functions = [inspect.unwrap(getattr(member, "__func__", member)) for member in members if callable(member)]
    codes = [f.__code__ for f in functions if isinstance(f, types.FunctionType) and f.__module__.startswith(packages)]
    listed = (itertools.pairwise(instructions_of(part)) for code in codes for part in all_code(code))
    return {
        (before.argval, then.argval)
        for before, then in itertools.chain.from_iterable(listed)
        if then.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(before.argval, (str, type(None)))
    }


def _read_functions(code, cls=None, methods=()):
    seen_names, seen_methods = {(cls, name) for name in methods}, set()
    while code.waiting:
        function = code.waiting.pop()
        if function in code.functions:
            continue
        code.functions.append(function)
        _read_function(function, code)
        owners = () if cls is None else cls.__mro__ if "super" in code.names else (cls,)
        for owner, name in itertools.product(owners, sorted(code.names | {*methods})):
            if name in MODULE_ATTRIBUTES and name not in methods and _is_inherited(owner, name):
                continue
            if (owner, name) not in seen_names and (owner is cls or name in vars(owner)):
                seen_names.add((owner, name))
                _read_class_attribute(owner, name, code)
        for name in sorted(code.attributes - seen_methods):
            seen_methods.add(name)
            value = vars(torch.Tensor).get(name)  # `pins` notices new names, which hide methods in C++
            if isinstance(value, types.FunctionType):
                if not values.is_known(value):
                    code.refuse(f"calls torch.Tensor.{name}, which a program replaced")
                code.pins.append(Pin(torch.Tensor, name, value))
                code.waiting += _functions_to_read(value)
    for function in code.functions:  # also by another name, such as a parameter
        for name in vars(function).keys() & code.attributes:
            code.refuse(f"reads the attribute {name!r} of the function {function.__name__}")
    if "device" in code.attributes and code.tells_devices and not code.without_autocast:
        code.refuse("reads the type of a device")
    attributes_read.update(code.attributes)
    for name, *attributes in code.chains if cls else ():
        if attributes and isinstance(inspect.getattr_static(cls, name, None), (types.FunctionType, staticmethod)):
            code.refuse(f"reads an attribute of its method {name}")


def _is_inherited(cls, name):
    return inspect.getattr_static(cls, name, values.MISSING) is inspect.getattr_static(torch.nn.Module, name)


def _read_class_attribute(cls, name, code):
    """Pin an attribute of the class, and read the functions that it holds."""
    value = inspect.getattr_static(cls, name, values.MISSING)
    if value is values.MISSING:
        return
    if type(value) is staticmethod:
        value = value.__func__
    if type(value) is property:
        if not isinstance(value.fget, types.FunctionType):
            code.refuse(f"reads the property {name!r}, which is no function of Python")
        code.waiting += [f for f in (value.fget,) if f is not None and not values.is_known(f)]
    elif isinstance(value, functools.cached_property):
        code.refuse(f"writes its attribute {name!r}")
    elif not values.is_constant(value) or isinstance(value, (type, types.ModuleType, *values.DESCRIPTORS)):
        code.refuse(f"reads the class attribute {name!r}, whose contents may change")
    _read_held(value, name, code)
    code.pins.append(Pin(cls, name, value))


def _functions_to_read(function):
    """Return a function of the model's code, which decorators of torch may enclose."""
    while isinstance(function, types.FunctionType) and values.is_known(function) and not _sets_state(function):
        function = getattr(function, "__wrapped__", None)
    return [function] if isinstance(function, types.FunctionType) else []


def _sets_state(function):
    return function.__globals__.get("__name__") in CONTEXTS and hasattr(function, "__wrapped__")


def _read_held(value, name, code):
    """Read the functions in an attribute or a default argument."""
    if isinstance(value, (tuple, frozenset)):
        for item in value:
            _read_held(item, name, code)
    elif isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        _read_value(value, name, code)


def _read_function(function, code):
    if _sets_state(function):
        code.refuse("sets a state of torch by a decorator")
    code.pins += function_pins(function)
    defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
    if not values.is_constant(defaults):
        code.refuse(f"has a default argument in {function.__name__}() whose contents may change")
    _read_held(defaults, f"a default of {function.__name__}()", code)
    first = function.__code__.co_varnames[:1] if function.__code__.co_argcount else ()
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    scope = _Scope(first, cells, function.__globals__)
    for instructions in all_code(function.__code__):
        _read_lookups(instructions, scope, code)
        _read_instructions(instructions, scope, code)


def function_pins(function):
    """Return pins of the code and defaults, which a program may replace in place."""
    pins = [Pin(function, "__code__", function.__code__)]
    pins += [Pin(function, "__defaults__", function.__defaults__)] if function.__defaults__ else []
    by_name = function.__kwdefaults__ or {}
    pins += [Pin(function, "__kwdefaults__", by_name)] if by_name else []
    return pins + [Pin(by_name, *item) for item in by_name.items()]


def all_code(code):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from all_code(constant)


@functools.lru_cache(4096)
def instructions_of(code):
    """Return the instructions that `dis` shows, those that Python 3.13 joins apart again."""
    listed = []
    for instruction in dis.get_instructions(code):
        joined = re.findall("LOAD_FAST|STORE_FAST", instruction.opname)
        if len(joined) == 2:
            pairs = zip(joined, instruction.argval)
            listed += [instruction._replace(opname=opname, argval=argval) for opname, argval in pairs]
        elif instruction.opname not in SKIPPED:
            listed.append(instruction)
    return tuple(listed)


class _Scope(NamedTuple):
    """Names that a function's code may load: its first argument, cells of enclosing functions, globals."""

    first: tuple
    cells: dict
    namespace: dict


def _read_constants(instructions, listed, code):
    # names in tuples are those of `case` clauses
    strings = itertools.chain(instructions.co_consts, *(c for c in instructions.co_consts if isinstance(c, tuple)))
    code.names.update(c for c in strings if isinstance(c, str) and c.isidentifier())
    code.constants.update(c for c in instructions.co_consts if type(c) in (int, float))
    code.constants.update(i.argval for i in listed if i.opname == "LOAD_SMALL_INT")  # of Python 3.14


def _read_instructions(instructions, scope, code):
    kind, chain, holds_a_device = None, [], False
    listed = (*instructions_of(instructions), None)
    _read_constants(instructions, listed[:-1], code)
    for place, (instruction, before, after) in enumerate(zip(listed, (None, *listed), (*listed[1:], None))):
        name = instruction and instruction.opname
        if name in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM") or name and name.startswith("LOAD_SUPER_"):
            attribute = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
            code.attributes.add(attribute)
            code.names.add(attribute)
            if attribute in CHANGES_CONTAINER or attribute in REGISTERS:
                code.refuse(f"calls {attribute}()")
            if attribute in READS_UNSEEN:
                code.refuse(f"reads {attribute}")
            code.refuse_state(attribute)
            holds_a_device |= attribute == "device"
            is_called = name == "LOAD_METHOD" or "NULL" in instruction.argrepr  # x.type(dtype)
            code.tells_devices |= attribute in ("type", "index") and not is_called
            code.loose.update(() if kind else [attribute])
            chain.append(attribute)
            continue
        if kind == "self":
            code.chains.update([tuple(chain)] if chain else ())
            code.compared.update([tuple(chain)] if name in ("COMPARE_OP", "CONTAINS_OP") else ())
        elif kind:
            _read_chain(kind, chain, scope, _takes_an_entry(listed[place:]), code)
        kind, chain = None, []
        if name is None:
            break
        if holds_a_device and name in COMPARING:
            code.refuse("reads the type of a device")
        holds_a_device &= not name.startswith(("STORE", "POP"))  # until the end of the statement
        argument = instruction.argval
        if name in ("LOAD_GLOBAL", "LOAD_NAME"):
            kind, chain = "global", [argument]
        elif name in ("LOAD_DEREF", "LOAD_CLASSDEREF") and argument in scope.cells:
            kind, chain = "cell", [argument]
        elif name.startswith(("LOAD_FAST", "LOAD_DEREF")) and argument in scope.first:
            kind = "self"
            if after.opname.startswith(("FORMAT", "CONVERT")) or before and before.argval == "str":
                code.refuse("writes its module as text")
        elif name == "BINARY_OP":
            code.attributes.update([BY_OPERATOR[instruction.argrepr]] if instruction.argrepr in BY_OPERATOR else ())
            code.writes_in_place |= instruction.argrepr.endswith("=")
        elif name == "IS_OP" and before.opname != "LOAD_CONST":
            code.refuse("compares objects by identity")  # also such that a program exchanges later
        elif name in STORES:
            code.refuse(f"writes the {STORES[name]} {argument!r}")
        elif name in ("STORE_DEREF", "DELETE_DEREF") and argument in scope.cells:
            code.refuse(f"writes the variable {argument!r} of an enclosing function")
        elif name in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
            code.refuse("writes to an entry of a tensor or container")
        elif name == "PUSH_EXC_INFO" and after.opname != "WITH_EXCEPT_START":
            code.refuse("catches exceptions")  # which rows of another size may raise
        elif name.startswith("LOAD_FAST") and argument == "torch":
            kind, chain = "import", [argument]
        elif name == "IMPORT_NAME" and (argument, after.argval) != ("torch", "torch"):
            code.refuse(f"imports {argument}")


def _takes_an_entry(instructions):
    """Tell whether code reads one entry of the object that it just loaded."""
    operation = next(i for i in (*instructions, None) if i is None or not i.opname.startswith("LOAD"))
    return operation is not None and (operation.opname, operation.argrepr) in (
        *(("BINARY_SUBSCR", text) for text in ("", None)), ("BINARY_OP", "[]"),
    )  # fmt: skip


def _read_lookups(instructions, scope, code):
    """Note names that getattr and hasattr look up; refuse those that code computes."""
    listed = instructions_of(instructions)
    for place, instruction in enumerate(listed):
        named, attributes = [], ()
        if instruction.opname == "LOAD_GLOBAL" and instruction.argval in ("isinstance", "issubclass"):
            named = itertools.takewhile(lambda i: i.opname not in ("PRECALL", "CALL"), listed[place + 1 :])
        elif instruction.opname == "MATCH_CLASS":  # after the class, such as torch.nn.Linear, and names of attributes
            named = listed[max(place - 4, 0) : place]
            attributes = listed[place - 1].argval
        classes = list(_classes_named(named, scope))
        if any(map(_tells_modules_apart, classes)):
            code.refuse("tells classes of modules apart")
        if attributes and any(isinstance(cls, type) and issubclass(cls, torch.Tensor) for cls in classes):
            code.refuse(f"looks up {attributes[0]!r} of a tensor by name")
        if instruction.opname != "LOAD_GLOBAL" or instruction.argval not in ("getattr", "hasattr"):
            continue
        holder, *after = listed[place + 1 :]
        fields = [i.argval for i in itertools.takewhile(lambda i: i.opname == "LOAD_ATTR", after)]
        arguments = list(itertools.takewhile(lambda i: i.opname not in ("PRECALL", "CALL"), after[len(fields) :]))
        if not arguments:  # a call gives the object
            code.refuse("computes the object whose attribute it looks up")
            continue
        name, *default = arguments
        is_constant_name = name.opname == "LOAD_CONST" and isinstance(name.argval, str)
        loads = all(i.opname.startswith("LOAD") for i in default)
        if not is_constant_name or not loads or any(i.opname != "LOAD_ATTR" for i in default[1:]):
            code.refuse("computes the name of an attribute")
        elif holder.argval in scope.first:
            code.looked_up.add((*fields, name.argval))
        elif not (holder.opname == "LOAD_GLOBAL" and values.is_known_module(scope.namespace.get(holder.argval))):
            code.refuse(f"looks up {name.argval!r} of {holder.argval} by name")


def _classes_named(listed, scope):
    """Yield the values of global names and cells, with their attributes."""
    value = values.MISSING
    for instruction in listed:
        if instruction.opname == "LOAD_ATTR" and value is not values.MISSING:
            value = getattr(value, instruction.argval, values.MISSING)
            continue
        yield value
        name, value = instruction.argval, values.MISSING
        if instruction.opname == "LOAD_GLOBAL":
            value = scope.namespace.get(name, values.MISSING)
        elif instruction.opname == "LOAD_DEREF" and name in scope.cells:
            value = values.content(scope.cells[name])
    yield value


def _tells_modules_apart(cls):
    members = cls if isinstance(cls, tuple) else (cls,)
    return any(isinstance(c, type) and issubclass(c, torch.nn.Module) and c is not torch.nn.Module for c in members)


def _read_chain(kind, chain, scope, takes_an_entry, code):
    """Pin the value of a global name or a cell, and of its attributes."""
    name, *attributes = chain
    namespace = sys.modules if kind == "import" else scope.namespace
    if kind == "cell":
        value = values.content(scope.cells[name])
        pin = Pin(scope.cells[name], "cell_contents", value)
    elif name in namespace:
        value = namespace[name]
        pin = Pin(namespace, name, value)
    elif hasattr(builtins, name):
        if name in UNREADABLE:
            code.refuse(f"calls {name}()")
        code.names.update({"super"} & {name})
        code.tells_devices |= name == "str"
        value = getattr(builtins, name)
        if not values.is_known(value):
            code.refuse(f"calls {name}, which a program gave to Python's builtins")
        code.pins += [Pin(namespace, name, values.MISSING), Pin(vars(builtins), name, value)]
        return
    else:
        code.pins.append(Pin(namespace, name, values.MISSING))
        return
    code.pins.append(pin)
    if isinstance(value, dict) and (attributes or not takes_an_entry):
        code.refuse(f"reads the global {name!r}, whose contents may change")
    if isinstance(value, logging.Logger) and attributes:
        code.refuse(f"calls {name}.{attributes[0]}()")
    for attribute in attributes:
        is_known_function = isinstance(value, types.FunctionType) and values.is_known(value)
        if not isinstance(value, (types.ModuleType, type)) and not is_known_function:
            if pin not in code.pins:
                code.pins.append(pin)
            break
        if attribute in ("__class__", "__name__", "__module__", "__qualname__"):
            return
        owner, value = value, getattr(value, attribute, values.MISSING)
        value = LINEAR if values.is_zero3_linear(value) else value
        is_torchs = values.is_known(owner) if isinstance(owner, type) else values.is_known_module(owner)
        if is_torchs and isinstance(value, types.FunctionType) and not values.is_known(value):
            # an op's reference may call it, too, so that a probe agrees
            code.refuse(f"calls {owner.__name__}.{attribute}, which a program replaced")
        if value is values.MISSING or isinstance(value, types.MethodType) and not values.is_known(value.__func__):
            break
        pin = Pin(owner, attribute, value)
        if isinstance(value, (types.ModuleType, type)) and not is_torchs:
            code.pins.append(pin)
    else:
        is_dtype = isinstance(pin.value, torch.dtype) and pin.owner is torch
        if attributes and not is_dtype and not isinstance(pin.value, (types.ModuleType, types.MethodType)):
            code.pins.append(pin)
    _read_value(value, name, code)


def _read_value(value, name, code):
    """Read the functions of a global value, and refuse what the code does not show."""
    if isinstance(value, (types.MethodType, types.BuiltinFunctionType)) and isinstance(value.__self__, type):
        cls, function = value.__self__, getattr(value, "__func__", value)
        if not values.is_known(cls) or not values.is_known(function):  # a known one may call others of its class
            code.refuse(f"calls the class method {cls.__name__}.{function.__name__}")
    elif isinstance(value, types.MethodType):
        code.refuse(f"calls {name}, a method of an object whose contents may change")
    value = value.__func__ if isinstance(value, types.MethodType) else value
    known_name = getattr(value, "__name__", None)
    code.refuse_state(known_name, values.is_known(value))
    if known_name in FACTORIES and values.package(value) == "torch":
        code.pins.append(Pin(DEFAULTS, "dtype", DEFAULTS.dtype))
    if known_name in HIDDEN and values.is_known(value) and not isinstance(value, types.FunctionType):
        code.refuse(f"calls {known_name} by another name")
    if values.is_bound(value):
        code.refuse(f"calls {name}, a method of an object whose contents may change")
    if isinstance(value, types.FunctionType):
        _read_called(value, name, code)
    elif isinstance(value, types.ModuleType):
        code.refuse(f"gives the module {name!r} another name")
    elif value is values.MISSING:
        pass
    elif isinstance(value, OPERATION_TYPES) and not str(value).startswith("aten."):
        code.refuse(f"calls the operation {value}, which torch does not define")
    elif isinstance(value, type):
        code.sets_autocast |= issubclass(value, torch.autocast)
        if issubclass(value, torch.autograd.Function) and not values.is_known(value):
            code.refuse(f"calls the autograd function {value.__name__}")
        elif not (values.is_known(value) or value is nullcontext or name == "__class__"):  # a cell for super()
            code.refuse(f"uses the class {value.__name__}, whose attributes may change")
        elif issubclass(value, torch.nn.Module) and value is not torch.nn.Module and name != "__class__":
            code.include(read(value))
    elif isinstance(value, (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)):
        if not values.is_known(value):
            code.refuse(f"calls {values.package(value)}.{value.__name__}")
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        code.registries.append((name, value))
    elif not values.is_constant(value) and not isinstance(value, (logging.Logger, *OPERATION_TYPES)):
        code.refuse(f"reads the global {name!r}, whose contents may change")
    else:
        _read_held(value, name, code)


def _read_called(function, name, code):
    """Read a function behind a global name; pin that of torch or Python."""
    if values.is_known_library(function) and function.__closure__:
        code.refuse(f"calls {name}, which {function.__globals__['__name__']} made")
    if values.is_known(function):
        code.pins += function_pins(function)
        called = ((n, vars(torch).get(n)) for n in function.__code__.co_names)  # F.layer_norm calls torch.layer_norm
        code.pins += [Pin(torch, n, value) for n, value in called if isinstance(value, types.BuiltinFunctionType)]
        code.waiting += _functions_to_read(function)
    elif values.package(function) in sys.stdlib_module_names:
        code.refuse(f"calls {function.__module__}.{function.__qualname__}")
    else:
        code.waiting.append(function)
