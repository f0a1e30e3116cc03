"""Compute scores of logits, which have a scale and a softcap, and their softmax."""

from liger_hw._triton import tl, triton
from liger_hw.kernels._math import LN_2, LOG2_E


@triton.jit
def online_softmax(z, vector_max, sum_exp, VECTOR: tl.constexpr, unit=1.0):
    """Add scores to the running maximum and sum of powers 2^(unit z) of each vector.

    A lane has whole vectors. So none waits for another, and a column takes one exponential instead of two. The unit
    multiplies differences: times log2(e) a logit near the largest number would overflow.
    """
    z = tl.reshape(z, (z.shape[0] // VECTOR, VECTOR))
    new_max = tl.maximum(vector_max, tl.max(z, 1))
    moved = sum_exp * tl.exp2((vector_max - new_max) * unit)
    return new_max, moved + tl.sum(tl.exp2((z - new_max[:, None]) * unit), 1)


@triton.jit
def row_softmax(vector_max, sum_exp, unit=1.0):
    """Return a row's maximum and sum of powers from those of its vectors."""
    row_max = tl.max(vector_max, 0)
    return row_max, tl.sum(sum_exp * tl.exp2((vector_max - row_max) * unit), 0)


@triton.jit
def below_peak(z, row_max, unit, log_sum):
    """Return (z - row_max) unit - log_sum in two instructions.

    They take halves, because a large difference may overflow.
    """
    return tl.fma(tl.fma(z, 0.5, row_max * -0.5), unit * 2.0, -log_sum)


@triton.jit
def _tanh(x):
    """Compute tanh to 3 ulp everywhere, because the softcap multiplies its error.

    2 sigmoid(2x) - 1 loses small results.
    """
    s = x * x
    small = ((s * 1.57394409e-2 - 5.23025580e-2) * s + 1.33152470e-1) * s - 3.33327681e-1
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2_E)) + 1.0)
    return tl.where(s < 0.3, x + x * s * small, tl.where(x < 0, -large, large))


@triton.jit
def score(x, logit_scale, softcap):
    """Return z in units of `unit_of`, and the number that the softcap multiplied.

    With a softcap, z is in units of ln 2. Without one it is not multiplied by log2(e), as large logits would overflow.
    """
    if softcap is None:
        return scaled(x, logit_scale), 0.0
    else:
        ratio = _tanh(x.to(tl.float32) * (logit_scale / softcap))
        return ratio * (softcap * LOG2_E), ratio


@triton.jit
def scaled(x, logit_scale):
    """Return x in fp32, multiplied by the logit_scale unless that is None."""
    x = x.to(tl.float32)
    return x if logit_scale is None else x * logit_scale


@triton.jit
def unit_of(softcap):
    """Return the unit of a `score`."""
    return 1.0 if softcap is None else LN_2


@triton.jit
def power_unit_of(softcap):
    """Return the unit of a `score` in units of ln 2."""
    return LOG2_E if softcap is None else 1.0


@triton.jit
def log_of(sum_exp, softcap):
    """Return log(sum_exp) in units of a `score`."""
    return tl.log2(sum_exp) * LN_2 if softcap is None else tl.log2(sum_exp)


def needed_scale(logit_scale, softcap):
    """Return None for a scale of 1 without a softcap, whose code a kernel omits."""
    return None if logit_scale == 1.0 and softcap is None else logit_scale
