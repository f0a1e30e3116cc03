"""Define the functions of `liger_kernel.ops.experimental.mm_int8int2`, which multiply by weights of 2 bits."""

from liger_hw.checks import check
from liger_hw.kernels.mlp.int2_matmul import int2_matmul, pack_int2, unpack_int2


def pack_weights(intweights, bits=2):
    """Call `pack_int2`, which leaves its argument unchanged."""
    check(bits == 2, "bits", bits, 2)
    return pack_int2(intweights)


def unpack_weights(packed, bits=2):
    """Call `unpack_int2`."""
    check(bits == 2, "bits", bits, 2)
    return unpack_int2(packed)


def matmul(a, b):
    """Call `int2_matmul`, which also takes other numbers of columns than multiples of a block."""
    return int2_matmul(a, b)
