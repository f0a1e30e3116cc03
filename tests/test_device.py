"""Test on a GPU: graphs, compiled modules, sizes beyond 32 bits, bitwise equal repeats."""

from dataclasses import replace

import pytest
import torch

from liger_hw import tuning, use_backend
from liger_hw._triton import interpreting
from liger_hw.backends import detected
from liger_hw.dispatch import OPS
from liger_hw.kernels.attention.rope import rope
from liger_hw.kernels.linear.dequantize_4bit import dequantize_4bit
from liger_hw.kernels.mlp.glu import geglu, swiglu
from liger_hw.kernels.norms.layer_norm import layer_norm
from liger_hw.kernels.norms.rms_norm import fused_add_rms_norm, rms_norm
from liger_hw.kernels.vocabulary.cross_entropy import cross_entropy
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.testing.inputs import flat
from liger_hw.testing.parity import check, expected, run
from liger_lab.cases import CASES, training_cases, wide_cases

pytestmark = pytest.mark.skipif(
    interpreting() or not torch.accelerator.is_available(), reason="no accelerator here, or the interpreter is on"
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def deterministic_convolutions(monkeypatch):
    """Let torch's convolution in multi_token_attention add in one order."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


def step(op, inputs, options):
    """Outputs and gradients, with fixed incoming gradients."""
    out = flat(OPS[op](*inputs, **options))
    leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
    return [out, *(torch.autograd.grad(out, leaves, torch.ones_like(out)) if leaves else ())]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", sorted(CASES))
def test_same_bits_every_run(op, dtype, device):
    torch.manual_seed(0)
    for inputs, options in training_cases(op, dtype, device):
        first = run(OPS[op], inputs, options)
        for _ in range(3):
            for a, b in zip(first, run(OPS[op], inputs, options)):
                assert (a is None and b is None) or torch.equal(a.nan_to_num(), b.nan_to_num()), f"{op} {options}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", sorted(CASES))
def test_wide_cases(op, dtype, device):
    """Rows of many blocks; coarse, as the order of so long sums moves more than the parity rule allows."""
    torch.manual_seed(0)
    for inputs, options in wide_cases(op, dtype, device):
        with use_backend("triton"):
            outputs, again = (run(OPS[op], inputs, options) for _ in range(2))
        assert all(a is None or torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(outputs, again))
        for exact, reference, out in zip(*expected(OPS[op], inputs, options), outputs):
            assert (exact is None) == (out is None)
            if out is not None and out.is_floating_point():
                finite, rounding = exact.isfinite() & reference.isfinite() & out.isfinite(), torch.finfo(out.dtype).eps
                exact, reference, out = (torch.where(finite, x.double(), 0.0) for x in (exact, reference, out))
                allowed = max(8 * (reference - exact).abs().max(), max(rounding, 1e-4) * exact.abs().max())
                assert (out - exact).abs().max() <= allowed, f"{op} {options}"


@pytest.mark.parametrize("op", sorted(CASES))
def test_graph_capture(op, device):
    """Forward and backward captured once, replayed on other data, give what eager gives."""
    if device != "cuda":
        pytest.skip(f"torch.cuda captures graphs; this accelerator is torch.{device}'s")
    torch.manual_seed(0)
    for inputs, options in list(training_cases(op, torch.bfloat16, device))[:6]:
        static = [x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles, and makes what only a first call makes
            for _ in range(2):
                step(op, static, options)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step(op, static, options)
        fresh = [_other(x) for x in inputs]
        with torch.no_grad():
            for old, new in zip(static, fresh):
                if torch.is_tensor(old):
                    old.copy_(new)
        graph.replay()
        for a, b in zip(captured, step(op, fresh, options)):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{op} {options}"


def _other(x):
    """Shuffle a tensor along its first dimension, so that labels stay labels."""
    return x.detach().flip(0).clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x


# compiled, gradients of experts add in another order, convolutions have other kernels, and adapters add out of place
ROUND_OTHERWISE_COMPILED = ("experts", "multi_token_attention", "lora_linear", "lora_glu_linear")


@pytest.mark.parametrize("op", sorted(CASES))
def test_compiles_without_a_break(op, device, monkeypatch):
    monkeypatch.undo()  # of the memory that conftest.py fills with NaN, which the compiler would trace
    torch.manual_seed(0)
    for inputs, options in list(training_cases(op, torch.bfloat16, device))[:4]:
        torch._dynamo.reset()

        class Module(torch.nn.Module):
            def forward(self, *inputs):
                return flat(OPS[op](*inputs, **options))  # noqa: B023

        if op in ROUND_OTHERWISE_COMPILED:
            check(OPS[op], inputs, options, "triton", compiled=torch.compile(OPS[op], fullgraph=True))
            continue
        leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
        with use_backend("triton"):  # the compiler computes small tensors of some ops by itself
            out = torch.compile(Module(), fullgraph=True)(*inputs)
        found = [out, *(torch.autograd.grad(out, leaves, torch.ones_like(out)) if leaves else ())]
        for a, b in zip(found, step(op, inputs, options)):
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), f"{op} {options}"


@pytest.fixture
def room(device):
    """Reserve memory for more than 2^31 elements; free it afterwards for other workers."""
    gib = torch.get_device_module(device).mem_get_info()[0] / 2**30
    if gib < 32:
        pytest.skip(f"needs 32 GiB of free device memory, and {gib:.0f} are")
    yield
    torch.get_device_module(device).empty_cache()


def _enormous(test):
    """One worker runs all of these, one after another."""
    return pytest.mark.usefixtures("room")(pytest.mark.xdist_group("enormous")(test))


def _rows(cols, dtype=torch.bfloat16):
    """More rows of `cols` than 2^31 elements hold."""
    return 2**31 // cols + 7


def _random(*shape):
    return torch.randn(shape, device=torch.accelerator.current_accelerator(check_available=True), dtype=torch.bfloat16)


def _targets(vocab, rows):
    return torch.randint(vocab, (rows,), device=torch.accelerator.current_accelerator(check_available=True))


@_enormous
@pytest.mark.parametrize("op", [rms_norm, layer_norm, fused_add_rms_norm, swiglu, geglu], ids=lambda op: op.__name__)
def test_beyond_32_bits(op):
    """The last rows of more than 2^31 elements equal those of a small tensor."""
    x = _random(_rows(4096), 4096).requires_grad_()
    pair = op in (swiglu, geglu, fused_add_rms_norm)
    inputs = (x, x.detach()) if pair else (x, _random(4096))
    out = op(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    (grad,) = torch.autograd.grad(out, x, out.detach())
    tail = x.detach()[-9:].clone().requires_grad_()
    small = op(tail, tail.detach()) if pair else op(tail, inputs[1])
    small = small[0] if isinstance(small, tuple) else small
    (small_grad,) = torch.autograd.grad(small, tail, small.detach())
    assert torch.equal(out[-9:], small) and torch.equal(grad[-9:], small_grad)


@_enormous
def test_dequantize_4bit_beyond_32_bits():
    rows, device = _rows(4096), torch.accelerator.current_accelerator(check_available=True)
    packed = torch.randint(256, (rows, 2048), device=device, dtype=torch.uint8)
    absmax, code = torch.rand(rows, 64, device=device), torch.rand(16, device=device)
    found = dequantize_4bit(packed, absmax, code, shape=(rows, 4096))
    assert torch.equal(found[-9:], dequantize_4bit(packed[-9:], absmax[-9:], code, shape=(9, 4096)))


@_enormous
def test_rope_beyond_32_bits():
    tokens, heads, dim = 2**31 // (32 * 128) + 3, 32, 128
    q, k = _random(1, heads, tokens, dim), _random(1, 1, 5, dim)
    cos, sin = _random(1, tokens, dim), _random(1, tokens, dim)
    k = _random(1, 1, tokens, dim)
    found, _ = rope(q, k, cos, sin)
    small, _ = rope(q[:, :, -5:], k[:, :, -5:], cos[:, -5:], sin[:, -5:])
    assert torch.equal(found[:, :, -5:], small)


@_enormous
@pytest.mark.parametrize("in_place", [False, True])
def test_cross_entropy_beyond_32_bits(in_place):
    rows, vocab = _rows(128256), 128256
    logits, target = _random(rows, vocab), _targets(vocab, rows)
    tail, tail_target = logits[-3:].clone().requires_grad_(), target[-3:]
    leaf = logits.requires_grad_()
    losses = cross_entropy(leaf * 1 if in_place else leaf, target, reduction="sum", in_place=in_place)
    (grad,) = torch.autograd.grad(losses, leaf)
    small = cross_entropy(tail, tail_target, reduction="sum")
    (small_grad,) = torch.autograd.grad(small, tail)
    torch.testing.assert_close(grad[-3:], small_grad, rtol=0, atol=2**-9)


@_enormous
def test_fused_linear_cross_entropy_beyond_32_bits():
    hidden, vocab = 1024, 512
    rows = _rows(hidden)
    x, weight = _random(rows, hidden).requires_grad_(), (_random(vocab, hidden) / 32).requires_grad_()
    target = _targets(vocab, rows)
    loss = fused_linear_cross_entropy(x, weight, target, reduction="sum")
    grad, _ = torch.autograd.grad(loss, (x, weight))
    tail = x.detach()[-3:].clone().requires_grad_()
    small = fused_linear_cross_entropy(tail, weight, target[-3:], reduction="sum")
    (small_grad,) = torch.autograd.grad(small, tail)
    torch.testing.assert_close(grad[-3:], small_grad, rtol=2**-6, atol=2**-9)


def test_a_winner_that_cannot_be_launched_here(device, monkeypatch, tmp_path, caplog):
    """A table with too much shared memory gives equal results and one warning."""
    here = detected(torch.device(device, torch.accelerator.current_device_index()))
    if not here.async_copy:
        pytest.skip("loads ahead take shared memory where they are asynchronous copies")
    x, weight = (_random(*shape).requires_grad_() for shape in ((64, 4096), (4096,)))
    expected = run(rms_norm, (x, weight), {})
    asked = tuning.search.configurations_of(lambda: run(rms_norm, (x, weight), {}))
    config, shape = next((config, shape) for config, shape, _ in asked if "STAGES" in config(*shape, here).meta)
    heuristic = config.heuristic(*shape, here)
    poison = replace(heuristic, meta=heuristic.meta | {"STAGES": 32})
    monkeypatch.setenv("LIGER_HW_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tuning.choice, "_withdrawn", set())
    tuning.entries.warn_once.cache_clear()
    tuning.search.record(
        tuning.entries.cache_file(here), {config.key(*shape): tuning.search.measured_entry(config, poison, 1e-3, 2e-3)}
    )
    try:
        assert config(*shape, here).meta["STAGES"] == 32
        found = run(rms_norm, (x, weight), {})
        assert all(torch.equal(a, b) for a, b in zip(expected, found))
        assert config(*shape, here).meta["STAGES"] != 32
        assert len([r for r in caplog.records if "cannot be launched here" in r.message]) == 1
    finally:
        monkeypatch.delenv("LIGER_HW_CACHE_DIR")
        tuning.choice.forget()


def test_second_device_is_not_needed_for_the_first(device):
    """Launches use the tensor's device, not the current one."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("one accelerator here")
    x = torch.randn(4, 64, device=f"{device}:1")
    assert torch.equal(rms_norm(x).cpu(), rms_norm(x.to(f"{device}:0")).cpu())
