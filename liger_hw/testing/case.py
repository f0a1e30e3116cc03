"""What a case of an op is, and everything that one op is shown."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from liger_hw.testing.inputs import Inputs


class Shape(NamedTuple):
    """One shape of an op.

    Attributes:
        label: sizes, readable: "8192x4096", "2x4096x32/8x128", and an option where there is one: "8192x32000 in place".
        tensors: makes the op's tensors; those that want a gradient ask for it.
        options: the op's keyword arguments.
    """

    label: str
    tensors: Callable[[Inputs], tuple]
    options: dict = {}


@dataclass(frozen=True)
class OpCases:
    """All cases of one op.

    Attributes:
        small: yields (tensors, options), small enough for the interpreter and odd enough to meet every mask: for
            parity, in tests, the doctor and the benchmark, and for the compile matrix. Tensors that want a gradient ask
            for it.
        wide: yields the same at widths of real models and at odd ones, in few rows: for the compile matrix.
        models: shapes of real models, in the order of their sizes: for the tuner, the benchmark, the compile matrix and
            `liger-hw info`.
        further: shapes for the benchmark alone, which need no launch configuration of their own: other numbers of rows
            and other options, odd widths, and sizes at which the host is slower than any device.
    """

    small: Callable[[Inputs], Iterable[tuple[tuple, dict]]]
    wide: Callable[[Inputs], Iterable[tuple[tuple, dict]]]
    models: Sequence[Shape]
    further: Sequence[Shape] = ()


@dataclass(frozen=True)
class Case:
    """One op at one `Shape`.

    Attributes:
        op: the op's name in `dispatch.OPS`.
        label, tensors, options: as in `Shape`.
    """

    op: str
    label: str
    tensors: Callable[[Inputs], tuple]
    options: dict = field(default_factory=dict)

    def make(self, device: torch.device | str, dtype: torch.dtype) -> tuple:
        """The op's tensors. On "meta" they take no memory."""
        return self.tensors(Inputs(dtype, device))
