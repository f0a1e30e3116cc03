"""The names of `liger_kernel.ops`: what programs apply there as autograd functions, `apply` alone, over the ops.

Arguments that steer how the original's kernels reuse memory or which of its implementations runs (`in_place`,
`row_mode`, `*_impl`, `*_mode`, `BLOCK_SIZE`) are accepted and have no effect.
"""

import torch

from liger_hw.chunked_loss import functional as chunked
from liger_hw.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.kernels.glu import swiglu
from liger_hw.kernels.selective_log_softmax import selective_log_softmax
from liger_hw.losses.engine import CHUNK_MEMORY
from liger_hw.transformers import functional, loss_utils, ops_without_kernels, rotary_names
from liger_hw.transformers.grpo_loss import triton_grpo_loss
from liger_hw.transformers.vocab_parallel import vocab_parallel_cross_entropy

IMPL_REGISTRY = {}  # other implementations of the kernels, of which there are none: see `liger_hw.use_backend`


def _applied(name, function):
    return type(name, (), {"apply": staticmethod(function), "__doc__": function.__doc__, "__module__": __name__})


def _cross_entropy(
    _input, target, weight, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens) of `liger_cross_entropy`; None for what was not asked for."""
    return loss_utils.unpack_cross_entropy_result(
        functional.liger_cross_entropy(
            _input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing,
            lse_square_scale=lse_square_scale, softcap=softcap, return_z_loss=return_z_loss,
            return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
        )
    )  # fmt: skip


def _fused_linear_cross_entropy(
    _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, ce_mode=None, chunk_mem_const=1,
):  # fmt: skip
    """(loss, z_loss, token_accuracy, predicted_tokens) of `liger_fused_linear_cross_entropy`."""
    return loss_utils.unpack_cross_entropy_result(
        functional.liger_fused_linear_cross_entropy(
            _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction,
            softcap, return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
            chunk_mem_const,
        )
    )  # fmt: skip


def fused_linear_cross_entropy_forward(
    _input, weight, target, ce_weight=None, bias=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, ce_mode=None, token_grad_output=None,
    compute_gradients=None, weight_requires_grad=None, chunk_mem_const=1,
):  # fmt: skip
    """The loss and its gradients at once, without a graph: (loss, z_loss, token_accuracy, predicted_tokens, gradient of
    the input, of the weight, of the bias), None for a gradient that nobody wants.

    Args:
        token_grad_output: with reduction="none" the gradient of each token's loss, one by default.
        compute_gradients: whether any is wanted; by default whether `_input` requires one.
        weight_requires_grad: whether the weight's is wanted; by default what the weight says.
        others: as in `liger_fused_linear_cross_entropy`.
    """
    wanted = _input.requires_grad if compute_gradients is None else compute_gradients
    of_weight = weight.requires_grad if weight_requires_grad is None else weight_requires_grad
    leaves = [_input.detach(), weight.detach(), None if bias is None else bias.detach()]
    for leaf, want in zip(leaves, (wanted, wanted and of_weight, wanted and of_weight)):
        if leaf is not None and want:
            leaf.requires_grad_()
    with torch.enable_grad():
        found = fused_linear_cross_entropy(
            leaves[0], leaves[1], target, leaves[2], ce_weight, ignore_index, label_smoothing, lse_square_scale,
            softcap, reduction=reduction, accum_dtype=accum_dtype, use_token_scaling=use_token_scaling,
            return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
            return_predicted_tokens=return_predicted_tokens, chunk_memory=int(chunk_mem_const * CHUNK_MEMORY),
        )  # fmt: skip
        loss, *rest = loss_utils.unpack_cross_entropy_result(found)
        asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
        given = torch.ones_like(loss) if token_grad_output is None else token_grad_output
        made = iter(torch.autograd.grad(loss, asked, given) if asked else ())
    gradients = [next(made) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
    return loss.detach(), *rest, *gradients


def fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, grad_bias):
    """The gradients that `fused_linear_cross_entropy_forward` returned, times that of the loss, a scalar."""
    return tuple(None if g is None else g * grad_output for g in (grad_input, grad_weight, grad_bias))


def _scaled_cross_entropy(
    _input, weight, target, temperature=1.0, ignore_index=-100, m_tiles_per_cluster=1, return_entropy=False,
    selected_token_ids=None,
):  # fmt: skip
    """See `liger_fused_linear_scaled_cross_entropy`.

    Args:
        selected_token_ids: what to take in the place of `target`, which then only says what to ignore.
    """
    if selected_token_ids is not None:
        target = torch.where(target == ignore_index, target, selected_token_ids)
    return functional.liger_fused_linear_scaled_cross_entropy(
        _input, weight, target, temperature, ignore_index, return_entropy
    )


def fused_selective_log_softmax(logits, input_ids, temperature=0.9, mask=None):
    """log softmax(logits / temperature) of each token: fp32 (B, L), 0 where `mask` is.

    Args:
        logits: (B, L + 1, V), the last position unused. input_ids: (B, L), or longer, of which the last L count.
    """
    logits = logits[:, :-1]
    tokens = input_ids[:, -logits.shape[1] :]
    if mask is not None:
        tokens = torch.where(mask.bool(), tokens, torch.full_like(tokens, -100))
    return selective_log_softmax(logits, tokens, temperature)


def _grpo(
    logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, beta, eps_low, eps_high,
    inplace, loss_type="grpo", max_completion_length=None, reduce=True, importance_sampling_level="token",
    sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, vllm_is_ratio=None, delta=None, use_bias_correction_kl=False,
    num_items_in_batch=None, phi_seq=None,
):  # fmt: skip
    """See `triton_grpo_loss`; with `reduce` its loss, KL and share of clipped tokens are three values here too.
    `phi_seq` is accepted as None: "vespo" makes its weights itself."""
    if phi_seq is not None:
        raise ValueError("phi_seq: got a tensor, allowed: None (vespo makes its weights itself)")
    found = triton_grpo_loss(
        logits, old_logp, ref_logp, completion_ids, advantages, completion_mask, temperature, beta, eps_low, eps_high,
        inplace, loss_type, max_completion_length, importance_sampling_level, reduce, sapo_temperature_pos,
        sapo_temperature_neg, vllm_is_ratio, delta, use_bias_correction_kl, num_items_in_batch,
    )  # fmt: skip
    if not reduce:
        return found
    loss, logged = found
    return loss, logged[0] if beta else None, logged[-1]


def _modulated_rms_norm(X, W, scale, shift, eps, offset=0.0, casting_mode="llama", in_place=True):
    return ops_without_kernels.modulated_rms_norm(X, W, scale, shift, eps, offset, casting_mode)


def _silu_mul(a, b, gate_multiplier=1.0, down_multiplier=1.0):
    """silu(gate_multiplier * a) * b * down_multiplier."""
    a = a if gate_multiplier == 1.0 else a * gate_multiplier
    y = swiglu(a, b)
    return y if down_multiplier == 1.0 else y * down_multiplier


def _mlp(input, gate_weight, up_weight, down_weight, gate_multiplier=1.0, down_multiplier=1.0):
    """(silu(x G * gate_multiplier) * (x U)) D * down_multiplier, with weights as torch.nn.Linear has them."""
    linear = torch.nn.functional.linear
    y = _silu_mul(linear(input, gate_weight), linear(input, up_weight), gate_multiplier, down_multiplier)
    return linear(y, down_weight)


def _gate_up(y, in_place=False):
    """silu of the first half of the last dimension, times the second half."""
    return swiglu(*y.chunk(2, -1))


def _kl_div(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10):
    return functional.liger_kl_div(y_pred, y_true, reduction=reduction, log_target=log_target, eps=eps)


def _tvd(p, q, shift_labels=None, reduction="batchmean", ignore_index=-100):
    return functional.liger_tvd(p, q, shift_labels, reduction, ignore_index)


def _jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, jsd_impl=None, jsd_mode=None):
    return functional.liger_jsd(_input, target, shift_labels, beta, ignore_index)


def _linear_jsd(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
    temperature=1.0, accum_dtype=None, jsd_impl=None, jsd_mode=None,
):  # fmt: skip
    return functional.liger_fused_linear_jsd(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index,
        temperature, accum_dtype,
    )  # fmt: skip


def _rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
    return functional.liger_rms_norm(X, W, eps, offset, casting_mode)


def _add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
    return functional.liger_fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def _llama4_rope(q, k, freqs_cis, BLOCK_SIZE=None):
    return rotary_names.liger_llama4_text_rotary_pos_emb(q, k, freqs_cis)


def _vocab_parallel(
    vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula,
    label_smoothing_mode,
):  # fmt: skip
    return vocab_parallel_cross_entropy(
        vocab_parallel_logits, target, tp_group, ignore_index, label_smoothing, label_smoothing_formula,
        label_smoothing_mode,
    )  # fmt: skip


def _mhc_coefficients(
    x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
):
    return ops_without_kernels.mhc_coefficients(
        x, phi, b, alpha_pre, alpha_post, alpha_res, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    )


def _attention_residual(V_stacked, w_query, w_norm, eps):
    return ops_without_kernels.attention_residual(V_stacked, w_query, w_norm, eps)


def _relu_squared(X):
    return functional.liger_relu_squared(X)


def _softmax(input_):
    return functional.liger_softmax(input_)


def _sparsemax(x, dim):
    return ops_without_kernels.sparsemax(x, dim)


def _embedding(embeddings, indices):
    return torch.nn.functional.embedding(indices, embeddings)


def _tiled(fn, mlp_module, x, shards, compute_params=None):
    return ops_without_kernels.tiled(fn, mlp_module, x, shards)


def apply_tiled_mlp(fn, mlp_module, x, num_shards=None, compute_params=None):
    """See `ops_without_kernels.tiled`."""
    return ops_without_kernels.tiled(fn, mlp_module, x, num_shards)


globals().update(
    (name, _applied(name, function))
    for name, function in {
        "GrpoLossFunction": _grpo,
        "LigerAttnResFunction": _attention_residual,
        "LigerCrossEntropyFunction": _cross_entropy,
        "LigerDyTFunction": ops_without_kernels.dyt,
        "LigerEmbeddingFunction": _embedding,
        "LigerFusedAddRMSNormFunction": _add_rms_norm,
        "LigerFusedCETVDFunction": ops_without_kernels.ce_and_tvd,
        "LigerFusedGateUpSiLUMulFunction": _gate_up,
        "LigerFusedLinearCPOFunction": chunked.liger_fused_linear_cpo,
        "LigerFusedLinearCosineSimilarityFunction": chunked.liger_fused_linear_cosine,
        "LigerFusedLinearCrossEntropyFunction": _fused_linear_cross_entropy,
        "LigerFusedLinearDPOFunction": chunked.liger_fused_linear_dpo,
        "LigerFusedLinearGRPOFunction": chunked.liger_fused_linear_grpo,
        "LigerFusedLinearJSDFunction": _linear_jsd,
        "LigerFusedLinearKLDivFunction": functional.liger_fused_linear_kl_div,
        "LigerFusedLinearKTOFunction": chunked.liger_fused_linear_kto,
        "LigerFusedLinearORPOFunction": chunked.liger_fused_linear_orpo,
        "LigerFusedLinearScaledCrossEntropyFunction": _scaled_cross_entropy,
        "LigerFusedLinearSimPOFunction": chunked.liger_fused_linear_simpo,
        "LigerFusedMoEFunction": ops_without_kernels.experts,
        "LigerFusedNeighborhoodAttentionFunction": ops_without_kernels.neighborhood_attention,
        "LigerGELUMulFunction": functional.liger_geglu,
        "LigerGroupNormFunction": functional.liger_group_norm,
        "LigerJSDFunction": _jsd,
        "LigerKLDivLossFunction": _kl_div,
        "LigerLayerNormFunction": functional.liger_layer_norm,
        "LigerLlama4RopeFunction": _llama4_rope,
        "LigerMHCCoeffsFunction": _mhc_coefficients,
        "LigerMHCPostResFunction": ops_without_kernels.mhc_post_res,
        "LigerMHCPreFunction": ops_without_kernels.mhc_pre,
        "LigerMLPFunction": _mlp,
        "LigerModulatedRMSNormFunction": _modulated_rms_norm,
        "LigerMultiTokenAttentionFunction": ops_without_kernels.multi_token_attention,
        "LigerPolyNormFunction": functional.liger_poly_norm,
        "LigerQwen2VLMRopeFunction": functional.liger_qwen2vl_mrope,
        "LigerRMSNormFunction": _rms_norm,
        "LigerReLUSquaredFunction": _relu_squared,
        "LigerRopeFunction": functional.liger_rope,
        "LigerSiLUMulFunction": _silu_mul,
        "LigerSoftmaxFunction": _softmax,
        "LigerSparsemaxFunction": _sparsemax,
        "LigerTVDLossFunction": _tvd,
        "LigerTiledMLPFunction": _tiled,
        "LigerVocabParallelCEFunction": _vocab_parallel,
    }.items()
)
