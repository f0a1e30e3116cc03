import numpy
import pytest
import torch
import torch.nn.functional as F

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.backends import CPU, nvidia
from liger_hw.kernels.vocabulary import chunked_head
from liger_hw.kernels.vocabulary.chunked_head import MiB, chunk_rows
from liger_hw.kernels.vocabulary.cross_entropy import CrossEntropyOutput
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.testing.inputs import randn, targets
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
H200 = nvidia.ARCHS["sm90"]


@pytest.fixture
def engine(backend):
    """The test runs on the kernels."""
    with use_backend(backend):
        yield backend


def case(rows=12, features=16, classes=61, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    x, w = randn(rows, features, dtype=dtype, device=device), randn(classes, features, dtype=dtype, device=device)
    return x, w, targets(rows, classes, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("fused_linear_cross_entropy", dtype, device):
        check(fused_linear_cross_entropy, inputs, options, backend)


@pytest.mark.skipif(interpreting(), reason="the same there")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_plain_torch(dtype, small_cases):
    torch.manual_seed(0)
    with use_backend(None):
        assert fused_linear_cross_entropy.choose(torch.device("cpu")) == "cpu"
    for inputs, options in small_cases("fused_linear_cross_entropy", dtype):
        check(fused_linear_cross_entropy, inputs, options, None)


def test_float64_without_kernels():
    x, w, y = (t.double().requires_grad_() if t.is_floating_point() else t for t in (t.detach() for t in case()))
    options = {"label_smoothing": 0.1, "softcap": 3.0, "lse_square_scale": 0.1, "use_token_scaling": True}
    found = run(fused_linear_cross_entropy, (x, w, y), options | {"chunk_memory": 2000})
    for a, b in zip(found, run(fused_linear_cross_entropy.reference, (x, w, y), options)):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_is_torchs(reduction, engine, device):
    x, w, y = case(device=device)

    def torchs(x, w, y):
        return F.cross_entropy(F.linear(x, w), y, reduction=reduction, label_smoothing=0.1)

    exact = run(torchs, (x.detach().double().requires_grad_(), w.detach().double().requires_grad_(), y), {})
    options = {"reduction": reduction, "label_smoothing": 0.1, "chunk_memory": 1000}
    compare(exact, run(torchs, (x, w, y), {}), run(fused_linear_cross_entropy, (x, w, y), options), engine)


@pytest.mark.parametrize("accum_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_change_only_roundings(dtype, accum_dtype, engine, device, monkeypatch):
    """One chunk to one for each row, up to the most that accumulate in 16 bits."""
    monkeypatch.setattr(chunked_head, "chunk_rows", lambda rows, row_bytes, chunk_memory, device: chunk_memory)
    x, w, y = case(24, dtype=dtype, device=device)
    exact = run(
        fused_linear_cross_entropy.reference,
        (x.detach().double().requires_grad_(), w.detach().double().requires_grad_(), y),
        {},
    )
    plain = run(fused_linear_cross_entropy.reference, (x, w, y), {})
    for size in (24, 7, 1):
        options = {"chunk_memory": size, "accum_dtype": accum_dtype}
        compare(exact, plain, run(fused_linear_cross_entropy, (x, w, y), options), f"chunks of {size} rows")


def test_chunk_rows():
    row = 128256 * 2
    assert chunk_rows(8192, row, 512 * MiB, H200) == 2048
    assert chunk_rows(8191, row, 512 * MiB, H200) == 2048
    assert chunk_rows(2100, row, 512 * MiB, H200) == 1280  # two near equals, not 2,048 and 52
    assert chunk_rows(1000, row, 512 * MiB, H200) == 1000
    assert chunk_rows(8192, 16384 * 2, 512 * MiB, H200) == 4096  # whose products are as fast
    assert chunk_rows(140000, 16384 * 2, 512 * MiB, H200) == 4608  # 31 chunks, whose sum needs no fp32
    assert chunk_rows(8192, 300 * MiB, 512 * MiB, H200) == 1
    assert chunk_rows(8192, 3 * MiB, 512 * MiB, H200) == 170
    assert chunk_rows(1024, 16384 * 4, 512 * MiB, CPU) == 96  # a tenth, in whole tiles of 16 rows
    assert chunk_rows(5, 40, 512 * MiB, CPU) == 5  # a product of one row is slower and less exact
    assert chunk_rows(0, 40, 512 * MiB, H200) == 1
    for rows in (1, 255, 257, 4099):
        for row_bytes in (10, 10**5, 10**9):
            assert 1 <= chunk_rows(rows, row_bytes, 64 * MiB, H200) <= max(rows, 1)


def test_only_what_is_wanted_is_multiplied(engine, device, monkeypatch):
    x, w, y = case(device=device)
    counts = {}
    for name in ("mm", "addmm"):
        original = getattr(torch, name)

        def counted(*args, original=original, **kwargs):
            counts["n"] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(torch, name, counted)

    def products(x, w):
        counts["n"] = 0
        fused_linear_cross_entropy(x, w, y)
        return counts["n"]

    assert products(x, w) == 3
    assert products(x.detach(), w) == products(x, w.detach()) == 2
    assert products(x.detach(), w.detach()) == 1
    with torch.no_grad():
        assert products(x, w) == 1


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_target_outside_the_vocabulary(reduction, engine, device):
    x, w, y = case(device=device)
    y[2] = 61
    loss = fused_linear_cross_entropy(x, w, y, reduction=reduction)
    loss.sum().backward()
    bad = torch.arange(12, device=device) == 2
    assert torch.equal(x.grad.isnan(), bad[:, None].expand(12, 16)) and w.grad.isnan().all()
    assert loss.isnan().all() if reduction == "mean" else torch.equal(loss.isnan(), bad)


@pytest.mark.parametrize("backend_name", ["kernels", "plain"])
def test_incoming_gradient(backend_name, backend, device):
    with use_backend(backend if backend_name == "kernels" else None):
        x, w, y = case(device=device)
        bias = randn(61, device=device)
        grads = torch.autograd.grad(fused_linear_cross_entropy(x, w, y, bias), (x, w, bias))
        scaled = torch.autograd.grad(fused_linear_cross_entropy(x, w, y, bias) * 3, (x, w, bias))
    for a, b in zip(grads, scaled):
        torch.testing.assert_close(a * 3, b)


@pytest.mark.parametrize("plain", [False, True])
def test_backward_twice(plain, backend, device):
    x, w, y = case(device=device)
    with use_backend(None if plain else backend):
        loss = fused_linear_cross_entropy(x, w, y)
        torch.autograd.grad(loss, (x, w), retain_graph=True)
        with pytest.raises(RuntimeError, match="second"):
            torch.autograd.grad(loss, (x, w))
        rows = fused_linear_cross_entropy(x, w, y, reduction="none").sum()
        first = torch.autograd.grad(rows, (x, w), retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(rows, (x, w))))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_weight_written_before_the_backward(reduction, plain, backend, device):
    x, w, y = case(device=device)
    with use_backend("reference" if plain else backend):
        losses = [fused_linear_cross_entropy(rows, w, y, reduction=reduction).sum() for rows in (x, x.detach())]
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            losses[0].backward()
        if reduction == "mean":  # "none" computes the logits again
            losses[1].backward()  # as a linear layer, which reads the weight for the gradient of x alone


def test_a_weight_is_swapped_after_the_backward(engine, device):
    x, w, y = case(device=device)
    loss = fused_linear_cross_entropy(x, w, y)
    loss.backward()
    torch.utils.swap_tensors(w, torch.zeros_like(w))  # torch swaps no tensor that has weak references
    assert not w.any() and loss.isfinite()


def test_inputs_are_left(engine, device):
    x, w, y = case(device=device)
    before = x.detach().clone(), w.detach().clone()
    fused_linear_cross_entropy(x, w, y).backward()
    assert torch.equal(x, before[0]) and torch.equal(w, before[1])


def test_strides(engine, device):
    x, w, y = case(device=device)
    expected = run(fused_linear_cross_entropy, (x, w, y), {"chunk_memory": 1000})
    wide, tall = torch.randn(12, 40, device=device), w.detach().t().contiguous()
    wide[:, 3:19] = x.detach()
    leaf, weight = wide.requires_grad_(), tall.requires_grad_()
    loss = fused_linear_cross_entropy(leaf[:, 3:19], weight.t(), y, chunk_memory=1000)
    found = [loss.detach(), *torch.autograd.grad(loss, (leaf, weight), torch.randn((), generator=torch.Generator()))]
    torch.testing.assert_close(found[0], expected[0])  # not equal: a product of other strides is another product
    ratio = (found[1][:, 3:19] / expected[1]).nanmean()
    torch.testing.assert_close(found[1][:, 3:19], expected[1] * ratio)
    torch.testing.assert_close(found[2].t(), expected[2] * ratio)


def test_same_bits_every_run(engine, device):
    x, w, y = case(33, device=device)
    first, second = (run(fused_linear_cross_entropy, (x, w, y), {"chunk_memory": 3000}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("plain", [False, True])
def test_autocast(plain, backend, device):
    x, w, y = case(device=device)
    with use_backend(None if plain else backend), torch.autocast(device, torch.bfloat16):
        loss = fused_linear_cross_entropy(x, w, y)
        expected = F.cross_entropy(F.linear(x, w).float(), y)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert loss.dtype == x.grad.dtype == w.grad.dtype == torch.float32


def test_outputs(engine, device):
    x, w, y = case(device=device)
    found = fused_linear_cross_entropy(x, w, y, return_token_accuracy=True, return_predicted_tokens=True)
    logits = F.linear(x, w)
    assert isinstance(found, CrossEntropyOutput) and found.z_loss is None
    assert torch.equal(found.predicted_tokens, torch.where(y == -100, -1, logits.argmax(-1)))
    torch.testing.assert_close(found.token_accuracy, (logits.argmax(-1) == y)[y != -100].float().mean())


@pytest.mark.parametrize(
    "argument, change",
    [
        ("x", {"x": torch.zeros(2, 3, 4)}),
        ("weight", {"weight": torch.zeros(61, 15)}),
        ("weight", {"weight": torch.zeros(61, 16, dtype=torch.float64)}),
        ("logits_dtype", {"logits_dtype": torch.bfloat16}),
        ("bias", {"bias": torch.zeros(60)}),
        ("target", {"target": torch.zeros(11, dtype=torch.int64)}),
        ("ce_weight", {"ce_weight": torch.zeros(60)}),
        ("reduction", {"reduction": "batchmean"}),
        ("accum_dtype", {"accum_dtype": torch.bfloat16}),
        ("chunk_memory", {"chunk_memory": 0}),
    ],
)
def test_bad_input(argument, change):
    x, w, y = case()
    with pytest.raises(ValueError, match=argument):
        fused_linear_cross_entropy(**({"x": x, "weight": w, "target": y} | change))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("plain", [False, True])
def test_compiles_whole(reduction, plain, backend, device):
    x, w, y = case(device=device)

    def loss(x, w):
        return fused_linear_cross_entropy(x * 1, w, y, label_smoothing=0.1, reduction=reduction)

    with use_backend(None if plain else backend):
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for a, b in zip(run(loss, (x, w), {}), run(compiled, (x, w), {})):
            torch.testing.assert_close(a, b)


@pytest.mark.skipif(not interpreting() and torch.accelerator.is_available(), reason="counts the CPU's allocations")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_only_rows_that_may_count_are_multiplied(reduction, engine, device, monkeypatch):
    x, weight = (torch.randn(n, 8, device=device).requires_grad_() for n in (30, 11))
    target = torch.randint(11, (30,), device=device).masked_fill(torch.arange(30, device=device) % 3 > 0, -100)
    asked = {"reduction": reduction, "return_token_accuracy": True, "return_predicted_tokens": True}
    rows, write_logits = [], chunked_head.write_logits

    def run(**bound):
        output = fused_linear_cross_entropy(x, weight, target, **asked, **bound)
        return *output, *torch.autograd.grad(output.loss.sum(), (x, weight))

    expected = run()
    monkeypatch.setattr(
        chunked_head, "write_logits", lambda logits, *head: rows.append(len(logits)) or write_logits(logits, *head)
    )
    for bound in (10, numpy.int64(12), 40):
        rows.clear()
        for found, wanted in zip(run(counted_rows=bound), expected, strict=True):
            assert found is wanted is None or torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert sum(rows) == min(bound, 30) * (2 if reduction == "none" else 1)


def test_more_rows_than_may_count(device):
    x, weight = (torch.randn(n, 8, device=device).requires_grad_() for n in (5, 11))
    target = torch.arange(5, device=device)
    run = fused_linear_cross_entropy
    if device == "cpu":
        with pytest.raises(ValueError, match=r"counted_rows: got 3, allowed: at least the 5 rows"):
            run(x, weight, target, counted_rows=3)
    else:
        assert run(x, weight, target, counted_rows=3).isnan()
    with pytest.raises(ValueError, match=r"counted_rows: got -1, allowed: None or a number of rows"):
        run(x, weight, target, counted_rows=-1)


def test_memory_on_a_cpu():
    """Memory without the gradients is less than a third of the logits'."""
    x, w, y = case(1024, 8, 4096)
    logits = 1024 * 4096 * 4
    with torch.profiler.profile(profile_memory=True) as profile:
        fused_linear_cross_entropy(x, w, y).backward()
    allocated = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    assert peak < logits / 3 + (x.numel() + w.numel()) * 4
