"""Losses of rows of logits by autograd, a few rows at a time: how chunks are computed where no Triton runs."""

import torch

from liger_hw._torch import autograd_records

SLICE_BYTES = 2**18  # of logits in fp32: autograd holds eight times as much of a cross entropy, eighteen of a jsd


def rows_by_autograd(function, logits, outputs=(), incoming=None):
    """Evaluate a definition row by row and, given incoming gradients, write its gradient over the logits.

    Args:
        function: (logits (M, V), slice of rows) -> tensors (M,).
        logits: (N, V).
        outputs: where these tensors go, (N,) each; None: nowhere.
        incoming: the gradient (N,) of each of them, or None. None alone: write no gradient.
    """
    size = max(SLICE_BYTES // (logits.shape[1] * max(logits.itemsize, 4)), 1)
    for start in range(0, len(logits), size):
        part = slice(start, start + size)
        with autograd_records(incoming is not None):
            leaf = logits[part].detach().requires_grad_(incoming is not None)
            values = function(leaf, part)
            if incoming is not None:
                used = [(value, grad[part]) for value, grad in zip(values, incoming) if grad is not None]
                logits[part] = torch.autograd.grad([value for value, _ in used], leaf, [grad for _, grad in used])[0]
        for output, value in zip(outputs, values):
            if output is not None:
                output[part] = value.detach()
