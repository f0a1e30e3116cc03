"""The engine under every loss of a linear layer: logits exist for one chunk of rows at a time, never for all.

    for each chunk of rows:  logits = x W^T + b;  value += loss(logits, rows);  gradients += those of the chunk

The gradients are made in the forward, where the logits' gradient takes their place; the backward only scales them.
`chunked_loss` takes any torch function of logits, `token_loss` any torch function of the log-probabilities of given
tokens, whose way from the logits and back is a kernel. Neither function knows of chunks: it returns a sum over its rows
(or values by row), and its rows may depend on nothing but themselves. Losses that couple the rows of a sequence, or of
two, are in `sequences`; what couples the whole batch is ordinary torch over `fused_linear_selective_log_softmax`.

Operations: 2NVH for each of logits, dx and dW. Memory beside the gradients: `chunk_memory`.
"""

from collections.abc import Callable, Sequence

import torch

from liger_hw._torch import traced
from liger_hw.checks import check, names_arguments
from liger_hw.dispatch import Function
from liger_hw.kernels.fused_linear_selective_log_softmax import (
    Plan,
    fused_linear_selective_log_softmax,
    linear_chunks,
    row_functions,
    wanted_gradients,
)
from liger_hw.kernels.linear_chunks import Gradients, MiB, prepare_linear, scale_gradients_of_linear, wide_dtype
from liger_hw.kernels.selective_log_softmax import Scaling, check_tokens, empty_outputs

CHUNK_MEMORY = 512 * MiB


class _InForward(Function):
    """The outputs of `compute(wanted)`, whose first is differentiable by the gradients that it returns besides."""

    @staticmethod
    def forward(ctx, x, weight, bias, compute, wanted, with_kernels):
        # nothing but the backward may hold them, or autograd copies what it could hand over
        (value, *logged), ctx.gradients = compute(wanted)
        ctx.wanted, ctx.with_kernels = wanted, with_kernels
        ctx.mark_non_differentiable(*logged)
        return value, *logged

    @staticmethod
    def backward(ctx, dvalue, *_):
        if ctx.gradients is None:
            raise RuntimeError(
                "a chunked loss makes its gradients in the forward, and a first backward has handed them out: for a "
                "second one call the loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        scale_gradients_of_linear(*gradients, dvalue, ctx.with_kernels)
        return *(g if w else None for g, w in zip(gradients, ctx.wanted)), *[None] * 3


def with_gradients(compute, x, weight, bias, with_kernels):
    """(value, *logged), of which the value has a gradient.

    Args:
        compute: (which of x, weight and bias want a gradient) -> ((value (), *logged), gradients of the value), all
            without a graph.
        with_kernels: whether Triton runs here.
    """
    return _InForward.apply(x, weight, bias, compute, wanted_gradients(x, weight, bias), with_kernels)


def run_chunks(step, x, weight, bias, chunk_memory, buffers, with_kernels):
    """(value, *logged) of all rows, with the gradients of the value.

    Args:
        step: (slice of rows, logits (M, V), whether a gradient is wanted) -> (value (), *logged (M,)), all without a
            graph; where one is wanted it leaves the value's gradient in the place of the logits.
        x: (N, H), N > 0. weight: (V, H). bias: (V,) or None.
        buffers: how many times the memory of a chunk's logits `step` takes, with the logits.
        with_kernels: whether Triton runs here.
    """

    def compute(wanted):
        count, chunks = linear_chunks(x, weight, bias, chunk_memory, buffers)
        gradients, outputs = Gradients(x, weight, bias, wanted, count, False), []
        for part, logits in chunks:
            outputs.append(step(part, logits, any(wanted)))
            if any(wanted):
                gradients.add(part, logits)
        value, *logged = zip(*outputs)
        return (torch.stack(list(value)).sum(), *(torch.cat(rows) for rows in logged)), gradients.finished()

    return with_gradients(compute, x, weight, bias, with_kernels)


def serving(x, *tensors):
    """Whether Triton kernels serve `x`; None where ordinary operations of torch must do: they are forced, there are no
    rows, or somebody looks on who has to see them."""
    if traced(x, *tensors) or x.numel() == 0:
        return None
    chosen = fused_linear_selective_log_softmax.choose(x.device, x.dtype)
    return None if chosen == "reference" else chosen != "cpu"


def _frozen(rows):
    return [row.detach() if torch.is_tensor(row) else row for row in rows]


def _part(rows, part):
    return [row if row is None else row[part] for row in rows]


@names_arguments
def chunked_loss(
    loss: Callable, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, rows: Sequence = (),
    chunk_memory: float = CHUNK_MEMORY, buffers: float = 4,
):  # fmt: skip
    """Sum of `loss(logits, *rows)` over all rows of `x`, with the memory of one chunk of logits.

    Args:
        loss: (logits (M, V) in the dtype of `x`, the same M rows of each of `rows`) -> their sum, a scalar. An ordinary
            torch function, differentiated by autograd.
        x: (N, H), any floating dtype. weight: (V, H) and bias: (V,) or None, in the dtype of `x`.
        rows: tensors of N rows, or None, that `loss` wants besides, as constants.
        chunk_memory: bytes that a chunk may take.
        buffers: how many times the memory of a chunk's logits `loss` and its backward take, the logits included.

    Returns:
        the sum, a scalar in the dtype that `loss` returns.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        RuntimeError: a second backward.
    """
    x, weight, bias = prepare_linear(x, weight, bias, chunk_memory, flat=True)
    check(buffers >= 1, "buffers", buffers, "at least 1")
    rows = _frozen(rows)
    for row in rows:
        check(row is None or row.shape[:1] == x.shape[:1], "rows", row, f"None or tensors of {x.shape[0]} rows")
    with_kernels = serving(x, weight, bias)
    if with_kernels is None:
        return loss(torch.nn.functional.linear(x, weight, bias), *rows)

    def step(part, logits, differentiate):
        leaf = logits.detach().requires_grad_(differentiate)
        with torch.set_grad_enabled(differentiate):
            value = loss(leaf, *_part(rows, part))
        if differentiate:
            logits.copy_(torch.autograd.grad(value, leaf)[0])
        return (value.detach(),)

    return run_chunks(step, x, weight, bias, chunk_memory, buffers, with_kernels)[0]


@names_arguments
def token_loss(
    formula: Callable, x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None = None,
    rows: Sequence = (), temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, with_entropy: bool = False, chunk_memory: float = CHUNK_MEMORY,
):  # fmt: skip
    """Sum of `formula(log_probs, entropy, *rows)` over all rows, and what else it returns by row.

    Args:
        formula: (log-probabilities (M,) in fp32, entropy (M,) or None, the same M rows of each of `rows`) ->
            (values (M,) to be summed, *others (M,) to be kept without a gradient). An ordinary torch function whose
            rows depend on nothing but themselves.
        x: (N, H), any floating dtype. weight: (V, H) and bias: (V,) or None, in the dtype of `x`.
        tokens: (N,) int64 or int32. At `ignore_index` log-probability and entropy are 0 and have no gradient.
        rows: tensors of N rows, or None, as constants.
        temperature, softcap, logit_scale: as in `selective_log_softmax`.
        with_entropy: whether `formula` wants the entropy.
        chunk_memory: bytes that a chunk of logits may take.

    Returns:
        (sum (), *others (N,)).

    Raises:
        ValueError: shapes, dtypes or devices do not fit.
        RuntimeError: a second backward.
    """
    x, weight, bias = prepare_linear(x, weight, bias, chunk_memory, flat=True)
    check_tokens(tokens, x.shape[:1], x)
    scaling, rows = Scaling.of(ignore_index, softcap, logit_scale, temperature), _frozen(rows)
    with_kernels = serving(x, weight, bias)
    if with_kernels is None:
        log_probs, entropy, _ = fused_linear_selective_log_softmax(
            x, weight, tokens, bias, temperature, softcap, logit_scale, ignore_index, chunk_memory, with_entropy, True
        )
        values, *others = formula(log_probs, entropy, *rows)
        return values.sum(), *(other.detach() for other in others)
    functions = row_functions(Plan(chunk_memory, with_kernels))
    tokens = tokens.contiguous()

    def step(part, logits, differentiate):
        log_probs, entropy, lse, partition = empty_outputs(logits, logits.shape[0], with_entropy, wide_dtype(logits))
        entropy = entropy if with_entropy else None
        functions.forward_rows(logits, tokens[part], scaling, log_probs, entropy, lse, partition)
        leaves = [row.requires_grad_(differentiate) for row in (log_probs, entropy) if row is not None]
        with torch.set_grad_enabled(differentiate):
            values, *others = formula(log_probs, entropy, *_part(rows, part))
            value = values.sum()
        if differentiate:
            grads = torch.autograd.grad(value, leaves, materialize_grads=True)
            functions.backward_rows(logits, tokens[part], scaling, entropy, partition, *grads)
        return value.detach(), *(other.detach() for other in others)

    return run_chunks(step, x, weight, bias, chunk_memory, 1, with_kernels)
