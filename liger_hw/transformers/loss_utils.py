"""Compute a causal language model's loss from its last hidden states, under liger_kernel's names.

Programs with their own model forward call these functions. Patched models do not: their own loss function gets lazy
logits (see `loss`).
"""

from liger_hw.kernels.vocabulary.cross_entropy import CrossEntropyOutput
from liger_hw.kernels.vocabulary.cross_entropy.formula import check_token_weights
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.patching.loss import refuse_unserved, shift_left

LOSS_OPTIONS = {"ce_weight", "label_smoothing", "lse_square_scale", "use_token_scaling", "bias", "logit_scale"}
LOSS_OPTIONS |= {"token_weights", "invariant", "logits_dtype"}


def unpack_cross_entropy_result(result):
    """Return (loss, z_loss, token_accuracy, predicted_tokens); None for values that `result` lacks."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    return result, None, None, None


def fixed_fused_linear_cross_entropy(
    hidden_states, lm_head_weight, target, num_items_in_batch=None, ignore_index=-100, final_logit_softcapping=None,
    accum_dtype=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    """Compute mean cross entropy of hidden_states (N, H), lm_head_weight (V, H) without logits.

    Args:
        target: (N,).
        num_items_in_batch: divisor of the sum, instead of the number of targets that count.
        final_logit_softcapping: the softcap.
        kwargs: ce_weight, label_smoothing, lse_square_scale, use_token_scaling, token_weights, bias, logit_scale,
            invariant and logits_dtype, as in `liger_hw.fused_linear_cross_entropy`. Other arguments of a trainer have
            no effect, except those that ask for another loss.

    Returns:
        the loss, or a `CrossEntropyOutput` where a `return_*` is True.

    Raises:
        ValueError: an option of a loss that no op supports.
    """
    served = {name: kwargs[name] for name in kwargs.keys() & LOSS_OPTIONS if kwargs[name] is not None}
    refuse_unserved({name: value for name, value in kwargs.items() if name not in served})
    return fused_linear_cross_entropy(
        hidden_states, lm_head_weight, target, ignore_index=ignore_index, softcap=final_logit_softcapping,
        num_items=num_items_in_batch, accum_dtype=accum_dtype, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, **served,
    )  # fmt: skip


def LigerForCausalLMLoss(
    hidden_states, lm_head_weight, labels, hidden_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None,
    final_logit_softcapping=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    """Apply `fixed_fused_linear_cross_entropy` to hidden_states (..., H), labels and token_weights (B, T).

    `shift_labels` are labels shifted by one position to the left, and `token_weights` beside them are so, too.
    """
    token_weights = kwargs.pop("token_weights", None)
    if token_weights is not None:
        check_token_weights(token_weights, (labels if shift_labels is None else shift_labels).shape)
        token_weights = (shift_left(token_weights, 0) if shift_labels is None else token_weights).reshape(-1)
    shift_labels = shift_left(labels, ignore_index) if shift_labels is None else shift_labels
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size), lm_head_weight, shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch, ignore_index, final_logit_softcapping, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, token_weights=token_weights, **kwargs,
    )  # fmt: skip
