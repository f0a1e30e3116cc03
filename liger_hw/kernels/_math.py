"""Numbers and Triton functions that several kernel files share."""

from liger_hw._triton import interpreting, tl, triton

INTERPRETED = tl.constexpr(interpreting())
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.0e38)  # start of a running maximum: with -inf a row of -inf would compute inf - inf
LOWEST_FINITE = tl.constexpr(-3.4028234663852886e38)  # the same where any logit may be the largest


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """Return total + a b; the interpreter multiplies the bits of bf16 as integers."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Round `x` to `dtype` and return it in fp32.

    No kernel computes with a 16-bit value itself.
    """
    return x.to(dtype).to(tl.float32)


@triton.jit
def reciprocal(x, dtype: tl.constexpr):
    """Compute 1 / x of positive numbers, for results that are rounded to `dtype`.

    For 16 bits it is the square of a reciprocal square root, to 2.5e-7 of its size: 2 instructions, where a division
    takes 8 on sm90, 12 on gfx942 and 27 on gfx1100 (compiled, Triton 3.9).
    """
    if dtype == tl.float32:
        return 1.0 / x
    else:
        root = tl.rsqrt(x)
        return root * root


@triton.jit
def sigmoid(x, dtype: tl.constexpr):
    """Compute 1 / (1 + e^-x), for results that are rounded to `dtype`.

    For 16 bits it has an error of 5e-7 of its size, and 4 or 5 instructions instead of 10 on sm90, 22 on gfx942 and 44
    on gfx1100: `tl.exp` takes 4 to 16 more than `tl.exp2`, for denormal results.
    """
    if dtype == tl.float32:
        return tl.sigmoid(x)
    else:
        return reciprocal(1.0 + tl.exp2(x * -LOG2_E), dtype)


@triton.jit
def tanh(x):
    """Compute tanh with an absolute error of about 1e-7.

    libdevice's differs between vendors, and the interpreter has none.
    """
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activated(x, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return f(x), rounded to `dtype` after each of torch's operations; in fp32."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu_tanh":
        y = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu_erf":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_new":
        cube = rounded(rounded(x * x, dtype) * x, dtype)
        u = rounded(0.7978845608028654 * rounded(x + rounded(0.044715 * cube, dtype), dtype), dtype)
        y = rounded(0.5 * x, dtype) * rounded(1.0 + rounded(tanh(u), dtype), dtype)
    elif ACTIVATION == "quick_gelu":
        y = x * rounded(tl.sigmoid(rounded(1.702 * x, dtype)), dtype)
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        y = tl.where(x < 0.0, 0.0, x)  # keeps NaN, unlike a maximum
        y *= y
    return rounded(y, dtype)


@triton.jit
def activated_with_slope(x, ACTIVATION: tl.constexpr):
    """Return f(x) and f'(x), not rounded."""
    if ACTIVATION == "silu":
        s = tl.sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACTIVATION == "gelu_tanh" or ACTIVATION == "gelu_new":
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        half = 0.5 * (1.0 + t)
        return x * half, half + 0.5 * x * (1.0 - t * t) * (0.7978845608028654 + 0.1070322243 * x * x)
    elif ACTIVATION == "gelu_erf":
        half = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * half, half + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == "quick_gelu":
        s = tl.sigmoid(1.702 * x)
        return x * s, s * (1.0 + 1.702 * x * (1.0 - s))
    else:
        tl.static_assert(ACTIVATION == "relu_squared")
        y = tl.where(x < 0.0, 0.0, x)
        return y * y, 2.0 * y


@triton.jit
def in_row(col, cols: tl.constexpr, COLS: tl.constexpr):
    """Mask the columns that exist, in a loop that ends at `cols`.

    There is no mask where COLS divides the width, so that accesses keep their full vectors.
    """
    if cols % COLS == 0:
        return tl.full(col.shape, True, tl.int1)
    else:
        return col < cols


@triton.jit
def in_tile(row, col, rows, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Mask the elements of a tile that exist.

    Only the last tile of rows can exceed the rows, and none does where ROWS is 1.
    """
    if ROWS == 1:
        return in_row(col, cols, COLS)
    else:
        return (row < rows)[:, None] & in_row(col, cols, COLS)


@triton.jit
def load_parameter(P, at, absent, cols: tl.constexpr, COLS: tl.constexpr):
    """Load the columns `at` of a weight or bias; return `absent` without one.

    Its own dtype takes fewer registers across a loop than fp32.
    """
    if P is not None:
        return tl.load(P + at, in_row(at, cols, COLS), other=0.0)
    else:
        return tl.full((1, 1), absent, tl.float32)
