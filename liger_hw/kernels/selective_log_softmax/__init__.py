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

from liger_hw.checks import check
from liger_hw.dispatch import Cost, Function, op, raw, widen
from liger_hw.kernels.cross_entropy.formula import TARGET_DTYPES
from liger_hw.kernels.selective_log_softmax.kernels import backward_rows, forward_rows


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
    fits = tokens.dtype in TARGET_DTYPES and tokens.shape == shape and tokens.device == like.device
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
    entropy = -(p * torch.where(p > 0, log_p, 0)).sum(-1)
    return tuple(torch.where(ignored, 0, row) for row in (picked, entropy, torch.logsumexp(z, -1)))


@op
def selective_log_softmax(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, return_entropy: bool = False, return_lse: bool = False,
    in_place: bool = False,
):  # fmt: skip
    """`log_softmax(logits, -1).gather(-1, tokens)`, without the log-softmax in memory.

    Everything returned has a gradient.

    Args:
        logits: (..., V), any floating dtype; plain torch computes others than fp32, fp16 and bf16. Any stride between
            rows of a (N, V) view costs no copy.
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
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range.
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
    rows, cols = logits.shape
    if (cols > 1 and logits.stride(1) != 1) or (rows > 1 and logits.stride(0) < cols):
        logits = logits.contiguous()
    in_place = in_place and not torch.compiler.is_compiling()
    outputs = SelectiveLogSoftmaxFunction.apply(
        logits, tokens.contiguous(), scaling, return_entropy, return_lse, in_place
    )
    log_probs, entropy, lse = (row.reshape(shape) if row.numel() == tokens.numel() else row for row in outputs)
    return outcome(log_probs, entropy, lse, return_entropy, return_lse)
