import math

import pytest
import torch
from naive import hold, leaves, token_log_probs

from liger_hw import use_backend
from liger_hw.losses.policy import OBJECTIVES, PolicyOptions, policy_loss, policy_loss_of_logits, token_weights
from liger_hw.testing.inputs import randn

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def case(batch=3, length=5, features=8, classes=31, device="cpu"):
    """Make a trainer's tensors, with old and reference log-probabilities near the policy's."""
    torch.manual_seed(0)
    x, w, b = (randn(*s, device=device) for s in ((batch, length, features), (classes, features), (classes,)))
    tokens = torch.randint(0, classes, (batch, length), device=device)
    mask = torch.arange(length, device=device)[None] < torch.tensor([5, 3, 1], device=device)[:batch, None]
    log_probs = token_log_probs(x, w, tokens, b)[0].detach()
    beside = {
        "mask": mask,
        "old_log_probs": log_probs + 0.3 * torch.randn(batch, length, device=device),
        "ref_log_probs": log_probs + 0.5 * torch.randn(batch, length, device=device),
    }
    return (x, w, b), tokens, torch.tensor([0.7, -1.2, 0.4], device=device)[:batch], beside


def whole(
    tokens, advantages, mask, old_log_probs=None, ref_log_probs=None, vllm_is_ratio=None, num_items=None, **options
):
    """Compute each published loss from all logits: loss, KL, clipped share, entropy."""
    o = PolicyOptions(**options)

    def function(x, w, b):
        lp, entropy = token_log_probs(x, w, tokens, b, o.temperature)
        mask_ = mask.to(lp.dtype)
        lengths = mask_.sum(-1, keepdim=True)
        old = lp.detach() if old_log_probs is None else old_log_probs.to(lp.dtype)
        advantage = (advantages[:, None] if advantages.ndim == 1 else advantages).to(lp.dtype).expand(lp.shape)
        correction = 1.0
        if vllm_is_ratio is not None:
            correction = (vllm_is_ratio[:, None] if vllm_is_ratio.ndim == 1 else vllm_is_ratio).to(lp.dtype)
        log_r = lp - old
        if o.importance_sampling_level == "sequence":
            log_r = ((log_r * mask_).sum(-1, keepdim=True) / lengths.clamp(min=1)).expand(lp.shape)
        r = log_r.exp()
        clipped = torch.zeros_like(r)
        if o.loss_type == "cispo":
            loss = -r.clamp(max=o.epsilon_high).detach() * advantage * lp
            clipped = (r > o.epsilon_high) & (advantage > 0)
        elif o.loss_type == "sapo":
            tau = torch.where(advantage > 0, o.sapo_temperature_pos, o.sapo_temperature_neg)
            loss = -torch.sigmoid(tau * (r - 1)) * 4 / tau * advantage
        elif o.loss_type == "vespo":
            log_w = ((lp - old) * mask_).sum(-1, keepdim=True).detach()
            if vllm_is_ratio is not None:
                log_c = vllm_is_ratio.reshape(len(lp), -1).log()  # a sequence's counts once
                log_w = log_w + (log_c * mask if log_c.shape == mask.shape else log_c).sum(-1, keepdim=True)
            k = torch.where(advantage >= 0, o.vespo_k_pos, o.vespo_k_neg)
            lam = torch.where(advantage >= 0, o.vespo_lambda_pos, o.vespo_lambda_neg)
            loss, correction = -torch.exp(lam + k * log_w - lam * log_w.exp()) * advantage * lp, 1.0
        else:
            bounded = r if o.delta is None else r.clamp(max=o.delta)
            loss = -torch.min(bounded * advantage, r.clamp(1 - o.epsilon_low, 1 + o.epsilon_high) * advantage)
            clipped = ((r < 1 - o.epsilon_low) & (advantage < 0)) | ((r > 1 + o.epsilon_high) & (advantage > 0))
        loss = loss * correction
        kl = torch.zeros_like(lp)
        if o.beta:
            d = ref_log_probs.to(lp.dtype) - lp
            kl = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - d - 1}[o.kl_estimator]
            kl = kl * r if o.use_bias_correction_kl else kl
        loss = (loss + o.beta * kl - o.entropy_coef * entropy) * mask_
        total = mask_.sum()
        if o.loss_type in ("grpo", "sapo"):
            value = (loss.sum(-1) / lengths[:, 0].clamp(min=1)).mean()
        elif o.loss_type == "dr_grpo":
            value = loss.sum() / (len(lp) * (o.max_completion_length or lp.shape[1]))
        elif o.loss_type == "luspo":
            value = loss.sum() / len(lp)
        elif o.loss_type in ("bnpo", "ppo"):
            value = loss.sum() / total.clamp(min=1)
        else:
            value = loss.sum() / (num_items or total.clamp(min=1))
        kl, entropy = ((v * mask_).sum() / total.clamp(min=1) for v in (kl, entropy))
        return value, kl, (clipped * mask).float().sum() / mask.float().sum(), entropy  # a count's share, in fp32

    return function


def fused(tokens, advantages, memory=10**6, **options):
    def function(x, w, b):
        found = policy_loss(x, w, tokens, advantages, bias=b, return_entropy=True, chunk_memory=memory, **options)
        kl = torch.zeros_like(found.loss) if found.kl is None else found.kl
        return found.loss, kl, found.clip_ratio, found.entropy

    return function


BY_TOKEN = {
    "loss_type": "dapo", "num_items": 11, "kl_estimator": "k1", "use_bias_correction_kl": True, "entropy_coef": 0.1,
}  # fmt: skip
BY_SEQUENCE = {
    "loss_type": "ppo", "importance_sampling_level": "sequence", "use_bias_correction_kl": True, "entropy_coef": 0.1,
}  # fmt: skip
VARIANTS = [
    *({"loss_type": name} for name in OBJECTIVES),
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.0},
    {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    {"loss_type": "dr_grpo", "max_completion_length": 9, "delta": 1.1, "epsilon_high": 0.4},
    {"loss_type": "dapo", "num_items": torch.tensor([[[11.0]]], dtype=torch.float64)},
    BY_TOKEN,
    {"loss_type": "bnpo", "kl_estimator": "k2", "temperature": 0.7, "old_log_probs": None},
    BY_SEQUENCE,
    {"loss_type": "vespo", "vllm_is_ratio": torch.tensor([0.5, 1.5, 0.9])},
    {"loss_type": "vespo", "vllm_is_ratio": torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) + 0.5},
    {"loss_type": "grpo", "vllm_is_ratio": torch.tensor([[0.5], [1.5], [0.9]])},
    {"loss_type": "dapo", "vllm_is_ratio": torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) + 0.5},
]
names = [" ".join(str(v) for v in variant.values() if not torch.is_tensor(v)) for variant in VARIANTS]


@pytest.mark.parametrize("variant", VARIANTS, ids=names)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_published_formulas(variant, dtype, device):
    inputs, tokens, advantages, beside = case(device=device)
    options = {k: v.to(device) if torch.is_tensor(v) else v for k, v in (beside | variant).items()}
    with use_backend(None):
        for memory in (700, 10**6):
            hold(whole(tokens, advantages, **options), fused(tokens, advantages, memory, **options), inputs, dtype)


@pytest.mark.parametrize("memory", [1, 700, 10**6])
@pytest.mark.parametrize("variant", [BY_TOKEN, BY_SEQUENCE], ids=["token", "sequence"])
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_chunks_change_nothing(variant, memory, dtype, engine, device):
    inputs, tokens, advantages, beside = case(device=device)
    options = beside | variant
    hold(whole(tokens, advantages, **options), fused(tokens, advantages, memory, **options), inputs, dtype)


def test_advantages_by_token(device):
    inputs, tokens, _, beside = case(device=device)
    advantages = torch.randn(3, 5, device=device)
    options = beside | {"loss_type": "ppo", "beta": 0.0}
    hold(whole(tokens, advantages, **options), fused(tokens, advantages, **options), inputs, torch.float32)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_a_masked_first_token_decides_nothing(loss_type, device):
    """A prompt's last tokens stay in some trainers' completions, masked: the others' losses are those without them."""
    inputs, tokens, advantages, beside = case(device=device)
    beside = {name: rows[:, 1:] for name, rows in beside.items()}
    options = {"loss_type": loss_type, "beta": 0.1, "max_completion_length": 7}
    x, w, b = leaves(*inputs, dtype=torch.float64)
    expected = policy_loss(x[:, 1:], w, tokens[:, 1:], advantages, bias=b, **beside, **options).loss
    beside = {name: torch.nn.functional.pad(rows, (1, 0)) for name, rows in beside.items()}
    found = policy_loss(x, w, tokens, advantages, bias=b, **beside, **options).loss
    torch.testing.assert_close(found, expected)


def test_reference_model_by_hidden_states(engine, device):
    (x, w, b), tokens, advantages, beside = case(device=device)
    ref_x, ref_w = torch.randn(3, 5, 6, device=device), torch.randn(31, 6, device=device)
    beside["ref_log_probs"] = token_log_probs(ref_x, ref_w, tokens)[0]
    expected = policy_loss(x, w, tokens, advantages, bias=b, **beside)
    del beside["ref_log_probs"]
    found = policy_loss(x, w, tokens, advantages, bias=b, ref_x=ref_x, ref_weight=ref_w, **beside)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.kl, expected.kl)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
@pytest.mark.parametrize("in_place", [False, True])
def test_from_logits_as_from_hidden_states(loss_type, in_place, engine, device):
    (x, w, b), tokens, advantages, beside = case(device=device)
    options = beside | {"loss_type": loss_type, "epsilon_high": 0.1}
    hidden = policy_loss(x, w, tokens, advantages, bias=b, **options)
    hidden.loss.backward()
    expected, (x, w, b) = x.grad, leaves(x, w, b)
    logits = torch.nn.functional.pad(torch.nn.functional.linear(x, w, b), (0, 0, 0, 1))
    loss, kl, clipped, batch = policy_loss_of_logits(logits, tokens, advantages, in_place=in_place, **options)
    value = (loss * token_weights(batch.mask, PolicyOptions(loss_type=loss_type))).sum()
    value.backward()
    torch.testing.assert_close(value, hidden.loss)
    torch.testing.assert_close(batch.mean(kl), hidden.kl)
    torch.testing.assert_close(batch.mean(clipped.float()), hidden.clip_ratio)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_no_completions(loss_type, device):
    """A rank that was left without any."""
    x, w = torch.zeros(0, 5, 8, device=device, requires_grad=True), randn(31, 8, device=device)
    tokens, advantages = torch.zeros(0, 5, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    loss = policy_loss(x, w, tokens, advantages, loss_type=loss_type, beta=0.0).loss
    assert torch.autograd.grad(loss, x)[0].shape == x.shape and loss == 0
    logits = torch.zeros(0, 5, 31, device=device)
    assert policy_loss_of_logits(logits, tokens, advantages, loss_type=loss_type, beta=0.0)[0].shape == (0, 5)


@pytest.mark.parametrize("loss_type", OBJECTIVES)
def test_empty_completions_and_masked_rubbish(loss_type, device):
    """An empty completion costs nothing, and values at masked positions have no effect."""
    (x, w, b), tokens, advantages, beside = case(device=device)
    beside["mask"] = beside["mask"] & torch.tensor([[True], [True], [False]], device=device)
    clean = policy_loss(x, w, tokens, advantages, bias=b, loss_type=loss_type, **beside)
    rubbish = {k: v.masked_fill(~beside["mask"], math.inf) for k, v in beside.items() if k != "mask"}
    tokens = tokens.masked_fill(~beside["mask"], 10**6)
    found = policy_loss(x, w, tokens, advantages, beside["mask"], b, loss_type=loss_type, **rubbish)
    found.loss.backward()
    assert torch.equal(found.loss, clean.loss) and torch.equal(found.kl, clean.kl)
    assert x.grad.isfinite().all() and x.grad[2].abs().sum() == 0
    empty = policy_loss(x, w, tokens, advantages, torch.zeros_like(beside["mask"]), b, loss_type=loss_type, **rubbish)
    assert empty.loss == 0 and empty.kl == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_extreme_logits(level, engine, device):
    x = torch.tensor([[[1e4], [-1e4]]], device=device, requires_grad=True)
    w = torch.tensor([[1.0], [-1.0]], device=device)
    tokens = torch.tensor([[0, 1]], device=device)
    options = {"beta": 0.0, "return_entropy": True, "entropy_coef": 0.1, "importance_sampling_level": level}
    found = policy_loss(x, w, tokens, torch.ones(1, device=device), **options)
    found.loss.backward()
    assert found.loss == -1 and found.entropy == 0 and x.grad.isfinite().all()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_completions_beyond_65536_tokens(level, device):
    """65,537 tokens exceed a grid dimension; the peer's kernels have a program a token there."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device(device)
    torch.manual_seed(0)
    x, w = randn(1, 65537, 2, device=device), randn(3, 2, device=device)
    tokens, advantages = torch.randint(0, 3, (1, 65537), device=device), torch.ones(1, device=device)
    options = {"beta": 0.0, "importance_sampling_level": level}
    with use_backend(None):
        found = policy_loss(x, w, tokens, advantages, **options)
        expected = whole(tokens, advantages, torch.ones_like(tokens), **options)(x, w, None)[0]
        torch.testing.assert_close(found.loss, expected)
        gradients = (torch.autograd.grad(loss, (x, w)) for loss in (found.loss, expected))
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        logits = torch.nn.functional.linear(x, w)
        loss, _, _, batch = policy_loss_of_logits(logits, tokens, advantages, **options)
        torch.testing.assert_close(batch.mean(loss), expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_second_backward(level, engine, device):
    (x, w, b), tokens, advantages, beside = case(device=device)
    value = policy_loss(x, w, tokens, advantages, bias=b, importance_sampling_level=level, **beside).loss
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second"):
        value.backward()


def test_only_what_asks_gets_a_gradient(engine, device):
    (x, w, b), tokens, advantages, beside = case(device=device)
    advantages.requires_grad_(), beside["old_log_probs"].requires_grad_()
    x = x.detach()
    found = policy_loss(x, w, tokens, advantages, bias=b, **beside)
    found.loss.backward()
    assert x.grad is None and advantages.grad is None and beside["old_log_probs"].grad is None
    assert w.grad is not None and b.grad is not None and not any(t.requires_grad for t in found[1:] if t is not None)


def test_compiles(device):
    (x, w, b), tokens, advantages, beside = case(device=device)

    def loss(x, w):
        return policy_loss(x * 1, w, tokens, advantages, bias=b, **beside).loss

    with use_backend(None):
        torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(x, w), loss(x, w))


@pytest.mark.parametrize(
    "argument, change",
    [
        ("x", {"x": torch.zeros(3, 4, 8)}),
        ("tokens", {"tokens": torch.zeros(15, dtype=torch.int64), "x": torch.zeros(15, 8)}),
        ("mask", {"mask": torch.ones(3, 4)}),
        ("advantages", {"advantages": torch.ones(2)}),
        ("old_log_probs", {"old_log_probs": torch.ones(3)}),
        ("ref_log_probs", {"ref_log_probs": None}),
        ("vllm_is_ratio", {"vllm_is_ratio": torch.ones(3, 2)}),
        ("unknown loss_type", {"loss_type": "reinforce"}),
        ("unknown importance_sampling_level", {"importance_sampling_level": "batch"}),
        ("unknown importance_sampling_level", {"importance_sampling_level": "sequence", "loss_type": "cispo"}),
        ("delta", {"delta": 2.0, "loss_type": "sapo"}),
        ("temperature", {"temperature": 0.0}),
        ("beta", {"beta": -0.1}),
        ("unknown kl_estimator", {"kl_estimator": "k4"}),
        ("sapo_temperature_pos", {"sapo_temperature_pos": 0.0}),
        ("max_completion_length", {"max_completion_length": 0}),
        ("tokens", {"tokens": torch.full((3, 5), 31)}),
        ("tokens", {"tokens": torch.zeros(3, 5)}),
        ("advantages", {"advantages": None}),
        ("mask", {"mask": [[1] * 5] * 3}),
        ("weight", {"weight": torch.zeros(31, 3)}),
        ("ref_x", {"ref_log_probs": None, "ref_x": torch.zeros(2, 5, 8), "ref_weight": torch.zeros(31, 8)}),
        ("beta", {"beta": "0.04"}),
        ("epsilon_low", {"epsilon_low": float("nan")}),
        ("entropy_coef", {"entropy_coef": float("nan")}),
        ("num_items", {"num_items": 0}),
        ("unknown option 'bogus'. Options: loss_type", {"bogus": 1}),
    ],
)
def test_bad_input(argument, change):
    (x, w, _), tokens, advantages, beside = case()
    good = {"x": x, "weight": w, "tokens": tokens, "advantages": advantages, **beside}
    with pytest.raises(ValueError, match=f"^{argument}"):
        policy_loss(**(good | change))
