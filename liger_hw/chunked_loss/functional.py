"""The functions of `liger_kernel.chunked_loss.functional`, with its argument orders.

The modules document the outputs. `compiled` and `chunk_size` have no effect: a memory budget sets the chunk size.
"""

from dataclasses import fields

import torch
from torch.nn.functional import logsigmoid

from liger_hw.checks import check
from liger_hw.losses.distillation import distillation_loss
from liger_hw.losses.policy import OBJECTIVES, PolicyOptions, policy_loss
from liger_hw.losses.preference import preference_loss, unpaired_preference_loss
from liger_hw.losses.preference_formulas import PAIR_LOSSES, Pairs, log_odds_ratio


def _with_metrics(function, *args, **options):
    """Call a preference loss; return (loss, tuple of the metrics)."""
    loss, *metrics = function(*args, **options)
    return loss, tuple(metrics)


def check_dpo_options(loss_type, label_smoothing):
    """Raise liger_kernel's ValueError for an unknown loss type or a smoothing out of range."""
    if loss_type not in PAIR_LOSSES:
        raise ValueError(f"Unsupported loss_type: {loss_type}. Supported types are: {', '.join(PAIR_LOSSES)}")
    if loss_type == "exo_pair" and label_smoothing <= 0:
        raise ValueError(f"label_smoothing must be > 0 for loss_type='exo_pair'. Got {label_smoothing}")
    if loss_type == "robust" and not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must lie in [0.0, 0.5) for loss_type='robust'. Got {label_smoothing}")


def check_grpo_options(loss_type, max_completion_length):
    """Raise liger_kernel's ValueError for an unknown loss type or a missing length."""
    if loss_type not in OBJECTIVES:
        raise ValueError(f"Unknown loss type: {loss_type}. Supported loss_type: {', '.join(OBJECTIVES)}")
    if loss_type == "dr_grpo" and max_completion_length is None:
        raise ValueError("max_completion_length must be provided for loss_type 'dr_grpo'")


def reference_of(use_ref_model, ref_input, ref_weight, ref_bias):
    """Return a preference loss's reference arguments; raise ValueError if one is missing."""
    if not use_ref_model:
        return {}
    for name, value in {"ref_input": ref_input, "ref_weight": ref_weight}.items():
        check(value is not None, name, None, "a tensor of the reference model, or use_ref_model=False for none")
    return {"ref_x": ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias}


def liger_fused_linear_dpo(
    _input, weight, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None, ignore_index=-100, beta=0.1,
    compute_nll_loss=False, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1,
    loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05, alpha=1.0,
):  # fmt: skip
    """Compute `preference_loss` with a reference model: see `LigerFusedLinearDPOLoss`."""
    check_dpo_options(loss_type, label_smoothing)
    ref = reference_of(use_ref_model, ref_input, ref_weight, ref_bias)
    options = {"discopop": {"tau": discopop_tau}, "bco_pair": {"delta": 0.0}}.get(loss_type, {})
    smooths = PAIR_LOSSES[loss_type].smooths and loss_type != "sigmoid"  # liger_kernel's ignores it there
    label_smoothing = label_smoothing if smooths else 0.0
    return _with_metrics(
        preference_loss, _input, weight, target, bias, loss_type, beta, label_smoothing,
        alpha if compute_nll_loss else 0.0, average_log_prob, ignore_index=ignore_index, **ref, **options,
    )  # fmt: skip


def liger_fused_linear_cpo(
    _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
    compute_nll_loss=True, compiled=True, average_log_prob=False, chunk_size=1,
):  # fmt: skip
    """Compute `preference_loss` without a reference model: see `LigerFusedLinearCPOLoss`."""
    return _with_metrics(
        preference_loss, _input, weight, target, bias, "sigmoid", beta, label_smoothing,
        alpha if compute_nll_loss else 0.0, average_log_prob, ignore_index=ignore_index,
    )  # fmt: skip


def liger_fused_linear_simpo(
    _input, weight, target, bias=None, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0,
    compute_nll_loss=False, compiled=True, gamma=0.5, chunk_size=1,
):  # fmt: skip
    """Compute `preference_loss` of averaged log-probabilities with a margin: see `LigerFusedLinearSimPOLoss`."""
    return _with_metrics(
        preference_loss, _input, weight, target, bias, "simpo", beta, label_smoothing,
        alpha if compute_nll_loss else 0.0, True, ignore_index=ignore_index, gamma=gamma,
    )  # fmt: skip


def liger_fused_linear_orpo(
    _input, weight, target, bias=None, ignore_index=-100, beta=0.1, compute_nll_loss=True, nll_target=None,
    compiled=True, chunk_size=1,
):  # fmt: skip
    """Compute `preference_loss` from the odds ratio: see `LigerFusedLinearORPOLoss`."""
    loss, *metrics = preference_loss(
        _input, weight, target, bias, "orpo", beta, 0.0, 1.0 if compute_nll_loss else 0.0, True,
        ignore_index=ignore_index, nll_labels=nll_target,
    )  # fmt: skip
    chosen, rejected = metrics[:2]
    log_odds = log_odds_ratio(Pairs(chosen, rejected, torch.zeros_like(chosen), torch.zeros_like(rejected)))
    return loss, (*metrics, logsigmoid(log_odds).mean(), log_odds.mean())


def liger_fused_linear_kto(
    _input, weight, target, preference_labels, bias=None, ref_input=None, ref_weight=None, ref_bias=None, kl=None,
    ignore_index=-100, beta=0.1, compiled=True, use_ref_model=True, average_log_prob=False, chunk_size=1,
):  # fmt: skip
    """Compute `unpaired_preference_loss`: see `LigerFusedLinearKTOLoss`."""
    ref = reference_of(use_ref_model, ref_input, ref_weight, ref_bias)
    return _with_metrics(
        unpaired_preference_loss, _input, weight, target, preference_labels, bias, "kto", beta, average_log_prob,
        ignore_index=ignore_index, kl=0.0 if kl is None else kl, **ref,
    )  # fmt: skip


def liger_fused_linear_jsd(
    student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, teacher_bias=None,
    weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True,
    chunk_size=1024, return_soft_hard_loss=False,
):  # fmt: skip
    """Compute `distillation_loss` with the JSD: see `LigerFusedLinearJSDLoss`."""
    output = distillation_loss(
        student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, "jsd",
        beta, temperature, weight_hard_loss, weight_soft_loss, ignore_index,
    )  # fmt: skip
    return tuple(output) if return_soft_hard_loss else output.loss


def liger_fused_linear_cosine(
    student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None, teacher_bias=None,
    weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True,
    chunk_size=1024, return_soft_hard_loss=False,
):  # fmt: skip
    """Compute `distillation_loss` with `beta` times the cosine distance: see `LigerFusedLinearCosineSimilarityLoss`."""
    output = distillation_loss(
        student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias, "cosine",
        0.5, temperature, weight_hard_loss, weight_soft_loss * beta, ignore_index,
    )  # fmt: skip
    return (output.loss, beta * output.soft, output.hard) if return_soft_hard_loss else output.loss


def liger_fused_linear_grpo(
    _input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
    old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, beta=0.04, epsilon_low=0.2,
    epsilon_high=0.2, loss_type="dapo", max_completion_length=None, importance_sampling_level="token",
    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, temperature=1.0, compiled=True, use_ref_model=True,
    chunk_size=1, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0,
    vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None,
):  # fmt: skip
    """Compute `policy_loss`: see `LigerFusedLinearGRPOLoss`."""
    check_grpo_options(loss_type, max_completion_length)
    options = policy_options(locals())
    policy_is_reference = not use_ref_model and ref_per_token_logps is None  # then the KL and its gradient are 0
    if policy_is_reference:
        ref_input, options["beta"] = None, 0.0
    attention_mask = torch.ones_like(selected_token_ids) if attention_mask is None else attention_mask
    output = policy_loss(
        _input.reshape(*selected_token_ids.shape, -1), weight, selected_token_ids, advantages, attention_mask, bias,
        old_per_token_logps, ref_per_token_logps, ref_input, ref_weight, ref_bias, vllm_is_ratio,
        items_per_rank(attention_mask, num_items_in_batch), **options,
    )  # fmt: skip
    kl = torch.zeros_like(output.clip_ratio) if policy_is_reference and beta else output.kl
    return output.loss, [metric for metric in (kl, output.clip_ratio) if metric is not None]


def policy_options(arguments: dict) -> dict:
    """Return the arguments that are options of the policy losses, under the same names."""
    return {field.name: arguments[field.name] for field in fields(PolicyOptions) if field.name in arguments}


def items_per_rank(mask, num_items=None):
    """Return the divisor, () fp32, that makes the mean over ranks the mean over tokens.

    Args:
        mask: (B, T), not 0 where a token counts. num_items: the number of tokens on all ranks, or None to count them.
    """
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if distributed else 1
    if num_items is not None:
        return (torch.as_tensor(num_items, dtype=torch.float32, device=mask.device) / ranks).clamp(min=1)
    count = (mask != 0).sum().float()
    if distributed:
        torch.distributed.all_reduce(count)
    return (count / ranks).clamp(min=1)
