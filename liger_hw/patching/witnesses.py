"""Confirm by many probes and by the traced operations that an op computes a module.

The first probe of a matcher takes ordinary rows. Code may compute something else for others: a clamp at 1000, a branch
for one token or for fp16, `nan_to_num`. Two witnesses show that it does not:

1. Bits: rows of each size that the code's constants suggest, of 1e4, with infinite and NaN values, one token and many,
   in training and in evaluation, in fp32, bf16 and fp16; and the gradients of ordinary rows.
2. Operations: those of the module are arithmetic, or the reference has them too. They are the same for every dtype,
   number of tokens and mode. The code does nothing with a number of tokens but shape tensors, and reads no state of a
   tensor but dtype and shape.
"""

import functools
import itertools
import math
import sys
from collections import Counter
from dataclasses import dataclass

import torch
from torch.compiler import is_compiling

from liger_hw._torch import PLAIN, TorchDispatchMode, is_view_operation, operation_schema, tensor_version
from liger_hw.patching import probing
from liger_hw.patching.lengths import Lengths
from liger_hw.patching.reading import read
from liger_hw.patching.values import KNOWN_PACKAGES

WITNESS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDINARY, LARGE = 3.0, 1e4  # standard deviations of rows
SHAPES = ((2, 5), (1, 1))  # sequences and tokens
OTHER_SHAPES = ((), (3,), (2, 1, 3))  # of other numbers of dimensions, which a module may refuse
MOST_DIMENSIONS = 4  # with those of the columns
MOST_ELEMENTS = 2**18  # of many rows: code may ask in ways that no trace shows, such as by a sum of ones
# of rows whose module states no width, beside those around its constants: multiples of 8
WIDTHS = (8, 136, 1000, 4096, 32768)
WIDEST = 65536
SPECIAL = (math.inf, -math.inf, math.nan, 0.0)
MOST_SCALES = 8
COPIES = {
    "_to_copy", "clone", "copy_", "empty", "empty_like", "new_empty", "cat", "stack", "_unsafe_view", "lift_fresh",
    "contiguous", "_reshape_copy", "_conj", "_unsafe_index", "constant_pad_nd", "flip", "roll",
}  # fmt: skip
ARITHMETIC_OPERATIONS = {
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


def cover(x):
    """Tell whether rows of x's dtype and number of dimensions were compared.

    For others the module's own forward runs, as a branch would not be seen. In fp64 many models round rows to fp32,
    which no op does.
    """
    return is_torchs(x) and x.dtype in WITNESS_DTYPES and x.ndim <= MOST_DIMENSIONS and can_be_kept(x)


def can_be_kept(x):
    """Tell whether ops can read rows of `x`, and keep it for a backward.

    Outside inference mode torch cannot save a tensor from it.
    """
    fits = x.layout is torch.strided and not x.is_nested
    return fits and (is_compiling() or not x.is_inference() or torch.is_inference_mode_enabled())


def is_torchs(x):
    """Tell whether `x` is a tensor of no program's class, which may change operations."""
    cls = type(x)
    return cls in PLAIN or issubclass(cls, torch.Tensor) and cls.__module__.partition(".")[0] in KNOWN_PACKAGES


class _Operations(TorchDispatchMode):
    """List operations that compute, numbers among their arguments, and whether one draws.

    Args:
        shape: of the rows.
    """

    def __init__(self, shape=(), in_place=True):
        super().__init__()
        self.shape, self.in_place, self.draws, self.names, self.numbers = shape, in_place, False, Counter(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if name in ROWS_TAKEN and _takes_rows(name, args, self.shape):
            self.names["a part of the rows"] += 1
        elif (not is_view_operation(func) or operation_schema(func).is_mutable) and name not in COPIES:
            self.names[name.rstrip("_") if self.in_place and not name.startswith("_") else name] += 1
            self.numbers.update(abs(float(n)) for n in args[1:] if type(n) in (int, float))
        return func(*args, **(kwargs or {}))


def _takes_rows(name, args, rows):
    """Tell whether a view leaves out rows; one along another dimension splits them.

    Dimensions may have been exchanged or joined, so their sizes tell of which ones they are made.

    Args:
        rows: the shape of the rows.
    """
    x, place = args[0], ROWS_TAKEN[name]
    dim = args[place] if len(args) > place else 0
    if name == "slice" and all(value in (*NO_END, 0) for value in args[2:3]) and all(v in NO_END for v in args[3:4]):
        return False
    dim = dim % max(x.ndim, 1)
    *leading, cols = rows or (0,)
    whole = math.prod(leading)
    has_rows = {size for size in (*leading, whole, whole * cols) if size > 2} - {cols, cols // 2}
    return dim < min(len(leading), x.ndim - 1) or x.ndim > 0 and x.shape[dim] in has_rows


class _Steps(TorchDispatchMode):
    """List operations with the shapes of their results and the numbers that they compute with."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result, given = func(*args, **kwargs), (*args[1:], *kwargs.values())
        numbers = () if is_view_operation(func) else tuple(n for n in given if type(n) in (int, float))
        self.steps.append((func.overloadpacket.__name__, numbers, [tuple(x.shape) for x in probing.tensors(result)]))
        return result


def _traced_steps(function, sizes=None):
    """Return the operations of a function, or None if it fails.

    Args:
        sizes: size -> what takes its place in the shapes.
    """
    steps = _Steps()
    try:
        probing.run(function, steps)
    except Exception:  # a model's own code may raise any exception
        return None
    sizes = sizes or {}
    return [(*step, [tuple(sizes.get(n, n) for n in shape) for shape in shapes]) for *step, shapes in steps.steps]


def check_sizes(function, cases, sizes):
    """Raise `Objection` unless a function has the same operations in other sizes.

    Args:
        function: of the arguments of a case.
        cases: arguments without values (of the device meta) in small sizes, and in the module's.
        sizes: small size -> the module's.
    """
    small, whole = (functools.partial(function, *case) for case in cases)
    steps = _traced_steps(small, sizes)
    if steps is None or _traced_steps(whole) != steps:
        raise Objection("computes something else for other numbers of columns")


class Objection(Exception):
    """Say why an op must not replace a module that ordinary rows matched."""


def constants_of(module):
    """Return the numbers in the code and the attributes of a module and its children."""
    numbers = set()
    for part in module.modules():
        numbers |= read(type(part)).constants
        numbers.update(value for value in vars(part).values() if type(value) in (int, float))
    return numbers


@dataclass
class Proof:
    """Compare what a module computes with what an op computes.

    Attributes:
        original, replacement: functions of (training, *arguments); the second computes with the op's reference.
        case: (dtype, shape of the rows' leading dimensions) -> arguments, of which the first has deviation 1.
        exact: False allows another order of fp32 sums.
        shapes: the leading dimensions.
        other_shapes: leading dimensions for which the module may raise an error.
        learned: how many of the first arguments get gradients; None: all.
        in_place: the module may compute in place, which no child sees that the op does not call.
        width_is_given: the rows have the width of the module's, which its code may compare.
        at_width: number of columns -> arguments in fp32, where the rows may have any.
        roles: names of float attributes that the op reads. A module with others is compared with their values, too.
        draws: one of both draws random numbers, as was traced.
    """

    original: object
    replacement: object
    case: object
    exact: bool = True
    shapes: tuple = SHAPES
    other_shapes: tuple = OTHER_SHAPES
    learned: int | None = None
    in_place: bool = True
    width_is_given: bool = False
    at_width: object = None
    roles: tuple = ()
    draws: bool = False

    def holds_for(self, module, constants=()):
        """Tell whether the op computes a module: on ordinary rows, then by both witnesses.

        Args:
            constants: numbers in other code than the module's and its children's classes.

        Raises:
            Objection: ordinary rows agree, and a witness does not.
        """
        rows = [_scaled(self.case(dtype, self.shapes[0]), ORDINARY) for dtype in probing.PROBE_DTYPES]
        if not probing.agree(self.original, self.replacement, [(module.training, *args) for args in rows], self.exact):
            return False
        self.confirm(module, constants)
        return True

    def confirm(self, module, constants=()):
        """Raise `Objection` unless both witnesses agree; arguments as `holds_for`."""
        constants = constants_of(module) | set(constants)
        if reason := self.objection(constants):
            raise Objection(reason)
        if others := [name for name in probing.float_attributes(module) if name not in self.roles]:
            with probing.actual_floats():
                if reason := self.objection(constants):
                    raise Objection(f"{reason}, by its {' and '.join(others)}")

    def objection(self, constants):
        """Return why the op must not replace code that ordinary rows matched, or None.

        Args:
            constants: numbers in the code and its attributes.
        """
        numbers = {abs(float(constant)) for constant in constants}
        for training in (True, False):
            if reason := self._object_to_operations(training, numbers):
                return reason
        for training in (True, False):
            for dtype in WITNESS_DTYPES:
                for shown, args in self._rows(dtype, numbers):
                    if not self._agrees(training, args):
                        mode = "training" if training else "evaluation"
                        return f"differs from the op in {str(dtype).removeprefix('torch.')}, {mode}, {shown}"
                for shape in self.other_shapes:
                    args = _scaled(self.case(dtype, shape), ORDINARY)
                    if not self._agrees(training, args, if_it_fails=True):
                        return f"differs from the op for inputs of {len(shape) + 1} dimensions"
        *leading, last = self.shapes[0]
        many = (*leading, last * max(MOST_ELEMENTS // self.case(torch.float32, self.shapes[0])[0].numel(), 1))
        if not self._agrees(False, self.case(torch.float32, many)):
            return f"differs from the op for rows of shape {many}"
        for width in _widths(numbers) if self.at_width else ():
            if not self._agrees(False, self.at_width(width), exact=False):  # ends of rows may round otherwise
                return f"differs from the op for inputs of {width} columns"
        return None if self._has_same_gradients() else "has other gradients than the op"

    def _object_to_operations(self, training, numbers):
        """Return why the operations differ, or None; add numbers among their arguments to `numbers`."""
        first = None
        for dtype in WITNESS_DTYPES:
            for shape in self.shapes:
                args = self.case(dtype, shape)
                traced, reference = (
                    _operations(functools.partial(function, training, *args), args[0].shape, self.in_place)
                    for function in (self.original, self.replacement)
                )
                if traced is None or reference is None:
                    return f"does not run in {str(dtype).removeprefix('torch.')}"
                numbers |= traced.numbers
                self.draws |= traced.draws or reference.draws
                names = traced.names
                extra = next((name for name in names if not _is_explained(name, names, reference.names)), None)
                if extra:
                    return f"computes {extra}, which the op does not"
                first = first or names
                if names != first:
                    differing = next(iter((names - first) + (first - names)))
                    return f"computes {differing} for some dtypes or numbers of tokens only"
        for dtype, shape in itertools.product(WITNESS_DTYPES, (self.shapes[0], *self.other_shapes)):
            args = self.case(dtype, shape)
            lengths = Lengths(args[0].ndim - 1, self.width_is_given)
            call = functools.partial(self.original, training, *args)
            runs = probing.outputs(functools.partial(probing.run, call, lengths), [()])
            if lengths.reason or lengths.reads:
                return lengths.reason or "reads the number of its tokens"
            if runs is None and shape == self.shapes[0]:
                return "does not run"
        return None

    def _rows(self, dtype, constants):
        """Yield (description, arguments) of rows of every size and with special values."""
        for shape in self.shapes:
            yield f"rows of shape {shape}", _scaled(self.case(dtype, shape), ORDINARY)
        for scale in (LARGE, *_scales(constants)):
            yield f"rows of size {scale:.3g}", _scaled(self.case(dtype, self.shapes[0]), scale)
        for value in SPECIAL:
            x, *rest = self.case(dtype, self.shapes[0])
            x = x.clone()
            x.view(-1, x.shape[-1])[0, 0] = value
            in_parameter = "" if value else " in a parameter"  # code may ask for the class of a tensor
            yield f"a row with {value}{in_parameter}", (torch.nn.Parameter(x) if in_parameter else x, *rest)
        x, *rest = self.case(dtype, self.shapes[0])
        yield "rows of zeros", (torch.zeros_like(x), *rest)

    def _agrees(self, training, args, exact=True, if_it_fails=False):
        """Tell whether both give the same, and the module writes to no argument."""
        versions = [tensor_version(x) for x in probing.tensors(args)]
        try:
            expected = probing.run(lambda: self.original(training, *args), draws=self.draws)
        except Exception:  # a model's own code may raise any exception
            return if_it_fails
        if versions != [tensor_version(x) for x in probing.tensors(args)]:
            return False
        try:
            actual = probing.run(lambda: self.replacement(training, *args), draws=self.draws)
            return probing.equal(actual, expected, exact and self.exact)
        except Exception:  # an op may refuse its arguments
            return False

    def _has_same_gradients(self):
        args = self.case(torch.float32, self.shapes[0])
        functions = self.original, self.replacement
        gradients = [_gradients(lambda f=f: f(True, *args), args[: self.learned]) for f in functions]
        if None in gradients:
            return False
        return all(
            (a is None) == (b is None) and (a is None or (a - b).abs().max() <= 1e-3 * b.abs().max() + 1e-6)
            for a, b in zip(*gradients)
        )


def _scaled(args, scale):
    return (args[0] * scale, *args[1:])


def _scales(constants):
    """Return sizes of rows around constants and their roots, at most one each half decade."""
    sizes = [size for c in sorted(constants) if 1e-20 < c < 1e20 for size in (math.sqrt(c), c, 4 * c)]
    decades = {round(2 * math.log10(size)): size for size in sizes}
    known = {round(2 * math.log10(size)) for size in (1.0, ORDINARY, LARGE)}
    return [size for decade, size in decades.items() if decade not in known][:MOST_SCALES]


def _widths(constants):
    """Return `WIDTHS`, and those around constants, at which a module may part its columns."""
    whole = [int(c) for c in sorted(constants) if WIDTHS[0] <= c < WIDEST and c == int(c)]
    around = [width for c in whole[:MOST_SCALES] for width in (8 * (c // 8), 8 * (c // 8 + 1))]
    return dict.fromkeys([*WIDTHS, *around])


def _operations(function, shape=(), in_place=True):
    """Return the `_Operations` of a function, or None if it fails."""
    operations = _Operations(shape, in_place)
    try:
        probing.run(function, operations)
    except Exception:  # a model's own code may raise any exception
        return None
    return operations


def operations_of(function):
    """Return the names of the operations that a function runs, or None if it fails."""
    operations = _operations(function)
    return operations and operations.names


def is_mlp_operation(name):
    """Tell whether some op of MLPs computes an operation."""
    return name in ARITHMETIC_OPERATIONS or name in MLP_OPERATIONS or any(name in group for group in SMOOTH)


def _is_explained(name, names, reference):
    if name in ARITHMETIC_OPERATIONS or names[name] <= reference[name]:
        return True
    return any(name in group and not group.isdisjoint(reference) for group in SMOOTH)


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
