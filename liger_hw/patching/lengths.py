"""Notice code that computes with its number of tokens or reads a tensor's state.

Under the mode `Lengths`, a tensor's sizes are numbers that notice their use. A number of tokens may
shape tensors. Other uses may change the result for another number.
"""

import inspect
import math

import torch

from liger_hw.patching import probing

TOLD = {  # what code may learn of a tensor beside results that are tensors
    "shape", "size", "numel", "nelement", "ndim", "dim", "ndimension", "dtype", "device", "is_floating_point",
    "is_complex", "element_size", "itemsize",
}  # fmt: skip
STATE = {  # may give a tensor, and tell of the program, or hide from autograd
    "requires_grad_", "grad", "_base", "retain_grad", "detach", "detach_", "data",
}  # fmt: skip
SHAPING = {  # functions that take sizes and positions
    "view", "reshape", "expand", "repeat", "unflatten", "split", "narrow", "broadcast_to", "zeros", "ones", "empty",
    "new_zeros", "new_ones", "new_empty", "__getitem__",
}  # fmt: skip


class _Length:
    """A number of tokens that tells `Lengths` when code reads its value.

    It is no int, because Python's own functions would take its value unseen.
    """

    def __init__(self, value, seen_by):
        self.value, self.seen_by = value, seen_by

    def __index__(self):
        self.seen_by.reads.add(_calling_place())
        return self.value

    @staticmethod
    def operator(name, verb):
        """Return the operator `name`, which refuses the number's use, or gives a further number."""

        def compute(self, *others):
            if verb:
                self.seen_by.refuse(f"{verb} the number of its tokens")
            result = getattr(self.value, name)(*map(_with_numbers, others))
            if result is NotImplemented and not verb:
                self.seen_by.refuse("computes with the number of its tokens")
            return _Length(result, self.seen_by) if type(result) is int and not verb else result

        return compute


class _Width(int):
    """A number of columns that tells `Lengths` when code compares it."""

    @classmethod
    def of(cls, value, seen_by):
        """Return a width of this value."""
        width = cls(value)
        width.seen_by = seen_by
        return width

    @staticmethod
    def operator(name, verb):
        """Return the operator `name`, which gives a width, and may refuse its use."""

        def compute(self, *others):
            result = getattr(int, name)(self, *others)
            if verb and result is not NotImplemented and not self.seen_by.width_is_given:
                self.seen_by.refuse(f"{verb} the width of its inputs")
            return _Width.of(result, self.seen_by) if type(result) is int else result

        return compute


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
ARITHMETIC_METHODS = ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod")
TRACED_METHODS = {  # class -> use of a number -> its operators; None: they give a further number
    _Length: {
        "compares": (*COMPARISONS, "bool", "hash"),
        "reads": (
            "repr", "format", "int", "float", "round", "truediv", "rtruediv", "pow", "rpow", "divmod", "rdivmod",
            "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift",
        ),
        None: (*ARITHMETIC_METHODS, "neg"),
    },
    _Width: {"compares": COMPARISONS, None: (*ARITHMETIC_METHODS, "hash")},
}  # fmt: skip
for _class, _verbs in TRACED_METHODS.items():
    for _verb, _operators in _verbs.items():
        for _operator in _operators:
            setattr(_class, f"__{_operator}__", _class.operator(f"__{_operator}__", _verb))


class _Shape(tuple):
    def numel(self):
        return math.prod(self)


class Lengths(torch.overrides.TorchFunctionMode):
    """Tell if code uses numbers of tokens, or reads the state of a tensor.

    Attributes:
        leading: how many first dimensions hold tokens.
        width_is_given: the rows have the width that the module has.
        reason: the first of them, or None.
        reads: the places in code where something read the value of such a number.
    """

    def __init__(self, leading, width_is_given=False):
        super().__init__()
        self.leading, self.width_is_given, self.reason, self.reads = leading, width_is_given, None, set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.reads.discard(_calling_place())  # torch itself read its argument, then asked this mode
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        lengths = []
        args, kwargs = _with_numbers((args, kwargs or {}), lengths)
        if lengths and name not in SHAPING:
            self.refuse("computes with the number of its tokens")
        result = func(*args, **kwargs)
        if name in STATE or name not in TOLD and not probing.tensors(result) and type(result) is not torch.dtype:
            self.refuse(f"reads {name} of a tensor")
        if name == "__getitem__" and _takes_tokens(*args, self.leading):
            self.refuse("takes a part of its tokens")
        if name in ("shape", "size") and isinstance(result, torch.Size):
            return _Shape((*(_Length(n, self) for n in result[:-1]), *(_Width.of(n, self) for n in result[-1:])))
        if name in ("numel", "nelement") or name == "size" and not _is_last(args, kwargs):
            return _Length(result, self)
        return _Width.of(result, self) if name == "size" else result

    def refuse(self, reason):
        """Keep the first reason."""
        self.reason = self.reason or reason


def _calling_place():
    """Return the instruction that called the function that calls this one."""
    frame = inspect.currentframe().f_back.f_back
    return id(frame), frame.f_lasti


def _with_numbers(value, lengths=None):
    """Return arguments with numbers in the place of `_Length`s, which it appends to `lengths`."""
    if isinstance(value, _Length):
        if lengths is not None:
            lengths.append(value)
        return value.value
    if isinstance(value, dict):
        return {name: _with_numbers(item, lengths) for name, item in value.items()}
    if isinstance(value, slice):
        return slice(*(_with_numbers(bound, lengths) for bound in (value.start, value.stop, value.step)))
    if type(value) in (tuple, list, _Shape):
        return type(value)(_with_numbers(item, lengths) for item in value)
    return value


def _takes_tokens(x, index, leading):
    """Tell whether an index has a constant for one of the leading dimensions."""
    index = [entry for entry in (index if isinstance(index, tuple) else (index,)) if entry is not None]
    after = len(index) - 1 - index.index(...) if any(entry is ... for entry in index) else 0
    before = index[: len(index) - after]
    dims = [*range(len(before)), *range(x.ndim - after, x.ndim)]
    bounds = [((e.start or None, e.stop or None) if isinstance(e, slice) else (e,)) for e in index]
    return any(dim < min(leading, x.ndim - 1) and int in map(type, entry) for dim, entry in zip(dims, bounds))


def _is_last(args, kwargs):
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return dim in (-1, args[0].ndim - 1)
