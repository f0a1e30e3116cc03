r"""Rotate queries and keys by their position (arXiv:2104.09864), as Hugging Face's models do.

    out1 = x1 cos1 - x2 sin1        x1, x2: the two halves of the first rotary_dim values of a head, or its even and its
    out2 = x2 cos2 + x1 sin2        odd values; the rest of the head passes through

    dx1 = dout1 cos1 + dout2 sin2   the rotation by the opposite angle, where the halves of cos and sin are equal
    dx2 = dout2 cos2 - dout1 sin1

Letters: B sequences of T tokens, each of H heads (Hq of the queries, Hk of the keys) of D values, R of them rotary.
Traffic: forward and backward each read and write q and k once, 2BT(Hq + Hk)D, and read cos and sin (2BTR) once a token,
for all of its heads. Bound by memory. The backward needs cos and sin alone.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_kernel_dtype, refuse
from liger_hw.dispatch import Cost, op, raw
from liger_hw.kernels._math import in_row, rounded
from liger_hw.kernels.attention.rope.heads import empty_outputs, heads_and_strides, heads_inside
from liger_hw.kernels.attention.rope.pairs import LAYOUTS, load_angles, load_pairs, store_pairs
from liger_hw.launch import launch
from liger_hw.spelling import check_known
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


def validate_rotation(q, k, cos, sin, unsqueeze_dim, layout="half", shared=False):
    check(unsqueeze_dim in (1, 2), "unsqueeze_dim", unsqueeze_dim, (1, 2))
    check_known("layout", layout, LAYOUTS)
    check(q.ndim == 4 and q.is_floating_point(), "q", q, "four dimensions, floating point")
    (batch, one, two, head_dim), device = q.shape, q.device
    tokens = two if unsqueeze_dim == 1 else one
    if k is not None:
        shape = k.shape
        fits = len(shape) == 4 and shape[3 - unsqueeze_dim] == tokens and shape[0] == batch and shape[3] == head_dim
        check(fits and k.is_floating_point() and k.device == device, "k", k, "q's batch, tokens, head_dim and device")
    shape = cos.shape
    if fits := len(shape) == 3:
        angles, length, width = shape
        fits = length == tokens and (angles == 1 or angles == batch)
        fits = fits and 0 < width <= (head_dim // 2 if shared else head_dim) and (shared or width % 2 == 0)
    if not (fits and cos.is_floating_point() and cos.device == device):
        width = "rotary_dim / 2" if shared else "rotary_dim"
        allowed = f"(1 or batch, tokens, {width}) on q's device, rotary_dim even and at most head_dim"
        refuse("cos", cos, allowed)
    check(sin.shape == shape and sin.dtype == cos.dtype and sin.device == device, "sin", sin, cos)
    if (cos.requires_grad or sin.requires_grad) and torch.is_grad_enabled():
        refuse("cos" if cos.requires_grad else "sin", "a tensor that requires grad", "a constant; detach it")


@op(validate=validate_rotation, fusible=True)
def rope(
    q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1,
    layout: str = "half", shared: bool = False, wide: bool = False,
):  # fmt: skip
    """Rotate the first `rotary_dim` values of each head by its token's angles.

    Like Hugging Face's apply_rotary_pos_emb, with its rounding: both products and their sum are rounded to the promoted
    dtype of the head and `cos`. Where that is wider than the input's (fp32 tables with 16-bit heads), Hugging Face
    returns the wider dtype, and this op rounds the result to the input's dtype.

    Args:
        q: (B, Hq, T, D), or (B, T, Hq, D) with `unsqueeze_dim` 2; any strides and floating dtype, never copied. Plain
            torch computes dtypes other than fp32, fp16 and bf16.
        k: (B, Hk, T, D), or (B, T, Hk, D), with its own number of heads and dtype. None: only `q` is rotated.
        cos: (B or 1, T, R), R even and at most D, a value for each of the output's. A constant: it gets no gradient.
        sin: like `cos`.
        unsqueeze_dim: the dimension of `q` and `k` that counts heads, 1 or 2.
        layout: the two values of a pair: "half" (Llama), value j and value j + R/2; "interleaved" (GPT-J, Cohere, GLM),
            values 2j and 2j + 1; "interleaved_to_half" (DeepSeek-V3), 2j and 2j + 1 of the input, j and j + R/2 of the
            output.
        shared: `cos` and `sin` are (B or 1, T, R/2), a value for each pair (gpt_oss).
        wide: round neither products nor their sum before the result (Qwen2-VL's vision tower, Cohere).

    Returns:
        (q_out, k_out): new dense tensors, shaped and typed like `q` and `k`, in the same memory order: heads of a token
        side by side if the input has them so, otherwise tokens of a head. k_out is None where `k` is.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, `layout` is unknown, or `cos` or `sin` requires grad.

    Examples:
        >>> q, k, angles = torch.rand(1, 4, 5, 8), torch.rand(1, 2, 5, 8), torch.rand(1, 5, 8)
        >>> q, k = liger_hw.rope(q, k, angles.cos(), angles.sin())
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    # no generator, in which StopIteration of a program's hook would become another error
    return tuple([None if x is None else _in_memory_order(x, cos, sin, layout, shared, wide) for x in (q, k)])


@rope.shards
def _(call):
    heads = "b h t D" if call.unsqueeze_dim == 1 else "b t h D"
    return call, {"q": heads, "k": heads, "cos": "b? t D", "sin": "b? t D", "returns": ("q", "k")}


@rope.cost
def _(q, k, cos, sin, unsqueeze_dim=1, layout="half", shared=False, wide=False):
    heads = [x for x in (q, k) if x is not None]
    moved = 2 * sum(x.nbytes for x in heads) + cos.nbytes + sin.nbytes
    done = 3 * sum(x.numel() for x in heads) * cos.shape[-1] * (2 if shared else 1) // q.shape[-1]
    return Cost(moved, moved, done, done)


def _pairs(x, neighbours):
    return (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)


def _in_memory_order(x, cos, sin, *options):
    if not heads_inside(x, 1):
        return _rotated(x, cos, sin, *options)
    return _rotated(*(t.transpose(1, 2) for t in (x, cos, sin)), *options).transpose(1, 2)


def _rotated(x, cos, sin, layout, shared, wide):
    pairs_in, pairs_out = LAYOUTS[layout]
    rotary, rest = x.tensor_split((cos.shape[-1] * (2 if shared else 1),), -1)
    if wide:
        rotary, cos, sin = rotary.float(), cos.float(), sin.float()
    x1, x2 = _pairs(rotary, pairs_in)
    (cos1, cos2), (sin1, sin2) = ((t, t) if shared else _pairs(t, pairs_out) for t in (cos, sin))
    halves = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    rotary = torch.stack(halves, -1).flatten(-2) if pairs_out else torch.cat(halves, -1)
    return torch.cat((rotary.to(x.dtype), rest), -1) if rest.shape[-1] else rotary.to(x.dtype)


@tuned
def rope_rotate_config(heads, half, device):
    heads = min(heads, max(1, 2048 // half))  # both halves are live: 32 values for each of 128 lanes
    # With 32 values a lane a B200's core, which has at most 32 programs, would keep enough bytes in flight. But then
    # neighbours spill 48 bytes on sm_100 by Triton 3.9, and an H200 is 0 to 1% slower.
    return Config({"HEADS": heads}, row_warps(heads * half, device, per_lane=16), fp_fusion=False)


@triton.jit
def _rotate_heads(
    X, OUT, cos1, cos2, sin1, sin2, batch, token, tokens, batch_stride, token_stride, head_stride, dim_stride,
    heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr, HEADS_INSIDE: tl.constexpr,
    dtype: tl.constexpr, PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate all heads of a token, HEADS at a time, into dense memory.

    Products are rounded to `dtype`. A few key heads leave lanes of a tile for the queries idle; a smaller tile would
    have narrower accesses.
    """
    X += batch * batch_stride + token * token_stride
    OUT += batch * (tokens * (heads * head_dim)) + token * (heads * head_dim if HEADS_INSIDE else head_dim)
    out_head_stride = head_dim if HEADS_INSIDE else tokens * head_dim
    half: tl.constexpr = rotary_dim // 2
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        in_head = in_row(head, heads, HEADS)
        x1, x2 = load_pairs(X + head * head_stride, in_head, dim_stride, half, PAIRS_IN, HEADS)
        if BACKWARD:
            out1 = rounded(x1 * cos1, dtype) + rounded(x2 * sin2, dtype)
            out2 = rounded(x2 * cos2, dtype) - rounded(x1 * sin1, dtype)
        else:
            out1 = rounded(x1 * cos1, dtype) - rounded(x2 * sin1, dtype)
            out2 = rounded(x2 * cos2, dtype) + rounded(x1 * sin2, dtype)
        store_pairs(OUT + head * out_head_stride, out1, out2, in_head, half, PAIRS_OUT, HEADS)
        if rotary_dim < head_dim:
            REST: tl.constexpr = triton.next_power_of_2(head_dim - rotary_dim)
            rest = tl.arange(0, REST)[None, :]
            valid = in_head & in_row(rest, head_dim - rotary_dim, REST)
            x = tl.load(X + head * head_stride + (rotary_dim + rest) * dim_stride, valid)
            tl.store(OUT + head * out_head_stride + rotary_dim + rest, x, valid)


@triton.jit(do_not_specialize=["tokens"])
def rope_rotate(
    COS, SIN, Q, K, Q_OUT, K_OUT, tokens, cos_batch_stride, cos_token_stride, cos_dim_stride,
    q_batch_stride, q_token_stride, q_head_stride, q_dim_stride,
    k_batch_stride, k_token_stride, k_head_stride, k_dim_stride,
    q_heads: tl.constexpr, k_heads: tl.constexpr, head_dim: tl.constexpr, rotary_dim: tl.constexpr,
    Q_HEADS_INSIDE: tl.constexpr, K_HEADS_INSIDE: tl.constexpr,
    PAIRS_IN: tl.constexpr, PAIRS_OUT: tl.constexpr, SHARED: tl.constexpr, WIDE: tl.constexpr,
    BACKWARD: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // tokens).to(tl.int64)
    token = (tl.program_id(0) % tokens).to(tl.int64)
    tokens = tokens.to(tl.int64)
    at = batch * cos_batch_stride + token * cos_token_stride
    PAIRS: tl.constexpr = PAIRS_IN if BACKWARD else PAIRS_OUT  # the tables have the layout of the forward's output
    one = tl.full((1, 1), True, tl.int1)
    cos1, cos2, sin1, sin2 = load_angles(COS + at, SIN + at, one, cos_dim_stride, rotary_dim // 2, PAIRS, SHARED)
    if Q is not None:
        _rotate_heads(
            Q, Q_OUT, cos1, cos2, sin1, sin2, batch, token, tokens,
            q_batch_stride, q_token_stride, q_head_stride, q_dim_stride, q_heads, head_dim, rotary_dim, Q_HEADS_INSIDE,
            Q.dtype.element_ty if Q.dtype == COS.dtype and not WIDE else tl.float32,
            PAIRS_IN, PAIRS_OUT, BACKWARD, HEADS,
        )  # fmt: skip
    if K is not None:
        _rotate_heads(
            K, K_OUT, cos1, cos2, sin1, sin2, batch, token, tokens,
            k_batch_stride, k_token_stride, k_head_stride, k_dim_stride, k_heads, head_dim, rotary_dim, K_HEADS_INSIDE,
            K.dtype.element_ty if K.dtype == COS.dtype and not WIDE else tl.float32,
            PAIRS_IN, PAIRS_OUT, BACKWARD, HEADS,
        )  # fmt: skip


def _launch(cos, sin, q, k, outs, unsqueeze_dim, layout, shared, wide, q_heads_inside, k_heads_inside, backward):
    cos_strides = cos.stride()
    if cos_strides != sin.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
        cos_strides = cos.stride()
    angles, tokens, rotary_dim = cos.shape
    rotary_dim *= 2 if shared else 1
    first = k if q is None else q
    q_heads, *q_strides = heads_and_strides(q, unsqueeze_dim)
    k_heads, *k_strides = heads_and_strides(k, unsqueeze_dim)
    pairs_in, pairs_out = LAYOUTS[layout][::-1] if backward else LAYOUTS[layout]
    config = rope_rotate_config(power_of_2(max(q_heads, k_heads)), power_of_2(rotary_dim // 2), device_of(first))
    launch(
        rope_rotate, (first.shape[0] * tokens, 1, 1), config,
        cos, sin, q, k, *outs, tokens,
        cos_strides[0] if angles > 1 else 0, cos_strides[1], cos_strides[2], *q_strides, *k_strides,
        q_heads, k_heads, first.shape[3], rotary_dim, q_heads_inside, k_heads_inside,
        pairs_in, pairs_out, shared, wide, backward,
    )  # fmt: skip


@raw(empty_outputs)
def _rope_forward(
    cos: torch.Tensor, sin: torch.Tensor, q: torch.Tensor, k: torch.Tensor | None, unsqueeze_dim: int, layout: str,
    shared: bool, wide: bool, q_heads_inside: bool, k_heads_inside: bool, *, q_out, k_out,
):  # fmt: skip
    _launch(cos, sin, q, k, (q_out, k_out), unsqueeze_dim, layout, shared, wide, q_heads_inside, k_heads_inside, False)


def _empty_gradients(dq_out, dk_out, unsqueeze_dim, q_heads_inside, k_heads_inside):
    return empty_outputs(dq_out, dk_out, unsqueeze_dim, q_heads_inside, k_heads_inside)


@_rope_forward.backward(_empty_gradients, depends={"q_out": ["q"], "k_out": ["k"]})
def _rope_backward(
    cos, sin, unsqueeze_dim, layout, shared, wide, q_heads_inside, k_heads_inside, dq_out: torch.Tensor | None,
    dk_out: torch.Tensor | None, *, dq, dk,
):  # fmt: skip
    grads = dq, dk
    _launch(cos, sin, dq_out, dk_out, grads, unsqueeze_dim, layout, shared, wide, q_heads_inside, k_heads_inside, True)


@rope.register("triton")
def _(q, k, cos, sin, unsqueeze_dim, layout, shared, wide):
    if k is not None:
        check_kernel_dtype("k", k)
    sin = sin.resolve_neg()  # the memory of a conjugate's imaginary part lacks the sign
    # the gradients take the memory order of q and k, for the view that made those from a projection
    orders = heads_inside(q, unsqueeze_dim), heads_inside(k, unsqueeze_dim)
    return _rope_forward.apply(cos, sin, q, k, unsqueeze_dim, layout, shared, wide, *orders)
