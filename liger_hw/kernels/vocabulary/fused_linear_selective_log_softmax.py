r"""Compute log-probabilities of tokens from a linear layer's input, without all logits in memory.

    logits = x W^T + b           a chunk of rows at a time, in one buffer that every chunk uses
    log_probs, entropy, lse, *_ = selective_log_softmax(logits, tokens)
    dx = dlogits W,   dW = dlogits^T x,   db = sum over rows of dlogits

The backward recomputes each chunk's logits and writes their gradient over them, so the incoming gradient may depend on
all rows. Letters: N rows of H features, V columns. Operations: 2NVH in the forward; 2NVH for each of logits, dx and dW
in the backward. Memory beside the gradients: one chunk of logits.
"""

import functools

import torch

from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, raw
from liger_hw.kernels.vocabulary import sharded_head
from liger_hw.kernels.vocabulary._products import linear
from liger_hw.kernels.vocabulary.chunked_head import ChunkedHead, MiB, Plan, gradient_memory, prepare_head, wide_dtype
from liger_hw.kernels.vocabulary.cross_entropy import formula as ce_formula
from liger_hw.kernels.vocabulary.selective_log_softmax import formula, kernels
from liger_hw.kernels.vocabulary.vocabulary_parallel import SelectedRows


@op
def fused_linear_selective_log_softmax(
    x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None = None,
    temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0, ignore_index: int = -100,
    chunk_memory: float = 512 * MiB, return_entropy: bool = False, return_lse: bool = False,
    group: "torch.distributed.ProcessGroup | None" = None, logits_dtype: torch.dtype | None = None,
    return_is_top1: bool = False, return_mean_logits: bool = False, return_log_sum_sq_probs: bool = False,
    invariant: bool = False, counted_rows: int | None = None, accum_dtype: torch.dtype | None = None,
):  # fmt: skip
    """Compute `selective_log_softmax(F.linear(x, weight, bias), tokens)`, in memory for a chunk of the logits.

    Log-probabilities, entropy and log-sum-exp have a gradient, and a second backward is right.

    Args:
        x: (..., H), any floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        weight: (V, H) in the dtype of `x`, or fp32 with 16 bits; under torch.autocast both are cast first, as F.linear
            does.
        tokens: (...) int64 or int32, as in `selective_log_softmax`, the token that each row predicts (already shifted).
        bias: (V,) in the dtype of `weight`, or None.
        temperature, softcap, logit_scale, ignore_index, return_entropy, return_lse: as in `selective_log_softmax`.
        chunk_memory: bytes that a chunk of logits may take. Larger is faster until the chunk holds a few thousand rows.
        group, logits_dtype: as in `fused_linear_cross_entropy`.
        return_is_top1, return_mean_logits, return_log_sum_sq_probs: also return these, of `SelectedLogProbs`, without a
            gradient. The first two read the chunk's logits once more (without the mean, those rows alone whose token
            may be the likeliest), the third once. Not of a vocabulary sharded over ranks.
        invariant: as in `fused_linear_cross_entropy`, of every result of a row and of its gradient, in any dtype.
        counted_rows, accum_dtype: as in `fused_linear_cross_entropy`; with more rows the log-probabilities are NaN.

    Returns:
        log-probabilities (...) in fp32 (fp64 for fp64 inputs); a `SelectedLogProbs` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, an option is out of its range or, on a CPU, a token.

    Examples:
        >>> hidden, head, tokens = torch.rand(3, 8), torch.rand(10, 8), torch.tensor([1, 2, 3])
        >>> log_probs = liger_hw.fused_linear_selective_log_softmax(hidden, head, tokens)
    """
    call = fused_linear_selective_log_softmax.arguments(
        x, weight, tokens, bias, temperature, softcap, logit_scale, ignore_index, chunk_memory, return_entropy,
        return_lse, group, logits_dtype, return_is_top1, return_mean_logits, return_log_sum_sq_probs, invariant,
        counted_rows, accum_dtype,
    )  # fmt: skip
    if sharded_head.needs_distribution(call):
        return sharded_head.distributed(fused_linear_selective_log_softmax, call)
    x, weight, bias, tokens, scaling = _prepare(call)
    logits = sharded_head.all_columns(linear(x, weight, bias, call.logits_dtype, call.invariant), call.group)
    statistics = formula.row_statistics(logits, tokens, scaling) if any(formula.RowStatistics.of(call)) else ()
    return formula.output_of(call, *formula.selected_rows(logits, tokens, scaling), *statistics)


def _prepare(call):
    x, weight, bias = prepare_head(call.x, call.weight, call.bias, call.chunk_memory, logits_dtype=call.logits_dtype)
    sharded_head.check_invariant(call)
    formula.check_tokens(call.tokens, x.shape[:-1], x, sharded_head.vocabulary_of(call), call.ignore_index)
    ce_formula.check_accum_dtype(call.accum_dtype)
    ce_formula.check_counted_rows(call.counted_rows, call.tokens, call.ignore_index)
    for name, asked in formula.RowStatistics.of(call)._asdict().items():
        check(call.group is None or not asked, f"return_{name}", asked, "False where ranks share the vocabulary")
    scaling = formula.Scaling.of(call.ignore_index, call.softcap, call.logit_scale, call.temperature)
    return x.reshape(-1, x.shape[-1]), weight, bias, call.tokens.reshape(-1).contiguous(), scaling


fused_linear_selective_log_softmax.shards(
    x="... H", weight="v H", bias="v", tokens="...", returns=("tokens",) * 6, reduces="v"
)


@fused_linear_selective_log_softmax.cost
def _(x, weight, *options, **named):
    inputs, product = x.nbytes + weight.nbytes, 2 * x.numel() * weight.shape[0]
    return Cost(inputs, 2 * inputs, product, 3 * product)


def row_functions(plan):
    """Return what has `forward_rows` and `backward_rows` for a chunk's logits."""
    if plan.group:
        return SelectedRows(plan)
    return kernels if plan.with_kernels else formula


def _empty_rows(x, entropy_needed, statistics):
    rows = formula.empty_rows(x, entropy_needed, wide_dtype(x))
    return *rows, *statistics.empty_rows(rows[0])


@raw(_empty_rows)
def _fused_linear_selective_log_softmax(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: torch.Tensor, scaling: formula.Scaling,
    plan: Plan, entropy_needed: bool, statistics: formula.RowStatistics,
    *, log_probs, entropy, lse, partition, is_top1, mean_logits, log_sum_sq_probs,
):  # fmt: skip
    def step(part, logits, _):
        part_results = log_probs[part], entropy[part] if entropy_needed else None, lse[part], partition[part]
        functions = row_functions(plan)
        functions.forward_rows(logits, tokens[part], scaling, *part_results)
        if any(statistics):
            rows = (row[part] for row in (is_top1, mean_logits, log_sum_sq_probs))
            functions.write_statistics(logits, tokens[part], scaling, partition[part], *statistics.asked(rows))

    ChunkedHead(x, weight, bias, plan).run(step)


@_fused_linear_selective_log_softmax.backward(gradient_memory, without_gradient="is_top1 mean_logits log_sum_sq_probs")
def _fused_linear_selective_log_softmax_backward(
    x, weight, bias, tokens, scaling, plan, entropy_needed, entropy, partition, lse_needed: bool,
    dlog_probs, dentropy, dlse, *, x_grad, weight_grad, bias_grad,
):  # fmt: skip
    def step(part, logits, _):
        incoming = dlog_probs[part], dentropy[part] if entropy_needed else None, dlse[part] if lse_needed else None
        part_statistics = entropy[part] if entropy_needed else None, partition[part]
        row_functions(plan).backward_rows(logits, tokens[part], scaling, *part_statistics, *incoming)

    return ChunkedHead(x, weight, bias, plan).gradients(step, x_grad, weight_grad, bias_grad)


def _by_counted_rows(with_kernels, call, x, weight, bias, tokens, scaling):
    """Compute a call on as many rows as may count; the others get 0."""
    factor, few, x, order = ce_formula.counted_first(
        call.counted_rows, tokens, call.ignore_index, x, torch.arange(len(tokens), device=tokens.device)
    )
    output = _on_rows(with_kernels, call._replace(tokens=few), x, weight, bias, few, scaling)
    rows = formula.SelectedLogProbs(output) if torch.is_tensor(output) else output
    log_probs, *others = (
        r if r is None else ce_formula.scatter_rows(r, order, len(tokens)).reshape(call.tokens.shape) for r in rows
    )
    log_probs = log_probs * factor.to(log_probs.dtype)
    return log_probs if torch.is_tensor(output) else formula.SelectedLogProbs(log_probs, *others)


def _by_chunks(with_kernels, call):
    if sharded_head.needs_distribution(call):
        return sharded_head.distributed(fused_linear_selective_log_softmax, call)
    prepared = _prepare(call)
    fewer = call.counted_rows is not None and call.counted_rows < call.tokens.numel()
    return (_by_counted_rows if fewer else _on_rows)(with_kernels, call, *prepared)


def _on_rows(with_kernels, call, x, weight, bias, tokens, scaling):
    """Compute a prepared call on all its rows."""
    options = scaling, Plan.of(call, with_kernels), call.return_entropy, formula.RowStatistics.of(call), call.return_lse
    return formula.output_of(call, *_fused_linear_selective_log_softmax.apply(x, weight, bias, tokens, *options))


fused_linear_selective_log_softmax.register("triton", bound=True)(functools.partial(_by_chunks, True))
fused_linear_selective_log_softmax.register("cpu", bound=True)(functools.partial(_by_chunks, False))
