"""Map liger_kernel's modules to ours, and names that we lack to replacements.

Programs also import names from a module of liger_kernel that only imports them, so the lists below contain the modules
of such names.
"""

from liger_hw.transformers.families import FAMILIES

STAND_IN_MODULES = ("stand_in.ops", "stand_in.passes", "stand_in.ops_utils", "stand_in.utils")
BASES = tuple(
    f"chunked_loss.fused_linear_{kind}" for kind in ("distillation", "ppo", "preference", "unpaired_preference")
)
LOSS_MODULES = ("chunked_loss", "stand_in.loss_functions", *BASES)
TRANSFORMERS_MODULES = (
    "transformers.modules", "transformers.family_modules", "transformers.divergences", "transformers.rotary_names",
    "transformers.op_modules", "stand_in.ops", "transformers.functional",
)  # fmt: skip
FAMILY_MODULES = ("transformers.loss_utils", "patching.output_classes", "stand_in.fsdp", "stand_in.utils")

OP_MODULES = (  # below both ops and transformers
    "cross_entropy", "dyt", "fused_add_rms_norm", "fused_ce_tvd", "fused_linear_cross_entropy", "fused_linear_jsd",
    "fused_linear_kl_div", "fused_neighborhood_attention", "geglu", "group_norm", "jsd", "kl_div", "layer_norm",
    "llama4_rope", "mhc", "mlp", "modulated_rms_norm", "multi_token_attention", "poly_norm", "qwen2vl_mrope",
    "relu_squared", "rms_norm", "rope", "softmax", "sparsemax", "swiglu", "tiled_mlp", "tvd",
    "vocab_parallel_cross_entropy",
)  # fmt: skip

FAMILY_FORWARDS = tuple(f"transformers.model.{family}" for family in (*FAMILIES, "hunyuan_v1"))

MODULES = {  # module of liger_kernel -> modules of this library with its names, in search order
    **dict.fromkeys(
        ("", "backends", "backends.dispatch", "ops.backends", "ops.backends.registry"), ("stand_in.backends",)
    ),
    **dict.fromkeys(("backends.capability", "backends.registry", "ops.experimental", "transformers.model"), ()),
    "chunked_loss": ("chunked_loss",),
    "chunked_loss.functional": ("chunked_loss.functional", "stand_in.loss_functions"),
    **{
        f"chunked_loss.{name}_loss": LOSS_MODULES
        for name in ("cosine_similarity", "cpo", "dpo", "jsd", "kto", "orpo", "simpo")
    },
    "chunked_loss.grpo_loss": ("chunked_loss.grpo_loss", "stand_in.loss_functions", *BASES),
    **{base: (base,) for base in BASES},
    "env_report": ("stand_in.env_report",),
    "functional": ("stand_in.functional", "stand_in.backends"),
    **{
        f"megatron{module}": ("stand_in.megatron",)
        for module in ("", ".cross_entropy", ".monkey_patch", ".rms_norm", ".swiglu")
    },
    **dict.fromkeys(("ops", "ops.experimental.embedding", "ops.fused_linear_scaled_cross_entropy"), STAND_IN_MODULES),
    **{f"ops.{name}": STAND_IN_MODULES for name in (*OP_MODULES, "attn_res", "fused_moe", "grpo_loss")},
    "ops.configure": ("stand_in.configure",),
    "ops.experimental.mm_int8int2": ("stand_in.mm_int8int2",),
    "ops.utils": ("stand_in.ops_utils",),
    "transformers": ("transformers",),
    **{f"transformers.{name}": TRANSFORMERS_MODULES for name in OP_MODULES},
    "transformers.auto_model": ("transformers.auto_model", "transformers.monkey_patch"),
    "transformers.experimental": ("transformers.op_modules",),
    "transformers.experimental.embedding": ("transformers.op_modules", "stand_in.ops"),
    "transformers.fsdp": ("stand_in.fsdp",),
    "transformers.functional": ("transformers.functional", "stand_in.ops"),
    "transformers.grpo_loss": (
        "transformers.grpo_loss", "chunked_loss.fused_linear_ppo", "chunked_loss.grpo_loss", "stand_in.ops"
    ),
    **dict.fromkeys(FAMILY_FORWARDS, FAMILY_MODULES),
    "transformers.model.loss_utils": ("transformers.loss_utils",),
    "transformers.model.output_classes": ("patching.output_classes",),
    "transformers.monkey_patch": ("transformers.monkey_patch", "stand_in.utils", *TRANSFORMERS_MODULES),
    "transformers.trainer": ("stand_in.orpo_trainer",),
    "transformers.trainer.orpo_trainer": ("stand_in.fsdp", "stand_in.orpo_trainer"),
    "transformers.trainer_integration": ("transformers.monkey_patch",),
    **dict.fromkeys(("triton", "triton.monkey_patch"), ("stand_in.triton_cache",)),
    "utils": ("stand_in.utils",),
}  # fmt: skip

PATCH = "use liger_hw.patch(model), which computes the loss of any model without its logits"
PATCH_PART = "use liger_hw.patch(module), which replaces it by {}"
REGISTER = "an op of liger_hw takes another implementation by its own register, as in liger_hw.rms_norm.register"
UNSHARDED = "use liger_fused_linear_scaled_cross_entropy, whose weight is not sharded"
APPLY_ADVICE = "use {}.apply of the same module, which torch differentiates"
KERNEL = "it is a kernel of liger_kernel's; use an autograd function of the same module, or the op of liger_hw"
BLOCK = "it is the widest block of liger_kernel's kernels; liger_kernel.ops.utils.calculate_settings chooses a launch"
TUNES = "it tunes kernels of liger_kernel's; liger_hw.backends describes a device"
PASSES = {  # op whose separate passes this library lacks -> its function
    "attn_res": "LigerAttnResFunction", "fused_add_rms_norm": "LigerFusedAddRMSNormFunction",
    "fused_ce_tvd": "LigerFusedCETVDFunction", "group_norm": "LigerGroupNormFunction",
    "layer_norm": "LigerLayerNormFunction", "modulated_rms_norm": "LigerModulatedRMSNormFunction",
    "poly_norm": "LigerPolyNormFunction", "rms_norm": "LigerRMSNormFunction",
}  # fmt: skip
LAUNCHES = {  # (module of ops, its function) -> kernel launches that this library lacks
    ("dyt", "LigerDyTFunction"): ("liger_dyt_bwd", "liger_dyt_fwd"),
    ("fused_moe", "LigerFusedMoEFunction"): ("compute_routing_metadata",),
    ("fused_neighborhood_attention", "LigerFusedNeighborhoodAttentionFunction"): (
        "fused_neighborhood_attention_forward",
    ),
    ("fused_ce_tvd", "LigerFusedCETVDFunction"): ("get_num_warps",),
    ("fused_linear_kl_div", "LigerFusedLinearKLDivFunction"): ("get_num_warps",),
    ("kl_div", "LigerKLDivLossFunction"): ("get_num_warps", "kldiv_backward_triton", "kldiv_forward_triton"),
    ("mhc", "LigerMHCCoeffsFunction"): (
        "mhc_mm_norm_bwd", "mhc_mm_norm_fwd", "mhc_post_res_bwd", "mhc_post_res_fwd", "mhc_pre_bwd", "mhc_pre_fwd",
        "mhc_sinkhorn_bwd", "mhc_split_sinkhorn_fwd",
    ),
    ("mlp", "LigerMLPFunction"): ("gemm_swiglu", "get_bucket_m", "swiglu_backward_dGU", "swiglu_backward_dI"),
    ("tvd", "LigerTVDLossFunction"): ("get_num_warps", "tv_distance_forward_triton", "tvd_backward_triton"),
}  # fmt: skip

LACKING = [  # (modules of liger_kernel, names in them that this library lacks, replacement to use)
    *(
        (("ops", f"ops.{op}"), (f"{op}_forward", f"{op}_backward"), APPLY_ADVICE.format(function))
        for op, function in PASSES.items()
    ),
    *(((f"ops.{module}",), names, APPLY_ADVICE.format(function)) for (module, function), names in LAUNCHES.items()),
    (
        FAMILY_FORWARDS,
        ("causal_forward", "lce_forward", "lce_forward_conditional_generation", "lce_forward_for_multimodal",
         "lce_maybe_trainable_lm_head", "multimodal_forward"),
        PATCH,
    ),
    (
        ("backends", "backends.capability", "backends.dispatch", "backends.registry", "ops.backends",
         "ops.backends.registry", "ops"),
        ("Capability", "ImplInfo", "OpImpl", "all_registered_ops", "declare_op_locations", "emit_fallback_warning",
         "get_discovery_failures", "get_registered", "list_registered", "register_impl", "register_op",
         "resolve_backend", "resolve_impl", "select_impl"),
        REGISTER,
    ),
    (
        ("ops", "ops.fused_linear_scaled_cross_entropy", "transformers.functional"),
        ("LigerFusedLinearScaledCrossEntropyTPFunction",), UNSHARDED,
    ),
    (("transformers.functional",), ("liger_fused_linear_scaled_cross_entropy_tp",), UNSHARDED),
    *(
        (("transformers.monkey_patch",), (f"_patch_{flag}_module",), PATCH_PART.format(flag))
        for flag in ("geglu", "layer_norm", "rms_norm", "swiglu")
    ),
    (
        ("transformers.monkey_patch",), ("_bind_method_to_module",),
        "use types.MethodType, or liger_hw.patch(module)",
    ),
    (("transformers.monkey_patch",), tuple(f"{family}_lce_forward" for family in FAMILIES), PATCH),
    (tuple(f"ops.{module}" for module in (*OP_MODULES, "utils")), ("MAX_FUSED_SIZE",), BLOCK),
    (("ops.fused_moe",), ("BLOCK_M_TOKEN",), BLOCK),
    (("ops.swiglu",), ("silu",), KERNEL),
    (("ops.experimental.mm_int8int2",), ("get_autotune_config",), "liger-hw tune int2_matmul measures launches"),
    (
        ("ops.vocab_parallel_cross_entropy",), ("validate_formula_and_mode",),
        "LigerVocabParallelCEFunction.apply checks both",
    ),
    (("triton.monkey_patch",), ("LigerTritonFileCacheManager",), "use Triton's own cache manager"),
    (("ops.utils",), ("get_npu_core_count", "set_large_grf_mode"), TUNES),
]  # fmt: skip
REPLACEMENTS = {  # (module of liger_kernel, name) -> replacement
    (module, name): advice for modules, names, advice in LACKING for module in modules for name in names
}
