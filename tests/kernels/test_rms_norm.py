import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.norms.rms_norm import CASTING_MODES, fused_add_rms_norm, rms_norm
from liger_hw.testing.parity import check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("op", [rms_norm, fused_add_rms_norm], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(op, dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases(op.__name__, dtype, device):
        check(op, inputs, options, backend)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_an_eps_that_fp16_rounds_to_zero(eps, backend, device):
    """Rows beyond the last would be 0 / 0."""
    x, w = (torch.randn(*size, device=device).half().requires_grad_() for size in ((5, 64), (64,)))
    check(rms_norm, (x, w), {"eps": eps, "casting_mode": "none"}, backend)


@pytest.mark.parametrize("eps", [1e-46, 1e-40])
def test_an_eps_near_zero(eps, backend, device):
    """GPUs take roots of such numbers for 0."""
    x, w = (torch.randn(*size, device=device).requires_grad_() for size in ((3, 64), (64,)))
    check(rms_norm, (x, w), {"eps": eps}, backend)


ROUNDED = [torch.float16] if interpreting() else DTYPES[1:]  # the interpreter truncates to bf16


def nearly_bitwise(found, expected):
    """A sum's order may move rstd by an ulp of fp32, which a rounding can amplify to one ulp of the result, rarely."""
    assert all((a != b).float().mean() < 1e-3 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("cols", [256, 4])  # a few columns show whether their squares are rounded
@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_rounding_order(casting_mode, dtype, cols, backend, device):
    torch.manual_seed(0)
    rows = {256: 64, 4: 512}[cols]  # whole vectors: a CPU's rsqrt of a single fp16 value rounds twice
    x, residual = (torch.randn(rows, cols) for _ in range(2))
    if cols > 4:  # sums of squares that are exact in any order: another mean could round another way, in a whole row
        x, residual = (x * 8).round() / 8, (residual * 8).round() / 8
    x, residual = x.to(device, dtype), residual.to(device, dtype)
    w = torch.randn(cols, dtype=dtype, device=device)
    options = (w, 1e-6, 1.0, casting_mode)
    with use_backend(backend):
        found = rms_norm(x, *options), *fused_add_rms_norm(x, residual, *options)
    nearly_bitwise(found, (rms_norm.reference(x, *options), *fused_add_rms_norm.reference(x, residual, *options)))


@pytest.mark.parametrize("casting_mode", [mode for mode in CASTING_MODES if mode != "gemma"])  # which rounds nothing
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_rounding_order_of_the_weights_gradient(casting_mode, dtype, backend, device):
    """One row, whose gradient of an fp32 weight is a product without a sum."""
    torch.manual_seed(0)
    x = torch.randn(1, 4096, dtype=dtype, device=device)
    w = torch.ones(4096, device=device, requires_grad=True)
    grads = []
    for op in (rms_norm, rms_norm.reference):
        with use_backend(backend if op is rms_norm else None):
            (grad,) = torch.autograd.grad(op(x, w, 1e-6, 0.0, casting_mode).sum(), w)
        grads.append(grad)
    nearly_bitwise(grads[:1], grads[1:])


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
def test_without_eps(casting_mode, backend, device):
    torch.manual_seed(0)
    x, w = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((5, 123), (123,)))
    check(rms_norm, (x, w), {"eps": 0.0, "casting_mode": casting_mode}, backend)


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_keeps_the_weight_itself(casting_mode, dtype):
    """As a model's norm does: torch then refuses a backward after a write, and hooks find the parameter's memory."""
    x, w = torch.randn(3, 8, dtype=dtype, requires_grad=True), torch.randn(8, dtype=dtype, requires_grad=True)
    y = rms_norm.reference(x, w, casting_mode=casting_mode)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
