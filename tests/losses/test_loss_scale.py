"""In fp16 and bf16 under a loss scale every gradient is that of plain torch.

fp16 holds nothing below 6e-8, and a gradient of logits divided by the rows of a batch is soon less: one that is made in
the forward must not be lost before the scale arrives in the backward. Each loss runs under scales up to 2^24 and is
held to float64, with the room that plain torch leaves in that dtype, rows of large and of small gradients apart: a
class that no label names has gradients a thousandth of the others'.

The kernels run in the interpreter, or at a batch's real size on an accelerator. `liger_lab.tools.loss_scale` tabulates
the largest error of each loss; the ops alone are in tests/kernels/test_incoming_gradients.py.
"""

import pytest
import torch
from test_own_losses import DPO
from torch.nn.functional import linear, log_softmax

import liger_hw
from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.dispatch import widen
from liger_hw.losses.distillation import SOFT_LOSSES
from liger_hw.losses.engine import logits_loss
from liger_hw.losses.policy import OBJECTIVES, policy_loss_of_logits
from liger_hw.losses.preference_formulas import PAIR_LOSSES, UNPAIRED_LOSSES
from liger_hw.transformers.functional import liger_fused_linear_kl_div
from liger_hw.transformers.vocab_parallel import vocab_parallel_cross_entropy

SCALES = [2.0**k for k in (0, 8, 16, 24)]
DTYPES = [torch.float16, torch.bfloat16]
LARGE = not interpreting() and torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator(check_available=True).type if LARGE else "cpu"
SEQUENCES, LENGTH, FEATURES, CLASSES = (8, 512, 64, 16384) if LARGE else (4, 2, 8, 67)
MEMORY = 2**25 if LARGE else 2 * 3 * 72  # 1,024 rows of logits, or 3
pytestmark = [pytest.mark.xdist_group("loss scale")] if LARGE else []  # 20 GB: one process at a time
ITEMS = 2.0**22  # what "mean" divides by: gradients of logits of 2e-7 and less


@pytest.fixture(autouse=True)
def no_cached_memory():
    """Other processes may need what float64 took."""
    yield
    if LARGE:
        torch.accelerator.empty_cache()


def head(device, dtype=torch.float16):
    """Return hidden states and weight whose probabilities are 1 to 1e-8, and one token for each position."""
    torch.manual_seed(0)
    x, w = torch.randn(SEQUENCES, LENGTH, FEATURES), torch.randn(CLASSES, FEATURES) * 5 * FEATURES**-0.5
    y = torch.randint(CLASSES // 2, (SEQUENCES, LENGTH))
    y[0, 0] = -100
    return *(t.to(device, dtype) for t in (x, w)), y.to(device)


def rows(x, y):
    return x.flatten(0, 1), y.flatten()


def by_logits(function):
    """Make a loss of the head's tensors of one of logits; the output layer is plain torch's in every run."""

    def loss(x, w, y):
        x, y = rows(x, y)
        return function(linear(x, w), y)

    return loss


def by_rows(function):
    def loss(x, w, y):
        x, y = rows(x, y)
        return function(x, w, y)

    return loss


def old_log_probs(x, w, y):
    """Return log-probabilities near the policy's, the same in every run."""
    exact = log_softmax(linear(x.detach().double(), w.detach().double()), -1).gather(-1, y.clamp(min=0)[..., None])
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(x.device)
    return (exact[..., 0] + 0.3 * noise).to(torch.promote_types(x.dtype, torch.float32)), noise


def distil(x, w, y, **options):
    generator = torch.Generator().manual_seed(2)
    teacher = torch.randn(CLASSES, FEATURES, generator=generator).to(w.device, torch.bfloat16).to(w.dtype)
    x, y = rows(x, y)
    options = {"soft_weight": 2.0**-18, "hard_weight": 2.0**-18, "chunk_memory": 2 * MEMORY} | options
    return liger_hw.distillation_loss(x, w, x.detach(), teacher, y, **options).loss


def offline(x, w, y, k, probabilities=False):
    """Return the loss to a stored teacher, times 2^-18 as that of `distil`."""
    generator = torch.Generator().manual_seed(2)
    x, y = rows(x, y)
    log_p = (5 * torch.randn(len(x), CLASSES, generator=generator)).log_softmax(1).to(w.device)
    if probabilities:
        return liger_fused_linear_kl_div(x, w, log_p.exp(), y, "sum") * 2.0**-18
    values, tokens = (log_p, None) if k is None else log_p.topk(k)
    return liger_hw.offline_distillation_loss(x, w, values, tokens, labels=y, chunk_memory=2 * MEMORY) * 2.0**-18


def policy(x, w, y, **options):
    """Return the policy loss divided by ITEMS, by the function where it divides by a number of tokens."""
    old, noise = old_log_probs(x, w, y)
    divides = options["loss_type"] in ("dapo", "cispo", "vespo")
    loss = liger_hw.policy_loss(
        x, w, y.clamp(min=0), noise[:, 0].float(), y != -100, old_log_probs=old, ref_log_probs=old - 0.1,
        num_items=ITEMS if divides else None, chunk_memory=MEMORY, **options,
    ).loss  # fmt: skip
    return loss if divides else loss / (ITEMS / y.numel())


def policy_of_logits(x, w, y, in_place):
    old, noise = old_log_probs(x, w, y)
    loss, *_ = policy_loss_of_logits(
        linear(x, w), y.clamp(min=0), noise[:, 0].float(), y != -100, old, old - 0.1, in_place=in_place
    )
    return loss.sum() / ITEMS


def sharded_cross_entropy(x, w, y):
    logits = linear(x, w)
    if liger_hw.backends.forced() == "reference":
        return liger_hw.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / ITEMS
    return vocab_parallel_cross_entropy(logits, y).sum() / ITEMS


def pairs(x, w, y, **options):
    smoothing = 0.1 * PAIR_LOSSES[options.get("loss_type", "sigmoid")].smooths
    options = {"average_log_prob": True, "label_smoothing": smoothing, "chunk_memory": MEMORY} | options
    return liger_hw.preference_loss(x, w, y, **options).loss / 2.0**10


def own_pairs(x, w, y):
    ref = x.detach() / 2, w.detach()
    if liger_hw.backends.forced() == "reference":
        return pairs(x, w, y, beta=0.3, alpha=0.7, average_log_prob=False, label_smoothing=0.0, ref_x=ref[0],
                     ref_weight=ref[1]) * 2.0**2  # fmt: skip
    return DPO.apply(x, w, y, None, *ref, None, 1)[0] / 2.0**8


def answers(x, w, y, **options):
    preferred = torch.arange(SEQUENCES, device=x.device) % 2 == 0
    return liger_hw.unpaired_preference_loss(x, w, y, preferred, chunk_memory=MEMORY, **options).loss / 2.0**10


def divergence(op, probabilities=False, **options):
    def loss(logits, y):
        q = log_softmax(widen(logits), -1).to(logits.dtype)
        p = log_softmax(widen(logits).detach().roll(1, 1), -1).to(logits.dtype)
        q, p = (q.exp(), p.exp()) if probabilities else (q, p)
        return getattr(liger_hw, op)(q, p, **options) / (ITEMS / 2.0**8)

    return by_logits(loss)


def cross_entropy(**options):
    options = {"num_items": ITEMS} | options
    return by_logits(lambda logits, y: liger_hw.cross_entropy(logits, y, **options).sum())


def fused_cross_entropy(**options):
    options = {"num_items": ITEMS, "chunk_memory": MEMORY} | options
    return by_rows(lambda x, w, y: liger_hw.fused_linear_cross_entropy(x, w, y, **options).sum())


def selected(x, w, y, **options):
    out = liger_hw.fused_linear_selective_log_softmax(x, w, y, return_entropy=True, chunk_memory=MEMORY, **options)
    return (out.log_probs + 0.1 * out.entropy).sum() / ITEMS


def square_of_logits(logits, y):
    picked = log_softmax(widen(logits), -1).gather(1, y.clamp(min=0)[:, None])[:, 0]
    return torch.where(y == -100, 0, picked.square()).sum() / ITEMS


def by_token(log_probs, entropy, weights):
    return (log_probs.square() + 0.1 * entropy) * weights, entropy


def by_group(log_probs, entropy, groups):
    return log_probs.sum((0, 2)).square().sum() / ITEMS


PLAIN_OPTIONS = {"num_items": None, "reduction": "sum"}
LOSSES = {
    "cross_entropy": cross_entropy(),
    "cross_entropy in place": cross_entropy(in_place=True),
    "cross_entropy in place, sum": cross_entropy(in_place=True, **PLAIN_OPTIONS),
    "cross_entropy in place, rows": cross_entropy(in_place=True, num_items=None, reduction="none"),
    "cross_entropy in place, options": cross_entropy(
        in_place=True, label_smoothing=0.1, lse_square_scale=1e-2, softcap=20.0, logit_scale=0.5
    ),
    "fused_linear_cross_entropy": fused_cross_entropy(),
    "fused_linear_cross_entropy, sum": fused_cross_entropy(**PLAIN_OPTIONS),
    "fused_linear_cross_entropy, mean": fused_cross_entropy(num_items=None),
    "fused_linear_cross_entropy, rows": fused_cross_entropy(num_items=None, reduction="none"),
    "fused_linear_cross_entropy, options": fused_cross_entropy(
        label_smoothing=0.1, lse_square_scale=1e-2, softcap=20.0, logit_scale=0.5, use_token_scaling=True
    ),
    "selective_log_softmax": by_logits(lambda z, y: liger_hw.selective_log_softmax(z, y).sum() / ITEMS),
    "selective_log_softmax in place": by_logits(
        lambda z, y: liger_hw.selective_log_softmax(z, y, in_place=True).sum() / ITEMS
    ),
    "fused_linear_selective_log_softmax": by_rows(selected),
    "jsd": divergence("jsd"),
    "reverse KL": divergence("jsd", beta=1.0),
    "kl_div": divergence("kl_div", log_target=True, reduction="batchmean"),
    "tvd": divergence("tvd", probabilities=True),
    "cross_entropy_tvd": by_logits(
        lambda z, y: sum(liger_hw.cross_entropy_tvd(z, z.detach().roll(1, 1), y)).sum() / ITEMS
    ),
    "logits_loss": by_rows(lambda x, w, y: logits_loss(square_of_logits, x, w, None, (y,), MEMORY, 1)),
    "token_loss": by_rows(
        lambda x, w, y: liger_hw.token_loss(
            by_token, x, w, y, None, (torch.full_like(y, 1 / ITEMS, dtype=torch.float32),), with_entropy=True,
            chunk_memory=MEMORY,
        )[0]
    ),
    "sequence_loss": lambda x, w, y: liger_hw.sequence_loss(by_group, x, w, y, chunk_memory=MEMORY)[0],
    "multi_token_loss": lambda x, w, y: liger_hw.multi_token_loss(
        [x, x], w, y, head_weights=(2.0**-18, 2.0**-19), chunk_memory=MEMORY
    ).loss,
    "a preference loss of one's own": own_pairs,
    "policy_loss_of_logits": lambda x, w, y: policy_of_logits(x, w, y, False),
    "policy_loss_of_logits in place": lambda x, w, y: policy_of_logits(x, w, y, True),
    "vocab_parallel_cross_entropy": sharded_cross_entropy,
    "GSPO": lambda x, w, y: policy(x, w, y, loss_type="grpo", importance_sampling_level="sequence"),
    **{f"distillation, {k}": lambda x, w, y, k=k: distil(x, w, y, soft_loss=k) for k in SOFT_LOSSES},
    "offline distillation, top 5": lambda x, w, y: offline(x, w, y, 5),
    "offline distillation, all": lambda x, w, y: offline(x, w, y, None),
    "liger_fused_linear_kl_div": lambda x, w, y: offline(x, w, y, None, probabilities=True),
    **{f"policy, {k}": lambda x, w, y, k=k: policy(x, w, y, loss_type=k) for k in OBJECTIVES},
    **{f"pairs, {k}": lambda x, w, y, k=k: pairs(x, w, y, loss_type=k) for k in PAIR_LOSSES},
    **{f"answers, {k}": lambda x, w, y, k=k: answers(x, w, y, loss_type=k) for k in UNPAIRED_LOSSES},
}  # fmt: skip


def gradients(loss, tensors, scale, dtype, backend):
    x, w, y = tensors
    x, w = (t.detach().to(dtype).requires_grad_() for t in (x, w))
    with use_backend(backend):
        (loss(x, w, y) * scale).backward()
    return x.grad.flatten(0, -2), w.grad


def hold(exact, plain, ours, what, dtype, groups=4):
    """Hold rows of like size to the parity rule; a rounding below the least normal number is the least number.

    Where plain torch's gradient of logits overflows and the gradient itself does not, ours may be finite, and right.
    A sum of large gradients that cancel may fall on either side of the largest number.

    Returns:
        the largest error as a share of the allowed one.
    """
    eps, share = torch.finfo(dtype).eps, 0.0
    least, largest = torch.finfo(dtype).tiny * eps, torch.finfo(dtype).max * (1 + eps / 4)
    for group in exact.abs().amax(-1).argsort(descending=True).chunk(groups):
        e, p, o = (t[group].double() for t in (exact, plain, ours))
        noise = 8 * eps * e.abs().max()
        assert not o[e.abs() > largest + noise].isfinite().any(), f"{what}: finite where {dtype} overflows"
        fits = (e.abs() < largest - noise) & p.isfinite()
        assert o[fits].isfinite().all(), f"{what}: not finite where plain torch is"
        both, alone = p.isfinite() & o.isfinite(), ~p.isfinite() & o.isfinite()
        assert ((o - e)[alone].abs() <= noise).all(), f"{what}: wrong where plain torch overflows"
        if not both.any():
            continue
        e, p, o = e[both], p[both], o[both]
        for name, norm in (("worst", lambda t: t.abs().max()), ("rms", lambda t: t.square().mean().sqrt())):
            room = 2 * (norm(p - e) + max(eps * norm(e), least))
            error = norm(o - e)
            assert error <= room, f"{what}: {name} error {error:.3g}, allowed {room:.3g}, of gradients of {norm(e):.3g}"
            share = max(share, (error / room).item())
    return share


def check(name, backend, device, dtype):
    """Hold the gradients of a loss to float64's under each scale; return the worst share of each."""
    loss, tensors = LOSSES[name], head(device, dtype)
    exact, shares = gradients(loss, tensors, 1.0, torch.float64, "reference"), []
    for scale in SCALES:
        plain = gradients(loss, tensors, scale, dtype, "reference")
        ours = gradients(loss, tensors, scale, dtype, backend)
        what = f"{name}, {dtype}, scale {scale:g}, gradient of"
        shares.append(
            max(
                hold(e * scale, p, o, f"{what} {tensor}", dtype)
                for tensor, e, p, o in zip(("x", "weight"), exact, plain, ours)
            )
        )
    return shares


# In the interpreter each way from the logits to the gradients once: the formulas above it are the same torch.
WAYS = (
    "cross_entropy in place", "cross_entropy in place, rows", "cross_entropy in place, options",
    "fused_linear_cross_entropy, sum", "fused_linear_cross_entropy, rows", "fused_linear_cross_entropy, options",
    "selective_log_softmax in place", "jsd", "tvd", "cross_entropy_tvd", "logits_loss", "token_loss", "GSPO",
    "distillation, jsd", "distillation, reverse_kl", "distillation, cosine", "answers, kto",
    "offline distillation, top 5", "offline distillation, all",
)  # fmt: skip


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("name", LOSSES if LARGE else WAYS)
def test_with_kernels(name, dtype, backend):
    check(name, backend, DEVICE, dtype)


IN_CHUNKS = [name for name in LOSSES if name.split()[0] not in ("cross_entropy", "jsd", "reverse", "kl_div", "tvd")]


@every_dtype
@pytest.mark.parametrize("name", IN_CHUNKS)
@pytest.mark.skipif(interpreting() or LARGE, reason="chunks by autograd run on a CPU without the interpreter")
def test_by_autograd(name, dtype):
    check(name, None, "cpu", dtype)


@pytest.mark.skipif(interpreting(), reason="what autocast does is no kernel's")
@every_dtype
@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "token_loss", "a preference loss of one's own"])
def test_by_autocast(name, dtype):
    """Parameters in fp32 get their gradients through the same casts as plain torch's."""
    loss, (x, w, y) = LOSSES[name], head(DEVICE, dtype)
    exact = gradients(loss, (x, w, y), 1.0, torch.float64, "reference")
    with torch.autocast(DEVICE, dtype=dtype):
        plain, ours = (gradients(loss, (x, w, y), 2.0**16, torch.float32, backend) for backend in ("reference", None))
    for tensor, e, p, o in zip(("x", "weight"), exact, plain, ours):
        assert o.dtype == torch.float32
        hold(e * 2.0**16, p, o, f"{name} under autocast, gradient of {tensor}", dtype)


@pytest.mark.skipif(interpreting(), reason="compiled graphs run no interpreter")
@every_dtype
@pytest.mark.parametrize("name", ["fused_linear_cross_entropy", "jsd", "kl_div"])
def test_compiled(name, dtype):
    loss, tensors = LOSSES[name], head(DEVICE, dtype)
    exact = gradients(loss, tensors, 1.0, torch.float64, "reference")
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    plain = gradients(loss, tensors, 2.0**16, dtype, "reference")
    ours = gradients(compiled, tensors, 2.0**16, dtype, None)
    for tensor, e, p, o in zip(("x", "weight"), exact, plain, ours):
        hold(e * 2.0**16, p, o, f"{name} compiled, gradient of {tensor}", dtype)


@pytest.mark.parametrize("op", ["fused_linear_cross_entropy", "fused_linear_selective_log_softmax"])
def test_a_sum_of_some_chunks_beyond_fp16(op):
    """The weight's gradient is -39,000 after the first chunk, would be infinite after the second, and ends at 0."""
    x = torch.ones(48, FEATURES, dtype=torch.float16, device=DEVICE)
    w = torch.zeros(67, FEATURES, dtype=torch.float16, device=DEVICE, requires_grad=True)
    y, options = torch.zeros(48, dtype=torch.long, device=DEVICE), {"chunk_memory": 16 * 72 * 2}
    losses = (
        liger_hw.fused_linear_cross_entropy(x, w, y, reduction="none", **options)
        if op == "fused_linear_cross_entropy"
        else -liger_hw.fused_linear_selective_log_softmax(x, w, y, **options)
    )
    incoming = torch.tensor([2500.0] * 31 + [0.0] + [-2500.0] * 15 + [0.0], device=DEVICE)
    (losses * incoming).sum().backward()
    exact = (
        torch.full((67,), 1 / 67, dtype=torch.float64) - torch.eye(67, dtype=torch.float64)[0]
    ) * incoming.sum().cpu()
    torch.testing.assert_close(w.grad[:, 0].double().cpu(), exact, rtol=2**-9, atol=0)
