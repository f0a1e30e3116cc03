r"""Compute a linear layer with a low-rank adapter (LoRA, arXiv:2106.09685).

    u   = x A^T                                             A: (r, C)
    y   = x W^T + b + s u B^T                               W: (H, C), B: (H, r)

    du  = s dy B
    dx  = dy W + du A                                       dW = dy^T x, db = sum over rows of dy
    dA  = du^T x
    dB  = s dy^T u

Letters: R rows. The products with W take 2RCH operations each. Those of the adapter have an inner or outer size of r,
16 for example, so memory bounds them: forward reads x once and reads and writes y once (RC + 2RH values beside the
product), backward reads x once, dy twice, and reads and writes dx once.

`lora_project` computes u, in the backward du. `lora_expand` writes u B^T + b, in the backward du A, and the product
with W adds to that: a library adds to its result almost for free. On an H100, 8,192 rows of 4,096 columns take 0.348
instead of 0.342 ms, and a pass of its own over the result took 0.060 ms. So the adapter's part and the sum are rounded,
where PEFT rounds the layer's part and the sum.

Adapters in fp32 on a bf16 model (PEFT's default) keep fp32, without copies of x or dy in fp32: numbers of fp32 become
three of bf16 whose sum they are, and matrix cores multiply those into fp32. torch multiplies dA and dB from the same
terms, which are written for u and du; for many rows it also multiplies u, by terms that `lora_split` writes. Without
kernels, for ranks above 64 and adapters in fp32 on fp16, torch adds the same products to y in place.

W may be stored in 4 bits (QLoRA, arXiv:2305.14314). Forward and backward each write it whole, for one product; no graph
keeps it.
"""

import torch

from liger_hw._torch import has_wide_products
from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, refuse
from liger_hw.dispatch import Cost, differentiable, op, raw, uncast
from liger_hw.kernels._math import dot, in_order, rows_of
from liger_hw.kernels.linear.dequantize_4bit import dequantize_4bit
from liger_hw.kernels.mlp._in_place import goes_in_place
from liger_hw.kernels.mlp.glu import ACTIVATIONS, activate, gated, glu
from liger_hw.kernels.mlp.glu import validate as validate_glu
from liger_hw.kernels.mlp.glu_linear import glu_linear, is_checkpointed, unit_gradients
from liger_hw.launch import launch
from liger_hw.spelling import check_known
from liger_hw.tuning import Config, power_of_2, tuned

MOST_ROWS = 2048  # of `lora_project`; for more, torch multiplies, by three launches
LARGEST_RANK = 64  # tiles of a larger one spill: of 128 on gfx1100, of 256 on every architecture (Triton 3.9)


def _is_autocast(x):
    """Tell whether autocast casts the arguments of F.linear(x, ...); it does not know "meta"."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _validate(x, weight, bias, lora_a, lora_b, dropout=0.0):
    """Check the arguments; return the dtype of the adapter's products, which autocast may set."""
    check(x.is_floating_point() and x.ndim > 0, "x", x, "floating point rows")
    device, cast = x.device, _is_autocast(x)
    dtype = torch.get_autocast_dtype(device.type) if cast else x.dtype
    cols, (features, rank) = x.shape[-1], lora_b.shape if lora_b.ndim == 2 else (0, 0)
    stored, state = _stored(weight)
    allowed = f"{dtype} of shape ({features or 'H'}, {cols}) on {device}"
    dtypes = (weight.dtype,) if cast == (state is None) else (dtype,)  # F.linear casts, and 4 bits become any dtype
    if weight.shape != (features, cols) or stored.device != device or weight.dtype not in dtypes:
        refuse("weight", stored, f"{allowed} (or torch.autocast), or `dequantize_4bit.arguments` of such a weight")
    if bias is not None:
        bias_dtypes = dtype if state is None else weight.dtype, torch.float32
        if bias.shape != (features,) or bias.device != device or not (cast or bias.dtype in bias_dtypes):
            refuse("bias", bias, f"{bias_dtypes[0]} or fp32 of shape ({features},) on {device} (or torch.autocast)")
    if lora_a.shape != (rank, cols) or rank == 0 or lora_a.device != device or not lora_a.is_floating_point():
        refuse("lora_a", lora_a, f"floating point of shape ({rank or 'r'}, {cols}) on {device}")
    if lora_b.device != device or lora_b.dtype != lora_a.dtype:
        refuse("lora_b", lora_b, f"{lora_a.dtype} of shape {(features, rank)} on {device}")
    if not 0 <= dropout <= 1:
        refuse("dropout", dropout, "0 to 1")
    return dtype


@op
def lora_linear(
    x: torch.Tensor, weight: torch.Tensor | tuple, bias: torch.Tensor | None, lora_a: torch.Tensor,
    lora_b: torch.Tensor, scaling: float = 1.0, dropout: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """Compute F.linear(x, weight, bias) + scaling * F.linear(F.linear(dropout(x), lora_a), lora_b).

    This is peft.tuners.lora.layer.Linear with one adapter. With kernels the adapter's part and the sum are
    rounded, where PEFT rounds the base's result, the sum and, with adapters of x's dtype, each step of the adapter;
    dropout draws the same mask.

    Args:
        x: (..., C), any floating dtype.
        weight: (H, C), in `x.dtype`; under torch.autocast any, cast as F.linear casts. It may be frozen. Or
            `dequantize_4bit.arguments` of a frozen weight, whose product is computed in their `dtype` (autocast's under
            autocast), and rounded to `x.dtype`.
        bias: (H,), in a dtype as for `weight` or in fp32, which its gradient keeps, or None.
        lora_a: (r, C), in `x.dtype`, or in fp32 for an x in bf16. Plain torch multiplies others, and ranks above 64.
        lora_b: (H, r), in the dtype of `lora_a`.
        scaling: of the adapter's part; PEFT's lora_alpha / r, or lora_alpha / sqrt(r) (arXiv:2312.03732).
        dropout: the share of the values of x that the adapter does not see; 0 where the module is not training.

    Returns:
        (..., H), in the dtype of F.linear(x, weight, bias); with a weight in 4 bits in `x.dtype`.

    Raises:
        ValueError: a weight does not fit `x`, or `dropout` is not within 0 to 1.

    Examples:
        >>> x, weight, a, b = torch.rand(2, 8), torch.rand(6, 8), torch.rand(4, 8), torch.rand(6, 4)
        >>> liger_hw.lora_linear(x, weight, None, a, b, scaling=2.0).shape
        torch.Size([2, 6])
    """
    _validate(x, weight, bias, lora_a, lora_b, dropout)
    stored, state = _stored(weight)
    is_late = bias is not None and bias.dtype != weight.dtype and not _is_autocast(x)
    first_bias = None if is_late else bias
    if state is None:
        y = torch.nn.functional.linear(x, weight, first_bias)
    else:
        y = _frozen_linear.apply(x, stored, state, first_bias)
    dropped = torch.nn.functional.dropout(x.to(lora_a.dtype), dropout)
    update = torch.nn.functional.linear(torch.nn.functional.linear(dropped, lora_a), lora_b) * scaling
    return (y + (update + bias if is_late else update)).to(y.dtype)


lora_linear.shards(x="... C", weight="h C", bias="h", lora_a="r C", lora_b="h r", returns="... h")


@lora_linear.cost
def _(x, weight, bias, lora_a, lora_b, scaling=1.0, dropout=0.0):
    rows = x.numel() // x.shape[-1]
    y_bytes = rows * weight.shape[0] * weight.itemsize
    inputs = sum(t.nbytes for t in (x, weight, lora_a, lora_b))
    product = 2 * rows * (weight.numel() + lora_a.numel() + lora_b.numel())
    # backward: dx of the same size; dA and dB, du
    small = 2 * rows * (lora_a.numel() + lora_b.numel())
    more = 2 * rows * weight.numel() if weight.requires_grad else 0
    return Cost(inputs + y_bytes, inputs + y_bytes + x.nbytes, product, product + small + more)


# The adapter's products -----------------------------------------------------------------------------------------------


@tuned
def lora_project_config(rank, vectors, device):
    # On an H100 with 8,192 rows and a rank of 16, tiles of 64 rows that read three blocks ahead take 0.046 ms for 4,096
    # columns and 0.112 for 14,336; with two 0.052 and 0.121. Tiles of 32 rows take half as long again for 4,096.
    rows, depth = _tile(rank, vectors)
    stages = min(4, device.shared_memory // ((2 * rows + 4 * rank) * depth)) if device.async_copy else 2
    return Config({"ROWS": rows, "DEPTH": depth}, _warps(rows * depth, rank, device), max(stages, 2))


@tuned
def lora_expand_config(rank, vectors, device):
    # It only writes y: for 8,192 rows on an H100 four warps take 0.086 ms of 14,336 columns, eight 0.171. Half of the
    # warps need twice the registers a lane: of a core without known registers they may not be there.
    rows, cols = _tile(rank, vectors)
    return Config({"ROWS": rows, "COLS": cols}, _warps(rows * cols // (2 if device.core else 1), rank, device))


@tuned
def lora_split_config(device):
    return Config({"VALUES": 1024}, 128 // device.warp_size)


def _tile(rank, vectors):
    """Return the sizes of a tile of x or y.

    Without whole vectors each value has a pointer.
    """
    return (max(min(2048 // rank, most), 16) for most in (64, 128 if vectors else 32))


def _warps(values, rank, device):
    return max(128 if rank <= 32 else 256, 2 * values // device.registers) // device.warp_size


@triton.jit
def split(value, dtype: tl.constexpr):
    """Split numbers of fp32 into leading, middle and last bits, which 16-bit numbers hold."""
    hi = value.to(dtype)
    rest = tl.where(tl.abs(hi.to(tl.float32)) < float("inf"), value - hi.to(tl.float32), 0.0)  # inf - inf is NaN
    mid = rest.to(dtype)
    return hi, mid, (rest - mid.to(tl.float32)).to(dtype)


@triton.jit(do_not_specialize=["rows"])
def lora_project(
    X, FIRST, U, rows, scale, x_stride, first_inner, first_rank, inner, rank, RANK: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write rows of U = scale X FIRST (inner, rank). WHOLE: DEPTH divides `inner`."""
    row, r = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, RANK)
    inside, in_rank = row < rows, (r < rank)[None, :]
    total = tl.zeros((ROWS, RANK), tl.float32)
    for start in range(0, inner, DEPTH):
        i = start + tl.arange(0, DEPTH)
        mask, factor_mask = inside, in_rank
        if not WHOLE:
            mask, factor_mask = mask & (i < inner)[None, :], factor_mask & (i < inner)[:, None]
        x = tl.load(X + row * x_stride + i[None, :], mask, 0.0)
        factor = tl.load(FIRST + i[:, None] * first_inner + r[None, :] * first_rank, factor_mask, 0.0)
        if FIRST.dtype.element_ty == X.dtype.element_ty:
            total = dot(x, factor, total, "ieee")
        else:
            hi, mid, lo = split(factor, X.dtype.element_ty)
            total = dot(x, lo, total, "ieee")
            total = dot(x, mid, total, "ieee")
            total = dot(x, hi, total, "ieee")
    u, mid, lo = split(total * scale, X.dtype.element_ty)
    parts: tl.constexpr = 1 if FIRST.dtype.element_ty == X.dtype.element_ty else 3
    at, mask = U + row * (parts * rank) + r[None, :], inside & in_rank
    tl.store(at, u, mask)
    if parts == 3:
        tl.store(at + rank, mid, mask)
        tl.store(at + 2 * rank, lo, mask)


@triton.jit(do_not_specialize=["rows"])
def lora_expand(
    U, SECOND, BIAS, Y, rows, second_rank, second_outer, outer, rank, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Write a tile of Y = U SECOND (rank, outer) + BIAS."""
    row, r = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, DEPTH)[None, :]
    col = (tl.program_id(1) * COLS + tl.arange(0, COLS))[None, :]
    mask, u_mask = (row < rows) & (col < outer), (row < rows) & (r < rank)
    parts: tl.constexpr = 1 if SECOND.dtype.element_ty == Y.dtype.element_ty else 3
    u = tl.load(U + row * (parts * rank) + r, u_mask, 0.0)
    factor_rank = tl.arange(0, DEPTH)[:, None]
    factor_mask = (factor_rank < rank) & (col < outer)
    factor = tl.load(SECOND + factor_rank * second_rank + col * second_outer, factor_mask, 0.0)
    product = tl.zeros((ROWS, COLS), tl.float32)
    if parts == 1:
        product = dot(u, factor, product, "ieee")
    else:  # y is rounded to 8 bits: products of 16 bits do
        mid = tl.load(U + row * (parts * rank) + rank + r, u_mask, 0.0)
        factor_hi, factor_mid, _ = split(factor, Y.dtype.element_ty)
        product = dot(mid, factor_hi, product, "ieee")
        product = dot(u, factor_mid, product, "ieee")
        product = dot(u, factor_hi, product, "ieee")
    if BIAS is not None:
        product += tl.load(BIAS + col, col < outer, 0.0).to(tl.float32)
    tl.store(Y + row * outer + col, product, mask)


@triton.jit
def lora_split(
    X, OUT, values, scale, x_stride, out_stride, next_term, cols, PARTS: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """Write the terms of scale times the sum of `PARTS` blocks of columns."""
    value = tl.program_id(0).to(tl.int64) * VALUES + tl.arange(0, VALUES)
    mask, row, col = value < values, value // cols, value % cols
    total = tl.zeros((VALUES,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(X + row * x_stride + part * cols + col, mask, 0.0)
    hi, mid, lo = split(total * scale, OUT.dtype.element_ty)
    at = OUT + row * out_stride + col
    tl.store(at, hi, mask)
    tl.store(at + next_term, mid, mask)
    tl.store(at + 2 * next_term, lo, mask)


def _is_split(x, factor):
    """Tell whether fp32 numbers of an adapter become three of 16 bits."""
    return (x.dtype, factor.dtype) == (torch.bfloat16, torch.float32)


def _runs_kernels(x, factor, rank):
    """Tell whether the kernels multiply by a factor of an adapter.

    torch adds up long sums of fp32 with less error.
    """
    return rank <= LARGEST_RANK and x.dtype != torch.float32 and (x.dtype == factor.dtype or _is_split(x, factor))


def _split(x, summands, stacked=False, parts=1, scale=1.0):
    """Write the terms of `split` side by side, or `stacked`.

    Args:
        x: (A, `parts` B) fp32, whose parts are added and multiplied by `scale`.
        summands: (A, 3B), or (3A, B).
    """
    rows, cols = x.shape[0], x.shape[1] // parts
    config = lora_split_config(device_of(x))
    stride, next_term = (cols, rows * cols) if stacked else (3 * cols, cols)
    launch(
        lora_split, (-(-rows * cols // config["VALUES"]), 1, 1), config, x, summands, rows * cols, scale, x.stride(0),
        stride, next_term, cols, parts,
    )  # fmt: skip


def _split_factor(factor, dtype):
    """Return the terms of an adapter's factor (K, r) side by side, (K, 3r)."""
    inner, rank = factor.shape
    summands = factor.new_empty(3 * inner * rank, dtype=dtype)
    if factor.stride(0) == 1:  # of A^T
        _split(factor.t(), summands, stacked=True)
        return summands.view(3 * rank, inner).t()
    _split(factor.contiguous(), summands)
    return summands.view(inner, 3 * rank)


def _allocate_u(x, first):
    if _is_split(x, first):
        return x.new_empty(x.shape[0], 3 * first.shape[1])
    return x.new_empty(x.shape[0], first.shape[1], dtype=first.dtype)


@raw(_allocate_u)
def adapter_project(x: torch.Tensor, first: torch.Tensor, scale: float, *, u):
    """Compute u = scale x first.

    Args:
        x: (R, K). first: (K, r).

    Returns:
        u (R, r) in the dtype of `first`; of fp32 on bf16 the terms of 16 bits whose sum it is, (R, 3r).
    """
    # On an H100 a step of 2,048 rows of Llama-1B waits for its host: one launch. Of 8,192 rows and 4,096 columns the
    # kernel takes 0.053 ms and a library's product 0.030; of 14,336 columns 0.171 and 0.088.
    if x.shape[0] > MOST_ROWS or not _runs_kernels(x, first, first.shape[1]):
        if _is_split(x, first):
            _split(_wide_product(x, _split_factor(first, x.dtype)), u, parts=3, scale=scale)
        else:
            torch.addmm(u, x.to(first.dtype), first, beta=0, alpha=scale, out=u)
        return
    (inner, rank), (x, x_stride) = first.shape, rows_of(x)
    device, size = device_of(x), max(power_of_2(rank), 16)
    config = lora_project_config(size, not (x_stride | inner) % 16, device)
    launch(
        lora_project, (-(-x.shape[0] // config["ROWS"]), 1, 1), config, x, first, u, x.shape[0], scale, x_stride,
        *first.stride(), inner, rank, size, inner % config["DEPTH"] == 0,
    )  # fmt: skip


@raw(lambda u, second: u.new_empty(u.shape[0], second.shape[1]))
def adapter_expand(u: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None, *, y):
    """Compute y = u second + bias by the kernel.

    Args:
        u: what `adapter_project` returns for x in the dtype of y. second: (r, N). bias: (N,), or None.
    """
    (rows, outer), rank = y.shape, second.shape[0]
    size = max(power_of_2(rank), 16)
    config = lora_expand_config(size, not outer % 16, device_of(y))
    grid = -(-rows // config["ROWS"]), -(-outer // config["COLS"]), 1
    bias = None if bias is None else in_order(bias)
    launch(lora_expand, grid, config, u, second, bias, y, rows, *second.stride(), outer, rank, size)


@raw(mutates=("y",))
def adapter_add(y: torch.Tensor, u: torch.Tensor, second: torch.Tensor) -> None:
    """Add u second to y (R, N) in place, by torch."""
    if _is_split(y, second):  # as in the kernel
        (hi, mid, _), (second_hi, second_mid, _) = u.chunk(3, 1), _split_factor(second.t(), y.dtype).t().chunk(3)
        u, second = torch.cat([hi, hi, mid], 1), torch.cat([second_hi, second_mid, second_hi])
    if second.dtype == y.dtype:
        y.addmm_(u, second)
    else:
        y.add_(torch.mm(u, second))


def add_products(rows, matrix, bias, u, second, mask=None):
    """Return rows matrix + bias + mask (u second), in the dtype of `rows`.

    Args:
        rows: (R, K). matrix: (K, N), in any dtype. u: (R, r), `adapter_project`'s. second: (r, N).
    """
    if rows.dtype == matrix.dtype and _runs_kernels(rows, second, second.shape[0]):
        y = adapter_expand(u, second, bias)
        return (y if mask is None else y.mul_(mask)).addmm_(rows, matrix)
    is_late = bias is not None and rows.dtype != matrix.dtype  # fp32, perhaps that of the rows
    first_bias = None if bias is None or is_late else bias.to(matrix.dtype)
    y = torch.nn.functional.linear(rows.to(matrix.dtype), matrix.t(), first_bias).to(rows.dtype)
    if is_late:
        y.add_(bias)
    update = y if mask is None else torch.zeros_like(y)
    adapter_add(update, u, second)
    return y if mask is None else y.addcmul_(update, mask)


def gradients(rows, du, lora_a, dy, u, lora_b, lora_a_grad, lora_b_grad):
    """Return du^T rows and dy^T u, the gradients of A and B, or None."""
    if not _is_split(rows, lora_a):
        return (
            torch.mm(du.t(), rows.to(du.dtype)) if lora_a_grad else None,
            torch.mm(dy.to(u.dtype).t(), u) if lora_b_grad else None,
        )
    return (
        _wide_product(du.t(), rows).view(3, *lora_a.shape).sum(0) if lora_a_grad else None,
        _wide_product(dy.t(), u).view(lora_b.shape[0], 3, -1).sum(1) if lora_b_grad else None,
    )


@raw(lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32))
def _wide_product(a: torch.Tensor, b: torch.Tensor, *, y):
    if has_wide_products(a.device.type):
        torch.mm(a, b, out_dtype=torch.float32, out=y)
    else:
        torch.mm(a.float(), b.float(), out=y)


# Autograd -------------------------------------------------------------------------------------------------------------


def _stored(weight):
    """Return (tensor of a weight, None), or of 4 bits (packed numbers, `dequantize_4bit`'s further arguments)."""
    check(isinstance(weight, (torch.Tensor, dequantize_4bit.arguments)), "weight", weight, "a tensor, or "
          "`dequantize_4bit.arguments`")  # fmt: skip
    return (weight, None) if isinstance(weight, torch.Tensor) else (weight.packed, tuple(weight[1:]))


def _whole(weight, state):
    """Return a stored weight, of 4 bits written whole in their dtype."""
    return weight if state is None else dequantize_4bit(weight, *state)


@differentiable("y")
def _frozen_linear(x: torch.Tensor, weight: torch.Tensor, state: tuple, bias: torch.Tensor | None):
    """Compute F.linear(x, weight, bias) of 4 bits in their dtype, for the reference."""
    weight = _whole(weight, state)
    is_late = bias is not None and bias.dtype != weight.dtype  # fp32, perhaps that of x
    y = torch.nn.functional.linear(x.to(weight.dtype), weight, None if is_late else bias).to(x.dtype)
    return y.add_(bias) if is_late else y


@_frozen_linear.backward()
def _(weight, state, dy, *, x_grad, bias_grad):
    with uncast(dy):
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        if x_grad:
            weight = _whole(weight, state)
            dx = torch.mm(rows.to(weight.dtype), weight).to(dy.dtype).view(*dy.shape[:-1], -1)
        return dx, rows.sum(0) if bias_grad else None


@differentiable("y u")
def _lora_linear(
    x: torch.Tensor, weight: torch.Tensor, state: tuple | None, bias: torch.Tensor | None, lora_a: torch.Tensor,
    lora_b: torch.Tensor, mask: torch.Tensor | None, scaling: float, sum_dtype: torch.dtype | None,
):  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    u = adapter_project(_seen(rows, mask), lora_a.t(), scaling)
    y = add_products(rows, _whole(weight, state).t(), bias, u, lora_b.t())
    return y.view(*x.shape[:-1], lora_b.shape[0]), u


@_lora_linear.backward()
def _(
    x, weight, state, lora_a, lora_b, mask, scaling, sum_dtype, u, dy,
    *, x_grad, weight_grad, bias_grad, lora_a_grad, lora_b_grad,
):  # fmt: skip
    with uncast(dy):  # a program may call backward within autocast
        dy, rows, dx, du = dy.reshape(-1, lora_b.shape[0]), x.reshape(-1, x.shape[-1]), None, None
        if x_grad or lora_a_grad:
            du = adapter_project(dy, lora_b, scaling)
        if x_grad:
            dx = add_products(dy, _whole(weight, state), None, du, lora_a, mask).view(x.shape)
        seen = _seen(rows, mask) if lora_a_grad else rows
        da, db = gradients(seen, du, lora_a, dy, u, lora_b, lora_a_grad, lora_b_grad)
        dw = torch.mm(dy.t(), rows) if weight_grad else None
        return dx, dw, dy.sum(0, dtype=sum_dtype) if bias_grad else None, da, db


def _seen(rows, mask):
    """Return the rows that the adapter sees, but for dropout's factor."""
    return rows if mask is None else rows * mask


def _sum_dtype(bias):
    """Return the dtype of the sum for a bias gradient, None for the rows' dtype."""
    return torch.float32 if bias is not None and bias.dtype == torch.float32 else None


def _cast(x, dtype, tensors):
    """Return tensors as autocast casts them for F.linear; 4-bit numbers stay."""
    if not _is_autocast(x):
        return tensors
    return [t.to(dtype) if t is not None and t.is_floating_point() else t for t in tensors]


@lora_linear.register("triton")
def _(x, weight, bias, lora_a, lora_b, scaling=1.0, dropout=0.0):
    dtype = _validate(x, weight, bias, lora_a, lora_b, dropout)
    stored, state = _stored(weight)
    rows, *tensors = _cast(x, dtype, [x, stored, bias, lora_a, lora_b])
    stored, bias_cast, a, b = tensors
    if dropout == 1:
        return lora_linear.reference(x, weight, bias, lora_a, lora_b, scaling, dropout)
    mask = None
    if dropout:  # the mask that torch draws depends on the dtype
        mask = torch.native_dropout(x.detach().to(lora_a.dtype).view(-1, x.shape[-1]), dropout, True)[1]
        scaling = scaling / (1 - dropout)
    y = _lora_linear.apply(rows, stored, state, bias_cast, a, b, mask, scaling, _sum_dtype(bias_cast))
    return y if state is None else y.to(x.dtype)


# The end of a gated MLP -----------------------------------------------------------------------------------------------


def _validate_glu(gate, up, weight, bias, lora_a, lora_b, activation):
    validate_glu(gate, up)
    check_known("activation", activation, ACTIVATIONS)
    promoted = up if up is not None and torch.promote_types(gate.dtype, up.dtype) == up.dtype else gate
    return _validate(promoted, weight, bias, lora_a, lora_b)


@op
def lora_glu_linear(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor | tuple,
    bias: torch.Tensor | None, lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float = 1.0,
    activation: str = "silu", in_place: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute lora_linear(f(gate) * up, weight, ...), the end of a gated MLP with an adapter.

    Where `gate` or `up`, and `lora_a` or `weight`, want gradients, the backward recomputes the product instead of
    keeping it. Otherwise, where dtypes differ, and in the reference (a CPU), the op runs the two steps.

    Args:
        gate, up, activation, in_place: as in `glu_linear`.
        weight, bias, lora_a, lora_b, scaling: as in `lora_linear`.

    Returns:
        (..., H), in the dtype of the product, or autocast's with a plain weight.

    Raises:
        ValueError: as in `glu_linear` and `lora_linear`.

    Examples:
        >>> gate, up, weight = torch.rand(2, 8), torch.rand(2, 8), torch.rand(6, 8)
        >>> liger_hw.lora_glu_linear(gate, up, weight, None, torch.rand(4, 8), torch.rand(6, 4)).shape
        torch.Size([2, 6])
    """
    _validate_glu(gate, up, weight, bias, lora_a, lora_b, activation)
    y = activate.reference(gate, activation)
    return lora_linear.reference(y if up is None else y * up, weight, bias, lora_a, lora_b, scaling)


lora_glu_linear.shards(gate="... C", up="... C", weight="h C", bias="h", lora_a="r C", lora_b="h r", returns="... h")


@lora_glu_linear.cost
def _(gate, up, weight, bias, lora_a, lora_b, scaling=1.0, activation="silu", in_place=False):
    unit_cost = glu_linear.cost_of(gate, up, weight, bias, activation)
    linear = lora_linear.cost_of(gate, weight, bias, lora_a, lora_b)
    plain = 2 * gate.numel() * weight.shape[0]
    return Cost(
        unit_cost.forward_bytes + lora_a.nbytes + lora_b.nbytes,
        unit_cost.backward_bytes + lora_a.nbytes + lora_b.nbytes,
        unit_cost.forward_flops - plain + linear.forward_flops,
        unit_cost.backward_flops - 2 * plain + linear.backward_flops,
    )


@differentiable("out y u")
def _lora_glu_linear(
    gate: torch.Tensor, up: torch.Tensor | None, weight: torch.Tensor, state: tuple | None, bias: torch.Tensor | None,
    lora_a: torch.Tensor, lora_b: torch.Tensor, scaling: float, sum_dtype: torch.dtype | None, activation: str,
    defers: bool,
):  # fmt: skip
    """Compute the op for one dtype.

    `defers`: return a placeholder without memory instead of the result, for `_deferred_projection`.
    """
    y = glu(gate, up, activation)
    rows, shape = y.view(-1, y.shape[-1]), (*gate.shape[:-1], lora_b.shape[0])
    u = adapter_project(rows, lora_a.t(), scaling)
    if defers:
        return gate.new_empty_strided(shape, [0] * gate.ndim), y, u
    return add_products(rows, _whole(weight, state).t(), bias, u, lora_b.t()).view(shape), y, u


@_lora_glu_linear.backward(without_gradient="y u")
def _(
    gate, up, weight, state, lora_a, lora_b, scaling, sum_dtype, activation, in_place: bool, u, dout,
    *, gate_grad, up_grad, weight_grad, bias_grad, lora_a_grad, lora_b_grad,
):  # fmt: skip
    with uncast(dout):
        dout = dout.reshape(-1, lora_b.shape[0])
        du = adapter_project(dout, lora_b, scaling)
        dy = add_products(dout, _whole(weight, state), None, du, lora_a).view(gate.shape)
        dgate, dup = unit_gradients(gate, up, dy, activation, in_place, gate_grad, up_grad)
        y = dy.view(-1, gate.shape[-1])  # the kernel wrote it over dy
        da, db = gradients(y, du, lora_a, dout, u, lora_b, lora_a_grad, lora_b_grad)
        dw = torch.mm(dout.t(), y) if weight_grad else None
        return dgate, dup, dw, dout.sum(0, dtype=sum_dtype) if bias_grad else None, da, db


@differentiable("out")
def _deferred_projection(placeholder: torch.Tensor, tensors: tuple):  # autograd tracks no tuple
    """Compute the result of the placeholder of `_lora_glu_linear`, and keep nothing."""
    y, u, weight, state, bias, lora_b = tensors
    rows = y.view(-1, y.shape[-1])
    return add_products(rows, _whole(weight, state).t(), bias, u, lora_b.t()).view(placeholder.shape)


@_deferred_projection.backward()
def _(dout, *, placeholder_grad):
    return dout


@lora_glu_linear.register("triton")
def _(gate, up, weight, bias, lora_a, lora_b, scaling=1.0, activation="silu", in_place=False):
    dtype = _validate_glu(gate, up, weight, bias, lora_a, lora_b, activation)
    learns = gate.requires_grad or up is not None and up.requires_grad
    stored, state = _stored(weight)
    keeps_y = torch.is_grad_enabled() and learns and (stored.requires_grad or lora_a.requires_grad)
    stored, *others = _cast(gate, dtype, [stored, bias, lora_a, lora_b])
    one_dtype = gate.dtype == dtype == (gate if up is None else up).dtype
    if not keeps_y or not one_dtype:
        return lora_linear(gated(gate, up, activation, in_place), weight, bias, lora_a, lora_b, scaling)
    defers, in_place = is_checkpointed(), goes_in_place(gate, up, in_place)
    bias, lora_a, lora_b = others
    sum_dtype = _sum_dtype(bias)
    out, y, u = _lora_glu_linear.apply(
        gate, up, stored, state, bias, lora_a, lora_b, scaling, sum_dtype, activation, defers, in_place
    )
    return _deferred_projection.apply(out, (y, u, stored, state, bias, lora_b)) if defers else out
