"""Solve for plans of records made by hand."""

import itertools
import random

import pytest

from liger_hw.checkpointing.recording import LayerRecord, Operation
from liger_hw.checkpointing.solver import KEEP, OFFLOAD, Limits, choices_of, solve

MIB = 2**20


def record(sizes, saved=None, seconds=1.0):
    """Make a layer of operations of (MiB, seconds)."""
    operations = [Operation(None, f"op{number}", size * MIB, True, time) for number, (size, time) in enumerate(sizes)]
    return LayerRecord(operations, (saved or sum(size for size, _ in sizes)) * MIB, MIB, seconds)


def planned(records, before, host=0, link=2.0**50):
    """Solve; `before` is MiB beyond the inputs."""
    inputs = [sum(each.input_bytes for each in records[:part]) for part in range(len(before))]
    limits = Limits([(size + 0.1) * MIB + more for size, more in zip(before, inputs)], host, link)  # cells round up
    return solve([choices_of(each, limits, len(records)) for each in records], limits)


def test_the_best_of_all_combinations():
    """The solver saves as much time as the best plan that brute force finds."""
    generator = random.Random(0)
    for _ in range(20):
        sizes = [(generator.randint(1, 9), generator.random()) for _ in range(3)]
        records = [record(sizes, saved=sum(size for size, _ in sizes) - 1)] * 3
        before = [100, *(generator.randint(5, 40) for _ in range(3))]
        options = [((), 0)]
        for count in range(1, 4):
            for chosen in itertools.combinations(sizes, count):
                options.append((sum(size for size, _ in chosen), sum(time for _, time in chosen)))
        options[0] = 0, 0.0
        options.append((records[0].saved_bytes // MIB, sum(time for _, time in sizes)))
        best = max(
            sum(time for _, time in plan)
            for plan in itertools.product(options, repeat=3)
            if all(sum(size for size, _ in plan[: n + 1]) <= before[n + 1] for n in range(3))
        )
        assert sum(choice.seconds for choice in planned(records, before)) == pytest.approx(best)


def test_later_layers_keep_more_where_gradients_fill_the_memory():
    """A layer may hold little before the backward of the first ones, when gradients exist."""
    choices = planned([record([(10, 1.0)])] * 4, [0, 0, 10, 20, 40])
    assert [choice.nbytes // MIB for choice in choices] == [1, 11, 11, 11]


def test_offloads_what_the_link_moves_in_a_forward_but_not_from_the_last_layer():
    records = [record([(10, 1.0), (10, 0.5)])] * 3
    choices = planned(records, [10, 10, 10, 10], host=1000 * MIB, link=12 * MIB)  # 0.9 of 12 MiB a layer
    assert [choice.offloaded // MIB for choice in choices] == [10, 10, 0]
    assert all(action == OFFLOAD and place == 0 for choice in choices[:2] for place, action in choice.actions)
    assert planned(records, [10, 10, 10, 10], host=29 * MIB)[0].offloaded == 0  # a third of the host's memory is less


def test_inputs_leave_where_they_do_not_fit_or_make_room():
    """Without the first two inputs the budget fits, or a layer keeps its result; the last input stays."""
    records = [record([(3, 1.0)])] * 3
    for each in records:
        each.input_can_leave = True
    for before, kept in (([0, 0, -1, -2], 1), ([9, 9, 9, 1], 4)):
        choices = planned(records, before, host=3 * MIB)  # 1 MiB a layer: the input alone
        assert [choice.offloads_input for choice in choices] == [True, True, False]
        assert sum(choice.nbytes for choice in choices) == kept * MIB
    assert planned(records, [0, 0, -1, -2]) is None
    assert not any(choice.offloaded for choice in planned(records, [9, 9, 9, 9], host=3 * MIB, link=100 * MIB))


def test_nothing_fits():
    assert planned([record([(1, 1.0)])] * 2, [5, -1, 5]) is None


def test_a_rejected_operation_is_recomputed():
    layer = record([(10, 1.0), (10, 2.0)])
    (choice, whole) = choices_of(layer, Limits([50] * 2, 0, 1.0), 1, rejected={1})[-2:]
    assert choice.actions == ((0, KEEP),) and whole.actions is None
