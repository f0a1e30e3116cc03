"""Compute the functions of AMD's pseudo-code on numpy arrays, each result rounded once.

`fma` is exact. The hardware's exp, log, rcp, rsq, sqrt and sin may err by 1 unit in the last place; here they are
rounded correctly.
"""

import numpy as np


def fma(a, b, c):
    """Compute a * b + c with one rounding, in the type of `a`.

    A product of fp32 or fp16 numbers is exact in fp64. Rounding the sum to odd makes the second rounding harmless
    (S. Boldo, G. Melquiond, "Emulation of a FMA and correctly rounded sums", IEEE TC 57, 2008).
    """
    product, c = a.astype(np.float64) * b, np.asarray(c, np.float64)
    if a.dtype == np.float64:
        return _fma64(a, b, c)
    total = product + c
    with_c = total - product
    error = (product - (total - with_c)) + (c - with_c)
    bits = total.view(np.int64)
    odd = (bits - ((error < 0) != (total < 0))) | 1
    inexact = (error != 0) & np.isfinite(total) & np.isfinite(error)
    return np.where(inexact, odd, bits).view(np.float64).astype(a.dtype)


def _fma64(a, b, c):
    wide = np.longdouble
    return (a.astype(wide) * b + c.astype(wide)).astype(np.float64)


def in_fp64(function):
    """Return `function`, computed in fp64 and rounded to the type of its argument."""
    return lambda x: function(x.astype(np.float64)).astype(x.dtype)


def log2(x):
    return in_fp64(np.log2)(x)


def power(base, exponent):
    """Compute base ** exponent for a base of 2."""
    return in_fp64(lambda x: np.power(np.float64(base), x))(exponent)


def reciprocal_root(x):
    return in_fp64(lambda x: 1 / np.sqrt(x))(x)


def ldexp(x, exponent):
    return np.ldexp(x.astype(np.float64), exponent.astype(np.int32)).astype(x.dtype)


def maximum(a, b):
    """Return the larger number, as maximumNumber of IEEE 754-2019.

    A NaN loses, and +0 is larger than -0.
    """
    larger = np.fmax(a, b)
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), b, a), larger)


def minimum(a, b):
    """Return the smaller number; a NaN loses, and -0 is smaller than +0."""
    smaller = np.fmin(a, b)
    return np.where((a == 0) & (b == 0), np.where(np.signbit(a), a, b), smaller)


def median3(a, b, c):
    if a.dtype.kind == "f":
        median = maximum(minimum(a, b), minimum(maximum(a, b), c))
        return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), minimum(minimum(a, b), c), median)
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def mantissa(x):
    return np.frexp(x)[0]


def exponent(x):
    """Return the biased exponent of fp32, fp16 or fp64 numbers, as int32."""
    bits, shift, mask = {2: (np.uint16, 10, 31), 4: (np.uint32, 23, 255), 8: (np.uint64, 52, 2047)}[x.itemsize]
    return ((x.view(bits) >> bits(shift)) & bits(mask)).astype(np.int32)


def frexp_exponent(x):
    return np.where(np.isfinite(x), np.frexp(x)[1], 0).astype(np.int32)


def is_denormal(x):
    return (exponent(x) == 0) & (x != 0)


def is_signaling(x):
    """Find no signaling NaN: numpy's conversions make them quiet."""
    return np.zeros(x.shape, bool)


def to_bf16(x):
    """Round fp32 to bf16, to nearest even; the result is held in fp32."""
    bits = x.view(np.uint32)
    rounded = (bits + (((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), (bits | np.uint32(0x400000)) & np.uint32(0xFFFF0000), rounded).view(np.float32)


def to_int(x, dtype):
    """Truncate floats to integers of `dtype`, saturating; NaN becomes 0."""
    facts = np.iinfo(dtype)
    x = np.where(np.isnan(x), 0, np.trunc(x.astype(np.float64)))
    low, high = x <= float(facts.min), x >= float(facts.max)
    inside = np.where(low | high, 0, x).astype(dtype)
    return np.where(low, dtype(facts.min), np.where(high, dtype(facts.max), inside))


def shift_left(x, n):
    bits = 8 * x.itemsize
    n = np.asarray(n).astype(x.dtype)
    return np.where(n >= bits, x.dtype.type(0), x << (n & x.dtype.type(bits - 1)))


def shift_right(x, n):
    bits = 8 * x.itemsize
    n = np.minimum(np.asarray(n).astype(np.int64), bits - 1 if x.dtype.kind == "i" else bits).astype(x.dtype)
    if x.dtype.kind == "i":
        return x >> n
    return np.where(n >= bits, x.dtype.type(0), x >> (n & x.dtype.type(bits - 1)))


def leading_zeros(x):
    """Count the zeros above the highest set bit of uint32 numbers; -1 for 0."""
    _, exponents = np.frexp(x.astype(np.float64))
    return np.where(x == 0, -1, 32 - exponents).astype(np.int32)


def equal_leading_bits(x):
    """Count the leading bits that equal the sign of uint32 numbers; -1 if all do."""
    return leading_zeros(np.where(x >> np.uint32(31), ~x, x))


def trailing_zeros(x):
    """Count the zeros below the lowest set bit of unsigned numbers; -1 for 0."""
    lowest = x & (~x + x.dtype.type(1))
    _, exponents = np.frexp(lowest.astype(np.float64))
    return np.where(x == 0, -1, exponents - 1).astype(np.int32)


def reversed_bits(x):
    """Return uint32 numbers with their bits in reverse order."""
    bits = np.unpackbits(np.ascontiguousarray(x)[..., None].view(np.uint8), axis=-1, bitorder="little")
    return np.packbits(bits[..., ::-1], axis=-1, bitorder="little").view(np.uint32)[..., 0]


def permute_bytes(high, low, selectors):
    """Select bytes of {high, low} as v_perm_b32 does.

    Selectors 0 to 7 choose bytes, 8 to 11 signs, 12 zeros, and those above ones.
    """
    data = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
    out = np.zeros(np.broadcast_shapes(data.shape, selectors.shape), np.uint32)
    for i in range(4):
        selector = ((selectors >> np.uint32(8 * i)) & np.uint32(255)).astype(np.uint64)
        byte = (data >> ((selector & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        signed = np.uint64(15) + np.uint64(16) * ((selector - np.uint64(8)) & np.uint64(3))
        sign = ((data >> signed) & np.uint64(1)) * np.uint64(255)
        byte = np.where(selector < 8, byte, np.where(selector < 12, sign, np.where(selector == 12, 0, 255)))
        out |= byte.astype(np.uint32) << np.uint32(8 * i)
    return out


def classify(x, mask):
    """Test floats for the classes of v_cmp_class: bit i of `mask` selects class i."""
    negative, zero, infinite = np.signbit(x), x == 0, np.isinf(x)
    denormal = (exponent(x) == 0) & ~zero
    kinds = np.select(
        [np.isnan(x), infinite, zero, denormal],
        [1, np.where(negative, 2, 9), np.where(negative, 5, 6), np.where(negative, 4, 7)],
        np.where(negative, 3, 8),
    )
    return ((mask >> kinds.astype(np.uint32)) & np.uint32(1)).astype(bool)
