import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.norms.poly_norm import poly_norm
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("poly_norm", dtype, device):
        check(poly_norm, inputs, options, backend)


def parameters(cols, device, **kwargs):
    return [randn(size, device=device, **kwargs) for size in (3, 1)]


@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounds_once(dtype, backend, device):
    torch.manual_seed(0)
    inputs = [x.detach() for x in (randn(64, 256, dtype=dtype, device=device), *parameters(256, device, dtype=dtype))]
    with use_backend(backend):
        found = poly_norm(*inputs)
    # fp32 operations in another order can move a result across a tie, rarely
    assert (found != poly_norm.reference(*inputs)).float().mean() < 1e-3


VIEWS = {"rows": lambda x: x[:, ::2], "mT": lambda x: x.mT, "cols": lambda x: x[..., :5]}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided(view, backend, device):
    torch.manual_seed(0)
    x = randn(3, 8, 6, dtype=torch.float16, device=device)
    inputs = [x, *parameters(view(x).shape[-1], device, dtype=torch.float16)]

    def of_view(op):
        return lambda x, *parameters: op(view(x), *parameters)

    exact = run(of_view(poly_norm.reference), [t.detach().double().requires_grad_() for t in inputs], {})
    plain = run(of_view(poly_norm.reference), inputs, {})
    with use_backend(backend):
        found = run(of_view(poly_norm), inputs, {})
    compare(exact, plain, found, f"strided poly_norm on {backend}")


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)], ids=str)
def test_no_values(shape, backend, device):
    inputs = randn(*shape, device=device), *parameters(shape[1], device)
    with use_backend(backend):
        found = run(poly_norm, inputs, {})
    assert [x.shape for x in found[1:]] == [x.shape for x in inputs] and not any(x.any() for x in found)


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x = torch.randn(4, 6, device=device)
    w, b = x[0, :3], x[0, :1]
    cases = [((x.long(), w, b), "x"), ((x, b, b), "weight"), ((x, w, w), "bias")]
    with use_backend(which or backend):
        for inputs, argument in cases:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                poly_norm(*inputs)


def test_deterministic(backend, device):
    inputs = randn(400, 100, device=device), *parameters(100, device)
    with use_backend(backend):
        first, second = (run(poly_norm, inputs, {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_compiles_without_a_graph_break(backend, device):
    inputs = randn(4, 32, device=device), *parameters(32, device)
    with use_backend(backend):
        expected = run(poly_norm, inputs, {})
        found = run(torch.compile(lambda *x: poly_norm(*x), fullgraph=True, backend="aot_eager"), inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))


def test_sums_of_everything_in_fp32(backend, device):
    """All products have one sign, so that the sums are large."""
    torch.manual_seed(0)
    inputs = [x.detach().abs().requires_grad_() for x in (randn(300, 100, device=device), *parameters(100, device))]

    def gradients(op, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        return list(torch.autograd.grad(op(*leaves).sum(), leaves))

    exact, plain = gradients(poly_norm.reference, torch.float64), gradients(poly_norm.reference, torch.float32)
    with use_backend(backend):
        found = gradients(poly_norm, torch.float32)
    compare(exact, plain, found, f"poly_norm on {backend}")
