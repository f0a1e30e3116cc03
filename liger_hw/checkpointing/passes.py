"""Run the passes of a model's layers: measure, plan, prove the plan, and follow it."""

import contextlib
import functools
import logging
import weakref

import torch
from torch.utils import checkpoint

from liger_hw._torch import after_backward
from liger_hw.checkpointing import switch
from liger_hw.checkpointing.budget import BudgetTooSmall, bytes_of, size
from liger_hw.checkpointing.forward_mode import hooks_of, runs_hooks
from liger_hw.checkpointing.memory import DeviceMemory
from liger_hw.checkpointing.operations import tensors_in
from liger_hw.checkpointing.phases import Pass, Phase, with_inputs
from liger_hw.checkpointing.planning import Measurements, make_plan
from liger_hw.checkpointing.recording import DeviceClock, LayerRecorder
from liger_hw.checkpointing.replay import Frame, checkpointed
from liger_hw.checkpointing.transfers import Transfers, buffer_bytes
from liger_hw.checkpointing.weights import can_recompute, with_these_weights

logger = logging.getLogger("liger_hw")

LAYER_FLAGS = "gradient_checkpointing", "_gradient_checkpointing_func"  # attributes of layers that transformers reads
LARGE_INPUTS = 0.25  # of the free memory: if the inputs of all layers take more, measured passes offload them
FREE_SHARE = 0.05  # of the device's memory that budget="auto" leaves free, for fragmentation
GROWTH = 0.005  # of the budget: memory outside the layers that grew by more is planned for
WATCHED = 64  # passes after a plan in which that memory is watched; the optimizer's state appears in the first ones
COMPILED_MODEL = (
    "liger_hw.activations plans eager layers, and this model runs under torch.compile, which decides itself what it "
    "keeps: undo the plan (liger_hw.activations(model, None)) and set torch._functorch.config.activation_memory_budget"
)


class LayerCall:
    """Run a decoder layer: transformers calls this in the place of its checkpointing function.

    A copied or unpickled one checkpoints whole layers.
    """

    def __init__(self, activations, layer):
        self.activations, self.layer = activations, weakref.ref(layer)

    def __call__(self, function, *args):
        return self.activations.call(self.layer(), function, args)

    def __reduce__(self):
        return functools.partial, (checkpointed_whole,)


class WhileRecording:
    """Be true while autograd records.

    Older transformers take the cache from a layer whose `gradient_checkpointing` is true, also without gradients.
    """

    def __bool__(self):
        return torch.is_grad_enabled()


def plans_of(module):
    """Return the `Activations` that run layers within a module."""
    calls = [vars(m).get("_gradient_checkpointing_func") for m in module.modules()]
    return list({id(call.activations): call.activations for call in calls if isinstance(call, LayerCall)}.values())


def checkpointed_whole(function, *args):
    """Call a layer of a copied or unpickled model, which the backward recomputes."""
    # versions of transformers pass partial(forward, layer, ...) or a partial of the layer's method
    bound = getattr(getattr(function, "func", function), "__self__", None)
    layer = next((x for x in (bound, *getattr(function, "args", ())) if isinstance(x, torch.nn.Module)), None)
    if layer is None or torch.compiler.is_compiling():
        return checkpointed(function, args)
    if not tensors_to_recompute(function, args):
        return function(*args)
    return checkpointed(with_these_weights(function, layer), without_caches(args))


def tensors_to_recompute(function, args):
    """Return the tensors that a layer takes; none where it cannot be recomputed."""
    tensors = list(tensors_in([*args, *(getattr(function, "keywords", None) or {}).values()]))
    return tensors if torch.is_grad_enabled() and can_recompute(*tensors) else []


def without_caches(args):
    """Return a layer's arguments without caches, which a recomputation would fill twice."""
    return [None if hasattr(x, "get_seq_length") else x for x in args]


class Activations:
    """Run the decoder layers of a model, and decide what they keep for the backward.

    Args:
        model: the module around all layers.
        layers: the modules.
        budget, host_bytes: of `budget.bytes_of`, and bytes.
        device: of the layers; None if they may move before the first pass.

    Attributes:
        plan: the `ActivationPlan` of the last passes, or None while it measures.
        phase: of the next pass; `phases` tells how it changes.
        current: the `Pass` that runs, or ran last.
        rejected: structure of a record -> positions of operations whose kept results differed from recomputed ones.

    Raises:
        ValueError: as `budget.bytes_of`.
    """

    def __init__(self, model, layers, budget, host_bytes, device):
        self.device, self.budget, self.host_bytes = None, bytes_of(budget, device), host_bytes
        self.phase, self.plan, self.current, self.pcie_bandwidth = Phase.WARM_UP, None, None, None
        self.passes_under_plan, self.large_inputs = 0, False
        # the most values of each layer's input: a decoder's grow without its encoder's
        self.sizes, self.has_grown, self.measures_anew = {}, False, False
        self.measured, self.rejected, self.rejects_anew = Measurements(), {}, False
        self.layers, self.former = layers, []
        self.hooks = [hook for layer in layers for hook in hooks_of(layer)]
        self.take_layers()
        self.watched = switch.watch(model.modules(), plans_of)
        if device is not None:
            self._settle(device)

    def _settle(self, device):
        """Take the layers' device and a parameter: a move may replace both."""
        self.budget, self.device = bytes_of(self.budget, device), device
        self.clock, self.transfers, self.memory = DeviceClock(device), Transfers(device), DeviceMemory(device)
        self.failures = self.memory.failures()
        self.trainable = next((p for layer in self.layers for p in layer.parameters() if p.requires_grad), None)

    def take_layers(self):
        """Run the layers from now on, and remember the checkpointing that they have."""
        self.former = [{name: vars(x)[name] for name in LAYER_FLAGS if name in vars(x)} for x in self.layers]
        for layer in self.layers:  # not the model, whose masks for packed sequences depend on it
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = WhileRecording(), LayerCall(self, layer)

    def undo(self):
        """Give every layer its former checkpointing back."""
        for layer, former in zip(self.layers, self.former):
            for name in LAYER_FLAGS:
                vars(layer).pop(name, None)
            vars(layer).update(former)
        for hook in self.hooks:
            hook.remove()
        switch.unwatch(self.watched)
        self.layers, self.former, self.watched, self.current = [], [], [], None

    def __str__(self):
        if self.plan is not None:
            return str(self.plan)
        if self.phase is Phase.STOPPED:
            return "no plan: every layer is recomputed"
        before_plan = [phase for phase in Phase if phase.precedes_plan]
        left = len(before_plan) - before_plan.index(self.phase) - (self.current is not None)
        if left:
            return f"no plan yet: it needs {left} more passes that recompute every layer"
        return "no plan yet: the next pass makes it"

    # one layer --------------------------------------------------------------------------------------------------------

    def call(self, layer, function, args):
        """Run one layer as the plan says.

        Args:
            layer: the module.
            function: its forward, with the keyword arguments bound.
            args: its positional arguments.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(COMPILED_MODEL)
        tensors = tensors_to_recompute(function, args)
        if not tensors:
            return function(*args)
        hidden = tensors[0]
        if self.device is None:
            self._settle(hidden.device)
        if hidden.device != self.device:
            raise RuntimeError(
                f"liger_hw.activations planned for {self.device}, and a layer runs on {hidden.device}: call it again "
                "after a model moved; a model on several devices is not planned for"
            )
        if self.current is None or layer is self.current.layers[0]:
            self._begin(hidden, self._can_leave(hidden, args))
        args = without_caches(args)
        current, index = self.current, len(self.current.layers)
        current.layers.append(layer)
        current.inputs.append(hidden.nbytes)
        current.sizes.append(hidden.numel())
        largest = self.sizes.setdefault(index, hidden.numel())
        self.sizes[index] = max(hidden.numel(), largest)
        self.has_grown |= hidden.numel() > largest and not self.measures_anew
        prepare = self._measured_call if current.phase.precedes_plan else self._planned_call
        frame, contexts = prepare(current, index, hidden, args, runs_hooks(function, layer))
        if contexts is not None:
            results = checkpointed(with_these_weights(function, layer), args, contexts, frame.saves_inputs)
        else:
            results = function(*args)
        self._watch(current, index, results)
        self.transfers.release(len(frame.offloaded))
        current.frame = frame
        return results

    def _measured_call(self, current, index, hidden, args, hooked):
        """Return the frame of a layer that keeps nothing, and the contexts of its checkpointing."""
        can_leave = self._can_leave(hidden, args)
        leaves = can_leave and current.offloads_inputs and index < len(self.layers) - 1
        frame = Frame({}, self.transfers, hidden if leaves else None)
        if current.phase is not Phase.RECORD:
            return frame, checkpoint.noop_context_fn
        current.recorders.append(LayerRecorder(current.layers[index], hidden, can_leave, self.clock, hooked))
        return frame, lambda: (current.recorders[index], contextlib.nullcontext())

    def _planned_call(self, current, index, hidden, args, hooked):
        """Return the frame of a layer under the plan, and the contexts of its checkpointing.

        The contexts are None for a layer without checkpointing. Without a plan, where the program calls other layers
        than were planned for, and where one has a larger input, a layer keeps nothing.
        """
        layer = current.layers[index]
        planned = self.plan.layers[index] if self.plan is not None and index < len(self.plan.layers) else None
        if planned is None or planned.layer is not layer or planned.choice.actions == () or self.has_grown:
            return Frame({}, self.transfers), checkpoint.noop_context_fn
        if planned.choice.actions is None:
            return Frame({}, self.transfers), None
        prove = functools.partial(self._reject, planned.record) if current.phase is Phase.PROVE else None
        leaves, actions = planned.choice.offloads_input and self._can_leave(hidden, args), planned.actions()
        frame = Frame(actions, self.transfers, hidden if leaves else None, prove)
        contexts = functools.partial(frame.contexts, hooked, layer) if actions else checkpoint.noop_context_fn
        return frame, contexts

    def _can_leave(self, hidden, args):
        """Tell whether a layer's input, the only positional tensor, can be offloaded."""
        alone = any(x is hidden for x in args) and len(list(tensors_in(args))) == 1
        return alone and self.transfers.can_copy(hidden)

    def _watch(self, current, index, results):
        """Let the gradient that reaches a layer's output start what the layers before it need."""
        output = next((x for x in tensors_in(results) if x.requires_grad), None)
        if output is None or output.is_leaf:  # hooks of a leaf would outlive the pass
            return
        before = weakref.ref(current.frame) if current.frame is not None and current.frame.offloaded else None
        if before is None and current.phase.is_final and index < len(self.measured.calls) - 1:
            return

        def reached(grad):
            if before is not None and before() is not None:
                before().prefetch()
            if not current.going_backward:
                current.going_backward = True
                after_backward(functools.partial(self._finish, current))
            if current.phase.measures_memory:
                current.peaks[index + 1] = self.memory.peak()

        output.register_hook(reached)

    # one pass ---------------------------------------------------------------------------------------------------------

    def _begin(self, hidden, can_leave):
        """Begin a forward of the model, and draw conclusions from the pass before."""
        before, self.current = self.current, None
        if before is not None:
            self._conclude(before)
        has_grads = self.trainable is not None and self.trainable.grad is not None
        kind = has_grads, before is not None and not before.complete
        timed = self.measured.timelines.get(kind)
        watches = not self.phase.is_final or timed is None or self.passes_under_plan < WATCHED
        base = self.memory.allocated() if watches else 0
        more_tokens = hidden.numel() > self.sizes.get(0, 0) or self.has_grown
        self.has_grown = self.measures_anew = False
        if more_tokens and self.phase is not Phase.STOPPED:
            self.measures_anew = True
            if self.measured.calls:
                logger.info("liger_hw.activations: more tokens than were planned for, so it measures again")
                self.phase, self.plan, self.measured = Phase.WARM_UP, None, Measurements()
            self.large_inputs = can_leave and self._has_large_inputs(hidden)
        elif self.plan is not None and timed is not None and base > timed[0] + GROWTH * self.plan.budget:
            self.measured.timelines[kind] = base, timed[1]
            self._make_plan()
        phase = Phase.TIME if self.plan is not None and timed is None else self.phase
        self.passes_under_plan += 1
        if phase.measures_memory:
            self.memory.peak()
        start = None if phase.is_final else self.clock.now()
        offloads = phase.precedes_plan and self.large_inputs
        self.current = Pass(phase, kind, base, hidden.numel(), offloads, start)

    def _finish(self, current):
        """End a pass: its backward is done."""
        current.end = 0 if current.phase.is_final else self.clock.now()
        if current.phase.measures_memory:
            current.peaks[0] = self.memory.peak()
        if current.phase is Phase.WARM_UP:
            timeline = current.timeline(len(current.layers))
            peak = max(with_inputs(timeline, current.inputs))
            if current.base + (max(timeline) if self.host_bytes else peak) > self._budget_bytes():
                raise self._too_small(current.base + peak)

    def _conclude(self, done):
        """Use what a pass told, and choose the phase of the next one."""
        if not done.complete or done.tokens == 0:
            if self.memory.failures() > self.failures:
                self._give_up()
            return  # the next pass repeats the phase
        scale = max(self.sizes[index] / size for index, size in enumerate(done.sizes) if size)
        if done.phase is Phase.WARM_UP:
            self.phase = Phase.RECORD
        elif done.phase is Phase.RECORD:
            records = [recorder.record().scaled(scale) for recorder in done.recorders]
            self.measured.calls = list(zip(done.layers, records))
            self.phase = Phase.TIME
        elif done.phase is Phase.TIME:
            timeline = done.timeline(len(self.measured.calls))
            self.measured.timelines[done.kind] = done.base, [scale * above for above in timeline]
            self.measured.seconds = scale * self.clock.between(done.start, done.end)
            self._make_plan()
        elif done.phase is Phase.PROVE:
            self.phase = Phase.CHECK
            if self.rejects_anew:
                self._make_plan()
        elif done.phase is Phase.CHECK:
            self.plan.measured_seconds = self.clock.between(done.start, done.end)
            self.plan.measured_peak_bytes = max(done.peaks.values())
            self.phase = Phase.RUN
            logger.info("liger_hw.activations:\n%s", self.plan)
            if self.memory.counts and scale * self.plan.measured_seconds > self.measured.seconds:
                self._reject_operations()

    def _reject(self, record, position):
        """Recompute an operation from now on: its kept result differed from the recomputed one."""
        self.rejected.setdefault(record.structure, set()).add(position)
        self.rejects_anew = True

    def _reject_operations(self):
        """Plan again without results of operations: the plan is slower than to recompute everything.

        Python numbers the operations of a layer that keeps results, and a slow host cannot hide that.
        """
        for _, record in self.measured.calls:
            self.rejected.setdefault(record.structure, set()).update(range(len(record.operations)))
        self._make_plan()

    def _give_up(self):
        """Return to recomputing every layer, after the memory ran out."""
        self.failures = self.memory.failures()
        if self.plan is not None:
            logger.warning(
                "liger_hw.activations: the memory ran out under the plan, so every layer is recomputed from now on, as "
                "before it. Call liger_hw.activations again with a smaller budget than %s",
                size(self.plan.budget),
            )
            self.phase, self.plan = Phase.STOPPED, None
        elif self.phase is not Phase.STOPPED:
            self.phase = Phase.WARM_UP

    # planning ---------------------------------------------------------------------------------------------------------

    def _make_plan(self):
        """Plan for what was measured; another plan than before is proved and checked next."""
        budget = self._budget_bytes()
        if self.pcie_bandwidth is None:
            self.pcie_bandwidth = self.transfers.measure() if self.host_bytes else 0.0
        plan = make_plan(self.measured, budget, self.host_bytes, self.pcie_bandwidth, self.rejected, self.memory.counts)
        if plan is None:
            had_plan = self.plan is not None
            self.phase, self.plan = Phase.STOPPED, None
            if not had_plan:
                raise self._too_small(self.measured.recomputing_peak())
            logger.warning(
                "liger_hw.activations: tensors outside the layers have grown, and nothing fits %s any more, so every "
                "layer is recomputed from now on", size(budget),
            )  # fmt: skip
            return
        self.rejects_anew, self.passes_under_plan = False, 0
        if not plan.same_as(self.plan):
            self.plan, self.phase = plan, Phase.PROVE
            logger.info("liger_hw.activations:\n%s", plan)

    def _budget_bytes(self):
        return self.memory.available() - FREE_SHARE * self.memory.total() if self.budget == "auto" else self.budget

    def _too_small(self, peak):
        """Return the error of a budget below the `peak` of recomputing every layer, which fits."""
        return BudgetTooSmall(
            f"budget: got {size(self._budget_bytes())}, allowed: at least {size(peak)}, the peak of a pass that "
            "recomputes every layer; or a smaller batch"
        )

    def _has_large_inputs(self, hidden):
        """Tell whether the layers' inputs take much memory that the host has."""
        if not self.memory.counts or buffer_bytes(hidden.nbytes) * len(self.layers) > self.host_bytes:
            return False
        room = self.memory.available() if self.budget == "auto" else min(self.memory.available(), self.budget)
        return hidden.nbytes * len(self.layers) > LARGE_INPUTS * (room - self.memory.allocated())
