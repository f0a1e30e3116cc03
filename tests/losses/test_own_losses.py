"""Losses of one's own, by a function or by the base classes of liger_kernel.chunked_loss, are the ones they imitate."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_policy import case as policy_case
from test_preference import case as answers_case

from liger_hw.chunked_loss import functional
from liger_hw.chunked_loss.fused_linear_distillation import LigerFusedLinearDistillationBase
from liger_hw.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase
from liger_hw.chunked_loss.fused_linear_preference import LigerFusedLinearPreferenceBase
from liger_hw.chunked_loss.fused_linear_unpaired_preference import LigerFusedLinearUnpairedPreferenceBase
from liger_hw.chunked_loss.grpo_loss import clip_coef_fn, get_gamma_weights, k3_loss_fn, sapo_loss_fn
from liger_hw.losses.policy import policy_loss
from liger_hw.losses.preference import preference_loss


class DPO(LigerFusedLinearPreferenceBase):
    @staticmethod
    def preference_loss_fn(chosen, rejected, full_target, ref_chosen_logps, ref_rejected_logps, beta, flip=1):
        rewards = beta * (chosen - ref_chosen_logps), beta * (rejected - ref_rejected_logps)
        losses = -F.logsigmoid(flip * (rewards[0] - rewards[1]))
        return losses.sum() / (full_target.shape[0] // 2), *rewards

    @classmethod
    def forward(cls, ctx, x, weight, target, bias, ref_x, ref_weight, ref_bias, chunk_size):
        return super().forward(
            cls, ctx, x, weight, target, bias, chunk_size, beta=0.3, alpha=0.7, use_ref_model=True, ref_input=ref_x,
            ref_weight=ref_weight, ref_bias=ref_bias, average_log_prob=False, flip=1,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPreferenceBase.backward(ctx, grad_output)[:4], None, None, None, None


class KL(LigerFusedLinearDistillationBase):
    @staticmethod
    def distillation_loss_fn(student, teacher, target, ignore_index, beta):
        kept = student[:, :-1].log_softmax(-1), teacher[:, :-1].log_softmax(-1)
        return F.kl_div(*kept, reduction="sum", log_target=True)

    @classmethod
    def forward(cls, ctx, x, weight, teacher, target, bias):
        options = {"weight_hard_loss": 0.5, "weight_soft_loss": 0.5, "compute_ce_loss": False}
        return super().forward(cls, ctx, x, weight, *teacher, target, bias, **options)

    @staticmethod
    def backward(ctx, *grad_output):
        grad_x, grad_weight, *_, grad_bias = LigerFusedLinearDistillationBase.backward(ctx, grad_output)
        return grad_x, grad_weight, None, None, grad_bias


class KTO(LigerFusedLinearUnpairedPreferenceBase):
    @staticmethod
    def preference_loss_fn(log_probs, labels, full_target, ref_log_prob_chunk, beta, kl):
        ratio = log_probs - ref_log_prob_chunk
        losses = 1 - torch.sigmoid(beta * (ratio - kl) * (2.0 * labels - 1))
        rewards = beta * ratio
        return losses.sum() / full_target.shape[0], (rewards * labels).sum(), (rewards * ~labels).sum()

    @classmethod
    def forward(cls, ctx, x, weight, target, labels, bias, ref_x, ref_weight, ref_bias):
        return super().forward(
            cls=cls, ctx=ctx, _input=x, weight=weight, target=target, preference_labels=labels, bias=bias,
            use_ref_model=True, ref_input=ref_x, ref_weight=ref_weight, ref_bias=ref_bias, beta=0.3, kl=0.2,
        )  # fmt: skip

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearUnpairedPreferenceBase.backward(ctx, grad_output)[:5], None, None, None


class PPO(LigerFusedLinearPPOBase):
    @staticmethod
    def ppo_loss_fn(log_probs, mask, advantages, full_mask, old_per_token_logps, epsilon_low, epsilon_high, **options):
        r = (log_probs - old_per_token_logps).exp()
        clipped, below, above = clip_coef_fn(r, epsilon_low, epsilon_high, "bnpo")
        a = advantages[:, None]
        loss = -torch.minimum(r * a, clipped * a)
        is_clipped = (below & (a < 0)) | (above & (a > 0))
        return (loss * mask).sum() / full_mask.sum(), [(is_clipped * mask).sum() / full_mask.sum()]

    @classmethod
    def forward(cls, ctx, x, weight, tokens, mask, advantages, bias, old):
        return super().forward(cls, ctx, x, weight, tokens, mask, advantages, bias, None, old, beta=0.0)

    @staticmethod
    def backward(ctx, *grad_output):
        return *LigerFusedLinearPPOBase.backward(ctx, *grad_output)[:6], None


def same(found, expected, leaves):
    loss, beside = found
    assert len(beside) == len(expected[1])
    for a, b in zip((loss, *beside), (expected[0], *expected[1])):
        torch.testing.assert_close(a.detach(), b.detach().to(a.dtype), rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(2 * value, leaves) for value in (loss, expected[0]))
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk_size", [1, 3])
def test_pairs(chunk_size, engine, device):
    (x, w, b), ref, labels = answers_case(device=device)
    expected = functional.liger_fused_linear_dpo(x, w, labels, b, *ref, -100, 0.3, True, alpha=0.7)
    same(DPO.apply(x, w, labels, b, *ref, chunk_size), expected, (x, w, b))


def test_answers(engine, device):
    (x, w, b), ref, labels = answers_case(5, device=device)
    preferred = torch.tensor([True, False, True, True, False], device=device)
    expected = functional.liger_fused_linear_kto(x, w, labels, preferred, b, *ref, 0.2, beta=0.3)
    same(KTO.apply(x, w, labels, preferred, b, *ref), expected, (x, w, b))


def test_policies(engine, device):
    (x, w, b), tokens, advantages, beside = policy_case(device=device)
    old, mask = beside["old_log_probs"], beside["mask"]
    expected = policy_loss(x, w, tokens, advantages, mask, b, old, beta=0.0, loss_type="bnpo")
    found = PPO.apply(x, w, tokens, mask.long(), advantages, b, old)
    same(found, (expected.loss, [expected.clip_ratio]), (x, w, b))


def test_a_banned_token_without_cross_entropy(engine, device):
    """Its logit is -inf, which a hard loss that is left out must not make NaN."""
    (x, w, b), _, labels = answers_case(device=device)
    b = b.detach().clone()
    b[-1] = -math.inf
    teacher = 0.5 * x.detach(), w.detach()
    loss = KL.apply(x, w, teacher, labels, b)
    student = F.linear(x, w, b).flatten(0, -2)
    soft = KL.distillation_loss_fn(student, F.linear(*teacher).flatten(0, -2), None, None, None)
    expected = 0.5 * soft / (labels != -100).sum()
    same((loss, []), (expected, []), (x, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_soft_loss_that_is_constant(dtype, monkeypatch):
    monkeypatch.setattr(KL, "distillation_loss_fn", staticmethod(lambda student, *_, **__: torch.zeros(())))
    (x, w, b), _, labels = answers_case()
    x, w, b = (tensor.detach().to(dtype).requires_grad_() for tensor in (x, w, b))
    KL.apply(x, w, (x.detach(), w.detach()), labels, b).backward()
    assert not x.grad.any() and not w.grad.any() and not b.grad.any()


@pytest.mark.parametrize("reduced", [False, True], ids=["fp32", "fp16"])
def test_second_order_gradients_are_refused(reduced):
    (x, w, b), ref, labels = answers_case()
    if reduced:
        x, w, b = (tensor.detach().half().requires_grad_() for tensor in (x, w, b))
        ref = [tensor.half() for tensor in ref]
    for loss in (DPO.apply(x, w, labels, b, *ref, 1)[0], KL.apply(x, w, (x.detach(), w.detach()), labels, b)):
        with pytest.raises(RuntimeError, match="has no second-order gradients"):
            torch.autograd.grad(loss, x, create_graph=True)


def test_only_what_asks_gets_a_gradient():
    (x, w, b), ref, labels = answers_case()
    loss = DPO.apply(x, w.detach(), labels, None, *ref, 1)[0]
    loss.backward()
    assert x.grad is not None and not DPO.apply(x.detach(), w.detach(), labels, None, *ref, 1)[0].requires_grad


def test_a_function_as_loss_type():
    (x, w, b), _, labels = answers_case()

    def margin(pairs, beta, smoothing, least):
        return torch.relu(least - beta * (pairs.c - pairs.r))

    found = preference_loss(x, w, labels, b, margin, 0.3, least=1.0)
    torch.testing.assert_close(found.loss, preference_loss(x, w, labels, b, "hinge", 0.3).loss)


def test_parts_of_grpo():
    log_p, log_q = torch.tensor([[0.1, -0.4], [0.3, 0.0]]), torch.tensor([[0.0, -0.1], [0.5, 0.2]])
    torch.testing.assert_close(k3_loss_fn(log_p, log_q), (log_p - log_q).exp() - (log_p - log_q) - 1)
    r = torch.tensor([0.5, 1.0, 1.5])
    torch.testing.assert_close(sapo_loss_fn(r, 2.0), torch.sigmoid(2 * (r - 1)) * 2)
    with pytest.raises(ValueError, match="temperature"):
        sapo_loss_fn(r, 0.0)
    clipped, below, above = clip_coef_fn(r, 0.2, 0.3, "grpo")
    assert clipped.tolist() == pytest.approx([0.8, 1, 1.3]) and below.tolist() == [1, 0, 0] == above.tolist()[::-1]
    assert (
        clip_coef_fn(r, 0.2, 1.2, "cispo")[0].max() == pytest.approx(1.2) and clip_coef_fn(r, 0, 0, "sapo")[0] is None
    )
    mask = torch.tensor([[1, 1], [1, 0]])
    w = ((log_p - log_q) * mask).sum(1, keepdim=True)
    expected = torch.exp(torch.tensor([[3.0], [2.0]]) * (1 - w.exp()) + torch.tensor([[2.0], [3.0]]) * w)
    torch.testing.assert_close(get_gamma_weights(torch.tensor([1.0, -1.0]), log_p - log_q, mask), expected)
