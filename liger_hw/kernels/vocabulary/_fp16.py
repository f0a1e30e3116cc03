"""Keep fp16 gradients precise that the forward computes before the loss scale is known.

fp16 has 40 binary orders of magnitude. In a mean over 4,096 rows the gradient of the logits soon lies below all of
them, and a loss scale that arrives in the backward cannot bring it back. So the forward stores this gradient times a
power of two that takes its largest value near the largest of fp16. It is then as precise as under the best loss scale
that does not overflow. Products with it are computed in fp32, divided by that power, and kept in fp32 until the
incoming gradient multiplies them. The result is rounded to fp16 once, and is infinite where fp16 overflows.
"""

import torch


def kept_dtype(dtype):
    """Return fp32 for fp16, else `dtype`: a gradient's dtype before the incoming one multiplies it."""
    return torch.float32 if dtype == torch.float16 else dtype


def power_of_2_below(largest):
    """Return the power of two, (), that scales `largest` into [2^14, 2^15].

    Args:
        largest: () fp32, 0 or more, on any device; no host wait. The result is in [2^-100, 2^100]; fp16 ends at 65,504.
    """
    exponent = largest.view(torch.int32) >> 23  # of floor(log2(largest)), biased by 127
    return ((268 - exponent).clamp(27, 227) << 23).view(torch.float32)


def largest_finite(values):
    """Return the largest finite magnitude of `values`, () fp32, or 0 if none is finite."""
    return values.abs().float().nan_to_num(0.0, 0.0, 0.0).amax()
