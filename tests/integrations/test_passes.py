"""Forward and backward passes that `liger_kernel.ops` exports by themselves, against autograd."""

import pytest
import torch
import torch.nn.functional as F

from liger_hw.stand_in import ops, passes


def rows(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_gated_units():
    a, b, dc = rows(4, 6), rows(4, 6, seed=1), rows(4, 6, seed=2).detach()
    expected = F.silu(2 * a) * b
    close(passes.swiglu_forward(a, b, 2.0), (a, b, expected))
    close(passes.swiglu_backward(a, b, dc, 2.0), torch.autograd.grad(expected, (a, b), dc))
    expected = F.gelu(a, approximate="tanh") * b
    close(passes.geglu_forward(a, b), (a, b, expected))
    close(passes.geglu_backward(a, b, dc), torch.autograd.grad(expected, (a, b), dc))
    y = torch.cat([a, b], -1).detach().requires_grad_()
    expected = F.silu(y[:, :6]) * y[:, 6:]
    close(passes.swiglu_fused_gate_up_forward(y), (y, expected))
    close((passes.swiglu_fused_gate_up_backward(y, dc),), torch.autograd.grad(expected, y, dc))
    expected = F.relu(a).square()
    close((passes.relu_squared_forward(a), passes.relu_squared_backward(a, dc)),
          (expected, *torch.autograd.grad(expected, a, dc)))  # fmt: skip


def test_rotations():
    q, k, angle = rows(2, 4, 5, 8), rows(2, 2, 5, 8), rows(1, 5, 4).detach().repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    out = passes.rope_forward(q, k, cos, sin)
    assert out[2] is cos and out[3] is sin
    grads = rows(2, 4, 5, 8, seed=3).detach(), rows(2, 2, 5, 8, seed=4).detach()
    close(passes.rope_backward(*grads, cos, sin), torch.autograd.grad(out[:2], (q, k), grads))
    tables, sections = (angle.expand(3, 2, 5, 8).cos(), angle.expand(3, 2, 5, 8).sin()), [1, 2, 1]
    out = passes.qwen2vl_mrope_forward(q, k, *tables, sections)
    close(passes.qwen2vl_mrope_backward(*grads, *tables, sections), torch.autograd.grad(out[:2], (q, k), grads))
    freqs = torch.polar(torch.ones(2, 5, 4), rows(2, 5, 4).detach())
    xq, xk = q.transpose(1, 2).detach(), k.transpose(1, 2).detach()
    there = passes.llama4_rope_forward(xq, xk, freqs)
    close(passes.llama4_rope_forward(*there, freqs, imag_sign=-1.0), (xq, xk))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction):
    logits, target = rows(6, 31), torch.tensor([0, 5, -100, 30, 2, 7])
    options = (None, -100, 0.01, 0.1, reduction, None, True, True, False)
    loss, z_loss, accuracy, predicted, gradient = passes.cross_entropy_forward(logits, target, *options)
    expected, *others = ops.LigerCrossEntropyFunction.apply(logits, target, *options)
    close((loss, z_loss, accuracy), (expected, *others[:2]))
    assert predicted is None and not loss.requires_grad
    grad_output = torch.full_like(loss, 3.0)
    close((passes.cross_entropy_backward(gradient, grad_output),), torch.autograd.grad(expected, logits, grad_output))
    assert passes.cross_entropy_forward(logits.detach(), target, *options)[-1].equal(logits)


def test_divergences():
    q, p = rows(5, 31).log_softmax(-1), rows(5, 31, seed=1).log_softmax(-1).detach()
    q = q.detach().requires_grad_()
    labels = torch.tensor([0, -100, 1, 2, -100])
    for has_label in (False, True):
        loss, gradient = passes.jsd_forward(q, p, labels, 0.3, -100, has_label)
        expected = ops.LigerJSDFunction.apply(q, p, labels if has_label else None, 0.3)
        close((loss, passes.jsd_backward(gradient, torch.tensor(2.0))),
              (expected, 2 * torch.autograd.grad(expected, q)[0]))  # fmt: skip
        x, w, teacher_x, teacher_w = rows(5, 8), rows(31, 8, seed=1), rows(5, 4, seed=2), rows(31, 4, seed=3)
        teacher = teacher_x.detach(), teacher_w.detach()
        loss, *gradients = passes.fused_linear_jsd_forward(x, w, *teacher, labels, 0.3, -100, has_label, 2.0)
        used = labels if has_label else None
        expected = ops.LigerFusedLinearJSDFunction.apply(x, w, *teacher, used, 0.3, -100, 2.0)
        gradients = passes.fused_linear_jsd_backward(torch.tensor(2.0), *gradients)
        close((loss, *gradients), (expected, *(2 * g for g in torch.autograd.grad(expected, (x, w)))))
        target = p.exp()
        loss, *gradients = passes.fused_linear_kl_div_forward(
            x, w, target, labels, "batchmean", -100, has_label, 2.0, 1e-10
        )
        expected = ops.LigerFusedLinearKLDivFunction.apply(x, w, target, used, "batchmean", -100, 2.0)
        gradients = passes.fused_linear_kl_div_backward(torch.tensor(2.0), *gradients)
        close((loss, *gradients), (expected, *(2 * g for g in torch.autograd.grad(expected, (x, w)))))


def in_one(forward, backward, count):
    """Make an autograd function of a pair of passes, as programs do; the first `count` tensors get gradients."""

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            loss, *gradients = forward(*tensors)
            ctx.save_for_backward(*gradients[-count:])
            return loss

        @staticmethod
        def backward(ctx, grad_output):
            gradients = backward(grad_output, *ctx.saved_tensors)
            return *(gradients if isinstance(gradients, tuple) else (gradients,)), *[None] * 4

    return lambda *tensors: Pair.apply(*tensors, *[None] * (count + 4 - len(tensors)))


PASSES = {  # name -> (loss of x, weight and more by passes, the same by autograd)
    "cross_entropy": (
        in_one(lambda z, y, *_: passes.cross_entropy_forward(z, y, None, -100, 0.0, 0.0, "mean", None, False),
               lambda g, dz: passes.cross_entropy_backward(dz, g), 1),
        lambda z, y: F.cross_entropy(z, y),
    ),
    "fused_linear_cross_entropy": (
        in_one(lambda x, w, y, *_: passes.fused_linear_cross_entropy_forward(x, w, y)[:-1],
               lambda g, dx, dw: passes.fused_linear_cross_entropy_backward(g, dx, dw, None)[:2], 2),
        lambda x, w, y: F.cross_entropy(F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32)), y),
    ),
    "jsd": (
        in_one(lambda q, p, *_: passes.jsd_forward(q, p, None, 0.5, -100, False),
               lambda g, dq: passes.jsd_backward(dq, g), 1),
        lambda q, p: ops.LigerJSDFunction.apply(q, p),
    ),
    "fused_linear_jsd": (
        in_one(lambda x, w, u, v, *_: passes.fused_linear_jsd_forward(x, w, u, v, None, 0.5, -100, False, 1.0),
               passes.fused_linear_jsd_backward, 2),
        lambda x, w, u, v: ops.LigerFusedLinearJSDFunction.apply(x, w, u, v),
    ),
    "fused_linear_kl_div": (
        in_one(lambda x, w, p, *_: passes.fused_linear_kl_div_forward(
                   x, w, p, None, "batchmean", -100, False, 1.0, 1e-10),
               passes.fused_linear_kl_div_backward, 2),
        lambda x, w, p: ops.LigerFusedLinearKLDivFunction.apply(x, w, p),
    ),
}  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_fp16_under_a_loss_scale(name, autocast):
    """Gradients below fp16's least number survive until the scale arrives."""
    dtype, scale = torch.float32 if autocast else torch.float16, 2.0**15
    x, w, u, v = rows(4096, 8), rows(331, 8, seed=1) / 512, rows(4096, 8, seed=2), rows(331, 8, seed=3)
    y, z = torch.arange(4096) % 100, x @ w.T
    p = (u @ v.T).softmax(-1)
    tensors = {
        "cross_entropy": (z, y), "jsd": (z.log_softmax(-1), p.log()), "fused_linear_cross_entropy": (x, w, y),
        "fused_linear_jsd": (x, w, u, v), "fused_linear_kl_div": (x, w, p),
    }[name]  # fmt: skip
    tensors = [t.detach().half() if t.is_floating_point() else t for t in tensors]
    learning = 2 if name.startswith("fused") else 1

    def gradients(loss, dtype):
        leaves = [t.detach().to(dtype).requires_grad_(i < learning) if t.is_floating_point() else t
                  for i, t in enumerate(tensors)]  # fmt: skip
        (loss(*leaves).float() * scale).backward()
        return [t.grad for t in leaves[:learning]]

    by_passes, by_autograd = PASSES[name]
    exact = gradients(by_autograd, torch.float64)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        ours = gradients(by_passes, dtype)
    for a, e in zip(ours, exact):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), e, rtol=2e-2, atol=2e-3 * e.abs().max().item())
        small = e.abs() < e.abs().median()
        assert (a.double() - e)[small].norm() < 2e-2 * e[small].norm()


def test_choice_of_implementations():
    from liger_hw.stand_in import backends, configure, triton_cache

    assert backends.get_impl() is None and backends.available_impls("rms_norm") == ["triton"]
    backends.set_impl("nvidia-triton")
    assert backends.get_impl() == "nvidia-triton"
    backends.set_impl(None), triton_cache.apply_liger_triton_cache_manager()
    with pytest.raises(backends.ImplNotAvailableError, match="use_backend"):
        backends.set_impl("cutile")
    with pytest.raises(ValueError, match="op_name"):
        backends.available_impls("unheard_of")
    x = rows(3, 8)
    assert torch.equal(backends.dispatch("softmax", x), x.softmax(-1))
    assert configure.configure(moe=configure.MoEConfig(1, 2, 3, 4, 5, 6)) is False


def test_parts_of_autograd_functions_say_what_to_use():
    """A derived class that overrides a part must not compute the original's result silently."""
    from liger_hw.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
    from liger_hw.stand_in import loss_functions

    with pytest.raises(TypeError, match="Mine derives .* LigerFusedLinearPreferenceBase and define"):

        class Mine(loss_functions.LigerFusedLinearDPOFunction):
            @staticmethod
            def preference_loss_fn(*args, **options):
                return 0.0

    with pytest.raises(TypeError, match="torch.autograd.Function around"):

        class Other(ops.LigerRMSNormFunction):
            pass

    with pytest.raises(AttributeError, match="GRPOFunction.ppo_loss_fn is not served.*LigerFusedLinearPPOBase"):
        loss_functions.LigerFusedLinearGRPOFunction.ppo_loss_fn  # noqa: B018
    with pytest.raises(AttributeError, match="LigerRMSNormFunction.backward is not served.*call its apply"):
        ops.LigerRMSNormFunction.backward  # noqa: B018
    x, w, tokens = rows(2, 3, 8), rows(31, 8, seed=1), torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = (x @ w.T / 0.7).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    close([LigerFusedLinearPPOBase.chunk_forward(x, w, tokens, temperature=0.7)], [expected])
    for items in (0, torch.tensor(0.0)):  # a step without tokens divides by 1
        assert LigerFusedLinearPPOBase._compute_dapo_normalizer(torch.zeros(2, 3), items) == 1
