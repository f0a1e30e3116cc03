"""The cases of every op: one file per family of ops, each with a table CASES of op -> `OpCases`.

The one list behind the parity, the compile and the benchmark matrix, the tuner, the doctor and `liger-hw info`.
"""

import importlib
import pkgutil
from collections.abc import Iterable

import torch

from liger_hw.kernels import load_all
from liger_hw.spelling import check_known
from liger_hw.testing.case import Case, OpCases
from liger_hw.testing.inputs import Inputs

load_all()
CASES: dict[str, OpCases] = {
    op: cases
    for module in pkgutil.iter_modules(__path__)
    for op, cases in importlib.import_module(f"{__name__}.{module.name}").CASES.items()
}


def small_cases(op: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Iterable[tuple[tuple, dict]]:
    """The op's small cases as (tensors, options), see `OpCases.small`. Values are drawn one case after the other."""
    return CASES[op].small(Inputs(dtype, device))


def wide_cases(op: str, dtype: torch.dtype, device: torch.device | str = "meta") -> Iterable[tuple[tuple, dict]]:
    """The op's wide cases as (tensors, options), see `OpCases.wide`."""
    return CASES[op].wide(Inputs(dtype, device))


def model_cases(ops: Iterable[str] = (), further: bool = False) -> list[Case]:
    """The shapes of real models of the ops named, or of every op, op by op; no shape twice.

    Args:
        ops: names of ops; none means all.
        further: with the shapes that only the benchmark looks at.

    Raises:
        ValueError: an op is unknown, or has no case.
    """
    for op in ops:
        check_known("op", op, CASES)
    shapes = {
        (op, shape.label): shape
        for op, cases in CASES.items()
        if op in (ops or CASES)
        for shape in (*cases.models, *(cases.further if further else ()))
    }
    return [Case(**vars(shape), op=op) for (op, _), shape in shapes.items()]


def step(op, inputs, options) -> None:
    """Run forward and backward of `op`, with gradients of one; made for shapes and launches, not for values."""
    outputs = op(*inputs, **options)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None and y.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
