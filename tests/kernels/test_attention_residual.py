from math import inf, nan

import pytest
import torch

from liger_hw import attention_residual, use_backend
from liger_hw._triton import interpreting
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("attention_residual", dtype, device):
        check(attention_residual, inputs, options, backend)


def weights(cols, device, dtype=torch.float16):
    return randn(cols, device=device, dtype=dtype), randn(cols, device=device, dtype=dtype)


def compare_calls(through, inputs, backend):
    """Compare calls of the op and of its reference that `through` makes of the inputs."""
    call = through(attention_residual.reference)
    exact = run(call, [x.detach().double().requires_grad_() for x in inputs], {})
    plain = run(call, inputs, {})
    with use_backend(backend):
        compare(exact, plain, run(through(attention_residual), inputs, {}), f"attention_residual on {backend}")


@pytest.mark.parametrize("kind", [list, tuple])
def test_separate_blocks(kind, backend, device):
    """Each block of a list gets its gradient, also one that does not require it, or is listed twice."""
    torch.manual_seed(0)
    blocks = [randn(2, 5, 40, dtype=torch.float16, device=device) for _ in range(3)]

    def through(op):
        return lambda w_query, w_norm, *blocks: op(kind([*blocks, blocks[0]]), w_query, w_norm)

    compare_calls(through, [*weights(40, device), *blocks], backend)
    with use_backend(backend):
        blocks[1].requires_grad_(False)
        attention_residual(blocks=kind(blocks), w_query=blocks[0][0, 0], w_norm=blocks[0][0, 1]).sum().backward()
    assert blocks[1].grad is None and blocks[0].grad is not None and blocks[2].grad.any()


VIEWS = {
    "the blocks in the middle": lambda x: x.transpose(0, 1),
    "every second row": lambda x: x[:, ::2],
    "some columns": lambda x: x[..., 3:10],
    "rows and columns": lambda x: x.mT,
    "one row": lambda x: x[:, :1].expand(-1, 6, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided(view, backend, device):
    torch.manual_seed(0)
    x = randn(4, 6, 2, 12, dtype=torch.float16, device=device)

    def through(op):
        return lambda x, *weights: op(view(x), *weights)

    compare_calls(through, [x, *weights(view(x).shape[-1], device)], backend)


def test_strided_gradient_and_weights(backend, device):
    torch.manual_seed(0)
    x, table = randn(3, 4, 5, 12, dtype=torch.float16, device=device), randn(12, 2, dtype=torch.float16, device=device)

    def through(op):
        return lambda x, table: op(x, *table.unbind(1)).transpose(0, 1).contiguous()

    compare_calls(through, [x, table], backend)


@pytest.mark.parametrize("cols", [24, 17001])
def test_values_that_are_not_finite(cols, backend, device):
    """A row with one is NaN, as are its gradients; others are not touched by it."""
    torch.manual_seed(0)
    if cols > 24 and backend.startswith("amd:gfx1"):
        cols = 33001  # their registers hold a shorter row
    blocks = torch.randn(3, 5, cols, device=device)
    blocks[0, 1, 2], blocks[1, 2, 0], blocks[2, 3, 4] = nan, inf, -inf
    inputs = [blocks.requires_grad_(), *(x.requires_grad_() for x in torch.randn(2, cols, device=device))]
    with use_backend(backend):
        y, dv, dquery, dnorm = run(attention_residual, inputs, {})
    expected = run(attention_residual.reference, inputs, {})
    for found, wanted in zip((y, dv), expected):
        assert torch.equal(found.isnan(), wanted.isnan()) and found[..., [0, 4], :].isfinite().all()
        assert found[..., 1:4, :].isnan().all()
    assert dquery.isnan().all() and dnorm.isnan().all()


@pytest.mark.parametrize("score", [-inf, inf])
def test_infinite_scores(score, backend, device):
    """-inf weighs nothing, unless all scores are; inf makes NaN, as in torch's softmax."""
    blocks = torch.ones(3, 2, 8, device=device)
    blocks[1:, 0] = 0.0
    blocks[1:, 0, 0] = 3.0
    w_query = torch.tensor([1.0] + [0.0] * 7, device=device)
    w_norm = w_query.clone()
    blocks[0, :, 0] = 1.0
    w_norm[0] = score
    blocks[1, 0, 0] = -3.0
    with use_backend(backend):
        y = attention_residual(blocks, w_query, w_norm)
    torch.testing.assert_close(y, attention_residual.reference(blocks, w_query, w_norm), equal_nan=True)


@pytest.mark.parametrize("count", [1, 3])
def test_scores_beyond_fp32(count, backend, device):
    blocks = torch.ones(count, 2, 8, device=device)
    with use_backend(backend):
        y = attention_residual(blocks, torch.full((8,), 3e38, device=device), torch.full((8,), 10.0, device=device))
    assert y.isnan().all()  # the softmax of inf


def test_blocks_of_zeros(backend, device):
    """Without eps they have no norm: NaN; with it a score of 0. Absent rows of the last tile count nothing."""
    torch.manual_seed(0)
    blocks = torch.randn(3, 5, 24, device=device)
    blocks[1] = 0.0
    inputs = [blocks.requires_grad_(), *weights(24, device, torch.float32)]
    check(attention_residual, inputs, {}, backend)
    check(attention_residual, [blocks[::2].detach().requires_grad_(), *inputs[1:]], {"eps": 0.0}, backend)
    with use_backend(backend):
        assert attention_residual(*inputs, eps=0.0).isnan().all()


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    blocks, w = torch.randn(3, 4, 6, device=device), torch.randn(6, device=device)
    cases = [
        ((blocks.long(), w, w), "blocks"), ((w, w, w), "blocks"), ((blocks[:0], w, w), "blocks"),
        (([], w, w), "blocks"), (([1.0], w, w), "blocks"), (("text", w, w), "blocks"), ((None, w, w), "blocks"),
        (([blocks[0], blocks[1, :2]], w, w), "blocks"), ((list(blocks[:2]) + [blocks[2].half()], w, w), "blocks"),
        ((blocks, w[:5], w), "w_query"), ((blocks, w, w[None]), "w_norm"), ((blocks, w, None), "w_norm"),
    ]  # fmt: skip
    with use_backend(which or backend):
        for inputs, argument in cases:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                attention_residual(*inputs)


def test_deterministic(backend, device):
    inputs = randn(5, 60 if interpreting() else 300, 40, device=device), *weights(40, device, torch.float32)
    with use_backend(backend):
        first, second = (run(attention_residual, inputs, {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_compiles_lists_without_a_graph_break(backend, device):
    inputs = *weights(32, device), *(randn(4, 32, dtype=torch.float16, device=device) for _ in range(3))

    def call(w_query, w_norm, *blocks):
        return attention_residual(list(blocks), w_query, w_norm)

    with use_backend(backend):
        expected = run(call, inputs, {})
        found = run(torch.compile(call, fullgraph=True, backend="aot_eager"), inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
