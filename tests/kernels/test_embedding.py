import pytest
import torch
from torch.nn import functional as F

from liger_hw import embedding, use_backend
from liger_hw.kernels.vocabulary.embedding import _chunk_of
from liger_hw.testing.inputs import randn, tokens
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNK = _chunk_of(1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("embedding", dtype, device):
        check(embedding, inputs, options, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_bitwise_equal(dtype, backend, device):
    table, indices = randn(9, 40, dtype=dtype, device=device), tokens(3, 50, vocabulary=9, device=device)
    with use_backend(backend):
        rows = embedding(table, indices)
    assert torch.equal(rows, F.embedding(indices, table)) and rows.is_contiguous()


@pytest.mark.parametrize("begin", [0, 1, 7, CHUNK - 1, CHUNK])
@pytest.mark.parametrize("size", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 11 * CHUNK + 5])
def test_a_run_across_chunks(begin, size, backend, device):
    """Tokens before and after the run are all different; one more run follows."""
    torch.manual_seed(0)
    drawn = torch.tensor([*range(begin), *[begin] * size, *range(begin + 1, begin + 10), *[begin + 10] * 3])
    drawn = drawn[torch.randperm(len(drawn))].to(device)
    table = randn(begin + 12, 200, device=device)  # one value says little of the errors of a sum
    check(embedding, (table, drawn), {}, backend)
    check(embedding, (table, drawn), {"padding_idx": begin}, backend)


@pytest.mark.parametrize("padding", [0.5, True, 7, -8])
def test_wrong_padding(padding, backend, device):
    with use_backend(backend), pytest.raises(ValueError, match="padding_idx: got"):
        embedding(randn(7, 4, device=device), tokens(4, vocabulary=7, device=device), padding)


def test_no_columns(backend, device):
    table, indices = randn(6, 0, device=device), tokens(4, vocabulary=6, device=device)
    with use_backend(backend):
        (grad,) = torch.autograd.grad(embedding(table, indices), table, torch.ones(4, 0, device=device))
    assert grad.shape == (6, 0)


@pytest.mark.parametrize("count", [8, 9, CHUNK, 4 * CHUNK, 4 * CHUNK + 1])
def test_all_different(count, backend, device):
    torch.manual_seed(0)
    drawn = torch.randperm(count + 3)[:count].to(device)
    check(embedding, (randn(count + 3, 24, dtype=torch.float16, device=device), drawn), {}, backend)


def test_chunks_grow_with_the_number_of_tokens(monkeypatch, backend, device):
    assert [_chunk_of(n) for n in (1, 2**15, 2**15 + 1, 2**17, 10**6)] == [32, 32, 64, 128, 1024]
    monkeypatch.setattr("liger_hw.kernels.vocabulary.embedding._chunk_of", lambda count: 4 * CHUNK)
    torch.manual_seed(0)
    for vocabulary in (1, 3, 40):
        drawn = tokens(9 * CHUNK, vocabulary=vocabulary, device=device)
        check(embedding, (randn(vocabulary, 24, device=device), drawn), {}, backend)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [3 * CHUNK, 1, 0])
def test_dtypes_of_indices(dtype, size, backend, device):
    torch.manual_seed(0)
    table = randn(7, 12, device=device)
    check(embedding, (table, tokens(2, size, vocabulary=7, dtype=dtype, device=device)), {}, backend)


def test_padding_is_read_but_gets_no_gradient(backend, device):
    """Its row has a value; NaN in its gradient reaches nothing."""
    table = randn(5, 8, device=device)
    drawn = torch.tensor([3, 1, 3, 4, 3], device=device)
    for padding in (3, -2):
        table.grad = None
        with use_backend(backend):
            rows = embedding(table, drawn, padding_idx=padding)
        dy = torch.ones_like(rows)
        dy[drawn == 3] = float("nan")
        rows.backward(dy)
        assert torch.equal(rows[0], table[3])
        assert table.grad.sum(1).tolist() == [0, 8, 0, 0, 8]


def compare_calls(through, inputs, backend):
    """Compare calls of the op and of its reference that `through` makes of the inputs."""
    call = through(embedding.reference)
    exact = run(call, [x.detach().double().requires_grad_() for x in inputs], {})
    plain = run(call, inputs, {})
    with use_backend(backend):
        compare(exact, plain, run(through(embedding), inputs, {}), f"embedding on {backend}")


VIEWS = {
    "some columns": lambda table: table[:, 3:20],
    "every second row": lambda table: table[::2],
    "columns": lambda table: table.t(),
    "one row": lambda table: table[:1].expand(6, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided_table(view, backend, device):
    torch.manual_seed(0)
    table, drawn = randn(24, 24, device=device), tokens(70, vocabulary=6, device=device)

    def through(op):
        return lambda table: op(view(table), drawn)

    compare_calls(through, [table], backend)


RESULTS = {
    "transposed": lambda y: y.transpose(0, 1).contiguous(),
    "columns first": lambda y: y.permute(2, 0, 1).contiguous(),
    "some columns": lambda y: y[..., 1:6],
    "a part of wider rows": lambda y: torch.cat([y.detach(), y], -1),
    "a sum": lambda y: y.sum((0, 1)),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_strided_gradient(result, backend, device):
    torch.manual_seed(0)
    table, drawn = randn(6, 24, device=device), tokens(5, 14, vocabulary=6, device=device)

    def through(op):
        return lambda table: result(op(table, drawn.t()))

    compare_calls(through, [table], backend)


def test_sums_are_fp32(backend, device):
    """2,049 ones are 2,048 in fp16 if each step rounds."""
    table = torch.zeros(2, 8, dtype=torch.float16, device=device).requires_grad_()
    with use_backend(backend):
        embedding(table, torch.ones(2050, dtype=torch.int64, device=device)).sum().backward()
    assert table.grad.tolist() == [[0.0] * 8, [2050.0] * 8]


@pytest.mark.parametrize("vocabulary", [1, 20])
def test_deterministic(vocabulary, backend, device):
    inputs = randn(vocabulary, 40, device=device), tokens(300, vocabulary=vocabulary, device=device)
    with use_backend(backend):
        first, second = (run(embedding, inputs, {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    table, drawn = randn(5, 8, device=device), torch.tensor([1, 4], device=device)
    cases = [
        ((table[0], drawn), "weight"), ((table.long(), drawn), "weight"), ((table, drawn.float()), "indices"),
        ((table, drawn.to("meta")), "indices"), ((table, drawn, 5), "padding_idx"), ((table, drawn, -6), "padding_idx"),
        ((table, [1, 4]), "indices"), ((table, drawn, "last"), "padding_idx"),
    ]  # fmt: skip
    with use_backend(which or backend):
        for inputs, argument in cases:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                embedding(*inputs)


@pytest.mark.parametrize("which", ["reference", None])
@pytest.mark.parametrize("index", [5, -1])
def test_an_index_outside_the_table(index, which, backend, device):
    if device != "cpu":
        pytest.skip("an assertion of a device ends its context")
    with use_backend(which or backend), pytest.raises(IndexError):
        embedding(randn(5, 8), torch.tensor([1, index]))
