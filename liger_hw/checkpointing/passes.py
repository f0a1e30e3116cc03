"""Measure a few passes of a model's layers, plan, prove the plan, and follow it."""

import contextlib
import functools
import logging
import weakref
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median

import torch
from torch.utils import checkpoint

from liger_hw._torch import at_end_of_backward
from liger_hw.checkpointing import switch
from liger_hw.checkpointing.budget import BudgetTooSmall, bytes_of, size
from liger_hw.checkpointing.forward_mode import hooks_of, runs_hooks
from liger_hw.checkpointing.operations import tensors_in
from liger_hw.checkpointing.plan import Plan, PlannedLayer
from liger_hw.checkpointing.recording import Clock, Record, Recorder
from liger_hw.checkpointing.replay import Frame, checkpointed
from liger_hw.checkpointing.solver import Limits, choices_of, nothing, solve
from liger_hw.checkpointing.transfers import Transfers, buffer_bytes
from liger_hw.checkpointing.weights import can_recompute, with_these_weights

logger = logging.getLogger("liger_hw")

WARM_UP, RECORD, TIME, PROVE, CHECK, RUN = "warm up", "record", "time", "prove", "check", "run"
FLAGS = "gradient_checkpointing", "_gradient_checkpointing_func"  # attributes of layers that transformers reads
MEASURED = WARM_UP, RECORD, TIME  # passes that recompute every layer, before a plan
LARGE_INPUTS = 0.25  # of the free memory: if the inputs of all layers take more, measured passes offload them
MARGIN = 0.05  # of the device's memory that budget="auto" leaves free, for fragmentation
GROWTH = 0.005  # of the budget: memory outside the layers that grew by more is planned for
WATCHED = 64  # passes after a plan in which that memory is watched; the optimizer's state appears in the first ones


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
    """Call `function(*args)` under torch's checkpointing."""
    return checkpointed(function, args)


@dataclass
class Pass:
    """One forward of the model with its backward.

    Attributes:
        phase: its purpose, one of those above.
        kind: (whether gradients exist, whether the forward before has had no backward), of which memory depends.
        base: bytes allocated at its start.
        tokens: values of the hidden states.
        offloads_inputs: of its layers, except of the last.
        start, end: points of time.
        layers: called so far.
        inputs: bytes of the hidden states that enter each of them.
        recorders: of the layers.
        peaks: number of layers that were still to go backward -> peak bytes in that part; that of the forward last.
        frame: of the layer called last, or None.
    """

    phase: str
    kind: tuple
    base: int
    tokens: int
    offloads_inputs: bool
    start: object
    end: object = None
    layers: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    recorders: list = field(default_factory=list)
    peaks: dict = field(default_factory=dict)
    frame: object = None
    going_backward: bool = False

    @property
    def complete(self):
        return self.end is not None

    def timeline(self, count):
        """Return the peak in each part of a pass of `count` layers.

        It is above the base, without the inputs of the layers that are still to go backward. The first part is the
        first layer's backward, the last part the forward. A layer without gradients counts to the part before.
        """
        above, peak = [], 0
        for part in range(count + 1):
            present = self.inputs[:part][-1:] if self.offloads_inputs else self.inputs[:part]  # one arrives ahead
            peak = max((peak for at, peak in self.peaks.items() if at == part or part == count < at), default=peak)
            above.append(peak - self.base - sum(present))
        return above


class Activations:
    """Run the decoder layers of a model, and decide what they keep for the backward.

    Args:
        model: the module around all layers.
        layers: the modules.
        budget, host_bytes: of `budget.bytes_of`, and bytes.
        device: of the layers; None if they may move before the first pass.

    Attributes:
        plan: the `Plan` of the last passes, or None while it measures.

    Raises:
        ValueError: as `budget.bytes_of`.
    """

    def __init__(self, model, layers, budget, host_bytes, device):
        self.device, self.budget, self.host_bytes = None, bytes_of(budget, device), host_bytes
        self.plan, self.current, self.link = None, None, None
        self.ahead, self.tokens, self.passes, self.refused_now = deque(MEASURED), 0, 0, False
        self.stopped, self.large_inputs = False, False
        self.records, self.timelines, self.refused, self.seconds = [], {}, {}, 0.0
        self.layers, self.former = layers, []
        self.hooks = [hook for layer in layers for hook in hooks_of(layer)]
        self.take_layers()
        self.watched = switch.watch(model.modules(), plans_of)
        if device is not None:
            self._settle(device)

    def _settle(self, device):
        """Take the layers' device and a parameter: a move may replace both."""
        self.budget, self.device = bytes_of(self.budget, device), device
        self.clock, self.transfers, self.ooms = Clock(device), Transfers(device), self._ooms()
        self.a_parameter = next((p for layer in self.layers for p in layer.parameters() if p.requires_grad), None)

    def take_layers(self):
        """Run the layers from now on, and remember the checkpointing that they have."""
        self.former = [{name: vars(layer)[name] for name in FLAGS if name in vars(layer)} for layer in self.layers]
        for layer in self.layers:  # not the model, whose masks for packed sequences depend on it
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = WhileRecording(), LayerCall(self, layer)

    def undo(self):
        """Give every layer its former checkpointing back."""
        for layer, former in zip(self.layers, self.former):
            for name in FLAGS:
                vars(layer).pop(name, None)
            vars(layer).update(former)
        for hook in self.hooks:
            hook.remove()
        switch.unwatch(self.watched)
        self.layers, self.former, self.watched, self.current = [], [], [], None

    def __str__(self):
        if self.plan is not None:
            return str(self.plan)
        if self.ahead:
            return f"no plan yet: it needs {len(self.ahead)} more passes that recompute every layer"
        return "no plan: every layer is recomputed" if self.stopped else "no plan yet: the next pass makes it"

    # one layer --------------------------------------------------------------------------------------------------------

    def call(self, layer, function, args):
        """Run one layer as the plan says.

        Args:
            layer: the module.
            function: its forward, with the keyword arguments bound.
            args: its positional arguments.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(COMPILED)
        keywords = getattr(function, "keywords", None) or {}
        hidden = next(tensors_in([*args, *keywords.values()]), None)
        if hidden is None or not torch.is_grad_enabled() or not can_recompute(*tensors_in([*args, *keywords.values()])):
            return function(*args)
        if self.device is None:
            self._settle(hidden.device)
        if hidden.device != self.device:
            raise RuntimeError(
                f"liger_hw.activations planned for {self.device}, and a layer runs on {hidden.device}: call it again "
                "after a model moved; a model on several devices is not planned for"
            )
        if self.current is None or layer is self.current.layers[0]:
            self._begin(hidden, self._can_leave(hidden, args))
        args = [None if hasattr(x, "get_seq_length") else x for x in args]  # a recomputation would fill a cache twice
        current = self.current
        index = len(current.layers)
        current.layers.append(layer)
        current.inputs.append(hidden.nbytes)
        contexts, checkpoints, frame = checkpoint.noop_context_fn, True, Frame({}, self.transfers)
        hooked = runs_hooks(function, layer)
        if current.phase in MEASURED:
            can_leave = self._can_leave(hidden, args)
            if can_leave and current.offloads_inputs and index < len(self.layers) - 1:
                frame = Frame({}, self.transfers, hidden)
            if current.phase == RECORD:
                current.recorders.append(Recorder(layer, hidden, can_leave, self.clock, hooked))
                contexts = lambda: (current.recorders[index], contextlib.nullcontext())  # noqa: E731
        elif self.plan is not None and self._is_planned(index, layer):
            planned = self.plan.layers[index]
            checkpoints = planned.choice.actions is not None
            if planned.choice.actions:
                prove = functools.partial(self._refuse, planned.record) if current.phase == PROVE else None
                leaves = planned.choice.offloads_input and self._can_leave(hidden, args)
                actions = planned.actions()
                frame = Frame(actions, self.transfers, hidden if leaves else None, prove)
                contexts = functools.partial(frame.contexts, hooked, layer) if actions else contexts
        if checkpoints:
            function = with_these_weights(function, layer)
        results = checkpointed(function, args, contexts, frame.saves_inputs) if checkpoints else function(*args)
        self._watch(current, index, results)
        self.transfers.release(frame.offloaded)
        current.frame = frame
        return results

    def _can_leave(self, hidden, args):
        """Tell whether a layer's input, the only positional tensor, can be offloaded."""
        alone = any(x is hidden for x in args) and len(list(tensors_in(args))) == 1
        return alone and self.transfers.can_copy(hidden)

    def _is_planned(self, index, layer):
        return index < len(self.plan.layers) and self.plan.layers[index].layer is layer

    def _watch(self, current, index, results):
        """Let the gradient that reaches a layer's output start what the layers before it need."""
        output = next((x for x in tensors_in(results) if x.requires_grad), None)
        if output is None or output.is_leaf:  # hooks of a leaf would outlive the pass
            return
        before = weakref.ref(current.frame) if current.frame is not None and current.frame.offloaded else None
        if before is None and current.phase == RUN and index < len(self.records) - 1:
            return

        def reached(grad):
            if before is not None and before() is not None:
                before().prefetch()
            self._reach(current, index)

        output.register_hook(reached)

    def _reach(self, current, index):
        if not current.going_backward:
            current.going_backward = True
            at_end_of_backward(functools.partial(self._finish, current))
        if current.phase in (WARM_UP, TIME, CHECK):
            current.peaks[index + 1] = self._peak()

    # one pass ---------------------------------------------------------------------------------------------------------

    def _begin(self, hidden, can_leave):
        """Begin a forward of the model, and draw conclusions from the pass before."""
        before, self.current = self.current, None
        if before is not None:
            self._conclude(before)
        has_grads = self.a_parameter is not None and self.a_parameter.grad is not None
        kind = has_grads, before is not None and not before.complete
        known = self.timelines.get(kind)
        base = self._allocated() if self.ahead or known is None or self.passes < WATCHED else 0
        grown, self.tokens = hidden.numel() > self.tokens, max(hidden.numel(), self.tokens)
        if grown and not self.stopped:
            if self.records:
                logger.info("liger_hw.activations: more tokens than were planned for, so it measures again")
                self.ahead, self.records, self.timelines, self.plan = deque(MEASURED), [], {}, None
            self.large_inputs = can_leave and self._has_large_inputs(hidden)
        elif self.plan is not None and known is None:
            self.ahead.appendleft(TIME)
        elif self.plan is not None and base > known[0] + GROWTH * self.plan.budget:
            self.timelines[kind] = base, known[1]
            self._make_plan()
        phase = self.ahead.popleft() if self.ahead else RUN
        self.passes += 1
        if phase in (WARM_UP, TIME, CHECK):
            self._peak()
        start = self.clock.now() if phase != RUN else None
        offloads = phase in MEASURED and self.large_inputs
        self.current = Pass(phase, kind, base, hidden.numel(), offloads, start)

    def _finish(self, current):
        """End a pass: its backward is done."""
        current.end = self.clock.now() if current.phase != RUN else 0
        if current.phase in (WARM_UP, TIME, CHECK):
            current.peaks[0] = self._peak()
        if current.phase == WARM_UP:
            timeline = current.timeline(len(current.layers))
            peak = max(self._with_inputs(timeline, current.inputs))
            if current.base + (max(timeline) if self.host_bytes else peak) > self._budget_bytes():
                self._refuse_budget(current.base + peak)

    def _conclude(self, done):
        if not done.complete or done.tokens == 0:
            if self._ooms() > self.ooms:
                self._give_up()
            elif done.phase != RUN:
                self.ahead.appendleft(done.phase)
            return
        scale = self.tokens / done.tokens
        if done.phase == RECORD:
            records = [recorder.record().scaled(scale) for recorder in done.recorders]
            self.records = list(zip(done.layers, records))
        elif done.phase == TIME:
            self.timelines[done.kind] = done.base, [scale * above for above in done.timeline(len(self.records))]
            self.seconds = scale * self.clock.between(done.start, done.end)
            self._make_plan()
        elif done.phase == PROVE and self.refused_now:
            self._make_plan()
        elif done.phase == CHECK:
            self.plan.measured_seconds = self.clock.between(done.start, done.end)
            self.plan.measured_peak_bytes = max(done.peaks.values())
            logger.info("liger_hw.activations:\n%s", self.plan)

    def _refuse(self, record, position):
        """Recompute an operation from now on: its kept result differed from the recomputed one."""
        self.refused.setdefault(record.structure, set()).add(position)
        self.refused_now = True

    def _give_up(self):
        """Return to recomputing every layer, after the memory ran out."""
        if self.plan is None:
            self.ahead = deque(MEASURED)
        else:
            self.ahead.clear()
            logger.warning(
                "liger_hw.activations: the memory ran out under the plan, so every layer is recomputed from now on, as "
                "before it. Call liger_hw.activations again with a smaller budget than %s",
                size(self.plan.budget),
            )
        self.ooms, self.plan, self.stopped = self._ooms(), None, self.plan is not None

    # planning ---------------------------------------------------------------------------------------------------------

    def _make_plan(self):
        """Solve for the records and timelines, and plan to prove and check the result."""
        budget = self._budget_bytes()
        if self.link is None:
            self.link = self.transfers.measure() if self.host_bytes else 0.0
        parts = range(len(self.records) + 1)
        before = [min(budget - base - above[part] for base, above in self.timelines.values()) for part in parts]
        limits = Limits(before, self.host_bytes, self.link)
        by_structure = {}
        for _, record in self.records:
            by_structure.setdefault(record.structure, []).append(record)
        typical = {structure: _typical(records) for structure, records in by_structure.items()}
        with torch.device("cpu"):  # a program may set another default
            choices = {
                structure: [nothing(record)]  # ranks may plan differently, but must communicate alike
                if record.collective
                else choices_of(record, limits, len(self.records), self.refused.get(structure, ()))
                for structure, record in typical.items()
            }
            chosen = solve([choices[record.structure] for _, record in self.records], limits)
        if chosen is None and self.plan is None:
            inputs = [record.input_bytes for _, record in self.records]
            peaks = [base + max(self._with_inputs(above, inputs)) for base, above in self.timelines.values()]
            self._refuse_budget(max(peaks))
        elif chosen is None:
            logger.warning(
                "liger_hw.activations: tensors outside the layers have grown, and nothing fits %s any more, so every "
                "layer is recomputed from now on", size(budget),
            )  # fmt: skip
            self.plan, self.stopped = None, True
            self.ahead.clear()
            return
        layers = [
            PlannedLayer(layer, typical[record.structure], choice)
            for (layer, record), choice in zip(self.records, chosen)
        ]
        peak, held = 0, 0
        for part in parts:
            arriving = 0
            if part:
                held += layers[part - 1].choice.nbytes
                arriving = layers[part - 1].choice.offloaded
            peak = max(peak, *(base + above[part] + held + arriving for base, above in self.timelines.values()))
        saved = sum(choice.seconds for choice in chosen)
        plan = Plan(layers, budget, *((peak, self.seconds - saved) if self._counts else (0, None)))
        self.refused_now, self.passes = False, 0
        if not plan.same_as(self.plan):
            self.plan, self.ahead = plan, deque((PROVE, CHECK))
            logger.info("liger_hw.activations:\n%s", plan)

    def _budget_bytes(self):
        if self.budget == "auto":
            free, total = torch.accelerator.get_memory_info(self.device)
            return free + torch.accelerator.memory_reserved(self.device) - MARGIN * total
        return self.budget

    def _refuse_budget(self, peak):
        """Refuse the budget, and name the `peak` of recomputing every layer, which fits."""
        raise BudgetTooSmall(
            f"budget: got {size(self._budget_bytes())}, allowed: at least {size(peak)}, the peak of a pass that "
            "recomputes every layer; or a smaller batch"
        )

    def _has_large_inputs(self, hidden):
        """Tell whether the layers' inputs take much memory that the host has."""
        if not self._counts or buffer_bytes(hidden.nbytes) * len(self.layers) > self.host_bytes:
            return False
        room = torch.accelerator.get_memory_info(self.device)[0] + torch.accelerator.memory_reserved(self.device)
        if self.budget != "auto":
            room = min(room, self.budget)
        return hidden.nbytes * len(self.layers) > LARGE_INPUTS * (room - self._allocated())

    @staticmethod
    def _with_inputs(timeline, inputs):
        """Return the peaks of a pass that offloads nothing."""
        return [above + sum(inputs[:part]) for part, above in enumerate(timeline)]

    # the device's memory ----------------------------------------------------------------------------------------------

    @property
    def _counts(self):
        """Tell whether the device counts memory; on a CPU the budget bounds the kept bytes."""
        return self.device.type != "cpu"

    def _allocated(self):
        return torch.accelerator.memory_allocated(self.device) if self._counts else 0

    def _peak(self):
        """Return the peak of allocated bytes since the last call."""
        if not self._counts:
            return 0
        peak = torch.accelerator.max_memory_allocated(self.device)
        torch.accelerator.reset_peak_memory_stats(self.device)
        return peak

    def _ooms(self):
        return torch.accelerator.memory_stats(self.device).get("num_ooms", 0) if self._counts else 0


COMPILED = (
    "liger_hw.activations plans eager layers, and this model runs under torch.compile, which decides itself what it "
    "keeps: undo the plan (liger_hw.activations(model, None)) and set torch._functorch.config.activation_memory_budget"
)


def _typical(records) -> Record:
    """Return one record of layers that run the same operations: the median of their times."""
    operations = [
        type(op)(op.operation, op.label, op.nbytes, op.keepable, median(r.operations[place].seconds for r in records))
        for place, op in enumerate(records[0].operations)
    ]
    first, seconds = records[0], median(record.seconds for record in records)
    return replace(first, operations=operations, seconds=seconds)
