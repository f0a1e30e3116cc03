"""Describe a plan: the choice for each layer, and the predicted time and memory."""

from collections import Counter
from dataclasses import dataclass

from liger_hw import console
from liger_hw.checkpointing.budget import size
from liger_hw.checkpointing.solver import INPUT, KEEP, OFFLOAD, Choice

MIB = 2**20


@dataclass
class PlannedLayer:
    """One call of a layer under a plan.

    Attributes:
        layer: the module.
        record: of its forward.
        choice: what it keeps.
    """

    layer: object
    record: object
    choice: Choice

    def actions(self) -> dict:
        """Return position -> (operation, whether its results go to host memory)."""
        operations = self.record.operations
        places = [(place, action == OFFLOAD) for place, action in self.choice.actions if place != INPUT]
        return {place: (operations[place].operation, leaves) for place, leaves in places}

    def labels(self, action) -> str:
        """Name the operations with `action`."""
        if self.choice.actions is None:
            return "all that autograd saves" if action == KEEP else "-"
        chosen = [place for place, chosen in self.choice.actions if chosen == action]
        labels = ["input" if place == INPUT else self.record.operations[place].label for place in chosen]
        names = Counter(label.rpartition(".")[2] for label in labels)
        return ", ".join(name if count == 1 else f"{name} x{count}" for name, count in names.items()) or "-"


@dataclass
class ActivationPlan:
    """Hold what a training step keeps, in the order of the layers' forwards.

    Attributes:
        layers: a `PlannedLayer` for each call of a layer.
        budget: bytes.
        peak_bytes: predicted peak of the device memory that tensors take in a forward and a backward; 0 on a CPU.
        seconds: predicted time of a forward and a backward, without the optimizer; None on a CPU, whose other programs
            disturb the few measured passes.
        measured_peak_bytes, measured_seconds: of a pass under the plan, or None before one.
    """

    layers: list
    budget: float
    peak_bytes: int
    seconds: float | None
    measured_peak_bytes: int | None = None
    measured_seconds: float | None = None

    @property
    def held_bytes(self) -> int:
        """Return the device memory that the layers hold between forward and backward."""
        return sum(planned.choice.nbytes for planned in self.layers)

    @property
    def offloaded_bytes(self) -> int:
        """Return the host memory that the plan uses."""
        return sum(planned.choice.offloaded for planned in self.layers)

    @property
    def saved_seconds(self) -> float:
        """Return the recomputation that the plan avoids, in a pass."""
        return sum(planned.choice.seconds for planned in self.layers)

    def same_as(self, other) -> bool:
        """Tell whether `other` keeps the same."""
        return other is not None and [p.choice for p in self.layers] == [p.choice for p in other.layers]

    def __str__(self):
        groups = {}
        for number, planned in enumerate(self.layers):
            groups.setdefault((planned.record.structure, planned.choice), []).append((number, planned))
        rows = []
        for members in groups.values():
            numbers, planned = [number for number, _ in members], members[0][1]
            choice = planned.choice
            rows.append((
                _ranges(numbers), planned.labels(KEEP), planned.labels(OFFLOAD), f"{choice.nbytes / MIB:,.1f}",
                f"{choice.offloaded / MIB:,.1f}", f"{choice.seconds * 1e3:.2f}",
            ))  # fmt: skip
        header = "layers", "keeps beside its input", "offloads", "MiB with its input", "MiB on the host", "ms saved"
        inputs = sum(planned.record.input_bytes for planned in self.layers if not planned.choice.offloads_input)
        lines = [console.table(header, rows), ""]
        lines.append(
            f"together {size(self.held_bytes)}, of which inputs {size(inputs)}; {size(self.offloaded_bytes)} on the "
            f"host; {self.saved_seconds * 1e3:.1f} ms of recomputation saved"
        )
        communicate = [number for number, planned in enumerate(self.layers) if planned.record.collective]
        if communicate:
            lines.append(
                f"layers {_ranges(communicate)} communicate with other ranks in their forward (ZeRO-3, tensor or "
                "expert parallelism), so they are recomputed whole"
            )
        if self.seconds is not None:
            lines.append(_line("predicted", self.peak_bytes, self.seconds, self.budget))
        if self.measured_seconds is not None:
            lines.append(_line("measured", self.measured_peak_bytes, self.measured_seconds, self.budget))
        return "\n".join(lines)


def _line(word, peak_bytes, seconds, budget):
    memory = f", peak {size(peak_bytes)} of {size(budget)}" if peak_bytes else ""
    return f"{word}: forward and backward {seconds * 1e3:.1f} ms{memory}"


def _ranges(numbers):
    """Write numbers as ranges: 0-3, 7."""
    parts = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
