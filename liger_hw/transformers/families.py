"""List the model families with a function in liger_kernel, and each function's parameters.

Programs that call these functions by name need the list; `liger_hw.patch` needs none. This module imports nothing, as
every Python process that `python -m liger_hw.run` starts loads it first.
"""

LOSS_DEFAULTS = {"cross_entropy": False, "fused_linear_cross_entropy": True}
# parameters of a family's function in order, with their defaults
TEXT = {"rope": True, **LOSS_DEFAULTS, "rms_norm": True, "swiglu": True, "model": None}
GEMMA = {"rope": True, **LOSS_DEFAULTS, "rms_norm": True, "geglu": True, "model": None}
GEMMA_VISION = {"rope": True, **LOSS_DEFAULTS, "layer_norm": True, "rms_norm": True, "geglu": True, "model": None}
VISION = {"rope": True, **LOSS_DEFAULTS, "layer_norm": True, "rms_norm": True, "swiglu": True, "model": None}
COMPOSED = {**LOSS_DEFAULTS, "rms_norm": True, "layer_norm": True, "model": None}  # the text model may be of any family
WITHOUT_ROPE = TEXT | {"rope": False}

FAMILIES = {
    **dict.fromkeys(
        (
            "exaone4", "falcon_h1", "hunyuan_v1_dense", "hunyuan_v1_moe", "llama", "ministral", "mistral", "mixtral",
            "olmo2", "olmo3", "phi3", "qwen2", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl_moe", "smollm3",
        ),
        TEXT,
    ),
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4", "glm4v", "glm4v_moe", "qwen3_5", "qwen3_5_moe", "qwen3_next"),
        WITHOUT_ROPE,
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), GEMMA),
    **dict.fromkeys(("gemma3", "paligemma"), GEMMA_VISION),
    **dict.fromkeys(("gpt_oss", "qwen3_vl"), TEXT | {"swiglu": False}),
    **dict.fromkeys(("mllama", "muse_glimmer"), VISION),
    **dict.fromkeys(("internvl", "smolvlm"), COMPOSED),
    "deepseek_v4": WITHOUT_ROPE | {"swiglu": False},
    "gemma4": GEMMA_VISION | {"rope": False, "layer_norm": False},
    "gemma4_text": GEMMA | {"rope": False},
    "granite": TEXT | {"cross_entropy": True, "fused_linear_cross_entropy": False},
    "llama4": TEXT | {"layer_norm": True},
    "llava": LOSS_DEFAULTS | {"model": None},
    "nemotron": {"relu_squared": True, **LOSS_DEFAULTS, "model": None},
    "pixtral": {"rope": True, "rms_norm": True, "swiglu": True, "model": None},
    "qwen2_vl": {"rope": True, **LOSS_DEFAULTS, "rms_norm": True, "layer_norm": True, "swiglu": True, "model": None},
}  # fmt: skip
OPEN = {"internvl", "llava", "nemotron", "smolvlm"}  # their functions also take any other flag of `patch`
MODEL_TYPES = {name: name for name in FAMILIES} | {  # model type -> the family whose function patches it
    "llama4_text": "llama4", "mllama_text_model": "mllama", "qwen2_5_vl_text": "qwen2_5_vl",
    "qwen2_vl_text": "qwen2_vl", "qwen3_5_moe_text": "qwen3_5_moe", "qwen3_5_text": "qwen3_5",
    "qwen3_vl_moe_text": "qwen3_vl_moe", "qwen3_vl_text": "qwen3_vl",
}  # fmt: skip
