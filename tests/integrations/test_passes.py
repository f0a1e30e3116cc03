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


def test_choice_of_implementations():
    from liger_hw.stand_in import backends, configure, triton_cache

    assert backends.get_impl() is None and backends.available_impls("rms_norm") == ["triton"]
    backends.set_impl(None), backends.set_impl("nvidia-triton"), triton_cache.apply_liger_triton_cache_manager()
    with pytest.raises(backends.ImplNotAvailableError, match="use_backend"):
        backends.set_impl("cutile")
    with pytest.raises(ValueError, match="op_name"):
        backends.available_impls("unheard_of")
    x = rows(3, 8)
    assert torch.equal(backends.dispatch("softmax", x), x.softmax(-1))
    assert configure.configure(moe=configure.MoEConfig(1, 2, 3, 4, 5, 6)) is False
