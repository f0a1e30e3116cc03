"""Make a plan of what the measured passes told."""

from dataclasses import dataclass, field, replace
from statistics import median

import torch

from liger_hw.checkpointing.phases import with_inputs
from liger_hw.checkpointing.plan import ActivationPlan, PlannedLayer
from liger_hw.checkpointing.recording import LayerRecord
from liger_hw.checkpointing.solver import Limits, choices_of, solve


@dataclass
class Measurements:
    """Hold what passes told, for the largest number of tokens.

    Attributes:
        calls: (layer, `LayerRecord`), in the order of the forward.
        timelines: kind of a pass -> (bytes allocated at its start, `Pass.timeline`).
        seconds: of a forward and a backward that recompute every layer.
    """

    calls: list = field(default_factory=list)
    timelines: dict = field(default_factory=dict)
    seconds: float = 0.0

    def recomputing_peak(self):
        """Return the peak of a pass that recomputes every layer and offloads nothing."""
        inputs = [record.input_bytes for _, record in self.calls]
        return max(base + max(with_inputs(above, inputs)) for base, above in self.timelines.values())

    def planned_peak(self, layers):
        """Predict the peak of a pass under a plan.

        Args:
            layers: of `ActivationPlan`.
        """
        peak, held = 0, 0
        for part in range(len(layers) + 1):
            arriving = 0
            if part:
                held += layers[part - 1].choice.nbytes
                arriving = layers[part - 1].choice.offloaded
            peak = max(peak, *(base + above[part] + held + arriving for base, above in self.timelines.values()))
        return peak


def make_plan(measured, budget, host_bytes, pcie_bandwidth, rejected, counts) -> ActivationPlan | None:
    """Return the plan that saves the most time within the budget, or None.

    Args:
        measured: `Measurements`.
        budget, host_bytes: bytes on the device and on the host.
        pcie_bandwidth: bytes a second between them.
        rejected: structure of a record -> positions of operations that must be recomputed.
        counts: whether the device counts memory, so that the plan predicts it and the time.

    Returns:
        None where not even recomputing every layer fits.
    """
    calls, timelines = measured.calls, measured.timelines.values()
    parts = range(len(calls) + 1)
    bytes_before = [min(budget - base - above[part] for base, above in timelines) for part in parts]
    limits = Limits(bytes_before, host_bytes, pcie_bandwidth)
    by_structure = {}
    for _, record in calls:
        by_structure.setdefault(record.structure, []).append(record)
    typical = {structure: _typical(records) for structure, records in by_structure.items()}
    with torch.device("cpu"):  # a program may set another default
        choices = {
            structure: choices_of(record, limits, len(calls), rejected.get(structure, ()))
            for structure, record in typical.items()
        }
        chosen = solve([choices[record.structure] for _, record in calls], limits)
    if chosen is None:
        return None
    layers = [PlannedLayer(layer, typical[record.structure], choice) for (layer, record), choice in zip(calls, chosen)]
    if not counts:
        return ActivationPlan(layers, budget, 0, None)
    saved = sum(choice.seconds for choice in chosen)
    return ActivationPlan(layers, budget, measured.planned_peak(layers), measured.seconds - saved)


def _typical(records) -> LayerRecord:
    """Return one record of layers that run the same operations: the median of their times."""
    first = records[0]
    times = {name: median(getattr(record, name) for record in records) for name in ("seconds", "other_seconds")}
    operations = [
        replace(op, seconds=median(record.operations[place].seconds for record in records))
        for place, op in enumerate(first.operations)
    ]
    return replace(first, operations=operations, **times)
