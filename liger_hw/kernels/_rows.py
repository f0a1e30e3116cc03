"""Read tensors of any strides as rows."""

import torch


def contiguous(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """Return a weight or bias with unit stride; copy one with other strides."""
    return parameter if parameter is None or parameter.is_contiguous() else parameter.contiguous()


def rows_and_cols(x: torch.Tensor) -> tuple[int, int]:
    """Return the number of rows of the last dimension of `x`, and their width."""
    cols = x.shape[-1]
    return (x.numel() // cols if cols else 0), cols


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return `x` as rows with unit stride inside a row, and the stride between rows.

    The result is a view where the strides allow it. Do not use its shape.
    """
    if x.is_contiguous():
        return x, x.shape[-1]
    x = x.reshape(-1, x.shape[-1])
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    return x, x.stride(0)


def rows_or_none(x: torch.Tensor | None) -> tuple[torch.Tensor | None, int]:
    """Return `rows_of(x)`, or (None, 0) for None."""
    return (None, 0) if x is None else rows_of(x)
