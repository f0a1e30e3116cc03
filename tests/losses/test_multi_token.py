import pytest
import torch
import torch.nn.functional as F
from naive import hold

from liger_hw.losses.multi_token import multi_token_loss
from liger_hw.testing.inputs import randn


def case(heads=3, batch=2, length=6, device="cpu"):
    torch.manual_seed(0)
    x, w = randn(heads, batch, length, 8, device=device), randn(heads, 31, 8, device=device)
    labels = torch.randint(0, 31, (batch, length), device=device)
    labels[0, 3] = -100
    return x, w, randn(31, device=device), labels


def whole(labels, shifts, weights):
    def function(x, w, b):
        losses = []
        for k, shift in enumerate(shifts):
            logits = F.linear(x[k], w[k] if w.ndim == 3 else w, b)[:, :-shift].flatten(0, 1)
            losses.append(
                F.cross_entropy(logits.to(torch.promote_types(x.dtype, torch.float32)), labels[:, shift:].flatten())
            )
        return sum(weight * loss for weight, loss in zip(weights, losses)), torch.stack(losses)

    return function


@pytest.mark.parametrize("memory", [1, 700, 10**6])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_are_cross_entropies(dtype, shared, memory, engine, device):
    x, w, b, labels = case(device=device)
    shifts, weights = (1, 2, 4), (1.0, 0.8, 0.5)

    def found(x, w, b):
        w = w if shared else list(w)
        return multi_token_loss(x, w, labels, shifts, weights, b, chunk_memory=memory)

    w = w[0].detach().requires_grad_() if shared else w
    hold(whole(labels, shifts, weights), found, (x, w, b), dtype)


def test_heads_with_a_softcap_and_a_scale(engine, device):
    x, w, b, labels = case(device=device)

    def expected(x, w, b):
        logits = [2 * torch.tanh(F.linear(x[k], w, b)[:, : -k - 1] * 0.7 / 2).flatten(0, 1) for k in range(3)]
        losses = [F.cross_entropy(z, labels[:, k + 1 :].flatten()) for k, z in enumerate(logits)]
        return sum(losses), torch.stack(losses)

    def found(x, w, b):
        return multi_token_loss(x, w, labels, bias=b, softcap=2.0, logit_scale=0.7)

    hold(expected, found, (x, w[0].detach().requires_grad_(), b), torch.float32)


def test_one_hidden_state_for_all(engine, device):
    x, w, _, labels = case(device=device)
    hidden = x[0].detach().requires_grad_()
    found = multi_token_loss([hidden] * 3, list(w), labels)
    expected = whole(labels, (1, 2, 3), (1, 1, 1))(torch.stack([hidden] * 3), w, None)
    torch.testing.assert_close(found.loss, expected[0])
    torch.testing.assert_close(torch.autograd.grad(found.loss, hidden)[0], torch.autograd.grad(expected[0], hidden)[0])


def test_shifts_beyond_the_text(engine, device):
    x, w, b, labels = case(device=device)
    found = multi_token_loss(x, list(w), labels, shifts=(1, 6, 99))
    found.loss.backward()
    assert torch.equal(found.head_losses[1:], torch.zeros(2, device=device)) and x.grad[1:].abs().sum() == 0


def test_nothing_to_learn_from_extreme_logits_and_a_second_backward(engine, device):
    x, w, _, labels = case(device=device)
    found = multi_token_loss(x, w[0].detach(), torch.full_like(labels, -100))
    found.loss.backward(retain_graph=True)
    assert found.loss == 0 and x.grad.abs().sum() == 0
    with pytest.raises(RuntimeError, match="second"):
        found.loss.backward()
    x = torch.tensor([[[[1e4], [-1e4]]]], device=device, requires_grad=True)
    w = torch.tensor([[1.0], [-1.0]], device=device)
    found = multi_token_loss(x, w, torch.tensor([[0, 1]], device=device))
    found.loss.backward()
    assert found.loss == 2e4 and x.grad.isfinite().all()


@pytest.mark.parametrize(
    "argument, change",
    [
        ("shifts", {"shifts": (1, 2)}),
        ("shifts", {"shifts": (0, 1, 2)}),
        ("head_weights", {"head_weights": (1.0,)}),
        ("labels", {"labels": torch.zeros(12, dtype=torch.int64)}),
        ("heads", {"heads": torch.zeros(3, 2, 5, 8)}),
        ("weight", {"weight": [torch.zeros(31, 8)] * 2}),
        ("bias", {"bias": [None] * 2, "weight": [torch.zeros(31, 8)] * 3}),
        ("labels", {"labels": torch.full((2, 6), 31)}),
        (
            "labels",
            {"labels": torch.full((2, 6), 30), "weight": [torch.zeros(31, 8), torch.zeros(31, 8), torch.zeros(9, 8)]},
        ),
        ("heads", {"heads": None}),
        ("shifts", {"shifts": (1.5, 2, 3)}),
        ("shifts", {"shifts": 3}),
        ("head_weights", {"head_weights": (1.0, 1.0, float("nan"))}),
        ("weight", {"weight": []}),
    ],
)
def test_bad_input(argument, change):
    x, w, _, labels = case()
    with pytest.raises(ValueError, match=f"^{argument}"):
        multi_token_loss(**({"heads": x, "weight": w[0], "labels": labels} | change))
