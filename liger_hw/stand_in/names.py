"""Modules of liger_kernel -> the modules of this library whose names they have."""

_MODULES = "transformers.modules", "transformers.family_modules"
_OPS = ("stand_in.ops",)

MODULES = {
    "": (),
    "chunked_loss": ("chunked_loss",),
    "chunked_loss.functional": ("chunked_loss.functional",),
    **dict.fromkeys(
        (
            "chunked_loss.cosine_similarity_loss", "chunked_loss.cpo_loss", "chunked_loss.dpo_loss",
            "chunked_loss.jsd_loss", "chunked_loss.kto_loss", "chunked_loss.orpo_loss", "chunked_loss.simpo_loss",
        ),
        ("chunked_loss", "stand_in.ops"),
    ),
    **{
        f"chunked_loss.fused_linear_{name}": (f"chunked_loss.fused_linear_{name}",)
        for name in ("distillation", "ppo", "preference", "unpaired_preference")
    },
    "chunked_loss.grpo_loss": ("chunked_loss.grpo_loss", "stand_in.ops"),
    "env_report": ("stand_in.env_report",),
    "functional": ("stand_in.functional",),
    "ops": _OPS,
    "ops.backends": (),
    "ops.backends.registry": _OPS,
    "ops.utils": ("stand_in.ops_utils",),
    **{
        f"ops.{name}": _OPS
        for name in (
            "attn_res", "cross_entropy", "dyt", "fused_add_rms_norm", "fused_ce_tvd", "fused_linear_cross_entropy",
            "fused_linear_jsd", "fused_linear_kl_div", "fused_linear_scaled_cross_entropy", "fused_moe",
            "fused_neighborhood_attention", "geglu", "group_norm", "grpo_loss", "jsd", "kl_div", "layer_norm",
            "llama4_rope", "mhc", "mlp", "modulated_rms_norm", "multi_token_attention", "poly_norm", "qwen2vl_mrope",
            "relu_squared", "rms_norm", "rope", "softmax", "sparsemax", "swiglu", "tiled_mlp", "tvd",
            "vocab_parallel_cross_entropy",
        )
    },
    "transformers": ("transformers",),
    "transformers.auto_model": ("transformers.auto_model",),
    "transformers.experimental": ("transformers.modules_without_kernels",),
    "transformers.experimental.embedding": ("transformers.modules_without_kernels",),
    "transformers.fsdp": ("stand_in.fsdp",),
    "transformers.functional": ("transformers.functional",),
    "transformers.grpo_loss": ("transformers.grpo_loss",),
    "transformers.model": (),
    "transformers.model.loss_utils": ("transformers.loss_utils",),
    "transformers.model.output_classes": ("patching.output_classes",),
    "transformers.monkey_patch": ("transformers.monkey_patch",),
    "transformers.trainer": ("stand_in.orpo_trainer",),
    "transformers.trainer.orpo_trainer": ("stand_in.fsdp", "stand_in.orpo_trainer"),
    "transformers.trainer_integration": ("transformers.monkey_patch",),
    **{
        f"transformers.{name}": _MODULES
        for name in ("cross_entropy", "fused_add_rms_norm", "fused_linear_cross_entropy", "geglu", "layer_norm", "mlp",
                     "rms_norm", "swiglu", "tiled_mlp")
    },
    **{
        f"transformers.{name}": ("transformers.divergences",)
        for name in ("fused_ce_tvd", "fused_linear_jsd", "fused_linear_kl_div", "jsd", "kl_div", "tvd")
    },
    **{
        f"transformers.{name}": ("transformers.rotary_names",)
        for name in ("llama4_rope", "qwen2vl_mrope", "rope")
    },
    **{
        f"transformers.{name}": ("transformers.modules_without_kernels",)
        for name in ("dyt", "fused_neighborhood_attention", "group_norm", "mhc", "modulated_rms_norm",
                     "multi_token_attention", "poly_norm", "relu_squared", "softmax", "sparsemax",
                     "vocab_parallel_cross_entropy")
    },
    "utils": ("stand_in.utils",),
}  # fmt: skip
