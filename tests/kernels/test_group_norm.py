import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.norms.group_norm import group_norm, group_norm_moments_config
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run
from liger_hw.tuning import Config
from liger_hw.tuning.choice import override

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("group_norm", dtype, device):
        check(group_norm, inputs, options, backend)


@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_equals_torch(dtype, backend, device):
    torch.manual_seed(0)
    x, w, b = (torch.randn(*shape, dtype=dtype, device=device) for shape in ((2, 6, 300), (6,), (6,)))
    with use_backend(backend):
        found = group_norm(x, w, b, 3)
    expected = torch.nn.functional.group_norm(x.float(), 3, w.float(), b.float()).to(dtype)
    # a sum's order may move rstd by an ulp of fp32, which a rounding can amplify to one ulp of the result, rarely
    assert (found != expected).float().mean() < 1e-3


@pytest.mark.parametrize("block", [128, 32])
def test_far_from_zero(block, backend, device):
    """Groups with variance 1e-5 of the squared mean, in one block and in several."""
    torch.manual_seed(0)
    x = (1000 + 4 * torch.randn(3, 4, 80)).to(device, torch.float16).requires_grad_()
    w, b = (randn(4, dtype=torch.float16, device=device) for _ in range(2))
    with override(group_norm_moments_config.key(80, 2), Config({"ROWS": 2, "COLS": block, "STAGES": 1}, num_warps=1)):
        check(group_norm, (x, w, b), {"num_groups": 2}, backend)


def test_means_whose_squares_overflow(backend, device):
    torch.manual_seed(0)
    x = 1e20 + 1e18 * torch.randn(2, 4, 6, device=device)
    with use_backend(backend):
        found = group_norm(x, None, None, 2)
    torch.testing.assert_close(found, group_norm.reference(x.double(), None, None, 2).float(), rtol=1e-3, atol=1e-3)


VIEWS = {"channels last": lambda x: x.movedim(-1, 1), "positions": lambda x: x[..., ::2]}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided(view, backend, device):
    torch.manual_seed(0)
    x = randn(2, 4, 6, dtype=torch.float16, device=device)

    def of_view(op):
        return lambda x: op(view(x), None, None, 2)

    exact = run(of_view(group_norm.reference), [x.detach().double().requires_grad_()], {})
    plain = run(of_view(group_norm.reference), [x], {})
    with use_backend(backend):
        found = run(of_view(group_norm), [x], {})
    compare(exact, plain, found, f"strided group_norm on {backend}")


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 4, 0), (2, 0, 5)], ids=str)
def test_nothing_to_normalise(shape, backend, device):
    inputs = randn(*shape, device=device), randn(shape[1], device=device), randn(shape[1], device=device)
    with use_backend(backend):
        found = run(group_norm, inputs, {"num_groups": 2})
    assert [x.shape for x in found] == [shape, shape, shape[1:2], shape[1:2]] and not any(x.any() for x in found)


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x, w = torch.randn(4, 6, 2, device=device), torch.randn(6, device=device)
    cases = [((x.long(), None, None, 2), "x"), ((x[0, 0], None, None, 1), "x"), ((x, w[:5], None, 2), "weight")]
    cases += [((x, w, x, 2), "bias"), ((x, w, w, 4), "num_groups"), ((x, w, w, 0), "num_groups")]
    with use_backend(which or backend):
        for inputs, argument in cases:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                group_norm(*inputs)


def test_compiles_without_a_graph_break(backend, device):
    inputs = [randn(*shape, device=device) for shape in ((2, 4, 32), (4,), (4,))]
    with use_backend(backend):
        expected = run(group_norm, inputs, {"num_groups": 2})
        compiled = torch.compile(lambda *x: group_norm(*x, num_groups=2), fullgraph=True, backend="aot_eager")
        found = run(compiled, inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
