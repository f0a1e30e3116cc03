r"""Normalise and rotate queries and keys in one pass (Qwen3, Gemma 3, OLMo 2).

    rstd = 1 / sqrt(mean(x^2) + eps)                        over a head, or over all heads of a token
    y    = x rstd (w + offset)                              rounded to x's dtype
    out  = y rotated, as by rope

    dy   = dout rotated by the opposite angle
    m    = dy (w + offset)
    dx   = rstd (m - x rstd mean(m x rstd))
    dw   = sum over tokens, and over heads that share w, of dy x rstd

Letters: B sequences of T tokens, each of H heads (Hq of the queries, Hk of the keys) of D values. Traffic: forward
reads and writes q and k once, 2BT(Hq + Hk)D; backward reads q, k and both results' gradients and writes those of q and
k, 3BT(Hq + Hk)D. Each reads cos and sin once or twice a token. Bound by memory. Apart, `rms_norm` and `rope` move 4 and
5.

A program holds a tile of ROWS heads as two or three tensors. The pairs (x1, x2) rotate, `rest` is beyond rotary_dim:

    head 0      | x1  HALF | x2  HALF | rest |          rstd of each head (ROWS, 1), or
    head 1      | x1       | x2       | rest |          JOINT: the heads are one token's, and one rstd (1, 1)
    ...                                                 serves them all

    forward     one tile a program, in one grid:        | tiles of q ......... | tiles of k ... |
    backward    each program strides over all tiles of q, then of k, and sums dw of its tiles in registers
"""

from typing import NamedTuple

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_kernel_dtype
from liger_hw.dispatch import Cost, op, raw
from liger_hw.kernels._configs import norm_backward_config, widest_block
from liger_hw.kernels._math import in_row, rounded
from liger_hw.kernels._partials import ONE_PROGRAM, add_partials, partial_sums
from liger_hw.kernels._rows import contiguous
from liger_hw.kernels.attention.rope import rope, validate_rotation
from liger_hw.kernels.attention.rope.heads import empty_output, empty_outputs, heads_and_strides, heads_inside
from liger_hw.kernels.attention.rope.pairs import LAYOUTS, load_angles, load_pairs, store_pairs
from liger_hw.kernels.norms.rms_norm import CASTING_MODES, rms_norm
from liger_hw.kernels.norms.rms_norm.kernels import before_weight, rstd_of, square
from liger_hw.launch import launch
from liger_hw.spelling import check_known
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


def _validate(q, k, q_weight, k_weight, cos, sin, casting_mode, unsqueeze_dim, layout):
    validate_rotation(q, k, cos, sin, unsqueeze_dim, layout)
    check_known("casting_mode", casting_mode, CASTING_MODES)
    for name, weight, x in (("q_weight", q_weight, q), ("k_weight", k_weight, k)):
        head_dim = x.shape[3]
        fits = weight.shape in ((head_dim,), (x.shape[unsqueeze_dim] * head_dim,)) and weight.device == x.device
        check(fits, name, weight, "one value for each of a head or of all heads, on the heads' device")
    check(k_weight.dtype == q_weight.dtype, "k_weight", k_weight, "q_weight's dtype")


@op(validate=_validate)
def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama", unsqueeze_dim: int = 1,
    layout: str = "half",
):  # fmt: skip
    """Compute `rope` of `rms_norm` of queries and of keys, as Qwen3Attention does.

    Each result is rounded where `rms_norm` and then `rope` round it, so to the input's dtype between the two.

    Args:
        q: (B, Hq, T, D), or (B, T, Hq, D) with `unsqueeze_dim` 2; any strides and floating dtype, never copied. Plain
            torch computes dtypes other than fp32, fp16 and bf16.
        k: (B, Hk, T, D), or (B, T, Hk, D), with its own number of heads and dtype.
        q_weight: (D,): each head is normalised alone (Qwen3, Gemma 3). (Hq D,): all heads of a token are normalised
            together (OLMo 2). Any floating dtype.
        k_weight: (D,) or (Hk D,), in the dtype of `q_weight`.
        cos: (B or 1, T, R), R even and at most D, a value for each of the output's. A constant: it gets no gradient.
        sin: like `cos`.
        eps, offset, casting_mode: as in `rms_norm`.
        unsqueeze_dim: the dimension of `q` and `k` that counts heads, 1 or 2.
        layout: as in `rope`.

    Returns:
        (q_out, k_out): new dense tensors, shaped and typed like `q` and `k`, in the same memory order: heads of a token
        side by side if the input has them so, otherwise tokens of a head.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, `layout` or `casting_mode` is unknown, or `cos` or `sin`
            requires grad.

    Examples:
        >>> q, k, angles = torch.rand(1, 4, 5, 8), torch.rand(1, 2, 5, 8), torch.rand(1, 5, 8)
        >>> q, k = liger_hw.qk_norm_rope(q, k, torch.ones(8), torch.ones(8), angles.cos(), angles.sin())
    """
    options = eps, offset, casting_mode, unsqueeze_dim
    q, k = _normed(rms_norm.reference, q, q_weight, *options), _normed(rms_norm.reference, k, k_weight, *options)
    return rope.reference(q, k, cos, sin, unsqueeze_dim, layout)


def _normed(norm, x, weight, eps, offset, casting_mode, unsqueeze_dim):
    if not _is_joint(x, weight):
        return norm(x, weight, eps, offset, casting_mode)
    rows = (x.transpose(1, 2) if unsqueeze_dim == 1 else x).flatten(2)
    y = norm(rows, weight, eps, offset, casting_mode).unflatten(2, (-1, x.shape[3]))
    return y.transpose(1, 2) if unsqueeze_dim == 1 else y


def _is_joint(x, weight):
    """Tell whether all heads of a token are normalised together."""
    return weight.shape[0] != x.shape[3]


@qk_norm_rope.shards
def _(call):
    rule = {"q_weight": "D", "k_weight": "D", "cos": "b? t R", "sin": "b? t R", "returns": ("q", "k")}
    for name in ("q", "k"):
        heads = "h"
        if _is_joint(getattr(call, name), getattr(call, f"{name}_weight")):
            heads, rule[f"{name}_weight"] = f"H{name.upper()}", f"W{name.upper()}"
        rule[name] = f"b {heads} t D" if call.unsqueeze_dim == 1 else f"b t {heads} D"
    return call, rule


@qk_norm_rope.cost
def _(q, k, q_weight, k_weight, cos, sin, *options, **named):
    heads, rest = q.nbytes + k.nbytes, cos.nbytes + sin.nbytes
    weights, values = q_weight.nbytes + k_weight.nbytes, q.numel() + k.numel()
    rotated = 3 * values * cos.shape[-1] // q.shape[-1]
    return Cost(2 * heads + rest + weights, 3 * heads + rest + 2 * weights, 4 * values + rotated, 9 * values + rotated)


@tuned
def qk_norm_rope_forward_config(head_dim, together, itemsize, device):
    # 32 heads, 32 values a lane: within 3% of any other choice on an H200
    rows = min(32, max(1, 8192 // head_dim))
    elements = max(together, rows) * head_dim
    return Config({"ROWS": rows}, row_warps(elements, device, per_lane=32), fp_fusion=False)


@tuned
def qk_norm_rope_backward_config(head_dim, together, itemsize, device):
    # As a norm's of four tensors, because each head also reads cos and sin of its token; 16 values a lane. With 32,
    # heads of 256 values take 96 us instead of 62 on an H200 (2 x 4,096 tokens of 8 and 4 heads).
    config = norm_backward_config(head_dim, itemsize, device, read=4)
    elements = max(together, config["ROWS"]) * head_dim
    warps = row_warps(elements, device, per_lane=16)
    if together == 1:
        return Config({"ROWS": config["ROWS"], "STAGES": config["STAGES"]}, warps, programs=config.programs)
    return Config({"ROWS": config["ROWS"], "STAGES": 1}, warps, programs=max(1, 16384 // elements))


@triton.jit
def _heads_of(tile, tokens, all_tokens, heads: tl.constexpr, JOINT: tl.constexpr, ROWS: tl.constexpr):
    """Return batch, token and head of a tile's rows, and whether they exist.

    Each is (ROWS, 1) or (1, 1). A tile is any ROWS heads, or one token's where those are normalised together.
    """
    row = tl.arange(0, ROWS)[:, None]
    if JOINT:
        at, head, valid = tl.full((1, 1), tile, tl.int32), row, in_row(row, heads, ROWS)
    else:
        row += tile * ROWS
        at, head, valid = row // heads, row % heads, row < all_tokens * heads
    return (at // tokens).to(tl.int64), (at % tokens).to(tl.int64), head.to(tl.int64), valid


@triton.jit
def _load_heads(X, valid, stride, head_dim: tl.constexpr, rotary_dim: tl.constexpr, PAIRS: tl.constexpr,
                ROWS: tl.constexpr):  # fmt: skip
    """Load heads in fp32: x1, x2, and the values that are not rotated if any."""
    tiles = load_pairs(X, valid, stride, rotary_dim // 2, PAIRS, ROWS)
    if rotary_dim < head_dim:
        REST: tl.constexpr = triton.next_power_of_2(head_dim - rotary_dim)
        rest = tl.arange(0, REST)[None, :]
        mask = valid & in_row(rest, head_dim - rotary_dim, REST)
        tiles = (tiles[0], tiles[1], tl.load(X + (rotary_dim + rest) * stride, mask, other=0.0).to(tl.float32))
    return tiles


@triton.jit
def _store_heads(OUT, tiles, valid, head_dim: tl.constexpr, rotary_dim: tl.constexpr, PAIRS: tl.constexpr,
                 ROWS: tl.constexpr):  # fmt: skip
    store_pairs(OUT, tiles[0], tiles[1], valid, rotary_dim // 2, PAIRS, ROWS)
    if rotary_dim < head_dim:
        REST: tl.constexpr = triton.next_power_of_2(head_dim - rotary_dim)
        rest = tl.arange(0, REST)[None, :]
        tl.store(OUT + rotary_dim + rest, tiles[2], valid & in_row(rest, head_dim - rotary_dim, REST))


@triton.jit
def _load_weight(W, heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr, JOINT: tl.constexpr,
                 PAIRS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    if JOINT:
        head = tl.arange(0, ROWS)[:, None]
        return _load_heads(W + head * head_dim, in_row(head, heads, ROWS), 1, head_dim, rotary_dim, PAIRS, ROWS)
    else:
        return _load_heads(W, tl.full((1, 1), True, tl.int1), 1, head_dim, rotary_dim, PAIRS, 1)


@triton.jit
def _mean(tiles, heads: tl.constexpr, head_dim: tl.constexpr, JOINT: tl.constexpr):
    """Return the mean of each head's values (ROWS, 1), or of all (1, 1)."""
    total = tl.sum(tiles[0], 1) + tl.sum(tiles[1], 1)
    if len(tiles) == 3:
        total += tl.sum(tiles[2], 1)
    if JOINT:
        return tl.sum(total, 0) / (heads * head_dim) + tl.zeros((1, 1), tl.float32)
    else:
        return total[:, None] / head_dim


@triton.jit
def _rstd(x, valid, eps, heads: tl.constexpr, head_dim: tl.constexpr, dtype: tl.constexpr, CASTING: tl.constexpr,
          JOINT: tl.constexpr):  # fmt: skip
    squares = ()
    for part in tl.static_range(len(x)):
        squares = squares + (square(x[part], dtype, CASTING),)
    # a head that does not exist would be 0 / 0 where eps is 0
    return tl.where(valid, rstd_of(_mean(squares, heads, head_dim, JOINT), eps, dtype, CASTING), 0.0)


@triton.jit
def _dense(batch, token, head, tokens, heads: tl.constexpr, head_dim: tl.constexpr, HEADS_INSIDE: tl.constexpr):
    """Return where a head begins in dense memory."""
    if HEADS_INSIDE:
        return ((batch * tokens + token) * heads + head) * head_dim
    else:
        return ((batch * heads + head) * tokens + token) * head_dim


@triton.jit
def _forward_heads(
    COS, SIN, X, W, OUT, tile, tokens, all_tokens, cos_batch_stride, cos_token_stride, cos_dim_stride,
    batch_stride, token_stride, head_stride, dim_stride, eps, offset,
    heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr, HEADS_INSIDE: tl.constexpr,
    JOINT: tl.constexpr, CASTING: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = X.dtype.element_ty
    product_dtype: tl.constexpr = dtype if dtype == COS.dtype.element_ty else tl.float32
    batch, token, head, valid = _heads_of(tile, tokens, all_tokens, heads, JOINT, ROWS)
    x_at = X + batch * batch_stride + token * token_stride + head * head_stride
    x = _load_heads(x_at, valid, dim_stride, head_dim, rotary_dim, PAIRS_IN, ROWS)
    at = batch * cos_batch_stride + token * cos_token_stride
    cos1, cos2, sin1, sin2 = load_angles(COS + at, SIN + at, valid, cos_dim_stride, rotary_dim // 2, PAIRS_OUT, False)
    w = _load_weight(W, heads, head_dim, rotary_dim, JOINT, PAIRS_IN, ROWS)
    rstd = _rstd(x, valid, eps, heads, head_dim, dtype, CASTING, JOINT)
    y = ()
    for part in tl.static_range(len(x)):
        normed = x[part] * rstd
        if CASTING != "gemma":
            normed = rounded(normed, dtype)
        y = y + (rounded(before_weight(normed, W, w[part], offset, dtype, CASTING), dtype),)
    out1 = rounded(y[0] * cos1, product_dtype) - rounded(y[1] * sin1, product_dtype)
    out2 = rounded(y[1] * cos2, product_dtype) + rounded(y[0] * sin2, product_dtype)
    out = (out1, out2) if len(y) == 2 else (out1, out2, y[2])
    out_at = OUT + _dense(batch, token, head, tokens.to(tl.int64), heads, head_dim, HEADS_INSIDE)
    _store_heads(out_at, out, valid, head_dim, rotary_dim, PAIRS_OUT, ROWS)


@triton.jit(do_not_specialize=["q_tiles", "tokens", "all_tokens"])
def qk_norm_rope_forward(
    COS, SIN, Q, K, Q_WEIGHT, K_WEIGHT, Q_OUT, K_OUT, q_tiles, tokens, all_tokens,
    cos_batch_stride, cos_token_stride, cos_dim_stride,
    q_batch_stride, q_token_stride, q_head_stride, q_dim_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_dim_stride, eps, offset,
    q_heads: tl.constexpr, k_heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr,
    Q_HEADS_INSIDE: tl.constexpr, K_HEADS_INSIDE: tl.constexpr, Q_JOINT: tl.constexpr, K_JOINT: tl.constexpr,
    together: tl.constexpr, CASTING: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if tile < q_tiles:
        _forward_heads(
            COS, SIN, Q, Q_WEIGHT, Q_OUT, tile, tokens, all_tokens, cos_batch_stride, cos_token_stride, cos_dim_stride,
            q_batch_stride, q_token_stride, q_head_stride, q_dim_stride, eps, offset,
            q_heads, head_dim, rotary_dim, Q_HEADS_INSIDE, Q_JOINT, CASTING, PAIRS_IN, PAIRS_OUT,
            together if Q_JOINT else ROWS,
        )  # fmt: skip
    else:
        _forward_heads(
            COS, SIN, K, K_WEIGHT, K_OUT, tile - q_tiles, tokens, all_tokens,
            cos_batch_stride, cos_token_stride, cos_dim_stride,
            k_batch_stride, k_token_stride, k_head_stride, k_dim_stride, eps, offset,
            k_heads, head_dim, rotary_dim, K_HEADS_INSIDE, K_JOINT, CASTING, PAIRS_IN, PAIRS_OUT,
            together if K_JOINT else ROWS,
        )  # fmt: skip


@triton.jit
def _store_dw(DW, dw, heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr, JOINT: tl.constexpr,
              PAIRS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    half: tl.constexpr = rotary_dim // 2
    HALF: tl.constexpr = triton.next_power_of_2(half)
    col = tl.arange(0, HALF)[None, :]
    if JOINT:
        head = tl.arange(0, ROWS)[:, None]
        DW += head * head_dim
        valid = in_row(head, heads, ROWS)
    else:
        sums = ()
        for part in tl.static_range(len(dw)):
            sums = sums + (tl.sum(dw[part], 0)[None, :],)
        dw = sums
        valid = tl.full((1, 1), True, tl.int1)
    tl.store(DW + (2 * col if PAIRS else col), dw[0], valid & in_row(col, half, HALF))
    tl.store(DW + (2 * col + 1 if PAIRS else half + col), dw[1], valid & in_row(col, half, HALF))
    if rotary_dim < head_dim:
        REST: tl.constexpr = triton.next_power_of_2(head_dim - rotary_dim)
        rest = tl.arange(0, REST)[None, :]
        tl.store(DW + rotary_dim + rest, dw[2], valid & in_row(rest, head_dim - rotary_dim, REST))


@triton.jit
def _backward_heads(
    COS, SIN, X, W, DOUT, DX, DW, tokens, all_tokens, cos_batch_stride, cos_token_stride, cos_dim_stride,
    batch_stride, token_stride, head_stride, dim_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, dout_dim_stride, eps, offset,
    heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr, HEADS_INSIDE: tl.constexpr,
    JOINT: tl.constexpr, CASTING: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of this program's heads, and the weight's sums over them."""
    dtype: tl.constexpr = X.dtype.element_ty
    HALF: tl.constexpr = triton.next_power_of_2(rotary_dim // 2)
    dw = (tl.zeros((ROWS, HALF), tl.float32), tl.zeros((ROWS, HALF), tl.float32))
    if rotary_dim < head_dim:
        dw = dw + (tl.zeros((ROWS, triton.next_power_of_2(head_dim - rotary_dim)), tl.float32),)
    w = _load_weight(W, heads, head_dim, rotary_dim, JOINT, PAIRS_IN, ROWS)
    tiles = all_tokens if JOINT else (all_tokens * heads + ROWS - 1) // ROWS
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        batch, token, head, valid = _heads_of(tile, tokens, all_tokens, heads, JOINT, ROWS)
        x_at = X + batch * batch_stride + token * token_stride + head * head_stride
        x = _load_heads(x_at, valid, dim_stride, head_dim, rotary_dim, PAIRS_IN, ROWS)
        dout_at = DOUT + batch * dout_batch_stride + token * dout_token_stride + head * dout_head_stride
        dout = _load_heads(dout_at, valid, dout_dim_stride, head_dim, rotary_dim, PAIRS_OUT, ROWS)
        at = batch * cos_batch_stride + token * cos_token_stride
        cos1, cos2, sin1, sin2 = load_angles(
            COS + at, SIN + at, valid, cos_dim_stride, rotary_dim // 2, PAIRS_OUT, False
        )
        dy1, dy2 = dout[0] * cos1 + dout[1] * sin2, dout[1] * cos2 - dout[0] * sin1
        dy = (dy1, dy2) if len(dout) == 2 else (dy1, dy2, dout[2])
        rstd = _rstd(x, valid, eps, heads, head_dim, dtype, CASTING, JOINT)
        m, products = (), ()
        for part in tl.static_range(len(x)):
            m = m + (before_weight(dy[part], W, w[part], offset, dtype, CASTING),)
            products = products + (m[part] * x[part],)
        mean = rstd * _mean(products, heads, head_dim, JOINT)
        dx, dw_before, dw = (), dw, ()
        for part in tl.static_range(len(x)):
            normed = x[part] * rstd
            dx = dx + (rstd * (m[part] - normed * mean),)
            dw = dw + (dw_before[part] + dy[part] * (normed if CASTING == "gemma" else rounded(normed, dtype)),)
        if DX is not None:
            dx_at = DX + _dense(batch, token, head, tokens.to(tl.int64), heads, head_dim, HEADS_INSIDE)
            _store_heads(dx_at, dx, valid, head_dim, rotary_dim, PAIRS_IN, ROWS)
    if DW is not None:
        _store_dw(DW, dw, heads, head_dim, rotary_dim, JOINT, PAIRS_IN, ROWS)


@triton.jit(do_not_specialize=["tokens", "all_tokens"])
def qk_norm_rope_backward(
    COS, SIN, Q, K, Q_WEIGHT, K_WEIGHT, DQ_OUT, DK_OUT, DQ, DK, DW, tokens, all_tokens,
    cos_batch_stride, cos_token_stride, cos_dim_stride,
    q_batch_stride, q_token_stride, q_head_stride, q_dim_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_dim_stride,
    dq_batch_stride, dq_token_stride, dq_head_stride, dq_dim_stride,
    dk_batch_stride, dk_token_stride, dk_head_stride, dk_dim_stride, eps, offset,
    q_heads: tl.constexpr, k_heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr,
    Q_HEADS_INSIDE: tl.constexpr, K_HEADS_INSIDE: tl.constexpr, Q_JOINT: tl.constexpr, K_JOINT: tl.constexpr,
    together: tl.constexpr, CASTING: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    # A fixed number of programs stride over the heads; each sums its own gradients of the weights. The keys follow in
    # a loop of their own: the sums of both would take twice the registers. rstd is recomputed beside the sum that the
    # gradient needs anyway.
    q_cols: tl.constexpr = 0 if DQ_OUT is None else (q_heads * head_dim if Q_JOINT else head_dim)
    k_cols: tl.constexpr = 0 if DK_OUT is None else (k_heads * head_dim if K_JOINT else head_dim)
    if DW is not None:
        DW += tl.program_id(0).to(tl.int64) * (q_cols + k_cols)
    if DQ_OUT is not None:
        _backward_heads(
            COS, SIN, Q, Q_WEIGHT, DQ_OUT, DQ, DW, tokens, all_tokens,
            cos_batch_stride, cos_token_stride, cos_dim_stride,
            q_batch_stride, q_token_stride, q_head_stride, q_dim_stride,
            dq_batch_stride, dq_token_stride, dq_head_stride, dq_dim_stride, eps, offset,
            q_heads, head_dim, rotary_dim, Q_HEADS_INSIDE, Q_JOINT, CASTING, PAIRS_IN, PAIRS_OUT,
            together if Q_JOINT else ROWS, STAGES,
        )  # fmt: skip
    if DK_OUT is not None:
        _backward_heads(
            COS, SIN, K, K_WEIGHT, DK_OUT, DK, None if DW is None else DW + q_cols, tokens, all_tokens,
            cos_batch_stride, cos_token_stride, cos_dim_stride,
            k_batch_stride, k_token_stride, k_head_stride, k_dim_stride,
            dk_batch_stride, dk_token_stride, dk_head_stride, dk_dim_stride, eps, offset,
            k_heads, head_dim, rotary_dim, K_HEADS_INSIDE, K_JOINT, CASTING, PAIRS_IN, PAIRS_OUT,
            together if K_JOINT else ROWS, STAGES,
        )  # fmt: skip


def _config_numbers(q, heads):
    """Return a configuration's numbers: head size, heads normalised together, bytes of a value.

    `heads`: as in `_LaunchNumbers`.
    """
    together = [number for number, is_joint in heads if is_joint]
    return power_of_2(q.shape[3]), power_of_2(max(together, default=1)), q.element_size()


class _LaunchNumbers(NamedTuple):
    """Numbers that both kernels take.

    Attributes:
        config_numbers: those of the configuration.
        tokens: of a sequence, and of all.
        strides: of the inputs.
        heads: (number, whether they are normalised together) of q and k.
        constants: up to the rounding.
    """

    config_numbers: tuple
    tokens: tuple
    strides: tuple
    heads: tuple
    constants: tuple

    @classmethod
    def of(cls, cos, q, k, q_weight, k_weight, unsqueeze_dim):
        """Return the numbers of a call."""
        (angles, tokens, rotary_dim), (batch_stride, *cos_strides) = cos.shape, cos.stride()
        q_heads, *q_strides = heads_and_strides(q, unsqueeze_dim)
        k_heads, *k_strides = heads_and_strides(k, unsqueeze_dim)
        q_joint, k_joint = _is_joint(q, q_weight), _is_joint(k, k_weight)
        inside = heads_inside(q, unsqueeze_dim), heads_inside(k, unsqueeze_dim)
        strides = batch_stride if angles > 1 else 0, *cos_strides, *q_strides, *k_strides
        heads = (q_heads, q_joint), (k_heads, k_joint)
        _, together, _ = config_numbers = _config_numbers(q, heads)
        constants = q_heads, k_heads, q.shape[3], rotary_dim, *inside, q_joint, k_joint, together
        return cls(config_numbers, (tokens, q.shape[0] * tokens), strides, heads, constants)

    def tiles(self, config):
        """Return the number of tiles of q and of k."""
        tokens = self.tokens[1]
        return [tokens if joint else -(-tokens * heads // config["ROWS"]) for heads, joint in self.heads]


def _empty_results(q, k, unsqueeze_dim):
    return empty_outputs(q, k, unsqueeze_dim, heads_inside(q, unsqueeze_dim), heads_inside(k, unsqueeze_dim))


@raw(_empty_results)
def _qk_norm_rope_forward(
    cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor,
    k_weight: torch.Tensor, eps: float, offset: float, casting_mode: str, unsqueeze_dim: int, layout: str,
    *, q_out, k_out,
):  # fmt: skip
    numbers = _LaunchNumbers.of(cos, q, k, q_weight, k_weight, unsqueeze_dim)
    config = qk_norm_rope_forward_config(*numbers.config_numbers, device_of(q))
    q_tiles, k_tiles = numbers.tiles(config)
    launch(
        qk_norm_rope_forward, (q_tiles + k_tiles, 1, 1), config,
        cos, sin, q, k, q_weight, k_weight, q_out, k_out, q_tiles, *numbers.tokens, *numbers.strides, eps,
        offset, *numbers.constants, casting_mode, *LAYOUTS[layout],
    )  # fmt: skip


def _empty_gradients(q, k, q_weight, k_weight, dq_out, dk_out, unsqueeze_dim, q_grad, k_grad, weight_grad):
    # one gradient for both weights, in which a result without a gradient has no columns
    cols = sum(w.shape[0] for w, dout in ((q_weight, dq_out), (k_weight, dk_out)) if dout is not None)
    return (
        empty_output(q, unsqueeze_dim, heads_inside(q, unsqueeze_dim)) if q_grad else None,
        empty_output(k, unsqueeze_dim, heads_inside(k, unsqueeze_dim)) if k_grad else None,
        q_weight.new_empty(cols) if weight_grad else None,
    )


@raw(_empty_gradients)
def _qk_norm_rope_backward(
    cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor,
    k_weight: torch.Tensor, dq_out: torch.Tensor | None, dk_out: torch.Tensor | None, eps: float, offset: float,
    casting_mode: str, unsqueeze_dim: int, layout: str, q_grad: bool, k_grad: bool, weight_grad: bool, *, dq, dk, dw,
):  # fmt: skip
    numbers = _LaunchNumbers.of(cos, q, k, q_weight, k_weight, unsqueeze_dim)
    _, *dq_strides = heads_and_strides(dq_out, unsqueeze_dim)
    _, *dk_strides = heads_and_strides(dk_out, unsqueeze_dim)
    config = qk_norm_rope_backward_config(*numbers.config_numbers, device_of(q))
    programs = 1 if q.numel() + k.numel() <= ONE_PROGRAM else config.grid_for(max(numbers.tiles(config)))
    sums = partial_sums(dw, programs)
    launch(
        qk_norm_rope_backward, (programs, 1, 1), config,
        cos, sin, q, k, q_weight, k_weight, dq_out, dk_out, dq, dk, sums, *numbers.tokens, *numbers.strides,
        *dq_strides, *dk_strides, eps, offset, *numbers.constants, casting_mode, *LAYOUTS[layout],
    )  # fmt: skip
    add_partials(sums, dw)


@_qk_norm_rope_forward.backward(depends={"q_out": ["q", "q_weight"], "k_out": ["k", "k_weight"]})
def _(
    cos, sin, q, k, q_weight, k_weight, eps, offset, casting_mode, unsqueeze_dim, layout,
    dq_out: torch.Tensor | None, dk_out: torch.Tensor | None, *, q_grad, k_grad, q_weight_grad, k_weight_grad,
):  # fmt: skip
    q_weight_grad, k_weight_grad = q_weight_grad and dq_out is not None, k_weight_grad and dk_out is not None
    dq, dk, dw = _qk_norm_rope_backward(
        cos, sin, q, k, q_weight, k_weight, dq_out, dk_out, eps, offset, casting_mode, unsqueeze_dim, layout,
        q_grad and dq_out is not None, k_grad and dk_out is not None, q_weight_grad or k_weight_grad,
    )  # fmt: skip
    dq_weight = dw[: q_weight.shape[0]] if q_weight_grad else None
    return dq, dk, dq_weight, dw[-k_weight.shape[0] :] if k_weight_grad else None


@qk_norm_rope.register("triton")
def _(q, k, q_weight, k_weight, cos, sin, eps, offset, casting_mode, unsqueeze_dim, layout):
    check_kernel_dtype("k", k)
    options = eps, offset, casting_mode, unsqueeze_dim
    heads = [(x.shape[unsqueeze_dim], _is_joint(x, w)) for x, w in ((q, q_weight), (k, k_weight))]
    head_dim, together, _ = _config_numbers(q, heads)
    if together * head_dim > widest_block(device_of(q), 4):  # a token's heads exceed the registers
        q, k = _normed(rms_norm, q, q_weight, *options), _normed(rms_norm, k, k_weight, *options)
        return rope(q, k, cos, sin, unsqueeze_dim, layout)
    sin = sin.resolve_neg()  # the memory of a conjugate's imaginary part lacks the sign
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    q_weight, k_weight = contiguous(q_weight), contiguous(k_weight)
    return _qk_norm_rope_forward.apply(cos, sin, q, k, q_weight, k_weight, *options, layout)
