"""Choose the results that each layer keeps, offloads and recomputes, by two knapsacks."""

from dataclasses import dataclass

import torch

from liger_hw.checkpointing.recording import Operation
from liger_hw.checkpointing.transfers import buffer_bytes

LARGEST_CHOICES = 11  # operations of a layer that have a choice: 3^11 combinations take 0.1 s on a CPU
LINK_SHARE = 0.9  # of a layer's forward that copies to host memory may take: a longer copy delays the next layer
COPY_COST = 0.02  # of a copy's time, which the step loses: of plans that save as much, the one with fewer copies wins
CELLS = 8192  # of the memory that the layers share; rounding up costs each layer less than one of them

RECOMPUTE, KEEP, OFFLOAD = range(3)
INPUT = -1  # position of a layer's input among its operations


@dataclass(frozen=True)
class Choice:
    """One way to run a layer.

    Attributes:
        actions: (position of an operation, KEEP or OFFLOAD); all others are recomputed. (INPUT, OFFLOAD) offloads the
            layer's input, which stays on the device otherwise. None: the layer runs without checkpointing, and autograd
            keeps what it saves.
        nbytes: device memory that the layer holds until its backward, with its input.
        offloaded: bytes that go to host memory.
        seconds: time of recomputation that it saves.
    """

    actions: tuple | None
    nbytes: int
    offloaded: int = 0
    seconds: float = 0.0

    @property
    def offloads_input(self):
        return self.actions is not None and (INPUT, OFFLOAD) in self.actions


def nothing(record) -> Choice:
    """Return the choice of a layer that keeps its input alone."""
    return Choice((), record.input_bytes)


@dataclass
class Limits:
    """What a plan may use.

    Attributes:
        bytes_before: for each layer, the bytes that the layers before it may hold together during its backward, with
            their inputs; last, those of all layers.
        host_bytes: bytes of host memory.
        pcie_bandwidth: bytes a second to host memory and back.
    """

    bytes_before: list
    host_bytes: float
    pcie_bandwidth: float


def choices_of(record, limits, layers, rejected=()) -> list[Choice]:
    """Return the choices of a layer that no other beats in both memory and time.

    Args:
        record: of the layer.
        limits: `Limits`; the copies of a layer must fit the time of its forward, and its share of host memory.
        layers: number of layers.
        rejected: positions whose results must be recomputed.

    Returns:
        the choices, the leanest first.
    """
    if record.collective:  # ranks may plan differently, but must communicate in the same order
        return [nothing(record)]
    items = [(place, op) for place, op in enumerate(record.operations) if op.keepable and place not in rejected]
    items = sorted(items, key=lambda item: -item[1].seconds)[:LARGEST_CHOICES]
    host_bytes = min(limits.host_bytes / layers, LINK_SHARE * limits.pcie_bandwidth * record.seconds)
    states = torch.arange(3 if host_bytes > 0 else 2)
    actions = torch.cartesian_prod(*[states] * len(items)).view(-1, len(items)) if items else torch.zeros(1, 0)
    if host_bytes > 0 and record.input_can_leave:
        items = [(INPUT, Operation(None, "input", record.input_bytes, True)), *items]
        actions = torch.cat([torch.nn.functional.pad(actions, (1, 0), value=action) for action in (KEEP, OFFLOAD)])
        input_bytes = 0  # it is among the items
    else:
        input_bytes = record.input_bytes
    nbytes, on_host, seconds = torch.tensor(
        [(op.nbytes, buffer_bytes(op.nbytes), op.seconds) for _, op in items], dtype=torch.float64
    ).view(-1, 3).T  # fmt: skip
    is_offloaded = (actions == OFFLOAD).double()
    kept, offloaded = (actions == KEEP).double() @ nbytes + input_bytes, is_offloaded @ nbytes
    saved = (actions != RECOMPUTE).double() @ seconds
    fits_host = is_offloaded @ on_host <= limits.host_bytes / layers
    choices, most = [], min(host_bytes, float(nbytes.sum()))
    for limit in [most / 2**halvings for halvings in range(8)] + [0]:  # the buffers of more may not fit
        for row in _undominated(kept, saved, ((offloaded <= limit) & fits_host).nonzero().flatten()):
            item_actions = zip(items, actions[row].tolist())
            chosen_actions = [(position, action) for (position, _), action in item_actions if action != RECOMPUTE]
            chosen = tuple(sorted(pair for pair in chosen_actions if pair != (INPUT, KEEP)))  # an input stays anyway
            choices.append(Choice(chosen, int(kept[row]), int(offloaded[row]), float(saved[row])))
    whole = Choice(None, record.saved_bytes + record.input_bytes, 0, record.recomputing_seconds)
    lean = [choice for choice in dict.fromkeys([nothing(record), *choices]) if choice.nbytes < whole.nbytes]
    return sorted([*lean, whole], key=lambda choice: choice.nbytes)


def _undominated(nbytes, seconds, rows) -> list[int]:
    """Return those of `rows` that save more than all with fewer bytes."""
    rows = rows[seconds[rows].argsort(descending=True)]
    rows = rows[nbytes[rows].argsort(stable=True)]
    best = seconds[rows].cummax(0).values
    return rows[torch.cat((torch.ones(1, dtype=torch.bool), best[1:] > best[:-1]))].tolist()


def solve(choices, limits) -> list[Choice] | None:
    """Return one choice for each layer, which together save the most time within the limits.

    A table over the layers and the bytes that they hold finds the best of all combinations, up to the rounding of
    bytes to cells.

    Args:
        choices: for each layer, in the order of the forward, its choices.
        limits: `Limits`.

    Returns:
        the choices, or None where not even recomputing everything fits.
    """
    # the last layer's backward follows its forward at once, so it offloads nothing
    choices = [*choices[:-1], [choice for choice in choices[-1] if not choice.offloaded]]
    least = [min(choice.nbytes for choice in layer_choices) for layer_choices in choices]  # cells count bytes beyond
    room = [limit - sum(least[:part]) for part, limit in enumerate(limits.bytes_before)]
    if min(room) < 0:
        return None
    largest = sum(max(choice.nbytes for choice in layer_choices) - few for layer_choices, few in zip(choices, least))
    cell = max(1.0, min(room[-1], largest) / CELLS)
    last_cell = CELLS + len(choices)  # each choice may round up by one
    saved = torch.full((last_cell + 1,), -torch.inf, dtype=torch.float64)
    saved[0] = 0.0
    picks = []
    for layer, layer_choices in enumerate(choices):
        after, pick = torch.full_like(saved, -torch.inf), torch.zeros(len(saved), dtype=torch.int32)
        for number, choice in enumerate(layer_choices):
            cells = -int((least[layer] - choice.nbytes) // cell)
            last = min(int((room[layer + 1] - choice.offloaded) // cell), last_cell)
            if last < cells:
                continue
            copies = COPY_COST * choice.offloaded / limits.pcie_bandwidth if choice.offloaded else 0.0
            sums = saved[: last + 1 - cells] + (choice.seconds - copies)
            better = sums > after[cells : last + 1]
            after[cells : last + 1][better] = sums[better]
            pick[cells : last + 1][better] = number
        saved, picks = after, [*picks, pick]
    if saved.max() == -torch.inf:
        return None
    place = int((saved == saved.max()).nonzero()[0])  # the first: the fewest bytes
    plan = []
    for layer_choices, few, pick in zip(reversed(choices), reversed(least), reversed(picks)):
        plan.insert(0, layer_choices[int(pick[place])])
        place += int((few - plan[0].nbytes) // cell)
    return plan
