"""Compute GRPO and related losses from logits, as `liger_kernel.transformers.grpo_loss`."""

from liger_hw.chunked_loss.functional import items_per_rank, policy_options
from liger_hw.losses.policy import OBJECTIVES, PolicyOptions, policy_loss_of_logits, token_weights


def triton_grpo_loss(
    logits, old_logp, ref_logp, completion_ids, advantages, completion_mask=None, temperature=0.9, beta=0.04,
    eps_low=0.2, eps_high=0.4, inplace=True, loss_type="dapo", max_completion_length=None,
    importance_sampling_level="token", reduce=False, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
    vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, num_items_in_batch=None, vespo_k_pos=2.0,
    vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
):  # fmt: skip
    """Compute the policy loss of completions of any length from logits.

    Args:
        logits: (B, L + 1, V), the last position unused, or (B, L, V).
        old_logp, ref_logp: (B, L) or None; ref_logp is needed where beta is not 0.
        completion_ids, completion_mask: (B, L).
        advantages: (B,) or (B, L).
        eps_low, eps_high: `epsilon_low` and `epsilon_high` of `PolicyOptions`.
        inplace: the backward writes the gradient over `logits`, and a second backward raises a RuntimeError.
        reduce: return the loss of the batch, not of the tokens.
        num_items_in_batch: as in `LigerFusedLinearGRPOLoss`, with `reduce`.
        others: as in `PolicyOptions`.

    Returns:
        (loss (B, L), KL (B, L) or None where beta is 0, whether a token was clipped (B, L)), 0 where masked; with
        `reduce` (loss, [mean KL where beta is not 0, share of clipped tokens]).

    Raises:
        ValueError: shapes that do not fit, an unknown loss type or an option out of range.
    """
    if loss_type not in OBJECTIVES:
        raise ValueError(f"Unknown loss_type '{loss_type}'. Supported types: {', '.join(OBJECTIVES)}")
    options = policy_options(locals() | {"epsilon_low": eps_low, "epsilon_high": eps_high})
    loss, kl, is_clipped, batch = policy_loss_of_logits(
        logits, completion_ids, advantages, completion_mask, old_logp, ref_logp, vllm_is_ratio, inplace, **options
    )
    if not reduce:
        return loss, kl, is_clipped
    items = items_per_rank(batch.mask, num_items_in_batch)
    value = (loss * token_weights(batch.mask, PolicyOptions(**options), items, loss.dtype)).sum()
    return value, [batch.mean(part) for part in (kl, is_clipped) if part is not None]
