import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from liger_hw import use_backend
from liger_hw._torch import clamp_passes_at_limits
from liger_hw._triton import interpreting
from liger_hw.kernels.mlp.clamped_glu import clamped_swiglu
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run
from liger_lab.cases.clamped_glu import CLAMPS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("clamped_swiglu", dtype, device):
        check(clamped_swiglu, inputs, options, backend)


@pytest.mark.parametrize("options", CLAMPS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounding_order(options, dtype, backend, device):
    torch.manual_seed(0)
    x = 2 * torch.randn(64, 512, dtype=dtype, device=device)
    with use_backend(backend):
        found = clamped_swiglu(x, **options)
    # another exp may differ by an ulp of fp32, which a rounding can amplify to one ulp of the result, rarely
    assert (found != clamped_swiglu.reference(x, **options)).float().mean() < 1e-3


@pytest.mark.parametrize("options", CLAMPS, ids=str)
def test_strided(options, backend, device):
    torch.manual_seed(0)
    x = randn(3, 6, 40, dtype=torch.float16, device=device)

    def by(op):
        return lambda x: op(x.transpose(0, 1)[..., 4:], **options)

    exact = run(by(clamped_swiglu.reference), [x.detach().double().requires_grad_()], {})
    plain = run(by(clamped_swiglu.reference), [x], {})
    with use_backend(backend):
        found = run(by(clamped_swiglu), [x], {})
    compare(exact, plain, found, f"strided clamped_swiglu on {backend}")


def test_a_limit_between_two_numbers(backend, device):
    """Torch clamps to the limit in the tensor's dtype: 0.7 is 0.7002 in fp16, which values may equal."""
    x = torch.tensor([0.7, 0.75, 0.65, -0.7], dtype=torch.float16, device=device).requires_grad_()
    gradients = []
    for chosen in (backend, "reference"):
        with use_backend(chosen):
            y = clamped_swiglu(x, x, limit=0.7)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert (gradients[0] != 0).equal(gradients[1] != 0)


def test_at_the_limit_and_beyond(backend, device):
    """Gradients vanish beyond the limit, and at it as torch.clamp's, from 2.15 on; NaN stays NaN."""
    gate = torch.tensor([1.0, 1.5, -9.0, float("nan"), 0.5], device=device, requires_grad=True)
    up = torch.tensor([-1.0, 0.5, 2.0, 0.5, float("nan")], device=device, requires_grad=True)
    with use_backend(backend):
        y = clamped_swiglu(gate, up, limit=1.0)
        y.sum().backward()
    expected = clamped_swiglu.reference(gate, up, limit=1.0)
    torch.testing.assert_close(y, expected, equal_nan=True)
    found, wanted = (gate.grad, up.grad), torch.autograd.grad(expected.sum(), (gate, up))
    for ours, theirs in zip(found, wanted):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert gate.grad[1] == 0 and up.grad[2] == 0
    assert (gate.grad[0] != 0) == (up.grad[0] != 0) == clamp_passes_at_limits()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, FakeTensorMode], ids=lambda mode: mode.__name__)
def test_what_torchs_clamp_does_is_found_in_any_mode(mode):
    clamp_passes_at_limits.cache_clear()
    with mode(), torch.autograd.graph.saved_tensors_hooks(print, print):
        found = clamp_passes_at_limits()
    clamp_passes_at_limits.cache_clear()
    assert clamp_passes_at_limits() == found


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x = torch.randn(3, 8, device=device)
    bad = {
        "gate": ((x[:, :7],), {}),
        "up": ((x, x[:, :4]), {}),
        "interleaved": ((x, x), {"interleaved": True}),
        "limit": ((x, x), {"limit": 0.0}),
    }
    with use_backend(which or backend):
        for argument, (inputs, options) in bad.items():
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                clamped_swiglu(*inputs, **options)


def test_compiles_without_a_graph_break(backend, device):
    inputs = (randn(3, 16, device=device),)
    with use_backend(backend):
        expected = run(clamped_swiglu, inputs, CLAMPS[0])
        compiled = torch.compile(lambda x: clamped_swiglu(x, **CLAMPS[0]), fullgraph=True, backend="aot_eager")
        found = run(compiled, inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
