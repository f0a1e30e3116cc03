r"""Multiply each group of rows by a matrix of its own, as experts do.

    out[r] = rows[r] W[g] (+ u[r] B[g])     for r of group g, rows offs[g - 1] to offs[g]; u, B: an adapter's
    drows  = dout W[g]^T                    the same kernel, with W's strides exchanged
    dW[g]  = rows[g]^T dout[g]              one product for each group, over its rows; zeros for a group without rows

Letters: S rows of K values in E groups, to N values. A product reads its rows and every weight at least once: SK + EKN
read, SN written, 2SKN operations. No launch depends on the values of `offs`, which stay on the device:

- Rows. A tile of ROWS rows begins at its group's first row. Group g with rows s to t owns the slots s // ROWS + g to
  t // ROWS + g, at least as many as it has tiles, so S // ROWS + E slots serve any sizes of groups. A program counts
  the groups that own a slot up to its own, which is one load of `offs` and one sum; programs of surplus slots end.
- Groups. A program computes one tile of one group's product in a loop over that group's rows. Each value is the sum of
  one program in one order, so every run is bitwise equal.

torch's own `grouped_mm` is one kernel on some devices for bf16 rows of whole 16 bytes. This file calls it there for
groups of more than 64 rows on average (`_by_torch`). Elsewhere torch waits for the device and calls one product for
each group, or refuses. On an H200 (torch 2.11, Triton 3.6), the best configuration of the kernels here had 0.79 to 1.29
of torch's speed in groups of 128 to 8,192 rows, and 1.17 to 1.68 in smaller ones.
"""

import torch

from liger_hw import backends
from liger_hw._torch import grouped_mm as torch_grouped_mm
from liger_hw._torch import is_exporting, traced
from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import KERNEL_DTYPES, check
from liger_hw.dispatch import Cost, differentiable, op, raw, uncast
from liger_hw.kernels._math import dot, in_row
from liger_hw.kernels._rows import rows_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, tuned


def _validate(rows, weights, offs):
    check(rows.is_floating_point() and rows.ndim == 2, "rows", rows, "a floating point matrix")
    fits = weights.ndim == 3 and weights.shape[:1] == offs.shape and weights.shape[1] == rows.shape[1]
    fits = fits and (weights.dtype, weights.device) == (rows.dtype, rows.device)
    check(fits, "weights", weights, f"{rows.dtype} of shape (E, {rows.shape[1]}, N) on {rows.device}, E ends in offs")
    check(offs.dtype == torch.int32 and offs.numel() > 0, "offs", offs, "torch.int32 of shape (E,), E > 0")
    check(offs.device == rows.device, "offs", offs, f"a tensor on {rows.device}")
    if offs.device.type == "cpu" and not traced(offs):
        ends = offs.tolist()
        fits = ends[-1] == len(rows) and [0, *ends] == sorted([0, *ends])
        check(fits, "offs", ends, f"ascending numbers from 0, the last of them the {len(rows)} rows")


@op(validate=_validate)
def grouped_mm(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows by its matrix, as torch.nn.functional.grouped_mm does.

    Args:
        rows: (S, K), sorted by group.
        weights: (E, K, N), in the dtype of `rows`, any strides: the transpose of (E, N, K) is not copied.
        offs: (E,), int32, ascending: the row after each group's last. The last is S; a GPU does not check it.

    Returns:
        (S, N), in the dtype of `rows`; sums in fp32. fp32 is multiplied in TF32 where torch's flag allows it and the
        GPU's compiler has it.

    Raises:
        ValueError: shapes, dtypes or devices do not fit.

    Examples:
        >>> ends = torch.tensor([2, 5], dtype=torch.int32)
        >>> liger_hw.grouped_mm(torch.rand(5, 8), torch.rand(2, 8, 3), ends).shape
        torch.Size([5, 3])
    """
    if is_exporting():  # no exported program has the values of `offs`
        return torch_grouped_mm()(rows, weights, offs=offs)
    ends = [rows.shape[0]] * len(offs) if offs.is_meta else offs.tolist()
    with uncast(rows):  # as torch's grouped product
        return torch.cat([rows[begin:end] @ weight for begin, end, weight in zip([0, *ends], ends, weights)])


@grouped_mm.cost
def _(rows, weights, offs):
    inputs, out = rows.nbytes + weights.nbytes, rows.shape[0] * weights.shape[2]
    flops = 2 * out * rows.shape[1]
    return Cost(inputs + out * rows.itemsize, 2 * inputs + out * rows.itemsize, flops, 2 * flops)


@grouped_mm.register("cpu")
def _(rows, weights, offs):
    """Call torch's product, which can be traced; the reference where torch refuses the operands."""
    vectors = all(size and size * rows.element_size() % 16 == 0 for size in weights.shape[1:])
    if not vectors or rows.dtype not in KERNEL_DTYPES:
        return grouped_mm.reference(rows, weights, offs)
    y = torch_grouped_mm()(_with_torchs_strides(rows), _with_torchs_strides(weights), offs=offs)
    if y.requires_grad and not torch.compiler.is_compiling():
        y.register_hook(_with_torchs_strides)  # of a sum, whose gradient has strides of 0
    return y


def _has_torchs_strides(x):
    """Tell whether torch's product takes the strides of `x`."""
    (row_stride, col_stride), (rows, cols), vector = x.stride()[-2:], x.shape[-2:], 16 // x.element_size()
    in_rows = col_stride == 1 and row_stride >= cols and row_stride % vector == 0
    return in_rows or x.ndim == 3 and row_stride == 1 and col_stride >= rows and col_stride % vector == 0


def _with_torchs_strides(x):
    # not contiguous(), which returns one row of any stride as it is
    return x if _has_torchs_strides(x) else x.clone(memory_format=torch.contiguous_format)


# Launches -------------------------------------------------------------------------------------------------------------


# Measured for an H200. Where few steps make a sum, more stages only delay the first: 8,192 rows of 256 groups of
# 7168x4096 take grouped_outer 4.7 ms in steps of 16 rows and 3 stages, 5.0 in steps of 32, 5.3 in 32 and 4 stages.
@tuned
def grouped_rows_config(group_rows, width, vectors, itemsize, device):
    cols, depth, stages = {32: (128, 128, 3), 64: (128, 64, 4), 128: (256, 64, 4)}[group_rows]
    if width <= 64:  # of Qwen3-30B-A3B 16 columns take 48 us, and 130 in tiles of 128 rows and 256 columns (H200)
        return _tiles(min(group_rows, 64), width, 64, 4, vectors, itemsize, device)
    return _tiles(group_rows, cols, depth, stages, vectors, itemsize, device)


@tuned
def grouped_outer_config(group_rows, vectors, itemsize, device):
    rows, cols, depth, stages = (128, 256, 64, 4) if group_rows == 128 else (64, 128, 16, 3)
    return _tiles(rows, cols, depth, stages, vectors, itemsize, device)


def _tiles(rows, cols, depth, stages, vectors, itemsize, device):
    """Return a configuration of tiles, four of which fit shared memory.

    Where they do not, 128 columns and a depth of 64 must do. The sums take 64 registers a lane, 128 in 256 columns.
    Without whole vectors each value has a pointer, and without matrix cores (fp32) each lane keeps its operands. There
    larger tiles spill, and more sums a lane on sm_120 and gfx1100.
    """
    sums = cols // 2
    if 4 * (rows + cols) * depth * itemsize > device.shared_memory:
        sums, cols, depth = 64, min(cols, 128), min(depth, 64)
    if not vectors or itemsize == 4:
        sums, rows, cols, depth = 16, min(rows, 64), min(cols, 64), 64 // itemsize
    if device.core is None:  # without a core's limits, a lane has no more registers in small programs
        sums = min(sums, device.registers // 2)
    lanes = max(rows * cols // sums, 128 if device.async_copy else 256)  # loads may pass their registers
    tile = (rows + cols) * depth * itemsize
    stages = min(device.shared_memory // tile, stages) if device.async_copy and vectors else 2
    return Config({"ROWS": rows, "COLS": cols, "DEPTH": depth, "BAND": 8}, lanes // device.warp_size, stages)


def _group_rows(rows, groups):
    """Return a class of group sizes: 32, 64 or 128.

    They are averages of up to 16, up to 64 and more rows. A class is twice the average in small groups, as most rows
    are in the larger ones: 32 rows on average in 256 groups of 7168x4096 take 3.8 ms in tiles of 64 rows, 4.2 in 32 and
    5.5 in 16 (H200).
    """
    average = rows / groups
    return 128 if average > 64 else 64 if average > 16 else 32


def _width(cols):
    """Return a class of numbers of columns: 16, 32, 64 or 128 for more."""
    return max(min(power_of_2(cols), 128), 16)


def _config_numbers(rows, groups, x, y):
    """Return the arguments of a configuration: class of groups, whole vectors, bytes of a value."""
    return _group_rows(rows, groups), in_vectors(x, 16) and in_vectors(y, 16), x.element_size()


def in_vectors(x, values):
    """Tell whether contiguous rows (or columns) begin at multiples of 16 bytes and of `values`."""
    strides = [stride for stride in x.stride() if stride != 1]
    whole = all(stride > 0 and stride % values == 0 for stride in strides)
    return whole and len(strides) == x.ndim - 1 and 1 in x.stride()[-2:] and x.data_ptr() % 16 == 0


@triton.jit
def banded(pid, tall, wide, BAND: tl.constexpr):
    """Return a tile's row and column in bands of BAND rows, whose programs share operands."""
    first = pid // (BAND * wide) * BAND
    height = tl.minimum(tall - first, BAND)
    within = pid % (BAND * wide)
    return first + within % height, within // height


@triton.jit
def grouped_rows(
    X, W, OFFS, INDEX, U, B, OUT, rows, groups, x_stride, w_stride, k_stride, n_stride, b_stride, r_stride, bn_stride,
    depth: tl.constexpr, rank: tl.constexpr, cols: tl.constexpr, ADDS: tl.constexpr, PRECISION: tl.constexpr,
    GROUPS: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    # U, B: (rows, rank) contiguous and (groups, rank, cols), whose product is added; or None. ADDS: add to OUT
    slot, tile = banded(tl.program_id(0), rows // ROWS + groups, tl.cdiv(cols, COLS), BAND)
    g = tl.arange(0, GROUPS)
    start = tl.load(OFFS + g - 1, (g > 0) & (g < groups), other=0)
    group = tl.sum(((g < groups) & (start // ROWS + g <= slot)).to(tl.int32), 0) - 1
    begin = tl.load(OFFS + group - 1, group > 0, other=0)
    end = tl.load(OFFS + group)
    begin += (slot - group - begin // ROWS) * ROWS
    if begin < end:
        row = begin + tl.arange(0, ROWS)
        col = tile * COLS + tl.arange(0, COLS)
        k = tl.arange(0, DEPTH)
        col_mask = in_row(col, cols, COLS)
        # rows after the group's last repeat it, as a mask in the loop would cost more than the reads; none is stored
        source = tl.minimum(row, end - 1).to(tl.int64)
        if INDEX is not None:
            source = tl.load(INDEX + source)
        x = X + source[:, None] * x_stride + k[None, :]
        w = W + group.to(tl.int64) * w_stride + (k.to(tl.int64) * k_stride)[:, None] + (col.to(tl.int64) * n_stride)
        out = OUT + row.to(tl.int64)[:, None] * cols + col[None, :]
        stored = (row < end)[:, None] & col_mask[None, :]
        if ADDS:
            total = tl.load(out, stored, other=0.0).to(tl.float32)
        else:
            total = tl.zeros((ROWS, COLS), tl.float32)
        for first in range(0, depth, DEPTH):
            k_mask = in_row(first + k, depth, DEPTH)
            a = tl.load(x, k_mask[None, :], other=0.0)
            b = tl.load(w, k_mask[:, None] & col_mask[None, :], other=0.0)
            total = dot(a, b, total, PRECISION)
            x += DEPTH
            w += DEPTH * k_stride
        if U is not None:
            r = tl.arange(0, RANK)
            r_mask = in_row(r, rank, RANK)
            factor = B + group.to(tl.int64) * b_stride + (r.to(tl.int64) * r_stride)[:, None]
            factor = tl.load(factor + col.to(tl.int64) * bn_stride, r_mask[:, None] & col_mask[None, :], other=0.0)
            u = U + tl.minimum(row, end - 1).to(tl.int64)[:, None] * rank + r[None, :]
            total = dot(tl.load(u, r_mask[None, :], other=0.0), factor, total, PRECISION)
        tl.store(out, total.to(OUT.dtype.element_ty), stored)


@triton.jit
def grouped_outer(
    A, B, OFFS, INDEX, OUT, a_stride, b_stride, tall: tl.constexpr, cols: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(tall, ROWS) * tl.cdiv(cols, COLS)
    group = tl.program_id(0) // tiles
    row, col = banded(tl.program_id(0) % tiles, tl.cdiv(tall, ROWS), tl.cdiv(cols, COLS), BAND)
    row = row * ROWS + tl.arange(0, ROWS)
    col = col * COLS + tl.arange(0, COLS)
    row_mask, col_mask = in_row(row, tall, ROWS), in_row(col, cols, COLS)
    begin = tl.load(OFFS + group - 1, group > 0, other=0)
    end = tl.load(OFFS + group)
    k = tl.arange(0, DEPTH)
    a = A + (begin + k).to(tl.int64)[:, None] * a_stride + row[None, :]
    b = B + (begin + k).to(tl.int64)[:, None] * b_stride + col[None, :]
    if INDEX is not None:
        source = tl.load(INDEX + begin + k, begin + k < end, other=0)  # one step ahead, or the loop waits for it
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(begin, end, DEPTH):
        k_mask = first + k < end
        if INDEX is not None:
            b = B + source[:, None] * b_stride + col[None, :]
            source = tl.load(INDEX + first + DEPTH + k, first + DEPTH + k < end, other=0)
        x = tl.load(a, k_mask[:, None] & row_mask[None, :], other=0.0)
        y = tl.load(b, k_mask[:, None] & col_mask[None, :], other=0.0)
        total = dot(tl.trans(x), y, total, PRECISION)
        a += tl.cast(a_stride, tl.int64) * DEPTH
        b += tl.cast(b_stride, tl.int64) * DEPTH
    out = OUT + group.to(tl.int64) * tall * cols + row.to(tl.int64)[:, None] * cols + col[None, :]
    tl.store(out, total.to(OUT.dtype.element_ty), row_mask[:, None] & col_mask[None, :])


# Products -------------------------------------------------------------------------------------------------------------


# A gather moves 4 bytes of 16 bits for every value, and a product computes with it 2N times. Up to this N it costs more
# than torch's product saves: a tenth of the time at 3,072 (H200: 4.2 TB/s, 650 TFLOP/s).
GATHERED_COLS = 3072
LARGEST_RANK = 64  # of an adapter whose product follows another one in registers
# A kernel adds a product of rank 16 in 2 to 6% of its time; a pass after torch's product moves 4 bytes a value, 25 to
# 60% of Qwen3-30B-A3B's products (H200). From sums of this length on torch's product saves more than that.
SUMMED_DEPTH = 3072


def _by_torch(rows, groups, cols, index, *operands):
    """Tell whether torch's grouped_mm takes these operands in one kernel that is faster.

    A forced backend means the kernels of this file.
    """
    fits = device_of(operands[0]).grouped_mm and backends.forced() is None and operands[0].dtype == torch.bfloat16
    fits = fits and _group_rows(rows, groups) == 128 and (index is None or cols > GATHERED_COLS)
    if not fits or any(size % 8 for x in operands for size in x.shape[1:]):
        return False
    return all(in_vectors(x, 8) and _has_torchs_strides(x) for x in operands)


def _precision(x):
    tf32 = x.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 and device_of(x).tf32 else "ieee"


def _empty_products(rows, weights, index):
    return rows.new_empty((rows if index is None else index).shape[0], weights.shape[2])


@raw(_empty_products)
def multiply_rows(
    rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    """Multiply (S, K) by (E, K, N), to (S, N). Arguments as in `grouped_mm`.

    Args:
        index: (S,) int64, the row of (T, K) that each of the S rows is; None: S rows.
    """
    (groups, _, cols), size = weights.shape, len(rows if index is None else index)
    if _by_torch(size, groups, cols, index, rows, weights):
        return torch_grouped_mm()(rows if index is None else rows[index], weights, offs=offs)
    return _by_kernel(rows, weights, offs, index)


@raw(_empty_products)
def multiply_rows_with_adapter(
    rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None, u: torch.Tensor,
    b: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Compute multiply_rows(rows, weights, offs, index) + multiply_rows(u, b, offs, None).

    The sum is rounded once, and after torch's product again.

    Args:
        u: (S, r) contiguous, r at most `LARGEST_RANK`.
        b: (E, r, N).
    """
    (groups, depth, cols), size = weights.shape, len(u)
    if depth < SUMMED_DEPTH or not _by_torch(size, groups, cols, index, rows, weights):
        return _by_kernel(rows, weights, offs, index, u, b)
    out = torch_grouped_mm()(rows if index is None else rows[index], weights, offs=offs)
    config = grouped_rows_config(64, _width(cols), *_config_numbers(size, groups, u, b)[1:], device_of(u))
    _launch_rows(config, u, u.stride(0), b, offs, None, out, adds=True)
    return out


def _by_kernel(rows, weights, offs, index, u=None, b=None):
    if 1 not in weights.stride()[1:]:
        weights = weights.contiguous()
    out = _empty_products(rows, weights, index)
    rows, row_stride = rows_of(rows)
    group_rows, *others = _config_numbers(len(out), len(weights), rows, weights)
    config = grouped_rows_config(group_rows, _width(weights.shape[2]), *others, device_of(rows))
    _launch_rows(config, rows, row_stride, weights, offs, index, out, u, b)
    return out


def _launch_rows(config, rows, row_stride, weights, offs, index, out, u=None, b=None, adds=False):
    (groups, depth, cols), size = weights.shape, len(out)
    programs = (size // config["ROWS"] + groups) * -(-cols // config["COLS"])
    rank, b_strides = (1, (0, 0, 0)) if b is None else (b.shape[1], b.stride())
    launch(
        grouped_rows, (programs, 1, 1), config, rows, weights, offs, index, u, b, out, size, groups, row_stride,
        *weights.stride(), *b_strides, depth, rank, cols, adds, _precision(rows), power_of_2(groups),
        max(power_of_2(rank), 16),
    )  # fmt: skip


def multiply_by_fixed_tiles(a, b, out):
    """Write a b to `out`, in tiles that ignore the number of rows.

    Args:
        a: (M, K), of unit stride in rows. b: (K, N), in the dtype of `a`.
        out: (M, N), contiguous, in any floating dtype.
    """
    if 1 not in b.stride():
        b = b.contiguous()
    vectors = in_vectors(b, 16) and a.shape[1] % 16 == 0
    if vectors and (a.stride(0) % 16 or a.data_ptr() % 16):
        a = a.clone(memory_format=torch.contiguous_format)
    config = grouped_rows_config(128, _width(b.shape[1]), vectors, a.element_size(), device_of(a))
    offs = torch.full((1,), len(a), dtype=torch.int32, device=a.device)
    _launch_rows(config, a, a.stride(0), b[None], offs, None, out)


@raw(lambda a, b, offs, index: a.new_empty(offs.shape[0], a.shape[1], b.shape[1]))
def multiply_groups(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Multiply (S, P)^T by (S, Q) within each group, to (E, P, Q).

    Args:
        index: (S,) int64, the row of b (T, Q) for each row of a; None: b has S rows.
    """
    (size, tall), cols, groups = a.shape, b.shape[1], offs.shape[0]
    if _by_torch(size, groups, tall, index, a, b):
        return torch_grouped_mm()(a.t(), b if index is None else b[index], offs=offs)
    out = a.new_empty(groups, tall, cols)
    (a, a_stride), (b, b_stride) = rows_of(a), rows_of(b)
    config = grouped_outer_config(*_config_numbers(size, groups, a, b), device_of(a))
    programs = groups * -(-tall // config["ROWS"]) * -(-cols // config["COLS"])
    launch(
        grouped_outer, (programs, 1, 1), config, a, b, offs, index, out, a_stride, b_stride, tall, cols, _precision(a)
    )
    return out


@differentiable()
def _grouped(rows: torch.Tensor, weights: torch.Tensor, offs: torch.Tensor):
    return multiply_rows(rows, weights, offs, None)


@_grouped.backward()
def _(rows, weights, offs, dy, *, rows_grad, weights_grad):
    drows = multiply_rows(dy, weights.transpose(1, 2), offs, None) if rows_grad else None
    if not weights_grad:
        return drows, None
    if weights.stride(1) == 1:  # the gradient of a transposed parameter, in the parameter's layout
        return drows, multiply_groups(dy, rows, offs, None).transpose(1, 2)
    return drows, multiply_groups(rows, dy, offs, None)


@grouped_mm.register("triton")
def _(rows, weights, offs):
    return _grouped.apply(rows, weights, offs.contiguous())
