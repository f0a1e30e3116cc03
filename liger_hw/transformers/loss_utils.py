"""The loss of a causal language model from its last hidden states, under liger_kernel's names.

Patched models do not call these: their own loss function is handed lazy logits (see `loss`). Programs that wrote a
forward of their own around them do.
"""

import torch

from liger_hw.kernels.cross_entropy import CrossEntropyOutput
from liger_hw.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.patching.loss import refuse_unserved

OPTIONS = {"ce_weight", "label_smoothing", "lse_square_scale", "use_token_scaling", "bias", "logit_scale"}


def unpack_cross_entropy_result(result):
    """(loss, z_loss, token_accuracy, predicted_tokens) of what a loss returned; None for what it did not."""
    if isinstance(result, CrossEntropyOutput):
        return result.loss, result.z_loss, result.token_accuracy, result.predicted_tokens
    return result, None, None, None


def fixed_fused_linear_cross_entropy(
    hidden_states, lm_head_weight, target, num_items_in_batch=None, ignore_index=-100, final_logit_softcapping=None,
    accum_dtype=None, return_token_accuracy=False, return_predicted_tokens=False, **kwargs,
):  # fmt: skip
    """Mean cross entropy of hidden_states (N, H) under lm_head_weight (V, H), without the logits.

    Args:
        target: (N,).
        num_items_in_batch: what to divide the sum by instead of the number of targets that count.
        final_logit_softcapping: the softcap.
        kwargs: ce_weight, label_smoothing, lse_square_scale, use_token_scaling, bias and logit_scale, as in
            `liger_hw.fused_linear_cross_entropy`. Others that a trainer passes through are ignored, unless they ask for
            another loss.

    Returns:
        the loss, or a `CrossEntropyOutput` where a `return_*` is True.

    Raises:
        ValueError: weights of tokens, or another option of a loss that nothing serves.
    """
    served = {name: kwargs[name] for name in kwargs.keys() & OPTIONS if kwargs[name] is not None}
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
    """`fixed_fused_linear_cross_entropy` of hidden_states (..., H) and labels (B, T), which are shifted here, or
    `shift_labels`, which are already. `hidden_size` is H."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return fixed_fused_linear_cross_entropy(
        hidden_states.reshape(-1, hidden_size), lm_head_weight, shift_labels.reshape(-1).to(hidden_states.device),
        num_items_in_batch, ignore_index, final_logit_softcapping, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens, **kwargs,
    )  # fmt: skip
