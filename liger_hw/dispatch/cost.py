"""The least traffic and work of an op, to which measured times are compared."""

from typing import NamedTuple


class Cost(NamedTuple):
    """The fewest bytes that an op can move, and the fewest operations it can do.

    Bytes are read from and written to memory. A multiplication, an addition, a comparison and an exponential are one
    operation each.
    """

    forward_bytes: int
    backward_bytes: int
    forward_flops: int
    backward_flops: int
