"""Collect the cases of every op from the files of this folder.

Each file has a table CASES: op -> `OpCases`. Parity tests, compile matrix, benchmark, tuner, doctor and
`liger-hw launches` read this one list.
"""

import importlib
import pkgutil
from collections.abc import Iterable

import torch

from liger_hw.dispatch import OPS
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

DIFFERENTIABLE = [op for op in CASES if OPS[op].dtypes[0].is_floating_point]  # without the ops of integers


def small_cases(op: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Iterable[tuple[tuple, dict]]:
    """Yield the op's small cases as (tensors, options), see `OpCases.small`."""
    return CASES[op].small(Inputs(dtype, device))


def training_cases(op: str, dtype: torch.dtype, device: torch.device | str = "cpu") -> Iterable[tuple[tuple, dict]]:
    """Yield the small cases that have rows and, except of integers, want a gradient."""
    for inputs, options in small_cases(op, dtype, device):
        tensors = [x for x in inputs if torch.is_tensor(x)]
        learns = op not in DIFFERENTIABLE or any(x.requires_grad for x in tensors)
        if learns and all(x.numel() for x in tensors):
            yield inputs, options


def wide_cases(op: str, dtype: torch.dtype, device: torch.device | str = "meta") -> Iterable[tuple[tuple, dict]]:
    """Yield the op's wide cases as (tensors, options), see `OpCases.wide`."""
    return CASES[op].wide(Inputs(dtype, device))


def model_cases(ops: Iterable[str] = (), further: bool = False) -> list[Case]:
    """List the shapes of real models, op by op; no shape twice.

    Args:
        ops: names of ops; empty means all.
        further: also list the shapes of the benchmark alone.

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
    """Run forward and backward of `op` with gradients of 1, for its shapes and launches."""
    outputs = op(*inputs, **options)
    outputs = [y for y in (outputs if isinstance(outputs, tuple) else (outputs,)) if y is not None and y.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
