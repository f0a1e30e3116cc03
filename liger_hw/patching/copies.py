"""Refuse a backward that reads copies of factors to which a program wrote since."""

import torch

from liger_hw._torch import in_forward_ad
from liger_hw.dispatch import autocasts

ADAPTER_CHANGED = (
    "an adapter's weights changed between its forward and its backward, in which the unpatched model would mix both: "
    "call backward before anything that writes to them, such as optimizer.step()"
)
MERGED = (
    "adapters were merged into the experts' weights between their forward and their backward: merge after the backward"
)


class _Watched(torch.autograd.Function):
    """Return the first `count` tensors, copies of the others."""

    @staticmethod
    def forward(ctx, wrappers, count, *tensors):
        ctx.wrappers = wrappers
        copies, factors = tensors[:count], tensors[count:]
        ctx.kept = len(factors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*factors, *(factor.clone() for factor in factors if factor.is_cpu))
        return copies

    @staticmethod
    def backward(ctx, *grads):
        tensors = ctx.saved_tensors  # torch's error after a write that it counts
        for tensor, before in zip(tensors, tensors[ctx.kept :]):
            if not torch.allclose(tensor, before, rtol=0, atol=0, equal_nan=True):
                raise RuntimeError(ADAPTER_CHANGED)
        if any(wrapper.merged for wrapper in ctx.wrappers):
            raise RuntimeError(MERGED)
        return None, None, *grads, *(None,) * ctx.kept


def refusing_writes(copies, factors, wrappers=()):
    """Return `copies`, whose backward fails after a write to one of `factors`, as PEFT's does.

    On a CPU also after a write that torch does not count, where PEFT's gradients mix two states. On a GPU the host
    would wait for the answer.

    Args:
        wrappers: layers of PEFT whose own forward adds the factors to a copy of the weights, which a merge writes to.
    """
    device = copies[0].device.type
    casts = autocasts(device) and torch.get_autocast_dtype(device) != copies[0].dtype  # PEFT's, too
    if casts or not torch.is_grad_enabled() or torch.compiler.is_compiling() or in_forward_ad():
        return copies
    return _Watched.apply(wrappers, len(copies), *copies, *factors)
