"""Dtypes of references, and autocast."""

from contextlib import nullcontext

import torch
from torch.compiler import is_compiling

from liger_hw._torch import PLAIN, is_view, saved_tensors_hooks, transforms_active, without_saved_tensors_hooks

# By a tensor's dimensions a product of no rows, and the name under which its node keeps the tensor.
KEEPING_PRODUCTS = {1: (torch.matmul, "_saved_vec"), 2: (torch.mm, "_saved_mat2"), 3: (torch.bmm, "_saved_mat2")}


def widen(x):
    """Return `x` in fp32 or wider; float64 stays, for the tests' oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def autocasts(device_type):
    """Tell whether autocast is on for a type of device; torch.autocast does not know "meta"."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def uncast(x):
    """Return a context without autocast for the device of `x`."""
    device = x.device.type
    # a block where autocast is off costs 12 us (one thread of a shared x86 CPU)
    if device == "meta" or not (is_compiling() or torch.is_autocast_enabled(device)):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def kept_cast(x):
    """Return the cast of `x` that autocast keeps for F.linear.

    It is `x` itself, perhaps None, where autocast keeps none. Autocast casts an fp32 leaf that wants a gradient once,
    and uses this tensor until the outermost block ends, also after a step of the optimizer. No function of torch
    returns it, but the node of a product of no rows has it.
    """
    if x is None or not (x.requires_grad and x.is_leaf and x.dtype == torch.float32 and x.ndim in KEEPING_PRODUCTS):
        return x
    if is_compiling() or not autocasts(x.device.type) or not torch.is_autocast_cache_enabled():
        return x
    if type(x) not in PLAIN or is_view(x) or torch.is_inference_mode_enabled() or transforms_active():
        return x
    if torch.is_grad_enabled() and saved_tensors_hooks() is None:
        return _cast_by_product(x)
    with torch.enable_grad(), without_saved_tensors_hooks():
        return _cast_by_product(x)


def _cast_by_product(x):
    multiply, name = KEEPING_PRODUCTS[x.ndim]
    *groups, inner = (*x.shape[:-2], x.shape[max(x.ndim - 2, 0)])
    dtype = torch.get_autocast_dtype(x.device.type)
    rows = torch.empty((*groups, 0, inner), dtype=dtype, device=x.device, requires_grad=True)
    return getattr(multiply(rows, x).grad_fn, name)
