"""Gradients that are made in the forward in fp16, before the loss scale is known.

fp16 has 40 binary orders of magnitude. The gradient of logits in a mean over 4,096 rows is soon below all of them, and
a loss scale that arrives in the backward cannot bring it back. So such a gradient is stored times a power of two that
takes its largest value near the largest of fp16, which leaves it as precise as any loss scale could that does not
overflow. Products with it are made in fp32, divided by that power, and kept in fp32 until the incoming gradient is
multiplied in: the result is rounded to fp16 once, and is infinite where fp16 overflows.
"""

import torch


def kept_dtype(dtype):
    """Return the dtype in which a gradient of `dtype` waits for the incoming gradient: fp32 for fp16."""
    return torch.float32 if dtype == torch.float16 else dtype


def power_of_2_below(largest):
    """Return the power of two, (), that takes `largest` into [2^14, 2^15]: fp16 ends at 65,504.

    Args:
        largest: () fp32, 0 or more, on any device: the host does not wait for it. 2^-100 to 2^100 is returned.
    """
    exponent = largest.view(torch.int32) >> 23  # of floor(log2(largest)), biased by 127
    return ((268 - exponent).clamp(27, 227) << 23).view(torch.float32)


def largest_finite(values):
    """Return the largest magnitude, () fp32, among the finite ones of `values`; 0 where there is none."""
    return values.abs().float().nan_to_num(0.0, 0.0, 0.0).amax()
