"""Patched models learn as plain ones with optimizers of few states: GaLore, and bitsandbytes in 8 bits or paged."""

import pytest
import tiny
import torch

RATE = 1e-3


def galore(model):
    galore_torch = pytest.importorskip("galore_torch", reason="the package galore_torch is not installed")
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    # Of a rank above that of a gradient the directions are arbitrary, and Adam scales their rounding errors up.
    projected = {"params": matrices, "rank": 2, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
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


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_steps(name):
    losses, start = [], [p.detach().clone() for p in tiny.model().parameters()]
    models = tiny.pair()
    for model in models:
        optimizer = OPTIMIZERS[name](model)
        for seed in range(3):
            loss = tiny.call(model, **tiny.tokens(seed=seed)).loss
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            losses.append(loss.detach())
    torch.testing.assert_close(torch.stack(losses[3:]), torch.stack(losses[:3]), rtol=1e-5, atol=0)
    for before, plain, patched in zip(start, *(model.parameters() for model in models), strict=True):
        assert not torch.equal(before, plain)
        torch.testing.assert_close(patched, plain, rtol=0, atol=RATE / 10)  # 2e-5 where an 8-bit state differs
