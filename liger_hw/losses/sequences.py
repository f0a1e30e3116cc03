"""Losses of given tokens' log-probabilities; kernels compute these and their backward.

`token_loss` takes a formula of single tokens. `sequence_loss` takes a formula that couples the tokens of one or more
sequences: a preference between two answers, a ratio of sequences. Both go through groups of rows. A group is the
smallest set that the formula needs: a token, an answer, or a chosen answer with its rejected one. The buffer keeps the
logits of as many groups as fit `chunk_memory`. Autograd differentiates the formula by the log-probabilities, and the
kernel overwrites the logits with their gradient. If a group is larger than the buffer, the buffer keeps a part of its
logits, and the rest is computed twice.

Operations: 2NVH for each of logits, dx and dW, plus 2NVH (M - K) / M where a group has M tokens and the buffer holds
K < M of them. Memory beside the gradients: `chunk_memory`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from liger_hw._torch import is_dtensor, traced
from liger_hw.checks import check, names_arguments
from liger_hw.kernels.vocabulary.chunked_head import ChunkedHead, Gradients, prepare_head, wide_dtype
from liger_hw.kernels.vocabulary.cross_entropy.formula import counted_first, scatter_rows
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import (
    fused_linear_selective_log_softmax,
    row_functions,
)
from liger_hw.kernels.vocabulary.selective_log_softmax.formula import Scaling, check_tokens, empty_rows
from liger_hw.losses.engine import (
    CHUNK_MEMORY,
    UNSCALED,
    Head,
    check_result,
    detached,
    gradients_of,
    refuse_captured,
    slice_rows,
    with_gradients,
)


@names_arguments
def token_loss(
    formula: Callable, x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None = None,
    rows: Sequence = (), temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, with_entropy: bool = False, chunk_memory: float = CHUNK_MEMORY,
    logits_dtype: torch.dtype | None = None, invariant: bool = False, counted_rows: int | None = None,
    accum_dtype: torch.dtype | None = None,
):  # fmt: skip
    """Sum `formula(log_probs, entropy, *rows)` over all rows, and return its other outputs by row.

    Args:
        formula: (log-probabilities (M,) in fp32, entropy (M,) or None, the same M rows of each of `rows`) ->
            (values (M,) to be summed, *others (M,) to be kept without a gradient). A torch function; a row's outputs
            must not depend on other rows.
        x: (N, H), any floating dtype. weight: (V, H) and bias: (V,) or None, in the dtype of `x`, or fp32 with 16 bits.
        tokens: (N,) int64 or int32, of each row of `x` (already shifted). At `ignore_index` log-probability and entropy
            are 0 and have no gradient.
        rows: constants: tensors of N rows, or None.
        temperature, softcap, logit_scale: as in `selective_log_softmax`.
        with_entropy: whether `formula` takes the entropy.
        chunk_memory: bytes that a chunk of logits may take.
        logits_dtype, invariant, accum_dtype: as in `fused_linear_cross_entropy`.
        counted_rows: the most rows whose token is not `ignore_index`, as there. `formula` also gets the other rows.

    Returns:
        (sum (), *others (N,)).

    Raises:
        ValueError: shapes, dtypes or devices do not fit; `formula` returns another shape, or uses a further tensor that
            requires grad; on a CPU, a token is outside the vocabulary (elsewhere the loss is then NaN).
        RuntimeError: a second backward.

    Examples:
        >>> hidden, head, tokens = torch.rand(3, 8), torch.rand(10, 8), torch.tensor([1, 2, 3])
        >>> loss, *_ = liger_hw.token_loss(lambda log_probs, entropy: (-log_probs,), hidden, head, tokens)
    """
    x, weight, bias = prepare_head(x, weight, bias, chunk_memory, flat=True, logits_dtype=logits_dtype)
    check_tokens(tokens, x.shape[:1], x, len(weight), ignore_index)
    rows = detached(rows)
    scaling = Scaling.of(ignore_index, softcap, logit_scale, temperature)
    factor, taken_tokens, taken_x, order, *taken_rows = counted_first(
        counted_rows, tokens, ignore_index, x, torch.arange(len(x), device=x.device), *rows
    )

    def sum_values(log_probs, entropy, part):
        by_token = (row if row is None else row.reshape(-1) for row in (log_probs, entropy))
        outputs = formula(*by_token, *slice_rows(taken_rows, part))
        check(isinstance(outputs, (tuple, list)), "the result of formula", outputs, "a tuple of tensors (M,)")
        for output in outputs:
            check_result("formula", output, (log_probs.numel(),), "a value for each row")
        values, *others = outputs
        return values.sum(), *others

    head = Head(taken_x, weight, bias, UNSCALED, chunk_memory, accum_dtype, logits_dtype, invariant)
    groups = _Groups(1, len(taken_x), 1)
    value, _, _, *others = _by_groups("token_loss", sum_values, head, taken_tokens, groups, scaling, with_entropy)
    if len(taken_x) == len(x):
        return value, *others
    zeros = x.new_zeros(len(x), dtype=wide_dtype(x))
    rest, *left_out = (row.detach() for row in formula(zeros, zeros if with_entropy else None, *rows))
    others = [row.index_copy(0, order, new) for row, new in zip(left_out, others)]
    others = (row * factor.to(row.dtype) if row.is_floating_point() else row for row in others)
    return value * factor.to(value.dtype) + rest.index_fill(0, order, 0).sum(), *others


@names_arguments
def sequence_loss(
    formula: Callable, x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, bias: torch.Tensor | None = None,
    parts: int = 1, temperature: float = 1.0, softcap: float | None = None, logit_scale: float = 1.0,
    ignore_index: int = -100, with_entropy: bool = False, chunk_memory: float = CHUNK_MEMORY,
    logits_dtype: torch.dtype | None = None, invariant: bool = False, counted_rows: int | None = None,
    accum_dtype: torch.dtype | None = None,
):  # fmt: skip
    """Sum `formula(log_probs, entropy, groups)` over groups of sequences, in one chunk's memory.

    Args:
        formula: (log-probabilities (parts, k, T) in fp32, entropy (parts, k, T) or None, slice of k of the G groups) ->
            the sum of their losses, a scalar. A torch function; a group's loss must not depend on other groups.
        x: (parts G, T, H), any floating dtype: the first sequences of all groups, then the second ones, and so on.
        weight: (V, H) and bias: (V,) or None, in the dtype of `x`, or fp32 with 16 bits.
        tokens: (parts G, T) int64 or int32, of each row of `x` (already shifted). At `ignore_index` log-probability and
            entropy are 0 and have no gradient.
        parts: number of sequences in a group.
        temperature, softcap, logit_scale: as in `selective_log_softmax`.
        with_entropy: whether `formula` takes the entropy.
        chunk_memory: bytes that a chunk of logits may take.
        logits_dtype: as in `fused_linear_cross_entropy`.
        invariant: as there, of log-probabilities and entropy, and of the gradient of x as far as `formula` computes a
            group's gradient with the same bits beside other groups.
        counted_rows, accum_dtype: as there. With `counted_rows` all groups go to `formula` at once; rows beyond those
            whose logits fit `chunk_memory` cost a product more.

    Returns:
        (sum (), log-probabilities (parts G, T), entropy (parts G, T) or None), the last two without a gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; `formula` returns another shape, or uses a further tensor that
            requires grad; on a CPU, a token is outside the vocabulary (elsewhere the loss is then NaN).
        RuntimeError: a second backward.

    Examples:
        >>> hidden, head, tokens = torch.rand(2, 5, 8), torch.rand(10, 8), torch.randint(10, (2, 5))
        >>> def formula(log_probs, entropy, groups):
        ...     return -log_probs.sum((0, 2)).tanh().sum()
        >>> loss, *_ = liger_hw.sequence_loss(formula, hidden, head, tokens)
    """
    x, weight, bias = prepare_head(x, weight, bias, chunk_memory, logits_dtype=logits_dtype)
    check(x.ndim == 3, "x", x, "floats (sequences, T, H)")
    check_tokens(tokens, x.shape[:-1], x, len(weight), ignore_index)
    check(parts > 0 and len(tokens) % parts == 0, "parts", parts, f"a divisor of the {len(tokens)} sequences")
    scaling, (count, length) = Scaling.of(ignore_index, softcap, logit_scale, temperature), tokens.shape
    groups = by_fill = _Groups(parts, count // parts, length)
    factor, taken_tokens, x, order = counted_first(
        counted_rows, tokens.reshape(-1), ignore_index, x.reshape(count * length, x.shape[-1]),
        torch.arange(tokens.numel(), device=tokens.device),
    )  # fmt: skip
    if len(x) < tokens.numel():  # their sequences are unknown to the host
        by_fill = _Groups(1, 1, len(x))

    def whole(row):
        count = tokens.numel()
        return row if row is None or row.numel() == count else scatter_rows(row.reshape(-1), order, count)

    def sum_groups(log_probs, entropy, part):
        if by_fill is not groups:
            part = slice(0, groups.count)
            log_probs, entropy = groups.select(map(whole, (log_probs, entropy)), part)
        value = formula(log_probs, entropy, part)
        check_result("formula", value, (), "the sum of the groups' losses")
        return (value,)

    head = Head(x, weight, bias, UNSCALED, chunk_memory, accum_dtype, logits_dtype, invariant)
    value, *by_token = _by_groups("sequence_loss", sum_groups, head, taken_tokens, by_fill, scaling, with_entropy)
    if by_fill is not groups:
        value, by_token = value * factor.to(value.dtype), [row if row is None else row * factor for row in by_token]
    return value, *(row if row is None else row.reshape(tokens.shape) for row in map(whole, by_token))


class _Groups(NamedTuple):
    """The order of rows: all groups' first sequences, then their second ones, and so on.

    Attributes:
        parts: sequences in a group.
        count: groups.
        length: rows of a sequence.
    """

    parts: int
    count: int
    length: int

    def select(self, tensors, groups):
        """Return (parts, k, length) of a slice of k groups, for each tensor or None."""
        return [x if x is None else x.reshape(self)[:, groups] for x in tensors]


class _Fill(NamedTuple):
    """Groups that share the buffer at one time.

    Attributes:
        groups: slice of the groups.
        recomputed, kept: slices of rows. The buffer keeps the logits of `kept`; those of `recomputed` are computed
            twice.
    """

    groups: slice
    recomputed: list
    kept: list


def _by_groups(op, formula, head, tokens, groups, scaling, with_entropy):
    """Sum a formula over groups of rows.

    Args:
        op: name of the caller's op, for errors.
        formula: (log-probabilities (parts, k, length), entropy of the same shape or None, slice of k groups) ->
            (sum (), *others (k,)).
        head: a `Head` of (parts groups length) rows. tokens: (parts groups length,).
        groups: `_Groups`. scaling: a `Scaling`, in place of that of the head.

    Returns:
        (sum (), log-probabilities by row, entropy by row or None, *others (groups,)), all but the sum without a
        gradient.
    """
    tokens = tokens.contiguous()
    # ranks that share the vocabulary exchange statistics of each row, and sum the gradient of x
    plan = None if is_dtensor(head.weight) else head.plan()
    if plan is None:
        ignore_index, softcap, logit_scale, temperature = scaling
        log_probs, entropy, *_ = fused_linear_selective_log_softmax(
            head.x, head.weight, tokens, head.bias, temperature, softcap, logit_scale, ignore_index, head.chunk_memory,
            with_entropy, True, logits_dtype=head.logits_dtype, invariant=head.invariant, accum_dtype=head.accum_dtype,
        )  # fmt: skip
        every = slice(0, groups.count)
        value, *others = formula(*groups.select((log_probs, entropy), every), every)
        return value, *(row if row is None else row.detach() for row in (log_probs, entropy, *others))

    records, depends = torch.is_grad_enabled(), []

    def compute(needs_grad):
        chunks = ChunkedHead(*head[:3], plan, group=groups.parts * groups.length)
        return _Computation(formula, chunks, tokens, groups, scaling, with_entropy, needs_grad, records, depends).run()

    value, log_probs, *logged = with_gradients(op, compute, *head[:3], plan, depends)
    return value, log_probs, *(logged if with_entropy else (None, *logged))


class _Computation:
    """Compute a formula and the gradients of its sum, fill by fill.

    Args:
        formula, tokens, groups, scaling, with_entropy: of `_by_groups`.
        head: the `ChunkedHead`, whose buffer holds a fill's logits, then their gradient.
        needs_grad: whether x, weight and bias need a gradient.
        records: whether autograd records the caller's call, which then may need a gradient of another tensor.
        depends: of `with_gradients`.
    """

    def __init__(self, formula, head, tokens, groups, scaling, with_entropy, needs_grad, records, depends):
        self.records, self.depends = records, depends
        self.formula, self.head, self.tokens, self.groups, self.scaling = formula, head, tokens, groups, scaling
        self.fills, self.needs_grad = _fills(groups, head.rows), any(needs_grad)
        slices = sum(len(fill.recomputed) + len(fill.kept) for fill in self.fills)
        self.gradients = Gradients(head, needs_grad, slices, in_forward=True)
        self.functions = row_functions(head.plan)
        log_probs, entropy, lse, partition = empty_rows(head.x, with_entropy, wide_dtype(head.x))
        entropy = entropy if with_entropy else None
        self.statistics, self.by_row = (log_probs, entropy, lse, partition), (log_probs, entropy)
        self.grads = [row if row is None else torch.empty_like(row) for row in self.by_row]

    def run(self):
        """Return (sum, log-probabilities, entropy if needed, *others), and the gradients."""
        values, *others = zip(*(self._run_fill(fill) for fill in self.fills))
        logged = [row for row in self.by_row if row is not None]
        logged += [torch.cat(rows) for rows in others]
        return (torch.stack(values).sum(), *logged), self.gradients.finished()

    def _run_fill(self, fill):
        """Return the formula's outputs for a fill's groups, and add to the gradients."""
        for part in fill.recomputed:
            self._forward(part, self.head.logits(part))
        at, kept = 0, []
        for part in fill.kept:
            kept.append(self.head.logits(part, at))
            self._forward(part, kept[-1])
            at += part.stop - part.start
        outputs = self._differentiate(fill.groups)
        if self.needs_grad:
            for part, logits in zip(fill.kept, kept):
                self._backward(part, logits)
            for part in fill.recomputed:
                self._backward(part, self.head.logits(part))
        return outputs

    def _forward(self, part, logits):
        self.functions.forward_rows(logits, self.tokens[part], self.scaling, *slice_rows(self.statistics, part))

    def _backward(self, part, logits):
        _, entropy, _, partition = self.statistics
        rows = slice_rows((entropy, partition, *self.grads), part)
        self.functions.backward_rows(logits, self.tokens[part], self.scaling, *rows)
        self.gradients.add(part, logits)

    def _differentiate(self, groups):
        """Return the formula's outputs for a slice of the groups; keep its gradient for `_backward`."""
        selected = self.groups.select(self.by_row, groups)
        leaves = [row if row is None else row.detach().requires_grad_(self.needs_grad) for row in selected]
        if not self.needs_grad:  # a formula may write to its arguments
            leaves = [row if row is None else row.clone() for row in leaves]
        with torch.set_grad_enabled(self.records):
            value, *others = self.formula(*leaves, groups)
        if self.records and not traced(value):
            refuse_captured("formula", value, leaves)
        self.depends.append(value.requires_grad)
        if self.needs_grad:
            grads = gradients_of(value, [leaf for leaf in leaves if leaf is not None])
            if self.gradients.scales:
                factor = self.gradients.factor(*(grad * bound for grad, bound in zip(grads, self._slope_bounds())))
                grads = [grad * factor for grad in grads]
            for row, grad in zip(self.groups.select(self.grads, groups), grads):
                row.copy_(grad)
        return [output.detach() for output in (value, *others)]

    def _slope_bounds(self):
        """Return bounds of the slopes of log-probability and entropy by a logit."""
        bound = abs(self.scaling.logit_scale / self.scaling.temperature)
        # a softcap's slope is at most 1; the entropy's has p |log p + H| <= 1 + log V, as H <= log V
        return bound, bound * (1 + math.log(len(self.head.weight)))


def _fills(groups, size) -> list[_Fill]:
    """Plan fills of `size` rows: as many whole groups as fit, or part of one."""
    parts, count, length = groups
    at_once = max(size // (parts * length), 1)
    fills = []
    for start in range(0, count, at_once):
        stop = min(start + at_once, count)
        rows = [slice((j * count + start) * length, (j * count + stop) * length) for j in range(parts)]
        fills.append(_Fill(slice(start, stop), *_split(rows, size)))
    return fills


def _split(rows, size):
    """Cut slices of rows: pieces of at most `size` rows, then the last `size`."""
    recomputed, kept, rows_over = [], [], sum(part.stop - part.start for part in rows) - size
    for part in rows:
        start = part.start
        while start < part.stop and rows_over > 0:
            stop = min(start + min(size, rows_over), part.stop)
            recomputed.append(slice(start, stop))
            rows_over -= stop - start
            start = stop
        if start < part.stop:
            kept.append(slice(start, part.stop))
    return recomputed, kept
