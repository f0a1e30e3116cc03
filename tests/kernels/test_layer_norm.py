import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.norms.layer_norm import layer_norm, layer_norm_backward_config, layer_norm_forward_config
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run
from liger_hw.tuning import Config
from liger_hw.tuning.choice import override

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("layer_norm", dtype, device):
        check(layer_norm, inputs, options, backend)


@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounding_order(dtype, backend, device):
    torch.manual_seed(0)
    x, w, b = (torch.randn(*shape, dtype=dtype, device=device) for shape in ((64, 256), (256,), (256,)))
    with use_backend(backend):
        found = layer_norm(x, w, b)
    # a sum's order may move rstd by an ulp of fp32, which a rounding can amplify to one ulp of the result, rarely
    assert (found != torch.nn.functional.layer_norm(x, (256,), w, b, 1e-6)).float().mean() < 1e-3


@pytest.mark.parametrize("block", [128, 32])
def test_far_from_zero(block, backend, device):
    """Rows with variance 1e-5 of the squared mean, in one block and in a loop."""
    torch.manual_seed(0)
    x = (1000 + 4 * torch.randn(3, 80)).to(device, torch.float16).requires_grad_()
    w, b = (randn(80, dtype=torch.float16, device=device) for _ in range(2))
    forward = Config({"ROWS": 2, "COLS": block}, num_warps=1)
    backward = Config({"ROWS": 2, "COLS": block, "STAGES": 1}, num_warps=1)
    with override(layer_norm_forward_config.key(80, 2), forward):
        with override(layer_norm_backward_config.key(80, 2), backward):
            check(layer_norm, (x, w, b), {}, backend)


VIEWS = {"rows": lambda x: x[:, ::2], "mT": lambda x: x.mT, "cols": lambda x: x[..., :5]}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided(view, backend, device):
    torch.manual_seed(0)
    x = randn(3, 8, 6, dtype=torch.float16, device=device)
    w = randn(view(x).shape[-1], dtype=torch.float16, device=device)
    exact = run(
        lambda x, w: layer_norm.reference(view(x), w), [t.detach().double().requires_grad_() for t in (x, w)], {}
    )
    plain = run(lambda x, w: layer_norm.reference(view(x), w), (x, w), {})
    with use_backend(backend):
        found = run(lambda x, w: layer_norm(view(x), w), (x, w), {})
    compare(exact, plain, found, f"strided layer_norm on {backend}")


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x, w = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    with use_backend(which or backend):
        for inputs, argument in [((x.long(),), "x"), ((x, w[:5]), "weight"), ((x, w, x), "bias")]:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                layer_norm(*inputs)


def test_deterministic(backend, device):
    inputs = [randn(*shape, device=device) for shape in ((40, 100), (100,), (100,))]
    with use_backend(backend):
        first, second = (run(layer_norm, inputs, {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_compiles_without_a_graph_break(backend, device):
    inputs = [randn(*shape, device=device) for shape in ((4, 32), (32,), (32,))]
    with use_backend(backend):
        expected = run(layer_norm, inputs, {})
        found = run(torch.compile(lambda *x: layer_norm(*x), fullgraph=True, backend="aot_eager"), inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
