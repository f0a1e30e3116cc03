"""Check weights that are columns of a matrix, expanded values, or None.

Kernels read value after value.
"""

import pytest
import torch

from liger_hw import (
    attention_residual,
    cross_entropy,
    dyt,
    fused_add_rms_norm,
    fused_linear_cross_entropy,
    layer_norm,
    rms_norm,
    use_backend,
)
from liger_hw.testing.parity import check

VIEWS = {"column": lambda w: torch.stack((w, -w), 1)[:, 0], "expanded": lambda w: w[:1].expand(w.shape)}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("op", [rms_norm, fused_add_rms_norm, layer_norm], ids=lambda op: op.__name__)
def test_norms(op, view, backend, device):
    torch.manual_seed(0)
    x, residual, w, b = (torch.randn(*shape, device=device) for shape in ((5, 40), (5, 40), (40,), (40,)))
    parameters = [view(p).detach().requires_grad_() for p in ((w, b) if op is layer_norm else (w,))]
    inputs = [x.requires_grad_(), residual.requires_grad_()] if op is fused_add_rms_norm else [x.requires_grad_()]
    check(op, (*inputs, *parameters), {}, backend)


@pytest.mark.parametrize("wide", ["x", "parameters"])
@pytest.mark.parametrize("op", [rms_norm, layer_norm, attention_residual, dyt], ids=lambda op: op.__name__)
def test_float64_beside_float32(op, wide):
    """The result has the dtype of `x`, and the numbers of the definition to its rounding."""
    torch.manual_seed(0)
    x, parameters = torch.randn(3, 5, 8), [torch.randn(8) for _ in range({rms_norm: 1, dyt: 3}.get(op, 2))]
    if op is dyt:
        parameters[0] = parameters[0][:1]
    exact = op(x.double(), *(p.double() for p in parameters))
    if wide == "x":
        x = x.double()
    else:
        parameters = [p.double() for p in parameters]
    result = op(x, *parameters)
    assert result.dtype == x.dtype
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [rms_norm, layer_norm], ids=lambda op: op.__name__)
def test_no_columns(op, backend, device):
    """There is no weight to read, and none is read."""
    x, w = torch.ones(2, 0, device=device, requires_grad=True), torch.ones(0, device=device, requires_grad=True)
    with use_backend(backend):
        op(x, w).sum().backward()
    assert x.grad.shape == (2, 0) and w.grad.shape == (0,)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_class_weights(view, backend, device):
    torch.manual_seed(0)
    x, w, head = torch.randn(6, 40, device=device), torch.rand(40, device=device), torch.randn(40, 8, device=device)
    y = torch.tensor([0, 3, 39, -100, 7, 7], device=device)
    check(cross_entropy, (x.requires_grad_(), y, view(w)), {}, backend)
    inputs = torch.randn(6, 8, device=device).requires_grad_(), head.requires_grad_(), y
    check(fused_linear_cross_entropy, inputs, {"ce_weight": view(w)}, backend)
