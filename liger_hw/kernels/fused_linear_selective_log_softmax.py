r"""Log-probabilities of given tokens from a linear layer's input, where the logits never exist all at once.

    logits = x W^T + b           a chunk of rows at a time, in one buffer that every chunk uses
    log_probs, entropy, lse = selective_log_softmax(logits, tokens)
    dx = dlogits W,   dW = dlogits^T x,   db = sum over rows of dlogits

The backward makes each chunk's logits again and turns them into their gradient in place, so that what comes in may
depend on all rows at once. Letters: N rows of H features, V columns. Operations: 2NVH in the forward; 2NVH for each of
logits, dx and dW in the backward. Memory beside the gradients: one chunk of logits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_hw.backends import device_of
from liger_hw.dispatch import Cost, Function, op, raw
from liger_hw.kernels.linear_chunks import (
    Gradients,
    MiB,
    chunk_rows,
    empty_gradients,
    logits_in_chunks,
    prepare_linear,
    wide_dtype,
)
from liger_hw.kernels.selective_log_softmax import (
    Scaling,
    check_tokens,
    empty_outputs,
    kernels,
    outcome,
    plain,
    selected_rows,
)


class Plan(NamedTuple):
    """How to go through the rows, in the order in which raw functions take it."""

    chunk_memory: int
    with_kernels: bool


@op
def fused_linear_selective_log_softmax(
    x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100,
    chunk_memory: float = 512 * MiB, return_entropy: bool = False, return_lse: bool = False,
):  # fmt: skip
    """`selective_log_softmax(F.linear(x, weight, bias), tokens)`, in memory for a chunk of the logits.

    Everything returned has a gradient, and a second backward is right.

    Args:
        x: (..., H), any floating dtype; plain torch computes others than fp32, fp16 and bf16.
        weight: (V, H) in the dtype of `x`; under torch.autocast both are cast first, as F.linear does.
        tokens: (...) int64 or int32, as in `selective_log_softmax`.
        bias: (V,) in the dtype of `x`, or None.
        temperature, softcap, logit_scale, ignore_index, return_entropy, return_lse: as in `selective_log_softmax`.
        chunk_memory: bytes that a chunk of logits may take. Larger is faster until the chunk holds a few thousand rows.

    Returns:
        log-probabilities (...) in fp32 (fp64 for fp64 inputs); a `SelectedLogProbs` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range.
    """
    x, weight, bias = prepare_linear(x, weight, bias, chunk_memory)
    check_tokens(tokens, x.shape[:-1], x)
    scaling = Scaling.of(ignore_index, softcap, logit_scale, temperature)
    logits = torch.nn.functional.linear(x, weight, bias).reshape(-1, weight.shape[0])
    rows = (row.reshape(tokens.shape) for row in selected_rows(logits, tokens.reshape(-1), scaling))
    return outcome(*rows, return_entropy, return_lse)


@fused_linear_selective_log_softmax.cost
def _(x, weight, *options, **named):
    inputs, product = x.nbytes + weight.nbytes, 2 * x.numel() * weight.shape[0]
    return Cost(inputs, 2 * inputs, product, 3 * product)


def row_functions(plan):
    """The module whose `forward_rows` and `backward_rows` work on a chunk's logits."""
    return kernels if plan.with_kernels else plain


def linear_chunks(x, weight, bias, chunk_memory, buffers=1, whole=False):
    """How many chunks there are, and an iterator over their slices of rows and logits, all in one buffer.

    A row of logits begins at a 16-byte boundary whatever the vocabulary. `buffers` is how many times the logits of a
    chunk take memory; `whole` makes one chunk, as part of another's.
    """
    size, stride = chunk_layout(x, weight, chunk_memory, buffers)
    size = x.shape[0] if whole else size
    return -(-x.shape[0] // size), logits_in_chunks(x, weight, bias, size, stride)


def chunk_layout(x, weight, chunk_memory, buffers=1):
    """Rows of a chunk, and elements from one row of its logits to the next."""
    vector = 16 // x.element_size()
    stride = -(-weight.shape[0] // vector) * vector
    return chunk_rows(x.shape[0], int(buffers * stride * x.element_size()), chunk_memory, device_of(x)), stride


def _fake_forward(x, weight, bias, tokens, *options):
    return empty_outputs(x, x.shape[0], options[-1], wide_dtype(x))


@raw(_fake_forward)
def _fused_linear_selective_log_softmax(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor, ignore_index: int,
    softcap: float | None, logit_scale: float, temperature: float, chunk_memory: int, with_kernels: bool,
    entropy_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    outputs = log_probs, entropy, lse, partition = empty_outputs(x, x.shape[0], entropy_wanted, wide_dtype(x))
    scaling, plan = Scaling(ignore_index, softcap, logit_scale, temperature), Plan(chunk_memory, with_kernels)
    for part, logits in linear_chunks(x, weight, bias, chunk_memory)[1]:
        found = log_probs[part], entropy[part] if entropy_wanted else None, lse[part], partition[part]
        row_functions(plan).forward_rows(logits, tokens[part], scaling, *found)
    return outputs


def _fake_backward(x, weight, bias, *options):
    return empty_gradients(x, weight, bias, options[-1])


@raw(_fake_backward)
def _fused_linear_selective_log_softmax_backward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor, entropy: torch.Tensor,
    partition: torch.Tensor, dlog_probs: torch.Tensor, dentropy: torch.Tensor | None, dlse: torch.Tensor | None,
    ignore_index: int, softcap: float | None, logit_scale: float, temperature: float, chunk_memory: int,
    with_kernels: bool, wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    scaling, plan = Scaling(ignore_index, softcap, logit_scale, temperature), Plan(chunk_memory, with_kernels)
    count, chunks = linear_chunks(x, weight, bias, chunk_memory)
    gradients = Gradients(x, weight, bias, wanted, count, False)
    for part, logits in chunks:
        incoming = (grad if grad is None else grad[part] for grad in (dlog_probs, dentropy, dlse))
        of_rows = entropy[part] if dentropy is not None else None, partition[part]
        row_functions(plan).backward_rows(logits, tokens[part], scaling, *of_rows, *incoming)
        gradients.add(part, logits)
    return gradients.finished()


class FusedLinearSelectiveLogSoftmaxFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tokens, scaling, plan, outputs_wanted, wanted):
        log_probs, entropy, lse, partition = _fused_linear_selective_log_softmax(
            x, weight, bias, tokens, *scaling, *plan, outputs_wanted[0]
        )
        ctx.save_for_backward(x, weight, bias, tokens, entropy, partition)
        ctx.options = scaling, plan, outputs_wanted, wanted
        return log_probs, entropy, lse

    @staticmethod
    def backward(ctx, dlog_probs, dentropy, dlse):
        scaling, plan, (entropy_wanted, lse_wanted), wanted = ctx.options
        incoming = dlog_probs, dentropy if entropy_wanted else None, dlse if lse_wanted else None
        gradients = _fused_linear_selective_log_softmax_backward(*ctx.saved_tensors, *incoming, *scaling, *plan, wanted)
        return *(g if w else None for g, w in zip(gradients, wanted)), *[None] * 5


def wanted_gradients(*tensors):
    """Of which tensors somebody wants a gradient; `needs_input_grad` knows nothing of no_grad."""
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)


def _chunked(with_kernels):
    """The op, chunk by chunk: with Triton kernels, or in plain torch."""

    def implementation(
        x, weight, tokens, bias=None, temperature=1.0, softcap=None, logit_scale=1.0, ignore_index=-100,
        chunk_memory=512 * MiB, return_entropy=False, return_lse=False,
    ):  # fmt: skip
        x, weight, bias = prepare_linear(x, weight, bias, chunk_memory)
        check_tokens(tokens, x.shape[:-1], x)
        scaling, shape = Scaling.of(ignore_index, softcap, logit_scale, temperature), tokens.shape
        x, tokens = x.reshape(-1, x.shape[-1]), tokens.reshape(-1).contiguous()
        plan = Plan(int(chunk_memory), with_kernels)
        rows = FusedLinearSelectiveLogSoftmaxFunction.apply(
            x, weight, bias, tokens, scaling, plan, (return_entropy, return_lse), wanted_gradients(x, weight, bias)
        )
        rows = (row.reshape(shape) if row.numel() == tokens.numel() else row for row in rows)
        return outcome(*rows, return_entropy, return_lse)

    return implementation


fused_linear_selective_log_softmax.register("triton")(_chunked(with_kernels=True))
fused_linear_selective_log_softmax.register("cpu")(_chunked(with_kernels=False))
