r"""Compute divergences of a student's distribution q from a teacher's p, row by row.

    kl_div   sum_j p_j (log p_j - log q_j)                       dlog q_j = -p_j
    jsd      b KL(p, m) + (1 - b) KL(q, m),  m = b p + (1 - b) q     dlog q_j = (1 - b) q_j (log q_j - log m_j)
             b = 0: KL(p, q);  b = 1: KL(q, p)                   dlog q_j = -p_j;  q_j (log q_j - log p_j + 1)
    tvd      sum_j |q_j - p_j| / 2                               dq_j = sign(q_j - p_j) / 2

Letters: N rows of V columns of probabilities or log-probabilities. Where a gradient is wanted the forward computes it:
it reads both inputs once and writes it (3NV), and stores no loss by element. The backward multiplies it by the incoming
one unless that is 1. An fp16 gradient is kept in fp32 (2NV bytes more): a loss scale is too late for lost fp16 values.
"""

import math
from typing import NamedTuple

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_kernel_dtype
from liger_hw.dispatch import Cost, op, raw, widen
from liger_hw.dispatch.function import refuse_lost_backward
from liger_hw.kernels._logits import alignment, body_mask, body_pointer, edge_columns, row_at
from liger_hw.kernels._math import LN_2, LOG2_E
from liger_hw.kernels.vocabulary._fp16 import kept_dtype
from liger_hw.kernels.vocabulary._in_forward import GradientsInForward
from liger_hw.kernels.vocabulary.cross_entropy.formula import TARGET_DTYPES
from liger_hw.launch import launch
from liger_hw.spelling import check_known
from liger_hw.tuning import Config, power_of_2, row_warps, tuned

DIVERGENCE_KINDS = ("kl", "reverse_kl", "even_jsd", "jsd", "tvd")


class Divergence(NamedTuple):
    """Kind of a divergence, and of its inputs, for the kernel.

    Attributes:
        kind: one of DIVERGENCE_KINDS. logarithms: the inputs are log-probabilities, else the teacher's ("kl") or both
            ("tvd") are probabilities.
        beta: of "jsd". eps: the least probability whose logarithm is taken. ignore_index: of labels.
    """

    kind: str
    logarithms: bool
    beta: float = 0.0
    eps: float = 0.0
    ignore_index: int = -100


def log_probabilities(logits, temperature):
    """Compute the log-softmax of logits / temperature, with a gradient."""
    if temperature < 1:  # by which a quotient would overflow, unlike a difference of the row
        logits = logits - logits.detach().amax(-1, keepdim=True)
    return (logits / temperature).log_softmax(-1)


def elements(log_q, log_p, kind, beta):
    """Return the divergence by element, "tvd" too, of log-probabilities; 0 log 0 is 0."""
    q, p = log_q.exp(), log_p.exp()
    if kind == "kl":
        return p * torch.where(p == 0, 0, log_p - log_q)
    if kind == "reverse_kl":
        return q * torch.where(q == 0, 0, log_q - log_p)
    if kind == "tvd":
        return (q - p).abs() / 2
    log_q, log_p = (log.clamp(min=torch.finfo(log.dtype).min / 4) for log in (log_q, log_p))
    log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log(1 - beta))
    return beta * p * (log_p - log_m) + (1 - beta) * q * (log_q - log_m)


def kind_of(beta):
    """Return the kind of a generalised Jensen-Shannon divergence (arXiv:2306.13649 eq. 1); 0.5 is cheaper."""
    check(0 <= beta <= 1, "beta", beta, "0 to 1")
    return {0: "kl", 0.5: "even_jsd", 1: "reverse_kl"}.get(beta, "jsd")


def _check(x_name, x, y_name, y, labels=None, reduction="sum"):
    check(x.ndim == 2 and x.is_floating_point(), x_name, x, "floats (N, V)")
    fits = y.shape == x.shape and y.is_floating_point() and y.device == x.device
    check(fits, y_name, y, f"floats of shape {tuple(x.shape)} on {x.device}, as {x_name}")
    if labels is not None:
        fits = labels.dtype in TARGET_DTYPES and labels.shape == x.shape[:1] and labels.device == x.device
        check(fits, "labels", labels, f"int64 or int32 of shape ({x.shape[0]},) on {x.device}, one for each row")
    check_known("reduction", reduction, ("none", "sum", "mean", "batchmean"))


def _denominator(x, reduction, labels, ignore_index):
    """Return the divisor of the sum over rows, a number or a tensor."""
    if reduction == "sum":
        return 1
    rows = max(x.shape[0], 1) if labels is None else (labels != ignore_index).sum().clamp(min=1)
    return rows * max(x.shape[1], 1) if reduction == "mean" else rows


def _kept(x, labels, ignore_index):
    return x if labels is None else x.masked_fill((labels == ignore_index)[:, None], 0)


@op(validate=lambda log_q, log_p, labels: _check("log_q", log_q, "log_p", log_p, labels))
def jsd(
    log_q: torch.Tensor, log_p: torch.Tensor, beta: float = 0.5, labels: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:  # fmt: skip
    """Compute the generalised Jensen-Shannon divergence (arXiv:2306.13649 eq. 1), mean over the rows.

    Args:
        log_q: (N, V) log-probabilities of the student.
        log_p: (N, V) log-probabilities of the teacher, a constant.
        beta: weight of the teacher in the mixture: 0 for KL(p, q), 1 for KL(q, p).
        labels: (N,) int64 or int32; rows whose label is `ignore_index` do not count. None counts all.

    Returns:
        the mean over the rows that count, 0 without any, in fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes do not fit or beta is out of range.
        RuntimeError: a second backward, with the kernels.

    Examples:
        >>> p, q = torch.rand(3, 10).log_softmax(-1), torch.rand(3, 10).log_softmax(-1)
        >>> liger_hw.jsd(q, p, beta=0.5).shape
        torch.Size([])
    """
    kind = kind_of(beta)
    log_q, log_p = _kept(widen(log_q), labels, ignore_index), _kept(widen(log_p), labels, ignore_index).detach()
    rows = _kept(elements(log_q, log_p, kind, beta), labels, ignore_index).sum()
    return rows / _denominator(log_q, "batchmean", labels, ignore_index)


@op(validate=lambda log_q, target, reduction: _check("log_q", log_q, "target", target, None, reduction))
def kl_div(
    log_q: torch.Tensor, target: torch.Tensor, reduction: str = "mean", log_target: bool = False, eps: float = 1e-10
) -> torch.Tensor:
    """Compute KL(p, q) of log-probabilities q and target p, as `torch.nn.functional.kl_div`.

    Args:
        log_q: (N, V) log-probabilities of the student.
        target: (N, V) probabilities of the teacher, or with `log_target` log-probabilities; a constant.
        reduction: "batchmean" (sum over N), "sum", "mean" (sum over N V) or "none", which is (N, V).
        eps: the least probability whose logarithm is taken, without `log_target`; p log p of 0 is 0.

    Returns:
        fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes do not fit or the reduction is unknown.
        RuntimeError: a second backward, with the kernels.

    Examples:
        >>> log_q, p = torch.rand(3, 10).log_softmax(-1), torch.rand(3, 10).softmax(-1)
        >>> liger_hw.kl_div(log_q, p, reduction="batchmean").shape
        torch.Size([])
    """
    p = widen(target).detach()
    values = (
        elements(widen(log_q), p, "kl", 0)
        if log_target
        else p * (p.clamp(min=eps).log().masked_fill(p == 0, 0) - widen(log_q))
    )
    return values if reduction == "none" else values.sum() / _denominator(log_q, reduction, None, None)


@op(validate=lambda q, p, labels, reduction: _check("q", q, "p", p, labels, reduction))
def tvd(
    q: torch.Tensor, p: torch.Tensor, reduction: str = "batchmean", labels: torch.Tensor | None = None,
    ignore_index: int = -100,
) -> torch.Tensor:  # fmt: skip
    """Compute the total variation distance of probabilities, sum_j |q_j - p_j| / 2.

    Args:
        q: (N, V) probabilities of the student.
        p: (N, V) probabilities of the teacher, a constant.
        reduction: "batchmean" (sum over the rows that count), "sum", "mean" (also over V) or "none", which is (N, V).
        labels, ignore_index: as in `jsd`.

    Returns:
        fp32 (fp64 for fp64 inputs). Where q equals p the gradient is 0.

    Raises:
        ValueError: shapes do not fit or the reduction is unknown.
        RuntimeError: a second backward, with the kernels.

    Examples:
        >>> liger_hw.tvd(torch.rand(3, 10).softmax(-1), torch.rand(3, 10).softmax(-1)).shape
        torch.Size([])
    """
    values = _kept((widen(q) - widen(p).detach()).abs() / 2, labels, ignore_index)
    return values if reduction == "none" else values.sum() / _denominator(q, reduction, labels, ignore_index)


jsd.shards(log_q="N V", log_p="N V", labels="N", returns="")


@kl_div.shards
@tvd.shards
def _(call):
    x, target = call._fields[:2]
    n, v = "nv" if call.reduction in ("none", "sum") else "NV"  # a mean divides by the rows of all ranks
    rows = f"{n} {v}"
    returns = x if call.reduction == "none" else ""
    return call, {x: rows, target: rows, "returns": returns} | ({"labels": n} if x == "q" else {})


@jsd.cost
@kl_div.cost
@tvd.cost
def _(x, target, *options, **named):
    done = 8 * x.numel()
    return Cost(2 * x.nbytes + target.nbytes, x.nbytes, 2 * done, done)


@tuned
def divergence_forward_config(cols, itemsize, device):
    # A quarter of the most lanes, and 8 values of each tensor a lane, or as many as a core needs to keep enough bytes
    # in flight. On an H200 kl_div of bf16 is 3 to 10% faster with 8 than with 16.
    block = min(power_of_2(cols), device.max_threads * 2)
    per_lane = max(8, power_of_2(device.bytes_in_flight // (2 * itemsize * device.max_threads)))
    return Config({"COLS": block}, row_warps(block, device, per_lane))


@triton.jit
def _log_half(x):
    """Compute log2((1 + x) / 2), for x in [0, 1], to 1e-7.

    It takes half of the instructions of tl.log2, which serves any x and was 20 of the 55 of an element of jsd on sm_90.
    """
    y = 1.0 - x
    a = tl.fma(y, -0.00396728935, 0.00918710232)
    a = tl.fma(y, a, -0.0135817779)
    a = tl.fma(y, a, 0.00409300812)
    a = tl.fma(y, a, -0.0119269211)
    a = tl.fma(y, a, -0.0219503734)
    a = tl.fma(y, a, -0.0601715632)
    a = tl.fma(y, a, -0.180334628)
    a = tl.fma(y, a, -0.721347511)
    return y * a


@triton.jit
def logarithm_unit(KIND: tl.constexpr):
    """Return a nat in the units of `divergence_element`'s logarithms.

    They are nats where a value adds up logarithms, which could overflow in units of ln 2.
    """
    return 1.0 if KIND == "kl" or KIND == "reverse_kl" else LOG2_E


@triton.jit
def divergence_element(log_q, log_p, beta, rest_beta, KIND: tl.constexpr):
    """Return an element, its gradient by log q, and q.

    The log-probabilities are in units of `logarithm_unit`. `rest_beta` is 1 - beta, which fp32 rounds to 0 near 1.
    """
    if KIND == "tvd":
        q, p = tl.exp2(log_q), tl.exp2(log_p)
        return tl.abs(q - p) * 0.5, tl.where(q > p, 0.5 * q, tl.where(q < p, -0.5 * q, 0.0)), q
    elif KIND == "kl":
        p = tl.exp2(log_p * LOG2_E)
        return tl.where(p == 0, 0.0, p * (log_p - log_q)), -p, tl.exp2(log_q * LOG2_E)  # p > 0 would hide a NaN
    elif KIND == "reverse_kl":
        q = tl.exp2(log_q * LOG2_E)
        value = tl.where(q == 0, 0.0, q * (log_q - log_p))
        return value, value + q, q
    else:  # by the smaller probability's share of the larger: the logarithm of their mixture has no cancellation
        apart = tl.minimum(tl.abs(log_q - log_p), 200.0)  # a share of 0 in fp32; not NaN where both are -inf
        larger = tl.exp2(tl.maximum(log_q, log_p, propagate_nan=tl.PropagateNan.ALL))
        share = tl.exp2(-apart)
        q_larger = log_q >= log_p
        if KIND == "even_jsd":
            in_nats, larger_term = larger * (-0.5 * LN_2), _log_half(share)
            smaller_term = share * (larger_term + apart)
        else:
            in_nats, weight = larger * -LN_2, tl.where(q_larger, rest_beta, beta)
            rest = tl.where(q_larger, beta, rest_beta) * share
            log_mixed = tl.log2(weight + rest)
            larger_term, smaller_term = weight * log_mixed, rest * (log_mixed + apart)
        value, slope = in_nats * (larger_term + smaller_term), in_nats * tl.where(q_larger, larger_term, smaller_term)
        return value, slope, tl.where(q_larger, larger, larger * share)


@triton.jit
def _element(x, y, beta, rest_beta, eps, KIND: tl.constexpr, LOGARITHMS: tl.constexpr):
    """Return an element from the caller's x, and its gradient by x."""
    x, y = x.to(tl.float32), y.to(tl.float32)
    if LOGARITHMS:
        unit = logarithm_unit(KIND)
        value, dx, _ = divergence_element(x * unit, y * unit, beta, rest_beta, KIND)
        return value, dx
    elif KIND == "kl":
        return y * (tl.where(y == 0, 0.0, tl.log2(tl.maximum(y, eps)) * LN_2) - x), -y  # eps may be 0
    else:
        return tl.abs(x - y) * 0.5, tl.where(x > y, 0.5, tl.where(x < y, -0.5, 0.0))


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def divergence_forward(
    X, Y, LABELS, DENOMINATOR, LOSS, DX, x_stride, y_stride, dx_stride, misaligned, beta, rest_beta, eps,
    ignore_index, KIND: tl.constexpr, LOGARITHMS: tl.constexpr, ALIGNED: tl.constexpr, Y_LIKE_X: tl.constexpr,
    DX_LIKE_X: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # Y_LIKE_X, DX_LIKE_X: rows of Y, DX reach a 16-byte boundary at the same columns as rows of X
    index = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    factor = 1.0 / tl.load(DENOMINATOR).to(tl.float32)
    if LABELS is not None:  # an ignored row reads as zeros, whose divergence is 0
        counts = tl.load(LABELS + index) != ignore_index
        factor = tl.where(counts, factor, 0.0)
        readable = tl.multiple_of(tl.where(counts, cols // VECTOR * VECTOR + VECTOR, 0), VECTOR)
    row = row_at(X, index, x_stride, misaligned, cols, VECTOR, ALIGNED)
    Y_BODY = Y + (index * y_stride + row.head)
    if Y_LIKE_X:
        Y_BODY = body_pointer(Y, index, y_stride, row.head, misaligned, VECTOR, ALIGNED)
    D_BODY = row.middle
    if DX is not None:
        D_BODY = DX + (index * dx_stride + row.head)
        if DX_LIKE_X:
            D_BODY = body_pointer(DX, index, dx_stride, row.head, misaligned, VECTOR, ALIGNED)
    total = tl.zeros((COLS,), tl.float32)
    for start in range(0, row.body, COLS):
        at = start + tl.arange(0, COLS)
        mask = body_mask(row, at, cols, VECTOR, ALIGNED, COLS)
        read = mask
        if LABELS is not None:
            read = mask & (at < readable)
        x, y = tl.load(row.middle + at, read, other=0.0), tl.load(Y_BODY + at, read, other=0.0)
        value, dx = _element(x, y, beta, rest_beta, eps, KIND, LOGARITHMS)
        total += value
        if DX is not None:
            tl.store(D_BODY + at, dx * factor, mask)
    row_total = tl.sum(total, 0)
    if not ALIGNED or cols % VECTOR != 0:
        edge, edge_mask = edge_columns(row, cols, VECTOR)
        read = edge_mask
        if LABELS is not None:
            read = edge_mask & (edge < readable)
        x, y = tl.load(row.first + edge, read, other=0.0), tl.load(Y + index * y_stride + edge, read, other=0.0)
        value, dx = _element(x, y, beta, rest_beta, eps, KIND, LOGARITHMS)
        row_total += tl.sum(value, 0)
        if DX is not None:
            tl.store(DX + index * dx_stride + edge, dx * factor, edge_mask)
    tl.store(LOSS + index, row_total * factor)


def _is_aligned(x, other):
    """Tell whether rows of `other` reach a 16-byte boundary at the same columns as `x`'s."""
    same = other.dtype == x.dtype and alignment(other)[0] == alignment(x)[0]
    return same and (other.stride(0) - x.stride(0)) * x.element_size() % 16 == 0


def _empty_results(x, needs_grad):
    dx = x.new_empty(x.shape, dtype=kept_dtype(x.dtype)) if needs_grad else None
    return x.new_empty(x.shape[0], dtype=torch.float32), dx


@raw(_empty_results)
def _divergence(
    x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor | None, denominator: torch.Tensor, divergence: Divergence,
    needs_grad: bool, *, loss, dx,
):  # fmt: skip
    rows, cols = x.shape
    kind, logarithms, beta, eps, ignore_index = divergence
    config = divergence_forward_config(cols, x.element_size(), device_of(x))
    misaligned, aligned = alignment(x)
    launch(
        divergence_forward, (rows, 1, 1), config,
        x, y, labels, denominator, loss, dx, x.stride(0), y.stride(0), cols, misaligned,
        beta, 1 - beta, eps, ignore_index, kind, logarithms, aligned, _is_aligned(x, y),
        needs_grad and _is_aligned(x, dx), cols,
    )  # fmt: skip


class DivergenceFunction(GradientsInForward):
    @staticmethod
    def forward(ctx, x, y, labels, denominator, divergence, op_name, needs_grad):
        loss, dx = _divergence(x, y, labels, denominator, divergence, needs_grad)
        DivergenceFunction.keep(
            ctx, (dx,), op_name, (x.dtype,), again="call it again, or run under liger_hw.use_backend('reference')"
        )
        return loss.sum()


def _with_kernels(op_name, y_name, x, y, labels, denominator, divergence):
    check_kernel_dtype(y_name, y)
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    x, y = (t if t.stride(-1) == 1 and t.stride(0) >= t.shape[1] else t.contiguous() for t in (x, y.detach()))
    if not torch.is_tensor(denominator):
        denominator = torch.full((), denominator, dtype=torch.float32, device=x.device)
    labels = None if labels is None else labels.contiguous()
    refuse_lost_backward()
    return DivergenceFunction.apply(x, y, labels, denominator, divergence, op_name, needs_grad)


@jsd.register("triton")
def _(log_q, log_p, beta, labels, ignore_index):
    divergence = Divergence(kind_of(beta), True, float(beta), ignore_index=int(ignore_index))
    denominator = _denominator(log_q, "batchmean", labels, ignore_index)
    return _with_kernels("jsd", "log_p", log_q, log_p, labels, denominator, divergence)


@kl_div.register("triton")
def _(log_q, target, reduction, log_target, eps):
    if reduction == "none":  # which has nothing for a kernel to reduce
        return kl_div.reference(log_q, target, reduction, log_target, eps)
    denominator = _denominator(log_q, reduction, None, None)
    divergence = Divergence("kl", bool(log_target), eps=float(eps))
    return _with_kernels("kl_div", "target", log_q, target, None, denominator, divergence)


@tvd.register("triton")
def _(q, p, reduction, labels, ignore_index):
    if reduction == "none":
        return tvd.reference(q, p, reduction, labels, ignore_index)
    denominator = _denominator(q, reduction, labels, ignore_index)
    divergence = Divergence("tvd", False, ignore_index=int(ignore_index))
    return _with_kernels("tvd", "p", q, p, labels, denominator, divergence)
