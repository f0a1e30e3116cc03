"""Confirm by many probes and by the traced operations that an op computes a module.

The first probe of a matcher takes ordinary rows. Code may compute something else for others: a clamp at 1000, a branch
for one token or for fp16, `nan_to_num`. Two witnesses show that it does not:

1. Bits: rows of each size that the code's constants suggest, of 1e4, with infinite and NaN values, one token and many,
   in training and in evaluation, in fp32, bf16 and fp16; and the gradients of ordinary rows.
2. Operations: those of the module are arithmetic, or the reference has them too. They are the same for every dtype,
   number of tokens and mode. The code does nothing with a number of tokens but shape tensors, and reads no state of a
   tensor but dtype and shape.
"""

import inspect
import math
import sys
from collections import Counter

import torch

from liger_hw._torch import PLAIN, TorchDispatchMode, is_view_operation, operation_schema, tensor_version
from liger_hw.patching import probing
from liger_hw.patching.reading import KNOWN_PACKAGES, read

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDINARY, LARGE = 3.0, 1e4  # standard deviations of rows
SHAPES = ((2, 5), (1, 1))  # sequences and tokens
OTHER_SHAPES = ((), (3,), (2, 1, 3))  # of other numbers of dimensions, which a module may refuse
MOST_DIMENSIONS = 4  # with those of the columns
SPECIAL = (math.inf, -math.inf, math.nan, 0.0)
MOST_SCALES = 8
COPIES = {
    "_to_copy", "clone", "copy_", "empty", "empty_like", "new_empty", "cat", "stack", "_unsafe_view", "lift_fresh",
    "contiguous", "_reshape_copy", "_conj", "_unsafe_index", "constant_pad_nd", "flip", "roll",
}  # fmt: skip
ARITHMETIC = {
    "add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "reciprocal", "mean", "sum", "mm",
    "addmm", "bmm", "baddbmm", "linear", "matmul", "var_mean", "var", "linalg_vector_norm", "native_layer_norm",
    "_fused_rms_norm", "view_as_complex", "view_as_real", "scalar_tensor", "full", "full_like", "ones", "zeros",
}  # fmt: skip
SMOOTH = ({"silu", "sigmoid", "exp"}, {"gelu", "erf", "tanh"}, {"gelu", "sigmoid"})  # one may be written as another
MLP_OPERATIONS = {"relu", "clamp", "native_dropout", "dropout"}  # beside arithmetic and smooth functions
ROWS_TAKEN = {  # view -> the position of its dimension among the arguments
    "slice": 1, "select": 1, "narrow": 1, "unbind": 1, "split": 2, "split_with_sizes": 2, "chunk": 2,
}  # fmt: skip
NO_END = (None, sys.maxsize)  # values of the argument `end` of a slice
TOLD = {  # what code may learn of a tensor beside results that are tensors
    "shape", "size", "numel", "nelement", "ndim", "dim", "ndimension", "dtype", "device", "is_floating_point",
    "is_complex", "element_size", "itemsize",
}  # fmt: skip
STATE = {"requires_grad_", "grad", "_base", "retain_grad"}  # may give a tensor, and tell of the program
SHAPING = {  # functions that take sizes and positions
    "view", "reshape", "expand", "repeat", "unflatten", "split", "narrow", "broadcast_to", "zeros", "ones", "empty",
    "new_zeros", "new_ones", "new_empty", "__getitem__",
}  # fmt: skip


def cover(x):
    """Tell whether rows of x's dtype and number of dimensions were compared.

    For others the module's own forward runs, as a branch would not be seen. In fp64 many models round rows to fp32,
    which no op does.
    """
    return is_torchs(x) and x.dtype in DTYPES and x.ndim <= MOST_DIMENSIONS and not x.is_nested


def is_torchs(x):
    """Tell whether `x` is a tensor of no program's class, which may change operations."""
    cls = type(x)
    return cls in PLAIN or issubclass(cls, torch.Tensor) and cls.__module__.partition(".")[0] in KNOWN_PACKAGES


class _Operations(TorchDispatchMode):
    """List the names of operations that compute, and numbers among their arguments."""

    def __init__(self, leading, in_place=True):
        super().__init__()
        self.leading, self.in_place, self.names, self.numbers = leading, in_place, Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ROWS_TAKEN and _takes_rows(name, args, self.leading):
            self.names["a part of the rows"] += 1
        elif (not is_view_operation(func) or operation_schema(func).is_mutable) and name not in COPIES:
            self.names[name.rstrip("_") if self.in_place and not name.startswith("_") else name] += 1
            self.numbers.update(abs(float(n)) for n in args[1:] if type(n) in (int, float))
        return func(*args, **(kwargs or {}))


def _takes_rows(name, args, leading):
    """Tell whether a view leaves out rows; one along another dimension splits them."""
    x, place = args[0], ROWS_TAKEN[name]
    dim = args[place] if len(args) > place else 0
    if name == "slice" and all(value in (*NO_END, 0) for value in args[2:3]) and all(v in NO_END for v in args[3:4]):
        return False
    return dim % max(x.ndim, 1) < min(leading, x.ndim - 1)


class _Length:
    """A number of tokens that tells `Lengths` when code reads its value.

    It is no int, because Python's own functions would take its value unseen.
    """

    def __init__(self, value, seen_by):
        self.value, self.seen_by = value, seen_by

    def __index__(self):
        self.seen_by.reads.add(_calling_place())
        return self.value


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
            return _Shape(
                (*(_Length(number, self) for number in result[:-1]), *(_Width.of(n, self) for n in result[-1:]))
            )
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


def _noticed(operation, verb):
    def compute(self, *others):
        self.seen_by.refuse(f"{verb} the number of its tokens")
        return getattr(self.value, operation)(*map(_with_numbers, others))

    return compute


def _derived(operation):
    def compute(self, *others):
        result = getattr(self.value, operation)(*map(_with_numbers, others))
        if result is NotImplemented:
            self.seen_by.refuse("computes with the number of its tokens")
        return _Length(result, self.seen_by) if type(result) is int else result

    return compute


for _operation in ("lt", "le", "gt", "ge", "eq", "ne", "bool", "hash"):
    setattr(_Length, f"__{_operation}__", _noticed(f"__{_operation}__", "compares"))
for _operation in (
    "repr", "format", "int", "float", "round", "truediv", "rtruediv", "pow", "rpow", "divmod", "rdivmod",
    "and", "rand", "or", "ror", "xor", "rxor", "lshift", "rlshift", "rshift", "rrshift",
):  # fmt: skip
    setattr(_Length, f"__{_operation}__", _noticed(f"__{_operation}__", "reads"))
for _operation in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "neg"):
    setattr(_Length, f"__{_operation}__", _derived(f"__{_operation}__"))


class _Width(int):
    """A number of columns that tells `Lengths` when code compares it."""

    @classmethod
    def of(cls, value, seen_by):
        """Return a width of this value."""
        width = cls(value)
        width.seen_by = seen_by
        return width


def _width_method(operation, compares):
    def compute(self, *others):
        result = getattr(int, operation)(self, *others)
        if compares and result is not NotImplemented and not self.seen_by.width_is_given:
            self.seen_by.refuse("compares the width of its inputs")
        return _Width.of(result, self.seen_by) if type(result) is int else result

    return compute


for _operation in ("lt", "le", "gt", "ge", "eq", "ne", "hash"):
    setattr(_Width, f"__{_operation}__", _width_method(f"__{_operation}__", _operation != "hash"))
for _operation in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod"):
    setattr(_Width, f"__{_operation}__", _width_method(f"__{_operation}__", False))


class Objection(Exception):
    """Say why an op must not replace a module that ordinary rows matched."""


def confirm(original, replacement, case, **options):
    """Raise `Objection` unless both witnesses agree; arguments as `objection`."""
    if reason := objection(original, replacement, case, **options):
        raise Objection(reason)


def proves(module, original, replacement, case, exact=True, constants=(), **options):
    """Tell whether an op computes a module: on ordinary rows, then by both witnesses.

    Args:
        original, replacement, case, exact: as in `objection`.
        constants: numbers in other code than the module's and its children's classes.
        options: of `objection`.

    Raises:
        Objection: ordinary rows agree, and a witness does not.
    """
    shape = options.get("shapes", SHAPES)[0]
    cases = [(module.training, *_scaled(case(dtype, shape), ORDINARY)) for dtype in probing.DTYPES]
    if not probing.agree(original, replacement, cases, exact):
        return False
    constants = constants_of(module) | set(constants)
    confirm(original, replacement, case, constants=constants, exact=exact, **options)
    return True


def constants_of(module):
    """Return the numbers in the code and the attributes of a module and its children."""
    numbers = set()
    for part in module.modules():
        numbers |= read(type(part)).constants
        numbers.update(value for value in vars(part).values() if type(value) in (int, float))
    return numbers


def objection(
    original, replacement, case, constants=(), exact=True, shapes=SHAPES, other_shapes=OTHER_SHAPES, learned=None,
    in_place=True, width_is_given=False,
):  # fmt: skip
    """Return why an op must not replace a module that ordinary rows matched, or None.

    Args:
        original, replacement: functions of (training, *arguments); the second computes with the op's reference.
        case: (dtype, shape of the rows' leading dimensions) -> arguments, of which the first has deviation 1.
        constants: numbers in the module's code and attributes.
        exact: False allows another order of fp32 sums.
        shapes: the leading dimensions.
        other_shapes: leading dimensions for which the module may raise an error.
        learned: how many of the first arguments get gradients; None: all.
        width_is_given: the rows have the width of the module's, which its code may compare.
        in_place: the module may compute in place, which no child sees that the op does not call.
    """
    numbers = set()
    for training in (True, False):
        reason = _object_to_operations(original, replacement, case, training, shapes, numbers, in_place, width_is_given)
        if reason:
            return reason
    for training in (True, False):
        for dtype in DTYPES:
            for shown, args in _rows(case, dtype, shapes, {abs(float(c)) for c in constants} | numbers):
                if not _agrees(original, replacement, training, args, exact):
                    mode = "training" if training else "evaluation"
                    return f"differs from the op in {str(dtype).removeprefix('torch.')}, {mode}, {shown}"
            for shape in other_shapes:
                args = _scaled(case(dtype, shape), ORDINARY)
                runs = probing.outputs(original, [(training, *args)]) is not None
                if runs and not _agrees(original, replacement, training, args, exact):
                    return f"differs from the op for inputs of {len(shape) + 1} dimensions"
    args = case(torch.float32, shapes[0])
    return None if _same_gradients(original, replacement, args, learned) else "has other gradients than the op"


def _rows(case, dtype, shapes, constants):
    """Yield (description, arguments) of rows of every size and with special values."""
    for shape in shapes:
        yield f"rows of shape {shape}", _scaled(case(dtype, shape), ORDINARY)
    for scale in (LARGE, *_scales(constants)):
        yield f"rows of size {scale:.3g}", _scaled(case(dtype, shapes[0]), scale)
    for value in SPECIAL:
        x, *rest = case(dtype, shapes[0])
        x = x.clone()
        x.view(-1, x.shape[-1])[0, 0] = value
        in_parameter = "" if value else " in a parameter"  # code may ask for the class of a tensor
        yield f"a row with {value}{in_parameter}", (torch.nn.Parameter(x) if in_parameter else x, *rest)
    x, *rest = case(dtype, shapes[0])
    yield "rows of zeros", (torch.zeros_like(x), *rest)


def _scaled(args, scale):
    return (args[0] * scale, *args[1:])


def _scales(constants):
    """Return sizes of rows around constants and their roots, at most one each half decade."""
    sizes = [size for c in sorted(constants) if 1e-20 < c < 1e20 for size in (math.sqrt(c), c, 4 * c)]
    decades = {round(2 * math.log10(size)): size for size in sizes}
    known = {round(2 * math.log10(size)) for size in (1.0, ORDINARY, LARGE)}
    return [size for decade, size in decades.items() if decade not in known][:MOST_SCALES]


def _agrees(original, replacement, training, args, exact):
    versions = [tensor_version(x) for x in probing.tensors(args)]
    try:
        expected = probing.run(lambda: original(training, *args))
    except Exception:  # a model's own code may raise any exception
        return False
    if versions != [tensor_version(x) for x in probing.tensors(args)]:
        return False
    try:
        return probing.equal(probing.run(lambda: replacement(training, *args)), expected, exact)
    except Exception:  # an op may refuse its arguments
        return False


def _object_to_operations(original, replacement, case, training, shapes, numbers, in_place, width_is_given):
    first = None
    for dtype in DTYPES:
        for shape in shapes:
            args = case(dtype, shape)
            names, seen = _operations(lambda args=args: original(training, *args), args[0].ndim - 1, in_place)
            reference, _ = _operations(lambda args=args: replacement(training, *args), args[0].ndim - 1, in_place)
            if names is None or reference is None:
                return f"does not run in {str(dtype).removeprefix('torch.')}"
            numbers |= seen
            extra = next((name for name in names if not _is_explained(name, names, reference)), None)
            if extra:
                return f"computes {extra}, which the op does not"
            first = first or names
            if names != first:
                differing = next(iter((names - first) + (first - names)))
                return f"computes {differing} for some dtypes or numbers of tokens only"
    args = case(torch.float32, shapes[0])
    lengths = Lengths(args[0].ndim - 1, width_is_given)
    try:
        probing.run(lambda: original(training, *args), lengths)
    except Exception:  # a model's own code may raise any exception
        return lengths.reason or "does not run"
    return lengths.reason or ("reads the number of its tokens" if lengths.reads else None)


def _operations(function, leading, in_place=True):
    operations = _Operations(leading, in_place)
    try:
        probing.run(function, operations)
    except Exception:  # a model's own code may raise any exception
        return None, set()
    return operations.names, operations.numbers


def operations_of(function):
    """Return the names of the operations that a function runs, or None if it fails."""
    return _operations(function, 0)[0]


def is_mlp_operation(name):
    """Tell whether some op of MLPs computes an operation."""
    return name in ARITHMETIC or name in MLP_OPERATIONS or any(name in group for group in SMOOTH)


def _is_explained(name, names, reference):
    if name in ARITHMETIC or names[name] <= reference[name]:
        return True
    return any(name in group and not group.isdisjoint(reference) for group in SMOOTH)


def _same_gradients(original, replacement, args, learned):
    gradients = [_gradients(lambda f=f: f(True, *args), args[:learned]) for f in (original, replacement)]
    if None in gradients:
        return False
    return all(
        (a is None) == (b is None) and (a is None or (a - b).abs().max() <= 1e-3 * b.abs().max() + 1e-6)
        for a, b in zip(*gradients)
    )


def _gradients(function, args):
    inputs = [x for x in probing.tensors(args) if x.is_floating_point()]
    for x in inputs:
        x.requires_grad_()
    try:
        results = probing.run(function, grad=True)
        results = results if isinstance(results, (tuple, list)) else (results,)
        random = probing.generator()
        total = sum((y * probing.random_rows(random, *y.shape)).sum() for y in results if y is not None)
        return torch.autograd.grad(total, inputs, allow_unused=True)
    except Exception:  # a model's own code may raise any exception
        return None
    finally:
        for x in inputs:
            x.requires_grad_(isinstance(x, torch.nn.Parameter))
