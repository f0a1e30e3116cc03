"""Logits that are computed when somebody looks at them.

Between a language model's head and its loss there is at most a scale, a softcap, a cast or a slice of rows. `LazyLogits`
stands for the head's output, remembers those steps, and is consumed by a fused linear cross entropy that never holds
the logits. Whatever else is done to it, it computes the logits as the head would have, replays the steps, and goes on as
that tensor.
"""

import torch
from torch.utils._pytree import tree_map


class LazyLogits:
    """scale, softcap, cast and slice of `linear(hidden, weight, bias)`, not yet computed.

    Args:
        hidden: (..., H).
        weight: (V, H).
        bias: (V,) or None.
        steps: what happened to the logits since, as (name, argument) pairs.
        extras: a dictionary that every descendant shares; the loss leaves its by-products there.
    """

    def __init__(self, hidden, weight, bias, steps=(), extras=None, context=None):
        self.hidden, self.weight, self.bias, self.steps = hidden, weight, bias, steps
        self.extras = {} if extras is None else extras
        kind = hidden.device.type
        autocast = torch.is_autocast_enabled(kind)
        self.context = context or (
            autocast,
            torch.get_autocast_dtype(kind) if autocast else hidden.dtype,
            hidden._version,
            weight._version,
        )
        self.value = None

    def then(self, name, argument=None, hidden=None):
        """These logits after one more step, or after a step on rows, which the hidden states take at once."""
        if self.value is not None:  # somebody may have written to it
            return NotImplemented
        hidden = self.hidden if hidden is None else hidden
        steps = self.steps + ((name, argument),) if name else self.steps
        context = self.context[:2] + (hidden._version, self.context[3])
        return LazyLogits(hidden, self.weight, self.bias, steps, self.extras, context)

    @property
    def operands(self):
        """hidden, weight and bias in the dtype that the head would compute in."""
        autocast, dtype, *_ = self.context
        if not autocast:
            return self.hidden, self.weight, self.bias
        return self.hidden.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def scale_and_softcap(self):
        """(logit_scale, softcap) such that the steps are softcap * tanh(logit_scale * logits / softcap), softcap None for
        no tanh; None where no such numbers exist."""
        numerator, denominator, capped = 1.0, 1.0, False
        cap = None
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
            RuntimeError: the hidden states or the head's weight were written to since the forward, by an optimizer step
                for one, so that the logits of that forward can no longer be had.
        """
        if self.value is None:
            autocast, dtype, hidden_version, weight_version = self.context
            if (self.hidden._version, self.weight._version) != (hidden_version, weight_version):
                raise RuntimeError(
                    "the logits were not kept in the forward, and the head's weight or the hidden states have changed since "
                    "then (an optimizer step?). Read outputs.logits before that, or call the model with skip_logits=False"
                )
            with torch.autocast(self.hidden.device.type, dtype if autocast else None, enabled=autocast):
                value = torch.nn.functional.linear(self.hidden, self.weight, self.bias)
                for name, argument in self.steps:
                    value = APPLY[name](value, argument)
            self.value = value
        return self.value

    shape = property(lambda self: self.hidden.shape[:-1] + self.weight.shape[:1])
    ndim = property(lambda self: self.hidden.ndim)
    device = property(lambda self: self.hidden.device)
    requires_grad = property(lambda self: self.materialise().requires_grad)

    @property
    def dtype(self):
        casts = [argument for name, argument in self.steps if name == "to"]
        return casts[-1] if casts else self.context[1]

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
            if later is not NotImplemented:
                return later
        return self.materialise().to(*args, **kwargs)

    def __mul__(self, other):
        later = self.then("mul", other) if type(other) in (int, float) else NotImplemented
        return self.materialise() * other if later is NotImplemented else later

    __rmul__ = __mul__

    def __truediv__(self, other):
        later = self.then("div", other) if type(other) in (int, float) else NotImplemented
        return self.materialise() / other if later is NotImplemented else later

    def tanh(self):
        later = self.then("tanh")
        return self.materialise().tanh() if later is NotImplemented else later

    def __getitem__(self, index):
        if self.value is None and _selects_rows(index, self.ndim):
            return self.then(None, hidden=self.hidden[index])
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
        real = (args, kwargs or {})
        args, kwargs = tree_map(lambda x: x.materialise() if isinstance(x, cls) else x, real)
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


def _selects_rows(index, ndim):
    """Whether indexing by slices leaves the vocabulary, the last dimension, whole."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(i is Ellipsis or isinstance(i, slice) for i in index) or index.count(Ellipsis) > 1:
        return False
    reaches_last = index[-1] is not Ellipsis and (Ellipsis in index or len(index) == ndim)
    return len(index) <= ndim and (not reaches_last or index[-1] == slice(None))


def _materialising(name):
    def method(self, *args):
        args = [a.materialise() if isinstance(a, LazyLogits) else a for a in args]
        return getattr(self.materialise(), name)(*args)

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
