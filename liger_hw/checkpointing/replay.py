"""Keep chosen results of a layer's forward, and give them to its recomputation.

`torch.utils.checkpoint` runs the forward under `Keeping` and the recomputation under `Replaying`. Operations are
numbered alike in both runs. Where the recomputation has come to a kept result by other operations than the forward, it
computes the result again.
"""

import contextlib
import functools
import weakref

import torch
from torch.utils import checkpoint

from liger_hw._torch import alias, backward_keeps_graph, tensor_version
from liger_hw.checkpointing.forward_mode import ForwardMode
from liger_hw.checkpointing.operations import MUTATES, NUMBERED, kind_of, memory_of, random_state, tensors_in, written
from liger_hw.checkpointing.trace import Trace
from liger_hw.checkpointing.transfers import KEPT_TENSOR_CHANGED, Offloaded

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kept:
    """Hold a tensor on its device until the backward needs it."""

    def __init__(self, x):
        self.x, self.version, self.memory = x, tensor_version(x), memory_of(x)

    def take(self):
        """Return the tensor.

        Raises:
            RuntimeError: the program has written to it.
        """
        if tensor_version(self.x) != self.version:
            raise RuntimeError(KEPT_TENSOR_CHANGED)
        return alias(self.x)  # autograd gives the result of each recomputation a history


class Frame:
    """Hold the kept results of one call of a layer.

    Args:
        actions: position of an operation -> (operation, whether its results go to host memory).
        transfers: copies to host memory.
        hidden: the layer's input, if it goes to host memory, or None. It is the only tensor that checkpointing saves:
            hooks take the place of torch's own checks of the others.
        prove: function of positions whose kept results differ from recomputed ones. With it the recomputation runs
            kept operations too and compares; None: it uses kept results.
    """

    def __init__(self, actions, transfers, hidden=None, prove=None):
        self.actions, self.transfers, self.prove, self.results = actions, transfers, prove, {}
        self.hidden = hidden
        self.input = None  # a weak reference to the `Offloaded` of the layer's input

    def saves_inputs(self):
        """Return the context in which torch's checkpointing saves the layer's inputs."""
        hidden, self.hidden = self.hidden, None
        if hidden is None:
            return contextlib.nullcontext()

        def save(x):
            if not x.numel():  # checkpointing saves an empty tensor of its own
                return x
            offloaded = Offloaded(x, self.transfers)
            self.input = weakref.ref(offloaded)
            return offloaded

        return torch.autograd.graph.saved_tensors_hooks(save, _saved_input)

    def contexts(self, hooked, layer):
        """Return the contexts of the forward and of the recomputation, for `torch.utils.checkpoint`.

        Args:
            hooked: of `ForwardMode`.
            layer: the module.
        """
        traces = functools.partial(Trace, layer, {})
        return Keeping(self, hooked, traces), Replaying(self, hooked, traces)

    def keep(self, position, digest, results, offload):
        """Keep the results of one operation; `digest` is of the operations up to it."""
        self.results[position] = digest, self._kept(results, offload)

    def _kept(self, x, offload):  # no function within `keep`: one that calls itself would hold the frame
        if isinstance(x, (list, tuple)):
            return type(x)(self._kept(part, offload) for part in x)
        if not isinstance(x, torch.Tensor):
            return x
        return Offloaded(x, self.transfers) if offload and self.transfers.can_copy(x) else Kept(alias(x))

    def forget(self, changed):
        """Forget kept results that share memory with the tensors `changed`: they will be recomputed."""
        memory = {memory_of(x) for x in changed}
        for position, (_, results) in list(self.results.items()):
            if any(x.memory in memory for x in _holders(results)):
                del self.results[position]

    def take(self, position, operation, digest, recompute):
        """Return the kept results of an operation, or `recompute()`.

        Args:
            digest: of the recomputation's operations up to this one.
        """
        if position not in self.results:
            return recompute()
        before, results = self.results[position]
        if before != digest:
            if self.prove is not None:
                self.prove(position)
            return recompute()
        if self.prove is None:
            results = _taken(results)
        else:
            expected = recompute()
            pairs = zip(tensors_in(_taken(results)), tensors_in(expected))
            if torch.Tag.nondeterministic_seeded in operation.tags:
                # attention without dropout leaves the state of the random generator, integers, uninitialised
                pairs = [(kept, again) for kept, again in pairs if again.is_floating_point()]
            if not all(_equal(kept, again) for kept, again in pairs):
                self.prove(position)
            results = expected
        if not backward_keeps_graph():
            del self.results[position]
        return results

    def prefetch(self):
        """Start the copies of all offloaded tensors back to the device."""
        for x in self.offloaded:
            x.prefetch()

    @property
    def offloaded(self) -> list[Offloaded]:
        """Return the tensors in host memory."""
        holders = [x for _, results in self.results.values() for x in _holders(results)]
        holders.append(self.input and self.input())
        return [x for x in holders if isinstance(x, Offloaded)]


def _saved_input(held):
    return held.take() if isinstance(held, Offloaded) else held


def _holders(results):
    if isinstance(results, (list, tuple)):
        for x in results:
            yield from _holders(x)
    elif isinstance(results, (Kept, Offloaded)):
        yield results


def _taken(results):
    if isinstance(results, (list, tuple)):
        return type(results)(map(_taken, results))
    return results.take() if isinstance(results, (Kept, Offloaded)) else results


def _equal(a, b):
    """Tell whether two tensors have the same bits; NaNs may be equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = BITS.get(a.itemsize)  # torch.equal makes a byte for each element that it compares
    return torch.equal(*(x.view(bits) if bits else x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


class _Numbering(ForwardMode):
    """Number the operations of a layer."""

    def __init__(self, frame, hooked, traces):
        super().__init__(hooked)
        self.frame, self.traces, self.trace = frame, traces, None

    def begin(self):
        self.trace = self.traces()  # a second recomputation begins anew

    def see(self, operation, args, kwargs):
        kind = kind_of(operation, args)
        if kind is MUTATES:
            self.before_write(operation, args, kwargs)
            self.trace.mutates(operation, args, kwargs)
        if kind is NUMBERED:
            position = self.trace.add(operation, args, kwargs)
            return self.run(position, operation, functools.partial(operation, *args, **kwargs))
        results = operation(*args, **kwargs)
        if kind is not MUTATES:
            self.trace.passed(operation, args, results)
        return results

    def before_write(self, operation, args, kwargs):
        """Prepare for an operation that writes to its arguments."""

    def run(self, position, operation, compute):
        """Return the results of a numbered operation, after `Trace.note_results` of them."""
        raise NotImplementedError


class Keeping(_Numbering):
    """Run a layer's forward and keep the results that the plan names."""

    def before_write(self, operation, args, kwargs):
        if self.frame.results:
            self.frame.forget(written(operation, args, kwargs))

    def run(self, position, operation, compute):
        planned, offload = self.frame.actions.get(position, (None, False))
        keeps, device = planned is operation, self.frame.transfers.device
        before = random_state(operation, device) if keeps else None
        results = compute()
        self.trace.note_results(results)
        # what draws random numbers now, if not when it was recorded, is recomputed: the next ones depend on it
        if keeps and (before is None or torch.equal(before, random_state(operation, device))):
            self.frame.keep(position, self.trace.digest, results, offload)
        return results


class Replaying(_Numbering):
    """Recompute a layer, except for the operations whose results are kept."""

    def run(self, position, operation, compute):
        results = self.frame.take(position, operation, self.trace.digest, compute)
        self.trace.note_results(results)
        return results


def checkpointed(function, args, contexts=checkpoint.noop_context_fn, saves_inputs=contextlib.nullcontext):
    """Call `function(*args)` under torch's checkpointing without reentrance.

    Args:
        contexts: function that returns the contexts of the forward and of the recomputation.
        saves_inputs: function that returns the context in which `args` are saved; within the forward, hooks of the
            checkpointing take its place.
    """
    with saves_inputs():
        return checkpoint.checkpoint(function, *args, use_reentrant=False, context_fn=contexts)
