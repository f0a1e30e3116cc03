from math import inf, nan

import pytest
import torch

from liger_hw import neighborhood_attention, use_backend
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("neighborhood_attention", dtype, device):
        check(neighborhood_attention, inputs, options, backend)


@pytest.mark.parametrize(("kernel_size", "dilation"), [(1, 1), (5, 1), (3, 4), (31, 2)])
def test_the_definition_is_masked_attention(kernel_size, dilation):
    torch.manual_seed(0)
    inputs = [randn(2, 3, 20, 6, dtype=torch.float64) for _ in range(3)]
    places = torch.arange(20)
    apart = (places[:, None] - places).abs()
    near = (apart <= kernel_size // 2 * dilation) & (apart % dilation == 0)
    masked = torch.nn.functional.scaled_dot_product_attention
    found = run(neighborhood_attention.reference, inputs, {"kernel_size": kernel_size, "dilation": dilation})
    for ours, expected in zip(found, run(masked, inputs, {"attn_mask": near}), strict=True):
        torch.testing.assert_close(ours, expected)


def compare_calls(through, inputs, backend):
    """Compare calls of the op and of its reference that `through` makes of the inputs."""
    call = through(neighborhood_attention.reference)
    exact = run(call, [x.detach().double().requires_grad_() for x in inputs], {})
    plain = run(call, inputs, {})
    with use_backend(backend):
        found = run(through(neighborhood_attention), inputs, {})
    compare(exact, plain, found, f"neighborhood_attention on {backend}")


VIEWS = {
    "heads as a transposed dimension": lambda x: x.transpose(1, 2),
    "positions with a stride": lambda x: x[:, :, ::2],
    "some columns": lambda x: x[..., 1:6],
    "rows and columns": lambda x: x.mT,
    "one batch entry": lambda x: x[:1].expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided(view, backend, device):
    torch.manual_seed(0)
    inputs = [randn(2, 7, 6, 8, dtype=torch.float16, device=device) for _ in range(3)]

    def through(op):
        return lambda *inputs: op(*map(view, inputs), kernel_size=3)

    compare_calls(through, inputs, backend)


def test_one_projection(backend, device):
    """Query, key and value are slices of one tensor, and the next projection gets heads side by side."""
    torch.manual_seed(0)

    def through(op):
        return lambda x: op(*x.transpose(1, 3).unbind(2), kernel_size=3).transpose(1, 2).flatten(-2)

    compare_calls(through, [randn(2, 9, 3, 4, 8, dtype=torch.float16, device=device)], backend)


def test_different_strides(backend, device):
    torch.manual_seed(0)

    def through(op):
        return lambda q, k, v: op(q, k.transpose(1, 2), v.mT, kernel_size=5, dilation=2).mT

    sizes = (2, 3, 9, 8), (2, 9, 3, 8), (2, 3, 8, 9)
    compare_calls(through, [randn(*size, dtype=torch.float16, device=device) for size in sizes], backend)


def test_the_result_has_the_layout_of_the_query(backend, device):
    x = torch.randn(2, 9, 3, 8, device=device).transpose(1, 2).requires_grad_()
    with use_backend(backend):
        y = neighborhood_attention(x, x, x)
        y.backward(torch.ones_like(y))
    assert y.stride() == x.stride() == x.grad.stride()


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("which", range(3))
def test_values_that_are_not_finite(which, value, backend, device):
    """They reach the positions whose neighbour they are, and no others."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, 16, 8, device=device) for _ in range(3)]
    inputs[which][0, 1, 6, 3] = value
    inputs = [x.requires_grad_() for x in inputs]
    options = {"kernel_size": 3, "dilation": 2}
    with use_backend(backend):
        found = run(neighborhood_attention, inputs, options)
    reached = {0: [6], 1: [4, 6, 8], 2: [4, 6, 8]}[which]
    beyond = [i for i in range(16) if i not in (2, 4, 6, 8, 10)]
    for ours, expected in zip(found, run(neighborhood_attention.reference, inputs, options)):
        assert ours[:, 0].isfinite().all() and ours[:, 1, beyond].isfinite().all()
        assert torch.equal(ours[0, 1].isfinite().all(-1), expected[0, 1].isfinite().all(-1))
    others = [i for i in range(16) if i not in reached]
    assert found[0][0, 1, others].isfinite().all()


def test_scores_of_any_size(backend, device):
    """A neighbour with all of the weight, all alike, and a negative scale."""
    torch.manual_seed(0)
    inputs = [randn(1, 2, 40, 16, dtype=torch.float16, device=device) for _ in range(3)]
    for scale in (2.0, 0.0, -0.5):
        check(neighborhood_attention, inputs, {"scale": scale}, backend)


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x = torch.randn(2, 3, 6, 8, device=device)
    cases = [
        ((x.long(), x, x), "query"), ((x[0], x[0], x[0]), "query"), ((x, x[:, :1], x), "key"),
        ((x, x, x.half()), "value"), ((x, x, None), "value"), ((x, x, x, 4), "kernel_size"),
        ((x, x, x, -1), "kernel_size"), ((x, x, x, "7"), "kernel_size"), ((x, x, x, 3, 0), "dilation"),
        ((x, x, x, 3, 1, "1"), "scale"),
    ]  # fmt: skip
    with use_backend(which or backend):
        for inputs, argument in cases:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                neighborhood_attention(*inputs)


def test_deterministic(backend, device):
    inputs = [randn(2, 3, 100, 24, device=device) for _ in range(3)]
    with use_backend(backend):
        first, second = (run(neighborhood_attention, inputs, {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
