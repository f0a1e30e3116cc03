import math

import pytest
import torch
import torch.nn.functional as F
from naive import hold, leaves, token_log_probs
from old_torch import traces_whole_losses

from liger_hw import PreferenceLoss, use_backend
from liger_hw.losses.preference import preference_loss, unpaired_preference_loss
from liger_hw.losses.preference_formulas import PAIR_LOSSES, UNPAIRED_LOSSES, Pairs, pair_loss
from liger_hw.testing.inputs import randn

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def log_sigmoid(x):
    return F.logsigmoid(x)


# Each published loss, from log-probabilities of policy (c, r) and reference (C, R).
PUBLISHED = {
    "sigmoid": lambda c, r, C, R, b, e: (
        -(1 - e) * log_sigmoid(b * ((c - C) - (r - R))) - e * log_sigmoid(-b * ((c - C) - (r - R)))
    ),
    "simpo": lambda c, r, C, R, b, e: -(1 - e) * log_sigmoid(b * (c - r) - 0.5) - e * log_sigmoid(0.5 - b * (c - r)),
    "robust": lambda c, r, C, R, b, e: (
        (-(1 - e) * log_sigmoid(b * ((c - C) - (r - R))) + e * log_sigmoid(-b * ((c - C) - (r - R)))) / (1 - 2 * e)
    ),
    "hinge": lambda c, r, C, R, b, e: (1 - b * ((c - C) - (r - R))).clamp(min=0),
    "ipo": lambda c, r, C, R, b, e: ((c - r) - (C - R) - 0.5 / b).square(),
    "exo_pair": lambda c, r, C, R, b, e: (
        torch.sigmoid(b * ((c - C) - (r - R))) * (log_sigmoid(b * ((c - C) - (r - R))) - math.log(1 - e))
        + torch.sigmoid(-b * ((c - C) - (r - R))) * (log_sigmoid(-b * ((c - C) - (r - R))) - math.log(e))
    ),
    "nca_pair": lambda c, r, C, R, b, e: (
        -log_sigmoid(b * (c - C)) - 0.5 * log_sigmoid(-b * (c - C)) - 0.5 * log_sigmoid(-b * (r - R))
    ),
    "bco_pair": lambda c, r, C, R, b, e: (
        -log_sigmoid(b * (c - C) - (b * (c - C + r - R) / 2).mean().detach())
        - log_sigmoid((b * (c - C + r - R) / 2).mean().detach() - b * (r - R))
    ),
    "sppo_hard": lambda c, r, C, R, b, e: (c - C - 0.5 / b).square() + (r - R + 0.5 / b).square(),
    "apo_zero": lambda c, r, C, R, b, e: 1 - torch.sigmoid(b * (c - C)) + torch.sigmoid(b * (r - R)),
    "apo_down": lambda c, r, C, R, b, e: torch.sigmoid(b * (c - C)) + 1 - torch.sigmoid(b * ((c - C) - (r - R))),
    "discopop": lambda c, r, C, R, b, e: (
        -log_sigmoid(b * ((c - C) - (r - R))) * (1 - torch.sigmoid(b * ((c - C) - (r - R)) / 0.05))
        + torch.exp(-b * ((c - C) - (r - R))) * torch.sigmoid(b * ((c - C) - (r - R)) / 0.05)
    ),
    "aot": lambda c, r, C, R, b, e: (
        -(1 - e) * log_sigmoid(b * (torch.sort(c - r)[0] - torch.sort(C - R)[0]))
        - e * log_sigmoid(-b * (torch.sort(c - r)[0] - torch.sort(C - R)[0]))
    ),
    "aot_pair": lambda c, r, C, R, b, e: (
        -(1 - e) * log_sigmoid(b * (torch.sort(c - C)[0] - torch.sort(r - R)[0]))
        - e * log_sigmoid(-b * (torch.sort(c - C)[0] - torch.sort(r - R)[0]))
    ),
    "orpo": lambda c, r, C, R, b, e: (
        -b * log_sigmoid((c - r) - (torch.log1p(-torch.exp(c)) - torch.log1p(-torch.exp(r))))
    ),
}
NO_REFERENCE = ("simpo", "orpo")
PER_TOKEN = {"sigmoid_norm": "sigmoid", "ipo_norm": "ipo"}  # losses of log-ratios over tokens -> those of sums


def published(loss_type, c, r, C, R, beta, smoothing, lengths=1):
    """The mean of a published loss; lengths: (2, P), by which the losses per token divide."""
    if loss_type in PER_TOKEN:
        lengths = lengths if torch.is_tensor(lengths) else torch.ones(2, 1, device=c.device)
        c, r, C, R = (value / length for value, length in zip((c, r, C, R), (*lengths, *lengths)))
    return PUBLISHED[PER_TOKEN.get(loss_type, loss_type)](c, r, C, R, beta, smoothing).mean()


def case(answers=6, length=5, features=8, classes=31, device="cpu"):
    """Make tensors of a policy and a reference, and answers of 5, 4, ... tokens."""
    torch.manual_seed(0)
    x, w, b = (randn(*s, device=device) for s in ((answers, length, features), (classes, features), (classes,)))
    ref = [randn(*t.shape, device=device, grad=False) for t in (x[..., :6], w[:, :6], b)]
    labels = torch.randint(0, classes, (answers, length), device=device)
    for i in range(answers):
        labels[i, : i % length] = -100
    return (x, w, b), ref, labels


def answers_of(x, w, labels, bias, average):
    total = token_log_probs(x, w, labels, bias)[0].sum(-1)
    return total / (labels != -100).sum(-1).clamp(min=1) if average else total


def smoothing_of(loss_type):
    return 0.1 * PAIR_LOSSES[loss_type].smooths


def whole(loss_type, labels, average, alpha, beta=0.3, smoothing=None):
    """The loss and everything beside it, by all logits at once."""
    smoothing = smoothing_of(loss_type) if smoothing is None else smoothing

    def function(x, w, b, *ref):
        policy = answers_of(x, w, labels, b, average)
        reference = answers_of(ref[0], ref[1], labels, ref[2], average) if ref else torch.zeros_like(policy)
        (c, r), (C, R), half = policy.chunk(2), reference.chunk(2), len(x) // 2
        lengths = 1 if average else (labels != -100).sum(-1).clamp(min=1).reshape(2, -1)
        nll = -token_log_probs(x[:half], w, labels[:half], b)[0].sum() / (labels[:half] != -100).sum().clamp(min=1)
        logits = F.linear(x.double(), w.double(), None if b is None else b.double())
        loss = nll if loss_type == "sft" else published(loss_type, c, r, C, R, beta, smoothing, lengths)
        nll = nll if alpha else nll * 0
        beside = c, r, logits[:half].mean(), logits[half:].mean(), nll, beta * (c - C), beta * (r - R)
        return loss + alpha * nll, *beside

    return function


def fused(loss_type, labels, average, alpha, memory, beta=0.3):
    def function(x, w, b, *ref):
        ref = dict(zip(("ref_x", "ref_weight", "ref_bias"), ref))
        options = {"average_log_prob": average, "chunk_memory": memory, **ref}
        return preference_loss(x, w, labels, b, loss_type, beta, smoothing_of(loss_type), alpha, **options)

    return function


def supported(dtype, engine):
    if dtype == torch.float64 and engine == "kernels":
        pytest.skip("the kernels take no float64")


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairs_are_the_published_formulas(loss_type, dtype, device):
    (x, w, b), ref, labels = case(device=device)
    alone = loss_type in NO_REFERENCE
    for memory, average, alpha in [(10**6, alone, 0.0), (700, True, 1.5)]:
        with use_backend(None):
            inputs = (x, w, b if alpha else None, *(() if alone else ref))
            expected, found = (
                whole(loss_type, labels, average, alpha),
                fused(loss_type, labels, average, alpha, memory),
            )
            hold(expected, found, inputs, dtype, f"{loss_type} {memory}")


@pytest.mark.parametrize("memory", [1, 700, 10**6])
@pytest.mark.parametrize("loss_type", ["sigmoid", "orpo"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_change_nothing(loss_type, memory, dtype, engine, device):
    supported(dtype, engine)
    (x, w, b), ref, labels = case(4, 4, device=device)
    average = loss_type in NO_REFERENCE
    inputs = (x, w, b, *(() if average else ref))
    hold(whole(loss_type, labels, average, 1.0), fused(loss_type, labels, average, 1.0, memory), inputs, dtype)


# Each published loss of one answer, from its log-ratio a, sign y, beta and the reference point p.
PUBLISHED_UNPAIRED = {
    "kto": lambda a, y, b, p: 1 - torch.sigmoid(b * (a - p) * y),
    "bco": lambda a, y, b, p: -log_sigmoid((b * a - p) * y),
    "apo_zero_unpaired": lambda a, y, b, p: torch.where(
        torch.as_tensor(y, device=a.device) > 0, 1 - torch.sigmoid(b * a), torch.sigmoid(b * a)
    ),
}
POINT_OPTIONS = {"kto": "kl", "bco": "delta"}  # name of the option that gives the reference point


def whole_unpaired(loss_type, labels, preferred, beta=0.3, point=0.2):
    def function(x, w, b, *ref):
        policy = answers_of(x, w, labels, b, False)
        ratio = policy - (answers_of(ref[0], ref[1], labels, ref[2], False) if ref else 0)
        signs = [1 if p else -1 for p in preferred]
        losses = [PUBLISHED_UNPAIRED[loss_type](a, y, beta, point) for a, y in zip(ratio, signs)]
        logits = F.linear(x.double(), w.double(), b.double()).sum((1, 2))
        sums = [(v * g).sum() for v in (policy, logits, beta * ratio) for g in (preferred, ~preferred)]
        return torch.stack(losses).mean(), *sums

    return function


@pytest.mark.parametrize("memory", [1, 700, 10**6])  # the peer's KTO fails, or logs other numbers, at other chunks
@pytest.mark.parametrize("loss_type", UNPAIRED_LOSSES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpaired(loss_type, memory, dtype, engine, device):
    supported(dtype, engine)
    (x, w, b), ref, labels = case(5, 5, device=device)  # as many answers as positions
    preferred = torch.tensor([True, False, True, True, False], device=device)
    point = {POINT_OPTIONS[loss_type]: 0.2} if loss_type in POINT_OPTIONS else {}

    def function(x, w, b, *ref):
        ref = dict(zip(("ref_x", "ref_weight", "ref_bias"), ref))
        return unpaired_preference_loss(x, w, labels, preferred, b, loss_type, 0.3, **point, **ref, chunk_memory=memory)

    for reference in ((), ref):
        hold(whole_unpaired(loss_type, labels, preferred), function, (x, w, b, *reference), dtype)


def test_weights_of_answers(device):
    (x, w, b), _, labels = case(4, device=device)
    preferred = torch.tensor([True, False, False, True], device=device)

    def loss(answers=slice(None), **weights):
        return unpaired_preference_loss(x[answers], w, labels[answers], preferred[answers], b, **weights).loss

    good, bad = loss(preferred), loss(~preferred)
    torch.testing.assert_close(loss(desirable_weight=2.0, undesirable_weight=0.5), (2 * good * 2 + 0.5 * bad * 2) / 4)


def test_reference_log_probs_are_its_hidden_states(engine, device):
    (x, w, b), ref, labels = case(device=device)
    names = dict(zip(("ref_x", "ref_weight", "ref_bias"), ref))
    given = answers_of(ref[0], ref[1], labels, ref[2], False)
    for a, c in zip(preference_loss(x, w, labels, b, **names), preference_loss(x, w, labels, b, ref_log_probs=given)):
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_nothing_to_learn_from(loss_type, device):
    """Ignored labels, an empty answer and one pair give finite values and zero gradients."""
    (x, w, b), _, labels = case(2, device=device)
    options = {"average_log_prob": True, "alpha": 1.0, "label_smoothing": smoothing_of(loss_type)}
    loss = preference_loss(x, w, torch.full_like(labels, -100), b, loss_type, **options).loss
    loss.backward()
    assert loss.isfinite() and x.grad.abs().sum() == w.grad.abs().sum() == 0
    labels[0] = -100
    (x, w) = leaves(x, w)
    loss = preference_loss(x, w, labels, b, loss_type, **options).loss
    loss.backward()
    assert loss.isfinite() and x.grad.isfinite().all() and x.grad[0].abs().sum() == 0


def extremes(device):
    """Answers of one token with logits of +-1e4: log-probabilities 0 and -2e4.

    In fp32: squared losses have gradients of 8e4 here, which fp16 cannot hold.
    """
    x = torch.full((2, 1, 1), 1e4, device=device, dtype=torch.float32)
    w = torch.tensor([[1.0], [-1.0]], device=device, dtype=torch.float32)
    for labels in ([[0], [1]], [[1], [0]]):
        yield *leaves(x.requires_grad_(), w.requires_grad_()), torch.tensor(labels, device=device)


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_extreme_logits(loss_type, engine, device):
    beta, smoothing = 1e-3, smoothing_of(loss_type)
    for x, w, labels in extremes(device):
        loss = preference_loss(x, w, labels, None, loss_type, beta, smoothing, average_log_prob=True).loss
        loss.backward()
        assert x.grad.isfinite().all() and w.grad.isfinite().all()
        c, r = (-2e4 * labels[:, 0].double()).split(1)
        if loss_type == "orpo":  # the odds of a certain answer are infinite: they are taken to be finite
            assert loss.isfinite() and loss >= 0
        else:
            zero = torch.zeros_like(c)
            expected = -c.mean() if loss_type == "sft" else published(loss_type, c, r, zero, zero, beta, smoothing)
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_extreme_margins(loss_type, engine, device):
    """Of +-2,000: a power of that is infinite, also in fp64."""
    for x, w, labels in extremes(device):
        loss = preference_loss(x, w, labels, None, loss_type, 0.1, smoothing_of(loss_type), average_log_prob=True).loss
        loss.backward()
        assert loss.isfinite() and x.grad.isfinite().all() and w.grad.isfinite().all()
        if loss_type == "discopop":
            torch.testing.assert_close(loss, torch.tensor(0.0 if labels[0] == 0 else 2000.0, device=device))


@pytest.mark.parametrize("loss_type", UNPAIRED_LOSSES)
def test_extreme_logits_of_single_answers(loss_type, engine, device):
    for x, w, labels in extremes(device):
        preferred = torch.tensor([True, False], device=device)
        loss = unpaired_preference_loss(x, w, labels, preferred, None, loss_type, 1e-3).loss
        loss.backward()
        point = -10 if loss_type == "bco" else 0  # bco's default is the mean reward
        log_ratio, signs = -2e4 * labels[:, 0].double(), torch.tensor([1, -1], device=device)
        expected = PUBLISHED_UNPAIRED[loss_type](log_ratio, signs, 1e-3, point)
        torch.testing.assert_close(loss.double(), expected.mean(), rtol=1e-5, atol=0)
        assert x.grad.isfinite().all() and w.grad.isfinite().all()


@pytest.mark.parametrize("loss_type", UNPAIRED_LOSSES)
def test_single_answers_without_tokens(loss_type, device):
    (x, w, b), _, labels = case(2, device=device)
    preferred = torch.tensor([True, False], device=device)
    loss = unpaired_preference_loss(x, w, torch.full_like(labels, -100), preferred, b, loss_type).loss
    (dx, dw) = torch.autograd.grad(loss, (x, w))
    assert loss.isfinite() and dx.abs().sum() == dw.abs().sum() == 0


def test_only_what_asks_gets_a_gradient(engine, device):
    (x, w, b), ref, labels = case(device=device)
    ref = [t.requires_grad_() for t in ref]
    names = dict(zip(("ref_x", "ref_weight", "ref_bias"), ref))
    frozen = w.detach()
    found = preference_loss(x, frozen, labels, b, **names)
    found.loss.backward()
    assert x.grad is not None and frozen.grad is None and all(t.grad is None for t in ref)
    assert not any(value.requires_grad for value in found[1:])
    with torch.no_grad():
        assert torch.equal(preference_loss(x, w, labels, b, **names).loss, found.loss.detach())


@pytest.mark.parametrize("loss_type", PAIR_LOSSES)
def test_second_backward(loss_type, device):
    """It is right, or it says that there is none."""
    (x, w, b), _, labels = case(device=device)
    loss = preference_loss(x, w, labels, b, loss_type, 0.1, smoothing_of(loss_type), average_log_prob=True).loss
    (once,) = torch.autograd.grad(loss, x, retain_graph=True)
    whole_batch = PAIR_LOSSES[loss_type].whole_batch
    if whole_batch({}) if callable(whole_batch) else whole_batch:
        assert torch.equal(once, torch.autograd.grad(loss, x)[0])
    else:
        with pytest.raises(RuntimeError, match="second"):
            torch.autograd.grad(loss, x)


@pytest.fixture
def made_up():
    """Pair losses of the test's own; forgotten again afterwards."""
    known = set(PAIR_LOSSES)
    yield pair_loss
    for name in set(PAIR_LOSSES) - known:
        del PAIR_LOSSES[name]


def test_a_pair_loss_is_one_function(made_up, device):
    """A new formula needs no other change: chunks, options, errors and module follow."""

    @made_up
    def cubic(pairs, beta, smoothing, shift: float = 0.0, point: torch.Tensor | None = None):
        margin = beta * (pairs.c - pairs.r) - shift - (0 if point is None else point)
        return (1 - margin) ** 3

    @made_up(whole_batch=lambda options: options.get("scale") is None)
    def relative(pairs, beta, smoothing, scale: float | None = None):
        margin = pairs.c - pairs.r
        return torch.relu(beta - margin / (margin.abs().mean().detach() if scale is None else scale))

    (x, w, b), ref, labels = case(device=device)
    reference = dict(zip(("ref_x", "ref_weight", "ref_bias"), ref))
    for name, options in [
        ("cubic", {}), ("cubic", {"shift": 0.5, "point": torch.ones(1, device=device)}), ("relative", {}),
        ("relative", {"scale": 2.0}),
    ]:  # fmt: skip
        losses = []
        for memory in (700, 10**6):
            module = PreferenceLoss(loss_type=name, beta=0.3, chunk_memory=memory, **options)
            losses.append(module(x, w, labels, b, **reference).loss)
        with torch.no_grad():
            answers = [
                answers_of(*tensors, average=False) for tensors in ((x, w, labels, b), (ref[0], ref[1], labels, ref[2]))
            ]
        pairs = Pairs(*(half for of_model in answers for half in of_model.chunk(2)))
        expected = PAIR_LOSSES[name](pairs, 0.3, 0.0, **options).mean()
        for loss in losses:
            torch.testing.assert_close(loss.detach(), expected)
        grads = [torch.autograd.grad(loss, (x, w), retain_graph=True) for loss in losses]
        for a, b_ in zip(*grads):
            torch.testing.assert_close(a, b_)
        if name == "relative" and not options:
            torch.autograd.grad(losses[0], x)  # of the whole batch: a second backward is right
        else:
            with pytest.raises(RuntimeError, match="second"):
                torch.autograd.grad(losses[0], x)
    for options in ({"shift": "a"}, {"shift": torch.ones(1)}, {"point": torch.ones(2)}, {"shift": None}):
        with pytest.raises(ValueError, match="^" + next(iter(options))):
            preference_loss(x, w, labels, b, "cubic", **options)
    with pytest.raises(ValueError, match="^unknown option 'scale'"):
        preference_loss(x, w, labels, b, "cubic", scale=1.0)


DIVERGENCES = {  # f'(t), arXiv:2309.16240
    "reverse_kl": torch.log,
    "forward_kl": lambda t: 1 - 1 / t,
    "js_divergence": lambda t: torch.log(2 * t / (1 + t)),
    "alpha_divergence": lambda t: (t**-0.7 - 1) / -0.7,
}


@pytest.mark.parametrize("memory", [1, 10**6])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo_norm", ["sigmoid_norm", "sft", "hinge"]], ids=str)
def test_divergences_mixtures_tails_and_heads(loss_type, divergence, memory, engine, device):
    (x, w, b), ref, labels = case(device=device)
    types, weights = (loss_type, [0.5, 2.0, 1.5]) if isinstance(loss_type, list) else ([loss_type], None)
    counts = (labels != -100).sum(-1)
    shorter = torch.minimum(*counts.chunk(2)).repeat(2)
    tails = 1 - 0.7 * ((labels != -100).cumsum(-1) > shorter[:, None])

    def logits(x, w, b):
        return 3 * torch.tanh(F.linear(x, w, b) * 0.8 / 3)

    def answers(logits):
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
        return picked, (picked * tails).sum(-1)

    def expected(x, w, b, ref_x, ref_w, ref_b):
        (picked, policy), (_, reference) = answers(logits(x, w, b)), answers(logits(ref_x, ref_w, ref_b))
        c, r = DIVERGENCES[divergence]((policy - reference).exp()).chunk(2)
        zero, nll = torch.zeros_like(c), -picked[:3].sum() / counts[:3].sum()
        lengths = counts.clamp(min=1).reshape(2, -1)
        parts = [nll if name == "sft" else published(name, c, r, zero, zero, 0.3, 0.0, lengths) for name in types]
        loss = sum(share * part for share, part in zip(weights or [1.0], parts))
        return loss, policy.chunk(2)[0], 0.3 * (policy - reference).chunk(2)[1]

    def found(x, w, b, ref_x, ref_w, ref_b):
        output = preference_loss(
            x, w, labels, b, loss_type, 0.3, ref_x=ref_x, ref_weight=ref_w, ref_bias=ref_b, chunk_memory=memory,
            loss_weights=weights, f_divergence=divergence, f_alpha=0.3, ld_alpha=0.3, softcap=3.0, logit_scale=0.8,
        )  # fmt: skip
        assert output.chosen_logits_mean is None
        return output.loss, output.chosen_log_probs, output.rejected_rewards

    hold(expected, found, (x, w, b, *ref), torch.float32)


def test_large_log_ratios_of_divergences(device):
    (x, w, b), _, labels = case(device=device)
    for divergence in DIVERGENCES:
        reference = torch.linspace(-1000, 1000, 6, device=device)
        (leaf,) = leaves(x)
        options = {"ref_log_probs": reference, "f_divergence": divergence, "f_alpha": 1.5}
        loss = preference_loss(leaf, w, labels, b, **options).loss
        assert not torch.autograd.grad(loss, leaf)[0].isnan().any(), divergence


@pytest.mark.parametrize("softcap, logit_scale", [(None, 0.5), (2.0, 1.0)])
def test_heads_of_single_answers(softcap, logit_scale, engine, device):
    (x, w, b), ref, labels = case(device=device)
    preferred = torch.tensor([True, False, True, True, False, False], device=device)
    names = dict(zip(("ref_x", "ref_weight", "ref_bias"), ref))
    head = {"softcap": softcap, "logit_scale": logit_scale}
    output = unpaired_preference_loss(x, w, labels, preferred, b, **names, **head)
    logits = F.linear(x, w, b) * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
        assert output.chosen_logits_sum is None
    else:
        chosen = logits[preferred].double()  # cancels in the sum, which a GPU adds in another order
        room = 4 * torch.finfo(torch.float32).eps * chosen.abs().sum().item()
        torch.testing.assert_close(output.chosen_logits_sum.double(), chosen.sum(), rtol=0, atol=room)
    picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * (labels != -100)
    torch.testing.assert_close(output.chosen_log_probs_sum, picked[preferred].sum())


@pytest.mark.parametrize("loss_type", NO_REFERENCE)
def test_losses_without_reference_average_by_default_and_refuse_one(loss_type, device):
    (x, w, b), _, labels = case(device=device)
    default, averaged, summed = (
        preference_loss(x, w, labels, b, loss_type, average_log_prob=average).loss for average in (None, True, False)
    )
    assert torch.equal(default, averaged) and not torch.equal(default, summed)
    for name, options in {"ref_x": dict(ref_x=x), "ref_log_probs": dict(ref_log_probs=torch.zeros(len(x)))}.items():
        with pytest.raises(ValueError, match=f"^{name}"):
            preference_loss(x, w, labels, b, loss_type, **options)


def test_a_list_of_losses_that_average_and_losses_that_add(device):
    (x, w, b), _, labels = case(device=device)
    types = ["sigmoid", "simpo"]
    with pytest.raises(ValueError, match=r"^average_log_prob: got None, allowed: True or False beside"):
        preference_loss(x, w, labels, b, types)
    for average in (True, False):
        found, *parts = (
            preference_loss(x, w, labels, b, one, average_log_prob=average).loss for one in (types, *types)
        )
        torch.testing.assert_close(found, sum(parts))
    for averages in ("sft", "sigmoid_norm", "ipo_norm"):  # which divide sums by the tokens
        found, *parts = (preference_loss(x, w, labels, b, one).loss for one in (["simpo", averages], "simpo", averages))
        torch.testing.assert_close(found, sum(parts))
    preference_loss(x, w, labels, b, types, loss_weights=[1.0, 0.0])


def test_labels_of_the_nll(device):
    (x, w, b), _, labels = case(device=device)
    every = torch.randint(0, 31, labels.shape, device=device)
    found = preference_loss(x, w, labels, b, "orpo", average_log_prob=True, alpha=1.0, nll_labels=every)
    torch.testing.assert_close(
        found.nll_loss, F.cross_entropy(F.linear(x, w, b)[:3].flatten(0, 1), every[:3].flatten())
    )


@traces_whole_losses
def test_compiles(device):
    (x, w, b), ref, labels = case(device=device)

    def loss(x, w):
        return preference_loss(x * 1, w, labels, b, ref_x=ref[0], ref_weight=ref[1], alpha=1.0).loss

    with use_backend(None):
        compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, w), loss(x, w))


@pytest.mark.parametrize(
    "argument, change",
    [
        ("x", {"x": torch.zeros(5, 5, 8), "labels": torch.zeros(5, 5, dtype=torch.int64)}),
        ("x", {"x": torch.zeros(6, 8)}),
        ("labels", {"labels": torch.zeros(6, 4, dtype=torch.int64)}),
        ("unknown loss_type", {"loss_type": "dpo"}),
        ("beta", {"beta": 0.0}),
        ("beta", {"beta": "0.1"}),
        ("beta", {"beta": math.inf}),
        ("alpha", {"alpha": math.nan}),
        ("loss_type", {"loss_type": []}),
        ("unknown loss_type", {"loss_type": ["sigmoid", "dpo"]}),
        ("loss_weights", {"loss_weights": [1.0]}),
        ("loss_weights", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}),
        ("unknown f_divergence", {"f_divergence": "kl"}),
        ("f_divergence", {"f_divergence": "forward_kl", "loss_type": ["sigmoid", "apo_zero"]}),
        ("f_alpha", {"f_alpha": "1"}),
        ("ld_alpha", {"ld_alpha": 1.5}),
        ("softcap", {"softcap": -1.0}),
        ("label_smoothing", {"label_smoothing": 0.6}),
        ("label_smoothing", {"label_smoothing": 0.0, "loss_type": "exo_pair"}),
        ("label_smoothing", {"label_smoothing": 0.5, "loss_type": "robust"}),
        *(("label_smoothing", {"label_smoothing": 0.1, "loss_type": k}) for k in ("hinge", "ipo", "discopop")),
        ("unknown option 'gamma'", {"gamma": 1.0}),
        ("tau", {"tau": 0.0, "loss_type": "discopop"}),
        ("ref_log_probs", {"ref_log_probs": torch.zeros(5)}),
        ("ref_log_probs", {"ref_log_probs": [0.0] * 6}),
        ("ref_weight", {"ref_x": torch.zeros(6, 5, 8)}),
        ("ref_weight", {"ref_weight": torch.zeros(31, 8)}),
        ("ref_weight", {"ref_x": torch.zeros(6, 5, 8), "ref_weight": torch.zeros(31, 3)}),
        ("ref_bias", {"ref_x": torch.zeros(6, 5, 8), "ref_weight": torch.zeros(31, 8), "ref_bias": torch.zeros(2)}),
        ("labels", {"ref_x": torch.zeros(6, 5, 8), "ref_weight": torch.zeros(3, 8)}),
        ("ref_x", {"ref_x": torch.zeros(5, 5, 8), "ref_weight": torch.zeros(31, 8)}),
        *(("nll_labels", {"nll_labels": torch.zeros(n, 5, dtype=torch.int64), "alpha": 1.0}) for n in (2, 4, 7)),
        ("labels", {"labels": torch.full((6, 5), 31)}),
        ("labels", {"labels": torch.full((6, 5), -1)}),
        ("labels", {"labels": torch.zeros(6, 5)}),
        ("labels", {"labels": None}),
        ("weight", {"weight": torch.zeros(8, 31)}),
        ("nll_labels", {"nll_labels": torch.full((6, 5), 31), "alpha": 1.0}),
    ],
)
def test_bad_pairs(argument, change):
    (x, w, _), _, labels = case()
    with pytest.raises(ValueError, match=f"^{argument}"):
        preference_loss(**({"x": x, "weight": w, "labels": labels} | change))


@pytest.mark.parametrize(
    "argument, change",
    [
        ("preferred", {"preferred": torch.ones(5, dtype=torch.bool)}),
        ("preferred", {"preferred": None}),
        ("preferred", {"preferred": torch.tensor([1, -1, 1, -1, 1, -1])}),  # both would count as True
        ("desirable_weight", {"desirable_weight": -1.0}),
        ("kl", {"kl": torch.zeros(6)}),
        ("kl", {"kl": math.nan}),
        ("labels", {"labels": torch.full((6, 5), 31)}),
        ("unknown loss_type", {"loss_type": "sigmoid"}),
        ("loss_type", {"loss_type": ["kto", "bco"]}),
        ("beta", {"beta": -1.0}),
        ("unknown option 'delta'", {"delta": 1.0}),
    ],
)
def test_bad_answers(argument, change):
    (x, w, _), _, labels = case()
    good = {"x": x, "weight": w, "labels": labels, "preferred": torch.ones(6, dtype=torch.bool)}
    with pytest.raises(ValueError, match=f"^{argument}"):
        unpaired_preference_loss(**(good | change))


@pytest.mark.parametrize("loss_type", ["sigmoid", "aot", "bco_pair"])
def test_answers_of_no_length(loss_type):
    x, w = torch.zeros(4, 0, 8, requires_grad=True), torch.randn(31, 8)
    loss = preference_loss(x, w, torch.zeros(4, 0, dtype=torch.int64), loss_type=loss_type).loss
    assert loss.isfinite() and torch.autograd.grad(loss, x)[0].shape == x.shape
