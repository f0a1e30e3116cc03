r"""Rotary position embedding of queries and keys (arXiv:2104.09864), in the half-rotation form of Hugging Face.

    out1 = x1 cos1 - x2 sin1        x1, x2: the two halves of the first rotary_dim values of a head
    out2 = x2 cos2 + x1 sin2        the rest of the head passes through

    dx1 = dout1 cos1 + dout2 sin2   the rotation by the opposite angle, where the halves of cos and sin are equal
    dx2 = dout2 cos2 - dout1 sin1

Letters: B sequences of T tokens, each of H heads (Hq of the queries, Hk of the keys) of D values, R of them rotary.
Traffic: q and k are read and written once, 2BT(Hq + Hk)D, in forward as in backward; cos and sin (2BTR) are read once a
token, for all of its heads. Bound by memory. Nothing is saved but cos and sin.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import Cost, Function, check, op, raw
from liger_hw.kernels._math import in_row, rounded
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


def _validate(q, k, cos, sin, unsqueeze_dim):
    check(unsqueeze_dim in (1, 2), "unsqueeze_dim", unsqueeze_dim, (1, 2))
    check(q.ndim == 4 and q.is_floating_point(), "q", q, "four dimensions, floating point")
    batch, tokens, head_dim = q.shape[0], q.shape[3 - unsqueeze_dim], q.shape[3]
    fits = k.ndim == 4 and (k.shape[0], k.shape[3 - unsqueeze_dim], k.shape[3]) == (batch, tokens, head_dim)
    check(fits and k.is_floating_point() and k.device == q.device, "k", k, "q's batch, tokens, head_dim and device")
    fits = cos.ndim == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens
    fits = fits and 0 < cos.shape[2] <= head_dim and cos.shape[2] % 2 == 0
    check(
        fits and cos.is_floating_point() and cos.device == q.device, "cos", cos,
        "(1 or batch, tokens, rotary_dim) on q's device, rotary_dim even and at most head_dim",
    )  # fmt: skip
    check(sin.shape == cos.shape and sin.dtype == cos.dtype and sin.device == cos.device, "sin", sin, cos)
    for name, table in (("cos", cos), ("sin", sin)):
        wants = table.requires_grad and torch.is_grad_enabled()
        check(not wants, name, "a tensor that requires grad", "a constant; detach it")


@op
def rope(q, k, cos, sin, unsqueeze_dim=1):
    """Rotate the first `rotary_dim` values of every head of `q` and `k` by the angles of its token.

    As Hugging Face's apply_rotary_pos_emb, with its rounding: both products and their sum are rounded to the promoted
    dtype of the head and `cos`. Where that is wider than the input's (fp32 tables with 16-bit heads), Hugging Face
    returns the wider dtype; here the result is rounded to the input's dtype.

    Args:
        q: (B, Hq, T, D), or (B, T, Hq, D) with `unsqueeze_dim` 2; any floating dtype and strides. Nothing is copied.
        k: (B, Hk, T, D), or (B, T, Hk, D); the number of heads and the dtype are its own.
        cos: (B or 1, T, R), R even and at most D. A constant: it gets no gradient.
        sin: like `cos`.
        unsqueeze_dim: the dimension of `q` and `k` that counts heads, 1 or 2.

    Returns:
        (q_out, k_out): new tensors, shaped and typed like `q` and `k`, dense, and ordered in memory as those are: heads
        of a token side by side where the input has them so, otherwise tokens of a head.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or `cos` or `sin` requires grad.
    """
    _validate(q, k, cos, sin, unsqueeze_dim)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


@rope.cost
def _(q, k, cos, sin, *options, **named):
    moved = 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
    done = 3 * (q.numel() + k.numel()) * cos.shape[-1] // q.shape[-1]
    return Cost(moved, moved, done, done)


def _rotated(x, cos, sin):
    rotary, rest = x.tensor_split((cos.shape[-1],), -1)
    x1, x2 = rotary.chunk(2, -1)
    rotary = (rotary * cos + torch.cat((-x2, x1), -1) * sin).to(x.dtype)
    return torch.cat((rotary, rest), -1) if rest.shape[-1] else rotary


@tuned
def rope_rotate_config(heads, half, device):
    heads = min(heads, max(1, 2048 // half))  # both halves are live: 32 values for each of 128 lanes
    return Config({"HEADS": heads}, row_warps(heads * half, device, per_lane=16), fp_fusion=False)


@triton.jit
def _rotate_heads(
    X, OUT, cos1, cos2, sin1, sin2, x_head_stride, x_dim_stride, out_head_stride, dtype: tl.constexpr,
    heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of the token that X points to, HEADS at a time. The products are rounded to `dtype`.

    A few key heads leave lanes of a tile made for the queries idle; a smaller tile would have narrower accesses.
    """
    half: tl.constexpr = rotary_dim // 2
    HALF: tl.constexpr = triton.next_power_of_2(half)
    col = tl.arange(0, HALF)[None, :]
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        mask = in_row(head, heads, HEADS) & in_row(col, half, HALF)
        x1 = tl.load(X + head * x_head_stride + col * x_dim_stride, mask).to(tl.float32)
        x2 = tl.load(X + head * x_head_stride + (half + col) * x_dim_stride, mask).to(tl.float32)
        if BACKWARD:
            out1 = rounded(x1 * cos1, dtype) + rounded(x2 * sin2, dtype)
            out2 = rounded(x2 * cos2, dtype) - rounded(x1 * sin1, dtype)
        else:
            out1 = rounded(x1 * cos1, dtype) - rounded(x2 * sin1, dtype)
            out2 = rounded(x2 * cos2, dtype) + rounded(x1 * sin2, dtype)
        tl.store(OUT + head * out_head_stride + col, out1, mask)
        tl.store(OUT + head * out_head_stride + half + col, out2, mask)
        if rotary_dim < head_dim:
            REST: tl.constexpr = triton.next_power_of_2(head_dim - rotary_dim)
            rest = tl.arange(0, REST)[None, :]
            there = in_row(head, heads, HEADS) & in_row(rest, head_dim - rotary_dim, REST)
            x = tl.load(X + head * x_head_stride + (rotary_dim + rest) * x_dim_stride, there)
            tl.store(OUT + head * out_head_stride + rotary_dim + rest, x, there)


@triton.jit(do_not_specialize=["tokens"])
def rope_rotate(
    COS, SIN, Q, K, Q_OUT, K_OUT, tokens, cos_batch_stride, cos_token_stride, cos_dim_stride,
    q_batch_stride, q_token_stride, q_head_stride, q_dim_stride, q_out_token_stride, q_out_head_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_dim_stride, k_out_token_stride, k_out_head_stride,
    q_heads: tl.constexpr, k_heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    half: tl.constexpr = rotary_dim // 2
    HALF: tl.constexpr = triton.next_power_of_2(half)
    col = tl.arange(0, HALF)[None, :]
    there = in_row(col, half, HALF)
    at = batch * cos_batch_stride + token * cos_token_stride + col * cos_dim_stride
    cos1, cos2 = tl.load(COS + at, there), tl.load(COS + at + half * cos_dim_stride, there)
    sin1, sin2 = tl.load(SIN + at, there), tl.load(SIN + at + half * cos_dim_stride, there)
    cos1, cos2, sin1, sin2 = cos1.to(tl.float32), cos2.to(tl.float32), sin1.to(tl.float32), sin2.to(tl.float32)
    if Q is not None:
        q_dtype: tl.constexpr = Q.dtype.element_ty if Q.dtype == COS.dtype else tl.float32
        _rotate_heads(
            Q + batch * q_batch_stride + token * q_token_stride,
            Q_OUT + batch * (tokens.to(tl.int64) * (q_heads * head_dim)) + token * q_out_token_stride,
            cos1, cos2, sin1, sin2, q_head_stride, q_dim_stride, q_out_head_stride, q_dtype,
            q_heads, head_dim, rotary_dim, BACKWARD, HEADS,
        )  # fmt: skip
    if K is not None:
        k_dtype: tl.constexpr = K.dtype.element_ty if K.dtype == COS.dtype else tl.float32
        _rotate_heads(
            K + batch * k_batch_stride + token * k_token_stride,
            K_OUT + batch * (tokens.to(tl.int64) * (k_heads * head_dim)) + token * k_out_token_stride,
            cos1, cos2, sin1, sin2, k_head_stride, k_dim_stride, k_out_head_stride, k_dtype,
            k_heads, head_dim, rotary_dim, BACKWARD, HEADS,
        )  # fmt: skip


def _heads_inside(x, unsqueeze_dim):
    """Whether the heads of a token are closer together in memory than the tokens of a head."""
    return x.stride(unsqueeze_dim) < x.stride(3 - unsqueeze_dim)


def _empty_output(x, unsqueeze_dim, heads_inside):
    """A dense tensor like `x`, ordered in memory as told."""
    if x.is_contiguous() or x.transpose(1, 2).is_contiguous():
        if heads_inside == _heads_inside(x, unsqueeze_dim):
            return torch.empty_like(x)  # a third of new_empty's host time
    if heads_inside == (unsqueeze_dim == 2):
        return x.new_empty(x.shape)
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


def _launch(cos, sin, xs, outs, unsqueeze_dim, backward):
    if cos.stride() != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    heads_axis, tokens_axis = unsqueeze_dim, 3 - unsqueeze_dim
    first = next(x for x in xs if x is not None)
    strides, heads = [], []
    for x, out in zip(xs, outs):
        heads.append(0 if x is None else x.shape[heads_axis])
        if x is None:
            strides += [0] * 6
        else:
            strides += [x.stride(0), x.stride(tokens_axis), x.stride(heads_axis), x.stride(3)]
            strides += [out.stride(tokens_axis), out.stride(heads_axis)]
    tokens, rotary_dim = cos.shape[1:]
    config = rope_rotate_config(power_of_2(max(heads)), power_of_2(rotary_dim // 2), device_of(first))
    launch(
        rope_rotate, (first.shape[0] * tokens, 1, 1), config,
        cos, sin, *xs, *outs, tokens, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), cos.stride(2),
        *strides, *heads, first.shape[3], rotary_dim, backward,
    )  # fmt: skip


def _fake_forward(cos, sin, q, k, unsqueeze_dim):
    return tuple(_empty_output(x, unsqueeze_dim, _heads_inside(x, unsqueeze_dim)) for x in (q, k))


@raw(_fake_forward)
def _rope_forward(
    cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor, k: torch.Tensor, unsqueeze_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    outs = _fake_forward(cos, sin, q, k, unsqueeze_dim)
    _launch(cos, sin, (q, k), outs, unsqueeze_dim, False)
    return outs


def _fake_backward(cos, sin, dq_out, dk_out, unsqueeze_dim, q_heads_inside, k_heads_inside):
    orders = ((dq_out, q_heads_inside), (dk_out, k_heads_inside))
    return tuple(cos.new_empty(0) if d is None else _empty_output(d, unsqueeze_dim, order) for d, order in orders)


@raw(_fake_backward)
def _rope_backward(
    cos: torch.Tensor, sin: torch.Tensor, dq_out: torch.Tensor | None, dk_out: torch.Tensor | None,
    unsqueeze_dim: int, q_heads_inside: bool, k_heads_inside: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    dq, dk = _fake_backward(cos, sin, dq_out, dk_out, unsqueeze_dim, q_heads_inside, k_heads_inside)
    outs = (None if dq_out is None else dq, None if dk_out is None else dk)
    _launch(cos, sin, (dq_out, dk_out), outs, unsqueeze_dim, True)
    return dq, dk


class RopeFunction(Function):
    @staticmethod
    def forward(ctx, q, k, cos, sin, unsqueeze_dim):
        ctx.save_for_backward(cos, sin)
        ctx.unsqueeze_dim = unsqueeze_dim
        # the gradients are ordered in memory like q and k, for the view that made those from a projection
        ctx.q_heads_inside, ctx.k_heads_inside = (_heads_inside(x, unsqueeze_dim) for x in (q, k))
        ctx.set_materialize_grads(False)
        outs = _rope_forward(cos, sin, q, k, unsqueeze_dim)
        ctx.mark_non_differentiable(*(out for out, wanted in zip(outs, ctx.needs_input_grad) if not wanted))
        return outs

    @staticmethod
    def backward(ctx, dq_out, dk_out):
        cos, sin = ctx.saved_tensors
        dq_out = dq_out if ctx.needs_input_grad[0] else None
        dk_out = dk_out if ctx.needs_input_grad[1] else None
        if dq_out is None and dk_out is None:
            return None, None, None, None, None
        dq, dk = _rope_backward(cos, sin, dq_out, dk_out, ctx.unsqueeze_dim, ctx.q_heads_inside, ctx.k_heads_inside)
        return None if dq_out is None else dq, None if dk_out is None else dk, None, None, None


@rope.register("triton")
def _(q, k, cos, sin, unsqueeze_dim=1):
    _validate(q, k, cos, sin, unsqueeze_dim)
    return RopeFunction.apply(q, k, cos, sin, unsqueeze_dim)
