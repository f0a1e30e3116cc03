"""Defer the computation of logits until an operation reads them.

The head of a patched model returns `LazyLogits`: a `torch.Tensor` with a shape, a dtype and a node in the graph, but
without memory. `__torch_function__` records the steps of the model before its loss (bias, scale, softcap, cast, a slice
of rows or of the vocabulary, a copy of one, another shape). A loss that understands the record computes its value from
hidden states and weight, a chunk of rows at a time. Every other function of torch computes the logits below autograd
(`__torch_dispatch__`), so gradients, hooks, grad modes, views and in-place writes are torch's own.

    hidden, weight, bias -> HeadFunction, ViewFunction -> StepFunction ... -> FusedFunction -> loss
                                   logits                  logits / 2.0        cross entropy

The backward runs through the same nodes. `FusedFunction` returns a `LossGradient` in place of the gradient of the
logits. It carries the gradients of hidden states, weight and bias; `HeadFunction` unwraps it. If a hook or a second
loss reads it, writes to it or adds to it, it computes its values, and the head's ordinary backward follows.
"""

import copy
import inspect
import weakref

import torch
from torch.nn.functional import linear  # as now: a program may replace it between the forward and the backward
from torch.overrides import enable_reentrant_dispatch

from liger_hw import _torch
from liger_hw.dispatch import Function
from liger_hw.kernels.vocabulary._in_forward import refuse_written, version_of
from liger_hw.patching.fused_functions import call_fused, cross_entropy, logsumexp
from liger_hw.patching.head_call import ADVICE, CHANGED, HeadCall, Source
from liger_hw.patching.pins import only_harmless_modes
from liger_hw.patching.record import (
    OPERATIONS,
    Record,
    apply_steps,
    is_view,
    next_record,
    operands,
    scale_and_softcap,
)

WRITTEN_BESIDE_A_VIEW = f"logits cannot be written in place within the model beside a view of them: {ADVICE}"
ANOTHER_OFFSET = f"a part of the logits that the model takes begins at another offset of its memory here: {ADVICE}"
NO_MEMORY = f"the logits were not computed and have no memory: read them by an operation of torch first, or {ADVICE}"


# Tensors without memory -----------------------------------------------------------------------------------------------

T = torch.Tensor
NEED_MEMORY = {  # functions that read a tensor's memory without a call of `__torch_dispatch__`
    T.tolist, T.numpy, T.__array__, T.data_ptr, T.untyped_storage, T.storage, T.is_shared, T.share_memory_,
    T.__dlpack__, T.__reduce_ex__, T.__deepcopy__, T.apply_, T.map_, T.map2_,
    getattr(T, "const_data_ptr", T.data_ptr),  # torch 2.11 lacks it
}  # fmt: skip
SET_DATA = T.data.__set__


def _functions(*names):
    """Return the functions and methods of torch with these names."""
    functions = {getattr(place, name, None) for place in (torch, T) for name in names}
    return {function for function in functions if callable(function)}


METADATA_FUNCTIONS = _functions("size", "dim", "numel", "stride", "is_contiguous", "requires_grad_", "register_hook")
PRINTS = T.__repr__, T.__format__  # with the name of the class
# first of all, because each loss reads them
READ_AT_EACH_LOSS = {T.shape.__get__, T.dtype.__get__, T.device.__get__, T.numel}
OFFSETS = _functions("storage_offset", "as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter")
STEPS = {function: operation for name, operation in OPERATIONS.items() for function in _functions(name)}
SUMS = _functions("add", "__add__")
FUSED = {
    torch.nn.functional.cross_entropy: cross_entropy,
    **dict.fromkeys((torch.special.logsumexp, *_functions("logsumexp")), logsumexp),
}


class Deferred(torch.Tensor):
    """A tensor whose values its cell computes when an operation of torch reads them.

    Until then torch's C code finds no memory and raises an error. From then on it finds the memory of the values.
    """

    @staticmethod
    def __new__(cls, cell):
        tensor = _torch.tensor_without_memory(cls, cell.shape, cell.strides, cell.dtype, cell.device, NO_MEMORY)
        tensor.cell = cell
        return tensor if cell.values is None else tensor.computed()

    def computed(self):
        """Compute the values and return the tensor, which then has their memory, sizes and strides."""
        _torch.share_memory(self, self.cell.read())
        return self

    def as_subclass(self, cls):  # torch asks no `__torch_function__`
        return torch.ops.aten.alias(self).as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == SET_DATA:
            tensor, values = args
            _torch.share_memory(tensor, values.detach())
            tensor.cell = tensor.cell.with_values(values.detach())
            return None
        if func in NEED_MEMORY:
            args, kwargs = _torch.tree_map_only(Deferred, _with_memory, (args, kwargs))
        elif _torch.saved_tensors_hooks() is not None and func.__name__ != "__get__" and func not in METADATA_FUNCTIONS:
            _torch.tree_map_only(Deferred, Deferred.computed, (args, kwargs))  # the hooks may ask for memory
        with _torch.without_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.view.default and list(args[0].shape) == list(args[1]):
            return type(args[0])(args[0].cell)  # as an autograd function returns its own argument
        written = [x for x in _torch.written_arguments(func, args, kwargs) if isinstance(x, Deferred)]
        with enable_reentrant_dispatch():  # without it autograd would not record, as the gradient of a loss needs
            for tensor in written:
                tensor.cell.before_write()
            args, kwargs = _torch.tree_map_only(Deferred, lambda tensor: tensor.computed().cell.values, (args, kwargs))
        result = func(*args, **kwargs)
        if not written:
            return result
        for tensor in written:
            tensor.computed()  # `set_` and `resize_` change memory, sizes and strides
        itself = {id(tensor.cell.values): tensor for tensor in written}  # autograd expects the written tensor itself
        return _torch.tree_map_only(torch.Tensor, lambda tensor: itself.get(id(tensor), tensor), result)


def _with_memory(tensor):
    """Return the values, in shared memory, with the tensor's `requires_grad`.

    A tensor in memory runs no operation here, so a mode, such as a compiler's, sees none.
    """
    with _torch.without_modes():
        return tensor.computed().cell.values.detach().requires_grad_(tensor.requires_grad)


class Cell:
    """Values behind a `LazyLogits` and its aliases.

    Attributes:
        call: the `HeadCall`.
        source, record: the head's tensors and the steps, which give the values.
        parent: the Cell of which the last step is a view, or None.
        strides: of a view, by which torch's `flatten` may copy; None for contiguous logits.
        views: the Cells whose parent it is.
        base: of a view, the Cell at the end of its parents.
        aliases: of a base, (reference to a Cell, a view of it by a function of torch in the graph, its version then).
        values: the logits as an ordinary tensor without a graph, or None until an operation reads them.
    """

    def __init__(self, call, source, record, before=None):
        self.call, self.source, self.record, self.values = call, source, record, None
        self.parent, self.strides, self.views = None, None, weakref.WeakSet()
        self.base, self.aliases = None, []
        if before is None or not is_view(*record.steps[-1]):
            return
        strides = before.strides or torch.empty(before.shape, device="meta").stride()
        whole = torch.empty_strided(before.shape, strides, device="meta")
        part = apply_steps(whole, record.steps[-1:])
        if _torch.storage_id(part) == _torch.storage_id(whole):  # `reshape` may copy
            self.parent, self.strides, self.base = before, part.stride(), before.base or before
            before.views.add(self)

    shape = property(lambda self: self.record.shape)
    dtype = property(lambda self: self.record.dtype)
    device = property(lambda self: self.record.hidden.device)

    @property
    def is_recorded(self):
        """Tell whether the next step may be recorded.

        Within a checkpoint of the model, which runs its steps again after the forward, each one computes.
        """
        return not self.has_memory and self.call.forward.within[1] == _torch.saved_tensors_hooks()

    @property
    def has_memory(self):
        """Tell whether an operation read these logits or those of which they are a view."""
        return self.values is not None or self.parent is not None and self.parent.has_memory

    def read(self):
        """Return the values; the first call computes them, also if several threads call at once."""
        with self.call.lock:
            if self.values is None:
                self.call.keep()
                inference = torch.inference_mode(self.source.tensors[0].is_inference())
                # as in the forward, where the unpatched model computed them
                with _torch.hidden_from_modes(), inference, torch.no_grad():
                    if self.parent is not None:
                        self.values = _torch.from_first_element(apply_steps(self.parent.read(), self.record.steps[-1:]))
                    else:  # a program may have written to the parent's values
                        self.values = self.source.logits(self.record.steps)
        return self.values

    def with_values(self, values):
        """Return a Cell of the same source with these values."""
        cell = Cell(self.call, self.source, self.record)
        cell.values = values
        return cell

    @property
    def is_shared(self):
        """Tell whether other recorded logits share the memory."""
        return self.parent is not None or bool(self.views)

    def before_write(self):
        """Refuse to write to memory that other logits share: their graph would miss it."""
        if self.is_shared:
            raise RuntimeError(WRITTEN_BESIDE_A_VIEW)

    def watch(self, result):
        """Remember a view of shared memory that autograd recorded: it may be written to."""
        if self.is_shared and type(result) in _torch.PLAIN and result.requires_grad and _torch.is_view(result):
            (self.base or self).aliases.append((weakref.ref(self), result.detach(), _torch.tensor_version(result)))

    def before_read(self):
        """Refuse values whose graph misses a write through another view of their memory."""
        for cell, alias, version in (self.base or self).aliases:
            if cell() is not self and _torch.tensor_version(alias) != version:
                raise RuntimeError(WRITTEN_BESIDE_A_VIEW)


class LazyLogits(Deferred):
    """Logits without memory; see the module's docstring."""

    by_products = property(lambda self: self.cell.call.by_products)

    @property
    def fits(self):
        """Tell whether the logits are not computed and the ops support their steps."""
        return self.cell.is_recorded and scale_and_softcap(self.cell.record.steps) is not None

    def fuse(self, fused, ordinary, casts=True):
        """Apply `FusedFunction` to logits that fit."""
        call = self.cell.call
        # while the model's forward runs, the host does not wait
        self.cell.source.check_unchanged(sums_too=not call.forward.recording or self.device.type == "cpu")
        if call.has_a_loss:
            call.keep()
        call.has_a_loss = True
        return FusedFunction.apply(self, fused, ordinary, casts)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if torch.compiler.is_dynamo_compiling():  # a program's loss: its graph would lack the gradient
            return _torch.call_outside_graphs(cls.__torch_function__, func, types, args, kwargs)
        if func in READ_AT_EACH_LOSS:
            with _torch.without_torch_function():
                return func(*args)
        kwargs = kwargs or {}
        if func in OFFSETS and args and isinstance(args[0], LazyLogits) and args[0].cell.parent is not None:
            raise RuntimeError(ANOTHER_OFFSET)
        if func in PRINTS:
            return func(args[0].as_subclass(torch.Tensor), *args[1:], **kwargs)
        if len(types) > 1 and any(map(_is_foreign, types)):  # a program's class, which then decides
            args, kwargs = _torch.tree_map_only(Deferred, lambda x: x.as_subclass(torch.Tensor), (args, kwargs))
            return func(*args, **kwargs)
        if func in SUMS and len(args) == 2 and not kwargs and not isinstance(args[0], LazyLogits):
            args = args[::-1]
        if args and isinstance(args[0], LazyLogits) and args[0].cell.is_recorded:
            derived = _derived(func, args[0], args[1:], kwargs)
            if derived is not None:
                return derived
        if func is T.detach:
            caller = inspect.currentframe().f_back.f_globals.get("__name__")
            if caller == ZERO3_HOOKS and args[0].cell.values is None:
                return LazyLogits(args[0].cell)  # within an autograd function that only waits for the backward
            if caller == torch.nn.Parameter.__module__:
                raise TypeError(f"torch.nn.Parameter takes no lazy logits: pass logits.detach(), or {ADVICE}")
        if func is T.__setitem__ and isinstance(args[0], LazyLogits):
            args[0].cell.before_write()
        if func in WATCHES:
            _torch.tree_map_only(LazyLogits, lambda tensor: tensor.cell.call.keep(func in KEEPS), (args, kwargs))
        if func is not T.detach and torch.is_grad_enabled():
            _torch.tree_map_only(LazyLogits, lambda tensor: tensor.cell.before_read(), (args, kwargs))
        result = super().__torch_function__(func, types, args, kwargs)
        if args and isinstance(args[0], LazyLogits):
            args[0].cell.watch(result)
        return result


def _is_foreign(cls):
    return cls not in _torch.PLAIN and not issubclass(cls, Deferred)


ZERO3_HOOKS = "deepspeed.runtime.zero.parameter_offload"  # their module
KEEPS = {T.retain_grad, torch.autograd.grad}  # return the gradient of logits
WATCHES = {T.register_hook, T.grad_fn.__get__, *KEEPS}  # may read it


def _derived(func, logits, args, kwargs):
    """Return `func(logits, ...)` without computing the logits, or None."""
    if _torch.transforms_active():  # torch.func needs autograd functions of another form
        return None
    cell = logits.cell
    if func in FUSED:  # what traces a program's loss shall see the logits
        traces = not cell.call.forward.recording and (_torch.dispatch_modes() or torch.jit.is_tracing())
        return None if traces else call_fused(FUSED[func], logits, args, kwargs)
    # accelerate casts a model's outputs
    if func not in STEPS or not cell.call.forward.recording and func not in (T.to, T.float):
        return None
    record = next_record(cell.record, STEPS[func], args, kwargs)
    if record is None:
        return None
    is_itself = record is cell.record or func is T.contiguous and logits.is_contiguous()
    return logits if is_itself else StepFunction.apply(logits, record)


# The graph ------------------------------------------------------------------------------------------------------------


class FunctionOfLazyLogits(Function):
    """Autograd function between a head and its loss, for lazy logits only."""

    instead = ADVICE


class HeadFunction(FunctionOfLazyLogits):
    """Autograd function of F.linear(hidden, weight, bias) that returns `LazyLogits`."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, forward, parts=None):
        on_cpu, learns = hidden.device.type == "cpu", ctx.needs_input_grad[:3]
        source = Source(hidden, weight, bias, parts=parts or () if on_cpu else ())
        ctx.call = HeadCall(forward, source, learns)
        ctx.set_materialize_grads(False)  # None stays None, as after F.linear
        # what F.linear keeps for its backward: under autocast copies of another dtype
        same = [source.autocast_dtype in (None, tensor.dtype) for tensor in (hidden, weight)]
        # parts: weights whose columns `weight` has, of the layers whose input needs a gradient
        kept = [("weights" if parts else "weight", part) for part in parts or [weight] if learns[0] and same[1]]
        if on_cpu and learns[1] and same[0]:
            kept.append(("hidden states", source.tensors[0]))
        ctx.kept = [(name, version_of(tensor)) for name, tensor in kept]
        ctx.save_for_backward(hidden.new_empty(0))  # freed with the graph, after which torch refuses a second backward
        record = Record(source.tensors[0], weight.shape[0], source.autocast_dtype or hidden.dtype)
        return LazyLogits(Cell(ctx.call, source, record))

    @staticmethod
    def backward(ctx, grad):
        if grad is None:
            return (None,) * 5
        _ = ctx.saved_tensors  # torch's error, if the graph was freed; checkpointing allows one access
        source, kept = ctx.call.kept, ctx.kept
        if not _torch.backward_keeps_graph():  # hooks of engines hold the loss's graph through the layers' backward
            ctx.call.kept, ctx.kept = None, []  # torch swaps no weight that has weak references
        for name, seen in kept:
            if name != "hidden states":
                refuse_written("the head", seen)
        if grad.device.type == "cpu":
            _refuse_changed(source, [name for name, _ in kept])
        if isinstance(grad, LossGradient):
            if grad.cell.values is None:
                return *grad.cell.operand_gradients(), None, None
            grad = grad.cell.values
        source, learns = source or ctx.call.source(), ctx.needs_input_grad
        needed = [name for name, learn in zip(("weight", "hidden states"), learns) if learn]
        source.check_unchanged(needed)
        (hidden, weight, bias), dtype = source.tensors, source.autocast_dtype
        x, w = (hidden, weight) if dtype is None else (hidden.to(dtype), weight.to(dtype))
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            linear(grad, w.t()).to(hidden.dtype) if learns[0] else None,
            linear(rows.t(), x.reshape(-1, x.shape[-1]).t()).to(weight.dtype) if learns[1] else None,
            rows.sum(0).to(bias.dtype) if learns[2] else None,
            *(None, None),
        )


class ViewFunction(FunctionOfLazyLogits):
    """Autograd function after `HeadFunction` that keeps nothing, as the view that F.linear returns.

    A backward that ends at the logits (`inputs=[logits]`) executes it alone, and so frees nothing.
    """

    @staticmethod
    def forward(ctx, logits):
        ctx.set_materialize_grads(False)
        return LazyLogits(logits.cell)

    @staticmethod
    def backward(ctx, grad):
        return grad


def lazy_logits(*arguments):
    """Return the `LazyLogits` of a head; the arguments are those of `HeadFunction`."""
    return ViewFunction.apply(HeadFunction.apply(*arguments))


def _refuse_changed(source, read):
    """Raise a RuntimeError if a tensor of a head that F.linear's backward reads has changed.

    It also finds writes that torch does not count. On a GPU the host would wait for the answer.
    """
    for name, change in source.changes(read):
        if change == CHANGED:
            raise RuntimeError(
                f"the head's {name} changed between its forward and its backward, in which the unpatched model would "
                "mix both: call backward before anything that writes to them"
            )


class StepFunction(FunctionOfLazyLogits):
    """Autograd function of one more step."""

    @staticmethod
    def forward(ctx, logits, record):
        cell = logits.cell
        ctx.set_materialize_grads(False)
        ctx.call, ctx.steps, ctx.parent = cell.call, record.steps, (cell.shape, cell.dtype)
        return LazyLogits(Cell(cell.call, cell.source, record, cell))

    @staticmethod
    def backward(ctx, grad):
        shape, dtype = ctx.parent
        if grad is None:
            return None, None
        if isinstance(grad, LossGradient):
            if grad.cell.values is None:
                return LossGradient(grad.cell.before(shape, dtype)), None
            grad = grad.cell.values
        *before, step = ctx.steps
        with _torch.without_modes():
            with torch.no_grad():  # the derivative of other steps depends on no value
                logits = ctx.call.source().logits(before) if step[0] == "tanh" else grad.new_empty((), dtype=dtype)
            logits = logits.expand(shape).requires_grad_()
            stepped = apply_steps(logits, [step])
        return *torch.autograd.grad(stepped, logits, grad), None


class StandIn(FunctionOfLazyLogits):
    """Autograd function that returns tensors' values for leaves of their shapes without memory, or None."""

    @staticmethod
    def forward(ctx, tensors, *leaves):
        ctx.set_materialize_grads(False)
        values = [None if tensor is None else tensor.detach() for tensor in tensors]
        constant = [value for value, leaf in zip(values, leaves) if leaf is None and value is not None]
        ctx.mark_non_differentiable(*constant)
        return tuple(values)

    @staticmethod
    def backward(ctx, *grads):
        return None, *grads


class FusedFunction(FunctionOfLazyLogits):
    """Autograd function of a fused op on operands of lazy logits, with its own graph.

    Args:
        logits: LazyLogits.
        fused: as in `fused_functions`, but may return (value, *others without a gradient).
        ordinary: as there; used where an operation reads the gradient of the logits.
        casts: give `fused` the operands as autocast casts them for the head.
    """

    @staticmethod
    def forward(ctx, logits, fused, ordinary, casts):
        ctx.set_materialize_grads(False)
        call, source, steps = logits.cell.call, logits.cell.source, logits.cell.record.steps
        learning = zip(source.tensors, call.learns)
        leaves = [t.new_empty(()).expand(t.shape).requires_grad_() if learns else None for t, learns in learning]
        with torch.set_grad_enabled(ctx.needs_input_grad[0]):
            # the op shall not look for writes to the weight itself: HeadFunction knows which ones count
            tensors = StandIn.apply(source.tensors, *leaves)
            dtype = source.autocast_dtype if casts else None
            outputs = fused(*operands(*tensors, steps, dtype), *scale_and_softcap(steps), None)
        value, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.value, ctx.leaves, ctx.call, ctx.steps, ctx.ordinary = value, leaves, call, steps, ordinary
        ctx.logits = logits.shape, logits.dtype, logits.device
        ctx.save_for_backward(source.tensors[0].new_empty(0))  # as in HeadFunction
        ctx.mark_non_differentiable(*(other for other in others if other is not None))
        return value.detach() if not others else (value.detach(), *others)

    @staticmethod
    def backward(ctx, grad, *_):
        if grad is None:
            return None, None, None, None
        if _torch.compiles_backward():  # which loses the gradient's class
            raise RuntimeError(f"compiled autograd cannot run the backward of logits that were not computed: {ADVICE}")
        _ = ctx.saved_tensors  # torch's error, if the graph was freed
        cell = GradientCell(ctx, grad, *ctx.logits, len(ctx.steps))
        reads = ctx.call.gradient_stays or ctx.call.kept is not None and not is_scalable(grad)
        reads = reads or not only_harmless_modes()  # a mode of the program may change the unfused operations
        return cell.read() if reads else LossGradient(cell), None, None, None


def is_scalable(incoming):
    """Tell whether the unfused backward multiplies the gradients by `incoming`, as the ops do.

    Not if it is infinite: products with infinite gradients of logits add up to NaN. On a GPU the host would wait for
    the answer, so there the gradients are infinite.
    """
    return incoming.device.type != "cpu" or _torch.traced(incoming) or bool(incoming.isfinite().all())


class GradientCell:
    """Gradient of logits, as gradients of the operands or, once read, as values.

    Attributes:
        loss: the context of `FusedFunction`, with the loss, its graph and the leaves of this graph.
        incoming: the gradient of the loss.
        shape, dtype, device: of the logits.
        level: number of the record's steps before these logits.
    """

    strides = None

    def __init__(self, loss, incoming, shape, dtype, device, level):
        self.loss, self.incoming, self.level = loss, incoming, level
        self.shape, self.dtype, self.device = shape, dtype, device
        self.values = None
        self.kept = loss.call.kept  # the head's backward lets go of it; a hook may hold this gradient longer

    def before(self, shape, dtype):
        """Return the gradient one step earlier, where the logits had this shape and dtype."""
        return GradientCell(self.loss, self.incoming, shape, dtype, self.device, self.level - 1)

    def operand_gradients(self):
        leaves = self.loss.leaves
        present = [leaf for leaf in leaves if leaf is not None]
        grads = iter(torch.autograd.grad(self.loss.value, present, self.incoming, allow_unused=True))
        return tuple(None if leaf is None else next(grads) for leaf in leaves)

    def read(self):
        if self.values is None:
            steps = self.loss.steps
            with _torch.without_modes():
                with torch.no_grad():
                    leaf = (self.kept or self.loss.call.source()).logits(steps[: self.level])
                leaf.requires_grad_()
                output = self.loss.ordinary(apply_steps(leaf, steps[self.level :]))
                value = output[0] if isinstance(output, tuple) else output
            with _torch.without_torch_function():  # modes of dispatch see the operations of a backward
                (self.values,) = torch.autograd.grad(value, leaf, self.incoming)
        return self.values

    before_write = read

    def with_values(self, values):
        cell = copy.copy(self)
        cell.values = values
        return cell


class LossGradient(Deferred):
    """Gradient of logits that were never computed."""
