"""Check that no loss hides a NaN: where plain torch's loss is NaN, ours is."""

import pytest
import torch

from liger_lab.bench.loss_cases import OURS, SMALL, TORCH, cases

CASES = {f"{case.op} {case.label}": case for case in cases(sizes=SMALL)}
ZERO_BY_DEFINITION = "VESPO"  # the authors' weight of a sequence is 0 where it is not a number


@pytest.mark.parametrize("name", CASES)
def test_nan_is_not_hidden(name, engine, device):
    """A NaN in any input, first row, one after the other."""
    case = CASES[name]
    torch.manual_seed(0)
    inputs = case.make(device, torch.float32)
    for place, tensor in enumerate(inputs):
        if not tensor.is_floating_point():
            continue
        spoiled = tensor.detach().clone()
        spoiled.view(-1)[0] = float("nan")
        changed = [*inputs[:place], spoiled.requires_grad_(tensor.requires_grad), *inputs[place + 1 :]]
        ours, theirs = (case.providers[provider](*changed) for provider in (OURS, TORCH))
        if name.startswith(ZERO_BY_DEFINITION) and not ours.isnan():
            continue
        assert ours.isnan() == theirs.isnan(), f"input {place} of {name}: {ours.item()}, torch's loss {theirs.item()}"
