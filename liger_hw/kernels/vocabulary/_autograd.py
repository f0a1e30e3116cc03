"""Compute losses of rows of logits by autograd, slice by slice, without Triton."""

import torch

from liger_hw._torch import autograd_records, without_saved_tensors_hooks

SLICE_BYTES = 2**18  # of fp32 logits; autograd holds 8 times as much for a cross entropy, 18 times for a jsd


def rows_by_autograd(function, logits, outputs=(), incoming=None):
    """Evaluate `function` on slices of rows and optionally write its gradient over the logits.

    Args:
        function: (logits (M, V), slice of rows) -> tensors (M,).
        logits: (N, V).
        outputs: the tensors, (N,) each, that receive the results; None: the result is dropped.
        incoming: the incoming gradient (N,) of each result, or None for one; None: write no gradient.
    """
    size = max(SLICE_BYTES // (logits.shape[1] * max(logits.itemsize, 4)), 1)
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        with autograd_records(incoming is not None), without_saved_tensors_hooks():
            leaf = logits[part].detach().requires_grad_(incoming is not None)
            values = function(leaf, part)
            if incoming is not None:
                used = [(value, grad[part]) for value, grad in zip(values, incoming) if grad is not None]
                logits[part] = torch.autograd.grad([value for value, _ in used], leaf, [grad for _, grad in used])[0]
        for output, value in zip(outputs, values):
            if output is not None:
                output[part] = value.detach()
