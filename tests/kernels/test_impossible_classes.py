"""Check that classes with logits of -inf change no value and no gradient."""

import pytest
import torch
import torch.nn.functional as F

from liger_hw import (
    cross_entropy,
    distillation_loss,
    fused_linear_selective_log_softmax,
    jsd,
    kl_div,
    selective_log_softmax,
    use_backend,
)

CLASSES, ALLOWED = 40, 23


@pytest.fixture(params=["kernels", "chunks", "reference"])
def engine(request, backend):
    with use_backend({"kernels": backend, "chunks": None, "reference": "reference"}[request.param]):
        yield


def masked(x):
    return F.pad(x, (0, CLASSES - ALLOWED), value=float("-inf"))


def logits(device, rows=5):
    return torch.randn(rows, ALLOWED, device=device, requires_grad=True)


def hold(found, expected, *leaves):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    pairs = zip(*(torch.autograd.grad(value.sum(), leaves) for value in (found, expected)))
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_cross_entropy(engine, device):
    torch.manual_seed(0)
    x, y = logits(device), torch.randint(0, ALLOWED, (5,), device=device)
    hold(cross_entropy(masked(x), y), F.cross_entropy(x, y), x)


def test_entropy(engine, device):
    torch.manual_seed(0)
    x, y = logits(device), torch.randint(0, ALLOWED, (5,), device=device)
    found = selective_log_softmax(masked(x), y, return_entropy=True, return_lse=True)
    expected = torch.distributions.Categorical(logits=x)
    hold(torch.cat(found[:3]), torch.cat((expected.log_prob(y), expected.entropy(), x.logsumexp(-1))), x)


def test_entropy_of_a_masked_head(engine, device):
    torch.manual_seed(0)
    x, w = torch.randn(5, 8, device=device, requires_grad=True), torch.randn(CLASSES, 8, device=device)
    w.requires_grad_()
    y, bias = torch.randint(0, ALLOWED, (5,), device=device), masked(torch.zeros(ALLOWED, device=device))
    found = fused_linear_selective_log_softmax(x, w, y, bias, chunk_memory=400, return_entropy=True)
    expected = torch.distributions.Categorical(logits=F.linear(x, w[:ALLOWED]))
    hold(torch.cat(found[:2]), torch.cat((expected.log_prob(y), expected.entropy())), x, w)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_divergence(beta, engine, device):
    torch.manual_seed(0)
    q, p = logits(device).log_softmax(-1), logits(device).log_softmax(-1).detach()
    leaf = q.detach().requires_grad_()
    hold(jsd(masked(leaf), masked(p), beta), jsd(leaf, p, beta), leaf)
    hold(kl_div(masked(leaf), masked(p), "sum", True), kl_div(leaf, p, "sum", True), leaf)


@pytest.mark.parametrize("soft_loss", ["jsd", "kl", "reverse_kl", "tvd"])
def test_distillation_from_a_masked_head(soft_loss, engine, device):
    torch.manual_seed(0)
    x, t, w, v = (torch.randn(*shape, device=device) for shape in ((5, 8), (5, 6), (CLASSES, 8), (CLASSES, 6)))
    x.requires_grad_()
    bias, y = masked(torch.zeros(ALLOWED, device=device)), torch.randint(0, ALLOWED, (5,), device=device)
    found = distillation_loss(x, w, t, v, y, bias, bias, soft_loss=soft_loss).loss
    hold(found, distillation_loss(x, w[:ALLOWED], t, v[:ALLOWED], y, soft_loss=soft_loss).loss, x)
