"""Dtypes of references, and autocast."""

from contextlib import nullcontext

import torch
from torch.compiler import is_compiling


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
