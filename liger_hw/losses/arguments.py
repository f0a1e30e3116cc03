"""Checks of the losses' arguments; an error names argument, value and allowed values."""

import math
import sys

import torch

from liger_hw.checks import check
from liger_hw.kernels.vocabulary.chunked_head import prepare_head
from liger_hw.kernels.vocabulary.cross_entropy.formula import TARGET_DTYPES, check_labels
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax

LARGEST = sys.float_info.max
IGNORED = -100


def check_numbers(allowed="a finite number", least=-LARGEST, above=-math.inf, most=LARGEST, **numbers):
    """Raise ValueError unless each number is at least `least`, above `above` and at most `most`."""
    for name, value in numbers.items():
        fits = isinstance(value, (int, float)) and least <= value <= most and value > above
        check(fits, name, repr(value), allowed)


def check_head(x, weight, names=("x", "weight")):
    """Raise ValueError unless `weight` (V, H) fits hidden states `x` (..., H)."""
    fits = weight.ndim == 2 and x.ndim > 0 and weight.shape[1] == x.shape[-1]
    check(fits, names[1], weight, f"shape (V, {x.shape[-1] if x.ndim else 'H'}), as {names[0]}")


def flatten_rows(x, name="x", **rows):
    """Flatten the leading dimensions of hidden states and of their rows' tensors.

    Args:
        name: the caller's name for `x`, in errors.
        rows: tensors (..., *) with the leading dimensions of `x`, or (N, *), or None, by the caller's names.

    Raises:
        ValueError: the leading dimensions differ.
    """
    leading = x.shape[:-1]
    if len(leading) < 2:  # the caller checks rows
        return x, *rows.values()
    flat = [x.flatten(0, -2)]
    for row_name, row in rows.items():
        is_flat = row is None or row.shape[: len(leading)] != leading
        fits = row is None or not is_flat or row.shape[:1] == (leading.numel(),)
        check(fits, row_name, row, f"leading dimensions {tuple(leading)}, as {name}")
        flat.append(row if is_flat else row.flatten(0, len(leading) - 1))
    return tuple(flat)


def reference_log_probs(ref_x, ref_weight, ref_bias, name, tokens, options):
    """Return the reference model's log-probabilities of tokens, (R, T), without a gradient.

    Args:
        name: the caller's name for `tokens`, in errors. tokens: (R, T), one for each row of `ref_x` and inside the
            reference's vocabulary. options: of `fused_linear_selective_log_softmax`.
    """
    check(ref_weight is not None, "ref_weight", None, "a tensor, beside ref_x")
    check(ref_x.shape[:-1] == tokens.shape, "ref_x", ref_x, f"shape ({', '.join(map(str, tokens.shape))}, H)")
    names = "ref_x", "ref_weight", "ref_bias"
    head, budget = (ref_x, ref_weight, ref_bias), options["chunk_memory"]
    with torch.no_grad():
        x, weight, bias = prepare_head(*head, budget, names=names, logits_dtype=options["logits_dtype"])
        check_labels(name, tokens, len(ref_weight), options["ignore_index"])
        return fused_linear_selective_log_softmax(x, weight, tokens, bias, **options)


def prepare_labels(x, labels, ignore_index, name):
    """Return checked labels for the rows of `x`, and `ignore_index`; without labels every row counts."""
    if labels is None:
        return torch.zeros(len(x), dtype=torch.int64, device=x.device), IGNORED
    fits = labels.dtype in TARGET_DTYPES and labels.shape == x.shape[:1] and labels.device == x.device
    check(fits, name, labels, f"int64 or int32 of shape ({len(x)},) on {x.device}, or None")
    return labels.contiguous(), ignore_index


def choose(condition, number, other, dtype):
    """Return `number` where the condition holds, else `other`; torch.where's would have the default dtype."""
    return torch.full_like(condition, other, dtype=dtype).masked_fill(condition, number)
