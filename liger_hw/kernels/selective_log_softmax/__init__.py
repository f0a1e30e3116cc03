r"""Log-probabilities of given tokens, from logits: what alignment and reinforcement learning need of a model's output.

    z    = softcap tanh(logit_scale x / softcap) / temperature         softcap None: z = logit_scale x / temperature
    lse  = log sum_j exp(z_j),   p_j = exp(z_j - lse)
    log_prob = z_y - lse,        entropy = -sum_j p_j log p_j

    dz_j = dlog_prob ([j = y] - p_j) - dentropy p_j (log p_j + entropy) + dlse p_j
    dx_j = dz_j logit_scale / temperature (1 - (z_j temperature / softcap)^2)

Letters: N rows of V columns, token y. Traffic: the forward reads the logits (NV), the backward reads them and writes
the gradient (2NV), over them if asked to. Rows to ignore are not read. Exponentials are powers of two, with log2(e)
folded into the scale of the logits.
"""

from typing import NamedTuple

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import Cost, Function, check, op, raw, widen
from liger_hw.kernels.cross_entropy.formula import check_kernel_dtype
from liger_hw.kernels.cross_entropy.kernels import (
    LN_2,
    LOWEST,
    _alignment,
    _body_pointer,
    _edge,
    _in_body,
    _score,
    _split,
)
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


class SelectedLogProbs(NamedTuple):
    """What the selective log-softmax ops return when more than the log-probabilities is asked for.

    Attributes:
        log_probs: log-probability of each row's token.
        entropy: of each row's distribution, in nats; None unless asked for.
        lse: log-sum-exp of each row's scaled logits; None unless asked for.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    lse: torch.Tensor | None = None


class Scaling(NamedTuple):
    """What happens to a row of logits before the softmax, in the order in which raw functions and kernels take it."""

    ignore_index: int
    softcap: float | None
    logit_scale: float
    temperature: float

    @classmethod
    def of(cls, ignore_index, softcap, logit_scale, temperature):
        """From a caller's numbers; raises ValueError for those that are out of range."""
        check(temperature > 0, "temperature", temperature, "a positive number")
        check(softcap is None or softcap > 0, "softcap", softcap, "None or a positive number")
        softcap = None if softcap is None else float(softcap)
        return cls(int(ignore_index), softcap, float(logit_scale), float(temperature))


def check_tokens(tokens, shape, like):
    fits = tokens.dtype in (torch.int64, torch.int32) and tokens.shape == shape and tokens.device == like.device
    check(fits, "tokens", tokens, f"int64 or int32 of shape {tuple(shape)} on {like.device}")


def outcome(log_probs, entropy, lse, return_entropy, return_lse):
    if not (return_entropy or return_lse):
        return log_probs
    return SelectedLogProbs(log_probs, entropy if return_entropy else None, lse if return_lse else None)


def selected_rows(logits, tokens, scaling):
    """The definition: log-probability, entropy and log-sum-exp of rows of logits (N, V)."""
    ignored = tokens == scaling.ignore_index
    outside = ~ignored & ((tokens < 0) | (tokens >= logits.shape[-1]))
    scaled = widen(logits).masked_fill(ignored[:, None], 0) * scaling.logit_scale
    z = scaled if scaling.softcap is None else scaling.softcap * torch.tanh(scaled / scaling.softcap)
    z = z / scaling.temperature
    log_p = torch.log_softmax(z, -1)
    picked = log_p.gather(1, torch.where(ignored | outside, 0, tokens).long()[:, None])[:, 0]
    picked = torch.where(outside, float("nan"), picked)
    p = log_p.exp()
    entropy = -torch.where(p > 0, p * log_p, 0).sum(-1)
    return tuple(torch.where(ignored, 0, row) for row in (picked, entropy, torch.logsumexp(z, -1)))


@op
def selective_log_softmax(
    logits, tokens, temperature=1.0, softcap=None, logit_scale=1.0, ignore_index=-100, return_entropy=False,
    return_lse=False, in_place=False,
):  # fmt: skip
    """`log_softmax(logits, -1).gather(-1, tokens)`, without the log-softmax in memory.

    Everything returned has a gradient.

    Args:
        logits: (..., V), any floating dtype; any stride between rows of a (N, V) view costs no copy.
        tokens: (...) int64 or int32. A value outside [0, V) that is not `ignore_index` makes that row's log-probability
            and gradient NaN: nothing is read out of bounds, and the host waits for no check.
        temperature: the logits are divided by it, last.
        softcap: logits become `softcap * tanh(logits / softcap)` first (Gemma2ForCausalLM), after `logit_scale`.
        logit_scale: logits are multiplied by it first, in fp32 (CohereForCausalLM).
        ignore_index: rows with this token have log-probability, entropy, lse and gradient 0, whatever their logits.
        return_entropy: also the entropy of each row.
        return_lse: also the log-sum-exp of each row's scaled logits.
        in_place: the backward writes the gradient over `logits`, which the caller must own: it takes no memory, and the
            logits are lost. Under torch.compile memory is the compiler's to plan, and this changes nothing.

    Returns:
        log-probabilities (...) in fp32 (fp64 for fp64 logits); a `SelectedLogProbs` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range. The kernels take fp32, fp16
            and bf16 logits.
        RuntimeError: a second backward through an `in_place` call.
    """
    logits, flat, scaling = _prepare(logits, tokens, temperature, softcap, logit_scale, ignore_index)
    rows = (row.reshape(tokens.shape) for row in selected_rows(logits, flat, scaling))
    return outcome(*rows, return_entropy, return_lse)


@selective_log_softmax.cost
def _(logits, *options, **named):
    read = written = logits.nbytes
    done = 4 * logits.numel()
    return Cost(read, read + written, done, done)


def _prepare(logits, tokens, temperature, softcap, logit_scale, ignore_index):
    check(logits.ndim >= 1 and logits.is_floating_point() and logits.shape[-1] > 0, "logits", logits, "floats (..., V)")
    check_tokens(tokens, logits.shape[:-1], logits)
    scaling = Scaling.of(ignore_index, softcap, logit_scale, temperature)
    return logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1), scaling


@tuned
def selective_log_softmax_forward_config(cols, itemsize, device):
    stages, values = 3 if device.async_copy else 1, 8
    block = min(power_of_2(cols), device.max_threads * min(values, device.registers // 4))
    while stages > 1 and block * stages * itemsize > device.shared_memory // 2:
        block //= 2
    return Config({"COLS": block, "STAGES": stages}, row_warps(block, device, per_lane=values))


@tuned
def selective_log_softmax_backward_config(cols, itemsize, device):
    block = min(power_of_2(cols), 8192)
    return Config({"COLS": block}, row_warps(block, device, per_lane=16))


@triton.jit
def _scaled(x, softcap, logit_scale, temperature):
    """The logits that the softmax sees, in units of ln 2."""
    return _score(x, logit_scale, softcap)[0] * (1.0 / temperature)


@triton.jit
def _powers(z, mask, peak, total, moment, MOMENT: tl.constexpr):
    """Take one block into the running maximum, the sum of powers and the sum of powers times their exponents."""
    higher = tl.maximum(peak, tl.max(tl.where(mask, z, float("-inf")), 0))
    power = tl.where(mask, tl.exp2(z - higher), 0.0)
    if MOMENT:
        moment = (moment + (peak - higher) * total) * tl.exp2(peak - higher)
        moment += tl.where(power > 0, power * (z - higher), 0.0)
    return higher, total * tl.exp2(peak - higher) + power, moment


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def selective_log_softmax_forward(
    LOGITS, TOKENS, LOG_PROBS, ENTROPY, LSE, PARTITION, stride, misaligned, ignore_index, softcap, logit_scale,
    temperature, ALIGNED: tl.constexpr, cols: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    VECTOR: tl.constexpr = 128 // LOGITS.dtype.element_ty.primitive_bitwidth
    EDGES: tl.constexpr = not ALIGNED or cols % VECTOR != 0
    MOMENT: tl.constexpr = ENTROPY is not None
    y = tl.load(TOKENS + row)
    log_prob = tl.full((), 0.0, tl.float32)
    entropy, lse, peak, row_total = log_prob, log_prob, log_prob, log_prob + 1.0
    if y != ignore_index:
        lane = tl.arange(0, COLS)
        head, body = _split(row, stride, misaligned, cols, VECTOR, ALIGNED)
        X = LOGITS + row * stride
        BODY = _body_pointer(LOGITS, row, stride, head, misaligned, VECTOR, ALIGNED)
        inside = (y >= 0) & (y < cols)
        z_y = _scaled(tl.load(X + y, inside, other=0.0), softcap, logit_scale, temperature)
        peak = tl.full((), LOWEST, tl.float32)
        total = tl.zeros((COLS,), tl.float32)
        moment = tl.zeros((COLS,), tl.float32)
        if EDGES:
            edge, edge_mask = _edge(head, body, cols, VECTOR)
            edge_z = _scaled(tl.load(X + edge, edge_mask, other=0.0), softcap, logit_scale, temperature)
            zeros = tl.zeros((2 * VECTOR,), tl.float32)
            peak, edge_total, edge_moment = _powers(edge_z, edge_mask, peak, zeros, zeros, MOMENT)
            total = tl.where(lane == 0, tl.sum(edge_total, 0), total)
            moment = tl.where(lane == 0, tl.sum(edge_moment, 0), moment)
        for start in tl.range(0, body, COLS, num_stages=STAGES):
            at = start + lane
            mask = _in_body(at, body, cols, VECTOR, ALIGNED, COLS)
            z = _scaled(tl.load(BODY + at, mask, other=0.0), softcap, logit_scale, temperature)
            peak, total, moment = _powers(z, mask, peak, total, moment, MOMENT)
        row_total = tl.sum(total, 0)
        lse = (peak + tl.log2(row_total)) * LN_2
        log_prob = ((z_y - peak) - tl.log2(row_total)) * LN_2  # the difference first: it is exact near the peak
        log_prob = tl.where(inside, log_prob, float("nan"))
        if MOMENT:
            entropy = (tl.log2(row_total) - tl.sum(moment, 0) / row_total) * LN_2
    tl.store(LOG_PROBS + row, log_prob)
    tl.store(LSE + row, lse)
    tl.store(PARTITION + 2 * row, peak)
    tl.store(PARTITION + 2 * row + 1, row_total)
    if ENTROPY is not None:
        tl.store(ENTROPY + row, entropy)


@triton.jit
def _gradient(x, col, y, peak, log_total, entropy, of_token, of_power, of_entropy, softcap, logit_scale, temperature):
    """dx_j; the factors carry logit_scale / temperature, and those of powers 1 / total."""
    z, ratio = _score(x, logit_scale, softcap)
    z *= 1.0 / temperature
    power = tl.exp2(z - peak)
    factor = tl.zeros_like(power) + of_power
    if of_entropy is not None:
        factor -= of_entropy * tl.where(power > 0, ((z - peak) - log_total) * LN_2 + entropy, 0.0)
    dx = factor * power + tl.where(col == y, of_token, 0.0)
    if softcap is not None:
        dx *= 1.0 - ratio * ratio
    return dx


@triton.jit(do_not_specialize=["misaligned", "ignore_index"])
def selective_log_softmax_backward(
    LOGITS, TOKENS, ENTROPY, PARTITION, D_LOG_PROBS, D_ENTROPY, D_LSE, DX, stride, dx_stride, misaligned, ignore_index,
    softcap, logit_scale, temperature, ALIGNED: tl.constexpr, SAME_ALIGNMENT: tl.constexpr, cols: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    VECTOR: tl.constexpr = 128 // LOGITS.dtype.element_ty.primitive_bitwidth
    EDGES: tl.constexpr = not ALIGNED or cols % VECTOR != 0
    head, body = _split(row, stride, misaligned, cols, VECTOR, ALIGNED)
    X, D = LOGITS + row * stride, DX + row * dx_stride
    D_BODY = D + head
    if SAME_ALIGNMENT:
        D_BODY = _body_pointer(DX, row, dx_stride, head, misaligned, VECTOR, ALIGNED)
    at = part * COLS + tl.arange(0, COLS)
    mask = _in_body(at, body, cols, VECTOR, ALIGNED, COLS)
    y = tl.load(TOKENS + row)
    if y == ignore_index:
        tl.store(D_BODY + at, tl.zeros((COLS,), tl.float32), mask)
        if EDGES and part == 0:
            edge, edge_mask = _edge(head, body, cols, VECTOR)
            tl.store(D + edge, tl.zeros((2 * VECTOR,), tl.float32), edge_mask)
    else:
        peak, total = tl.load(PARTITION + 2 * row), tl.load(PARTITION + 2 * row + 1)
        scale = logit_scale / temperature
        of_token = tl.load(D_LOG_PROBS + row).to(tl.float32) * scale
        of_token = tl.where((y >= 0) & (y < cols), of_token, float("nan"))
        of_power = -of_token / total
        if D_LSE is not None:
            of_power += tl.load(D_LSE + row).to(tl.float32) * scale / total
        log_total = tl.log2(total)
        entropy = None
        of_entropy = None
        if D_ENTROPY is not None:
            entropy = tl.load(ENTROPY + row)
            of_entropy = tl.load(D_ENTROPY + row).to(tl.float32) * scale / total
        BODY = _body_pointer(LOGITS, row, stride, head, misaligned, VECTOR, ALIGNED)
        dx = _gradient(
            tl.load(BODY + at, mask, other=0.0), head + at, y, peak, log_total, entropy, of_token, of_power, of_entropy,
            softcap, logit_scale, temperature,
        )  # fmt: skip
        tl.store(D_BODY + at, dx, mask)
        if EDGES and part == 0:
            edge, edge_mask = _edge(head, body, cols, VECTOR)
            edge_dx = _gradient(
                tl.load(X + edge, edge_mask, other=0.0), edge, y, peak, log_total, entropy, of_token, of_power,
                of_entropy, softcap, logit_scale, temperature,
            )  # fmt: skip
            tl.store(D + edge, edge_dx, edge_mask)


def forward_rows(logits, tokens, scaling, log_probs, entropy, lse, partition):
    """Write what there is to know of the rows of `logits` (unit stride in a row), all in fp32.

    Args:
        log_probs, lse: (N,). entropy: (N,) or None.
        partition: (N, 2), a peak and a total, where sum_j exp(z_j) = total exp(peak); the peak in units of ln 2.
    """
    rows, cols = logits.shape
    misaligned, aligned = _alignment(logits)
    config = selective_log_softmax_forward_config(cols, logits.element_size(), device_of(logits))
    launch(
        selective_log_softmax_forward, (rows, 1, 1), config,
        logits, tokens, log_probs, entropy, lse, partition, logits.stride(0), misaligned, *scaling, aligned, cols,
    )  # fmt: skip


def backward_rows(logits, tokens, scaling, entropy, partition, dlog_probs, dentropy=None, dlse=None, dx=None):
    """Write the gradient of `logits` to `dx`, or over them; incoming gradients (N,), None where there is none."""
    dx = logits if dx is None else dx
    rows, cols = logits.shape
    misaligned, aligned = _alignment(logits)
    same = _alignment(dx)[0] == misaligned and (dx.stride(0) - logits.stride(0)) * dx.element_size() % 16 == 0
    config = selective_log_softmax_backward_config(cols, logits.element_size(), device_of(logits))
    incoming = (grad if grad is None else grad.contiguous() for grad in (dlog_probs, dentropy, dlse))
    launch(
        selective_log_softmax_backward, (rows, -(-cols // config["COLS"]), 1), config,
        logits, tokens, entropy, partition, *incoming, dx, logits.stride(0), dx.stride(0), misaligned, *scaling,
        aligned, same, cols,
    )  # fmt: skip


def empty_outputs(like, rows, entropy_wanted, dtype=torch.float32):
    """log_probs, entropy, lse and partition of rows."""
    log_probs = like.new_empty(rows, dtype=dtype)
    entropy = log_probs.new_empty(rows if entropy_wanted else 0)
    return log_probs, entropy, torch.empty_like(log_probs), log_probs.new_empty(rows, 2)


def _fake_forward(logits, tokens, *options):
    return empty_outputs(logits, logits.shape[0], options[-1])


@raw(_fake_forward)
def _selective_log_softmax(
    logits: torch.Tensor, tokens: torch.Tensor, ignore_index: int, softcap: float | None, logit_scale: float,
    temperature: float, entropy_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    outputs = log_probs, entropy, lse, partition = empty_outputs(logits, logits.shape[0], entropy_wanted)
    scaling = Scaling(ignore_index, softcap, logit_scale, temperature)
    forward_rows(logits, tokens, scaling, log_probs, entropy if entropy_wanted else None, lse, partition)
    return outputs


def _empty_gradient(logits, *options):
    """With padded rows where the logits have them, so that both are read and written in whole vectors."""
    cols, vector = logits.shape[1], 16 // logits.element_size()
    stride = cols if logits.stride(0) % vector else -(-cols // vector) * vector
    return logits.new_empty(logits.shape[0], stride)[:, :cols]


@raw(_empty_gradient)
def _selective_log_softmax_backward(
    logits: torch.Tensor, tokens: torch.Tensor, entropy: torch.Tensor, partition: torch.Tensor,
    dlog_probs: torch.Tensor, dentropy: torch.Tensor | None, dlse: torch.Tensor | None, ignore_index: int,
    softcap: float | None, logit_scale: float, temperature: float,
) -> torch.Tensor:  # fmt: skip
    dx = _empty_gradient(logits)
    scaling = Scaling(ignore_index, softcap, logit_scale, temperature)
    backward_rows(logits, tokens, scaling, entropy, partition, dlog_probs, dentropy, dlse, dx)
    return dx


@raw(mutates=["logits"])
def _selective_log_softmax_backward_in_place(
    logits: torch.Tensor, tokens: torch.Tensor, entropy: torch.Tensor, partition: torch.Tensor,
    dlog_probs: torch.Tensor, dentropy: torch.Tensor | None, dlse: torch.Tensor | None, ignore_index: int,
    softcap: float | None, logit_scale: float, temperature: float,
) -> None:  # fmt: skip
    scaling = Scaling(ignore_index, softcap, logit_scale, temperature)
    backward_rows(logits, tokens, scaling, entropy, partition, dlog_probs, dentropy, dlse)


class SelectiveLogSoftmaxFunction(Function):
    @staticmethod
    def forward(ctx, logits, tokens, scaling, entropy_wanted, lse_wanted, in_place):
        log_probs, entropy, lse, partition = _selective_log_softmax(logits, tokens, *scaling, entropy_wanted)
        ctx.logits = None
        if in_place:  # not as a saved tensor, which would be its own memory's reader of an older version
            ctx.logits, logits = logits.detach(), None
        ctx.save_for_backward(logits, tokens, entropy, partition)
        ctx.scaling, ctx.wanted, ctx.in_place = scaling, (entropy_wanted, lse_wanted), in_place
        return log_probs, entropy, lse

    @staticmethod
    def backward(ctx, dlog_probs, dentropy, dlse):
        logits, *saved = ctx.saved_tensors
        entropy_wanted, lse_wanted = ctx.wanted
        incoming = dlog_probs, dentropy if entropy_wanted else None, dlse if lse_wanted else None
        if not ctx.in_place:
            return _selective_log_softmax_backward(logits, *saved, *incoming, *ctx.scaling), *[None] * 5
        if ctx.logits is None:
            raise RuntimeError(
                "selective_log_softmax(in_place=True) has written its gradient over the logits in a first backward: a "
                "second one needs in_place=False"
            )
        logits, ctx.logits = ctx.logits, None
        _selective_log_softmax_backward_in_place(logits, *saved, *incoming, *ctx.scaling)
        torch.autograd.graph.increment_version(logits)  # whoever saved the logits for a backward must hear of it
        return logits, *[None] * 5


@selective_log_softmax.register("triton")
def _(
    logits, tokens, temperature=1.0, softcap=None, logit_scale=1.0, ignore_index=-100, return_entropy=False,
    return_lse=False, in_place=False,
):  # fmt: skip
    shape = tokens.shape
    logits, tokens, scaling = _prepare(logits, tokens, temperature, softcap, logit_scale, ignore_index)
    check_kernel_dtype("logits", logits)
    rows, cols = logits.shape
    if (cols > 1 and logits.stride(1) != 1) or (rows > 1 and logits.stride(0) < cols):
        logits = logits.contiguous()
    in_place = in_place and not torch.compiler.is_compiling()
    outputs = SelectiveLogSoftmaxFunction.apply(
        logits, tokens.contiguous(), scaling, return_entropy, return_lse, in_place
    )
    log_probs, entropy, lse = (row.reshape(shape) if row.numel() == tokens.numel() else row for row in outputs)
    return outcome(log_probs, entropy, lse, return_entropy, return_lse)
