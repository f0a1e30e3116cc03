"""Modules and functions under the names of liger_kernel: constructors, argument orders, and what they compute."""

import types

import pytest
import torch

from liger_hw.transformers import functional, modules

F = torch.nn.functional


def logits_and_targets(rows=9, vocabulary=13):
    logits = torch.randn(rows, vocabulary, requires_grad=True)
    targets = torch.randint(0, vocabulary, (rows,))
    targets[::4] = -100
    return logits, targets


def test_rms_norm():
    norm = modules.LigerRMSNorm(16, eps=1e-5, offset=1.0, casting_mode="gemma", init_fn="zeros", in_place=False)
    assert not norm.weight.any() and norm.variance_epsilon == 1e-5 and norm.offset == 1.0 and norm.row_mode is None
    x = torch.randn(3, 16)
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(functional.liger_rms_norm(x, norm.weight, 1e-5, 1.0, "gemma"), expected)
    assert modules.LigerRMSNorm(16).weight.eq(1).all() and "eps=1e-06" in repr(modules.LigerRMSNorm(16))
    bare = modules.LigerRMSNorm(16, elementwise_affine=False)
    assert bare.weight is None and not list(bare.parameters()) and bare(x).shape == x.shape
    with pytest.raises(ValueError, match="init_fn"):
        modules.LigerRMSNorm(16, init_fn="random")


def test_fused_add_rms_norm():
    norm = modules.LigerFusedAddRMSNorm(16)
    x, residual = torch.randn(3, 16), torch.randn(3, 16)
    y, s = norm(x, residual)
    assert torch.equal(s, x + residual) and torch.equal(y, modules.LigerRMSNorm(16)(s))
    for found, expected in zip(functional.liger_fused_add_rms_norm(x, residual, norm.weight, 1e-6), (y, s)):
        assert torch.equal(found, expected)


def test_layer_norm():
    norm, x = modules.LigerLayerNorm(16, eps=1e-5, bias=True), torch.randn(3, 16)
    assert not norm.bias.any(), "a random bias would be a surprise"
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,), norm.weight, norm.bias, 1e-5))
    assert torch.equal(functional.liger_layer_norm(x, norm.weight, norm.bias, 1e-5), norm(x))


def test_group_norm():
    norm, x = modules.LigerGroupNorm(8, 4), torch.randn(3, 8, 5)
    torch.nn.init.normal_(norm.weight), torch.nn.init.normal_(norm.bias)
    expected = F.group_norm(x, 4, norm.weight, norm.bias, 1e-6)
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(functional.liger_group_norm(x, norm.weight, norm.bias, 8, 4, 1e-6), expected)
    assert "8, 4" in repr(norm) and not modules.LigerGroupNorm(8, 4, bias=True).bias.any()
    with pytest.raises(ValueError, match="num_groups"):
        modules.LigerGroupNorm(8, 3)


def test_l2_norm():
    x = torch.randn(3, 8)
    torch.testing.assert_close(modules.LigerL2Norm(1e-12)(x), F.normalize(x, dim=-1))
    assert "eps=1e-06" in repr(modules.LigerL2Norm())


def test_poly_norm():
    x, norm = torch.randn(3, 8), modules.LigerPolyNorm()
    torch.testing.assert_close(norm(x), sum(F.rms_norm(x**n, (8,), eps=1e-6) / 3 for n in (1, 2, 3)) + 1)
    weighted = functional.liger_poly_norm(x, torch.tensor([1.0, 0, 0]), torch.zeros(1))
    torch.testing.assert_close(weighted, F.rms_norm(x**3, (8,), eps=1e-6))


def test_dyt():
    x, layer = torch.randn(3, 8), modules.LigerDyT(8)
    torch.nn.init.normal_(layer.gamma), torch.nn.init.normal_(layer.beta)
    expected = layer.gamma * torch.tanh(0.5 * x) + layer.beta
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(functional.liger_dyt(x, layer.alpha, layer.gamma, None), expected - layer.beta)
    assert modules.LigerDyT(8, beta=False).beta is None and "init_alpha=0.5" in repr(layer)


def test_modulated_rms_norm():
    x, norm = torch.randn(2, 6, 8), modules.LigerModulatedRMSNorm(8)
    torch.nn.init.normal_(norm.weight)
    scale, shift = torch.randn(2, 1, 8), torch.randn(2, 1, 8)  # one row for each sequence
    expected = F.rms_norm(x, (8,), norm.weight, 1e-6)
    torch.testing.assert_close(norm(x, scale, shift), expected * (1 + scale) + shift)
    torch.testing.assert_close(norm(x, x), expected * (1 + x))
    torch.testing.assert_close(functional.liger_modulated_rms_norm(x, norm.weight, x), norm(x, x))
    with pytest.raises(ValueError, match="divisor"):
        norm(x, torch.randn(5, 8))


@pytest.mark.parametrize(
    "name, act", [("LigerSwiGLUMLP", F.silu), ("LigerGEGLUMLP", lambda x: F.gelu(x, approximate="tanh"))]
)
def test_gated_mlps(name, act):
    mlp = getattr(modules, name)(types.SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act="silu"))
    assert set(mlp.state_dict()) == {"gate_proj.weight", "up_proj.weight", "down_proj.weight"}
    x = torch.randn(3, 16)
    torch.testing.assert_close(mlp(x), mlp.down_proj(act(mlp.gate_proj(x)) * mlp.up_proj(x)))
    function = functional.liger_swiglu if "Swi" in name else functional.liger_geglu
    torch.testing.assert_close(function(x, 2 * x), act(x) * 2 * x)


def test_swiglu_refuses_another_activation():
    config = types.SimpleNamespace(hidden_size=16, intermediate_size=24, hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act"):
        modules.LigerSwiGLUMLP(config)


def test_rope():
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    angle = torch.randn(1, 5, 4).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    before = q.clone()

    def rotated(x):
        return x * cos[:, None] + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin[:, None]

    for found in (modules.liger_rotary_pos_emb(q, k, cos, sin, None, 1), functional.liger_rope(q, k, cos, sin)):
        torch.testing.assert_close(found, (rotated(q), rotated(k)))
    assert torch.equal(q, before)
    transposed = functional.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(transposed[0].transpose(1, 2), rotated(q))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction):
    logits, targets = logits_and_targets()
    weight, before = torch.rand(13) + 0.5, logits.detach().clone()
    loss = modules.LigerCrossEntropyLoss(weight, -100, 0.0, 0.1, reduction)(logits, targets)
    expected = F.cross_entropy(logits, targets, weight, label_smoothing=0.1, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    again = functional.liger_cross_entropy(logits, targets, weight, reduction=reduction, label_smoothing=0.1)
    torch.testing.assert_close(again, expected)
    grads = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (loss, loss, expected)]
    torch.testing.assert_close(grads[0], grads[2])
    assert torch.equal(grads[0], grads[1]) and torch.equal(logits.detach(), before)


@pytest.mark.parametrize("legacy", [{"size_average": False}, {"reduce": False}, {"size_average": True, "reduce": True}])
@pytest.mark.filterwarnings("ignore:size_average and reduce")
def test_deprecated_reductions_follow_torch(legacy):
    logits, targets = logits_and_targets()
    found = functional.liger_cross_entropy(logits, targets, **legacy)
    torch.testing.assert_close(found, F.cross_entropy(logits, targets, **legacy))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_fused_linear_cross_entropy(reduction):
    x, weight = torch.randn(9, 8, requires_grad=True), torch.randn(13, 8, requires_grad=True)
    bias, (_, targets) = torch.randn(13, requires_grad=True), logits_and_targets()
    module = modules.LigerFusedLinearCrossEntropyLoss(reduction=reduction, label_smoothing=0.1, softcap=5.0)
    capped = 5.0 * torch.tanh(F.linear(x, weight, bias) / 5.0)
    expected = F.cross_entropy(capped, targets, label_smoothing=0.1, reduction=reduction)
    found = module(weight, x, targets, bias)  # the weight comes first
    again = functional.liger_fused_linear_cross_entropy(
        x, weight, targets, bias, label_smoothing=0.1, softcap=5.0, reduction=reduction
    )
    for loss in (found, again):
        torch.testing.assert_close(loss, expected)
        for f, e in zip(
            *(torch.autograd.grad(y.sum(), (x, weight, bias), retain_graph=True) for y in (loss, expected))
        ):
            torch.testing.assert_close(f, e)


def test_losses_return_what_is_asked_for():
    logits, targets = logits_and_targets()
    wanted = dict(return_z_loss=True, return_token_accuracy=True, return_predicted_tokens=True)
    found = modules.LigerCrossEntropyLoss(lse_square_scale=1e-3, **wanted)(logits, targets)
    assert isinstance(found, functional.CrossEntropyOutput)
    counts = targets != -100
    z_loss = 1e-3 * logits.logsumexp(-1)[counts].square().mean()
    torch.testing.assert_close(found.z_loss, z_loss)
    torch.testing.assert_close(found.loss, F.cross_entropy(logits, targets) + z_loss)
    torch.testing.assert_close(found.token_accuracy, (logits.argmax(-1) == targets)[counts].float().mean())
    assert torch.equal(found.predicted_tokens[counts], logits.argmax(-1)[counts])
    assert found.predicted_tokens[~counts].eq(-1).all()
    weight = torch.eye(13)
    again = modules.LigerFusedLinearCrossEntropyLoss(lse_square_scale=1e-3, **wanted)(weight, logits, targets)
    torch.testing.assert_close(again.loss, found.loss)
    torch.testing.assert_close(again.z_loss, found.z_loss)


@pytest.mark.parametrize("bad", [{"label_smoothing": 2.0}, {"reduction": "max"}, {"softcap": -1.0}])
def test_bad_options_of_losses_are_errors(bad):
    for loss in (modules.LigerCrossEntropyLoss, modules.LigerFusedLinearCrossEntropyLoss):
        with pytest.raises(ValueError, match=next(iter(bad))):
            loss(**bad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_losses_have_the_dtype_that_torchs_have(dtype):
    logits, targets = logits_and_targets()
    logits = logits.detach().to(dtype).requires_grad_()
    expected = F.cross_entropy(logits, targets)
    for loss in (modules.LigerCrossEntropyLoss()(logits, targets), functional.liger_cross_entropy(logits, targets)):
        assert loss.dtype == expected.dtype == dtype
        torch.testing.assert_close(loss, expected)
    every = modules.LigerCrossEntropyLoss(lse_square_scale=0.1, return_z_loss=True, return_token_accuracy=True)
    output = every(logits, targets)
    assert (output.loss.dtype, output.z_loss.dtype, output.token_accuracy.dtype) == (dtype, dtype, torch.float32)
    output.loss.backward()
    assert logits.grad.dtype == dtype
    log_q, log_p = (torch.randn(4, 13).log_softmax(-1).to(dtype) for _ in range(2))
    assert functional.liger_jsd(log_q, log_p).dtype == dtype


@pytest.mark.parametrize(
    "bad, words",
    [
        ({"label_smoothing": 1.5}, "label_smoothing must be between 0.0 and 1.0"),
        ({"label_smoothing": -0.1}, "label_smoothing must be between 0.0 and 1.0"),
        ({"reduction": "max"}, "reduction must be one of"),
    ],
)
def test_bad_options_are_liger_kernels_assertion_errors_too(bad, words):
    for loss in (modules.LigerCrossEntropyLoss, modules.LigerFusedLinearCrossEntropyLoss):
        with pytest.raises(AssertionError, match=words):
            loss(**bad)


def test_rotary_tables_of_two_dimensions():
    q, k, angle = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(5, 4).repeat(1, 2)
    expected = functional.liger_rope(q, k, angle.cos()[None], angle.sin()[None])
    for found in (functional.liger_rope, modules.liger_rotary_pos_emb):
        assert all(torch.equal(a, b) for a, b in zip(found(q, k, angle.cos(), angle.sin()), expected))
