"""Losses of a head: `counted_rows` changes no value, and `invariant` makes a row's gradient that of the row alone."""

import functools

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


def answers(x, weight, labels, loss, *more, **options):
    """Give each two rows to a sequence, and another model's hidden states as a reference."""
    x, labels = x.unflatten(0, (4, 2)), labels.unflatten(0, (4, 2))
    reference = {} if options.get("beta") == 0 else {"ref_x": x.detach().flip(0), "ref_weight": weight.detach()}
    return loss(x, weight, labels, *more, **reference, chunk_memory=9000, **options)


def policy(x, weight, labels, **options):
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0], device=x.device)
    old = torch.full((4, 2), -3.5, device=x.device)
    more = {"mask": labels.unflatten(0, (4, 2)) != -100, "old_log_probs": old, "return_entropy": True}
    return answers(x, weight, labels.clamp(min=0), liger_hw.policy_loss, advantages, **more, **options)


def tokens(x, weight, labels, **options):
    """A formula that is not 0 where a row does not count."""

    def formula(log_probs, entropy, row):
        return (log_probs - row) * (entropy + 2), log_probs * row, row > 3

    row = torch.arange(8.0, device=x.device)
    return liger_hw.token_loss(formula, x, weight, labels, None, (row,), with_entropy=True, **options)


def log_probabilities(x, weight, labels, **options):
    names = ("entropy", "lse", "is_top1", "mean_logits", "log_sum_sq_probs")
    asked = {f"return_{name}": True for name in names}
    output = liger_hw.fused_linear_selective_log_softmax(x, weight, labels, **asked, **options)
    return ((output.log_probs - output.entropy) * torch.arange(8, device=x.device)).sum(), *output


PREFERENCE, ANSWERS = liger_hw.preference_loss, liger_hw.unpaired_preference_loss
GOOD = torch.tensor([True, False, True, True])
SEQUENCES = {  # name: (the loss, times that it computes its logits, those of a reference model included)
    "pairs": (lambda *args, **options: answers(*args, PREFERENCE, alpha=0.3, ld_alpha=0.5, **options), 2),
    "aot": (lambda *args, **options: answers(*args, PREFERENCE, loss_type="aot", softcap=2.0, **options), 3),
    "kto": (lambda *args, **options: answers(*args, ANSWERS, GOOD.to(args[0].device), logit_scale=0.7, **options), 2),
    "policy": (policy, 2), "policy without reference": (functools.partial(policy, beta=0.0), 1),
    "gspo": (functools.partial(policy, importance_sampling_level="sequence", loss_type="grpo"), 2),
    "tokens": (tokens, 1), "log-probabilities": (log_probabilities, 2),
}  # fmt: skip


def case(device="cpu", dtype=torch.float32, features=FEATURES, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, features, generator=generator).to(device, dtype) / 4 for n in (8, vocabulary))
    return x, weight, torch.randint(vocabulary, (8,), generator=generator).to(device)


@pytest.mark.parametrize("name", [*LOSSES, *SEQUENCES])
def test_counted_rows(name, engine, device, monkeypatch):
    x, weight, labels = case(device, features=16, vocabulary=37)
    labels[[0, 3, 4]] = -100
    loss, models = SEQUENCES.get(name) or (LOSSES[name], 2 if name in ("teacher", "tvd") else 1)
    rows, write_logits = [], chunked_head.write_logits
    monkeypatch.setattr(
        chunked_head, "write_logits", lambda logits, *head: rows.append(len(logits)) or write_logits(logits, *head)
    )

    def run(**options):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        rows.clear()
        value, *logged = output if isinstance(output := loss(*inputs, labels, **options), tuple) else (output,)
        grads = torch.autograd.grad(value, inputs)
        return *(row.detach() for row in (value, *logged) if row is not None), *grads

    expected = run()
    for bound in (5, 6, 40):
        for found, wanted in zip(run(counted_rows=bound), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
        assert sum(rows) == models * min(bound, 16 if name == "multi-token" else 8)
    if device == "cpu":
        with pytest.raises(ValueError, match=r"counted_rows: got 4, allowed: at least the 5 rows"):
            run(counted_rows=4)
    else:
        assert run(counted_rows=4)[0].isnan()
    with pytest.raises(ValueError, match=r"counted_rows: got -1, allowed: None or a number of rows"):
        run(counted_rows=-1)
    labels[:] = -100
    for found, wanted in zip(run(counted_rows=0), run(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.skipif(interpreting(), reason="the same there")
def test_options_that_a_loss_lacks():
    """The error says which call has them."""
    inputs = case()
    for loss in [*LOSSES.values(), *(loss for loss, _ in SEQUENCES.values())]:
        with pytest.raises((TypeError, ValueError), match="token_weights'; cross entropy alone weighs tokens"):
            loss(*inputs, token_weights=torch.ones(8))
    for option, advice in {"counted_rows": "the rows that count", "softcap": "itself", "logit_scale": "itself"}.items():
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'; .*{advice}$"):
            logits_loss(torch.sum, *inputs[:2], **{option: 3})


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

    # torch.logaddexp of a jsd rounds the last values of a tensor otherwise than the rest, by AVX2 and by AVX-512
    rounds_by_place = name == "teacher" and (way == "reference" or x.device.type == "cpu")
    rounding = {"rtol": 1e-5, "atol": 1e-7} if rounds_by_place else {"rtol": 0, "atol": 0}
    with use_backend(way):
        whole = gradient(torch.arange(8))
        for rows in ([7], [5, 2], [6, 7, 1, 0]):
            torch.testing.assert_close(gradient(torch.tensor(rows)), whole[rows], **rounding)


@pytest.mark.skipif(interpreting(), reason="the same there")
@pytest.mark.parametrize("name", LOSSES)
def test_fp16_gradients_have_a_factor_of_the_whole_batch(name):
    x, weight, labels = case(dtype=torch.float16)
    with pytest.raises(ValueError, match=r"invariant: got True, allowed: False for gradients in fp16"):
        LOSSES[name](x.requires_grad_(), weight, labels, invariant=True)
    LOSSES[name](x, weight, labels, invariant=True, logits_dtype=torch.float32).backward()
