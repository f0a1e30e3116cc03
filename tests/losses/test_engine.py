import pytest
import torch
import torch.nn.functional as F
from naive import hold, token_log_probs

from liger_hw import (
    fused_linear_selective_log_softmax,
    multi_token_loss,
    policy_loss,
    preference_loss,
    unpaired_preference_loss,
    use_backend,
)
from liger_hw.losses.engine import logits_loss
from liger_hw.losses.sequences import token_loss
from liger_hw.testing.inputs import randn, targets
from liger_hw.transformers import functional

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def case(rows=13, features=8, classes=37, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    x, w, b = (
        randn(*shape, device=device, dtype=dtype) for shape in ((rows, features), (classes, features), (classes,))
    )
    return x, w, b, targets(rows, classes, device)


def supported(dtype, engine):
    if dtype == torch.float64 and engine == "kernels":
        pytest.skip("the kernels take no float64")


def loss(logits, y, scale):
    return (
        F.cross_entropy(logits.float() if logits.dtype == torch.bfloat16 else logits, y, reduction="none") * scale
    ).sum()


def formula(log_probs, entropy, scale):
    return (log_probs.square() + 0.1 * entropy) * scale, entropy


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("memory", [1, 1500, 10**6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_change_nothing(dtype, memory, with_bias, engine, device):
    supported(dtype, engine)
    x, w, b, y = case(device=device)
    b, scale = b if with_bias else None, torch.rand(13, device=device)

    def chunked(x, w, b):
        return (logits_loss(loss, x, w, b, (y, scale), memory),)

    hold(lambda x, w, b: (loss(F.linear(x, w, b), y, scale),), chunked, (x, w, b), dtype)

    def tokens(x, w, b):
        return token_loss(formula, x, w, y, b, (scale,), temperature=0.7, with_entropy=True, chunk_memory=memory)

    def whole(x, w, b):
        values, entropy = formula(*token_log_probs(x, w, y, b, 0.7), scale)
        return values.sum(), entropy

    hold(whole, tokens, (x, w, b), dtype)


@pytest.mark.parametrize("learns", [(True, False, False), (False, True, False), (False, False, True), (False,) * 3])
def test_only_what_asks_gets_a_gradient(learns, engine, device):
    x, w, b, y = case(device=device)
    expected = torch.autograd.grad(loss(F.linear(x, w, b), y, 1.0), (x, w, b))
    inputs = [t.detach().requires_grad_(wanted) for t, wanted in zip((x, w, b), learns)]
    value = logits_loss(lambda logits, y: loss(logits, y, 1.0), *inputs, (y,), 1500)
    assert value.requires_grad == any(learns)
    if any(learns):
        value.backward()
    for t, wanted, grad in zip(inputs, learns, expected):
        assert (t.grad is None) != wanted
        if wanted:
            torch.testing.assert_close(t.grad, grad)
    with torch.no_grad():
        assert not logits_loss(lambda logits, y: loss(logits, y, 1.0), x, w, b, (y,), 1500).requires_grad


def test_incoming_gradient_and_second_backward(engine, device):
    x, w, b, y = case(device=device)
    (once,) = torch.autograd.grad(token_loss(lambda p, h: (p,), x, w, y, b)[0], x)
    value = token_loss(lambda p, h: (p,), x, w, y, b)[0] * 3
    torch.testing.assert_close(torch.autograd.grad(value, x, retain_graph=True)[0], once * 3)
    with pytest.raises(RuntimeError, match="second"):
        torch.autograd.grad(value, x)


def test_no_rows(engine, device):
    x, w, b, y = case(0, device=device)
    value, logged = token_loss(lambda p, h: (p, p), x, w, y, b)
    (value + logits_loss(lambda logits: logits.sum(), x, w, b)).backward()
    assert value == 0 and logged.shape == (0,) and w.grad.abs().sum() == 0


def test_compiles(device):
    x, w, b, y = case(device=device)

    def value(x, w):
        return token_loss(lambda p, h: (p.square(),), x * 1, w, y, b)[0] + logits_loss(
            lambda logits, y: loss(logits, y, 1.0), x * 1, w, b, (y,)
        )

    with use_backend(None):
        compiled = torch.compile(value, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, w), value(x, w))


@pytest.mark.parametrize("tokenwise", [False, True])
def test_checkpoint_recomputes_once(tokenwise, engine, device):
    x, w, b, y = case(device=device)
    scale, calls = torch.rand(13, device=device), []

    def function(x):
        calls.append(1)
        if tokenwise:
            return token_loss(formula, x.tanh(), w, y, b, (scale,), chunk_memory=1, with_entropy=True)[0]
        return logits_loss(loss, x.tanh(), w, b, (y, scale), 1)

    x.requires_grad_()
    (whole,) = torch.autograd.grad(function(x), x)
    calls.clear()
    (grad,) = torch.autograd.grad(torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False), x)
    assert len(calls) == 2
    assert torch.equal(grad, whole)


def test_bad_input():
    x, w, b, y = case()
    with pytest.raises(ValueError, match="weight"):
        logits_loss(loss, x, w[:, :3], None, (y, None))
    with pytest.raises(ValueError, match="rows"):
        logits_loss(loss, x, w, None, (y[:3], None))
    with pytest.raises(ValueError, match="tokens"):
        token_loss(formula, x, w, y[:3])
    with pytest.raises(ValueError, match="x: "):
        token_loss(formula, x[None], w, y[None])


def test_accum_dtype():
    """With torch.float32 the weight's gradient is rounded once, and not once a chunk."""
    torch.manual_seed(0)
    x, w, teacher_x, teacher_w = (torch.randn(size).abs() for size in ((640, 8), (31, 8), (640, 4), (31, 4)))
    x, w, teacher_x, teacher_w = (t.bfloat16() for t in (x, w / 8, teacher_x, teacher_w))
    target = (teacher_x @ teacher_w.T).float().softmax(-1)
    zeros, ones = torch.zeros(640, dtype=torch.int64), torch.ones(1)

    def gradient(function, dtype, **options):
        leaf = w.to(dtype).requires_grad_()
        return torch.autograd.grad(function(x.to(dtype), leaf, **options), leaf)[0].double()

    for function in (
        lambda x, w, **options: logits_loss(lambda logits: logits.float().sum(), x, w, **options),
        lambda x, w, **o: functional.liger_fused_linear_jsd(x, w, teacher_x.to(x), teacher_w.to(x), **o),
        lambda x, w, **o: functional.liger_fused_linear_kl_div(x, w, target, **o),
        lambda x, w, **o: fused_linear_selective_log_softmax(x, w, zeros, return_lse=True, **o).lse.sum(),
        lambda x, w, **o: token_loss(lambda log_probs, _: (-log_probs,), x, w, zeros, **o)[0],
        lambda x, w, **o: policy_loss(x[None], w, zeros[None], ones, beta=0.0, **o)[0],
        lambda x, w, **o: preference_loss(x.view(64, 10, 8), w, zeros.view(64, 10), loss_type="sft", **o)[0],
        lambda x, w, **o: unpaired_preference_loss(x[:, None], w, zeros[:, None], zeros == 0, **o)[0],
        lambda x, w, **o: multi_token_loss(x[None, None], w, zeros[None], **o)[0],
    ):
        exact = gradient(function, torch.float64)
        by_chunk, once = (
            (gradient(function, torch.bfloat16, accum_dtype=dtype) - exact).norm() for dtype in (None, torch.float32)
        )
        assert once < 0.8 * by_chunk, (once, by_chunk)
        with pytest.raises(ValueError, match="accum_dtype"):
            gradient(function, torch.bfloat16, accum_dtype=torch.bfloat16)
