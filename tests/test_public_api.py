"""Every public name exists, is documented, and is what others expect under that name."""

import importlib
import inspect

import pytest

import liger_hw
import liger_hw.transformers

PEER = {  # module -> names that programs written for liger_kernel import from its counterpart
    "transformers": [
        "AutoLigerKernelForCausalLM", "LigerCrossEntropyLoss", "LigerFusedAddRMSNorm",
        "LigerFusedLinearCrossEntropyLoss", "LigerGEGLUMLP", "LigerLayerNorm", "LigerRMSNorm", "LigerSwiGLUMLP",
        "_apply_liger_kernel", "_apply_liger_kernel_to_instance", "apply_liger_kernel_to_llama", "liger_rotary_pos_emb",
        "LigerFusedLinearJSD", "LigerJSD", "LigerKLDIVLoss", "LigerTVDLoss", "triton_grpo_loss",
    ],
    "transformers.functional": [
        "CrossEntropyOutput", "liger_cross_entropy", "liger_fused_add_rms_norm", "liger_fused_linear_cross_entropy",
        "liger_geglu", "liger_layer_norm", "liger_rms_norm", "liger_rope", "liger_swiglu", "liger_fused_linear_jsd",
        "liger_jsd", "liger_kl_div", "liger_tvd",
    ],
    "transformers.grpo_loss": ["triton_grpo_loss"],
    "chunked_loss": [
        "LigerFusedLinearCPOLoss", "LigerFusedLinearCosineSimilarityLoss", "LigerFusedLinearDPOLoss",
        "LigerFusedLinearGRPOLoss", "LigerFusedLinearJSDLoss", "LigerFusedLinearKTOLoss", "LigerFusedLinearORPOLoss",
        "LigerFusedLinearSimPOLoss",
    ],
    "chunked_loss.functional": [
        "liger_fused_linear_cosine", "liger_fused_linear_cpo", "liger_fused_linear_dpo", "liger_fused_linear_grpo",
        "liger_fused_linear_jsd", "liger_fused_linear_kto", "liger_fused_linear_orpo", "liger_fused_linear_simpo",
    ],
    "transformers.monkey_patch": [
        "MODEL_TYPE_TO_APPLY_LIGER_FN", "_apply_liger_kernel", "_apply_liger_kernel_to_instance",
        "apply_liger_kernel_to_llama",
    ],
}  # fmt: skip
SIGNATURES = {
    "liger_cross_entropy": "input target weight size_average ignore_index reduce reduction label_smoothing"
    " lse_square_scale softcap return_z_loss return_token_accuracy return_predicted_tokens",
    "liger_fused_linear_cross_entropy": "input weight target bias ce_weight ignore_index lse_square_scale"
    " label_smoothing reduction softcap return_z_loss accum_dtype use_token_scaling return_token_accuracy"
    " return_predicted_tokens",
    "liger_rms_norm": "X W eps offset casting_mode in_place",
    "liger_fused_add_rms_norm": "X R W eps offset casting_mode in_place",
    "liger_layer_norm": "X W B eps",
    "liger_swiglu": "a b",
    "liger_geglu": "a b",
    "liger_rope": "q k cos sin position_ids unsqueeze_dim",
    "LigerRMSNorm": "hidden_size eps offset casting_mode init_fn in_place row_mode elementwise_affine",
    "LigerFusedAddRMSNorm": "hidden_size eps offset casting_mode init_fn in_place",
    "LigerLayerNorm": "hidden_size eps bias init_fn",
    "LigerSwiGLUMLP": "config",
    "LigerGEGLUMLP": "config",
    "LigerCrossEntropyLoss": "weight ignore_index lse_square_scale label_smoothing reduction softcap return_z_loss"
    " return_token_accuracy return_predicted_tokens",
    "LigerFusedLinearCrossEntropyLoss": "ce_weight ignore_index lse_square_scale label_smoothing reduction softcap"
    " return_z_loss accum_dtype use_token_scaling return_token_accuracy return_predicted_tokens",
    "liger_rotary_pos_emb": "q k cos sin position_ids unsqueeze_dim",
    "LigerJSD": "beta ignore_index",
    "LigerKLDIVLoss": "eps args kwargs",
    "LigerTVDLoss": "reduction ignore_index",
    "LigerFusedLinearJSD": "jsd_beta ignore_index temperature accum_dtype",
    "liger_jsd": "input target shift_labels beta ignore_index",
    "liger_kl_div": "input target size_average reduce reduction log_target eps",
    "liger_tvd": "input target shift_labels reduction ignore_index",
    "triton_grpo_loss": "logits old_logp ref_logp completion_ids advantages completion_mask temperature beta eps_low"
    " eps_high inplace loss_type max_completion_length importance_sampling_level reduce sapo_temperature_pos"
    " sapo_temperature_neg vllm_is_ratio delta use_bias_correction_kl num_items_in_batch vespo_k_pos vespo_lambda_pos"
    " vespo_k_neg vespo_lambda_neg",
}
NEEDS_TRANSFORMERS = {"AutoLigerKernelForCausalLM"}


def get(module, name):
    if name in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers")
    return getattr(importlib.import_module(f"liger_hw.{module}" if module else "liger_hw"), name)


@pytest.mark.parametrize("name", liger_hw.__all__)
def test_public_names_exist_and_are_documented(name):
    assert name in dir(liger_hw)
    assert (inspect.getdoc(get("", name)) or "").strip(), f"{name} has no docstring"


@pytest.mark.parametrize("module, name", [(module, name) for module, names in PEER.items() for name in names])
def test_names_of_the_peer(module, name):
    assert get(module, name) is not None


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_of_the_peer(name):
    module = "transformers.functional" if name in PEER["transformers.functional"] else "transformers"
    assert " ".join(inspect.signature(get(module, name)).parameters) == SIGNATURES[name]


def test_unknown_names_are_attribute_errors():
    for package in (liger_hw, liger_hw.transformers):
        with pytest.raises(AttributeError, match="unheard_of"):
            package.unheard_of  # noqa: B018
