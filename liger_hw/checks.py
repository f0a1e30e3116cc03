"""Raise errors that name the argument, its value and the allowed values."""

import functools
import inspect
import itertools
import numbers
import reprlib
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar, get_args

import torch
from torch.compiler import is_compiling

from liger_hw import backends
from liger_hw._torch import has_tangents, is_dtensor, is_plain, is_tracing, transforms_active
from liger_hw.spelling import suggestion

F = TypeVar("F", bound=Callable)
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # which kernels compute in fp32, and no others
PLAIN_NUMBER_TYPES = frozenset((float, int, bool, type(None)))  # types that need no gradient


class UnreadableTensor(TypeError):
    """A tensor subclass keeps its memory elsewhere, so no kernel can read it."""


def check(condition, argument: str, got, allowed) -> None:
    """Raise a ValueError with argument, value and allowed values unless `condition` holds.

    A tensor given as `got` or `allowed` is described, by dtype, shape and device, only when the error is raised.
    """
    if not condition:
        refuse(argument, got, allowed)


def refuse(argument: str, got, allowed) -> NoReturn:
    """Raise the error of `check`, for callers that format its text only on failure.

    The text costs 0.5 us a call (an x86 CPU).
    """
    raise ValueError(f"{argument}: got {_described(got)}, allowed: {_described(allowed)}") from None


def check_constants(**arguments) -> None:
    """Refuse tensors that need a gradient or have a tangent, where kernels take constants."""
    for name, value in arguments.items():
        if torch.is_tensor(value) and (value.requires_grad and torch.is_grad_enabled() or has_tangents([value])):
            refuse(name, "a tensor with gradient or tangent", f"constants: pass {name}.detach(), or use plain torch")


def plain_number(value):
    """Return a number as Python's, because kernels take no others, such as numpy's."""
    if type(value) in PLAIN_NUMBER_TYPES:
        return value
    if not isinstance(value, numbers.Real):
        is_number = type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0
        return plain_number(value.item()) if is_number else value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def plain_numbers(tensors: Sequence[str], texts: Sequence[str] = (), /, **arguments) -> list:
    """Return options as Python's numbers, tensors where `tensors` and strings where `texts` name them."""
    check_constants(**arguments)
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name not in tensors and value.numel() == 1:
            check(value.device.type == "cpu", name, value, "a number")
            value = value.item()
        if isinstance(value, str) and name not in texts:  # the text of a tensor would end a graph
            refuse(name, repr(value), "a number")
        arguments[name] = plain_number(value)
    return list(arguments.values())


def check_columns(argument: str, parameter: torch.Tensor | None, x: torch.Tensor) -> None:
    """Refuse a parameter without a value for each column of `x`, on its device."""
    if parameter is not None and (parameter.shape != x.shape[-1:] or parameter.device != x.device):
        refuse(argument, parameter, "one value for each column of x, on its device")


def check_kernel_dtype(argument: str, x: torch.Tensor) -> None:
    """Refuse an argument that kernels would round; dispatch has checked an op's first argument."""
    if x.dtype not in KERNEL_DTYPES:
        refuse_dtype(argument, x)


def refuse_dtype(argument: str, got, dtypes: Sequence[torch.dtype] = KERNEL_DTYPES) -> NoReturn:
    """Raise the error for a dtype that is none of those that kernels take."""
    advice = "; other types by use_backend('reference')" if dtypes is KERNEL_DTYPES else ""
    refuse(argument, got, f"{dtypes}{advice}")


ARGUMENT_KINDS = {  # annotation of an argument -> the types it accepts, and their name in an error; flags take anything
    torch.Tensor: (torch.Tensor, "a tensor"),
    float: (numbers.Real, "a number"),
    int: (numbers.Integral, "an integer"),
    str: (str, "a string"),
    Callable: (Callable, "a function"),
    Sequence: (Sequence, "a sequence"),
    Sequence[torch.Tensor]: (Sequence, "a sequence of tensors"),
    type(None): (type(None), "None"),
}


def explain(error, function, args, kwargs) -> None:
    """Raise a clearer error than `error`, which a call to `function` raised, if possible.

    "'str' object has no attribute 'device'" names no argument. The signature is only read after an error, as that takes
    host time.

    Raises:
        ValueError: for the first argument of another type than the signature allows.
        TypeError: for arguments that are missing or unknown.
        RuntimeError: within a transform of torch.func, in forward-mode AD or torch.jit.trace: kernels know none.
    """
    signature = inspect.signature(function)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        for name in kwargs.keys() - signature.parameters.keys():
            end = suggestion(name, signature.parameters)
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{end}")
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as mismatch:
        raise TypeError(f"{function.__name__}() {mismatch}") from None
    for name, value in bound.arguments.items():
        annotation = bound.signature.parameters[name].annotation
        kinds = [ARGUMENT_KINDS.get(kind) for kind in get_args(annotation) or (annotation,)]
        fits = None in kinds or isinstance(value, tuple(kind for kind, _ in kinds))
        if Sequence[torch.Tensor] in get_args(annotation) and isinstance(value, Sequence):
            fits = len(value) and all(map(torch.is_tensor, value))
        if not fits:
            got = value if torch.is_tensor(value) else f"{reprlib.repr(value)}, a {type(value).__name__}"
            refuse(name, got, " or ".join(word for _, word in kinds))
    for name, value in bound.arguments.items():
        if torch.is_tensor(value) and value.is_complex() and not isinstance(error, ValueError):
            refuse(name, value, "real numbers")
    first, *others = (name for name, value in bound.arguments.items() if torch.is_tensor(value))
    for name in others:
        mixed = is_dtensor(bound.arguments[name]) and is_plain(bound.arguments[first])
        if mixed and not isinstance(error, ValueError):
            refuse(name, "a DTensor", f"a plain tensor, like {first}; or DTensors on one mesh for both")
    if backends.forced() == "reference":
        return
    hint = "run under liger_hw.use_backend('reference')"
    if transforms_active():
        raise RuntimeError(
            f"{function.__name__} has no transforms of torch.func (grad, vmap, jvp, ...): {hint}"
        ) from error
    if is_tracing() and not isinstance(error, ValueError):
        raise RuntimeError(f"torch.jit.trace cannot trace the kernels of {function.__name__}: {hint}") from error
    if isinstance(error, RuntimeError) and has_tangents(bound.arguments.values()):
        raise RuntimeError(f"{function.__name__} has no forward-mode derivatives: {hint}") from error


def names_arguments(function: F) -> F:
    """Make `function` take numbers of any type; its errors name wrong arguments.

    A tensor for a number must be a constant on the CPU, as for an op.
    """
    parameters = inspect.signature(function).parameters
    kinds = {name: {p.annotation, *get_args(p.annotation)} for name, p in parameters.items()}
    options = {name for name in kinds if kinds[name] & {float, int}}
    others = [[name for name in options if kind in kinds[name]] for kind in (torch.Tensor, str)]

    def plain(name, value):
        return plain_numbers(*others, **{name: value})[0] if name in options else plain_number(value)

    @functools.wraps(function)
    def call(*args, **kwargs):
        if is_compiling():
            named = (*zip(parameters, args), *kwargs.items())
            check_constants(**{name: value for name, value in named if name in options})
            return function(*args, **kwargs)
        args = [*itertools.starmap(plain, zip(parameters, args)), *args[len(parameters) :]]
        kwargs = {name: plain(name, value) for name, value in kwargs.items()}
        try:
            return function(*args, **kwargs)
        except Exception as error:
            explain(error, function, args, kwargs)
            raise

    return call


def _described(value) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    return str(value)
