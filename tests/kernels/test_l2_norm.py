import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.norms.l2_norm import L2_CASTING_MODES, l2_norm
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("l2_norm", dtype, device):
        check(l2_norm, inputs, options, backend)


@pytest.mark.parametrize("casting_mode", L2_CASTING_MODES)
@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounding_order(casting_mode, dtype, backend, device):
    torch.manual_seed(0)
    x = torch.randn(64, 128, dtype=dtype, device=device)
    with use_backend(backend):
        found = l2_norm(x, casting_mode=casting_mode)
    expected = l2_norm.reference(x, casting_mode=casting_mode)
    # a sum's order may move rstd by an ulp of fp32, which a rounding can amplify to one ulp of the result, rarely
    assert (found != expected).float().mean() < 1e-3


def test_none_is_that_of_transformers():
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    x = randn(3, 4, 32, dtype=torch.bfloat16)
    assert torch.equal(l2_norm(x, casting_mode="none"), modeling.l2norm(x))


def test_rows_apart_in_memory(backend, device):
    """Queries are heads of a wider row."""
    torch.manual_seed(0)
    x = randn(2, 5, 24, device=device)
    with use_backend(backend):
        found = run(lambda x: l2_norm(x.view(2, 5, 3, 8)[:, :, 1]), [x], {})
    expected = run(lambda x: l2_norm.reference(x.view(2, 5, 3, 8)[:, :, 1]), [x], {})
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x = torch.randn(4, 6, device=device)
    with use_backend(which or backend):
        for inputs, options, message in [
            ((x.long(),), {}, "^x: got"),
            ((x,), {"casting_mode": "llama"}, "casting_mode"),
        ]:
            with pytest.raises(ValueError, match=message):
                l2_norm(*inputs, **options)


def test_compiles_without_a_graph_break(backend, device):
    inputs = [randn(4, 32, device=device)]
    with use_backend(backend):
        expected = run(l2_norm, inputs, {})
        found = run(torch.compile(lambda x: l2_norm(x), fullgraph=True, backend="aot_eager"), inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
