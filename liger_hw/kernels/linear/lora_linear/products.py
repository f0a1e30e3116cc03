"""Multiply rows by an adapter's factors, by kernels or by torch."""

import math

import torch

from liger_hw._torch import has_wide_products, results_are_kept
from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import raw, traced_as_one
from liger_hw.inlining import is_traced
from liger_hw.kernels._math import dot
from liger_hw.kernels._rows import contiguous, rows_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, tuned

MOST_ROWS = 2048  # of `lora_project` and `lora_gradients`; for more, torch multiplies, by more launches
BF16, FP32 = torch.bfloat16, torch.float32
DTYPE_PAIRS = {(torch.float16, torch.float16), (BF16, BF16), (BF16, FP32)}  # dtypes of x and an adapter in kernels
LARGEST_RANK = 64  # tiles of a larger one spill: of 128 on gfx1100, of 256 on every architecture (Triton 3.9)


@tuned
def lora_project_config(rank, vectors, device):
    # On an H100, of 2,048 rows, it takes 0.008 ms of 2,048 columns and 0.020 of 8,192. One loop took 0.026 and 0.096 in
    # tiles of 64 x 128, and 0.015 and 0.053 with half the warps.
    num_warps, rows, depth = 256 // device.warp_size, 16, max(1024 // rank, 16) if vectors else 16
    stage_bytes = num_warps * depth * (2 * rows + 4 * rank)
    stages = min(4, device.shared_memory // stage_bytes) if device.async_copy else 2
    return Config({"SPLIT": num_warps, "ROWS": rows, "DEPTH": depth}, num_warps, max(stages, 2))


@tuned
def lora_expand_config(rank, vectors, device):
    # It only writes y: for 8,192 rows on an H100 four warps take 0.086 ms of 14,336 columns, eight 0.171. Half of the
    # warps need twice the registers a lane: of a core without known registers they may not be there.
    rows, cols = _tile(rank, vectors)
    return Config({"ROWS": rows, "COLS": cols}, _warps(rows * cols // (2 if device.core else 1), rank, device))


@tuned
def lora_gradients_config(rank, vectors, device):
    cols, rows = (64 if vectors else min(1024 // rank, 32)), (64 if rank <= 32 else 32)
    stages = min(4, device.shared_memory // ((2 * cols + 6 * rank) * rows)) if device.async_copy else 2
    return Config({"COLS": cols, "ROWS": rows}, _warps(rows * cols, rank, device), max(stages, 2))


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
    SPLIT: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write rows of U = scale X FIRST (inner, rank).

    WHOLE: SPLIT * DEPTH divides `inner`. A loop over `inner` waits for each product before the next. So SPLIT of them
    run side by side, each in warps of its own, and the terms of fp32 have a sum each.
    """
    row, r = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None], tl.arange(0, RANK)
    inside, in_rank = row < rows, (r < rank)[None, :]
    part, depth = tl.arange(0, SPLIT)[:, None, None] * DEPTH, tl.arange(0, DEPTH)
    total = tl.zeros((SPLIT, ROWS, RANK), tl.float32)
    mid_total, lo_total = total, total
    for start in range(0, inner, SPLIT * DEPTH):
        i, factor_i = start + part + depth[None, None, :], start + part + depth[None, :, None]
        mask, factor_mask = inside[None, :, :], in_rank[None, :, :]
        if not WHOLE:
            mask, factor_mask = mask & (i < inner), factor_mask & (factor_i < inner)
        x = tl.load(X + row[None, :, :] * x_stride + i, mask, 0.0)
        factor = tl.load(FIRST + factor_i * first_inner + r[None, None, :] * first_rank, factor_mask, 0.0)
        if FIRST.dtype.element_ty == X.dtype.element_ty:
            total = dot(x, factor, total, "ieee")
        else:
            hi, mid, lo = split(factor, X.dtype.element_ty)
            lo_total = dot(x, lo, lo_total, "ieee")
            mid_total = dot(x, mid, mid_total, "ieee")
            total = dot(x, hi, total, "ieee")
    u, mid, lo = split(tl.sum(lo_total + mid_total + total, 0) * scale, X.dtype.element_ty)
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
def _pick(which, first, second, third, fourth, of: tl.constexpr = 1):
    """Return the argument of this number, a multiple of `of`; others may be None."""
    if second is not None:
        first = tl.where(which == 1, second, first)
    if third is not None:
        first = tl.where(which == 2, third, first)
    if fourth is not None:
        first = tl.where(which == 3, fourth, first)
    # here, as Triton 3.6 forgets what is said of a call's result
    return first if of == 1 else tl.multiple_of(first, of)


@triton.jit(do_not_specialize=["rows", "cols", "cols1", "cols2", "cols3", "rank", "rank1", "rank2", "rank3"])
def lora_gradients(
    X, U, OUT, X1, U1, OUT1, X2, U2, OUT2, X3, U3, OUT3, cols, cols1, cols2, cols3, rank, rank1, rank2, rank3, rows,
    cols_of: tl.constexpr, ranks_of: tl.constexpr, A_FIRST: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr,
    COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write a tile of X^T U (cols, rank) of one of up to four products.

    A_FIRST: the first one is transposed. cols_of, ranks_of: powers of two that divide all.
    """
    which = tl.program_id(1)
    x, u, out = _pick(which, X, X1, X2, X3), _pick(which, U, U1, U2, U3), _pick(which, OUT, OUT1, OUT2, OUT3)
    cols, rank = _pick(which, cols, cols1, cols2, cols3, cols_of), _pick(which, rank, rank1, rank2, rank3, ranks_of)
    first = tl.program_id(0) * COLS
    col, r = (first + tl.arange(0, COLS))[:, None], tl.arange(0, RANK)[None, :]
    total = tl.zeros((COLS, RANK), tl.float32)
    for start in range(0, tl.where(first < cols, rows, 0), ROWS):
        row = start + tl.arange(0, ROWS)
        tile = tl.load(x + row[None, :] * cols + col, (row < rows)[None, :] & (col < cols), 0.0)
        at, mask = u + row[:, None] * (PARTS * rank) + r, (row < rows)[:, None] & (r < rank)
        for part in tl.static_range(PARTS):  # the last bits first
            total = dot(tile, tl.load(at + (PARTS - 1 - part) * rank, mask, 0.0), total, "ieee")
    if A_FIRST & (which == 0):  # each in the order of memory
        tl.store(out + tl.trans(r) * cols + tl.trans(col), tl.trans(total), tl.trans((col < cols) & (r < rank)))
    else:
        tl.store(out + col * rank + r, total, (col < cols) & (r < rank))


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
    return x.dtype == BF16 and factor.dtype == FP32


def _runs_kernels(x, factor, rank):
    """Tell whether the kernels multiply by a factor of an adapter.

    torch adds up long sums of fp32 with less error.
    """
    return rank <= LARGEST_RANK and (x.dtype, factor.dtype) in DTYPE_PAIRS


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
    rows, rank = x.shape[0], first.shape[1]
    return x.new_empty(rows, 3 * rank) if _is_split(x, first) else x.new_empty(rows, rank, dtype=first.dtype)


@raw(_allocate_u, most_rows=MOST_ROWS)
def adapter_project(x: torch.Tensor, first: torch.Tensor, scale: float, *, u):
    """Compute u = scale x first.

    Args:
        x: (R, K). first: (K, r).

    Returns:
        u (R, r) in the dtype of `first`; of fp32 on bf16 the terms of 16 bits whose sum it is, (R, 3r).
    """
    # On an H100 a step of 2,048 rows of Llama-1B waits for its host: one launch. Of 8,192 rows and 4,096 columns the
    # kernel takes 0.053 ms and a library's product with its terms 0.042; of 14,336 columns 0.135 and 0.100.
    rows, (inner, rank) = x.shape[0], first.shape
    if rows > MOST_ROWS or not _runs_kernels(x, first, rank):
        if _is_split(x, first):
            _split(_wide_product(x, _split_factor(first, x.dtype)), u, parts=3, scale=scale)
        else:
            torch.addmm(u, x.to(first.dtype), first, beta=0, alpha=scale, out=u)
        return
    (x, x_stride), size = rows_of(x), max(power_of_2(rank), 16)
    config = lora_project_config(size, not (x_stride | inner) % 16, device_of(x))
    launch(
        lora_project, (-(-rows // config["ROWS"]), 1, 1), config, x, first, u, rows, scale, x_stride,
        *first.stride(), inner, rank, size, inner % (config["SPLIT"] * config["DEPTH"]) == 0,
    )  # fmt: skip


def project_by_each(x, factors, scales):
    """Return adapter_project(x, A^T, scale) for several A; one product reads many rows once."""
    if x.shape[0] <= MOST_ROWS or not all(_is_split(x, factor) for factor in factors):
        return [adapter_project(x, factor.t(), scale) for factor, scale in zip(factors, scales)]
    products = _wide_product(x, torch.cat([_stacked_summands(factor, x.dtype) for factor in factors]).t())
    parts = products.split([3 * len(factor) for factor in factors], 1)
    return [_scaled_summands(part, scale, x.dtype) for part, scale in zip(parts, scales)]


@raw(lambda factor, dtype: factor.new_empty(3 * factor.shape[0], factor.shape[1], dtype=dtype))
def _stacked_summands(factor: torch.Tensor, dtype: torch.dtype, *, summands):
    _split(factor.contiguous(), summands, stacked=True)


@raw(lambda products, dtype: torch.empty_like(products, dtype=dtype, memory_format=torch.contiguous_format))
def _scaled_summands(products: torch.Tensor, scale: float, dtype: torch.dtype, *, summands):
    _split(products, summands, parts=3, scale=scale)


@raw(lambda u, second: u.new_empty(u.shape[0], second.shape[1]), most_rows=MOST_ROWS)
def adapter_expand(u: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | None, *, y):
    """Compute y = u second + bias by the kernel.

    Args:
        u: what `adapter_project` returns for x in the dtype of y. second: (r, N). bias: (N,), or None.
    """
    (rows, outer), rank = y.shape, second.shape[0]
    size = max(power_of_2(rank), 16)
    config = lora_expand_config(size, not outer % 16, device_of(y))
    grid = -(-rows // config["ROWS"]), -(-outer // config["COLS"]), 1
    bias = None if bias is None else contiguous(bias)
    launch(lora_expand, grid, config, u, second, bias, y, rows, *second.stride(), outer, rank, size)


def _factors_for(y, u, second):
    """Return u and second for a product in the dtype of `y`."""
    if not _is_split(y, second):
        return u, second
    (hi, mid, _), (second_hi, second_mid, _) = u.chunk(3, 1), _split_factor(second.t(), y.dtype).t().chunk(3)
    return torch.cat([hi, hi, mid], 1), torch.cat([second_hi, second_mid, second_hi])


@raw(mutates=("y",))
def adapter_add(y: torch.Tensor, u: torch.Tensor, second: torch.Tensor) -> None:
    """Add u second to y (R, N) in place, by torch."""
    u, second = _factors_for(y, u, second)
    if second.dtype == y.dtype:
        y.addmm_(u, second)
    else:
        y.add_(torch.mm(u, second))


def _with_adapter(y, u, second):
    """Return y + u second, in place unless a mode may keep y."""
    if not results_are_kept():
        adapter_add(y, u, second)
        return y
    u, second = _factors_for(y, u, second)
    same = second.dtype == y.dtype
    return torch.addmm(y, u, second) if same else (y + torch.mm(u, second)).to(y.dtype)


def add_products(rows, matrix, bias, u, second, mask=None):
    """Return rows matrix + bias + mask (u second), in the dtype of `rows`.

    Args:
        rows: (R, K). matrix: (K, N), in any dtype. u: (R, r), `adapter_project`'s. second: (r, N).
        mask: (R, N), dropout's in the backward, which has no bias. None: of ones.
    """
    if rows.dtype == matrix.dtype and _runs_kernels(rows, second, second.shape[0]):
        y = adapter_expand(u, second, bias)
        y = y if mask is None else y.mul_(mask)
        if is_traced(y):  # addmm_ would copy y; the compiler fuses this sum with what follows
            return (torch.mm(rows, matrix).float() + y.float()).to(y.dtype)
        return torch.addmm(y, rows, matrix) if results_are_kept() else y.addmm_(rows, matrix)
    is_late = bias is not None and rows.dtype != matrix.dtype  # fp32, perhaps that of the rows
    first_bias = None if bias is None or is_late else bias.to(matrix.dtype)
    y = torch.nn.functional.linear(rows.to(matrix.dtype), matrix.t(), first_bias).to(rows.dtype)
    if is_late:
        y = (y + bias).to(y.dtype) if results_are_kept() else y.add_(bias)
    update = _with_adapter(y if mask is None else torch.zeros_like(y), u, second)
    return update if mask is None else y.addcmul_(update, mask)


def _allocate_adapted(rows, seen, matrix, bias, first, *others):
    return rows.new_empty(rows.shape[0], matrix.shape[1]), _allocate_u(seen, first)


@traced_as_one(_allocate_adapted, most_rows=MOST_ROWS)
def adapted_product(
    rows: torch.Tensor, seen: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, first: torch.Tensor,
    second: torch.Tensor, scale: float, mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return rows matrix + bias + mask (u second), and u = scale seen first.

    Args:
        seen: what the adapter sees of `rows`.
    """
    u = adapter_project(seen, first, scale)
    return add_products(rows, matrix, bias, u, second, mask), u


def add_product(y, rows, matrix):
    """Return y + rows matrix, in place where the dtypes are one."""
    if y.dtype == matrix.dtype:
        return y.addmm_(rows, matrix)
    return y.add_(torch.mm(rows.to(matrix.dtype), matrix))


def join_projections(x, projected, factor):
    """Return u of adapters whose A are joined.

    Its terms are side by side, as those of each of `projected`.
    """
    if not _is_split(x, factor):
        return torch.cat(projected, 1)
    return torch.cat([u.view(-1, 3, u.shape[1] // 3) for u in projected], 2).flatten(1)


def gradients(rows, du, pairs, factor, rank):
    """Return the gradient of A, du^T rows, and those of B, dy^T u of `pairs`.

    Args:
        du: of all adapters; None, as the result, where no A wants a gradient.
        pairs: (dy, u) of each B, or None.
        factor: one of their factors. rank: the sum of their ranks.
    """
    parts = 3 if _is_split(rows, factor) else 1
    if rows.shape[0] <= MOST_ROWS and len(pairs) <= 3 and _runs_kernels(rows, factor, rank):
        tensors = [t for pair in pairs for t in pair or (None, None)] + [None] * (6 - 2 * len(pairs))
        da, *db = adapter_gradients(rows, du, *tensors, parts)
        return da, db[: len(pairs)]
    if parts == 1:
        da = None if du is None else torch.mm(du.t(), rows.to(du.dtype))
        return da, [pair and torch.mm(pair[0].to(pair[1].dtype).t(), pair[1]) for pair in pairs]
    da = None if du is None else _wide_product(du.t(), rows).view(3, -1, rows.shape[1]).sum(0)
    return da, [pair and _wide_product(pair[0].t(), pair[1]).view(pair[0].shape[1], 3, -1).sum(1) for pair in pairs]


def _allocate_gradients(x, du, dy, u, dy1, u1, dy2, u2, parts):
    dtype = torch.float32 if parts == 3 else x.dtype
    da = None if du is None else x.new_empty(du.shape[1] // parts, x.shape[1], dtype=dtype)
    pairs = (dy, u), (dy1, u1), (dy2, u2)
    return da, *(y if y is None else x.new_empty(y.shape[1], u.shape[1] // parts, dtype=dtype) for y, u in pairs)


@raw(_allocate_gradients, most_rows=MOST_ROWS)
def adapter_gradients(
    x: torch.Tensor, du: torch.Tensor | None, dy: torch.Tensor | None, u: torch.Tensor | None,
    dy1: torch.Tensor | None, u1: torch.Tensor | None, dy2: torch.Tensor | None, u2: torch.Tensor | None,
    parts: int, *, da, db, db1, db2,
):  # fmt: skip
    """Compute du^T x and each dy^T u, of `parts` terms, by one launch."""
    products = (x, du, da), (dy, u, db), (dy1, u1, db1), (dy2, u2, db2)
    products = [(contiguous(x), u, out) for x, u, out in products if out is not None]
    if not products:
        return
    cols, ranks = [x.shape[1] for x, *_ in products], [u.shape[1] // parts for _, u, _ in products]
    absent, size, cols_of = [None] * (4 - len(products)), max(power_of_2(max(ranks)), 16), math.gcd(16, *cols)
    config = lora_gradients_config(size, cols_of == 16, device_of(x))
    launch(
        lora_gradients, (-(-max(cols) // config["COLS"]), len(products), 1), config, *sum(products, ()), *3 * absent,
        *cols, *absent, *ranks, *absent, x.shape[0], cols_of, math.gcd(16, *ranks), da is not None, parts, size,
    )  # fmt: skip


@raw(lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32))
def _wide_product(a: torch.Tensor, b: torch.Tensor, *, y):
    if has_wide_products(a.device.type):
        torch.mm(a, b, out_dtype=torch.float32, out=y)
    else:
        torch.mm(a.float(), b.float(), out=y)
