"""GRPO with the module and helper names of `liger_kernel.chunked_loss`."""

import torch

from liger_hw.checks import check
from liger_hw.chunked_loss.functional import check_grpo_options, liger_fused_linear_grpo, policy_options
from liger_hw.losses.options import OptionsModule
from liger_hw.losses.policy import KL, PolicyOptions, vespo_weights


def k3_loss_fn(log_p, log_q):
    """Estimate the KL of q from p by k3, for each token."""
    return KL["k3"](log_q - log_p)


def get_gamma_weights(
    advantages, log_ratio_per_token, mask, importance_sampling_ratio=None, k_pos=2.0, lambda_pos=3.0, k_neg=3.0,
    lambda_neg=2.0,
):  # fmt: skip
    """Compute `vespo_weights`, (B, 1), from advantages (B,) and log-ratios (B, T)."""
    options = PolicyOptions(
        "vespo", vespo_k_pos=k_pos, vespo_lambda_pos=lambda_pos, vespo_k_neg=k_neg, vespo_lambda_neg=lambda_neg
    )
    return vespo_weights(log_ratio_per_token, advantages[:, None], mask, importance_sampling_ratio, options)


def sapo_loss_fn(importance_ratio, temperature):
    """Compute SAPO's gate of a ratio; raise ValueError unless the temperature is positive."""
    check(temperature > 0, "temperature", temperature, "a positive number")
    return torch.sigmoid(temperature * (importance_ratio - 1)) * 4 / temperature


def clip_coef_fn(coef, epsilon_low, epsilon_high, loss_type):
    """Clip the ratio for a loss type: (clipped ratio or None, is below, is above)."""
    if loss_type in ("sapo", "vespo"):
        never = torch.zeros_like(coef, dtype=torch.bool)
        return None, never, never
    if loss_type == "cispo":
        return coef.clamp(max=epsilon_high).detach(), False, coef > epsilon_high
    low, high = 1 - epsilon_low, 1 + epsilon_high
    return coef.clamp(low, high), coef < low, coef > high


class LigerFusedLinearGRPOLoss(OptionsModule):
    """GRPO and the other losses of `liger_hw.losses.policy.OBJECTIVES`, from hidden states (B, T, H).

    forward returns (loss, [mean KL if beta is not 0, share of clipped tokens]). If torch.distributed is initialised,
    "dapo", "cispo" and "vespo" divide by the token count of all ranks.

    Args:
        use_ref_model: compute the reference from `ref_input`. If it is False, beta is not 0 and `ref_per_token_logps`
            is missing, the current policy is its own reference and the KL is 0.
        max_completion_length: required for "dr_grpo".
        others: as in `PolicyOptions`.

    Raises:
        ValueError: an option is unknown, missing or out of its range.
    """

    def __init__(
        self, beta=0.04, compiled=True, use_ref_model=True, chunk_size=1, epsilon_low=0.2, epsilon_high=0.2,
        loss_type="dapo", max_completion_length=None, importance_sampling_level="token", sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05, temperature=1.0, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0,
        vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0,
    ):  # fmt: skip
        super().__init__(locals())
        check_grpo_options(loss_type, max_completion_length)
        PolicyOptions(**policy_options(self.options))

    def forward(
        self, _input, lin_weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
        old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, vllm_is_ratio=None,
        num_items_in_batch=None,
    ):  # fmt: skip
        return liger_fused_linear_grpo(
            _input, lin_weight, selected_token_ids, attention_mask, advantages, bias, ref_per_token_logps,
            old_per_token_logps, ref_input, ref_weight, ref_bias, vllm_is_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch, **self.options,
        )  # fmt: skip
