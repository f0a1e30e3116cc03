"""What kernels over rows of logits share: how a row of any width and alignment is walked, and its scores."""

from typing import Any, NamedTuple

from liger_hw._triton import tl, triton
from liger_hw.kernels._math import in_row
from liger_hw.tuning import Config, power_of_2, row_warps

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # a running maximum that a row of -inf does not turn into inf - inf


def row_gradient_config(cols, itemsize, device):
    """Configuration of a kernel of which every program writes COLS columns of a row's gradient."""
    # On an H200 2 warps on 1,024 columns are the fastest or within 1% of it, of bf16 and fp32, from 32,000 to 256,000
    # columns. Than 16 warps on 8,192 they are, in bf16 of 128,256 and 50,257 columns, cross entropy: 2 and 7% faster,
    # with a softcap and smoothing 14 and 32%; selective log-softmax with an entropy 23 and 21%.
    block = min(power_of_2(cols), 1024)
    # fused, products would be others than the forward's
    return Config({"COLS": block}, row_warps(block, device, per_lane=16), fp_fusion=False)


class Row(NamedTuple):
    """Where a row of logits lies, so that its accesses keep 16 bytes whatever its width and alignment.

    A row is `head` columns to its first 16-byte boundary, `body` columns in whole vectors, and less than one vector
    more. Head and rest are its edges; the body needs a mask by vectors at most.

    Attributes:
        first, middle: pointers to the row's first column and to its body.
    """

    first: Any
    middle: Any
    head: Any
    body: Any


@triton.jit
def row_at(X, index, stride, misaligned, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr):
    """The row of an index, as a Row. ALIGNED: every row begins at a boundary."""
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
    """Where the body of a row begins, with what the compiler must be told: that it is a 16-byte boundary."""
    if ALIGNED:
        return X + tl.multiple_of(index * stride, VECTOR)
    elif misaligned is None:
        return X + tl.multiple_of(index * stride + head, VECTOR)
    else:  # not every compiler hears it in this form
        return tl.multiple_of(X + (index * stride + head), 16)


@triton.jit
def body_mask(row, at, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, COLS: tl.constexpr):
    """Mask of the columns of the body among `at`."""
    if ALIGNED and cols < VECTOR:  # no body, of which any COLS would be a divisor
        return at < 0
    elif ALIGNED:
        return in_row(at, cols // VECTOR * VECTOR, COLS)
    else:
        return at < tl.multiple_of(row.body, VECTOR)


@triton.jit
def edge_columns(row, cols: tl.constexpr, VECTOR: tl.constexpr):
    """The columns before and after the body, and which lanes have one."""
    lane = tl.arange(0, 2 * VECTOR)
    col = tl.where(lane < VECTOR, lane, row.head + row.body + lane - VECTOR)
    return col, tl.where(lane < VECTOR, lane < row.head, col < cols)


@triton.jit
def _tanh(x):
    """To 3 ulp of itself everywhere, as the softcap multiplies its error. (2 sigmoid(2x) - 1 loses small results.)"""
    s = x * x
    small = ((s * 1.57394409e-2 - 5.23025580e-2) * s + 1.33152470e-1) * s - 3.33327681e-1
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)
    return tl.where(s < 0.3, x + x * s * small, tl.where(x < 0, -large, large))


@triton.jit
def score(x, logit_scale, softcap):
    """z in units of ln 2, and what the softcap multiplied."""
    x = x.to(tl.float32)
    if softcap is None:
        return x * (logit_scale * LOG2_E), 0.0
    else:
        ratio = _tanh(x * (logit_scale / softcap))
        return ratio * (softcap * LOG2_E), ratio


def alignment(x) -> tuple[int | None, bool]:
    """Elements from the last 16-byte boundary to `x`, None for 0, and whether every row of `x` begins on one."""
    misaligned = x.data_ptr() % 16 // x.element_size() or None
    return misaligned, misaligned is None and x.stride(0) * x.element_size() % 16 == 0
