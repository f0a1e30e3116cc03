from contextlib import nullcontext
from math import inf, nan

import pytest
import torch
from torch.nn import functional as F

from liger_hw import multi_token_attention, use_backend
from liger_hw.kernels.attention import softmax
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run
from liger_hw.tuning import Config

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = pytest.mark.parametrize("sparse", [False, True], ids=["softmax", "sparsemax"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("multi_token_attention", dtype, device):
        check(multi_token_attention, inputs, options, backend)


@pytest.mark.parametrize("padding", ["same", "valid", (1, 2), 1])
def test_padding_as_in_conv2d(padding, backend, device):
    torch.manual_seed(0)
    inputs = [randn(*shape, device=device).requires_grad_() for shape in ((2, 2, 6, 6), (2, 2, 3, 3), (2,))]
    check(multi_token_attention, inputs, {"padding": padding}, backend)


@KINDS
@pytest.mark.parametrize("queries, keys", [(6, 6), (9, 4), (3, 8)])
def test_the_definition_is_a_softmax_of_each_row(sparse, queries, keys):
    """Rows that end at the query's own key, each by itself."""
    torch.manual_seed(0)
    inputs = [randn(*shape, dtype=torch.float64) for shape in ((2, 4, queries, keys), (6, 2, 2, 3), (6,))]

    def by_rows(scores, weight, bias):
        rows = []
        for i in range(queries):
            row = scores[:, :, i, : i + 1]
            row = softmax.sparsemax.reference(row) if sparse else row.softmax(-1)
            rows.append(F.pad(row, (0, keys - row.shape[-1])))
        return F.conv2d(torch.stack(rows, 2), weight, bias, (1, 2), (1, 0), 1, 2).tril()

    options = {"stride": (1, 2), "padding": (1, 0), "groups": 2, "sparse": sparse}
    expected = run(by_rows, inputs, {})
    for ours, theirs in zip(run(multi_token_attention.reference, inputs, options), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@KINDS
@pytest.mark.parametrize("rows, cols, dtype", [(1, 16, torch.float32), (4, 8, torch.float16)])
def test_rows_of_several_blocks(rows, cols, dtype, sparse, backend, device, monkeypatch):
    """Blocks that count whole, in part and not at all; tiles across the end of a matrix."""
    forward, _, backward, _ = softmax.KERNELS_BY_SPARSITY[sparse]

    def config(width, itemsize, device):
        return Config({"ROWS": rows, "COLS": cols}, 1, device=device)

    monkeypatch.setitem(softmax.KERNELS_BY_SPARSITY, sparse, (forward, config, backward, config))
    torch.manual_seed(0)
    for queries, keys in ((20, 20), (9, 13)):
        inputs = randn(2, 1, queries, keys, dtype=dtype, device=device), randn(1, 1, 1, 3, dtype=dtype, device=device)
        check(multi_token_attention, inputs, {"padding": (0, 1), "sparse": sparse}, backend)


VIEWS = {
    "channels last": lambda x: x.permute(0, 3, 1, 2),
    "keys before queries": lambda x: x.mT,
    "some keys": lambda x: x[..., 1:6],
    "some queries": lambda x: x[:, :, ::2],
    "one matrix": lambda x: x[:1, :1].expand(3, 4, -1, -1),
}


@KINDS
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided(view, sparse, backend, device):
    torch.manual_seed(0)
    x = randn(2, 4, 9, 8, dtype=torch.float16, device=device)
    channels = view(x).shape[1]
    weight = randn(3, 3, 2, channels, dtype=torch.float16, device=device)

    def through(op):
        return lambda x, weight: op(view(x), weight.permute(0, 3, 1, 2), padding=1, sparse=sparse).mT

    call = through(multi_token_attention.reference)
    exact = run(call, [x.detach().double().requires_grad_() for x in (x, weight)], {})
    plain = run(call, (x, weight), {})
    with use_backend(backend):
        found = run(through(multi_token_attention), (x, weight), {})
    compare(exact, plain, found, f"multi_token_attention on {backend}")


@KINDS
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_the_future_may_hold_anything(value, sparse, backend, device):
    """It changes no bit of the result and of the gradients, and gets gradients of 0."""
    torch.manual_seed(0)
    scores, weight = torch.randn(2, 3, 20, 20, device=device), randn(3, 3, 3, 3, device=device)
    future = torch.ones(20, 20, dtype=torch.bool, device=device).triu(1)
    options = {"padding": 1, "sparse": sparse}
    for which in (backend, "reference"):
        with use_backend(which):
            first, second = (
                run(multi_token_attention, (scores.masked_fill(future, x).requires_grad_(), weight), options)
                for x in (0.5, value)
            )
        assert all(torch.equal(a, b) for a, b in zip(first, second))
        assert not first[0][..., future].any() and not first[1][..., future].any()


@KINDS
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_rows_without_a_distribution(value, sparse, backend, device):
    """Their weights are NaN up to the query's own key, and 0 after it: the next query's sums show both."""
    torch.manual_seed(0)
    scores = torch.randn(1, 2, 12, 12, device=device)
    scores[0, 1, 7, : 8 if value == -inf else 1] = value
    inputs = scores.requires_grad_(), torch.ones(2, 1, 2, 1, device=device)
    options = {"padding": (1, 0), "groups": 2, "sparse": sparse}
    with use_backend(backend):
        y, grad = found = run(multi_token_attention, inputs, options)
    for ours, expected in zip(found, run(multi_token_attention.reference, inputs, options), strict=True):
        torch.testing.assert_close(ours, expected, equal_nan=True)
        assert ours[0, 1, 7, :8].isnan().all() and not ours[0, 1, 7, 8:].any() and ours[0, 0].isfinite().all()
    assert y[0, 1, 8, :8].isnan().all() and y[0, 1, 8, 8:].isfinite().all() and grad[0, 1, 8].isfinite().all()


def test_infinite_gradients_of_the_future(backend, device):
    """They do not reach a row's sum, which a convolution's gradient of the future would."""
    torch.manual_seed(0)
    scores, incoming = torch.randn(1, 1, 12, 12, device=device), torch.randn(12, 12, device=device)
    future = torch.ones(12, 12, dtype=torch.bool, device=device).triu(1)
    found = []
    with use_backend(backend):
        for value in (0.0, inf):
            leaf = scores.clone().requires_grad_()
            y = softmax.softmax_rows(leaf, False, True)
            y.backward(incoming.masked_fill(future, value)[None, None])
            found.append(leaf.grad)
    assert torch.equal(*found) and found[0].isfinite().all()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_mode_gives_the_same(mode, dtype, backend, device):
    torch.manual_seed(0)
    inputs = [randn(*shape, dtype=dtype, device=device) for shape in ((2, 2, 9, 9), (2, 2, 3, 3), (2,))]
    with use_backend(backend):
        expected = multi_token_attention(*inputs, padding=1)
        with mode():
            assert torch.equal(multi_token_attention(*inputs, padding=1), expected)
    assert torch.equal(expected, expected.tril()) and expected.dtype == dtype


def test_a_result_used_twice(backend, device):
    torch.manual_seed(0)
    inputs = [randn(*shape, device=device) for shape in ((1, 2, 9, 9), (2, 2, 3, 3))]

    def twice(op):
        def call(*inputs):
            y = op(*inputs, padding=1)
            return y * y.sum() + multi_token_attention.reference(y, inputs[1], padding=1)

        return call

    exact = run(twice(multi_token_attention.reference), [x.detach().double().requires_grad_() for x in inputs], {})
    plain = run(twice(multi_token_attention.reference), inputs, {})
    with use_backend(backend):
        found = run(twice(multi_token_attention), inputs, {})
    compare(exact, plain, found, f"multi_token_attention twice on {backend}")


@KINDS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autocast_casts_as_it_casts_a_convolution(dtype, sparse, backend, device):
    """The weights of attention keep the scores' dtype; the convolution has autocast's, also for an fp32 parameter."""
    torch.manual_seed(0)
    inputs = randn(1, 2, 9, 9, dtype=dtype, device=device), randn(2, 2, 3, 3, device=device)
    options = {"padding": 1, "sparse": sparse}
    exact = run(multi_token_attention.reference, [x.detach().double().requires_grad_() for x in inputs], options)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        plain = run(multi_token_attention.reference, inputs, options)
        with use_backend(backend):
            found = run(multi_token_attention, inputs, options)
    assert [x.dtype for x in found] == [torch.bfloat16, dtype, torch.float32]
    compare(exact, plain, found, f"multi_token_attention under autocast on {backend}")


def test_bad_inputs(backend, device):
    x, weight, bias = (torch.randn(*shape, device=device) for shape in ((2, 4, 6, 6), (4, 2, 3, 3), (4,)))
    cases = [
        ((x.long(), weight), {}, "scores"), ((x[0], weight), {}, "scores"), ((x, weight), {}, "weight"),
        ((x, weight, bias), {"groups": 3}, "groups"), ((x, weight, bias), {"groups": 0}, "groups"),
        ((x, weight[:3]), {"groups": 2}, "weight"), ((x, weight.half()), {"groups": 2}, "weight"),
        ((x, weight[0]), {"groups": 2}, "weight"), ((x, weight, bias[:2]), {"groups": 2}, "bias"),
        ((x, weight, bias.half()), {"groups": 2}, "bias"), ((x, weight, None, "1"), {"groups": "2"}, "groups"),
    ]  # fmt: skip
    for which in (backend, "reference"):
        with use_backend(which):
            for inputs, options, argument in cases:
                with pytest.raises(ValueError, match=f"^{argument}: got"):
                    multi_token_attention(*inputs, **options)
            for options in ({"dilation": 4}, {"stride": 0}, {"padding": -1}):
                with pytest.raises(RuntimeError):
                    multi_token_attention(x, weight, groups=2, **options)


@KINDS
def test_deterministic(sparse, backend, device):
    inputs = [randn(*shape, device=device) for shape in ((2, 3, 30, 30), (3, 3, 3, 3))]
    deterministic = torch.backends.cudnn.flags(deterministic=True) if device == "cuda" else nullcontext()
    with use_backend(backend), deterministic:
        first, second = (run(multi_token_attention, inputs, {"padding": 1, "sparse": sparse}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
