r"""Compute the root-mean-square norm of queries and keys and rotate them (Qwen3).

    n   = rms_norm(x, w) of a head                          rounded as `rms_norm` rounds
    out = n rotated                                         rounded as `rope` rounds

    dn = dout rotated back
    dx, dw as in `rms_norm`, from dn

Letters: T tokens of H heads (of queries and of keys) of D values, R of them rotary. Traffic: forward reads x and writes
out (2THD), backward reads x and dout and writes dx (3THD), where two ops move 4THD and 5THD; each reads cos and sin
(2TR), from the cache for all heads but the first. Bound by memory.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_kernel_dtype, refuse
from liger_hw.dispatch import Cost, Function, op, raw
from liger_hw.kernels._math import in_order, in_row, reduce_partials, rounded
from liger_hw.kernels.rms_norm import CASTING_MODES, rms_norm
from liger_hw.kernels.rms_norm.kernels import before_weight, rstd_of, square
from liger_hw.kernels.rope import rope
from liger_hw.launch import launch
from liger_hw.spelling import check_known
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


def _validate(q, k, q_weight, k_weight, cos, sin, casting_mode, unsqueeze_dim):
    check(unsqueeze_dim in (1, 2), "unsqueeze_dim", unsqueeze_dim, (1, 2))
    check_known("casting_mode", casting_mode, CASTING_MODES)
    check(q.ndim == 4 and q.is_floating_point(), "q", q, "four dimensions, floating point")
    batch, tokens, head_dim = q.shape[0], q.shape[3 - unsqueeze_dim], q.shape[3]
    fits = k.ndim == 4 and (k.shape[0], k.shape[3 - unsqueeze_dim], k.shape[3]) == (batch, tokens, head_dim)
    fits = fits and (k.dtype, k.device) == (q.dtype, q.device)
    check(fits, "k", k, "q's batch, tokens, head_dim, dtype and device")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        fits = weight.shape == (head_dim,) and weight.device == q.device
        check(fits, name, weight, f"({head_dim},) on {q.device}")
    fits = cos.ndim == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens and cos.is_floating_point()
    fits = fits and 0 < cos.shape[2] <= head_dim and cos.shape[2] % 2 == 0 and cos.device == q.device
    check(fits, "cos", cos, "(1 or batch, tokens, rotary_dim) on q's device, rotary_dim even and at most head_dim")
    check((sin.shape, sin.dtype, sin.device) == (cos.shape, cos.dtype, cos.device), "sin", sin, cos)
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        refuse("cos" if cos.requires_grad else "sin", "a tensor that requires grad", "a constant; detach it")


@op
def qk_norm_rope(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor,
    sin: torch.Tensor, eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama", unsqueeze_dim: int = 1,
):  # fmt: skip
    """Compute `rope` of the `rms_norm` of queries and keys, with their rounding.

    Qwen3's attention does so.

    Args:
        q: (B, Hq, T, D), or (B, T, Hq, D) with `unsqueeze_dim` 2; any floating dtype, and any strides: copied unless
            the values of a head are neighbours. Plain torch computes dtypes other than fp32, fp16 and bf16.
        k: (B, Hk, T, D), or (B, T, Hk, D), in the dtype of `q`, with its own number of heads.
        q_weight, k_weight: (D,), any floating dtype.
        cos: (B or 1, T, R), R even and at most D: two halves, as Llama's. A constant: it gets no gradient.
        sin: like `cos`.
        eps, offset, casting_mode: as in `rms_norm`.
        unsqueeze_dim: the dimension of `q` and `k` that counts heads, 1 or 2.

    Returns:
        (q_out, k_out): new dense tensors like `q` and `k`, in the same memory order.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, an option is unknown, or `cos` or `sin` requires grad.
    """
    _validate(q, k, q_weight, k_weight, cos, sin, casting_mode, unsqueeze_dim)
    q = rms_norm.reference(q, q_weight, eps, offset, casting_mode)
    k = rms_norm.reference(k, k_weight, eps, offset, casting_mode)
    return rope.reference(q, k, cos, sin, unsqueeze_dim)


@qk_norm_rope.cost
def _(q, k, q_weight, k_weight, cos, sin, *options, **named):
    heads, parameters = q.nbytes + k.nbytes, q_weight.nbytes + k_weight.nbytes
    tables, values = cos.nbytes + sin.nbytes, q.numel() + k.numel()
    return Cost(2 * heads + parameters + tables, 3 * heads + 2 * parameters + tables, 7 * values, 12 * values)


@tuned
def qk_norm_rope_forward_config(head_dim, itemsize, device):
    return _heads(head_dim, device, 16)


@tuned
def qk_norm_rope_backward_config(head_dim, itemsize, device):
    # Four programs a core load two tiles of 4 KiB of x and dout ahead: 64 KiB in flight. A lane has 16 bytes
    # of each half; with 32 in fp32 8 bytes spill at 80 (compiled for sm90).
    return _heads(head_dim, device, 32 // itemsize, STAGES=3 if device.async_copy else 1)


def _heads(head_dim, device, per_lane, **more):
    """Return a tile of heads of about 2,048 values."""
    rows = max(2048 // power_of_2(head_dim), 1)
    warps = row_warps(rows * power_of_2(head_dim), device, per_lane)
    # rope promises to round its products, see `Config.fp_fusion`
    return Config({"ROWS": rows} | more, warps, programs=4, fp_fusion=False)


@triton.jit
def _places(rows, first, tokens, heads: tl.constexpr, ROWS: tl.constexpr):
    """Return whether the rows exist, and their batch, token and head."""
    row = first + tl.arange(0, ROWS)  # of 32 bits: divisions of 64 are slow
    batch, token = (row // heads // tokens).to(tl.int64), (row // heads % tokens).to(tl.int64)
    return row < rows, batch, token, (row % heads).to(tl.int64)


@triton.jit
def _load_parts(P, at, there, head_dim: tl.constexpr, rotary_dim: tl.constexpr):
    """Load the two rotary halves and the rest (or a zero) of heads, in fp32."""
    half: tl.constexpr = rotary_dim // 2
    HALF: tl.constexpr = triton.next_power_of_2(half)
    REST: tl.constexpr = triton.next_power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else 1
    col, rest = tl.arange(0, HALF)[None, :], tl.arange(0, REST)[None, :]
    mask = there & in_row(col, half, HALF)
    part1 = tl.load(P + at + col, mask, other=0.0).to(tl.float32)
    part2 = tl.load(P + at + half + col, mask, other=0.0).to(tl.float32)
    if rotary_dim < head_dim:
        mask = there & in_row(rest, head_dim - rotary_dim, REST)
        return part1, part2, tl.load(P + at + rotary_dim + rest, mask, other=0.0).to(tl.float32)
    else:
        return part1, part2, tl.zeros((1, 1), tl.float32)


@triton.jit
def _store_parts(P, at, part1, part2, part3, there, head_dim: tl.constexpr, rotary_dim: tl.constexpr):
    half: tl.constexpr = rotary_dim // 2
    HALF: tl.constexpr = triton.next_power_of_2(half)
    col = tl.arange(0, HALF)[None, :]
    mask = there & in_row(col, half, HALF)
    tl.store(P + at + col, part1, mask)
    tl.store(P + at + half + col, part2, mask)
    if rotary_dim < head_dim:
        REST: tl.constexpr = triton.next_power_of_2(head_dim - rotary_dim)
        rest = tl.arange(0, REST)[None, :]
        tl.store(P + at + rotary_dim + rest, part3, there & in_row(rest, head_dim - rotary_dim, REST))


@triton.jit
def _normed(x, rstd, dtype: tl.constexpr, CASTING: tl.constexpr):
    return x * rstd if CASTING == "gemma" else rounded(x * rstd, dtype)


@triton.jit
def _scaled(x, w, rstd, W, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    return rounded(before_weight(_normed(x, rstd, dtype, CASTING), W, w, offset, dtype, CASTING), dtype)


@triton.jit
def _sum_of_parts(part1, part2, part3):
    return (tl.sum(part1, 1) + tl.sum(part2, 1) + tl.sum(part3, 1))[:, None]


@triton.jit(do_not_specialize=["rows", "tokens"])
def qk_norm_rope_forward(
    X, W, COS, SIN, OUT, rows, tokens, x_batch_stride, x_token_stride, x_head_stride,
    out_batch_stride, out_token_stride, out_head_stride, cos_batch_stride, cos_token_stride, eps, offset,
    heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr, CASTING: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    there, batch, token, head = _places(rows, tl.program_id(0) * ROWS, tokens, heads, ROWS)
    there = there[:, None]
    dtype: tl.constexpr = X.dtype.element_ty
    product: tl.constexpr = dtype if X.dtype == COS.dtype else tl.float32  # to which rope rounds products
    at = (batch * x_batch_stride + token * x_token_stride + head * x_head_stride)[:, None]
    x1, x2, x3 = _load_parts(X, at, there, head_dim, rotary_dim)
    w1, w2, w3 = _load_parts(W, 0, True, head_dim, rotary_dim)
    at = (batch * cos_batch_stride + token * cos_token_stride)[:, None]
    cos1, cos2, _ = _load_parts(COS, at, there, rotary_dim, rotary_dim)
    sin1, sin2, _ = _load_parts(SIN, at, there, rotary_dim, rotary_dim)
    squares = _sum_of_parts(square(x1, dtype, CASTING), square(x2, dtype, CASTING), square(x3, dtype, CASTING))
    rstd = rstd_of(squares / head_dim, eps, dtype, CASTING)
    n1 = _scaled(x1, w1, rstd, W, offset, dtype, CASTING)
    n2 = _scaled(x2, w2, rstd, W, offset, dtype, CASTING)
    out1 = rounded(n1 * cos1, product) - rounded(n2 * sin1, product)
    out2 = rounded(n2 * cos2, product) + rounded(n1 * sin2, product)
    at = (batch * out_batch_stride + token * out_token_stride + head * out_head_stride)[:, None]
    n3 = _scaled(x3, w3, rstd, W, offset, dtype, CASTING)
    _store_parts(OUT, at, out1, out2, n3, there, head_dim, rotary_dim)


@triton.jit(do_not_specialize=["rows", "tokens"])
def qk_norm_rope_backward(
    X, W, COS, SIN, DOUT, DX, DW, rows, tokens, x_batch_stride, x_token_stride, x_head_stride,
    dout_batch_stride, dout_token_stride, dout_head_stride, dx_batch_stride, dx_token_stride, dx_head_stride,
    cos_batch_stride, cos_token_stride, eps, offset, heads: tl.constexpr, head_dim: tl.constexpr,
    rotary_dim: tl.constexpr, CASTING: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a fixed number of programs stride over the heads; each sums its own dw
    dtype: tl.constexpr = X.dtype.element_ty
    product: tl.constexpr = dtype if X.dtype == COS.dtype else tl.float32
    w1, w2, w3 = _load_parts(W, 0, True, head_dim, rotary_dim)
    dw1, dw2 = tl.zeros((ROWS, w1.shape[1]), tl.float32), tl.zeros((ROWS, w2.shape[1]), tl.float32)
    dw3 = tl.zeros((ROWS, w3.shape[1]), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        there, batch, token, head = _places(rows, start, tokens, heads, ROWS)
        there = there[:, None]
        at = (batch * x_batch_stride + token * x_token_stride + head * x_head_stride)[:, None]
        x1, x2, x3 = _load_parts(X, at, there, head_dim, rotary_dim)
        at = (batch * dout_batch_stride + token * dout_token_stride + head * dout_head_stride)[:, None]
        dout1, dout2, dn3 = _load_parts(DOUT, at, there, head_dim, rotary_dim)
        at = (batch * cos_batch_stride + token * cos_token_stride)[:, None]
        cos1, cos2, _ = _load_parts(COS, at, there, rotary_dim, rotary_dim)
        sin1, sin2, _ = _load_parts(SIN, at, there, rotary_dim, rotary_dim)
        dn1 = rounded(rounded(dout1 * cos1, product) + rounded(dout2 * sin2, product), dtype)
        dn2 = rounded(rounded(dout2 * cos2, product) - rounded(dout1 * sin1, product), dtype)
        m1 = before_weight(dn1, W, w1, offset, dtype, CASTING)
        m2 = before_weight(dn2, W, w2, offset, dtype, CASTING)
        m3 = before_weight(dn3, W, w3, offset, dtype, CASTING)
        squares = _sum_of_parts(square(x1, dtype, CASTING), square(x2, dtype, CASTING), square(x3, dtype, CASTING))
        # absent heads get 0: with eps=0 theirs is infinite, and would make dw NaN
        rstd = tl.where(there, rstd_of(squares / head_dim, eps, dtype, CASTING), 0.0)
        mean = rstd * _sum_of_parts(m1 * x1, m2 * x2, m3 * x3) / head_dim
        at = (batch * dx_batch_stride + token * dx_token_stride + head * dx_head_stride)[:, None]
        dx1, dx2 = rstd * (m1 - x1 * rstd * mean), rstd * (m2 - x2 * rstd * mean)
        _store_parts(DX, at, dx1, dx2, rstd * (m3 - x3 * rstd * mean), there, head_dim, rotary_dim)
        dw1 += dn1 * _normed(x1, rstd, dtype, CASTING)
        dw2 += dn2 * _normed(x2, rstd, dtype, CASTING)
        dw3 += dn3 * _normed(x3, rstd, dtype, CASTING)
    if DW is not None:
        at = tl.program_id(0).to(tl.int64) * head_dim
        dw1, dw2, dw3 = tl.sum(dw1, 0)[None, :], tl.sum(dw2, 0)[None, :], tl.sum(dw3, 0)[None, :]
        _store_parts(DW, at, dw1, dw2, dw3, True, head_dim, rotary_dim)


def _strides(x, unsqueeze_dim):
    """Return the batch, token and head strides."""
    batch, one, two, _ = x.stride()
    return (batch, two, one) if unsqueeze_dim == 1 else (batch, one, two)


def _side_by_side(x):
    """Return `x` with unit stride inside a head."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _shape(x, cos, unsqueeze_dim):
    """Return the number of rows (heads), tokens of a sequence, and the kernels' constants."""
    heads, tokens = x.shape[unsqueeze_dim], x.shape[3 - unsqueeze_dim]
    return x.shape[0] * tokens * heads, tokens, (heads, x.shape[3], cos.shape[2])


def _tables(cos, sin):
    """Return cos and sin as the kernels read them, and their batch and token strides."""
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, (cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))


@raw(lambda x, *options: torch.empty_like(_side_by_side(x)))
def _qk_norm_rope_forward(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float, offset: float,
    casting_mode: str, unsqueeze_dim: int,
) -> torch.Tensor:  # fmt: skip
    x, (cos, sin, cos_strides) = _side_by_side(x), _tables(cos, sin)
    out = torch.empty_like(x)
    rows, tokens, sizes = _shape(x, cos, unsqueeze_dim)
    config = qk_norm_rope_forward_config(x.shape[3], x.element_size(), device_of(x))
    launch(
        qk_norm_rope_forward, (-(-rows // config["ROWS"]), 1, 1), config,
        x, weight, cos, sin, out, rows, tokens, *_strides(x, unsqueeze_dim), *_strides(out, unsqueeze_dim),
        *cos_strides, eps, offset, *sizes, casting_mode,
    )  # fmt: skip
    return out


def _fake_backward(x, weight, cos, sin, dout, eps, offset, casting_mode, unsqueeze_dim, weight_grad):
    return torch.empty_like(_side_by_side(x)), weight.new_empty(weight.shape) if weight_grad else x.new_empty(0)


@raw(_fake_backward)
def _qk_norm_rope_backward(
    x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dout: torch.Tensor, eps: float,
    offset: float, casting_mode: str, unsqueeze_dim: int, weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    x, dout, (cos, sin, cos_strides) = _side_by_side(x), _side_by_side(dout), _tables(cos, sin)
    dx = torch.empty_like(x)
    rows, tokens, sizes = _shape(x, cos, unsqueeze_dim)
    config = qk_norm_rope_backward_config(x.shape[3], x.element_size(), device_of(x))
    programs = config.grid_for(-(-rows // config["ROWS"]))
    dw = x.new_empty((programs, x.shape[3]), dtype=torch.float32) if weight_grad else None
    launch(
        qk_norm_rope_backward, (programs, 1, 1), config,
        x, weight, cos, sin, dout, dx, dw, rows, tokens, *_strides(x, unsqueeze_dim), *_strides(dout, unsqueeze_dim),
        *_strides(dx, unsqueeze_dim), *cos_strides, eps, offset, *sizes, casting_mode,
    )  # fmt: skip
    return dx, reduce_partials(dw, weight.dtype) if weight_grad else x.new_empty(0)


class QKNormRopeFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, cos, sin, *options):
        ctx.save_for_backward(x, weight, cos, sin)
        ctx.options = options
        return _qk_norm_rope_forward(x, weight, cos, sin, *options)

    @staticmethod
    def backward(ctx, dout):
        weight_grad = ctx.needs_input_grad[1]
        dx, dw = _qk_norm_rope_backward(*ctx.saved_tensors, dout, *ctx.options, weight_grad)
        return dx, dw if weight_grad else None, *[None] * 6


@qk_norm_rope.register("triton")
def _(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama", unsqueeze_dim=1):
    _validate(q, k, q_weight, k_weight, cos, sin, casting_mode, unsqueeze_dim)
    check_kernel_dtype("cos", cos)
    options = cos, sin, eps, offset, casting_mode, unsqueeze_dim
    return (
        QKNormRopeFunction.apply(q, in_order(q_weight), *options),
        QKNormRopeFunction.apply(k, in_order(k_weight), *options),
    )
