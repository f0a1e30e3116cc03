"""Address rows of logits of any width and alignment, and compute their scores."""

from typing import Any, NamedTuple

from liger_hw._triton import tl, triton
from liger_hw.kernels._math import LOG2_E, in_row
from liger_hw.tuning import Config, power_of_2, row_warps

LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # start of a running maximum: with -inf a row of -inf would compute inf - inf
LOWEST_FINITE = tl.constexpr(-3.4028234663852886e38)  # the same where any logit may be the largest


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


@triton.jit
def body_mask(row, at, cols: tl.constexpr, VECTOR: tl.constexpr, ALIGNED: tl.constexpr, COLS: tl.constexpr):
    """Mask the columns `at` that lie in the body."""
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


@triton.jit
def online_softmax(z, vector_max, sum_exp, VECTOR: tl.constexpr, unit=1.0):
    """Add scores to the running maximum and sum of powers 2^(unit z) of each vector.

    A lane has whole vectors. So none waits for another, and a column takes one exponential instead of two. The unit
    multiplies differences: times log2(e) a logit near the largest number would overflow.
    """
    z = tl.reshape(z, (z.shape[0] // VECTOR, VECTOR))
    new_max = tl.maximum(vector_max, tl.max(z, 1))
    moved = sum_exp * tl.exp2((vector_max - new_max) * unit)
    return new_max, moved + tl.sum(tl.exp2((z - new_max[:, None]) * unit), 1)


@triton.jit
def row_softmax(vector_max, sum_exp, unit=1.0):
    """Return a row's maximum and sum of powers from those of its vectors."""
    row_max = tl.max(vector_max, 0)
    return row_max, tl.sum(sum_exp * tl.exp2((vector_max - row_max) * unit), 0)


@triton.jit
def _tanh(x):
    """Compute tanh to 3 ulp everywhere, because the softcap multiplies its error.

    2 sigmoid(2x) - 1 loses small results.
    """
    s = x * x
    small = ((s * 1.57394409e-2 - 5.23025580e-2) * s + 1.33152470e-1) * s - 3.33327681e-1
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)
    return tl.where(s < 0.3, x + x * s * small, tl.where(x < 0, -large, large))


@triton.jit
def score(x, logit_scale, softcap):
    """Return z in units of `unit_of`, and the number that the softcap multiplied.

    With a softcap, z is in units of ln 2. Without one it is not multiplied by log2(e), as large logits would overflow.
    """
    if softcap is None:
        return scaled(x, logit_scale), 0.0
    else:
        ratio = _tanh(x.to(tl.float32) * (logit_scale / softcap))
        return ratio * (softcap * LOG2_E), ratio


@triton.jit
def scaled(x, logit_scale):
    """Return x in fp32, multiplied by the logit_scale unless that is None."""
    x = x.to(tl.float32)
    return x if logit_scale is None else x * logit_scale


@triton.jit
def unit_of(softcap):
    """Return the unit of a `score`."""
    return 1.0 if softcap is None else LN_2


@triton.jit
def power_unit_of(softcap):
    """Return the unit of a `score` in units of ln 2."""
    return LOG2_E if softcap is None else 1.0


@triton.jit
def log_of(sum_exp, softcap):
    """Return log(sum_exp) in units of a `score`."""
    return tl.log2(sum_exp) * LN_2 if softcap is None else tl.log2(sum_exp)


def needed_scale(logit_scale, softcap):
    """Return None for a scale of 1 without a softcap, whose code a kernel omits."""
    return None if logit_scale == 1.0 and softcap is None else logit_scale


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
