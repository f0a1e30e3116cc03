"""Dtypes of references, and autocast."""

import functools
from contextlib import contextmanager, nullcontext

import torch
from torch.compiler import is_compiling

from liger_hw._torch import (
    PLAIN,
    hidden_from_modes,
    is_view,
    kept_matrix,
    kept_vector,
    saved_tensors_hooks,
    transforms_active,
    without_saved_tensors_hooks,
)


def widen(x):
    """Return `x` in fp32 or wider; float64 stays, for the tests' oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocasts(device_type):
    """Tell whether autocast is on for a type of device; torch.autocast does not know "meta"."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def uncast(x):
    """Return a context without autocast for the device of `x`."""
    device = x.device.type
    if device == "meta" or not (is_compiling() or torch.is_autocast_enabled(device)):
        return nullcontext()
    return autocast_as(device)


def autocast_as(device_type, dtype=None):
    """Return a context with autocast to a dtype, or without it, which drops no casts.

    torch.autocast drops the casts that it keeps for all threads where the outermost block of any thread ends. On a GPU
    the backward has a thread of its own: after a block there the next forward would cast anew.
    """
    if is_compiling():  # it traces no other context
        return torch.autocast(device_type, dtype, enabled=dtype is not None)
    return _autocast_as(device_type, dtype)


@contextmanager
def _autocast_as(device_type, dtype):
    was_on, dtype_before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    keeps = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_enabled(device_type, dtype is not None)
        torch.set_autocast_dtype(device_type, dtype or dtype_before)
        torch.set_autocast_cache_enabled(keeps and was_on)  # other casts would outlive the context
        yield
    finally:
        torch.set_autocast_enabled(device_type, was_on)
        torch.set_autocast_dtype(device_type, dtype_before)
        torch.set_autocast_cache_enabled(keeps)


def kept_casts(*tensors):
    """Return the casts of weights and biases that autocast keeps for F.linear.

    Where it keeps none, the tensor stays, or None. Autocast casts an fp32 leaf that wants a gradient once, and uses
    this tensor until the outermost block ends, also after a step of the optimizer. No function of torch returns it, but
    the node of a product of no rows has it. This takes 8 us more than a cast (a busy x86 CPU).
    """
    kept = [x is not None and x.requires_grad and x.is_leaf and x.dtype == torch.float32 for x in tensors]
    if True not in kept or is_compiling() or not torch.is_autocast_cache_enabled():
        return tensors
    device = tensors[kept.index(True)].device
    if not autocasts(device.type) or torch.is_inference_mode_enabled() or transforms_active():
        return tensors
    dtype = torch.get_autocast_dtype(device.type)
    if torch.is_grad_enabled() and saved_tensors_hooks() is None:
        return [_kept_cast(x, device, dtype) if keeps else x for x, keeps in zip(tensors, kept)]
    with torch.enable_grad(), without_saved_tensors_hooks():
        return [_kept_cast(x, device, dtype) if keeps else x for x, keeps in zip(tensors, kept)]


def cast_for_linear(dtype, *tensors):
    """Cast tensors to autocast's dtype as it does for F.linear; None and 4-bit numbers stay."""
    casts = kept_casts(*tensors)
    return [x if x is None or x.dtype == dtype or not x.is_floating_point() else x.to(dtype) for x in casts]


def _kept_cast(x, device, dtype):
    dims = x.ndim
    if type(x) not in PLAIN or is_view(x) or dims not in (1, 2) or x.device != device:
        return x
    rows = _no_rows(device, dtype, x.shape[0])
    return kept_matrix(torch.mm(rows, x).grad_fn) if dims == 2 else kept_vector(torch.matmul(rows, x).grad_fn)


@functools.lru_cache(maxsize=256)
def _no_rows(device, dtype, cols):
    with hidden_from_modes():  # a fake tensor must not stay
        return torch.empty((0, cols), dtype=dtype, device=device, requires_grad=True)
