"""Patched models learn as plain ones with optimizers of few states: GaLore, and bitsandbytes in 8 bits or paged."""

import copy

import pytest
import tiny
import torch

from liger_hw.testing import parity

RATE = 1e-3


def galore(model):
    galore_torch = pytest.importorskip("galore_torch", reason="the package galore_torch is not installed")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    # Of a rank above that of a gradient the directions are arbitrary, and Adam scales their rounding errors up. Their
    # signs are arbitrary, too, so Adam's state of one projection means another step in the next one.
    projected = {"params": matrices, "rank": 2, "update_proj_gap": 4, "scale": 0.25, "proj_type": "std"}
    return galore_torch.GaLoreAdamW([projected, {"params": others}], RATE, no_deprecation_warning=True)


def bitsandbytes(name, **options):
    def make(model):
        package = pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")
        return getattr(package.optim, name)(model.parameters(), RATE, **options)

    return make


OPTIMIZERS = {
    "galore": galore,
    "adamw8bit": bitsandbytes("AdamW8bit", min_8bit_size=0),
    "paged_adamw8bit": bitsandbytes("PagedAdamW8bit", min_8bit_size=0),
    "paged_adamw": bitsandbytes("PagedAdamW32bit"),
}


def learned(model, name):
    """Return the losses of three steps, and the parameters after them."""
    optimizer, losses = OPTIMIZERS[name](model), []
    for seed in range(3):
        loss = tiny.call(model, **tiny.tokens(seed=seed)).loss
        loss.backward()
        optimizer.step(), optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, [p.detach() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "galore"])
def test_three_steps(name):
    start = [p.detach().clone() for p in tiny.model().parameters()]
    (losses, parameters), (patched_losses, patched) = (learned(model, name) for model in tiny.pair())
    torch.testing.assert_close(patched_losses, losses, rtol=1e-5, atol=0)
    assert not any(map(torch.equal, start, parameters))
    torch.testing.assert_close(patched, parameters, rtol=0, atol=RATE / 10)  # 2e-5 where an 8-bit state differs


def test_three_steps_of_galore():
    """Roundings may turn its directions, those of an SVD, so both models are held to one in fp64."""
    plain, patched = tiny.pair()
    exact = copy.deepcopy(plain).double()
    results = [[*losses, *parameters] for losses, parameters in (learned(m, "galore") for m in (exact, plain, patched))]
    parity.compare(*results, "GaLore", [torch.zeros(1)])
