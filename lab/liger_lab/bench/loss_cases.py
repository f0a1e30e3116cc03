"""Define the losses that `liger-hw bench losses` measures, each by liger_hw, plain torch and liger_kernel.

Plain torch computes all logits, their log-softmax in fp32 and the formula, and differentiates by autograd.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from liger_hw import dispatch
from liger_hw.kernels import load_all
from liger_hw.kernels.vocabulary.divergence.logits import soft_rows
from liger_hw.losses.distillation import distillation_loss
from liger_hw.losses.multi_token import multi_token_loss
from liger_hw.losses.offline_distillation import offline_distillation_loss
from liger_hw.losses.policy import OBJECTIVES, policy_loss
from liger_hw.losses.preference import preference_loss, unpaired_preference_loss
from liger_hw.losses.preference_formulas import PAIR_LOSSES, UNPAIRED_LOSSES, Answers, Pairs
from liger_lab.bench.peers import OURS

TORCH, LIGER = "torch", "liger"
BETA = 0.1


@dataclass(frozen=True)
class LossSizes:
    """The sizes of a batch and of the output layer.

    Attributes:
        sequences: sequences of the batch.
        length: tokens of a sequence.
        long: tokens of a sequence for DPO.
        features: hidden size.
        narrow: hidden size of the models of distillation.
        classes: vocabulary.
        few: vocabulary of multi-token prediction.
    """

    sequences: int
    length: int
    long: int
    features: int
    narrow: int
    classes: int
    few: int


REAL = LossSizes(8, 1024, 2048, 4096, 2048, 128256, 32000)  # of Llama-3-8B and 3.2-1B
SMALL = LossSizes(4, 12, 16, 24, 16, 515, 300)  # for a CPU


@dataclass(frozen=True)
class LossCase:
    """One loss at one shape.

    Attributes:
        op: its name in the table.
        label: rows (or sequences and their length), features, classes.
        make: (device, dtype) -> its tensors; trained ones require a gradient.
        providers: provider -> function of these tensors that returns the loss.
        products: positions of (x, weight) of each linear layer among the tensors.
        plain_bytes: an estimate of the memory that plain torch needs.
    """

    op: str
    label: str
    make: Callable
    providers: dict
    products: tuple
    plain_bytes: int


def cases(texts=(), sizes=REAL) -> list[LossCase]:
    """Return the losses whose name or label contains one of `texts`; by default all.

    Raises:
        ValueError: no loss remains.
    """
    load_all()
    pairs, policy, distillation = partial(_pairs, sizes), partial(_policy, sizes), partial(_distillation, sizes)
    every = [
        pairs("DPO", "sigmoid", "DPO", long=True),
        pairs("DPO", "sigmoid", None, long=True, chunk_memory=2**30),
        pairs("CPO", "sigmoid", "CPO", reference=False, alpha=1.0),
        pairs("SimPO", "simpo", "SimPO", reference=False, average=True, alpha=1.0),
        pairs("ORPO", "orpo", "ORPO", reference=False, average=True, alpha=1.0),
        _answers(sizes, "KTO", "kto", "KTO", {"kl": 0.1}),
        _answers(sizes, "BCO", "bco", None, {"delta": 0.1}),
        distillation("jsd", None),
        distillation("jsd", "JSD", hard=0.5),
        distillation("kl", None),
        distillation("tvd", None),
        distillation("cosine", "CosineSimilarity", hard=0.5),
        _offline(sizes, 64),
        _offline(sizes, None),
        policy("GRPO", "grpo"),
        policy("GRPO", "grpo", liger=False, chunk_memory=2**30),
        policy("GRPO, reference by hidden states", "grpo", by_hidden_states=True, liger=False),
        policy("GSPO", "grpo", level="sequence"),
        *(policy(name.upper(), name, liger=False) for name in OBJECTIVES if name != "grpo"),
        *(_divergence(sizes, op) for op in ("jsd", "kl_div", "tvd")),
        _selected(sizes, linear=True),
        _selected(sizes, linear=False),
        _multi_token(sizes),
    ]
    words = [text.lower() for text in texts]
    selected = [case for case in every if not words or any(w in f"{case.op} {case.label}".lower() for w in words)]
    if not selected:
        names = dict.fromkeys(case.op for case in every)
        raise ValueError(f"LOSSES: got {', '.join(texts)}, allowed: parts of {', '.join(names)}")
    return selected


def _tensor(*shape, grad=False, scale=1.0):
    return lambda device, dtype: torch.randn(shape, device=device, dtype=dtype).mul_(scale).requires_grad_(grad)


def _tokens(classes, *shape):
    return lambda device, dtype: torch.randint(classes, shape, device=device)


def _layer(*rows, features, classes, grad=True):
    """Make hidden states and a weight whose logits have variance 1."""
    return _tensor(*rows, features, grad=grad), _tensor(classes, features, grad=grad, scale=features**-0.5)


def _case(name, sizes, makers, providers, products=((0, 1),), note="", values=14):
    """Make a `LossCase`.

    Args:
        sizes: factors of the rows, features, classes.
        values: bytes that plain torch holds for each logit.
    """

    def make(device, dtype):
        return tuple(maker(device, dtype) for maker in makers)

    *rows, classes = sizes
    logits = torch.Size(rows if len(rows) == 1 else rows[:-1]).numel() * classes
    providers = {name: function for name, function in providers.items() if function}
    return LossCase(name, "x".join(map(str, sizes)) + note, make, providers, products, values * logits)


def _chunks(memory):
    """Return our option and its note in the label."""
    return ({}, "") if memory is None else ({"chunk_memory": memory}, f", chunks of {memory / 2**30:.3g} GiB")


def _by_liger(name, **options):
    """Make a function that imports a loss of liger_kernel.chunked_loss at its first call."""
    modules = []

    def call(*args, **named):
        if not modules:
            from liger_kernel import chunked_loss

            modules.append(getattr(chunked_loss, f"LigerFusedLinear{name}Loss")(**options))
        loss = modules[0](*args, **named)
        return loss[0] if isinstance(loss, tuple) else loss

    return call


def _log_probs(x, weight, tokens):
    return F.linear(x, weight).float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def _pairs(
    sizes, name, loss_type, liger, long=False, reference=True, average=False, alpha=0.0, chunk_memory=None
):  # fmt: skip
    length = sizes.long if long else sizes.length
    shape, layer = (sizes.sequences, length), {"features": sizes.features, "classes": sizes.classes}
    makers = [*_layer(*shape, **layer), _tokens(sizes.classes, *shape)]
    makers += _layer(*shape, **layer, grad=False) if reference else ()
    ours, note = _chunks(chunk_memory)

    def fused(x, weight, tokens, ref_x=None, ref_weight=None):
        return preference_loss(
            x, weight, tokens, None, loss_type, BETA, alpha=alpha, average_log_prob=average, ref_x=ref_x,
            ref_weight=ref_weight, **ours,
        ).loss  # fmt: skip

    def plain(x, weight, tokens, ref_x=None, ref_weight=None):
        log_probs = _log_probs(x, weight, tokens)
        answers = log_probs.mean(-1) if average else log_probs.sum(-1)
        with torch.no_grad():
            ref_log_probs = (
                torch.zeros_like(answers) if ref_x is None else _log_probs(ref_x, ref_weight, tokens).sum(-1)
            )
        loss = PAIR_LOSSES[loss_type](Pairs(*answers.chunk(2), *ref_log_probs.chunk(2)), BETA, 0.0).mean()
        return loss - alpha * log_probs[: sizes.sequences // 2].mean() if alpha else loss

    peer = liger and _by_liger(liger, beta=BETA)
    providers = {
        OURS: fused, TORCH: plain,
        LIGER: peer and (lambda x, weight, tokens, *ref: peer(weight, x, tokens, None, *ref)),
    }  # fmt: skip
    products = ((0, 1), (3, 4)) if reference else ((0, 1),)
    return _case(name, (*shape, sizes.features, sizes.classes), makers, providers, products, note)


def _answers(sizes, name, loss_type, liger, point):
    shape, layer = (sizes.sequences, sizes.length), {"features": sizes.features, "classes": sizes.classes}

    def preferences(device, dtype):
        return torch.arange(sizes.sequences, device=device) % 2 == 0

    makers = [
        *_layer(*shape, **layer),
        _tokens(sizes.classes, *shape),
        preferences,
        *_layer(*shape, **layer, grad=False),
    ]

    def fused(x, weight, tokens, preferred, ref_x, ref_weight):
        return unpaired_preference_loss(
            x, weight, tokens, preferred, None, loss_type, BETA, ref_x=ref_x, ref_weight=ref_weight, **point
        ).loss

    def plain(x, weight, tokens, preferred, ref_x, ref_weight):
        answers = _log_probs(x, weight, tokens).sum(-1)
        with torch.no_grad():
            reference = _log_probs(ref_x, ref_weight, tokens).sum(-1)
        return UNPAIRED_LOSSES[loss_type](Answers(answers, reference, preferred), BETA, **point).mean()

    peer = liger and _by_liger(liger, beta=BETA, use_ref_model=True)

    def by_liger(x, weight, tokens, preferred, ref_x, ref_weight):
        kl = torch.full((), 0.1, device=x.device)
        return peer(x, weight, tokens, None, preferred, ref_x, ref_weight, None, kl)

    providers = {OURS: fused, TORCH: plain, LIGER: by_liger if liger else None}
    return _case(name, (*shape, sizes.features, sizes.classes), makers, providers, ((0, 1), (4, 5)))


def _policy(sizes, name, loss_type, level="token", by_hidden_states=False, liger=True, chunk_memory=None):
    shape, layer = (sizes.sequences, sizes.length), {"features": sizes.features, "classes": sizes.classes}
    options = {"loss_type": loss_type, "importance_sampling_level": level}
    options |= {"epsilon_high": 2.0} if loss_type == "cispo" else {}
    ours, note = _chunks(chunk_memory)

    def old_log_probs(device, dtype):
        return torch.randn(shape, device=device) * 0.01 - 0.5 - torch.tensor(float(sizes.classes)).log().item()

    makers = [*_layer(*shape, **layer), _tokens(sizes.classes, *shape), _tensor(sizes.sequences), old_log_probs]
    makers += _layer(*shape, **layer, grad=False) if by_hidden_states else [old_log_probs]

    def fused(x, weight, tokens, advantages, old, *ref):
        ref = {"ref_x": ref[0], "ref_weight": ref[1]} if by_hidden_states else {"ref_log_probs": ref[0]}
        return policy_loss(x, weight, tokens, advantages, None, None, old, **ref, **options, **ours).loss

    def plain(x, weight, tokens, advantages, old, *ref):
        log_probs = _log_probs(x, weight, tokens)
        with torch.no_grad():
            ref = _log_probs(*ref, tokens) if by_hidden_states else ref[0]
        log_r, a = log_probs - old, advantages[:, None].float()
        r = (log_r.mean(-1, keepdim=True) if level == "sequence" else log_r).exp()
        if loss_type == "cispo":
            loss = -r.detach().clamp(max=2.0) * a * log_probs
        elif loss_type == "sapo":
            tau = torch.where(a > 0, 1.0, 1.05)
            loss = -torch.sigmoid(tau * (r - 1)) * 4 / tau * a
        elif loss_type == "vespo":
            log_w = log_r.detach().sum(-1, keepdim=True).clamp(-18.420680743952367, 20.0)
            k, slope = torch.where(a >= 0, 2.0, 3.0), torch.where(a >= 0, 3.0, 2.0)
            loss = -torch.exp(slope + k * log_w - slope * log_w.exp()) * a * log_probs
        else:
            loss = -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
        loss = loss + 0.04 * (torch.exp(ref - log_probs) - (ref - log_probs) - 1)
        return loss.mean() * (sizes.length if loss_type == "luspo" else 1)

    peer = liger and _by_liger("GRPO", max_completion_length=sizes.length, **options)

    def by_liger(x, weight, tokens, advantages, old, *ref):
        ref = {"ref_input": ref[0], "ref_weight": ref[1]} if by_hidden_states else {"ref_per_token_logps": ref[0]}
        return peer(x, weight, tokens, torch.ones_like(tokens), advantages, old_per_token_logps=old, **ref)

    providers = {OURS: fused, TORCH: plain, LIGER: by_liger if liger else None}
    products = ((0, 1), (5, 6)) if by_hidden_states else ((0, 1),)
    return _case(name, (*shape, sizes.features, sizes.classes), makers, providers, products, note)


def _distillation(sizes, soft_loss, liger, hard=0.0):
    rows, layer = sizes.sequences * sizes.length, {"features": sizes.narrow, "classes": sizes.classes}
    makers = [*_layer(rows, **layer), *_layer(rows, **layer, grad=False), _tokens(sizes.classes, rows)]
    weights = {"hard_weight": hard, "soft_weight": 1 - hard}

    def fused(x, weight, teacher_x, teacher_weight, labels):
        return distillation_loss(x, weight, teacher_x, teacher_weight, labels, soft_loss=soft_loss, **weights).loss

    def plain(x, weight, teacher_x, teacher_weight, labels):
        logits = F.linear(x, weight).float()
        with torch.no_grad():
            teacher_logits = F.linear(teacher_x, teacher_weight).float()
        loss = (1 - hard) * soft_rows(logits, teacher_logits, soft_loss, 0.5, 1.0).mean()
        return loss + hard * F.cross_entropy(logits, labels) if hard else loss

    # the peer's beta is a factor of its cosine loss
    peer = liger and _by_liger(
        liger, weight_hard_loss=hard, weight_soft_loss=1 - hard, beta=1.0 if soft_loss == "cosine" else 0.5
    )

    def by_liger_jsd(x, weight, teacher_x, teacher_weight, labels):
        from liger_kernel.transformers import functional

        return functional.liger_fused_linear_jsd(x, weight, teacher_x, teacher_weight, labels)

    providers = {OURS: fused, TORCH: plain, LIGER: peer or (by_liger_jsd if soft_loss == "jsd" else None)}
    name = f"distillation, {soft_loss}" + (" and labels" if hard else "")
    products = (0, 1), (2, 3)
    return _case(name, (rows, sizes.narrow, sizes.classes), makers, providers, products, values=40)


def _offline(sizes, k):
    """Make the case of stored log-probabilities of `k` tokens and the rest, or of all."""
    rows = sizes.sequences * sizes.length

    def teacher(device, dtype):
        log_p = torch.randn(rows, sizes.classes, device=device, dtype=dtype).log_softmax(-1)
        return log_p if k is None else log_p[:, :k].contiguous()

    makers = [*_layer(rows, features=sizes.narrow, classes=sizes.classes), teacher]
    if k is not None:
        makers.append(lambda device, dtype: torch.rand(rows, sizes.classes, device=device).topk(k).indices)

    def plain(x, weight, log_p, tokens=None):
        log_q, p = F.linear(x, weight).float().log_softmax(-1), log_p.float().exp()
        if tokens is not None:
            rest = log_q.scatter(1, tokens, -torch.inf).logsumexp(1, keepdim=True)
            log_q, p = torch.cat((log_q.gather(1, tokens), rest), 1), torch.cat((p, 1 - p.sum(1, keepdim=True)), 1)
        return F.kl_div(log_q, p, reduction="batchmean")

    def by_liger(x, weight, log_p):
        from liger_kernel.transformers import functional

        return functional.liger_fused_linear_kl_div(x, weight, log_p.exp())

    name = "offline distillation, " + ("all tokens" if k is None else f"top {k}")
    providers = {OURS: offline_distillation_loss, TORCH: plain, LIGER: by_liger if k is None else None}
    return _case(name, (rows, sizes.narrow, sizes.classes), makers, providers, values=24)


def _divergence(sizes, op):
    rows = sizes.sequences * sizes.length // 2

    def rows_of(grad):
        def make(device, dtype):
            log_probs = torch.randn(rows, sizes.classes, device=device, dtype=dtype).log_softmax(-1)
            probabilities = op == "tvd" or (op == "kl_div" and not grad)
            return (log_probs.exp() if probabilities else log_probs).requires_grad_(grad)

        return make

    def plain(x, y):
        if op == "kl_div":
            return F.kl_div(x, y, reduction="batchmean")
        if op == "tvd":
            return (x - y).abs().sum(-1).mean() / 2
        log_m = ((x.exp() + y.exp()) / 2).log()
        parts = (F.kl_div(log_m, z, log_target=True, reduction="batchmean") for z in (x, y))
        return sum(parts) / 2

    reduction = {} if op == "jsd" else {"reduction": "batchmean"}

    def by_liger(x, y):
        from liger_kernel.transformers import functional

        return getattr(functional, f"liger_{op}")(x, y, **reduction)

    providers = {OURS: lambda x, y: dispatch.OPS[op](x, y, **reduction), TORCH: plain, LIGER: by_liger}
    return _case(op, (rows, sizes.classes), [rows_of(True), rows_of(False)], providers, (), values=20)


def _selected(sizes, linear):
    rows = sizes.sequences * sizes.length
    name = "fused_linear_selective_log_softmax" if linear else "selective_log_softmax"
    tokens = _tokens(sizes.classes, rows)
    if linear:
        makers = [*_layer(rows, features=sizes.features, classes=sizes.classes), tokens]
        shape, plain = (rows, sizes.features, sizes.classes), _log_probs
    else:
        makers, shape = [_tensor(rows, sizes.classes, grad=True), tokens], (rows, sizes.classes)

        def plain(x, tokens):
            return x.float().log_softmax(-1).gather(-1, tokens[:, None])

    providers = {OURS: lambda *inputs: dispatch.OPS[name](*inputs).sum(), TORCH: lambda *inputs: plain(*inputs).sum()}
    return _case(name, shape, makers, providers, ((0, 1),) if linear else ())


def _multi_token(sizes, heads=4):
    batch, length = 2, sizes.long
    layer = {"features": sizes.features, "classes": sizes.few}
    makers = [*_layer(heads, batch, length, **layer), _tokens(sizes.few, batch, length)]

    def by_head(loss):
        def total(x, weight, tokens):
            return sum(
                loss(x[k, :, : -k - 1].flatten(0, 1), weight, tokens[:, k + 1 :].flatten()) for k in range(heads)
            )

        return total

    def by_liger(x, weight, tokens):
        from liger_kernel.transformers import functional

        return functional.liger_fused_linear_cross_entropy(x, weight, tokens)

    providers = {
        OURS: lambda x, weight, tokens: multi_token_loss(x, weight, tokens).loss,
        TORCH: by_head(lambda x, weight, tokens: F.cross_entropy(F.linear(x, weight).float(), tokens)),
        LIGER: by_head(by_liger),
    }
    return _case("multi-token prediction", (heads, batch, length, sizes.features, sizes.few), makers, providers)
