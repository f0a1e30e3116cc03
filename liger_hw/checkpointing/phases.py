"""Name the phases that lead from the first pass to a plan that is followed.

    WARM_UP -> RECORD -> TIME -> PROVE -> CHECK -> RUN        STOPPED

A pass whose backward has not run is repeated. Three events lead elsewhere:

- more tokens than before: to WARM_UP, without a plan;
- another plan than before, after TIME, PROVE or CHECK, or because memory outside the layers has grown: to PROVE;
- nothing fits the budget any more, or the memory ran out under the plan: to STOPPED, for good.

Under a plan, a pass of a kind that was not timed yet is a TIME pass, too. It delays the next phase by one pass.
"""

import enum
from dataclasses import dataclass, field


class Phase(enum.Enum):
    """The purpose of a pass."""

    WARM_UP = "warm up"  # compile and allocate; see whether recomputing every layer fits the budget
    RECORD = "record"  # the operations of each layer
    TIME = "time"  # the pass and its memory, and plan
    PROVE = "prove"  # that each kept result is the recomputed one
    CHECK = "check"  # the plan's time and memory
    RUN = "run"  # as planned
    STOPPED = "stopped"  # recompute every layer

    @property
    def precedes_plan(self):
        """Tell whether such passes recompute every layer, to measure."""
        return self in (Phase.WARM_UP, Phase.RECORD, Phase.TIME)

    @property
    def measures_memory(self):
        return self in (Phase.WARM_UP, Phase.TIME, Phase.CHECK)

    @property
    def is_final(self):
        """Tell whether the next pass has the same phase unless an event leads elsewhere."""
        return self in (Phase.RUN, Phase.STOPPED)


@dataclass
class Pass:
    """One forward of the model with its backward.

    Attributes:
        phase: its purpose.
        kind: (whether gradients exist, whether the forward before has had no backward), of which memory depends.
        base: bytes allocated at its start.
        tokens: values of the hidden states.
        offloads_inputs: of its layers, except of the last.
        start, end: points of time.
        layers: called so far.
        inputs, sizes: bytes and numbers of values of the hidden states that enter each of them.
        recorders: of the layers.
        peaks: number of layers that were still to go backward -> peak bytes in that part; that of the forward last.
        frame: of the layer called last, or None.
    """

    phase: Phase
    kind: tuple
    base: int
    tokens: int
    offloads_inputs: bool
    start: object
    end: object = None
    layers: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    sizes: list = field(default_factory=list)
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


def with_inputs(timeline, inputs):
    """Return the peaks of a pass that offloads nothing, above the base."""
    return [above + sum(inputs[:part]) for part, above in enumerate(timeline)]
