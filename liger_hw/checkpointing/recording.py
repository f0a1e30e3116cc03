"""Record the operations of a layer's forward: time, memory, and the results that autograd saves."""

import functools
import time
import weakref
from dataclasses import dataclass, field, replace

import torch

from liger_hw._torch import has_memory, is_plain, saved_tensors_hooks
from liger_hw.checkpointing import operations
from liger_hw.checkpointing.forward_mode import ForwardMode


@dataclass
class Operation:
    """One numbered operation of a layer.

    Attributes:
        operation: torch's operation.
        label: the part of the layer whose parameter it reads, or its own name.
        nbytes: memory of its results, without memory that is its arguments'.
        keepable: a plan may keep its results.
        seconds: time on this machine.
    """

    operation: object
    label: str
    nbytes: int
    keepable: bool
    seconds: float = 0.0


@dataclass
class LayerRecord:
    """One call of a layer.

    Attributes:
        operations: in order; without those after the last result that autograd saves, which no recomputation runs.
        saved_bytes: memory that the layer's own backward needs, without its inputs and parameters.
        input_bytes: memory of the hidden states that enter it.
        seconds: time of the forward.
        other_seconds: of further operations that a recomputation runs: they write to arguments, so no plan keeps them.
        collective: it communicates with other ranks.
        input_can_leave: the hidden states can be offloaded until the backward.
    """

    operations: list = field(default_factory=list)
    saved_bytes: int = 0
    input_bytes: int = 0
    seconds: float = 0.0
    other_seconds: float = 0.0
    collective: bool = False
    input_can_leave: bool = False

    @property
    def recomputing_seconds(self):
        """Return the time of a recomputation of the whole layer."""
        return sum(op.seconds for op in self.operations) + self.other_seconds

    def scaled(self, factor):
        """Return the record of a call with `factor` times the tokens."""
        operations = [
            replace(op, nbytes=round(factor * op.nbytes), seconds=factor * op.seconds) for op in self.operations
        ]
        sizes = (round(factor * size) for size in (self.saved_bytes, self.input_bytes))
        times = (factor * seconds for seconds in (self.seconds, self.other_seconds))
        return LayerRecord(operations, *sizes, *times, self.collective, self.input_can_leave)

    @property
    def structure(self):
        """Return a value that calls with the same operations and sizes share."""
        operations = tuple((op.operation, op.label, op.nbytes, op.keepable) for op in self.operations)
        return operations, self.saved_bytes, self.input_bytes, self.input_can_leave


class DeviceClock:
    """Read the time of a device's stream."""

    def __init__(self, device):
        self.device = device

    def now(self):
        """Return a point of time, for `between`."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def between(self, start, end) -> float:
        """Return the seconds between two points of time, and wait for the second."""
        if self.device.type == "cpu":
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3


class LayerRecorder(ForwardMode):
    """Record one call of `layer` within torch's checkpointing, whose hooks still get all saved tensors.

    Args:
        layer: the module.
        hidden: the hidden states that enter it.
        can_leave: they can be offloaded.
        clock: the clock of their device.
        hooked: of `ForwardMode`.
    """

    def __init__(self, layer, hidden, can_leave, clock, hooked):
        super().__init__(hooked)
        self.layer, self.clock = layer, clock
        self.call = LayerRecord(input_bytes=hidden.nbytes, input_can_leave=can_leave)
        self.times, self.last = [], 0  # (start, end) of operations, and their number at the last saved tensor
        self.others, self.last_other = [], 0  # the same of operations that write to arguments
        self.parts = {}  # memory of a parameter -> the part of the layer
        self.producers = {}  # memory -> the operation that allocated it, or None
        self.saved = []  # (a saved tensor, a reference to checkpointing's holder of it)

    def __enter__(self):
        pack, unpack = saved_tensors_hooks()

        @functools.wraps(pack)  # the module of this function tells ops that checkpointing is active
        def record(x):
            packed = pack(x)
            if type(x) is torch.Tensor and operations.memory_of(x) in self.producers:
                self.saved.append((x.detach(), weakref.ref(packed)))
            self.last, self.last_other = len(self.times), len(self.others)
            return packed

        self.hooks = torch.autograd.graph.saved_tensors_hooks(record, unpack)
        self.hooks.__enter__()
        return super().__enter__()

    def begin(self):
        parameters = self.layer.named_parameters()  # FSDP has just made them whole
        self.parts = {operations.memory_of(p): name.rpartition(".")[0] for name, p in parameters if has_memory(p)}
        self.start = self.clock.now()

    def leave_forward(self):
        super().leave_forward()
        self.end = self.clock.now()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.hooks.__exit__(*error)
        self.hooks = None  # it refers to this recorder: the cycle would hold the layer's input beyond the pass
        storages = [x.untyped_storage() for x, packed in self.saved if packed() is not None]  # in a graph that is alive
        self.call.saved_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        self.saved.clear()

    def see(self, operation, args, kwargs):
        kind = operations.kind_of(operation, args)
        if kind is operations.MUTATES:
            for x in operations.written(operation, args, kwargs):
                if isinstance(producer := self.producers.get(operations.memory_of(x)), Operation):
                    producer.keepable = False
        random_before = operations.random_state(operation, self.clock.device) if kind is operations.NUMBERED else None
        start = self.clock.now() if kind is not operations.FREE else None
        results = operation(*args, **kwargs)
        end = self.clock.now() if kind is not operations.FREE else None
        if kind is operations.MUTATES:
            self.others.append((start, end))
        self.call.collective |= operations.communicates(operation)
        inputs = {operations.memory_of(x) for x in operations.tensors_in([*args, *kwargs.values()]) if has_memory(x)}
        outputs = [x for x in operations.tensors_in(results) if not is_plain(x) or x.numel()]
        memory = {operations.memory_of(x): x.untyped_storage().nbytes() for x in outputs if is_plain(x)}
        new = {address: size for address, size in memory.items() if address not in inputs}
        part = next((self.parts[address] for address in inputs if address in self.parts), None)
        if kind is operations.NUMBERED:
            keepable = bool(new) and len(new) == len(outputs)  # every result has memory of its own
            if random_before is not None:
                keepable &= torch.equal(random_before, operations.random_state(operation, self.clock.device))
            self.times.append((start, end))
            name = operation.__name__.partition(".")[0].strip("_")
            recorded = Operation(operation, part or name, sum(new.values()), keepable)
            self.call.operations.append(recorded)
            self.producers.update(dict.fromkeys(new, recorded))
        elif part is None:
            self.producers.update(dict.fromkeys(new))
        else:  # a view or a cast of a parameter
            self.parts |= dict.fromkeys(memory, part)
        return results

    def record(self) -> LayerRecord:
        """Return the record; waits for the device."""
        for operation, (start, end) in zip(self.call.operations, self.times):
            operation.seconds = self.clock.between(start, end)
        seconds = self.clock.between(self.start, self.end)
        other_seconds = sum(self.clock.between(*times) for times in self.others[: self.last_other])
        operations = self.call.operations[: self.last]
        return replace(self.call, operations=operations, seconds=seconds, other_seconds=other_seconds)
