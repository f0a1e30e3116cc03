"""Logits that are computed when somebody looks at them.

Between a language model's head and its loss there is at most a scale, a softcap, a cast or a slice of rows.
`LazyLogits` stands for the head's output, remembers those steps, and is consumed by a fused linear cross entropy that
never holds the logits. Whatever else is done to it, it computes the logits as the head would have, replays the steps,
and goes on as that tensor.
"""

import torch
from torch.utils._pytree import tree_map

PLAIN = (torch.Tensor, torch.nn.Parameter)  # types whose memory is their own, which a DTensor's is not


class LazyLogits:
    """scale, softcap, cast and slice of `head(hidden)`, not yet computed.

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
        self.vocabulary = head.weight.shape[0] if of is None else of.vocabulary
        self.versions = _versions(hidden, head.weight)
        self.value = None

    def then(self, name, argument=None):
        """These logits after one more step, or None if they have been computed: somebody may have written to them."""
        if self.value is None:
            return LazyLogits(self.hidden, self.head, (*self.steps, (name, argument)), self)

    @property
    def operands(self):
        """hidden, weight and bias in the dtype that the head would compute in."""
        tensors, dtype = (self.hidden, self.head.weight, self.head.bias), self.autocast_dtype
        return tensors if dtype is None else tuple(None if x is None else x.to(dtype) for x in tensors)

    def scale_and_softcap(self):
        """(logit_scale, softcap) of the ops for these steps, softcap None where there is no tanh; None where the ops
        have no such numbers."""
        numerator, denominator, capped, cap = 1.0, 1.0, False, None
        for name, argument in self.steps:
            if name == "to":
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
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or isinstance(i, slice) for i in index) or index.count(Ellipsis) > 1:
        return False
    reaches_last = index[-1] is not Ellipsis and (Ellipsis in index or len(index) == ndim)
    return len(index) <= ndim and (not reaches_last or index[-1] == slice(None))


def _materialising(name):
    def method(self, *args):
        return getattr(self.materialise(), name)(*map(_real, args))

    method.__name__ = name
    return method


_OTHERS = "add radd sub rsub rtruediv neg pow matmul rmatmul mod abs floordiv eq ne lt le gt ge and or invert"
_OTHERS += " bool len iter int float format array iadd isub"
for _name in _OTHERS.split():
    setattr(LazyLogits, f"__{_name}__", _materialising(f"__{_name}__"))

APPLY = {
    "mul": torch.mul,
    "div": torch.div,
    "tanh": lambda value, _: torch.tanh(value),
    "to": lambda value, dtype: value.to(dtype),
}
