import math

import pytest
import torch
import torch.nn.functional as F
from naive import hold

from liger_hw.losses.distillation import SOFT_LOSSES, distillation_loss
from liger_hw.testing.inputs import randn, targets

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def case(rows=9, classes=37, teacher_classes=37, device="cpu"):
    """The student's hidden states, weight and bias, and the teacher's, of another size; labels."""
    torch.manual_seed(0)
    student = [randn(*s, device=device) for s in ((rows, 8), (classes, 8), (classes,))]
    shapes = (rows, 12), (teacher_classes, 12), (teacher_classes,)
    return student, [randn(*s, device=device, grad=False) for s in shapes], targets(rows, classes, device)


def supported(dtype, engine):
    if dtype == torch.float64 and engine == "kernels":
        pytest.skip("the kernels take no float64")


def capped(logits, softcap, logit_scale):
    logits = logits * logit_scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def whole(labels, soft_loss, beta=0.3, temperature=1.0, weights=(0.5, 0.5), heads=((None, 1.0), (None, 1.0))):
    """Compute each loss from all logits: loss, soft and hard part."""

    def function(x, w, b, *teacher):
        s, t = F.linear(x, w, b), F.linear(*teacher)
        s, t = (z.to(torch.promote_types(z.dtype, torch.float32)) for z in (s, t))
        s, t = (capped(z, *head) for z, head in zip((s, t), heads))
        keep = labels != -100
        count = keep.sum().clamp(min=1)
        hard = F.cross_entropy(s, labels, reduction="sum", ignore_index=-100) / count
        width = max(s.shape[1], t.shape[1])
        s, t = (F.pad(z, (0, width - z.shape[1])) / temperature for z in (s, t))
        log_q, log_p = s.log_softmax(-1), t.log_softmax(-1)
        q, p = log_q.exp(), log_p.exp()
        m = beta * p + (1 - beta) * q
        rows = {
            "kl": lambda: p * (log_p - log_q),
            "reverse_kl": lambda: q * (log_q - log_p),
            "jsd": lambda: beta * p * (log_p - m.log()) + (1 - beta) * q * (log_q - m.log()),
            "tvd": lambda: (p - q).abs() / 2,
            "cosine": lambda: (1 - (s * t).sum(-1) / s.norm(dim=-1) / t.norm(dim=-1))[:, None],
        }
        shares = soft_loss if isinstance(soft_loss, dict) else {soft_loss: 1.0}
        soft = sum((rows[name]().sum(-1) * keep).sum() / count * share for name, share in shares.items())
        return weights[0] * hard + weights[1] * soft, soft, hard

    return function


def fused(labels, soft_loss, memory, beta=0.3, temperature=1.0, weights=(0.5, 0.5), heads=((None, 1.0), (None, 1.0))):
    def function(x, w, b, teacher_x, teacher_w, teacher_b):
        return distillation_loss(
            x, w, teacher_x, teacher_w, labels, b, teacher_b, soft_loss, beta, temperature, *weights,
            chunk_memory=memory, softcap=heads[0][0], logit_scale=heads[0][1], teacher_softcap=heads[1][0],
            teacher_logit_scale=heads[1][1],
        )  # fmt: skip

    return function


@pytest.mark.parametrize("memory", [1, 3000, 10**6])
@pytest.mark.parametrize("soft_loss", SOFT_LOSSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_change_nothing(soft_loss, memory, dtype, engine, device):
    supported(dtype, engine)
    student, teacher, labels = case(device=device)
    biases = memory != 1
    inputs = (*student[:2], student[2] if biases else None, *teacher[:2], teacher[2] if biases else None)
    options = {"temperature": 1.0 if biases else 2.0, "weights": (0.3, 0.9)}
    hold(whole(labels, soft_loss, **options), fused(labels, soft_loss, memory, **options), inputs, dtype, soft_loss)


SEVERAL = [{"kl": 1.0, "tvd": 0.5}, {"cosine": 0.25, "reverse_kl": 0.0, "jsd": 2.0}]


@pytest.mark.parametrize("heads", [((None, 1.0), (None, 1.0)), ((3.0, 0.5), (None, 1.0))], ids=str)
@pytest.mark.parametrize("soft_loss", SEVERAL, ids=lambda shares: " ".join(shares))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_soft_losses_are_added(soft_loss, heads, dtype, engine, device):
    supported(dtype, engine)
    student, teacher, labels = case(device=device, teacher_classes=40)
    labels[3] = -100
    options = {"temperature": 1.5, "weights": (0.3, 0.9), "heads": heads}
    for memory in (1, 10**6):
        expected, found = whole(labels, soft_loss, **options), fused(labels, soft_loss, memory, **options)
        hold(expected, found, (*student, *teacher), dtype)


@pytest.mark.parametrize("memory", [3000, 10**6])
def test_losses_of_draft_models(memory, engine, device):
    """EAGLE-3's soft cross entropy with TVD over two steps, in float64, by gradients; and the log of the acceptance."""
    student, teacher, labels = case(teacher_classes=50, device=device)
    kept, labels = torch.arange(49, 12, -1, device=device), torch.where(labels % 3 == 0, -100, 0)
    exact = [t.detach().double().requires_grad_() for t in student]
    p = F.linear(teacher[0].double(), teacher[1].double()[kept]).softmax(-1)
    tvds, expected, found = [], 0, 0
    for step in (0, 1):
        log_q, keep = F.linear(exact[0][: 9 - step], *exact[1:]).log_softmax(-1), (labels != -100)[step:]
        tvds.append((log_q.exp() - p[step:]).abs().sum(-1)[keep].mean() / 2)
        expected += 0.8**step * (0.5 * tvds[-1] - (p[step:] * log_q).sum(-1)[keep].mean())
        rows = student[0][: 9 - step], student[1], teacher[0][step:], teacher[1][kept], labels[step:], student[2]
        options = {"hard_weight": 0.0, "soft_weight": 1.0, "chunk_memory": memory}
        found += 0.8**step * distillation_loss(*rows, soft_loss={"kl": 1.0, "tvd": 0.5}, **options).loss
    acceptance = -torch.log(1 - distillation_loss(*rows, soft_loss="tvd", **options).loss)
    torch.testing.assert_close(acceptance, -torch.log(1 - tvds[1]).float())
    for value, right in ((found, expected), (acceptance, -torch.log(1 - tvds[1]))):
        grads = torch.autograd.grad(right, exact, retain_graph=True)
        for grad, wanted in zip(torch.autograd.grad(value, student), grads):
            torch.testing.assert_close(grad, wanted.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("heads", [((3.0, 0.5), (2.0, 1.0)), ((None, 1.5), (None, 1.0)), ((4.0, 1.0), (None, 1.0))])
@pytest.mark.parametrize("soft_loss", ["jsd", "kl", "cosine"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_with_a_softcap_or_a_scale(soft_loss, heads, dtype, engine, device):
    supported(dtype, engine)
    student, teacher, labels = case(device=device)
    for memory in (1, 10**6):
        expected, found = whole(labels, soft_loss, heads=heads), fused(labels, soft_loss, memory, heads=heads)
        hold(expected, found, (*student, *teacher), dtype, soft_loss)


@pytest.mark.parametrize("classes", [12, 50])
@pytest.mark.parametrize("soft_loss", ["jsd", "cosine"])
def test_a_teacher_of_wider_logits(soft_loss, classes, engine, device):
    """A softcap's are fp32, whose rows end earlier than the student's of 16 bits."""
    supported(torch.float16, engine)
    student, teacher, labels = case(4, classes, classes, device)
    heads = (None, 1.0), (4.0, 1.0)
    expected, found = whole(labels, soft_loss, heads=heads), fused(labels, soft_loss, 10**6, heads=heads)
    hold(expected, found, (*student, *teacher), torch.float16, soft_loss)


def test_a_bad_row_that_is_ignored_spoils_no_gradient_under_a_softcap(engine, device):
    (x, w, b), (teacher_x, teacher_w, teacher_b), labels = case(device=device)
    labels[2] = -100
    with torch.no_grad():
        x[2] = float("nan")
    output = distillation_loss(x, w, teacher_x, teacher_w, labels, b, teacher_b, softcap=3.0)
    assert all(grad.isfinite().all() for grad in (output.loss, torch.autograd.grad(output.loss, x)[0]))


@pytest.mark.parametrize("classes, teacher_classes", [(37, 40), (40, 37), (130, 128), (4096, 4104), (8192, 4096)])
@pytest.mark.parametrize("soft_loss", SOFT_LOSSES)
def test_vocabularies_of_different_size(soft_loss, classes, teacher_classes, engine, device):
    student, teacher, labels = case(4, classes, teacher_classes, device)
    hold(whole(labels, soft_loss), fused(labels, soft_loss, 10**6), (*student, *teacher), torch.float32)


@pytest.mark.parametrize("beta, soft_loss", [(0.0, "kl"), (1.0, "reverse_kl")])
def test_ends_of_jsd(beta, soft_loss, engine, device):
    student, teacher, labels = case(device=device)
    alone = fused(labels, soft_loss, 10**6)(*student, *teacher)
    for equal, count in (("jsd", 1), ({"jsd": 1.0, soft_loss: 1.0}, 2)):
        found = fused(labels, equal, 10**6, beta)(*student, *teacher)
        torch.testing.assert_close(found.soft, count * alone.soft)


def test_without_labels(engine, device):
    student, teacher, _ = case(device=device)
    found = distillation_loss(*student[:2], *teacher[:2])
    everyone = torch.zeros(9, dtype=torch.int64, device=device)
    torch.testing.assert_close(
        found.soft, fused(everyone, "jsd", 10**6, 0.5)(*student[:2], None, *teacher[:2], None).soft
    )
    assert found.hard == 0


@pytest.mark.parametrize("soft_loss", SOFT_LOSSES)
def test_nothing_to_learn_from_and_extreme_logits(soft_loss, engine, device):
    student, teacher, labels = case(device=device)
    found = fused(torch.full_like(labels, -100), soft_loss, 10**6)(*student, *teacher)
    found.loss.backward()
    assert found.loss == 0 and all(t.grad.abs().sum() == 0 for t in student)
    x = torch.tensor([[1e4], [-1e4]], device=device, requires_grad=True)
    w = torch.tensor([[1.0], [-1.0], [0.3]], device=device)
    found = distillation_loss(x, w, x.detach(), -w, torch.tensor([0, 1], device=device), soft_loss=soft_loss)
    found.loss.backward()
    # opposite certainties: both KLs are the difference of the logits, the mixture's share of each is a half
    right = {"kl": 2e4, "reverse_kl": 2e4, "tvd": 1.0, "jsd": math.log(2), "cosine": 2.0}[soft_loss]
    torch.testing.assert_close(found.soft, torch.tensor(right, device=device))
    assert found.hard == 0 and found.loss.isfinite() and x.grad.isfinite().all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("soft_loss", SOFT_LOSSES)
def test_plain_torch_takes_logits_near_the_largest_number(soft_loss, temperature):
    torch.manual_seed(0)
    logits, equal = torch.randn(11), torch.full((11,), 3e38)
    peak, two, scaled = logits.clone(), logits.clone(), logits * 1e37
    peak[2] = two[2] = 3e38
    two[3] = 2.9e38
    rows = torch.stack([logits, equal, -equal, peak, two, scaled, logits * 1e20])
    largest = torch.finfo(torch.float32).max

    def loss(student, teacher, dtype):
        z, head = student[None].to(dtype).requires_grad_(), torch.eye(11, dtype=dtype)
        options = {"soft_loss": soft_loss, "temperature": temperature}
        found = distillation_loss(z, head, teacher[None].to(dtype), head, **options)
        return found.loss.detach(), torch.autograd.grad(found.loss, z)[0]

    for student in rows:
        for teacher in rows:
            right, right_grad = loss(student, teacher, torch.float64)
            if right.abs() < largest / 8:  # nor do its parts overflow
                value, grad = loss(student, teacher, torch.float32)
                torch.testing.assert_close(value.double(), right, rtol=1e-4, atol=1e-5)
                if soft_loss not in ("kl", "reverse_kl"):  # whose gradients cancel
                    torch.testing.assert_close(grad.double(), right_grad, rtol=1e-4, atol=1e-5)


def test_only_the_student_gets_gradients_and_once(engine, device):
    student, teacher, labels = case(device=device)
    teacher = [t.requires_grad_() for t in teacher]
    found = fused(labels, "jsd", 10**6)(student[0], student[1].detach(), student[2], *teacher)
    found.loss.backward(retain_graph=True)
    assert all(t.grad is None for t in teacher) and student[0].grad is not None and not found.soft.requires_grad
    with pytest.raises(RuntimeError, match="second"):
        found.loss.backward()


@pytest.mark.parametrize(
    "argument, change",
    [
        ("teacher_x", {"teacher_x": torch.zeros(8, 12)}),
        ("teacher_weight", {"teacher_weight": torch.zeros(37, 11)}),
        ("bias", {"bias": torch.zeros(36)}),
        ("labels", {"labels": torch.zeros(8, dtype=torch.int64)}),
        ("unknown soft_loss", {"soft_loss": "mse"}),
        ("unknown soft_loss", {"soft_loss": {"kl": 1.0, "mse": 1.0}}),
        ("soft_loss: got {}", {"soft_loss": {}}),
        ("unknown soft_loss", {"soft_loss": ["kl", "tvd"]}),
        (r"soft_loss\['kl'\]", {"soft_loss": {"kl": -1.0}}),
        ("beta", {"beta": 1.5}),
        ("temperature", {"temperature": 0.0}),
        ("chunk_memory", {"chunk_memory": 0}),
        ("labels", {"labels": torch.full((9,), 37)}),
        ("labels", {"labels": torch.zeros(9)}),
        ("teacher_x", {"teacher_x": None}),
        ("hard_weight", {"hard_weight": float("nan")}),
        ("soft_weight", {"soft_weight": -1.0}),
    ],
)
def test_bad_input(argument, change):
    student, teacher, labels = case()
    good = {"x": student[0], "weight": student[1], "teacher_x": teacher[0], "teacher_weight": teacher[1]}
    with pytest.raises(ValueError, match=f"^{argument}"):
        distillation_loss(**(good | {"labels": labels} | change))


@pytest.mark.parametrize("flat_labels", [False, True])
def test_leading_dimensions(flat_labels, engine, device):
    """Hidden states (B, T, H) give the loss and the gradients of their flat rows, bitwise."""
    student, teacher, labels = case(device=device)
    results = []
    for shape in ((9,), (3, 3)):
        leaves = [t.detach().requires_grad_() for t in student]
        x, given = leaves[0].view(*shape, -1), labels if flat_labels else labels.view(shape)
        output = distillation_loss(x, leaves[1], teacher[0].view(*shape, -1), teacher[1], given)
        output.loss.backward()
        results.append([*output, leaves[0].grad, leaves[1].grad])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    with pytest.raises(ValueError, match="^teacher_x: .*leading dimensions"):
        distillation_loss(student[0].view(3, 3, -1), student[1], teacher[0][:3], teacher[1])
