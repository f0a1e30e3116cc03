"""Every loss of a head with every option of heads: the definition of float64, or an error that names the option.

The definition applies bias, scale and softcap to whole logits z by torch, and takes the loss of hidden states z under a
head that is the identity, in float64 and without an option. Other tests hold each such loss to its formula.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import device as rank_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import liger_hw
from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.losses.engine import logits_loss
from liger_hw.losses.policy import OBJECTIVES
from liger_hw.losses.preference_formulas import PAIR_LOSSES, UNPAIRED_LOSSES

ANSWERS, LENGTH, HIDDEN, VOCABULARY = 4, 3, 8, 37
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


LABELS = torch.randint(VOCABULARY, (ANSWERS, LENGTH), generator=GENERATOR)
LABELS[0, 2] = LABELS[1, 1:] = LABELS[3, 0] = -100
COUNTED = int((LABELS != -100).sum())
TENSORS = normal(ANSWERS, LENGTH, HIDDEN) / 2, normal(VOCABULARY, HIDDEN), normal(VOCABULARY)
OTHERS = normal(ANSWERS, LENGTH, HIDDEN) / 2, normal(VOCABULARY, HIDDEN)  # of a reference model, or a teacher
STORED = (normal(ANSWERS * LENGTH, VOCABULARY) * 2).log_softmax(-1)
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, 2.0])
OLD = torch.full((ANSWERS, LENGTH), -3.5)


def rows(call, *arguments, **more):
    """Return a case whose hidden states and labels are rows; each case takes a head, another, and options."""

    def case(x, weight, others, labels, **options):
        return call(x.flatten(0, 1), weight, labels.flatten(), *arguments, **more | options)

    return case


def weighted(x, weight, others, labels, **options):
    loss = liger_hw.fused_linear_cross_entropy
    each = loss(
        x.flatten(0, 1), weight, labels.flatten(), reduction="none", token_weights=OLD.flatten().to(x.device), **options
    )
    return (each * ADVANTAGES.to(each).repeat(LENGTH)).sum()


def log_probs(
    x, weight, others, labels, names=("entropy", "lse", "is_top1", "mean_logits", "log_sum_sq_probs"), **options
):
    asked = {f"return_{name}": True for name in names}
    function = liger_hw.fused_linear_selective_log_softmax
    log_p, entropy, *logged = function(x.flatten(0, 1), weight, labels.flatten(), **asked, **options)
    return (log_p * ADVANTAGES.to(log_p).repeat(LENGTH) + entropy).sum(), entropy, *logged


def pairs(x, weight, others, labels, loss=liger_hw.preference_loss, arguments=(), reference=True, **options):
    reference = dict(zip(("ref_x", "ref_weight"), others)) if reference else {}
    return loss(x, weight, labels, *arguments, **reference, **options)


def policy(x, weight, others, labels, reference=True, **options):
    reference = dict(zip(("ref_x", "ref_weight"), others)) if reference else {"beta": 0.0}
    given = {"mask": labels != -100, "old_log_probs": OLD.to(x.device), "return_entropy": True}
    advantages = ADVANTAGES.to(x.device)
    return liger_hw.policy_loss(x, weight, labels.clamp(min=0), advantages, **given, **reference, **options)


def teacher(x, weight, others, labels, **options):
    return liger_hw.distillation_loss(x, weight, *others, labels, **options)


def stored(x, weight, others, labels, given=(STORED, None), **options):
    given = STORED.topk(5) if given is None else given
    values = given[0].to(x.device, x.dtype if x.dtype == torch.float64 else torch.float32)
    top_k = given[1] if given[1] is None else given[1].to(x.device)
    return liger_hw.offline_distillation_loss(x, weight, values, top_k, labels=labels, **options)


def multi_token(x, weight, others, labels, **options):
    return liger_hw.multi_token_loss(torch.stack((x, x.flip(0))), weight, labels, **options)


def tokens(x, weight, others, labels, **options):
    def formula(log_p, entropy, row):
        return log_p * (entropy + row), log_p.exp()

    numbers = (ADVANTAGES.to(x).repeat(LENGTH),)
    return liger_hw.token_loss(
        formula, x.flatten(0, 1), weight, labels.flatten(), rows=numbers, with_entropy=True, **options
    )


def sequences(x, weight, others, labels, **options):
    def formula(log_p, entropy, _):
        return (log_p.sum(-1).tanh() * entropy.sum(-1)).sum()

    return liger_hw.sequence_loss(formula, x, weight, labels, parts=2, with_entropy=True, **options)


def own(x, weight, others, labels, **options):
    return logits_loss(lambda z: z.square().sum(), x.flatten(0, 1), weight, **options)


BY_PRODUCTS = ("z_loss", "token_accuracy", "predicted_tokens", "entropy")
ASKED = {f"return_{name}": True for name in BY_PRODUCTS} | {"lse_square_scale": 0.1, "label_smoothing": 0.1}
WITHOUT_REFERENCE = ("simpo", "orpo")
EXTRA = {"exo_pair": {"label_smoothing": 0.1}}
GOOD = ADVANTAGES > 0
CASES = {
    "cross entropy": rows(liger_hw.fused_linear_cross_entropy),
    "cross entropy and by-products": rows(liger_hw.fused_linear_cross_entropy, **ASKED),
    "cross entropy by row, weighted": weighted,
    "log-probabilities": partial(log_probs, names=("entropy", "lse")),
    "log-probabilities and statistics": log_probs,
    **{
        f"pairs, {name}": partial(pairs, loss_type=name, reference=name not in WITHOUT_REFERENCE, **EXTRA.get(name, {}))
        for name in PAIR_LOSSES
    },
    "pairs, three losses": partial(pairs, loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    "pairs, LD and a divergence": partial(pairs, ld_alpha=0.5, f_divergence="js_divergence", alpha=0.3),
    **{
        f"answers, {name}": partial(
            pairs, loss=lambda *a, **o: liger_hw.unpaired_preference_loss(*a[:3], GOOD.to(a[0].device), **o),
            loss_type=name,
        )
        for name in UNPAIRED_LOSSES
    },
    **{f"policy, {name}": partial(policy, loss_type=name) for name in OBJECTIVES},
    "policy, GSPO": partial(policy, loss_type="grpo", importance_sampling_level="sequence", reference=False),
    "policy, entropy": partial(policy, entropy_coef=0.1, delta=1.5),
    **{
        f"teacher, {name}": partial(teacher, soft_loss=name, temperature=2.0)
        for name in ("jsd", "kl", "reverse_kl", "tvd", "cosine")
    },
    "draft model, CE and TVD": partial(teacher, soft_loss={"kl": 1.0, "tvd": 0.5}, hard_weight=0.0),
    "stored teacher": stored,
    **{
        f"stored top 5, {name}": partial(stored, given=None, soft_loss=name)
        for name in ("kl", "reverse_kl", "jsd", "tvd")
    },
    "multi-token": multi_token,
    "token_loss": tokens,
    "sequence_loss": sequences,
    "logits_loss": own,
}  # fmt: skip

OPTIONS = {  # of every head; the definition takes the first three itself, the others change no value
    "bias": TENSORS[2], "logit_scale": 0.7, "softcap": 3.0, "logits_dtype": torch.float32, "invariant": True,
    "counted_rows": COUNTED, "accum_dtype": torch.float32, "chunk_memory": 700,
}  # fmt: skip
STEPS = ("bias", "logit_scale", "softcap")
SETS = [(), *((name,) for name in OPTIONS), *(tuple(o for o in OPTIONS if o != name) for name in OPTIONS), (*OPTIONS,)]


NOT_OF_LOGITS = {"softcap", "logit_scale", "counted_rows"}
REFUSAL = "unexpected keyword argument '(softcap|logit_scale|counted_rows)'"


def refuses(case, names):
    """Tell whether a loss has no such option: a function of logits scales them itself."""
    return case == "logits_loss" and not NOT_OF_LOGITS.isdisjoint(names)


def run(case, names, dtype=torch.float32, device="cpu", cast=lambda t: t, grad=True):
    """Return what a case gives, and the gradients of hidden states, head and bias."""
    x, weight, bias = (cast(t.to(device, dtype)).requires_grad_(grad) for t in TENSORS)
    others = [cast(t.to(device, dtype)) for t in OTHERS]
    options = {name: OPTIONS[name] for name in names}
    leaves = [x, weight]
    if "bias" in names:
        options["bias"] = bias
        leaves.append(bias)
    output = CASES[case](x, weight, others, LABELS.to(device), **options)
    output = (output,) if torch.is_tensor(output) else output
    values = [value if value is None else value.detach() for value in output]
    return values, torch.autograd.grad(output[0], leaves) if grad else ()


def defined(case, names, dtype):
    """Return the same of the definition, for inputs that `dtype` holds."""
    x, weight, bias = (t.to(dtype).double().requires_grad_() for t in TENSORS)

    def logits(x, weight, bias):
        z = x @ weight.T + (bias if "bias" in names and bias is not None else 0.0)
        z = z * OPTIONS["logit_scale"] if "logit_scale" in names else z
        return 3.0 * (z / 3.0).tanh() if "softcap" in names else z

    identity = torch.eye(VOCABULARY, dtype=torch.float64)
    others = [t.to(dtype).double() for t in OTHERS]
    if case.startswith(("teacher", "draft")):  # whose head has options of its own
        others = others[0] @ others[1].T, identity
    else:
        others = logits(*others, None), identity
    with use_backend("reference"):
        output = CASES[case](logits(x, weight, bias), identity, others, LABELS)
    output = (output,) if torch.is_tensor(output) else output
    leaves = [x, weight, bias] if "bias" in names else [x, weight]
    return [value if value is None else value.detach() for value in output], torch.autograd.grad(output[0], leaves)


def assert_defined(case, names, found, dtype, wide=1e-4):
    """Compare with the definition; gradients of 16 bits are rounded once, their sums once a chunk."""
    (values, grads), (expected, expected_grads) = found, defined(case, names, dtype)
    for i, (a, b) in enumerate(zip(values, expected, strict=True)):
        a = a if a is None else a.cpu()
        if a is not None:  # such as the means of capped logits
            torch.testing.assert_close(
                a.double(), b.double(), rtol=wide, atol=wide, msg=lambda m, i=i: f"{names}, result {i}: {m}"
            )
    room = wide if dtype == torch.float32 else 1e-2
    for i, (a, b) in enumerate(zip(grads, expected_grads, strict=True)):
        assert a.dtype == dtype
        error = (a.double().cpu() - b).norm() / (b.norm() + 1e-6)
        assert error < room, f"{names}, gradient {i}: {error:.2g}"


TYPES = "pairs, ", "answers, ", "policy, "  # formulas of torch over the same kernels
OF_TYPES = (
    "pairs, sigmoid", "pairs, aot", "pairs, LD and a divergence", "answers, kto", "policy, grpo", "policy, GSPO",
    "policy, entropy",
)  # fmt: skip
INTERPRETED = [case for case in CASES if case in OF_TYPES or not case.startswith(TYPES)]


@pytest.mark.parametrize("case", INTERPRETED if interpreting() else CASES)
def test_options(case, engine, device):
    sets = [SETS[0], SETS[-1]] if engine == "kernels" else SETS  # kernels are compiled, or interpreted
    for names in sets:
        dtype = torch.bfloat16 if "logits_dtype" in names and not interpreting() else torch.float32
        if refuses(case, names):
            with pytest.raises(TypeError, match=REFUSAL):
                run(case, names, dtype, device)
            continue
        assert_defined(case, names, run(case, names, dtype, device), dtype)


@pytest.mark.skipif(interpreting(), reason="the same there")
@pytest.mark.parametrize("case", CASES)
def test_modes(case):
    """Evaluation gives the values of training; autocast those of inputs that are cast before."""
    names = [name for name in OPTIONS if not refuses(case, [name]) and name != "logits_dtype"]
    trained, evaluated = run(case, names), run(case, names, grad=False)
    with torch.autocast("cpu", torch.bfloat16):
        autocast = run(case, names)
    cast = run(case, names, cast=lambda t: t.bfloat16())
    for found, expected in ((evaluated, trained), (autocast, cast)):
        for a, b in zip(found[0], expected[0], strict=True):
            assert a is b is None or torch.equal(a, b)


WHOLE = "^head: got a DTensor.*policy_loss"
OF_WHOLE_LOGITS = {
    **dict.fromkeys(("teacher", "draft", "stored", "logits"), WHOLE),
    "log-probabilities and": "^return_is_top1: got True, allowed: False where ranks share the vocabulary",
}


def sharded():
    """Every case on two ranks that share the vocabulary, beside the whole head; whole logits are refused."""
    mesh = init_device_mesh(rank_device().type, (dist.get_world_size(),))

    def cast(t):
        return distribute_tensor(t, mesh, [Shard(0)]) if len(t) == VOCABULARY else t

    for case in CASES:
        kept = [name for name in OPTIONS if name != "invariant"]
        for names in ((), (*kept,)):
            if refuses(case, names):
                continue
            if message := next((message for start, message in OF_WHOLE_LOGITS.items() if case.startswith(start)), None):
                with pytest.raises(ValueError, match=message):
                    run(case, names, device=rank_device(), cast=cast)
                continue
            whole, found = (run(case, names, device=rank_device(), **more) for more in ({}, {"cast": cast}))
            for a, b in zip(found[0], whole[0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=lambda m, at=(case, names): f"{at}: {m}")
            for a, b in zip(found[1], whole[1], strict=True):
                a = a.full_tensor() if hasattr(a, "full_tensor") else a
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5, msg=lambda m, at=(case, names): f"{at}: {m}")
        if not case.startswith("logits"):
            with pytest.raises(ValueError, match="^(invariant: got True, allowed: False where|head: got a DTensor)"):
                run(case, ["invariant"], device=rank_device(), cast=cast)


def test_shared_vocabulary(ranks):
    ranks(2, sharded)
