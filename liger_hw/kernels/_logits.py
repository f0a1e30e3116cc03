"""Address rows of logits of any width and alignment."""

from typing import Any, NamedTuple

from liger_hw._triton import tl, triton
from liger_hw.kernels._math import in_row
from liger_hw.tuning import Config, power_of_2, row_warps


def row_gradient_config(cols, itemsize, device):
    """Return the configuration of a kernel that writes COLS columns of gradient a program."""
    # H200, bf16 and fp32, 32,000 to 256,000 columns: 2 warps on 1,024 columns are the fastest or within 1% of it. In
    # bf16 of 128,256 and 50,257 columns they beat 16 warps on 8,192 by 2 and 7% in cross entropy, by 14 and 32% with a
    # softcap and smoothing, and by 23 and 21% in selective log-softmax with an entropy.
    block = min(power_of_2(cols), 1024)
    # fused multiply-adds would make products differ from the forward's
    return Config({"COLS": block}, row_warps(block, device, per_lane=16), fp_fusion=False)


def padded_row_config(cols, device, per_lane=16):
    """Return the configuration of a program that reads a row of `padded_rows` several times."""
    block = min(power_of_2(max(cols, 16)), device.max_threads * 4)  # at least one whole vector
    # with fused multiply-adds the largest logit's distance from itself would be a rounding error, not 0
    return Config({"COLS": block}, row_warps(block, device, per_lane), fp_fusion=False)


class Row(NamedTuple):
    """Place of a row of logits, split so that accesses take 16 bytes.

    This holds at any width and alignment. `head` columns precede the first 16-byte boundary, `body` columns fill whole
    vectors, and less than one vector remains. Head and rest are its edges; the body needs at most a mask by vectors.

    Attributes:
        first, middle: pointers to the row's first column and to its body.
    """

    first: Any
    middle: Any
    head: Any
    body: Any


@triton.jit
def row_at(X, index, stride, misaligned, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the `Row` of an index.

    ALIGNED: every row begins at a 16-byte boundary.
    """
    if ALIGNED:
        head, body = 0, cols // VECTOR * VECTOR
    else:
        before = index * stride
        if misaligned is not None:
            before += misaligned
        head = tl.minimum((VECTOR - before % VECTOR) % VECTOR, cols).to(tl.int32)
        body = (cols - head) // VECTOR * VECTOR
    return Row(X + index * stride, body_pointer(X, index, stride, head, misaligned, VECTOR, ALIGNED), head, body)


@triton.jit
def body_pointer(X, index, stride, head, misaligned, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the pointer to a row's body, marked for the compiler as a 16-byte boundary."""
    if ALIGNED:
        return X + tl.multiple_of(index * stride, VECTOR)
    elif misaligned is None:
        return X + tl.multiple_of(index * stride + head, VECTOR)
    else:  # some compilers ignore the hint in this form
        return tl.multiple_of(X + (index * stride + head), 16)


def body_parts(logits, block) -> int:
    """Return the number of blocks of a row's body, at least one.

    `body_mask` masks nothing where they end with the body.
    """
    cols, vector = logits.shape[1], 16 // logits.element_size()
    return max(-(-(cols // vector * vector) // block), 1)


@triton.jit
def body_mask(row, at, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, COLS: tl.constexpr):
    """Mask the columns `at` in the body, whose blocks end with it."""
    if ALIGNED and cols < VECTOR:  # the body is empty, and any COLS would divide its width, 0
        return at < 0
    elif ALIGNED:
        return in_row(at, cols // VECTOR * VECTOR, COLS)
    else:
        return at < tl.multiple_of(row.body, VECTOR)


@triton.jit
def edge_columns(row, cols: tl.constexpr, VECTOR: tl.constexpr):
    """Return the columns before and after the body, and the lanes that have one."""
    lane = tl.arange(0, 2 * VECTOR)
    col = tl.where(lane < VECTOR, lane, row.head + row.body + lane - VECTOR)
    return col, tl.where(lane < VECTOR, lane < row.head, col < cols)


@triton.jit
def padded_columns(X, at, beyond, cols: tl.constexpr, COLS: tl.constexpr, POLICY: tl.constexpr):
    """Load columns of a row of `padded_rows` in fp32, `beyond` beyond its end."""
    VECTOR: tl.constexpr = 128 // X.dtype.element_ty.primitive_bitwidth
    padded: tl.constexpr = (cols + VECTOR - 1) // VECTOR * VECTOR
    x = tl.load(X + at, in_row(at, padded, COLS), other=beyond, eviction_policy=POLICY).to(tl.float32)
    return x if cols == padded else tl.where(at < cols, x, beyond)


def padded_rows(x):
    """Return rows (N, V) that begin at 16-byte boundaries, copied if necessary.

    A kernel may read each row up to the next boundary.
    """
    vector, (rows, cols) = 16 // x.element_size(), x.shape
    if x.stride(1) == 1 and cols % vector == 0 and alignment(x)[1]:
        return x
    return x.new_empty(rows, -(-cols // vector) * vector)[:, :cols].copy_(x)


def empty_gradient(logits):
    """Return memory for the gradient, with padded rows as in `logits`, for whole vectors."""
    (rows, cols), vector = logits.shape, 16 // logits.element_size()
    if cols % vector == 0 or logits.stride(0) % vector:
        return logits.new_empty((rows, cols))
    return logits.new_empty((rows, -(-cols // vector) * vector))[:, :cols]


def alignment(x) -> tuple[int | None, bool]:
    """Return `x`'s offset from a 16-byte boundary in elements (None: 0), and row alignment."""
    misaligned = x.data_ptr() % 16 // x.element_size() or None
    return misaligned, misaligned is None and x.stride(0) * x.element_size() % 16 == 0
