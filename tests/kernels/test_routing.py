"""Compare the router and its losses with transformers' classes, and experts with low-rank factors with merged ones."""

import pytest
import torch

from liger_hw import experts, load_balancing_loss, router, router_z_loss, use_backend
from liger_hw.testing.inputs import chosen_experts, randn
from liger_hw.testing.parity import run

TOKENS, HIDDEN, NUMBER = 50, 24, 16


def of_transformers(name, dtype, **config):
    """Return the logits and what the router class of the family `name` makes of them."""
    transformers = pytest.importorskip("transformers")
    family = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3"}[name]
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    cls = getattr(module, family + ("TopkRouter" if name == "deepseek_v3" else "TopKRouter"), None)
    if cls is None:
        pytest.skip(f"this transformers has no router class of {name}")
    sizes = {"num_local_experts": NUMBER, "num_experts": NUMBER, "n_routed_experts": NUMBER, "hidden_size": HIDDEN}
    gate = cls(getattr(transformers, family + "Config")(**sizes | config)).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        gate.weight.copy_(torch.randn(NUMBER, HIDDEN))
        for bias in gate.buffers():
            bias.copy_(torch.rand(NUMBER))
    out = gate(torch.randn(TOKENS, HIDDEN, dtype=dtype))
    if len(out) != 3:
        pytest.skip(f"this transformers' router of {name} returns something else")
    return out, gate


def assert_same(logits, expected, **options):
    weights, index = router(logits, **options)
    assert torch.equal(index, expected[1])
    assert weights.dtype == expected[0].dtype and torch.equal(weights, expected[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixtral(dtype):
    (logits, *expected), _ = of_transformers("mixtral", dtype, num_experts_per_tok=3)
    assert_same(logits, expected, k=3)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_qwen3_moe(dtype, normalise):
    (logits, *expected), _ = of_transformers("qwen3_moe", dtype, num_experts_per_tok=4, norm_topk_prob=normalise)
    assert_same(logits, expected, k=4, normalise=normalise, dtype=dtype)


@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 2)])
def test_deepseek_v3(groups, kept):
    (logits, *expected), gate = of_transformers(
        "deepseek_v3", torch.float32, num_experts_per_tok=5, n_group=groups, topk_group=kept, norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    assert_same(
        logits, expected, k=5, scores="sigmoid", eps=1e-20, scale=2.5, groups=groups, kept_groups=kept,
        correction_bias=gate.e_score_correction_bias,
    )  # fmt: skip


def test_gradients_pass_through_the_weights():
    torch.manual_seed(0)
    logits = randn(6, 8, dtype=torch.float64)
    weights, index = router(logits, 3)
    expected = torch.softmax(logits, -1).gather(1, index)
    expected = expected / expected.sum(-1, keepdim=True)
    other = torch.randn_like(weights)
    grads = [torch.autograd.grad((w * other).sum(), logits)[0] for w in (weights, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_loss(masked):
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(0)
    layers = tuple(randn(12, NUMBER) for _ in range(3))
    mask = torch.tensor([[1] * 6, [1, 1, 1, 0, 0, 0]]) if masked else None
    found, expected = load_balancing_loss(layers, 2, mask), modeling.load_balancing_loss_func(layers, NUMBER, 2, mask)
    torch.testing.assert_close(found, expected)
    for a, b in zip(torch.autograd.grad(found, layers), torch.autograd.grad(expected, layers)):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(load_balancing_loss(layers[0], 2), load_balancing_loss(layers[:1], 2))


def test_z_loss():
    logits = randn(2, 5, NUMBER)
    torch.testing.assert_close(router_z_loss(logits), torch.logsumexp(logits, -1).pow(2).sum() / 10)


@pytest.mark.parametrize(
    "message, options",
    [
        ("k: got 0", {"k": 0}),
        ("k: got 17", {"k": 17}),
        ("k: got 5, allowed: 1 to 4", {"k": 5, "groups": 4}),
        ("groups: got 3", {"groups": 3}),
        ("kept_groups: got 5", {"groups": 4, "kept_groups": 5}),
        ("unknown scores", {"scores": "relu"}),
    ],
)
def test_bad_options(message, options):
    with pytest.raises(ValueError, match=f"^{message}"):
        router(torch.randn(3, NUMBER), **{"k": 2} | options)


def lora_inputs(device="cpu"):
    torch.manual_seed(0)
    x, index, weights = randn(12, 32, device=device), chosen_experts(12, 4, 2, device), randn(12, 2, device=device)
    first, second = randn(4, 48, 32, grad=False, device=device), randn(4, 32, 24, grad=False, device=device)
    factors = [randn(4, *shape, device=device) for shape in ((8, 32), (48, 8), (8, 24), (32, 8))]
    return x, first, second, index, weights, *factors


def with_lora(x, first, second, index, weights, a1, b1, a2, b2):
    return experts(x, first, second, index, weights, gate_up_lora=(a1, b1), down_lora=(a2, b2), lora_scale=0.5)


def merged(x, first, second, index, weights, a1, b1, a2, b2):
    return experts(x, first + 0.5 * b1 @ a1, second + 0.5 * b2 @ a2, index, weights)


def test_lora_is_the_merged_weight():
    for a, b in zip(run(with_lora, lora_inputs(), {}), run(merged, lora_inputs(), {})):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)  # fp32 sums of up to 48 products of size 100


def test_lora_on_kernels(backend, device):
    inputs = lora_inputs(device)
    with use_backend("reference"):
        expected = run(with_lora, inputs, {})
    with use_backend(backend):
        for a, b in zip(run(with_lora, inputs, {}), expected):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-2)


def test_bad_lora():
    x, first, second, index, weights, a1, b1, a2, b2 = lora_inputs()
    for name, lora in (("gate_up_lora", (a1, b1[:, 1:])), ("down_lora", (a1, b2)), ("down_lora", (a2.double(), b2))):
        with pytest.raises(ValueError, match=f"^{name}: "):
            experts(x, first, second, index, weights, **{name: lora})
