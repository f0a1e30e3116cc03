r"""Compute log-probabilities of given tokens from logits, for alignment and reinforcement learning.

    z    = softcap tanh(logit_scale x / softcap) / temperature         softcap None: z = logit_scale x / temperature
    lse  = log sum_j exp(z_j),   p_j = exp(z_j - lse)
    log_prob = z_y - lse,        entropy = -sum_j p_j log p_j

    dz_j = dlog_prob ([j = y] - p_j) - dentropy p_j (log p_j + entropy) + dlse p_j
    dx_j = dz_j logit_scale / temperature (1 - (z_j temperature / softcap)^2)

Letters: N rows of V columns, token y. Traffic: the forward reads the logits (NV), the backward reads them and writes
the gradient (2NV), on request over them. Ignored rows are not read. Exponentials are powers of two.
"""

import torch

from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, raw
from liger_hw.kernels._logits import empty_gradient
from liger_hw.kernels.vocabulary.selective_log_softmax import formula, kernels
from liger_hw.kernels.vocabulary.selective_log_softmax.formula import Scaling, SelectedLogProbs

__all__ = ["SelectedLogProbs", "selective_log_softmax"]


@op
def selective_log_softmax(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: float = 1.0, softcap: float | None = None,
    logit_scale: float = 1.0, ignore_index: int = -100, return_entropy: bool = False, return_lse: bool = False,
    in_place: bool = False,
):  # fmt: skip
    """Compute `log_softmax(logits, -1).gather(-1, tokens)`, without the log-softmax in memory.

    All outputs have a gradient.

    Args:
        logits: (..., V), any floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16. Any stride
            between rows of a (N, V) view costs no copy.
        tokens: (...) int64 or int32, of each row (already shifted). A value outside [0, V) other than `ignore_index` is
            an error on a CPU. Elsewhere, and in a compiled graph, it makes that row's log-probability and gradient NaN:
            nothing is read out of bounds, and the host waits for no check.
        temperature: the logits are divided by it, last.
        softcap: logits become `softcap * tanh(logits / softcap)` first (Gemma2ForCausalLM), after `logit_scale`.
        logit_scale: logits are multiplied by it first, in fp32 (CohereForCausalLM).
        ignore_index: rows with this token have log-probability, entropy, lse and gradient 0 for any logits.
        return_entropy: also return the entropy of each row.
        return_lse: also return the log-sum-exp of each row's scaled logits.
        in_place: the backward writes the gradient over `logits`. The caller must own them: they are lost, and the
            gradient takes no memory. Under torch.compile this changes nothing, as the compiler plans memory.

    Returns:
        log-probabilities (...) in fp32 (fp64 for fp64 logits); a `SelectedLogProbs` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, an option is out of its range or, on a CPU, a token.
        RuntimeError: a second backward through an `in_place` call.

    Examples:
        >>> log_probs = liger_hw.selective_log_softmax(torch.rand(3, 10), torch.tensor([1, 2, 3]))
    """
    call = selective_log_softmax.arguments(
        logits, tokens, temperature, softcap, logit_scale, ignore_index, return_entropy, return_lse, in_place,
    )  # fmt: skip
    return formula.output_of(call, *formula.selected_rows(*_prepare(call)))


def _prepare(call):
    logits, tokens = call.logits, call.tokens
    check(logits.ndim >= 1 and logits.is_floating_point() and logits.shape[-1] > 0, "logits", logits, "floats (..., V)")
    formula.check_tokens(tokens, logits.shape[:-1], logits, logits.shape[-1], call.ignore_index)
    scaling = Scaling.of(call.ignore_index, call.softcap, call.logit_scale, call.temperature)
    return logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1), scaling


selective_log_softmax.shards(logits="... V", tokens="...", returns=("tokens",) * 3)


@selective_log_softmax.cost
def _(logits, *options, **named):
    read = written = logits.nbytes
    done = 4 * logits.numel()
    return Cost(read, read + written, done, done)


@raw(lambda logits, entropy_needed: formula.empty_rows(logits, entropy_needed))
def _selective_log_softmax(
    logits: torch.Tensor, tokens: torch.Tensor, scaling: Scaling, entropy_needed: bool,
    *, log_probs, entropy, lse, partition,
):  # fmt: skip
    kernels.forward_rows(logits, tokens, scaling, log_probs, entropy if entropy_needed else None, lse, partition)


@raw(empty_gradient)
def _selective_log_softmax_backward(
    logits: torch.Tensor, tokens: torch.Tensor, scaling: Scaling, entropy: torch.Tensor, partition: torch.Tensor,
    dlog_probs: torch.Tensor, dentropy: torch.Tensor | None, dlse: torch.Tensor | None, *, dlogits,
):  # fmt: skip
    kernels.backward_rows(logits, tokens, scaling, entropy, partition, dlog_probs, dentropy, dlse, dlogits)


@raw(mutates=["logits"])
def _selective_log_softmax_backward_in_place(
    logits: torch.Tensor, tokens: torch.Tensor, scaling: Scaling, entropy: torch.Tensor, partition: torch.Tensor,
    dlog_probs: torch.Tensor, dentropy: torch.Tensor | None, dlse: torch.Tensor | None,
) -> None:  # fmt: skip
    kernels.backward_rows(logits, tokens, scaling, entropy, partition, dlog_probs, dentropy, dlse)


@_selective_log_softmax.backward()
def _(
    ctx, logits, tokens, scaling, entropy, partition, entropy_needed, lse_needed: bool, in_place: bool,
    dlog_probs, dentropy, dlse, *, logits_grad,
):  # fmt: skip
    incoming = dlog_probs, dentropy if entropy_needed else None, dlse if lse_needed else None
    if not in_place:
        return _selective_log_softmax_backward(logits, tokens, scaling, entropy, partition, *incoming)
    ctx.spent = (
        "selective_log_softmax(in_place=True) has written its gradient over the logits in a first backward: for a "
        "second one pass in_place=False"
    )
    logits = logits.detach()
    _selective_log_softmax_backward_in_place(logits, tokens, scaling, entropy, partition, *incoming)
    torch.autograd.graph.increment_version(logits)  # so that another function that saved it raises an error
    return logits


@selective_log_softmax.register("triton", bound=True)
def _(call):
    logits, tokens, scaling = _prepare(call)
    rows, cols = logits.shape
    if (cols > 1 and logits.stride(1) != 1) or (rows > 1 and logits.stride(0) < cols):
        logits = logits.contiguous()
    in_place = call.in_place and not torch.compiler.is_compiling()
    options = scaling, call.return_entropy, call.return_lse, in_place
    return formula.output_of(call, *_selective_log_softmax.apply(logits, tokens.contiguous(), *options))
