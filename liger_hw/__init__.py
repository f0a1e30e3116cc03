"""Fused Triton kernels for training language models on NVIDIA, AMD and Intel GPUs.

The import runs nothing. Each name imports its module at its first use, so a missing GPU, Triton or transformers affects
only the names that need it.
"""

from liger_hw._lazy import lazy_names

__version__ = "0.1.0"

_NAMES = {
    "backends": ("use_backend",),
    "checkpointing.activations": ("activations",),
    "kernels.rms_norm": ("fused_add_rms_norm", "rms_norm"),
    "kernels.gated_rms_norm": ("gated_rms_norm", "modulated_rms_norm"),
    "kernels.group_norm": ("group_norm",),
    "kernels.l2_norm": ("l2_norm",),
    "kernels.layer_norm": ("layer_norm",),
    "kernels.multi_token_attention": ("multi_token_attention",),
    "kernels.neighborhood_attention": ("neighborhood_attention",),
    "kernels.poly_norm": ("poly_norm",),
    "kernels.dyt": ("dyt",),
    "kernels.attention_residual": ("attention_residual",),
    "kernels.causal_conv1d": ("causal_conv1d",),
    "kernels.glu": ("activate", "geglu", "swiglu"),
    "kernels.clamped_glu": ("clamped_swiglu",),
    "kernels.embedding": ("embedding",),
    "kernels.experts": ("experts",),
    "kernels.glu_linear": ("glu_linear",),
    "kernels.grouped_mm": ("grouped_mm",),
    "kernels.int2_matmul": ("int2_matmul", "pack_int2", "unpack_int2"),
    "kernels.hyper_connections": ("mhc_post_res", "mhc_pre"),
    "kernels.mhc_coefficients": ("mhc_coefficients",),
    "kernels.rope": ("rope",),
    "kernels.qk_norm_rope": ("qk_norm_rope",),
    "kernels.routing": ("load_balancing_loss", "router", "router_z_loss"),
    "kernels.cross_entropy": ("CrossEntropyOutput", "cross_entropy"),
    "kernels.cross_entropy_tvd": ("cross_entropy_tvd",),
    "kernels.fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
    "kernels.selective_log_softmax": ("SelectedLogProbs", "selective_log_softmax"),
    "kernels.fused_linear_selective_log_softmax": ("fused_linear_selective_log_softmax",),
    "kernels.softmax": ("softmax", "sparsemax"),
    "kernels.divergence": ("jsd", "kl_div", "tvd"),
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
