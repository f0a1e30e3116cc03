"""Logits that are computed when somebody looks at them.

Between a language model's head and its loss there is at most a constant bias, a scale, a softcap, a cast, a slice of
rows or of the vocabulary, or another shape of the rows. `LazyLogits` stands for the head's output, remembers those
steps, and is consumed by a fused linear cross entropy that never holds the logits: torch.nn.functional.cross_entropy of
it is one. So is logsumexp, of which models make a z-loss. Whatever else is done to it, it computes the logits as the
head would have, replays the steps, and goes on as that tensor.
"""

import torch
from torch.utils._pytree import tree_map

from liger_hw._torch import PLAIN
from liger_hw.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.kernels.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax


class LazyLogits:
    """bias, scale, softcap, cast and slice of `head(hidden)`, not yet computed.

    Args:
        hidden: (..., H).
        head: a `torch.nn.Linear` of H to V. Its weight is looked up when it is needed: that is where sharding engines
            put it back.
        steps: what happened to the logits since, as (name, argument) pairs.
        of: the `LazyLogits` that these descend from. Descendants share `extras`, where the loss leaves its by-products.
    """

    def __init__(self, hidden, head, steps=(), of=None):
        self.hidden, self.head, self.steps = hidden, head, steps
        self.extras = {} if of is None else of.extras
        self.autocast_dtype = _autocast_dtype(hidden.device.type) if of is None else of.autocast_dtype
        kept = [argument for name, argument in steps[-1:] if name == "columns"]
        self.vocabulary = kept[0] if kept else head.weight.shape[0] if of is None else of.vocabulary
        self.versions = _versions(hidden, head.weight)
        self.value = None

    def then(self, name, argument=None):
        """These logits after one more step, or None if they have been computed: somebody may have written to them."""
        if self.value is None:
            return LazyLogits(self.hidden, self.head, (*self.steps, (name, argument)), self)

    @property
    def operands(self):
        """hidden, weight and bias in the dtype that the head would compute in, of the part of the vocabulary left."""
        weight, bias, dtype = self.head.weight, self.head.bias, self.autocast_dtype
        for name, argument in self.steps:
            if name == "add":
                added = argument.flatten().to(weight.dtype)
                bias = added if bias is None else bias + added
            elif name == "columns":
                weight, bias = weight[:argument], None if bias is None else bias[:argument]
        tensors = self.hidden, weight, bias
        return tensors if dtype is None else tuple(None if x is None else x.to(dtype) for x in tensors)

    def scale_and_softcap(self):
        """(logit_scale, softcap) of the ops for these steps, softcap None where there is no tanh; None where the ops
        have no such numbers."""
        numerator, denominator, capped, cap = 1.0, 1.0, False, None
        for name, argument in self.steps:
            if name in ("to", "columns") or name == "add" and numerator == denominator == 1.0 and not capped:
                continue
            if name == "tanh" and not capped:
                capped = True
            elif capped and cap is None and name == "mul" and argument > 0:
                cap = argument
            elif not capped and name == "mul":
                numerator *= argument
            elif not capped and name == "div" and argument != 0:
                denominator *= argument
            else:
                return None
        if capped and cap is None:
            cap = 1.0
        return numerator * (cap or 1.0) / denominator, cap

    def materialise(self):
        """The logits as a tensor, computed once, exactly as the model's own head and steps would.

        Raises:
            RuntimeError: the logits of that forward can no longer be had: the head's weight was written to since, by an
                optimizer step for one, or it is sharded, or the forward was compiled.
        """
        if self.value is None:
            weight, dtype = self.head.weight, self.autocast_dtype
            if type(weight) not in PLAIN or _versions(self.hidden, weight) != self.versions:
                raise RuntimeError(
                    "the logits were not kept in the forward and cannot be computed now: the head's weight has since "
                    "changed (an optimizer step?) or is sharded, or the forward was compiled. Read outputs.logits "
                    "before that, or call the model with skip_logits=False"
                )
            with torch.autocast(self.hidden.device.type, dtype, enabled=dtype is not None):
                value = torch.nn.functional.linear(self.hidden, weight, self.head.bias)
                for name, argument in self.steps:
                    value = APPLY[name](value, argument)
            self.value = value
        return self.value

    shape = property(lambda self: self.hidden.shape[:-1] + (self.vocabulary,))
    ndim = property(lambda self: self.hidden.ndim)
    device = property(lambda self: self.hidden.device)
    requires_grad = property(lambda self: self.materialise().requires_grad)

    @property
    def dtype(self):
        casts = [argument for name, argument in self.steps if name == "to"]
        return casts[-1] if casts else self.autocast_dtype or self.hidden.dtype

    def dim(self):
        return self.ndim

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def numel(self):
        return self.shape.numel()

    def float(self):
        return self.to(torch.float32)

    def contiguous(self):
        return self if self.value is None else self.value.contiguous()

    def to(self, *args, **kwargs):
        dtype = args[0] if len(args) == 1 else kwargs.get("dtype") if not args else None
        if isinstance(dtype, torch.dtype) and not set(kwargs) - {"dtype"} and dtype.is_floating_point:
            if dtype == self.dtype and self.value is None:
                return self
            later = self.then("to", dtype)
            if later is not None:
                return later
        return self.materialise().to(*args, **kwargs)

    def view(self, *shape):
        shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)) else shape
        whole = bool(shape) and all(type(n) is int for n in shape) and shape[-1] == self.vocabulary
        if self.value is None and whole and len(shape) > 1:
            return LazyLogits(self.hidden.reshape(*shape[:-1], self.hidden.shape[-1]), self.head, self.steps, self)
        return self.materialise().view(*shape)

    def reshape(self, *shape):
        later = self.view(*shape) if self.value is None else None
        return later if isinstance(later, LazyLogits) else self.materialise().reshape(*shape)

    def cross_entropy(self, target, weight, ignore_index, reduction, label_smoothing):
        """torch.nn.functional.cross_entropy of these logits without computing them, or None."""
        scale_and_softcap = self.scale_and_softcap()
        fits = self.ndim == 2 and target.dtype == torch.int64 and target.shape == self.shape[:1]
        if self.value is not None or scale_and_softcap is None or not fits:
            return None
        if type(target) not in PLAIN or reduction not in ("mean", "sum", "none"):
            return None
        hidden, head_weight, bias = self.operands
        loss = fused_linear_cross_entropy(
            hidden, head_weight, target, bias, weight, ignore_index, label_smoothing,
            logit_scale=scale_and_softcap[0], softcap=scale_and_softcap[1], reduction=reduction,
        )  # fmt: skip
        return loss.to(self.dtype)

    def logsumexp(self, dim, keepdim=False):
        """Over the vocabulary without computing the logits, for losses that add its square (z-loss)."""
        scale_and_softcap = self.scale_and_softcap()
        if self.value is not None or scale_and_softcap is None or dim not in (-1, self.ndim - 1) or keepdim:
            return self.materialise().logsumexp(dim, keepdim)
        hidden, weight, bias = self.operands
        token = torch.zeros(self.shape[:-1], dtype=torch.int64, device=self.device)  # any
        found = fused_linear_selective_log_softmax(
            hidden, weight, token, bias, logit_scale=scale_and_softcap[0], softcap=scale_and_softcap[1], return_lse=True
        )
        return found.lse.to(self.dtype)

    def __add__(self, other):
        row = type(other) in PLAIN and not other.requires_grad and other.numel() == self.vocabulary
        row = row and other.ndim <= self.ndim and other.shape[-1:] == self.shape[-1:]
        later = self.then("add", other) if row else None
        return self.materialise() + _real(other) if later is None else later

    __radd__ = __add__

    def __mul__(self, other):
        later = self.then("mul", other) if type(other) in (int, float) else None
        return self.materialise() * _real(other) if later is None else later

    __rmul__ = __mul__

    def __truediv__(self, other):
        later = self.then("div", other) if type(other) in (int, float) else None
        return self.materialise() / _real(other) if later is None else later

    def tanh(self):
        later = self.then("tanh")
        return self.materialise().tanh() if later is None else later

    def __getitem__(self, index):
        if self.value is None and _selects_rows(index, self.ndim):
            return LazyLogits(self.hidden[index], self.head, self.steps, self)
        columns = _selects_columns(index, self.ndim)
        if columns is not None and 0 < columns <= self.vocabulary and self.value is None:
            return self.then("columns", columns)
        return self.materialise()[index]

    def __setitem__(self, index, value):
        self.materialise()[index] = value

    def __getattr__(self, name):
        if name.startswith("__") and name != "__array__":
            raise AttributeError(name)
        return getattr(self.materialise(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        if func is torch.logsumexp and isinstance(args[0], LazyLogits):
            return args[0].logsumexp(*args[1:], **kwargs or {})
        if func is torch.nn.functional.cross_entropy and isinstance(args[0], LazyLogits):
            loss = _fused_cross_entropy(*args, **kwargs or {})
            if loss is not None:
                return loss
        args, kwargs = tree_map(_real, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce__(self):
        return _itself, (self.materialise(),)

    def __deepcopy__(self, memo):
        return self.materialise().detach().clone()

    def __repr__(self):
        state = "computed" if self.value is not None else "not computed"
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, {state})"

    __hash__ = object.__hash__


def _itself(value):
    return value


def _real(x):
    return x.materialise() if isinstance(x, LazyLogits) else x


def _versions(*tensors):
    """How often each was written to; None under torch.compile, which cannot say, and for inference tensors."""
    return None if torch.compiler.is_compiling() else [None if x.is_inference() else x._version for x in tensors]


def _autocast_dtype(device_type):
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _selects_rows(index, ndim):
    """Whether indexing by slices leaves the vocabulary, the last dimension, whole."""
    if torch.is_tensor(index):  # a mask of rows
        return index.dtype == torch.bool and index.ndim < ndim
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or isinstance(i, slice) for i in index) or index.count(Ellipsis) > 1:
        return False
    reaches_last = index[-1] is not Ellipsis and (Ellipsis in index or len(index) == ndim)
    return len(index) <= ndim and (not reaches_last or index[-1] == slice(None))


def _selects_columns(index, ndim):
    """n where indexing keeps the first n of the vocabulary and all rows; None otherwise."""
    if not isinstance(index, tuple) or len(index) < 2 or not isinstance(index[-1], slice):
        return None
    rows = index[0] is Ellipsis if len(index) == 2 else len(index) == ndim
    rows = rows and all(i is Ellipsis or isinstance(i, slice) and i == slice(None) for i in index[:-1])
    first = index[-1]
    return (
        first.stop
        if rows and first.start in (None, 0) and first.step in (None, 1) and type(first.stop) is int
        else None
    )


def _fused_cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0,
):  # fmt: skip
    """`LazyLogits.cross_entropy` with the arguments of torch.nn.functional.cross_entropy."""
    if size_average is not None or reduce is not None or not torch.is_tensor(target):
        return None
    return input.cross_entropy(target, weight, ignore_index, reduction, label_smoothing)


def _materialising(name):
    def method(self, *args):
        return getattr(self.materialise(), name)(*map(_real, args))

    method.__name__ = name
    return method


_OTHERS = "sub rsub rtruediv neg pow matmul rmatmul mod abs floordiv eq ne lt le gt ge and or invert"
_OTHERS += " bool len iter int float format array iadd isub"
for _name in _OTHERS.split():
    setattr(LazyLogits, f"__{_name}__", _materialising(f"__{_name}__"))

APPLY = {
    "add": torch.add,
    "columns": lambda value, count: value[..., :count],
    "mul": torch.mul,
    "div": torch.div,
    "tanh": lambda value, _: torch.tanh(value),
    "to": lambda value, dtype: value.to(dtype),
}
