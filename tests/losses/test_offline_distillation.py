"""Distillation from stored probabilities, against all logits; of a top-k the other tokens are one class."""

import pytest
import torch
import torch.nn.functional as F
from naive import hold

from liger_hw.losses.offline_distillation import offline_distillation_loss
from liger_hw.testing.inputs import randn, targets
from liger_hw.transformers.functional import liger_fused_linear_kl_div

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
CLASSES = 37


def case(rows=9, classes=CLASSES, k=None, device="cpu"):
    """The student's hidden states, weight and bias; the teacher's logits; the tokens of its top-k; labels."""
    torch.manual_seed(0)
    student = [randn(*s, device=device) for s in ((rows, 8), (classes, 8), (classes,))]
    teacher = 2 * randn(rows, classes, device=device, grad=False)
    tokens = None if k is None else teacher.topk(k).indices
    return student, teacher, tokens, targets(rows, classes, device)


def supported(dtype, engine):
    if dtype == torch.float64 and engine == "kernels":
        pytest.skip("the kernels take no float64")


def mean_of(soft, labels):
    keep = labels != -100
    return (soft.masked_fill(~keep, 0)).sum() / keep.sum().clamp(min=1)


def divergence(p, log_q, soft_loss, beta):
    """Compute a row's divergence as its papers write it."""

    def kl(p, log_q):
        return (torch.special.xlogy(p, p) - p * log_q).sum(1)

    if soft_loss == "tvd":
        return (p - log_q.exp()).abs().sum(1) / 2
    beta = {"kl": 0, "reverse_kl": 1}.get(soft_loss, beta)
    if beta == 0:
        return kl(p, log_q)
    q, least = log_q.exp(), 1e-7 if beta == 1 else 0
    m = (beta * p + (1 - beta) * q).clamp(min=least)
    return beta * kl(p, m.log()) * (beta < 1) + (1 if beta == 1 else 1 - beta) * (q * (log_q - m.log())).sum(1)


def whole(
    labels, tokens=None, rest=True, temperature=1.0, softcap=None, logit_scale=1.0, soft_loss="kl", beta=0.5
):  # fmt: skip
    """Compute the loss from all logits, merging the rest of the vocabulary into one class."""

    def function(x, w, b, log_p):
        wide = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x, w, b).to(wide) * logit_scale
        logits = softcap * torch.tanh(logits / softcap) if softcap else logits
        log_q, p = (logits / temperature).log_softmax(-1), log_p.to(wide).exp()
        if tokens is not None:
            others = torch.ones_like(log_q, dtype=torch.bool).scatter(1, tokens.long(), False)
            log_rest = log_q.masked_fill(~others, -float("inf")).logsumexp(1, keepdim=True)
            log_q = log_q.gather(1, tokens.long())
            if rest and tokens.shape[1] < len(w):
                log_q, p = torch.cat((log_q, log_rest), 1), torch.cat((p, (1 - p.sum(1, keepdim=True)).clamp(min=0)), 1)
        return (mean_of(divergence(p, log_q, soft_loss, beta), labels),)

    return function


def fused(labels, memory, tokens=None, rest=True, temperature=1.0, **head):
    def function(x, w, b, log_p):
        return (
            offline_distillation_loss(
                x, w, log_p, tokens, None, labels, b, rest, temperature, chunk_memory=memory, **head
            ),
        )  # fmt: skip

    return function


@pytest.mark.parametrize("memory", [1, 3000, 10**6])
@pytest.mark.parametrize("k, rest", [(None, True), (1, True), (5, True), (5, False), (CLASSES, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_change_nothing(k, rest, memory, dtype, engine, device):
    supported(dtype, engine)
    student, teacher, tokens, labels = case(k=k, device=device)
    student[2] = None if memory == 1 else student[2]
    options = {"tokens": tokens, "rest": rest, "temperature": 2.0 if memory == 1 else 1.0}
    log_p = (teacher / options["temperature"]).log_softmax(1)
    log_p = log_p if k is None else log_p.gather(1, tokens)
    inputs = (*student, log_p)
    hold(whole(labels, **options), fused(labels, memory, **options), inputs, dtype, f"k={k}")


OTHERS = [
    {"soft_loss": "reverse_kl"}, {"soft_loss": "jsd"}, {"soft_loss": "jsd", "beta": 0.2}, {"soft_loss": "tvd"},
    {"soft_loss": "tvd", "rest": False},
]  # fmt: skip


@pytest.mark.parametrize("options", OTHERS, ids=lambda options: " ".join(map(str, options.values())))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_divergences_of_a_top_k(options, dtype, engine, device):
    supported(dtype, engine)
    student, teacher, tokens, labels = case(k=5, device=device)
    inputs, options = (*student, (teacher / 2).log_softmax(1).gather(1, tokens)), options | {"temperature": 2.0}
    for memory, head in ((1, {}), (10**6, {"softcap": 3.0, "logit_scale": 1.5})):
        more = options | head
        hold(whole(labels, tokens, **more), fused(labels, memory, tokens, **more), inputs, dtype, str(options))


@pytest.mark.parametrize("soft_loss", ["reverse_kl", "jsd", "tvd"])
def test_other_divergences_of_fp16(soft_loss, engine, device):
    student, teacher, tokens, labels = case(k=5, device=device)
    inputs = (*student, 3 * teacher.log_softmax(1).gather(1, tokens))
    options = {"soft_loss": soft_loss}
    hold(whole(labels, tokens, **options), fused(labels, 1, tokens, **options), inputs, torch.float16, soft_loss)


@pytest.mark.parametrize("soft_loss", ["reverse_kl", "jsd", "tvd"])
def test_other_divergences_are_0_of_equals_and_at_most_those_of_all_tokens(soft_loss, engine, device):
    (x, w, _), teacher, _, _ = case(device=device)
    own, log_p = F.linear(x, w).detach().log_softmax(1), teacher.log_softmax(1)
    of_all = divergence(log_p.exp(), own, soft_loss, 0.5).mean()
    losses = [offline_distillation_loss(x, w, *log_p.topk(k), soft_loss=soft_loss).item() for k in (1, 4, 16, 36)]
    assert 0 < losses[0] and losses == sorted(losses) and losses[-1] <= of_all * (1 + 1e-5)
    loss = offline_distillation_loss(x, w, *own.topk(4), soft_loss=soft_loss)
    loss.backward()
    assert abs(loss.item()) < 1e-6 and (soft_loss == "tvd" or x.grad.abs().max() < 1e-5)


@pytest.mark.parametrize("head", [{"softcap": 3.0, "logit_scale": 1.5}, {"logit_scale": 0.5}], ids=str)
@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_with_a_softcap_or_a_scale(k, head, dtype, engine, device):
    student, teacher, tokens, labels = case(k=k, device=device)
    log_p = teacher.log_softmax(1) if k is None else teacher.log_softmax(1).gather(1, tokens)
    for memory in (1, 10**6):
        expected, found = whole(labels, tokens, **head), fused(labels, memory, tokens, **head)
        hold(expected, found, (*student, log_p), dtype, f"k={k}")


@pytest.mark.parametrize("classes", [9, 128, 130, 5000])
@pytest.mark.parametrize("k", [None, 8])
def test_widths(classes, k, engine, device):
    student, teacher, tokens, labels = case(4, classes, k, device)
    log_p = teacher.log_softmax(1)
    inputs = (*student, log_p if k is None else log_p.gather(1, tokens))
    hold(whole(labels, tokens), fused(labels, 10**6, tokens), inputs, torch.float32)


def test_a_top_k_of_everything_is_everything(engine, device):
    student, teacher, tokens, labels = case(k=CLASSES, device=device)
    log_p = teacher.log_softmax(1)
    of_all = offline_distillation_loss(*student[:2], log_p, labels=labels)
    of_top = offline_distillation_loss(*student[:2], log_p.gather(1, tokens), tokens, labels=labels)
    torch.testing.assert_close(of_top, of_all)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("tokens_dtype", [torch.int64, torch.int32], ids=str)
def test_logits_of_a_top_k(temperature, tokens_dtype, engine, device):
    """Logits with the log-sum-exp of all are the log-probabilities of the same tokens."""
    student, teacher, tokens, labels = case(k=5, device=device)
    lse, log_p = (teacher / temperature).logsumexp(1), (teacher / temperature).log_softmax(1)
    found = offline_distillation_loss(
        *student[:2], teacher.gather(1, tokens), tokens.to(tokens_dtype), lse, labels, temperature=temperature
    )
    expected = offline_distillation_loss(
        *student[:2], log_p.gather(1, tokens), tokens, labels=labels, temperature=temperature
    )
    torch.testing.assert_close(found, expected)


def test_merging_tokens_loses_divergence(engine, device):
    """The data-processing inequality: fewer classes, a smaller divergence; of equal models it is 0 everywhere."""
    student, teacher, _, _ = case(device=device)
    losses = []
    for k in (1, 4, 16, CLASSES):
        values, tokens = teacher.log_softmax(1).topk(k)
        losses.append(offline_distillation_loss(*student[:2], values, tokens).item())
    assert losses == sorted(losses) and losses[0] > 0
    own = F.linear(*student[:2]).detach().log_softmax(1)
    for k in (1, 4, 16, CLASSES):
        x, w = (t.detach().requires_grad_() for t in student[:2])
        loss = offline_distillation_loss(x, w, *own.topk(k))
        loss.backward()
        assert abs(loss.item()) < 1e-6 and x.grad.abs().max() < 1e-6 and w.grad.abs().max() < 1e-6


@pytest.mark.parametrize("k", [None, 3])
def test_a_student_that_knows_the_stored_tokens(k, engine, device):
    """1 - sum q would be a rounding error of 1: the loss and its gradient by the rest are those of float64."""
    x = torch.eye(4, device=device)[:2].requires_grad_()
    w = torch.zeros(40, 4, device=device)
    w[:3, :2] = torch.tensor([[20.0, 21.0], [19.0, 18.5], [18.0, 20.0]])
    w[3:] = torch.linspace(0, 2, 37, device=device)[:, None]
    w.requires_grad_()
    p = torch.full((2, 40), 0.1 / 37, device=device)
    p[:, :3] = 0.3
    tokens = None if k is None else torch.arange(3, device=device).expand(2, 3)
    labels = torch.zeros(2, dtype=torch.int64, device=device)
    inputs = (x, w, None, p.log()[:, :k])
    hold(whole(labels, tokens), fused(labels, 10**6, tokens), inputs, torch.float32)


@pytest.mark.parametrize("k", [None, 5])
def test_rows_that_do_not_count_may_hold_anything(k, engine, device):
    student, teacher, tokens, labels = case(k=k, device=device)
    log_p = teacher.log_softmax(1) if k is None else teacher.log_softmax(1).gather(1, tokens)
    labels[3] = -100
    clean = fused(labels, 10**6, tokens)(*student, log_p)[0]
    expected = torch.autograd.grad(clean, student)
    with torch.no_grad():
        log_p[3] = float("nan")
        x = student[0].detach().clone()
        x[3] = float("inf")
    if k is not None:
        tokens[3] = 10**6
    x.requires_grad_()
    found = fused(labels, 10**6, tokens)(x, *student[1:], log_p)[0]
    gradients = torch.autograd.grad(found, (x, *student[1:]))
    torch.testing.assert_close(found, clean)
    assert (gradients[0][3] == 0).all()
    torch.testing.assert_close(gradients[0], expected[0])
    nothing = fused(torch.full_like(labels, -100), 10**6, tokens)(*student, log_p)[0]
    assert nothing == 0 and not any(g.any() for g in torch.autograd.grad(nothing, student))


def test_probabilities_of_0(engine, device):
    student, teacher, tokens, labels = case(k=5, device=device)
    teacher[:, 2] = -float("inf")
    tokens = torch.cat((tokens[:, :3].clone(), torch.full_like(tokens[:, :1], 2)), 1)
    tokens[:, :3] = teacher.topk(3).indices
    for of in (None, tokens):
        log_p = teacher.log_softmax(1) if of is None else teacher.log_softmax(1).gather(1, tokens)
        hold(whole(labels, of), fused(labels, 10**6, of), (*student, log_p), torch.float32)


@pytest.mark.parametrize("reduction", ["batchmean", "mean", "sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_kl_div_of_probabilities(reduction, dtype, engine, device):
    """Rows need not add up to 1, and eps bounds the logarithm alone."""
    supported(dtype, engine)
    student, teacher, _, labels = case(classes=130, device=device)
    target = teacher.softmax(1) * torch.linspace(0.5, 1.5, 9, device=device)[:, None]
    target[:, :3] = 0
    eps, temperature = 1e-3, 1.7

    def plain(x, w, target):
        wide = torch.promote_types(x.dtype, torch.float32)
        log_q, p = (F.linear(x, w).to(wide) / temperature).log_softmax(-1), target.to(wide)
        loss = (p * (p.clamp(min=eps).log() - log_q)).sum(1)[labels != -100].sum()
        rows = (labels != -100).sum()
        return (loss / {"batchmean": rows, "mean": rows * 130, "sum": 1}[reduction],)

    def ours(x, w, target):
        return (liger_fused_linear_kl_div(x, w, target, labels, reduction, temperature=temperature, eps=eps),)

    hold(plain, ours, (*student[:2], target), dtype, reduction)


def test_the_teacher_gets_no_gradient_and_a_second_backward_is_an_error(engine, device):
    student, teacher, tokens, labels = case(k=5, device=device)
    log_p = teacher.log_softmax(1).gather(1, tokens).requires_grad_()
    loss = offline_distillation_loss(*student[:2], log_p, tokens)
    loss.backward(retain_graph=True)
    assert log_p.grad is None and student[0].grad is not None
    with pytest.raises(RuntimeError, match="offline_distillation_loss .*second"):
        loss.backward()


def test_a_token_outside_on_an_accelerator(device, engine, monkeypatch):
    """No check makes the host wait: the loss and the gradients of such a row are NaN, and nothing is read outside."""
    from liger_hw.losses import offline_distillation

    monkeypatch.setattr(offline_distillation, "check_top_k", lambda *arguments: None)
    (x, w, _), teacher, tokens, labels = case(k=5, device=device)
    tokens[0, 1] = 10**9
    loss = offline_distillation_loss(x, w, teacher.log_softmax(1)[:, :5], tokens, labels=labels)
    loss.backward()
    assert loss.isnan() and x.grad[0].isnan().all() and x.grad[1:].isfinite().all()


@pytest.mark.parametrize(
    "argument, change",
    [
        ("teacher:", {"teacher": torch.zeros(9, 36)}),
        ("teacher:", {"teacher": torch.zeros(9, 5, dtype=torch.int64)}),
        ("teacher_tokens", {"teacher_tokens": torch.zeros(9, 5)}),
        ("teacher_tokens", {"teacher_tokens": torch.zeros(9, 5, dtype=torch.int64)}),
        ("teacher_tokens", {"teacher_tokens": torch.full((9, 5), 37)}),
        ("teacher_tokens", {"teacher_tokens": torch.arange(5)}),
        ("teacher_lse", {"teacher_lse": torch.zeros(8)}),
        ("teacher_lse", {"teacher_lse": torch.zeros(12), "counted_rows": 9}),
        ("teacher_lse", {"teacher_tokens": None, "teacher": torch.zeros(9, 37), "teacher_lse": torch.zeros(9)}),
        ("labels", {"labels": torch.zeros(8, dtype=torch.int64)}),
        ("temperature", {"temperature": 0.0}),
        ("chunk_memory", {"chunk_memory": 0}),
        ("bias", {"bias": torch.zeros(36)}),
        ("accum_dtype", {"accum_dtype": torch.bfloat16}),
        ("unknown soft_loss", {"soft_loss": "cosine"}),
        ("beta", {"soft_loss": "jsd", "beta": 1.5}),
        ("rest", {"soft_loss": "jsd", "rest": False}),
        ("soft_loss", {"soft_loss": "jsd", "teacher_tokens": None, "teacher": torch.zeros(9, 37)}),
    ],
)
def test_bad_input(argument, change):
    student, teacher, tokens, labels = case(k=5)
    good = {"x": student[0], "weight": student[1], "teacher": teacher[:, :5], "teacher_tokens": tokens}
    with pytest.raises(ValueError, match=f"^{argument}"):
        offline_distillation_loss(**(good | {"labels": labels} | change))


def test_leading_dimensions(engine, device):
    student, teacher, tokens, labels = case(k=5, device=device)
    x, rows = student[0], (teacher[:, :5], tokens, None, labels)
    expected = offline_distillation_loss(x, student[1], *rows)
    found = offline_distillation_loss(
        x.view(3, 3, -1), student[1], *(row if row is None else row.view(3, 3, *row.shape[1:]) for row in rows)
    )
    assert torch.equal(found, expected)
