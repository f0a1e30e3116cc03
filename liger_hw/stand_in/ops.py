"""Define the autograd functions of `liger_kernel.ops`; `apply` calls this library's functions.

docs/adapters_and_trainers.md lists the arguments without effect, and why that is safe.
"""

import torch

from liger_hw.kernels.mlp.glu import swiglu
from liger_hw.kernels.moe.experts import experts
from liger_hw.kernels.vocabulary.cross_entropy_tvd import cross_entropy_tvd
from liger_hw.kernels.vocabulary.embedding import embedding
from liger_hw.kernels.vocabulary.selective_log_softmax import selective_log_softmax
from liger_hw.stand_in.function_class import function_class
from liger_hw.transformers import functional, loss_utils, rotary_names
from liger_hw.transformers.grpo_loss import triton_grpo_loss
from liger_hw.transformers.tiled_mlp import tiled
from liger_hw.transformers.vocab_parallel import vocab_parallel_cross_entropy

IGNORED = -100


@function_class
def LigerCrossEntropyFunction(
    _input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    """Return `liger_cross_entropy` as (loss, z_loss, token_accuracy, predicted_tokens), each None unless requested."""
    result = functional.liger_cross_entropy(
        _input, target, weight, None, ignore_index, None, reduction, label_smoothing, lse_square_scale, softcap,
        return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    return loss_utils.unpack_cross_entropy_result(result)


@function_class
def LigerFusedLinearCrossEntropyFunction(
    _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, ce_mode=None, chunk_mem_const=1,
):  # fmt: skip
    """Return `liger_fused_linear_cross_entropy` as (loss, z_loss, token_accuracy, predicted_tokens)."""
    result = functional.liger_fused_linear_cross_entropy(
        _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
        softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
        chunk_mem_const,
    )  # fmt: skip
    return loss_utils.unpack_cross_entropy_result(result)


@function_class
def LigerFusedLinearScaledCrossEntropyFunction(
    _input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False,
    selected_token_ids=None,
):  # fmt: skip
    """See `liger_fused_linear_scaled_cross_entropy`.

    Args:
        selected_token_ids: (N,) tokens whose loss replaces that of `target`, which then only marks ignored rows.
    """
    if selected_token_ids is not None:
        target = torch.where(target == ignore_index, target, selected_token_ids)
    return functional.liger_fused_linear_scaled_cross_entropy(
        _input, weight, target, temperature, ignore_index, return_entropy
    )


@function_class
def LigerVocabParallelCEFunction(
    vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula,
    label_smoothing_mode,
):  # fmt: skip
    """Call `vocab_parallel_cross_entropy`."""
    return vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula,
        label_smoothing_mode,
    )  # fmt: skip


@function_class
def LigerJSDFunction(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None):
    """Call `liger_jsd`."""
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


@function_class
def LigerFusedLinearJSDFunction(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5,
    ignore_index=-100, temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None,
):  # fmt: skip
    """Call `liger_fused_linear_jsd` of `liger_kernel.transformers`, not that of `chunked_loss.jsd_loss`."""
    return functional.liger_fused_linear_jsd(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index,
        temperature, accum_dtype,
    )  # fmt: skip


@function_class
def LigerKLDivLossFunction(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
    """Call `liger_kl_div`."""
    return functional.liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


@function_class
def LigerTVDLossFunction(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
    """Call `liger_tvd`."""
    return functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)


@function_class
def GrpoLossFunction(
    logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, beta, eps_low, eps_high,
    inplace, loss_type="grpo", max_completion_length=None, reduce=True, importance_sampling_level="token",
    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None,
    use_bias_correction_kl=False, num_items_in_batch=None, phi_seq=None,
):  # fmt: skip
    """See `triton_grpo_loss`.

    Raises:
        ValueError: `phi_seq` is not None: "vespo" computes its weights itself.
    """
    if phi_seq is not None:
        raise ValueError("phi_seq: got a tensor, allowed: None (vespo computes its weights itself)")
    loss, *metrics = triton_grpo_loss(
        logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, beta, eps_low,
        eps_high, inplace, loss_type, max_completion_length, importance_sampling_level, reduce,
        sapo_temperature_pos, sapo_temperature_neg, vllm_is_ratio, delta, use_bias_correction_kl,
        num_items_in_batch,
    )  # fmt: skip
    if not reduce:
        return loss, *metrics
    ((*kl, clip_ratio),) = metrics
    return loss, kl[0] if kl else None, clip_ratio


def fused_selective_log_softmax(logits, input_ids, temperature=0.9, mask=None):
    """Compute log softmax(logits / temperature) of each token: fp32 (B, L), 0 where `mask` is.

    Args:
        logits: (B, L + 1, V), the last position unused. input_ids: (B, L) or longer, of which the last L count.
    """
    logits = logits[:, :-1]
    tokens = input_ids[:, -logits.shape[1] :]
    if mask is not None:
        tokens = torch.where(mask.bool(), tokens, torch.full_like(tokens, IGNORED))
    return selective_log_softmax(logits, tokens, temperature)


@function_class
def LigerRMSNormFunction(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    """Call `liger_rms_norm`."""
    return functional.liger_rms_norm(X, W, eps, offset, casting_mode)


@function_class
def LigerFusedAddRMSNormFunction(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
    """Call `liger_fused_add_rms_norm`."""
    return functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


@function_class
def LigerSiLUMulFunction(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    """Return silu(gate_multiplier * a) * b * down_multiplier."""
    y = swiglu(a * gate_multiplier if torch.is_tensor(gate_multiplier) or gate_multiplier != 1.0 else a, b)
    return y * down_multiplier if torch.is_tensor(down_multiplier) or down_multiplier != 1.0 else y


@function_class
def LigerFusedGateUpSiLUMulFunction(y, in_place=False):
    """Return silu of the first half of the last dimension times the second half."""
    return swiglu(*y.chunk(2, -1))


@function_class
def LigerReLUSquaredFunction(X):
    """Call `liger_relu_squared`."""
    return functional.liger_relu_squared(X)


@function_class
def LigerMLPFunction(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
    """Return (silu(xG * gate_multiplier) * (xU)) D * down_multiplier, with weights as in torch.nn.Linear."""
    linear = torch.nn.functional.linear
    gate, up = linear(input, gate_weight), linear(input, up_weight)
    return linear(LigerSiLUMulFunction.apply(gate, up, gate_multiplier, down_multiplier), down_weight)


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """Apply `fn(mlp_module, x)` to pieces of the sequence, recomputed in the backward."""
    return tiled(fn, mlp_module, x, num_shards)


@function_class
def LigerTiledMLPFunction(fn, mlp_module, x, shards, compute_params=None):
    """Call `apply_tiled_mlp`."""
    return tiled(fn, mlp_module, x, shards)


@function_class
def LigerLlama4RopeFunction(q, k, freqs_cis, BLOCK_SIZE=None):
    """Call `liger_llama4_text_rotary_pos_emb`."""
    return rotary_names.liger_llama4_text_rotary_pos_emb(q, k, freqs_cis)


@function_class
def LigerSoftmaxFunction(input_):
    """Call `liger_softmax`."""
    return functional.liger_softmax(input_)


@function_class
def LigerSparsemaxFunction(x, dim):
    """Call `liger_sparsemax`."""
    return functional.liger_sparsemax(x, dim)


@function_class
def LigerAttnResFunction(V_stacked, w_query, w_norm, eps):
    """Call `liger_attn_res`."""
    return functional.liger_attn_res(V_stacked, w_query, w_norm, eps)


@function_class
def LigerMHCCoeffsFunction(
    x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
):
    """Call `liger_mhc_coeffs`."""
    return functional.liger_mhc_coeffs(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32=allow_fp32, tmax=tmax, rms_eps=rms_eps,
        pre_eps=pre_eps, sinkhorn_eps=sinkhorn_eps, post_mult=post_mult,
    )  # fmt: skip


@function_class
def LigerEmbeddingFunction(embeddings, indices):
    """Call `embedding`."""
    return embedding(embeddings, indices)


@function_class
def LigerFusedMoEFunction(x, gate_up_proj, down_proj, top_k_index, top_k_weights):
    """Call `experts`."""
    return experts(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


_SAME_PARAMETERS = {
    "LigerFusedCETVDFunction": cross_entropy_tvd,
    "LigerFusedLinearKLDivFunction": functional.liger_fused_linear_kl_div,
    "LigerLayerNormFunction": functional.liger_layer_norm,
    "LigerGroupNormFunction": functional.liger_group_norm,
    "LigerModulatedRMSNormFunction": functional.liger_modulated_rms_norm,
    "LigerPolyNormFunction": functional.liger_poly_norm,
    "LigerDyTFunction": functional.liger_dyt,
    "LigerGELUMulFunction": functional.liger_geglu,
    "LigerRopeFunction": functional.liger_rope,
    "LigerQwen2VLMRopeFunction": functional.liger_qwen2vl_mrope,
    "LigerMultiTokenAttentionFunction": functional.liger_multi_token_attention,
    "LigerFusedNeighborhoodAttentionFunction": functional.liger_fused_neighborhood_attention,
    "LigerMHCPreFunction": functional.liger_mhc_pre,
    "LigerMHCPostResFunction": functional.liger_mhc_post_res,
}
globals().update({name: function_class(function, name) for name, function in _SAME_PARAMETERS.items()})
