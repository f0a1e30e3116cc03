"""Dtypes of references."""

from contextlib import nullcontext

import torch


def widen(x):
    """Return `x` in fp32 or wider; float64 stays, for the tests' oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def uncast(x):
    """Return a context without autocast for the device of `x`."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)  # it does not know "meta"
