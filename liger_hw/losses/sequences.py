"""Losses that couple the tokens of a sequence or of several: a preference between two answers, a ratio of sequences.

A group of sequences is the least that such a loss can be computed of: a chosen answer and its rejected one, or a single
answer. The logits of as many groups as fit `chunk_memory` are kept until the loss has told their log-probabilities'
gradient, and become their gradient in their place. Of a group that does not fit as a whole what fits is kept, and the
rest is made once more.

Operations: 2NVH for each of logits, dx and dW, and 2NVH (M - K) / M for groups of M tokens in memory for K < M. Memory
beside the gradients: `chunk_memory`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from liger_hw.checks import check, names_arguments
from liger_hw.kernels.fused_linear_selective_log_softmax import (
    Plan,
    chunk_layout,
    fused_linear_selective_log_softmax,
    row_functions,
)
from liger_hw.kernels.linear_chunks import Gradients, logits_buffer, prepare_linear, wide_dtype, write_logits
from liger_hw.kernels.selective_log_softmax import Scaling, check_tokens, empty_outputs
from liger_hw.losses.chunked import CHUNK_MEMORY, serving, with_gradients


class _Fill(NamedTuple):
    """What the buffer is filled with at once.

    Attributes:
        groups: slice of the groups.
        dropped, kept: slices of rows whose logits are made again, and of those whose logits stay.
    """

    groups: slice
    dropped: list
    kept: list


@names_arguments
def sequence_loss(
    formula: Callable, x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None = None,
    parts: int = 1, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, with_entropy: bool = False, chunk_memory: float = CHUNK_MEMORY,
):  # fmt: skip
    """Sum of `formula(log_probs, entropy, groups)` over groups of sequences, with the memory of one chunk of logits.

    Args:
        formula: (log-probabilities (parts, k, T) in fp32, entropy (parts, k, T) or None, slice of k of the G groups) ->
            their sum, a scalar. An ordinary torch function, in which a group depends on nothing but itself.
        x: (parts G, T, H), any floating dtype: the first sequences of all groups, then the second ones, and so on.
        weight: (V, H) and bias: (V,) or None, in the dtype of `x`.
        tokens: (parts G, T) int64 or int32. At `ignore_index` log-probability and entropy are 0 and have no gradient.
        parts: sequences of a group.
        temperature, softcap, logit_scale: as in `selective_log_softmax`.
        with_entropy: whether `formula` wants the entropy.
        chunk_memory: bytes that a chunk of logits may take.

    Returns:
        (sum (), log-probabilities (parts G, T), entropy (parts G, T) or None), the last two without a gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        RuntimeError: a second backward.
    """
    x, weight, bias = prepare_linear(x, weight, bias, chunk_memory)
    check(x.ndim == 3, "x", x, "floats (sequences, T, H)")
    check_tokens(tokens, x.shape[:-1], x)
    check(parts > 0 and len(tokens) % parts == 0, "parts", parts, f"a divisor of the {len(tokens)} sequences")
    groups, length = tokens.shape[0] // parts, tokens.shape[1]
    with_kernels = serving(x, weight, bias)
    if with_kernels is None:
        log_probs, entropy, _ = fused_linear_selective_log_softmax(
            x, weight, tokens, bias, temperature, softcap, logit_scale, ignore_index, chunk_memory, with_entropy, True
        )
        grouped = [row if row is None else row.reshape(parts, groups, length) for row in (log_probs, entropy)]
        value = formula(*grouped, slice(0, groups))
        return value, *(row if row is None else row.detach() for row in (log_probs, entropy))
    functions = row_functions(Plan(chunk_memory, with_kernels))
    scaling = Scaling.of(ignore_index, softcap, logit_scale, temperature)
    shape, x, tokens = tokens.shape, x.reshape(-1, x.shape[-1]), tokens.reshape(-1).contiguous()

    def compute(wanted):
        size, stride = chunk_layout(x, weight, chunk_memory)
        if parts * length * stride * x.element_size() <= chunk_memory:  # a CPU's chunks are smaller than allowed
            size = max(size, parts * length)
        fills = _plan(parts, groups, length, size)
        buffer = logits_buffer(x, weight.shape[0], size, stride)[:, : weight.shape[0]]
        count = sum(len(fill.dropped) + len(fill.kept) for fill in fills)
        gradients = Gradients(x, weight, bias, wanted, count, False)
        log_probs, entropy, lse, partition = empty_outputs(x, len(x), with_entropy, wide_dtype(x))
        entropy = entropy if with_entropy else None
        values = []

        def logits_of(part, at):
            logits = buffer[at : at + part.stop - part.start]
            write_logits(x[part], weight, bias, logits)
            return logits

        def forward(part, logits):
            found = (row if row is None else row[part] for row in (log_probs, entropy, lse, partition))
            functions.forward_rows(logits, tokens[part], scaling, *found)

        for fill in fills:
            for part in fill.dropped:
                forward(part, logits_of(part, 0))
            at, kept = 0, []
            for part in fill.kept:
                kept.append(logits_of(part, at))
                forward(part, kept[-1])
                at += part.stop - part.start
            leaves = [
                row.reshape(parts, groups, length)[:, fill.groups].detach().requires_grad_(any(wanted))
                for row in (log_probs, entropy) if row is not None
            ]  # fmt: skip
            with torch.set_grad_enabled(any(wanted)):
                value = formula(*leaves, *[None] * (2 - len(leaves)), fill.groups)
            values.append(value.detach())
            if not any(wanted):
                continue
            incoming = []
            for row in torch.autograd.grad(value, leaves, materialize_grads=True):
                whole = torch.empty_like(log_probs)
                whole.reshape(parts, groups, length)[:, fill.groups] = row
                incoming.append(whole)

            def backward(part, logits, incoming=incoming):
                of_rows = entropy if entropy is None else entropy[part], partition[part]
                functions.backward_rows(logits, tokens[part], scaling, *of_rows, *(row[part] for row in incoming))
                gradients.add(part, logits)

            for part, logits in zip(fill.kept, kept):
                backward(part, logits)
            for part in fill.dropped:
                backward(part, logits_of(part, 0))
        logged = (row.reshape(shape) for row in (log_probs, entropy) if row is not None)
        return (torch.stack(values).sum(), *logged), gradients.finished()

    value, *logged = with_gradients(compute, x, weight, bias, with_kernels)
    return value, *logged, *[None] * (2 - len(logged))


def _plan(parts, groups, length, size) -> list[_Fill]:
    """Fills of a buffer for `size` rows of logits: as many whole groups as fit, or else a part of one."""
    at_once = max(size // (parts * length), 1)
    fills = []
    for start in range(0, groups, at_once):
        stop = min(start + at_once, groups)
        rows = [slice((j * groups + start) * length, (j * groups + stop) * length) for j in range(parts)]
        fills.append(_Fill(slice(start, stop), *_split(rows, size)))
    return fills


def _split(rows, size):
    """Cut slices of rows in two: pieces of at most `size` rows from the front, and the last `size` rows."""
    dropped, kept, further = [], [], sum(part.stop - part.start for part in rows) - size
    for part in rows:
        start = part.start
        while start < part.stop and further > 0:
            stop = min(start + min(size, further), part.stop)
            dropped.append(slice(start, stop))
            further -= stop - start
            start = stop
        if start < part.stop:
            kept.append(slice(start, part.stop))
    return dropped, kept
