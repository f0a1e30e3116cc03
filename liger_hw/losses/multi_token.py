"""Multi-token prediction: several heads at one position predict tokens further ahead."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_hw.checks import check, names_arguments
from liger_hw.kernels.vocabulary.chunked_head import wide_dtype
from liger_hw.kernels.vocabulary.cross_entropy.formula import check_counted_rows, check_labels
from liger_hw.losses.arguments import IGNORED, check_head, check_numbers
from liger_hw.losses.engine import CHUNK_MEMORY
from liger_hw.losses.sequences import token_loss


class MultiTokenOutput(NamedTuple):
    """Output of `multi_token_loss`.

    Attributes:
        loss: weighted sum of the heads' losses, ().
        head_losses: mean cross entropy of each head, (K,), for logging, without a gradient.
    """

    loss: torch.Tensor
    head_losses: torch.Tensor


@names_arguments
def multi_token_loss(
    heads: torch.Tensor | Sequence, weight: torch.Tensor | Sequence, labels: torch.Tensor,
    shifts: Sequence | int | None = None, head_weights: Sequence | None = None,
    bias: torch.Tensor | Sequence | None = None, ignore_index: int = IGNORED, chunk_memory: float = CHUNK_MEMORY,
    softcap: float | None = None, logit_scale: float = 1.0, logits_dtype: torch.dtype | None = None,
    invariant: bool = False, counted_rows: int | None = None, accum_dtype: torch.dtype | None = None,
):  # fmt: skip
    """Sum the heads' weighted mean cross entropies in the memory of one chunk of logits.

    Medusa (arXiv:2401.10774 eq. 1): head k reads the last hidden states through its own block and predicts the token
    k + 1 positions further than the language model's head does. Heads that share one output layer (arXiv:2404.19737;
    DeepSeek-V3, arXiv:2412.19437) share one pass through it and one gradient of its weight.

    Args:
        heads: (K, B, T, H), or a sequence of K tensors (B, T, H): the inputs of each head's output layer. Heads with
            the same hidden states may repeat one tensor.
        weight: (V, H), shared by the heads, or a sequence of K of them.
        labels: (B, T), the text's own tokens, not shifted; `ignore_index` at positions without a prediction.
        shifts: K positive integers: positions that each head looks ahead; 1, 2, ... K by default.
        head_weights: K numbers; 1 by default.
        bias: (V,), shared by the heads, a sequence of K, or None.
        chunk_memory: bytes that a chunk of logits may take.
        softcap, logit_scale: of every head, as in `selective_log_softmax`.
        logits_dtype, invariant, accum_dtype: of every head, as in `fused_linear_cross_entropy`.
        counted_rows: the most labels that are not `ignore_index`, as there; each head's products have so many rows.

    Returns:
        A `MultiTokenOutput`.

    Raises:
        ValueError: numbers or shapes do not fit; on a CPU, a label is outside the vocabulary (elsewhere the loss is
            then NaN).
        RuntimeError: a second backward.

    Examples:
        >>> heads, head = [torch.rand(2, 5, 8) for _ in range(2)], torch.rand(10, 8)
        >>> output = liger_hw.multi_token_loss(heads, head, torch.randint(10, (2, 5)))
    """
    count = len(heads)
    check(count > 0, "heads", count, "at least one")
    check(labels.ndim == 2, "labels", labels, "integers (B, T)")
    shifts = range(1, count + 1) if shifts is None else shifts
    shifts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    fits = len(shifts) == count and all(isinstance(shift, int) and shift > 0 for shift in shifts)
    check(fits, "shifts", shifts, f"{count} positive integers")
    head_weights = (1.0,) * count if head_weights is None else tuple(head_weights)
    check(len(head_weights) == count, "head_weights", head_weights, f"{count} numbers")
    for share in head_weights:
        check_numbers(head_weights=share)
    weights = [weight] * count if torch.is_tensor(weight) else weight
    biases = [bias] * count if bias is None or torch.is_tensor(bias) else bias
    check(len(weights) == count, "weight", len(weights), f"one tensor or {count} of them")
    check(len(biases) == count, "bias", len(biases), f"None, one tensor or {count} of them")
    for head, head_weight in zip(heads, weights):
        for name, part in {"heads": head, "weight": head_weight}.items():
            check(torch.is_tensor(part), name, f"{type(part).__name__} among them", "tensors")
        check(head.shape[:-1] == labels.shape, "heads", head, f"K of shape {tuple(labels.shape)} and H")
        check_head(head, head_weight, ("heads", "weight"))
    for classes in {len(head_weight) for head_weight in weights}:
        check_labels("labels", labels, classes, ignore_index)
    check_counted_rows(counted_rows, labels, ignore_index)
    tokens = torch.stack([_ahead(labels, shift, ignore_index) for shift in shifts])
    items = (tokens != ignore_index).sum((1, 2)).clamp(min=1).to(wide_dtype(heads[0]))
    all_row_weights = torch.stack([share / number for share, number in zip(head_weights, items.unbind())])

    def formula(log_probs, entropy, row_weights):
        return -log_probs * row_weights, -log_probs

    def run(x, weight, bias, tokens, row_weights):
        rows = row_weights[:, None].expand(-1, labels.numel()).reshape(-1)
        bound = counted_rows if counted_rows is None else counted_rows * len(row_weights)
        loss, losses = token_loss(
            formula, x.reshape(-1, x.shape[-1]), weight, tokens.reshape(-1), bias, (rows,), softcap=softcap,
            logit_scale=logit_scale, ignore_index=ignore_index, chunk_memory=chunk_memory, logits_dtype=logits_dtype,
            invariant=invariant, counted_rows=bound, accum_dtype=accum_dtype,
        )  # fmt: skip
        return loss, losses.reshape(len(row_weights), -1).sum(1)

    if torch.is_tensor(weight) and torch.is_tensor(heads) and (bias is None or torch.is_tensor(bias)):
        loss, sums = run(heads, weight, bias, tokens, all_row_weights)
        return MultiTokenOutput(loss, sums / items)
    parts = [run(heads[k], weights[k], biases[k], tokens[k], all_row_weights[k : k + 1]) for k in range(count)]
    return MultiTokenOutput(sum(loss for loss, _ in parts), torch.cat([sums for _, sums in parts]) / items)


def _ahead(labels, shift, ignore_index):
    """Shift the labels left by `shift` positions and fill the end with `ignore_index`."""
    beyond = min(shift, labels.shape[1])
    return torch.nn.functional.pad(labels[:, beyond:], (0, beyond), value=ignore_index)
