"""Record the steps on logits in a plain object, under torch.compile or tensor parallelism.

The compiler cannot trace the tensor subclass of `lazy_logits`, and needs none: no hook or mode runs while it traces.
The object records the operations that a loss understands; every other operation gets the logits as an ordinary tensor.
Only transformers' own forwards and losses get it: other code may need a tensor, for an autograd function for example.
The object stays within the forward: outputs hold an `UnreadableLogits` in its place.
"""

import torch
import torch.nn.functional as F

from liger_hw._torch import tree_map_only
from liger_hw.kernels.vocabulary.sharded_head import all_columns
from liger_hw.patching.fused_functions import call_fused, cross_entropy, logsumexp
from liger_hw.patching.head_call import ADVICE
from liger_hw.patching.record import (
    OPERATIONS,
    Record,
    apply_steps,
    autocast_dtype,
    is_view,
    next_record,
    operands,
    scale_and_softcap,
)


class TracedLogits:
    """Uncomputed logits: `head(hidden)` and the steps after it.

    Args:
        head: the `torch.nn.Linear`.
        record: a `Record` whose hidden states have their graph.
        before: the logits to which the last step was applied, or None.

    Attributes:
        group: the `DimensionShard` of the head's vocabulary, or None.
        parent: the logits of which these are a view, or None.
        views: those whose parent these are.
        values: the logits as a tensor, once an operation read them or others in their memory, or None.
        records: whether autograd recorded the head.
    """

    group = None

    def __init__(self, head, record, before=None):
        self.head, self.record, self.values, self.views = head, record, None, []
        self.by_products = {} if before is None else before.by_products
        self.records = torch.is_grad_enabled() if before is None else before.records
        self.parent = before if before is not None and is_view(*record.steps[-1]) else None
        if self.parent is not None:
            self.parent.views.append(self)

    @classmethod
    def after(cls, head, hidden):
        dtype = autocast_dtype(hidden.device.type) or hidden.dtype
        return cls(head, Record(hidden, head.weight.shape[0], dtype))

    @property
    def fits(self):
        """Tell whether the logits are not computed and the ops support their steps."""
        return self.values is None and scale_and_softcap(self.record.steps) is not None

    def _steps(self):
        return [step for step in self.record.steps if step[0] not in ("rows", "view")]  # already applied to hidden

    def _tensors(self):
        return self.record.hidden, self.head.weight, self.head.bias

    def computed(self):
        """Return the values and keep them, as the model may write to them."""
        if self.values is None and self.parent is not None:
            self.parent.computed()
        elif self.values is None:
            with torch.set_grad_enabled(self.records):  # as in the forward; the model may read within no_grad
                self.keep(apply_steps(all_columns(F.linear(*self._tensors()), self.group), self._steps()))
        return self.values

    def keep(self, values):
        self.values = values
        for view in self.views:  # now: `reshape` may copy, and the copy has no later write
            view.keep(apply_steps(values, view.record.steps[-1:]))

    def for_outputs(self):
        return UnreadableLogits() if self.values is None else self.values

    def __setitem__(self, index, value):
        self.computed()[index] = value

    def fuse(self, fused, ordinary, casts=True):
        """Call `fused` of `fused_functions` for steps that the ops support."""
        steps, dtype = self._steps(), autocast_dtype(self.device.type) if casts else None
        return fused(*operands(*self._tensors(), steps, dtype), *scale_and_softcap(steps), self.group)

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

    def logsumexp(self, *args, **kwargs):
        sums = call_fused(logsumexp, self, args, kwargs)
        return self.computed().logsumexp(*args, **kwargs) if sums is None else sums

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("register_hook", "retain_grad", "grad_fn"):
            raise RuntimeError(_NO_GRADIENT)
        return getattr(self.computed(), name)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], TracedLogits):
            logits, *others = args
            if func in (torch.tanh, torch.logsumexp):
                return getattr(logits, func.__name__)(*others, **kwargs)
            loss = call_fused(cross_entropy, logits, others, kwargs) if func is F.cross_entropy else None
            if loss is not None:
                return loss
        if func is torch.autograd.grad:
            raise RuntimeError(_NO_GRADIENT)
        args, kwargs = tree_map_only(TracedLogits, lambda logits: logits.computed(), (args, kwargs))
        return func(*args, **kwargs)


def _method(name, operation):
    """Return the method of `TracedLogits` for an operation of `OPERATIONS`."""

    def method(self, *args, **kwargs):
        record = None if self.values is not None else next_record(self.record, operation, args, kwargs)
        if record is None:
            return getattr(self.computed(), name)(*args, **kwargs)
        return self if record is self.record else type(self)(self.head, record, self)

    return method


for _name, _operation in OPERATIONS.items():
    setattr(TracedLogits, _name, _method(_name, _operation))


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
        setattr(TracedLogits, _operation, lambda self, *args, name=_operation: getattr(self.computed(), name)(*args))


def _write_by(name):
    def method(self, other):
        getattr(self.computed(), name)(other)
        return self

    return method


for _name in ("__iadd__", "__isub__", "__imul__", "__itruediv__"):
    setattr(TracedLogits, _name, _write_by(_name))

_NO_GRADIENT = f"a forward that is compiled, or whose head is sharded, computes no gradient of its logits: {ADVICE}"
_WHY = (
    "a training forward that is compiled, or whose head is sharded, computes its loss without logits, so there are "
    f"none to read: {ADVICE}"
)
