"""Fused Triton kernels for training language models on NVIDIA, AMD and Intel GPUs.

The import runs nothing. Each name imports its module at its first use, so a missing GPU, Triton or transformers affects
only the names that need it.
"""

from liger_hw._lazy import lazy_names

__version__ = "0.1.0"

_NAMES = {
    "backends": ("use_backend",),
    "checkpointing.activations": ("activations",),
    "kernels.norms.rms_norm": ("fused_add_rms_norm", "rms_norm"),
    "kernels.norms.gated_rms_norm": ("gated_rms_norm", "modulated_rms_norm"),
    "kernels.norms.group_norm": ("group_norm",),
    "kernels.norms.l2_norm": ("l2_norm",),
    "kernels.norms.layer_norm": ("layer_norm",),
    "kernels.attention.multi_token_attention": ("multi_token_attention",),
    "kernels.attention.neighborhood_attention": ("neighborhood_attention",),
    "kernels.norms.poly_norm": ("poly_norm",),
    "kernels.norms.dyt": ("dyt",),
    "kernels.residual.attention_residual": ("attention_residual",),
    "kernels.attention.causal_conv1d": ("causal_conv1d",),
    "kernels.mlp.glu": ("activate", "geglu", "swiglu"),
    "kernels.mlp.clamped_glu": ("clamped_swiglu",),
    "kernels.vocabulary.embedding": ("embedding",),
    "kernels.moe.experts": ("experts",),
    "kernels.linear.lora_linear": ("lora_glu_linear", "lora_linear"),
    "kernels.mlp.glu_linear": ("glu_linear",),
    "kernels.moe.grouped_mm": ("grouped_mm",),
    "kernels.linear.dequantize_4bit": ("dequantize_4bit",),
    "kernels.mlp.int2_matmul": ("int2_matmul", "pack_int2", "unpack_int2"),
    "kernels.residual.hyper_connections": ("mhc_post_res", "mhc_pre"),
    "kernels.residual.mhc_coefficients": ("mhc_coefficients",),
    "kernels.attention.rope": ("rope",),
    "kernels.attention.qk_norm_rope": ("qk_norm_rope",),
    "kernels.moe.routing": ("load_balancing_loss", "router", "router_z_loss"),
    "kernels.vocabulary.cross_entropy": ("CrossEntropyOutput", "cross_entropy"),
    "kernels.vocabulary.cross_entropy_tvd": ("cross_entropy_tvd",),
    "kernels.vocabulary.fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
    "kernels.vocabulary.selective_log_softmax": ("SelectedLogProbs", "selective_log_softmax"),
    "kernels.vocabulary.fused_linear_selective_log_softmax": ("fused_linear_selective_log_softmax",),
    "kernels.attention.softmax": ("softmax", "sparsemax"),
    "kernels.vocabulary.divergence": ("jsd", "kl_div", "tvd"),
    "losses.preference": ("preference_loss", "unpaired_preference_loss"),
    "losses.policy": ("policy_loss", "policy_loss_of_logits"),
    "losses.distillation": ("distillation_loss",),
    "losses.multi_token": ("multi_token_loss",),
    "losses.offline_distillation": ("offline_distillation_loss",),
    "losses.sequences": ("sequence_loss", "token_loss"),
    "losses.modules": (
        "DistillationLoss", "MultiTokenLoss", "OfflineDistillationLoss", "PolicyLoss", "PreferenceLoss",
        "UnpairedPreferenceLoss",
    ),
    "patching.patch": ("patch", "unpatch"),
    "transformers.modules": (
        "LigerCrossEntropyLoss", "LigerFusedAddRMSNorm", "LigerFusedLinearCrossEntropyLoss", "LigerGEGLUMLP",
        "LigerLayerNorm", "LigerRMSNorm", "LigerSwiGLUMLP", "liger_rotary_pos_emb",
    ),
    "transformers.monkey_patch": ("apply_liger_kernel_to_llama",),
    "transformers.auto_model": ("AutoLigerKernelForCausalLM",),
}  # fmt: skip

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
