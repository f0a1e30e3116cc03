import pytest
import torch
import torch.nn.functional as F

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax
from liger_hw.kernels.vocabulary.selective_log_softmax import selective_log_softmax
from liger_hw.sharding import DimensionShard
from liger_hw.testing.inputs import randn, targets
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["kernels", "plain"])
def engine(request, backend):
    """Run the test on the kernels and on a CPU's implementation."""
    with use_backend(backend if request.param == "kernels" else None):
        yield request.param


def case(rows=12, features=16, classes=61, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    x, w = randn(rows, features, dtype=dtype, device=device), randn(classes, features, dtype=dtype, device=device)
    return x, w, targets(rows, classes, device)


@pytest.mark.parametrize("op", [selective_log_softmax, fused_linear_selective_log_softmax], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(op, dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases(op.__name__, dtype, device):
        check(op, inputs, options, backend)


@pytest.mark.skipif(interpreting(), reason="the same there")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity_of_plain_torch(dtype, small_cases):
    torch.manual_seed(0)
    with use_backend(None):
        assert fused_linear_selective_log_softmax.choose(torch.device("cpu")) == "cpu"
    for inputs, options in small_cases("fused_linear_selective_log_softmax", dtype):
        check(fused_linear_selective_log_softmax, inputs, options, None)


def test_is_torchs(engine, device):
    """Log-probability, entropy and lse as torch's own functions give them."""
    x, w, y = case(device=device)
    y = y.clamp(min=0)
    found = fused_linear_selective_log_softmax(x, w, y, temperature=0.7, return_entropy=True, return_lse=True)
    z = F.linear(x, w).double() / 0.7
    torch.testing.assert_close(found.log_probs.double(), -F.cross_entropy(z, y, reduction="none"), rtol=1e-5, atol=1e-5)
    entropy = torch.distributions.Categorical(logits=z).entropy()
    torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.lse.double(), torch.logsumexp(z, -1), rtol=1e-5, atol=1e-5)
    assert fused_linear_selective_log_softmax(x, w, y).ndim == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chunks_change_only_roundings(dtype, engine, device):
    x, w, y = case(24, dtype=dtype, device=device)
    wide = (x.detach().double().requires_grad_(), w.detach().double().requires_grad_(), y)
    options = {"return_entropy": True, "return_lse": True}
    exact = run(fused_linear_selective_log_softmax.reference, wide, options)
    plain = run(fused_linear_selective_log_softmax.reference, (x, w, y), options)
    for memory in (1, 1000, 3000, 10**6):
        found = run(fused_linear_selective_log_softmax, (x, w, y), options | {"chunk_memory": memory})
        compare(exact, plain, found, f"chunks of {memory} bytes")


def test_float64_without_kernels():
    x, w, y = case()
    wide = x.detach().double().requires_grad_(), w.detach().double().requires_grad_(), y
    options = {"softcap": 3.0, "temperature": 0.5, "logit_scale": 2.0, "return_entropy": True, "return_lse": True}
    found = run(fused_linear_selective_log_softmax, wide, options | {"chunk_memory": 2000})
    for a, b in zip(found, run(fused_linear_selective_log_softmax.reference, wide, options)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_extreme_logits(engine, device):
    """Rows of +-1e4 give finite results, and certainty has entropy 0."""
    x = torch.tensor([[1e4], [-1e4], [1.0]], device=device, requires_grad=True)
    w = torch.tensor([[1.0], [-1.0], [0.5]], device=device)
    y = torch.tensor([0, 0, 2], device=device)
    found = fused_linear_selective_log_softmax(x, w, y, return_entropy=True)
    (found.log_probs.sum() + found.entropy.sum()).backward()
    assert found.log_probs[0] == 0 and found.log_probs[1] == -2e4 and found.entropy[0] == 0
    assert found.log_probs.isfinite().all() and found.entropy.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.parametrize("classes", [61, 64, 40003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_infinite_logits(dtype, classes, engine, device):
    """The log-sum-exp is +inf, without NaN in the row; the rest of the row is NaN, as a log-softmax."""
    torch.manual_seed(0)
    x, y = torch.randn(6, classes, device=device, dtype=dtype), torch.arange(6, device=device)
    for row, col in enumerate((0, classes // 2, classes - 1, slice(None))):
        x[row, col] = float("inf")
    x[4, 3], x[4, -2], x[3, ::2] = float("inf"), float("nan"), float("-inf")
    options = {"return_entropy": True, "return_lse": True, "temperature": 0.7}
    expected = run(selective_log_softmax.reference, (x.requires_grad_(), y), options)
    assert expected[2][:4].isposinf().all() and expected[2][4].isnan() and expected[3][:5].isnan().all()
    results = run(selective_log_softmax, (x, y), options)
    torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-5, equal_nan=True)
    with torch.no_grad():  # of a head
        bias = x[1]
        found = fused_linear_selective_log_softmax(x.new_zeros(6, 16), x.new_zeros(classes, 16), y, bias, **options)
    assert found.lse.isposinf().all() and found.log_probs.isnan().all() and found.entropy.isnan().all()


def test_in_place(backend, device):
    x, _, y = case(classes=130, features=130, device=device)
    logits = x.detach().clone()
    with use_backend(backend):
        (expected,) = torch.autograd.grad(selective_log_softmax(x, y).sum(), x)
        owned = logits.requires_grad_() * 1
        log_probs = selective_log_softmax(owned, y, in_place=True)
        (found,) = torch.autograd.grad(log_probs.sum(), logits, retain_graph=True)
        with pytest.raises(RuntimeError, match="second"):
            torch.autograd.grad(log_probs.sum(), logits)
    assert torch.equal(found, expected) and torch.equal(owned, expected)


def test_backward_twice_and_same_bits(engine, device):
    x, w, y = case(33, device=device)
    log_probs = fused_linear_selective_log_softmax(x, w, y, chunk_memory=3000).square().sum()
    first = torch.autograd.grad(log_probs, (x, w), retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(log_probs, (x, w))))


def test_token_outside_the_vocabulary(engine, device):
    x, w, y = case(device=device)
    y[2] = 61
    if engine == "plain" and device == "cpu":
        with pytest.raises(ValueError, match="tokens: got \\[61\\]"):
            fused_linear_selective_log_softmax(x, w, y)
        return
    found = fused_linear_selective_log_softmax(x, w, y)
    found.sum().backward()
    bad = torch.arange(12, device=device) == 2
    assert torch.equal(found.isnan(), bad) and torch.equal(x.grad.isnan(), bad[:, None].expand(12, 16))


@pytest.mark.parametrize(
    "argument, change",
    [
        ("x", {"x": torch.zeros(12, 16, dtype=torch.int64)}),
        ("weight", {"weight": torch.zeros(61, 15)}),
        ("weight", {"weight": torch.zeros(61, 16, dtype=torch.float64)}),
        ("logits_dtype", {"logits_dtype": torch.bfloat16}),
        ("bias", {"bias": torch.zeros(60)}),
        ("tokens", {"tokens": torch.zeros(11, dtype=torch.int64)}),
        ("tokens", {"tokens": torch.zeros(12)}),
        *(("temperature", {"temperature": t}) for t in (0.0, float("inf"))),
        ("ignore_index", {"ignore_index": 1.5}),
        ("softcap", {"softcap": -1.0}),
        ("chunk_memory", {"chunk_memory": 0}),
    ],
)
def test_bad_input(argument, change):
    x, w, y = case()
    with pytest.raises(ValueError, match=argument):
        fused_linear_selective_log_softmax(**({"x": x, "weight": w, "tokens": y} | change))


def test_autocast(engine, device):
    x, w, y = case(device=device)
    with torch.autocast(device, torch.bfloat16):
        found = fused_linear_selective_log_softmax(x, w, y)
        expected = selective_log_softmax.reference(F.linear(x, w), y)
    found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert found.dtype == x.grad.dtype == w.grad.dtype == torch.float32


@pytest.mark.parametrize("scale, softcap", [(1.5, None), (-1.5, 3.0), (0.0, None)])
def test_statistics(scale, softcap, engine, device):
    """Check definitions: of torch's argmax, of means of logits, and of squares of probabilities."""
    x, w, y = case(device=device)
    logits = F.linear(x, w) * scale
    y[:3] = logits.argmax(-1)[:3]
    y[5] = -100
    with torch.no_grad():
        x[5] = float("nan")  # of an ignored row
    names = {f"return_{name}": True for name in ("is_top1", "mean_logits", "log_sum_sq_probs")}
    found = fused_linear_selective_log_softmax(
        x, w, y, None, 0.7, softcap, scale, chunk_memory=2000, return_entropy=True, **names
    )
    z = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / 0.7
    ignored = y == -100
    assert torch.equal(found.is_top1, (logits.argmax(-1) == y) & ~ignored) and found.is_top1[:3].all()
    for value, expected in (
        (found.mean_logits, z.mean(-1)),
        (found.log_sum_sq_probs, z.softmax(-1).square().sum(-1).log()),
    ):
        torch.testing.assert_close(value, expected.masked_fill(ignored, 0))
        assert not value.requires_grad
    assert found.log_probs.requires_grad and found.entropy.requires_grad and found.lse is None


def test_statistics_of_a_shared_vocabulary():
    x, w, y = case()
    options = {"return_is_top1": True, "group": DimensionShard(0, 61, 61, "any")}
    with pytest.raises(ValueError, match="return_is_top1: got True, allowed: False where ranks share the vocabulary"):
        fused_linear_selective_log_softmax(x, w, y, **options)
