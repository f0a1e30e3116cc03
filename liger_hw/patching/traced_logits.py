"""Record the steps on logits in a plain object, under torch.compile or tensor parallelism.

The compiler cannot trace the tensor subclass of `lazy_logits`, and needs none: no hook or mode runs while it traces.
The object records the operations that a loss understands; every other operation gets the logits as an ordinary tensor.
The object stays within the forward: outputs hold an `UnreadableLogits` in its place.
"""

import torch

from liger_hw._torch import tree_map_only
from liger_hw.kernels.vocabulary.sharded_head import all_columns
from liger_hw.patching.lazy_logits import (
    ADVICE,
    COMPUTE,
    Record,
    apply_steps,
    autocast_dtype,
    operands,
    scale_and_softcap,
)


class TracedLogits:
    """Uncomputed logits: `head(hidden)` and the steps after it.

    Args:
        head: the `torch.nn.Linear`.
        record: a `Record` whose hidden states have their graph.

    Attributes:
        group: the `DimensionShard` of the head's vocabulary, or None.
    """

    group = None

    def __init__(self, head, record):
        self.head, self.record = head, record
        self.by_products = {}

    @classmethod
    def of(cls, head, hidden):
        dtype = autocast_dtype(hidden.device.type) or hidden.dtype
        return cls(head, Record(hidden, head.weight.shape[0], dtype))

    @property
    def fits(self):
        """Tell whether the ops support the steps."""
        return scale_and_softcap(self.record.steps) is not None

    def _steps(self):
        return [step for step in self.record.steps if step[0] not in ("rows", "view")]  # already applied to hidden

    def _tensors(self):
        return self.record.hidden, self.head.weight, self.head.bias

    def compute(self):
        return apply_steps(all_columns(torch.nn.functional.linear(*self._tensors()), self.group), self._steps())

    def fuse(self, fused):
        """Call `fused(x (N, H), weight, bias, logit_scale, softcap, group)` for steps that the ops support."""
        steps, dtype = self._steps(), autocast_dtype(self.device.type)
        return fused(*operands(*self._tensors(), steps, dtype), *scale_and_softcap(steps), self.group)

    def _fused(self, name, *args, **kwargs):
        """Apply a function of `lazy_logits.COMPUTE`; return None where it does not fit."""
        functions = COMPUTE[name](self, *args, **kwargs) if self.fits else None
        return None if functions is None else self.fuse(functions[0])

    shape = property(lambda self: self.record.shape)
    ndim = property(lambda self: self.record.hidden.ndim)
    dtype = property(lambda self: self.record.dtype)
    device = property(lambda self: self.record.hidden.device)

    def dim(self):
        return self.ndim

    def size(self, dim=None):
        return self.shape if dim is None else self.shape[dim]

    def numel(self):
        return self.shape.numel()

    def _after(self, record):
        if record is None:
            return None
        later = type(self)(self.head, record)
        later.by_products = self.by_products
        return later

    def to(self, *args, **kwargs):
        dtype = args[0] if len(args) == 1 and not kwargs else kwargs.get("dtype") if not args else None
        if isinstance(dtype, torch.dtype) and not set(kwargs) - {"dtype"}:
            if dtype == self.dtype:
                return self
            later = self._after(self.record.cast(dtype))
            if later is not None:
                return later
        return self.compute().to(*args, **kwargs)

    def float(self):
        return self.to(torch.float32)

    def contiguous(self):
        return self

    def view(self, *shape):
        later = self._after(self.record.view(*shape))
        return self.compute().view(*shape) if later is None else later

    reshape = view

    def tanh(self):
        return self._after(self.record.tanh())

    def logsumexp(self, dim, keepdim=False):
        fused = self._fused("logsumexp", dim, keepdim)
        return self.compute().logsumexp(dim, keepdim) if fused is None else fused

    def __add__(self, other):
        later = self._after(self.record.add(other))
        return self.compute() + other if later is None else later

    def __mul__(self, other):
        later = self._after(self.record.multiply(other))
        return self.compute() * other if later is None else later

    def __truediv__(self, other):
        later = self._after(self.record.divide(other))
        return self.compute() / other if later is None else later

    __radd__, __rmul__ = __add__, __mul__

    def __getitem__(self, index):
        later = self._after(self.record.index(index))
        return self.compute()[index] if later is None else later

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.compute(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.tanh and isinstance(args[0], TracedLogits):
            return args[0].tanh()
        if func is torch.logsumexp and isinstance(args[0], TracedLogits):
            return args[0].logsumexp(*args[1:], **kwargs)
        if func is torch.nn.functional.cross_entropy and isinstance(args[0], TracedLogits):
            loss = args[0]._fused("cross_entropy", *args[1:], **kwargs)
            if loss is not None:
                return loss
        args, kwargs = tree_map_only(TracedLogits, lambda logits: logits.compute(), (args, kwargs))
        return func(*args, **kwargs)


class UnreadableError(AttributeError, RuntimeError):
    """Error of a read of logits that do not exist.

    An AttributeError too, as libraries ask outputs by `hasattr` whether they are tensors.
    """


class UnreadableLogits:
    """Placeholder in a forward's outputs for logits that will not be computed.

    Outside of a compiled forward they could be gathered later, but only if all ranks read them.
    """

    def __repr__(self):
        return f"UnreadableLogits({_WHY})"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnreadableError(_WHY)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise UnreadableError(_WHY)


def _refuse_to_read(logits, *args):
    raise UnreadableError(_WHY)


for _name in (
    "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "neg",
    "abs", "eq", "ne", "lt", "le", "gt", "ge", "getitem", "len", "iter", "bool", "float", "int", "array",
):  # fmt: skip
    _operation = f"__{_name}__"
    setattr(UnreadableLogits, _operation, _refuse_to_read)
    if _operation not in vars(TracedLogits):
        setattr(TracedLogits, _operation, lambda self, *args, name=_operation: getattr(self.compute(), name)(*args))

_WHY = (
    "a training forward that is compiled, or whose head is sharded, computes its loss without logits, so there are "
    f"none to read: {ADVICE}"
)
