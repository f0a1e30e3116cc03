"""Check at each call of a patched module that it is still what was matched.

A program may replace what a module's code reads: its class's forward, a function of torch or of the model's file, an
attribute. It may also enter a mode that sees every operation. `guard` compares all of that by identity, and the
module's own forward runs if anything differs. The comparison is one generated function: each call of a
module waits for it, 1.3 us of an MLP and 0.5 us of a norm (two shared CPU cores).
"""

import collections
import enum
import functools
import hashlib
import itertools
import numbers
import sys
import types
import warnings
from typing import NamedTuple

import torch

from liger_hw import _torch
from liger_hw.patching import reading
from liger_hw.patching.hooks import is_intercepted, original_class
from liger_hw.patching.reading import Pin
from liger_hw.patching.values import (
    ENUM_ATTRIBUTES,
    KNOWN_PACKAGES,
    MISSING,
    computes,
    is_bound,
    is_known,
    is_zero3_linear,
    may_compute,
    package,
    replaced_function,
)
from liger_hw.patching.witnesses import cover

INSTANCE_ATTRIBUTES = frozenset(vars(torch.nn.Module()))  # training, hooks, parameters, children
COMPARABLE = (
    numbers.Number, str, bytes, type(None), type, enum.Enum, torch.dtype, torch.device, torch.Size, types.FunctionType,
    types.BuiltinFunctionType,
)  # fmt: skip
SHOWN_WHOLE = slice, torch.layout, torch.memory_format, types.UnionType, types.GenericAlias  # by `repr`
CODE_FIELDS = (  # without the place in the file
    "co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_posonlyargcount",
    "co_kwonlyargcount", "co_flags", "co_exceptiontable",
)  # fmt: skip
FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType)
CONTAINERS = (list, dict, set, collections.deque)
ENUM_BOOKKEEPING = ENUM_ATTRIBUTES - {"_value_"}
OBJECT_SIZES = {type("Empty", (), {}).__basicsize__, types.SimpleNamespace.__basicsize__}
DEEPEST = 8  # of nested containers, beyond which a value cannot be compared
KEEP_VALUES = (  # modules whose hooks for saved tensors return what they got
    "liger_hw", "torch.autograd.graph", "torch.distributed.tensor.parallel.input_reshard",
    "torch.utils.checkpoint", "torchtune.training._activation_offloading", "trl.models.activation_offloading",
    "verl.utils.activation_offload",
)  # fmt: skip
HOOKS_MAY_ROUND = (
    "patched modules run their own code within these hooks for saved tensors, which may round values: if both "
    "functions return what autograd saved, set pack.keeps_values = unpack.keeps_values = True"
)
# that of linear layers, which replacements compute themselves, is nn.Module's, which torch.fx replaces while it traces
COMMON = tuple(
    Pin(torch.nn.Linear, name, getattr(torch.nn.Linear, name)) for name in ("__call__", "_call_impl", "__getattr__")
)


def replaced_linear_code():
    """Return the name of a replaced function of torch's linear layers, or None."""
    code = reading.read(torch.nn.Linear)
    return "forward" if code.reason else replaced_function([*code.pins, *COMMON])


class Incomparable(Exception):
    """Report a value whose later changes could not be noticed."""


def fact(value, within=()):
    """Return what tells a value from others, hashable.

    That is a plain value itself, and the contents of an object or a container.

    Raises:
        Incomparable: it is or contains a tensor, a module, an object with hidden contents or with code of its own, or
            is nested too deeply.
    """
    if is_zero(value):
        return str(value), value
    if is_plain(value):  # a match is pickled with its facts, and types of functions cannot be
        return None if isinstance(value, FUNCTION_TYPES) else type(value), value
    if any(value is outer for outer in within):
        return type(value)
    within = *within, value
    if isinstance(value, functools.partial):
        held = value.func, value.args, value.keywords
    elif may_compute(value):
        raise Incomparable
    elif isinstance(value, enum.Enum):
        held = tuple(item for item in vars(value).items() if item[0] not in ENUM_BOOKKEEPING)
    elif isinstance(value, (dict, list, tuple, set, frozenset)):
        items = value.items() if isinstance(value, dict) else value
        held = *items, *getattr(value, "__dict__", {}).items(), *_class_attributes(type(value))
    elif (
        isinstance(value, (torch.Tensor, torch.nn.Module, types.ModuleType))
        or callable(value)
        or not _is_all_in_vars(value)
    ):
        raise Incomparable
    else:
        held = *vars(value).items(), *_class_attributes(type(value))
    if len(within) > DEEPEST:
        raise Incomparable
    return type(value), tuple(fact(item, within) for item in held)


def _class_attributes(cls):
    """Yield (name, value) of what a program's class holds for its instances."""
    for base in cls.__mro__:
        if not is_known(base) and base.__module__.partition(".")[0] not in sys.stdlib_module_names:
            yield from (
                item
                for item in vars(base).items()
                if not (item[0].startswith("__") or hasattr(type(item[1]), "__get__"))
            )


def is_zero(value):
    """Tell whether a value is 0.0 or -0.0, which are equal."""
    return isinstance(value, float) and value == 0


def is_plain(value):
    """Tell whether a value cannot change as long as it is the same object."""
    if isinstance(value, type):
        return is_known(value) and not issubclass(value, torch.nn.Module)
    if isinstance(value, enum.Enum):  # a program may write to a member's attributes
        return False
    return isinstance(value, COMPARABLE) and not is_bound(value) and not may_compute(value)


def _is_all_in_vars(value):
    """Return whether an object holds nothing outside its `__dict__`, as in slots or in C.

    Attributes are not read by name: a configuration with layers of different widths refuses that.
    """
    fits = hasattr(value, "__dict__") and type(value).__basicsize__ in OBJECT_SIZES
    return fits and not any(vars(cls).get("__slots__") for cls in type(value).__mro__)


class AttributePin(NamedTuple):
    """A value that code reads from a module's attributes.

    Attributes:
        children: names of the children on the way to the module that has the attribute.
        fields: the attribute, and attributes of its value.
        value: a plain value; else the `fact` of it.
        is_plain: which of both; None: `value` tells whether the module has such an attribute.
    """

    children: tuple
    fields: tuple
    value: object
    is_plain: bool | None


def attribute_pins(module, code, exempt=(), children=()):
    """Return the `AttributePin`s of a module's attributes that `code` reads.

    Args:
        module: the module, or a child of it.
        code: the `Code` of its methods, or of its parent's too.
        exempt: names of attributes that the replacement reads at each call.
        children: the way to this child.

    Raises:
        Incomparable: an attribute's later changes could not be noticed; with the reason.
    """
    pins = []
    if buffer := next((name for name in module._buffers if name in code.names), None):
        raise Incomparable(f"reads the buffer {buffer}")
    for name, value in vars(module).items():
        if name in exempt or not reads(code.names, name):
            continue
        changes = any(hasattr(value, method) for method in code.loose & {"add", "sort"})
        if isinstance(value, CONTAINERS) and (code.writes_in_place or changes):
            raise Incomparable(f"may write to {name}")
        paths = [chain for chain in code.chains if chain[0] == name]
        if paths and not is_plain(value) and (name in code.loose or (name,) in code.looked_up):
            paths += [(name, other) for other in sorted(code.loose) if hasattr(value, other)]
        if is_plain(value) and not isinstance(value, (*FUNCTION_TYPES, enum.Enum)) or not paths:
            paths = [(name,)]
        pins += [_attribute_pin(module, path, children) for path in paths]
    for table in ("_parameters", "_modules"):  # None, in whose place a program may set a bias or a dropout later
        absent = [name for name, value in getattr(module, table).items() if value is None and name in code.names]
        pins += [AttributePin(children, (table, f"get({n!r})"), None, True) for n in absent if n not in exempt]
    for function in (function for pin in pins for function in functions_in(pin.value)):
        if getattr(function, "__dict__", {}).keys() & code.attributes:
            raise Incomparable(f"reads an attribute of the function {function.__name__}")
    for head, *rest in code.chains:
        if rest and head in module._modules and not _reads_a_tensor(module._modules[head], rest):
            raise Incomparable(f"reads {'.'.join((head, *rest))}")
        if rest == ["bias"] and head in module._modules:  # a program may set it to None later
            pins.append(AttributePin((*children, head), ("_parameters", "get('bias')", "ndim"), 1, True))
    for name, child in module._modules.items():
        if child is not None and not children and (read := _reads_of(child, code)):
            raise Incomparable(f"reads {read} of {name}")
    if compared := next((name for name in module._modules if (name,) in code.compared), None):
        raise Incomparable(f"compares {compared} with another object")
    for *path, name in code.looked_up:
        if path and path[0] not in vars(module):
            raise Incomparable(f"looks up {name!r} of {'.'.join(path)} by name")
        if not path and name not in vars(module):
            pins.append(AttributePin(children, (name,), hasattr(module, name), None))
    return tuple(dict.fromkeys(pins))


def _reads_of(child, code):
    """Return an attribute of a child that code may read under another name, or None."""
    classes = [vars(cls) for cls in type(child).__mro__ if cls not in torch.nn.Module.__mro__]
    members = {*vars(child), *(child._parameters.keys() - {"weight"}), *child._modules}
    members.update(name for names in classes for name in names)
    common = {*INSTANCE_ATTRIBUTES, *dir(torch.nn.Module)} - {"training"}
    return min((code.loose & members) - common, default=None)


def _reads_a_tensor(child, names):
    """Tell whether a child's attributes lead to a parameter or to torch's facts about it."""
    parameter = child._parameters.get(names[0])
    return parameter is not None and all(hasattr(torch.Tensor, name) for name in names[1:])


def functions_in(value):
    """Yield the functions in a pinned value or a `fact`."""
    if isinstance(value, FUNCTION_TYPES):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from functions_in(item)


def reads(names, attribute):
    """Tell whether code with these names may read an attribute, unless every module has it."""
    return attribute in names and attribute not in INSTANCE_ATTRIBUTES


def _attribute_pin(module, path, children):
    value, fields = vars(module)[path[0]], path[:1]
    for name in path[1:]:
        if isinstance(value, COMPARABLE) and not isinstance(value, (*FUNCTION_TYPES, type, enum.Enum)):
            break
        if isinstance(value, CONTAINERS) and name not in reading.PURE or computes(value, name):
            raise Incomparable(f"reads {'.'.join((*children, *fields, name))}, which other code computes")
        further = getattr(value, name, MISSING)
        if further is MISSING or callable(further) and not isinstance(further, COMPARABLE):
            break
        value, fields = further, (*fields, name)
    shown = ".".join((*children, *fields))
    if is_plain(value):
        return AttributePin(children, fields, value, True)
    if isinstance(value, torch.Tensor):
        raise Incomparable(f"reads {shown}, a tensor that is no parameter")
    try:
        pin = AttributePin(children, fields, fact(value), False)
        hash(pin)
    except (Incomparable, TypeError, RecursionError):
        raise Incomparable(f"reads {shown}, whose contents may change") from None
    return pin


class Members:
    """Names in classes, of which a program may add one that hides what code reads.

    Such are a method of torch.Tensor, a property or a child of a module's class, and `__getattr__`.

    Attributes:
        classes: [(the class's dictionary, the names known in it, the class whose names new ones may hide or None)].
        new: (dictionary, name, what it hides) of new names that code reads.
        count: how many names there were when none was new; else None, so that every call compares.
    """

    def __init__(self, classes):
        modules = dict.fromkeys(base for cls in classes for base in cls.__mro__ if base is not object)
        self.classes = [*TENSORS, *((vars(cls), frozenset(vars(cls)), None) for cls in modules)]
        self.new, self.state = [], None
        self.count = sum(len(known) for _, known, _ in self.classes) + len(KERNELS_AT_IMPORT)
        self.patched = [{}, None]  # the dictionary of the patched class, the class

    def watch(self, cls):
        """Notice names that a program adds to the patched class, as by `type(module).limit = 7`."""
        self.patched[:] = vars(cls), cls
        self.classes.append((vars(cls), frozenset(vars(cls)), None))
        self.count += len(vars(cls))

    def are_unchanged(self):
        """Tell whether no new name hides another.

        A program may put back what it replaced, as DeepSpeed does with `__new__` once it has built a model in shards.
        """
        if any(map(_changes_operations, _torch.program_kernels - KERNELS_AT_IMPORT)):
            return False
        added = [
            [*itertools.islice(reversed(members), max(0, len(members) - len(known)))]
            for members, known, _ in self.classes
        ]
        state = added, len(_torch.program_kernels), len(reading.attributes_read)
        if state == self.state and self._are_put_back():
            return True
        self.new = [
            (members, name, getattr(base, name, None))
            for members, known, base in self.classes
            for name in members.keys() - known - LEFT_BY_LIBRARIES
            if (hasattr(base, name) and name.startswith("__") if base else name in HIDES_ALL)
            or name in reading.attributes_read
            and (base is None or hasattr(base, name))
        ]
        # other names may take the place of these, whose number stays
        is_known = not self.new and {name for names in added for name in names} <= LEFT_BY_LIBRARIES
        count = sum(len(members) for members, _, _ in self.classes) + len(_torch.program_kernels)
        self.state, self.count = state, count if is_known else None
        return self._are_put_back()

    def _are_put_back(self):
        return all(hidden is not None and members.get(name) is hidden for members, name, hidden in self.new)


TENSORS = [
    (vars(cls), frozenset(vars(cls)), base)
    for cls, base in ((torch.Tensor, _torch.TensorBase), (torch.nn.Parameter, torch.Tensor))
]
KERNELS_AT_IMPORT = frozenset(_torch.program_kernels)
HIDES_ALL = {"__getattr__", "__getattribute__"}
# in classes, by copies and torch.compile, of torch 2.15 by the last name
LEFT_BY_LIBRARIES = {"__slotnames__", "___needs_generation_tag_patch", "___has_generation_tag_patch"}


@_torch.constant_result
def hides_nothing(cls, patched):
    """Tell whether a program's subclass of a patched class hides no name that code reads."""
    bases = itertools.takewhile(lambda base: base is not patched, cls.__mro__)
    names = (reading.attributes_read | HIDES_ALL) - {"__module__", "__doc__"}  # which each class has
    members = ((name, vars(base)[name]) for base in bases if not is_known(base) for name in names & vars(base).keys())
    return all(value is getattr(patched, name, MISSING) for name, value in members)


def _changes_operations(kernel):
    """Tell whether a kernel that Python registered, such as "aten/silu/CPU", may change what code computes.

    torch registers some itself: for vmap at its first call, and for attention when a program chooses another one.
    """
    namespace, operation, key = kernel.split("/")
    return namespace == "aten" and "attention" not in operation and not key.startswith(("Meta", "FuncTorch"))


def only_harmless_modes():
    """Tell whether every active mode is torch's or this package's, which change no operation.

    Within `allow_mutation_on_saved_tensors` torch copies what an operation writes to, which fails for absent arguments.
    """
    return not _torch.saved_tensors_may_change() and all(
        type(mode).__module__.partition(".")[0] in KNOWN_PACKAGES
        for mode in (*_torch.active_dispatch_modes(), *_torch.active_function_modes())
    )


def hooks_keep_values():
    """Tell whether the hooks for saved tensors, if any, return the values that autograd saved.

    Those of a program may round them, and a replacement does not save what the module's own code saves.
    """
    hooks = _torch.saved_tensors_hooks() or ()
    if all(getattr(hook, "keeps_values", False) or _is_written_in(KEEP_VALUES, hook) for hook in hooks):
        return True
    warnings.warn(HOOKS_MAY_ROUND, stacklevel=1)  # one place, so that Python shows it once
    return False


def _is_written_in(modules, function):
    """Tell whether code of one of `modules`, or of their parts, defines the function."""
    while hasattr(function, "__wrapped__") and package(function) in KNOWN_PACKAGES:  # torch's decorator for Dynamo
        function = function.__wrapped__
    code = getattr(function, "__func__", function)  # functools.wraps copies `__module__` to other functions
    name = getattr(code, "__globals__", {}).get("__name__", "")
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def guard(pins, attributes, shadowed, bypassed, classes=(), inputs=()):
    """Return a function of a module that tells whether it is still what was matched.

    Args:
        pins: `Pin`s.
        attributes: `AttributePin`s.
        shadowed: child, or None for the module itself -> names that its class defines and its code reads: an attribute
            of the instance would hide them.
        bypassed: (child, its class) pairs: the replacement skips these children, unless something watches them.
        classes: the module's class, whose new names may hide others.
        inputs: names of the inputs that the replacement of a forward takes. With them the function takes the arguments
            and keyword arguments of a call too, and tells whether they are these inputs, the first of them covered.
    """
    # a parametrization may change its state at each read of a parameter, and a replacement may read it twice
    conditions = ["code_unchanged()", "'parametrizations' not in module._modules"]
    conditions.append("(type(module) is patched[1] or hides_nothing(type(module), patched[1]))")
    names = {name for name, _ in bypassed} | {pin.fields[0] for pin in attributes if not pin.children}
    bases = [base for cls in classes for base in cls.__mro__ if not is_known(base)]
    code_unchanged = code_guard(pins, (*classes, *(cls for _, cls in bypassed)), names, bases)
    members = code_unchanged.members
    values = {"code_unchanged": code_unchanged, "members": members, "patched": members.patched, "fact": fact}
    values |= {"hides_nothing": hides_nothing, "is_intercepted": is_intercepted, "original_class": original_class}
    for index, (child, cls) in enumerate(bypassed):
        values[f"c{index}"], current = cls, f"module._modules[{child!r}]"
        conditions.append(f"(type({current}) is c{index} or original_class({current}) is c{index})")
        conditions.append(f"not is_intercepted({current})")
    for index, pin in enumerate(attributes):
        holder = "".join(f"._modules[{child!r}]" for child in pin.children)
        current = f"module{holder}.__dict__[{pin.fields[0]!r}]" + "".join(f".{name}" for name in pin.fields[1:])
        values[f"v{index}"], values[f"t{index}"] = pin.value, type(pin.value)
        if pin.is_plain is None:
            same = f"hasattr(module{holder}, {pin.fields[0]!r}) is v{index}"
        elif pin.is_plain:
            equal = f"str({current}) == {str(pin.value)!r}" if is_zero(pin.value) else f"{current} == v{index}"
            same = f"({current} is v{index} or type({current}) is t{index} and {equal})"
        elif pin.value[0] is functools.partial:  # in expressions that torch.compile can trace
            values[f"v{index}"], values[f"t{index}"] = _partial(pin.value), functools.partial
            same = f"type({current}) is t{index} and {current}.func is v{index}.func"
            same += f" and {current}.args == v{index}.args and {current}.keywords == v{index}.keywords"
        else:
            same = f"fact({current}) == v{index}"
        conditions.append(same)
    hiding, reads = [], []
    for child, names in shadowed.items():
        holder = "module" if child is None else f"module._modules[{child!r}]"
        hiding += [f"{name!r} not in {holder}.__dict__" for name in sorted(names)]
        reads += [f"(getattr({holder}, {name!r}), True)[1]" for name in sorted(names)]  # a child's name may be a number
    parameters, conditions = "module", [*conditions, *hiding]
    if inputs:
        values |= {"cover": cover, "by_name": {*inputs[1:]}}
        named = "(not kwargs or kwargs.keys() <= by_name)" if inputs[1:] else "not kwargs"
        parameters = "module, args, kwargs"
        conditions = [f"0 < len(args) <= {len(inputs)}", named, *conditions, "cover(args[0])"]
    unchanged = _generate(parameters, conditions, values)
    if reads:  # torch.compile guards what code reads, not names in the `__dict__` of a module
        _torch.traced_as(unchanged, _generate(parameters, [*conditions, *reads], values))
    return unchanged


def digest(pins):
    """Return a text that tells the code behind `Pin`s from other code, in any process."""
    return hashlib.sha256("\n".join(f"{pin.name} {_described(pin.value)}" for pin in pins).encode()).hexdigest()


def _described(value):
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_described_code(value.__code__)}"
    if isinstance(value, property):
        return f"property {_described(value.fget)}"
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, (tuple, frozenset)):
        texts = [_described(item) for item in value]
        return f"{type(value).__name__} {texts if isinstance(value, tuple) else sorted(texts)}"
    if isinstance(value, (*COMPARABLE, *SHOWN_WHOLE)) and not isinstance(value, (type, types.BuiltinFunctionType)):
        return repr(value)
    name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    return f"{type(value).__name__} {getattr(value, '__module__', '')} {name}"


def _described_code(code):
    constants = [_described_code(c) if isinstance(c, types.CodeType) else _described(c) for c in code.co_consts]
    return f"{[getattr(code, name) for name in CODE_FIELDS]} {constants}"


def _partial(partial_fact):
    """Return the partial function with this `fact`, whose parts are plain values."""
    _, ((_, function), (_, args), (_, keywords)) = partial_fact
    pairs = [tuple(value for _, value in pair) for _, pair in keywords]
    return functools.partial(function, *(value for _, value in args), **dict(pairs))


def code_guard(pins, classes=(), attributes=(), bases=()):
    """Return a function that compares `Pin`s and names in classes, and looks for modes.

    `bases`, the program's classes of a module, may get none of its `attributes` as a name, even for a deleted one.
    """
    # torch.jit.trace records the operations, which a kernel's launch hides
    conditions = ["not is_tracing()", "(not dispatch_modes() and not function_modes() or only_harmless_modes())"]
    conditions.append("(top_saved_tensors_hooks(True) is None or hooks_keep_values())")
    values = {"is_tracing": _torch.is_tracing, "hooks_keep_values": hooks_keep_values}
    values |= {"top_saved_tensors_hooks": _torch.top_saved_tensors_hooks}
    values |= {"dispatch_modes": _torch.dispatch_modes, "function_modes": _torch.function_modes}
    values |= {"only_harmless_modes": only_harmless_modes}
    owners, pinned = {}, []
    unique = {(id(pin.owner), pin.name): pin for pin in (*COMMON, *pins)}
    for index, pin in enumerate(unique.values()):
        owner = owners.setdefault(id(pin.owner), f"o{len(owners)}")
        values |= {owner: pin.owner, f"v{index}": pin.value}
        current = f"{owner}.{pin.name}"
        if pin.value is MISSING:
            pinned.append(f"{pin.name!r} not in {owner}")
            continue
        if isinstance(pin.owner, dict):  # a subclass, such as ACT2FN, may build a new value for each look-up
            current = f"{owner}[{pin.name!r}]" if type(pin.owner) is dict else f"entry({owner}, {pin.name!r})"
        same = f"{current} is v{index}"
        if pin.value is _torch.LINEAR:
            values["is_zero3_linear"] = is_zero3_linear
            same = f"({same} or is_zero3_linear({current}))"
        pinned.append(same)
    for index, base in enumerate(bases):
        values[f"b{index}"] = vars(base)
        conditions += [f"{name!r} not in b{index}" for name in sorted({*attributes} - vars(base).keys())]
    members = Members(classes)
    values |= {f"m{index}": names for index, (names, _, _) in enumerate(members.classes)}
    names = (*(f"m{i}" for i in range(len(members.classes))), "kernels", "patched[0]")
    count = " + ".join(f"len({name})" for name in names)
    values |= {"kernels": _torch.program_kernels, "patched": members.patched}
    conditions.append(f"({count} == members.count or members.are_unchanged())")
    values |= {"members": members, "entry": dict.__getitem__}
    return _torch.guarded_result(_generate("", [*conditions, *pinned], values), _generate("", pinned, values))


def _generate(parameters, conditions, values):
    source = f"def unchanged({parameters}):\n try:\n  return {' and '.join(conditions)}\n"
    source += " except (KeyError, AttributeError, Incomparable):\n  return False\n"
    namespace = {"Incomparable": Incomparable, **values}
    exec(source, namespace)  # noqa: S102
    namespace["unchanged"].members = values["members"]
    return namespace["unchanged"]
