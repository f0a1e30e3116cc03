"""Load the names of `liger_kernel.transformers` on use; most need no transformers."""

from importlib.util import find_spec

from liger_hw._lazy import lazy_names
from liger_hw.transformers.families import FAMILIES

_NAMES = {
    "modules": (
        "LigerCrossEntropyLoss", "LigerDyT", "LigerFusedAddRMSNorm", "LigerFusedLinearCrossEntropyLoss",
        "LigerGEGLUMLP", "LigerLayerNorm", "LigerModulatedRMSNorm", "LigerPolyNorm", "LigerRMSNorm", "LigerSwiGLUMLP",
        "liger_rotary_pos_emb",
    ),
    "family_modules": (
        "LigerBlockSparseTop2MLP", "LigerExperts", "LigerFalconH1MLP", "LigerFalconH1SwiGLUMLP", "LigerMLP",
        "LigerPhi3SwiGLUMLP", "LigerQwen3MoeSwiGLUMLP", "LigerRMSNormForMuseGlimmer",
        "LigerRMSNormForMuseGlimmerTextCentered", "LigerSwiGLUMLPForMuseGlimmer", "LigerTiledGEGLUMLP",
        "LigerTiledSwiGLUMLP",
    ),
    "op_modules": (
        "LigerMHC", "LigerMultiTokenAttention", "LigerReLUSquared", "LigerSoftmax", "LigerSparsemax",
        "LigerVocabParallelCrossEntropy",
    ),
    "rotary_names": ("liger_llama4_text_rotary_pos_emb", "liger_llama4_vision_rotary_pos_emb"),
    "divergences": (
        "LigerFusedCETVDLoss", "LigerFusedLinearJSD", "LigerFusedLinearKLDivLoss", "LigerJSD", "LigerKLDIVLoss",
        "LigerTVDLoss",
    ),
    "functional": ("CrossEntropyOutput",),
    "grpo_loss": ("triton_grpo_loss",),
    "liger_hw.patching.patch": ("patch", "unpatch"),
    "monkey_patch": (
        "MODEL_TYPE_TO_APPLY_LIGER_FN", "_apply_liger_kernel", "_apply_liger_kernel_to_instance",
        *(f"apply_liger_kernel_to_{family}" for family in FAMILIES),
    ),
    "auto_model": ("AutoLigerKernelForCausalLM", "AutoLigerKernelForImageTextToText"),
}  # fmt: skip

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
__all__ += ["is_transformers_available"]


def is_transformers_available():
    """Tell whether the package transformers is installed."""
    return find_spec("transformers") is not None
