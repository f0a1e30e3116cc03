import dataclasses

import pytest
import torch

from liger_hw import grouped_mm, use_backend
from liger_hw.backends import device_of
from liger_hw.kernels.moe.grouped_mm import _by_torch
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("grouped_mm", dtype, device):
        check(grouped_mm, inputs, options, backend)


@pytest.mark.parametrize("ends", [(0, 0, 300), (300, 300, 300), (1, 129, 300), (0, 128, 300), (127, 128, 300)], ids=str)
def test_any_sizes_of_groups(ends, backend, device):
    """Groups begin within a tile, at its edge or where the last one began."""
    torch.manual_seed(0)
    rows, weights = randn(300, 24, device=device), randn(3, 24, 20, device=device)
    check(grouped_mm, (rows, weights, torch.tensor(ends, dtype=torch.int32, device=device)), {}, backend)


def test_groups_do_not_read_each_others_rows(backend, device):
    torch.manual_seed(0)
    rows, weights = randn(40, 24, device=device), randn(3, 24, 20, device=device)
    offs = torch.tensor([7, 20, 40], dtype=torch.int32, device=device)
    with torch.no_grad():
        rows[7:20] = torch.nan
    with use_backend(backend):
        out, drows, dweights = run(grouped_mm, (rows, weights, offs), {})
    for of_group in (out[:7], out[20:], drows, dweights[0], dweights[2]):
        assert of_group.isfinite().all()
    assert out[7:20].isnan().all() and dweights[1].isnan().all()


def test_empty_groups_have_zero_gradients(backend, device):
    rows, weights = randn(9, 16, device=device), randn(4, 16, 8, device=device)
    offs = torch.tensor([0, 5, 5, 9], dtype=torch.int32, device=device)
    with use_backend(backend):
        *_, dweights = run(grouped_mm, (rows, weights, offs), {})
    assert not dweights[[0, 2]].any() and dweights[[1, 3]].any((1, 2)).all()


@pytest.mark.parametrize("ends", [(0, 5, 8), (0, 5, 10), (6, 5, 9), (-1, 5, 9)], ids=str)
def test_ends_that_do_not_fit(ends):
    rows, weights = randn(9, 16), randn(3, 16, 8)
    with pytest.raises(ValueError, match="^offs: got .*: ascending numbers from 0, the last of them the 9 rows"):
        grouped_mm(rows, weights, torch.tensor(ends, dtype=torch.int32))


@pytest.mark.parametrize("layout", ["strided rows", "expanded gradient", "no unit stride"])
def test_strides(layout, backend, device):
    torch.manual_seed(0)
    rows, weights = randn(20, 48, device=device), randn(2, 24, 20, device=device)
    offs = torch.tensor([6, 20], dtype=torch.int32, device=device)
    if layout == "no unit stride":
        weights = randn(2, 24, 40, device=device)

    def strided(rows, weights, offs):
        weights = weights[:, :, ::2] if layout == "no unit stride" else weights
        out = grouped_mm(rows[:, :24], weights, offs)
        return out.sum(1, keepdim=True) if layout == "expanded gradient" else out

    with use_backend("reference"):
        expected = run(strided, (rows, weights, offs), {})
    with use_backend(backend):
        for found, of_reference in zip(run(strided, (rows, weights, offs), {}), expected):
            torch.testing.assert_close(found, of_reference)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradient_has_the_layout_of_the_weights(transposed, backend, device):
    weights = randn(2, 24, 20, device=device).detach()
    weights = (weights.transpose(1, 2) if transposed else weights).requires_grad_()
    rows, offs = randn(9, weights.shape[1], device=device), torch.tensor([6, 9], dtype=torch.int32, device=device)
    with use_backend(backend):
        grouped_mm(rows, weights, offs).sum().backward()
    assert weights.grad.stride() == weights.stride()


@pytest.mark.parametrize(
    "name, change",
    [
        ("rows", lambda rows, weights, offs: (rows[0], weights, offs)),
        ("weights", lambda rows, weights, offs: (rows, weights.double(), offs)),
        ("weights", lambda rows, weights, offs: (rows, weights[:, 1:], offs)),
        ("weights", lambda rows, weights, offs: (rows, weights, offs[1:])),
        ("offs", lambda rows, weights, offs: (rows, weights, offs.long())),
        ("offs", lambda rows, weights, offs: (rows, weights[:0], offs[:0])),
    ],
)
def test_bad_arguments(name, change, backend, device):
    rows, weights = randn(9, 16, device=device), randn(2, 16, 8, device=device)
    offs = torch.tensor([5, 9], dtype=torch.int32, device=device)
    for chosen in (backend, "reference"):
        with use_backend(chosen), pytest.raises(ValueError, match=f"^{name}: "):
            grouped_mm(*change(rows, weights, offs))


@pytest.mark.parametrize("inner, cols", [(0, 8), (16, 0)])
@pytest.mark.parametrize("forced", ["reference", None])
def test_widths_of_0(inner, cols, forced):
    offs = torch.tensor([2, 5], dtype=torch.int32)
    with use_backend(forced):
        assert torch.equal(grouped_mm(torch.ones(5, inner), torch.ones(2, inner, cols), offs), torch.zeros(5, cols))


@pytest.mark.parametrize(
    "change, fits",
    [
        (lambda x: x, True),
        (lambda x: x.mT.contiguous().mT, True),
        (lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0), False),  # the layout of peft's second factors
        (lambda x: x.flatten().unfold(0, 64, 16)[None, :16], False),  # rows that overlap
    ],
)
def test_operands_of_torchs_product(change, fits, monkeypatch):
    weights = change(torch.ones(8, 16, 32, dtype=torch.bfloat16))
    device = dataclasses.replace(device_of(weights), grouped_mm=True)
    monkeypatch.setattr("liger_hw.kernels.moe.grouped_mm.device_of", lambda x: device)
    with use_backend(None):
        assert _by_torch(800, 8, 16, None, weights) == fits


LAYOUTS = {
    "whole": lambda *sizes: torch.randn(*sizes),
    "odd stride": lambda *sizes: torch.randn(*sizes[:-1], sizes[-1] + 1)[..., :-1],
    "no unit stride": lambda *sizes: torch.randn(*sizes, 2)[..., 0],
    "transposed": lambda *sizes: torch.randn(*sizes[:-2], sizes[-1], sizes[-2]).mT,
    "groups last": lambda *sizes: torch.randn(*sizes[1:], sizes[0]).movedim(-1, 0),
    "one for all": lambda *sizes: torch.randn(1, *sizes[1:]).expand(sizes),
}


@pytest.mark.parametrize("weights", LAYOUTS)
@pytest.mark.parametrize("rows", LAYOUTS)
@pytest.mark.parametrize("count", [6, 1, 0])
def test_layouts_without_kernels(rows, weights, count):
    """torch's product refuses some of these operands, and gradients of a sum."""
    torch.manual_seed(0)
    offs, gradients = torch.tensor([count // 2, count], dtype=torch.int32), []
    inputs = LAYOUTS[rows](count, 16), LAYOUTS[weights](2, 16, 24)
    for function in (grouped_mm, grouped_mm.reference):
        leaves = [x.detach().requires_grad_() for x in inputs]
        for dout in (torch.ones(1, 1).expand(count, 24), torch.ones(24, count).t(), torch.ones(count, 25)[:, 1:]):
            function(*leaves, offs).backward(dout)
        gradients.append([leaf.grad for leaf in leaves])
    torch.testing.assert_close(*gradients)
