"""Define the shapes and cases of an op."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from liger_hw.testing.inputs import Inputs

WIDE_ROWS = 16  # of the compile matrix: Triton compiles other code where it is a multiple of 16, as in training
PARTIAL_WIDTHS = (12288, 24576)  # rows in one block that they do not fill: masks take further registers


@dataclass(frozen=True)
class Shape:
    """One shape of an op.

    Attributes:
        label: sizes, and options if there are any: "8192x4096", "2x4096x32/8x128", "8192x32000 in place".
        tensors: makes the op's tensors; `requires_grad` says which get a gradient.
        options: the op's keyword arguments.
    """

    label: str
    tensors: Callable[[Inputs], tuple]
    options: dict = field(default_factory=dict)

    def make(self, device: torch.device | str, dtype: torch.dtype) -> tuple:
        """Make the op's tensors. On "meta" they take no memory."""
        return self.tensors(Inputs(dtype, device))


@dataclass(frozen=True, kw_only=True)
class Case(Shape):
    """A `Shape` with `op`, the op's name in `dispatch.OPS`."""

    op: str


@dataclass(frozen=True)
class OpCases:
    """All cases of one op.

    Attributes:
        small: yields (tensors, options), small enough for the interpreter and odd enough to reach every mask. Tests,
            doctor and benchmark check parity on them; the compile matrix compiles them.
        wide: yields (tensors, options) of few rows at real and odd widths, for the compile matrix.
        models: shapes of real models in the order of their sizes, for the tuner, the benchmark, the compile matrix and
            `liger-hw launches`.
        further: shapes for the benchmark alone: other numbers of rows, other options, odd widths, and sizes at which
            the host is slower than any device.
    """

    small: Callable[[Inputs], Iterable[tuple[tuple, dict]]]
    wide: Callable[[Inputs], Iterable[tuple[tuple, dict]]]
    models: Sequence[Shape]
    further: Sequence[Shape] = ()
