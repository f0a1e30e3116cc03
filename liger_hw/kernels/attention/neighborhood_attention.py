r"""Attend from each position to its neighbours alone (one-dimensional neighborhood attention, arXiv:2204.07143).

    s_ij = scale q_i . k_j                                  j = i + o dilation, |o| <= size // 2, j in the sequence
    p_i  = softmax over j of s_ij
    y_i  = sum over j of p_ij v_j                           rounded once

    ds_ij = p_ij dy_i . (v_j - y_i)
    dq_i  = scale sum over j of ds_ij k_j
    dk_j  = scale sum over i of ds_ij q_i,    dv_j = sum over i of p_ij dy_i

Letters: N values of q. Traffic: forward reads q, k and v and writes y (4N), plus two fp32 values of each position and
head. Backward reads q, k, v, y and dy and writes dq, dk and dv (8N). Both are bound by memory: a program has a tile of
positions and loads the tile of each offset, which the cache has from the tiles before. Neighbours are mutual, so one
loop over the offsets makes all three gradients. No buffer is larger than q.
"""

import torch
from torch.nn import functional as F

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, raw, widen
from liger_hw.kernels._math import LOG2_E, LOWEST, in_row
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


def _validate(query, key, value, kernel_size, dilation):
    check(query.ndim == 4 and query.is_floating_point(), "query", query, "floating point (batch, heads, positions, D)")
    for name, other in (("key", key), ("value", value)):
        fits = (other.shape, other.dtype, other.device) == (query.shape, query.dtype, query.device)
        check(fits, name, other, query)
    check(kernel_size > 0 and kernel_size % 2 == 1, "kernel_size", kernel_size, "an odd number, 1 or more")
    check(dilation > 0, "dilation", dilation, "1 or more")


@op(validate=_validate)
def neighborhood_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel_size: int = 7, dilation: int = 1,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attend from each position to `kernel_size` positions around it, `dilation` apart.

    Positions beyond the ends of the sequence do not count, so those near an end have fewer neighbours. Everything is
    computed in fp32 and rounded once; gradients of query and key take the rounded result, as flash attention's do.

    Args:
        query: (batch, heads, positions, D), any D and floating dtype; plain torch computes dtypes other than fp32, fp16
            and bf16. Any strides if those of query, key and value are alike and D is contiguous, such as heads that
            are a transposed dimension; others are copied.
        key, value: like `query`.
        kernel_size: odd; the position itself and its neighbours.
        dilation: the distance between neighbours.
        scale: multiplies the scores; None means 1 / sqrt(D).

    Returns:
        Like `query`, also in the order of its dimensions in memory.

    Raises:
        ValueError: `key` or `value` is not like `query`, `kernel_size` is even, or `dilation` is not positive.

    Examples:
        >>> q = k = v = torch.rand(1, 2, 9, 16)  # (batch, heads, tokens, size)
        >>> liger_hw.neighborhood_attention(q, k, v, kernel_size=3).shape
        torch.Size([1, 2, 9, 16])
    """
    positions, reach, starts = query.shape[2], kernel_size // 2 * dilation, range(0, kernel_size * dilation, dilation)
    q = widen(query) * _scale(query, scale)
    keys, values = (F.pad(widen(x), (0, 0, reach, reach)) for x in (key, value))
    scores = torch.stack([(q * keys[:, :, start : start + positions]).sum(-1) for start in starts])
    place = torch.arange(positions, device=query.device) + torch.tensor(starts, device=query.device)[:, None] - reach
    absent = (place < 0) | (place >= positions)
    scores = scores.masked_fill(absent[:, None, None], float("-inf"))
    weights = scores.softmax(0)
    y = sum(weight[..., None] * values[:, :, start : start + positions] for weight, start in zip(weights, starts))
    rounding = (y - y.to(query.dtype)).detach().nan_to_num(0.0, 0.0, 0.0)  # 0 where fp16 overflows
    total = scores.logsumexp(0)  # adds zero to y, and to the gradients of scores the rounding of y
    y = y + (total - total.detach())[..., None] * rounding
    return y.to(query.dtype)


def _scale(query, scale):
    return max(query.shape[-1], 1) ** -0.5 if scale is None else scale


neighborhood_attention.shards(query="b h L D", key="b h L D", value="b h L D", returns="query")


@neighborhood_attention.cost
def _(query, key, value, kernel_size=7, *options, **named):
    products = kernel_size * query.numel()
    return Cost(4 * query.nbytes, 8 * query.nbytes, 4 * products, 16 * products)


@tuned
def neighborhood_attention_forward_config(cols, itemsize, device):
    return _tile(cols, itemsize, device, 8192)


@tuned
def neighborhood_attention_backward_config(cols, itemsize, device):
    # on 512 lanes, which have 128 registers each, odd widths spill (compiled for sm90)
    return _tile(cols, itemsize, device, 4096)


def _tile(cols, itemsize, device, size):
    """Return a tile of `size` bytes and at most 64 positions, 16 bytes a lane."""
    block = power_of_2(cols)
    rows = max(1, min(64, size // (itemsize * block)))
    return Config({"ROWS": rows, "COLS": block}, row_warps(rows * block, device, 16 // itemsize))


@triton.jit
def _program_tile(length, heads, ROWS: tl.constexpr):
    """Return the batch entry, head and positions of this program."""
    tiles = (length + ROWS - 1) // ROWS
    head = (tl.program_id(0) // tiles).to(tl.int64)
    return head // heads, head % heads, tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)


@triton.jit
def _load(P, row, valid, stride, cols: tl.constexpr, COLS: tl.constexpr):
    col = tl.arange(0, COLS)[None, :]
    at = P + row[:, None].to(tl.int64) * stride + col
    return tl.load(at, valid[:, None] & in_row(col, cols, COLS), other=0.0).to(tl.float32)


@triton.jit
def _store(P, row, valid, stride, value, cols: tl.constexpr, COLS: tl.constexpr):
    col = tl.arange(0, COLS)[None, :]
    tl.store(P + row[:, None].to(tl.int64) * stride + col, value, valid[:, None] & in_row(col, cols, COLS))


@triton.jit
def _load_stats(STATS, row, valid, length):
    """Return the largest score of each position and the divisor of its softmax."""
    return tl.load(STATS + row, valid, other=0.0), tl.load(STATS + length + row, valid, other=1.0)


@triton.jit(do_not_specialize=["length", "heads", "size", "dilation"])
def neighborhood_attention_forward(
    Q, K, V, Y, STATS, length, heads, batch_stride, head_stride, stride, y_batch_stride, y_head_stride, y_stride,
    size, dilation, scale, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    entry, head, row = _program_tile(length, heads, ROWS)
    start, valid = entry * batch_stride + head * head_stride, row < length
    q = _load(Q + start, row, valid, stride, cols, COLS) * (scale * LOG2_E)
    peak, total = tl.full((ROWS,), LOWEST, tl.float32), tl.zeros((ROWS,), tl.float32)
    y = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(size):
        other = row + (step - size // 2) * dilation
        present = (other >= 0) & (other < length)
        score = tl.sum(q * _load(K + start, other, present, stride, cols, COLS), 1)
        score = tl.where(present, score, float("-inf"))
        higher = tl.maximum(peak, score)
        kept, power = tl.exp2(peak - higher), tl.exp2(score - higher)
        y = y * kept[:, None] + power[:, None] * _load(V + start, other, present, stride, cols, COLS)
        total = total * kept + power
        peak = higher
    at = STATS + (entry * heads + head) * 2 * length + row
    tl.store(at, peak, valid)
    tl.store(at + length, total, valid)
    _store(Y + entry * y_batch_stride + head * y_head_stride, row, valid, y_stride, y / total[:, None], cols, COLS)


@triton.jit(do_not_specialize=["length", "heads", "size", "dilation"])
def neighborhood_attention_backward(
    Q, K, V, Y, STATS, DY, DQ, DK, DV, length, heads, batch_stride, head_stride, stride, y_batch_stride, y_head_stride,
    y_stride, dy_batch_stride, dy_head_stride, dy_stride, size, dilation, scale, cols: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    entry, head, row = _program_tile(length, heads, ROWS)
    start, valid = entry * batch_stride + head * head_stride, row < length
    y_at, dy_at = entry * y_batch_stride + head * y_head_stride, entry * dy_batch_stride + head * dy_head_stride
    stats = STATS + (entry * heads + head) * 2 * length
    if DQ is not None:
        q = _load(Q + start, row, valid, stride, cols, COLS) * (scale * LOG2_E)
        y, dy = _load(Y + y_at, row, valid, y_stride, cols, COLS), _load(DY + dy_at, row, valid, dy_stride, cols, COLS)
        peak, total = _load_stats(stats, row, valid, length)
    if DK is not None or DV is not None:
        k, v = _load(K + start, row, valid, stride, cols, COLS), _load(V + start, row, valid, stride, cols, COLS)
    dq, dk = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    dv = tl.zeros((ROWS, COLS), tl.float32)
    for step in range(size):
        other = row + (step - size // 2) * dilation
        present = (other >= 0) & (other < length)
        if DQ is not None:  # these positions attend to the others
            other_k = _load(K + start, other, present, stride, cols, COLS)
            p = tl.exp2(tl.sum(q * other_k, 1) - peak) / total
            along = tl.sum(dy * (_load(V + start, other, present, stride, cols, COLS) - y), 1)
            dq += tl.where(present, p * along, 0.0)[:, None] * other_k
        if DK is not None or DV is not None:  # the others attend to these positions
            other_q = _load(Q + start, other, present, stride, cols, COLS) * (scale * LOG2_E)
            other_dy = _load(DY + dy_at, other, present, dy_stride, cols, COLS)
            other_peak, other_total = _load_stats(stats, other, present, length)
            p = tl.where(present, tl.exp2(tl.sum(other_q * k, 1) - other_peak) / other_total, 0.0)
            dv += p[:, None] * other_dy
            if DK is not None:
                along = tl.sum(other_dy * (v - _load(Y + y_at, other, present, y_stride, cols, COLS)), 1)
                dk += (p * along)[:, None] * other_q
    if DQ is not None:
        _store(DQ + y_at, row, valid, y_stride, dq * scale, cols, COLS)
    if DK is not None:
        _store(DK + y_at, row, valid, y_stride, dk / LOG2_E, cols, COLS)
    if DV is not None:
        _store(DV + y_at, row, valid, y_stride, dv, cols, COLS)


def _with_equal_strides(*tensors):
    """Return tensors with the same strides, D contiguous, and the first three strides."""
    strides = tensors[0].stride()
    if strides[3] != 1 or any(x.stride() != strides for x in tensors):
        tensors = [x.contiguous() for x in tensors]
    return *tensors, tensors[0].stride()[:3]


def _empty_results(query):
    y = torch.empty_like(query)
    y = y if y.stride(3) == 1 else query.new_empty(query.shape)
    batch, heads, length, _ = query.shape
    return y, query.new_empty((batch, heads, 2, length), dtype=torch.float32)


@raw(_empty_results)
def _neighborhood_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel_size: int, dilation: int, scale: float,
    *, y, stats,
):  # fmt: skip
    """Compute y and, for the backward, statistics of each position and head, in fp32.

    They are the largest score, base 2, and the divisor of the softmax.
    """
    batch, heads, length, cols = query.shape
    config = neighborhood_attention_forward_config(cols, query.element_size(), device_of(query))
    q, k, v, strides = _with_equal_strides(query, key, value)
    programs = batch * heads * -(-length // config["ROWS"]) if cols else 0
    launch(
        neighborhood_attention_forward, (programs, 1, 1), config,
        q, k, v, y, stats, length, heads, *strides, *y.stride()[:3], kernel_size, dilation, scale, cols,
    )  # fmt: skip


def _empty_gradients(y, query_grad, key_grad, value_grad):
    return tuple(torch.empty_like(y) if needed else None for needed in (query_grad, key_grad, value_grad))


@_neighborhood_attention_forward.backward(_empty_gradients)
def _neighborhood_attention_backward(
    query, key, value, y, stats, dy, kernel_size, dilation, scale, *, dquery, dkey, dvalue
):
    batch, heads, length, cols = query.shape
    config = neighborhood_attention_backward_config(cols, query.element_size(), device_of(query))
    (q, k, v, strides), (dy, dy_strides) = _with_equal_strides(query, key, value), _with_equal_strides(dy)
    programs = batch * heads * -(-length // config["ROWS"]) if cols else 0
    launch(
        neighborhood_attention_backward, (programs, 1, 1), config, q, k, v, y, stats, dy, dquery, dkey, dvalue,
        length, heads, *strides, *y.stride()[:3], *dy_strides, kernel_size, dilation, scale, cols,
    )  # fmt: skip


@neighborhood_attention.register("triton")
def _(query, key, value, kernel_size, dilation, scale):
    return _neighborhood_attention_forward.apply(query, key, value, kernel_size, dilation, _scale(query, scale))
