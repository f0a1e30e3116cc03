"""Record the steps of a model from its head's output to its loss.

A loss that understands the record computes its value from hidden states and weight, without logits.
"""

import itertools
import math

import torch

from liger_hw._torch import PLAIN
from liger_hw.dispatch import autocasts


class Record:
    """Steps from a head's output to some logits, as (name, argument) pairs.

    Each method returns the record after one more step, or None where a loss would not understand it.

    Attributes:
        hidden: (..., H), the rows of the head's input that give these logits.
        vocabulary: number of columns.
        dtype: of the logits.
        head_dtype: of the head's output, the same or 16-bit.
    """

    def __init__(self, hidden, vocabulary, dtype, steps=(), head_dtype=None):
        self.hidden, self.vocabulary, self.dtype, self.steps = hidden, vocabulary, dtype, steps
        self.head_dtype = head_dtype or dtype

    @property
    def shape(self):
        return self.hidden.shape[:-1] + (self.vocabulary,)

    def _then(self, name, argument=None, hidden=None, vocabulary=None, dtype=None):
        steps = (*self.steps, (name, argument))
        hidden = self.hidden if hidden is None else hidden
        return Record(hidden, vocabulary or self.vocabulary, dtype or self.dtype, steps, self.head_dtype)

    def multiply(self, number):
        return self._then("mul", number) if self._is_scale(number) else None

    def divide(self, number):
        return self._then("div", number) if self._is_scale(number) else None

    def _is_scale(self, number):
        """Tell whether a step may scale by `number`, within the smaller range of fp16."""
        return type(number) in (int, float) and (self.dtype != torch.float16 or _is_moderate(number))

    def tanh(self):
        return self._then("tanh")

    def add(self, row):
        """Add a constant to each column of logits that are not cast.

        The loss adds it before it rounds to the head's dtype.
        """
        fits = type(row) in PLAIN and not row.requires_grad and row.numel() == self.vocabulary
        fits = fits and row.shape[-1:] == (self.vocabulary,) and row.ndim <= self.hidden.ndim
        fits = fits and torch.promote_types(row.dtype, self.dtype) == self.dtype == self.head_dtype
        # a copy, as the program may write to its own
        return self._then("add", row.detach().flatten().clone()) if fits else None

    def cast(self, dtype=None, *others, **options):
        """Cast to fp32, or back; other casts round, or ask for a wider loss."""
        returns = dtype == self.head_dtype and all(name in ("to", "copy", *VIEWS) for name, _ in self.steps)
        if others or options or dtype not in (self.dtype, torch.float32) and not returns:
            return None
        return self if dtype == self.dtype else self._then("to", dtype, dtype=dtype)

    def contiguous(self, memory_format=torch.contiguous_format):
        """Copy a slice; other logits are contiguous."""
        if memory_format != torch.contiguous_format:
            return None
        views = itertools.takewhile(lambda step: is_view(*step), reversed(self.steps))
        return self._then("copy") if any(name != "view" for name, _ in views) else self

    def index(self, index):
        """Take slices or a mask of rows, or the first columns."""
        if torch.is_tensor(index):
            is_mask = index.dtype == torch.bool and index.ndim < self.hidden.ndim
            return self._then("rows", index.clone(), hidden=self.hidden[index]) if is_mask else None
        *rows, columns = _slices(index, self.hidden.ndim) or (None,)
        if columns == slice(None):
            return self._then("rows", index, hidden=self.hidden[index])
        if columns is None or any(row != slice(None) for row in rows):
            return None
        count, first = columns.stop, columns.start in (None, 0) and columns.step in (None, 1)
        fits = first and type(count) is int and 0 < count <= self.vocabulary
        return self._then("columns", count, vocabulary=count) if fits else None

    def view(self, *shape):
        """Arrange the rows in another shape."""
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        whole = len(shape) > 1 and all(type(size) is int for size in shape) and shape[-1] == self.vocabulary
        if not whole or not self.hidden.numel():
            return None
        hidden = self.hidden.reshape(*shape[:-1], self.hidden.shape[-1])
        return self._then("view", hidden.shape[:-1] + (self.vocabulary,), hidden=hidden)


VIEWS = ("rows", "columns", "view")
MODERATE = 2.0**-8, 2.0**8  # scales by which logits of up to 255 keep their digits in fp16, and are finite
STEP_FUNCTIONS = {
    "add": torch.add, "div": torch.div, "mul": torch.mul, "tanh": lambda value, _, tanh=torch.tanh: tanh(value),
    "columns": lambda value, count: value[..., :count], "rows": lambda value, index: value[index],
    "to": lambda value, dtype: value.to(dtype), "view": lambda value, shape: value.reshape(shape),
    "copy": lambda value, _: value.contiguous(),
}  # fmt: skip


def is_view(name, argument):
    """Tell whether a step shares memory with its input, unlike rows by a mask."""
    return name in VIEWS and not torch.is_tensor(argument)


def apply_steps(logits, steps):
    for name, argument in steps:
        logits = STEP_FUNCTIONS[name](logits, argument)
    return logits


def autocast_dtype(device_type):
    return torch.get_autocast_dtype(device_type) if autocasts(device_type) else None


def _is_moderate(scale):
    least, most = MODERATE
    return least <= abs(scale) <= most


def scale_and_softcap(steps):
    """Return (logit_scale, softcap or None) for these steps; None if they do not fit.

    Logits that a further step scales keep to `MODERATE`: the model alone may overflow between two steps.
    """
    numerator, denominator, capped, cap = 1.0, 1.0, False, None
    for name, argument in steps:
        if name in ("to", "copy", *VIEWS) or name == "add" and numerator == denominator == 1.0 and not capped:
            continue
        if name == "tanh" and not capped:
            capped = True
        elif capped and cap is None and name == "mul" and argument > 1e-30:  # else 0 in fp32
            cap = argument
        elif capped or not _is_moderate(numerator / denominator):
            return None
        elif name == "mul":
            numerator *= argument
        elif name == "div" and argument != 0:
            denominator *= argument
        else:
            return None
    cap = 1.0 if capped and cap is None else cap
    scale = numerator * (cap or 1.0) / denominator if denominator else math.inf
    return (scale, cap) if math.isfinite(scale) else None


def operands(hidden, weight, bias, steps, dtype):
    """Return the op's x (N, H), weight and bias for `steps`, in the head's dtype."""
    for name, argument in steps:
        if name == "add":
            row = argument.to(weight.dtype)
            bias = row if bias is None else bias + row
        elif name == "columns":
            weight, bias = weight[:argument], None if bias is None else bias[:argument]
        elif name == "rows":
            hidden = hidden[argument]
        elif name == "view":
            hidden = hidden.reshape(*argument[:-1], hidden.shape[-1])
    tensors = hidden.reshape(-1, hidden.shape[-1]), weight, bias
    return tensors if dtype is None else tuple(None if t is None else t.to(dtype) for t in tensors)


def _slices(index, ndim):
    """Return a slice for each dimension, or None for an index of another kind."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or isinstance(i, slice) for i in index) or index.count(Ellipsis) > 1:
        return None
    if any(torch.is_tensor(bound) for i in index if i is not Ellipsis for bound in (i.start, i.stop, i.step)):
        return None  # a program may write to it
    place = index.index(Ellipsis) if Ellipsis in index else len(index)
    before, after = index[:place], index[place + 1 :]
    slices = *before, *[slice(None)] * (ndim - len(before) - len(after)), *after
    return slices if len(slices) == ndim else None


# method of torch.Tensor, and function of torch if there is one -> the method of `Record` with the same arguments
OPERATIONS = {
    **dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), Record.multiply),
    **dict.fromkeys(("div", "true_divide", "__truediv__"), Record.divide),
    **dict.fromkeys(("add", "__add__", "__radd__"), Record.add),
    "tanh": Record.tanh,
    **dict.fromkeys(("to", "type"), Record.cast),
    "float": lambda record: record.cast(torch.float32),
    "half": lambda record: record.cast(torch.float16),
    "bfloat16": lambda record: record.cast(torch.bfloat16),
    "__getitem__": Record.index,
    "contiguous": Record.contiguous,
    **dict.fromkeys(("view", "reshape"), Record.view),
}


def next_record(record, operation, args, kwargs):
    """Return the record after a function of `OPERATIONS`, or None if no loss understands it."""
    try:
        return operation(record, *args, **kwargs)
    except (TypeError, RuntimeError, IndexError):  # torch itself reports the wrong arguments
        return None
