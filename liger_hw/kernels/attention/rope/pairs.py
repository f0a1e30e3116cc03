"""Read and write heads as pairs of values that a position rotates."""

from liger_hw._triton import tl, triton
from liger_hw.kernels._math import in_row

# layout -> whether x1 and x2 are neighbours (otherwise halves), in the input and in the output
LAYOUTS = {"half": (False, False), "interleaved": (True, True), "interleaved_to_half": (True, False)}


@triton.jit
def load_pairs(X, valid, stride, half: tl.constexpr, NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr):
    """Load x1 and x2 of the rows at X, in fp32.

    Neighbours are loaded together and then separated, so that accesses are full vectors.
    """
    HALF: tl.constexpr = triton.next_power_of_2(half)
    col = tl.arange(0, HALF)[None, :]
    if NEIGHBOURS:
        both = tl.arange(0, 2 * HALF)[None, :]
        x = tl.load(X + both * stride, valid & in_row(both, 2 * half, 2 * HALF), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(x, [ROWS, HALF, 2]))
    else:
        mask = valid & in_row(col, half, HALF)
        return (
            tl.load(X + col * stride, mask, other=0.0).to(tl.float32),
            tl.load(X + (half + col) * stride, mask, other=0.0).to(tl.float32),
        )


@triton.jit
def store_pairs(OUT, x1, x2, valid, half: tl.constexpr, NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr):
    HALF: tl.constexpr = triton.next_power_of_2(half)
    col = tl.arange(0, HALF)[None, :]
    if NEIGHBOURS:
        both = tl.arange(0, 2 * HALF)[None, :]
        x = tl.reshape(tl.join(x1, x2), [ROWS, 2 * HALF])
        tl.store(OUT + both, x, valid & in_row(both, 2 * half, 2 * HALF))
    else:
        mask = valid & in_row(col, half, HALF)
        tl.store(OUT + col, x1, mask)
        tl.store(OUT + half + col, x2, mask)


@triton.jit
def load_angles(COS, SIN, valid, stride, half: tl.constexpr, PAIRS: tl.constexpr, SHARED: tl.constexpr):
    """Load a token's angles in fp32: cos1, cos2, sin1, sin2, for x1 and x2."""
    HALF: tl.constexpr = triton.next_power_of_2(half)
    col = tl.arange(0, HALF)[None, :]
    valid &= in_row(col, half, HALF)
    if SHARED:
        cos = tl.load(COS + col * stride, valid).to(tl.float32)
        sin = tl.load(SIN + col * stride, valid).to(tl.float32)
        return cos, cos, sin, sin
    else:
        at1 = (2 * col if PAIRS else col) * stride
        at2 = (2 * col + 1 if PAIRS else half + col) * stride
        return (
            tl.load(COS + at1, valid).to(tl.float32), tl.load(COS + at2, valid).to(tl.float32),
            tl.load(SIN + at1, valid).to(tl.float32), tl.load(SIN + at2, valid).to(tl.float32),
        )  # fmt: skip
