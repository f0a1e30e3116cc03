"""Losses of a head: `counted_rows` changes no value, and `invariant` makes a row's gradient that of the row alone."""

import pytest
import torch

import liger_hw
from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.vocabulary import chunked_head
from liger_hw.losses.engine import logits_loss

FEATURES, VOCABULARY = 123, 517


def text(x, weight, labels, **options):
    """Give each row a text of two tokens, of which the second is the label."""
    labels = torch.stack((torch.full_like(labels, -100), labels), 1)
    return liger_hw.multi_token_loss(torch.stack((x, x), 1)[None], weight, labels, chunk_memory=9000, **options).loss


def teacher(x, weight, labels, **options):
    return liger_hw.distillation_loss(x, weight, x.detach().flip(1), weight, labels, chunk_memory=9000, **options).loss


def stored(x, weight, labels, k=None, **options):
    log_p = (x.detach()[:, :1].float() * torch.arange(len(weight), device=x.device).cos()).log_softmax(1)  # by row
    given = (log_p, None) if k is None else log_p.topk(k)
    return liger_hw.offline_distillation_loss(x, weight, *given, labels=labels, chunk_memory=9000, **options)


LOSSES = {
    "multi-token": text, "teacher": teacher, "stored teacher": stored,
    "tvd": lambda *args, **options: teacher(*args, soft_loss="tvd", temperature=2.0, **options),
    "top 5": lambda *args, **options: stored(*args, k=5, soft_loss="jsd", softcap=3.0, **options),
}  # fmt: skip


def case(device="cpu", dtype=torch.float32, features=FEATURES, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, features, generator=generator).to(device, dtype) / 4 for n in (8, vocabulary))
    return x, weight, torch.randint(vocabulary, (8,), generator=generator).to(device)


@pytest.mark.parametrize("name", LOSSES)
def test_counted_rows(name, engine, device, monkeypatch):
    x, weight, labels = case(device, features=16, vocabulary=37)
    labels[[0, 3, 4]] = -100
    rows, write_logits = [], chunked_head.write_logits
    monkeypatch.setattr(
        chunked_head, "write_logits", lambda logits, *head: rows.append(len(logits)) or write_logits(logits, *head)
    )

    def run(**options):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rows.clear()
        value = LOSSES[name](*inputs, labels, **options)
        return value.detach(), *torch.autograd.grad(value, inputs)

    expected = run()
    for bound in (5, 6, 40):
        for found, wanted in zip(run(counted_rows=bound), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        models = 2 if name in ("teacher", "tvd") else 1
        assert sum(rows) == models * min(bound, 16 if name == "multi-token" else 8)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"counted_rows: got 4, allowed: at least the 5 rows"):
            run(counted_rows=4)
    else:
        assert run(counted_rows=4)[0].isnan()
    with pytest.raises(ValueError, match=r"counted_rows: got -1, allowed: None or a number of rows"):
        run(counted_rows=-1)
    assert LOSSES[name](x, weight, torch.full_like(labels, -100), counted_rows=0) == 0


@pytest.mark.skipif(interpreting(), reason="torch's products decide there, which numpy computes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [None, "reference"], ids=str)
@pytest.mark.parametrize("name", [*LOSSES, "own"])
def test_a_rows_gradient_ignores_other_rows(name, way, dtype):
    """Counts of rows are powers of two, so that their mean divides exactly."""
    x, weight, labels = case(dtype=dtype)

    def own(x, weight, labels, **options):
        return logits_loss(lambda z: z.float().logsumexp(1).sum(), x, weight, **options) / len(x)

    def gradient(rows):
        part = x[rows].requires_grad_()
        loss = (own if name == "own" else LOSSES[name])(part, weight, labels[rows], invariant=True)
        return torch.autograd.grad(loss, part)[0] * len(part)

    with use_backend(way):
        whole = gradient(torch.arange(8))
        for rows in ([7], [5, 2], [6, 7, 1, 0]):
            assert torch.equal(gradient(torch.tensor(rows)), whole[rows])


@pytest.mark.skipif(interpreting(), reason="the same there")
@pytest.mark.parametrize("name", LOSSES)
def test_fp16_gradients_have_a_factor_of_the_whole_batch(name):
    x, weight, labels = case(dtype=torch.float16)
    with pytest.raises(ValueError, match=r"invariant: got True, allowed: False for gradients in fp16"):
        LOSSES[name](x.requires_grad_(), weight, labels, invariant=True)
    LOSSES[name](x, weight, labels, invariant=True, logits_dtype=torch.float32).backward()
