"""Modules and functions of single ops against other ways to compute the same, with gradients."""

import os

import pytest
import tiny
import torch
import torch.nn.functional as F

import liger_hw
from liger_hw.chunked_loss import LigerFusedLinearJSDLoss
from liger_hw.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_hw.stand_in import ops, passes
from liger_hw.transformers import LigerFusedCETVDLoss, functional, op_modules
from liger_hw.transformers.vocab_parallel import vocab_parallel_cross_entropy

transformers = tiny.transformers


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def alike(found, expected, *leaves, **tolerance):
    """The same values, and the same gradients of `leaves`."""
    torch.testing.assert_close(found, expected, **tolerance)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    ours, theirs = (
        torch.autograd.grad((x.float() * weights).sum(), leaves, retain_graph=True) for x in (found, expected)
    )
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, **tolerance)


def test_relu_squared():
    x = random(3, 8)
    alike(op_modules.LigerReLUSquared()(x), torch.where(x > 0, x * x, 0), x)


def projected(z):
    """The nearest point of the simplex, by halving the interval that the threshold lies in."""
    low, high = z.min() - 1, z.max()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (z - middle).clamp(min=0).sum() > 1 else (low, middle)
    return (z - low).clamp(min=0)


def test_sparsemax():
    x = random(4, 7, dtype=torch.float32)
    for dim in (-1, 0):
        found = op_modules.LigerSparsemax(dim)(x)
        expected = torch.stack([projected(z.detach().double()) for z in x.movedim(dim, -1)]).movedim(-1, dim)
        torch.testing.assert_close(found, expected.float())
    assert torch.autograd.gradcheck(
        lambda z: liger_hw.sparsemax(z.float()).double(),
        x.detach().double().requires_grad_(),
        eps=1e-3,
        atol=1e-2,
    )
    torch.testing.assert_close(op_modules.LigerSoftmax()(x), x.softmax(-1))


@pytest.mark.parametrize("sparse", [False, True])
def test_multi_token_attention(sparse):
    scores = random(2, 3, 6, 6)
    attention = op_modules.LigerMultiTokenAttention(3, 3, 3, padding=1, sparse=sparse)
    weights = torch.zeros(2, 3, 6, 6)
    for i in range(6):
        row = scores[:, :, i, : i + 1]
        weights[:, :, i, : i + 1] = liger_hw.sparsemax(row) if sparse else row.softmax(-1)
    expected = F.conv2d(weights, attention.weight, attention.bias, padding=1).tril()
    alike(attention(scores), expected, scores, attention.weight, attention.bias)
    if sparse:
        with pytest.raises(ValueError, match="scores: got torch.bfloat16"):
            attention.bfloat16()(scores.bfloat16())


@pytest.mark.parametrize("dilation", [1, 2])
def test_neighborhood_attention(dilation):
    q, k, v = (random(1, 2, 9, 4, seed=seed) for seed in range(3))
    rows = []
    for i in range(9):
        near = [j for j in (i + dilation * step for step in (-1, 0, 1)) if 0 <= j < 9]
        weights = (q[:, :, i : i + 1] @ k[:, :, near].transpose(-1, -2) * 0.5).softmax(-1)
        rows.append(weights @ v[:, :, near])
    alike(functional.liger_fused_neighborhood_attention(q, k, v, 3, dilation), torch.cat(rows, 2), q, k, v)
    config = op_modules.LigerFusedNeighborhoodAttentionConfig(8, 2, 3, dilation)
    layer = op_modules.LigerFusedNeighborhoodAttentionLayer(**config.to_dict())
    x = random(1, 9, 8)
    assert not torch.equal(layer(x), x) and layer(x).shape == x.shape
    with pytest.raises(ValueError, match="odd"):
        functional.liger_fused_neighborhood_attention(q, k, v, 4)
    with pytest.raises(ValueError, match="attention_mask"):
        layer(x, torch.ones(9, 9))


def test_hyper_connections():
    layer = torch.nn.Linear(4, 4, bias=False)
    module = op_modules.LigerMHC(layer, hc=3, c=4, phi_dtype=torch.float32, allow_fp32=True)
    torch.nn.init.normal_(module.phi), torch.nn.init.normal_(module.b)
    x = random(2, 5, 3, 4)
    out, (pre, post, res) = functional.liger_mhc_forward(
        x, layer, module.phi, module.b, module.alpha_pre, module.alpha_post, module.alpha_res, allow_fp32=True,
        return_coeffs=True,
    )  # fmt: skip
    assert torch.equal(out, module(x)) and (0 < pre).all() and (pre < 1).all() and (post < 2).all()
    torch.testing.assert_close(res.sum(-1), torch.ones(2, 5, 3), rtol=0, atol=0.1)  # 20 iterations
    torch.testing.assert_close(res.sum(-2), torch.ones(2, 5, 3), rtol=1e-5, atol=1e-5)
    flat = x.flatten(-2)
    mix = (F.rms_norm(flat, (12,), eps=1e-6) @ module.phi) + module.b
    torch.testing.assert_close(pre, mix[..., :3].sigmoid())
    torch.testing.assert_close(post, 2 * mix[..., 3:6].sigmoid())
    f = layer(torch.einsum("bts,btsc->btc", pre, x))
    expected = torch.einsum("btos,btsc->btoc", res, x) + torch.einsum("bts,btc->btsc", post, f)
    alike(out, expected, x, layer.weight, module.phi, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(functional.liger_mhc_apply(x, f, pre, post, res, return_x_in=True)[0], out)
    with pytest.raises(AssertionError, match="x should be BF16/FP16"):
        op_modules.LigerMHC(layer, hc=3, c=4)(x)


def test_hyper_connections_around_a_quantised_layer():
    """Its first parameter is no number to round the layer's input to."""

    class Quantised(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randint(-9, 9, (4, 4), dtype=torch.int8), requires_grad=False)
            self.scale = torch.nn.Parameter(torch.rand(4))

        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype)) * self.scale

    layer = Quantised()
    module = op_modules.LigerMHC(layer, hc=3, c=4, phi_dtype=torch.float32, allow_fp32=True)
    torch.nn.init.normal_(module.phi)
    x = random(2, 5, 3, 4)
    options = {"allow_fp32": True, "return_coeffs": True}
    alphas = module.alpha_pre, module.alpha_post, module.alpha_res
    out, (pre, post, res) = functional.liger_mhc_forward(x, layer, module.phi, module.b, *alphas, **options)
    f = layer(torch.einsum("bts,btsc->btc", pre, x))
    expected = torch.einsum("btos,btsc->btoc", res, x) + torch.einsum("bts,btc->btsc", post, f)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [1.0, 1.5])
def test_multipliers_of_a_silu_that_learn(value):
    from liger_hw.stand_in.ops import LigerSiLUMulFunction

    a, b = random(3, 8), random(3, 8)
    gate, down = (torch.tensor(value, requires_grad=True) for _ in range(2))
    out = LigerSiLUMulFunction.apply(a, b, gate, down)
    alike(out, F.silu(gate * a) * b * down, a, b, gate, down)


@pytest.mark.parametrize("used", range(3))
def test_parameters_of_unused_hyper_connections_have_a_gradient_of_zero(used):
    module = op_modules.LigerMHC(torch.nn.Identity(), hc=3, c=4, phi_dtype=torch.float32, allow_fp32=True)
    alphas = [module.alpha_pre, module.alpha_post, module.alpha_res]
    outputs = functional.liger_mhc_coeffs(random(2, 3, 4), module.phi, module.b, *alphas, allow_fp32=True)
    gradients = torch.autograd.grad(outputs[used].square().sum(), alphas)
    assert [bool(g) for g in gradients] == [i == used for i in range(3)]


@pytest.mark.parametrize("blocks", [3, 40])
def test_attention_residual(blocks):
    v, query, weight = random(blocks, 2, 5, 8), random(8, seed=1), random(8, seed=2)
    depth = (F.rms_norm(v, (8,), weight, 1e-6) * query).sum(-1).softmax(0)
    expected = torch.einsum("nbt,nbtd->btd", depth, v)
    alike(functional.liger_attn_res(v, query, weight), expected, v, query, weight, rtol=1e-4, atol=1e-5)
    assert torch.equal(functional.liger_attn_res(list(v), query, weight), functional.liger_attn_res(v, query, weight))


@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 96), (62, 96), (64, 47)])
def test_experts(hidden, intermediate):
    """Torch's grouped product takes rows of a multiple of 16 bytes alone."""
    from liger_hw.transformers import LigerExperts

    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "num_local_experts": 4}
    module = LigerExperts(transformers.MixtralConfig(**tiny.TINY | sizes))
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(std=0.1)
    x, weights = random(10, hidden), random(10, 2, seed=1).softmax(-1)
    index = torch.stack([torch.randperm(3)[:2] for _ in range(10)])  # nobody chooses the last one
    rows = []
    for t in range(10):
        parts = []
        for e, w in zip(index[t].tolist(), weights[t]):
            gate, up = (module.gate_up_proj[e] @ x[t]).chunk(2)
            parts.append(w * (module.down_proj[e] @ (F.silu(gate) * up)))
        rows.append(sum(parts))
    leaves = x, module.gate_up_proj, module.down_proj
    alike(module(x, index, weights), torch.stack(rows), *leaves, rtol=1e-4, atol=1e-5)
    as_sequences = module(x.view(2, 5, hidden), index.view(2, 5, 2), weights.view(2, 5, 2))
    torch.testing.assert_close(as_sequences, torch.stack(rows).view(2, 5, hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:reduction:UserWarning")
def test_losses_of_distributions():
    x, w, teacher = random(6, 8), random(31, 8, seed=1), random(6, 31, seed=2).detach()
    labels = torch.tensor([0, 5, -100, 7, 30, 2])
    keep = labels != -100
    logits, target = F.linear(x, w), teacher.softmax(-1)
    log_q = (logits / 2).log_softmax(-1)
    for reduction in ("batchmean", "mean", "sum"):
        expected = F.kl_div(log_q[keep], target[keep], reduction=reduction)
        found = functional.liger_fused_linear_kl_div(x, w, target, labels, reduction, temperature=2.0)
        torch.testing.assert_close(found, expected)
    a, b = (torch.autograd.grad(y, (x, w), retain_graph=True) for y in (found, expected))
    torch.testing.assert_close(a, b)
    ce, distance = LigerFusedCETVDLoss()(logits, teacher, labels)
    alike(ce, F.cross_entropy(logits, labels, reduction="none"), x, w)
    alike(distance, ((logits.softmax(-1) - target).abs().sum(-1) / 2) * keep, x, w)
    with pytest.raises(ValueError, match="reduction"):
        functional.liger_fused_linear_kl_div(x, w, target, reduction="none")


def test_scaled_cross_entropy():
    x, w = random(6, 8), random(31, 8, seed=1)
    labels = torch.tensor([0, 5, -100, 7, 30, 2])
    nll, entropy = ops.LigerFusedLinearScaledCrossEntropyFunction.apply(x, w, labels, 0.7, -100, 1, True)
    log_p = (F.linear(x, w) / 0.7).log_softmax(-1)
    keep = labels != -100
    alike(nll, F.nll_loss(log_p, labels, reduction="none"), x, w)
    alike(entropy, -(log_p.exp() * log_p).sum(-1) * keep, x, w)


def test_forward_and_backward_of_the_fused_loss():
    x, w, b = random(6, 8), random(31, 8, seed=1), random(31, seed=2)
    labels = torch.tensor([0, 5, -100, 7, 30, 2])
    loss, _, _, _, *gradients = passes.fused_linear_cross_entropy_forward(x, w, labels, bias=b)
    expected = F.cross_entropy(F.linear(x, w, b), labels)
    torch.testing.assert_close(loss, expected)
    gradients = passes.fused_linear_cross_entropy_backward(torch.tensor(3.0), *gradients)
    torch.testing.assert_close(gradients, torch.autograd.grad(3 * expected, (x, w, b)))
    frozen = passes.fused_linear_cross_entropy_forward(x.detach(), w, labels)
    assert frozen[4:] == (None, None, None)


def test_selected_log_probabilities():
    logits, tokens = random(2, 6, 31), torch.randint(31, (2, 9))
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    found = ops.fused_selective_log_softmax(logits, tokens, 0.9, mask)
    expected = (logits[:, :-1] / 0.9).log_softmax(-1).gather(-1, tokens[:, -5:, None])[..., 0] * mask
    alike(found, expected, logits)


def test_a_distillation_loss_of_ones_own():
    class Function(LigerFusedLinearDistillationBase):
        @staticmethod
        def distillation_loss_fn(student_logits, teacher_logits, target, ignore_index, beta):
            p, q = teacher_logits.softmax(-1), student_logits.softmax(-1)
            m = (beta * p + (1 - beta) * q).log()
            of_p, of_q = (x * (x.log() - m) for x in (p, q))
            return ((beta * of_p + (1 - beta) * of_q).sum(-1) * (target != ignore_index)).sum()

        @staticmethod
        def forward(ctx, *args):
            return LigerFusedLinearDistillationBase.forward(
                Function, ctx, *args, beta=0.3, temperature=2.0, return_soft_hard_loss=True
            )

        @staticmethod
        def backward(ctx, *gradients):
            return LigerFusedLinearDistillationBase.backward(ctx, *gradients)[:5]

    x, w = random(6, 8), random(31, 8, seed=1)
    teacher_x, teacher_w = random(6, 5, seed=2).detach(), random(31, 5, seed=3).detach()
    labels = torch.tensor([0, 5, -100, 7, 30, 2])
    jsd = LigerFusedLinearJSDLoss(beta=0.3, temperature=2.0, return_soft_hard_loss=True)
    found, expected = Function.apply(x, w, teacher_x, teacher_w, labels), jsd(x, w, teacher_x, teacher_w, labels)
    torch.testing.assert_close(found, expected)
    a, b = (torch.autograd.grad(y[0], (x, w)) for y in (found, expected))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_vocabulary_of_one_rank(smoothing):
    logits, target = random(3, 2, 31), torch.tensor([[0, 5], [-100, 7], [30, 2]])
    found = vocab_parallel_cross_entropy(logits, target, label_smoothing=smoothing)
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction="none")
    alike(found, expected.view(3, 2), logits)
    others = vocab_parallel_cross_entropy(logits, target, label_smoothing=0.1, formula="megatron")
    log_p = logits.log_softmax(-1)
    own = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    spread = -(0.9 * own + 0.1 * (log_p.sum(-1) - own) / 30) * (target != -100)
    alike(others, spread, logits, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="label_smoothing_formula must be one of"):
        vocab_parallel_cross_entropy(logits, target, formula="theirs")
    loss = op_modules.LigerVocabParallelCrossEntropy
    assert "label_smoothing=0.1, reduction='none', label_smoothing_formula='pytorch'" in repr(loss(label_smoothing=0.1))
    for bad, words in (
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\)"),
        ({"label_smoothing_mode": "all"}, "label_smoothing_mode must be one of"),
        ({"reduction": "mean"}, "reduction must be 'none'"),
    ):
        with pytest.raises(ValueError, match=words):
            loss(**bad)


def test_edges_of_a_vocabulary_of_one_rank():
    logits, target = random(3, 2, 31).detach().double().requires_grad_(), torch.tensor([[0, 5], [-100, 7], [30, 2]])
    (gradient,) = torch.autograd.grad(vocab_parallel_cross_entropy(logits, target).sum(), logits)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"), logits)
    torch.testing.assert_close(gradient, expected)
    for smoothing in (0.0, 0.1):
        empty = torch.zeros(0, 2, 8, requires_grad=True)
        loss = vocab_parallel_cross_entropy(empty, torch.zeros(0, 2, dtype=torch.long), label_smoothing=smoothing)
        assert loss.shape == (0, 2) and torch.autograd.grad(loss.sum(), empty)[0].shape == empty.shape
    one = torch.zeros(1, 1, 1)
    assert vocab_parallel_cross_entropy(one, torch.zeros(1, 1, dtype=torch.long), formula="megatron") == 0
    with pytest.raises(ValueError, match="two columns or more"):
        vocab_parallel_cross_entropy(one, torch.zeros(1, 1, dtype=torch.long), None, -100, 0.1, "megatron")


def _rank(rank, where, queue):
    torch.distributed.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=2)
    logits, target = random(3, 2, 32), torch.tensor([[0, 5], [-100, 17], [30, 2]])
    part = logits.detach().chunk(2, -1)[rank].contiguous().requires_grad_()
    loss = vocab_parallel_cross_entropy(part, target, torch.distributed.group.WORLD, label_smoothing=0.1)
    loss.sum().backward()
    queue.put((rank, loss.detach().numpy(), part.grad.numpy()))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not hasattr(os, "fork") or torch.accelerator.is_available(), reason="needs fork, before any GPU")
def test_vocabulary_of_two_ranks(tmp_path):
    context = torch.multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path / "meet", queue)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    found = sorted((queue.get(timeout=60) for _ in ranks), key=lambda part: part[0])
    for process in ranks:
        process.join()
    logits, target = random(3, 2, 32), torch.tensor([[0, 5], [-100, 17], [30, 2]])
    expected = F.cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=0.1, reduction="none").view(3, 2)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    for (_, loss, part), theirs in zip(found, gradient.chunk(2, -1)):
        torch.testing.assert_close(torch.from_numpy(loss), expected.detach())
        torch.testing.assert_close(torch.from_numpy(part), theirs)


def test_embedding():
    table, indices = op_modules.LigerEmbedding(7, 4, padding_idx=2), torch.tensor([[1, 2, 6]])
    assert not table.weight[2].any()
    torch.testing.assert_close(table(indices), table.weight[indices])


@pytest.mark.parametrize("name", ["size_average", "reduce"])
def test_deprecated_reductions_of_kl_div(name):
    q, p = random(3, 5).log_softmax(-1), random(3, 5).softmax(-1)
    with pytest.raises(ValueError, match=f"{name}: got False, .*reduction="):
        functional.liger_kl_div(q, p, **{name: False})
