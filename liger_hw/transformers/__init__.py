"""The names of `liger_kernel.transformers`, loaded when they are used. Most work without transformers installed."""

from liger_hw._lazy import lazy_names
from liger_hw.transformers.families import FAMILIES

_NAMES = {
    "modules": (
        "LigerCrossEntropyLoss", "LigerFusedAddRMSNorm", "LigerFusedLinearCrossEntropyLoss", "LigerGEGLUMLP",
        "LigerLayerNorm", "LigerRMSNorm", "LigerSwiGLUMLP", "liger_rotary_pos_emb",
    ),
    "divergences": ("LigerFusedLinearJSD", "LigerJSD", "LigerKLDIVLoss", "LigerTVDLoss"),
    "functional": ("CrossEntropyOutput",),
    "grpo_loss": ("triton_grpo_loss",),
    "patching": ("patch", "unpatch"),
    "monkey_patch": (
        "MODEL_TYPE_TO_APPLY_LIGER_FN", "_apply_liger_kernel", "_apply_liger_kernel_to_instance",
        *(f"apply_liger_kernel_to_{family}" for family in FAMILIES),
    ),
    "auto_model": ("AutoLigerKernelForCausalLM", "AutoLigerKernelForImageTextToText"),
}  # fmt: skip

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
