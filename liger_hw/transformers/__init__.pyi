# Written by `python -m liger_lab.tools.stubs` from the names of __init__.py.
from liger_hw.patching.patch import patch as patch
from liger_hw.patching.patch import unpatch as unpatch
from liger_hw.transformers.auto_model import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
from liger_hw.transformers.auto_model import AutoLigerKernelForImageTextToText as AutoLigerKernelForImageTextToText
from liger_hw.transformers.divergences import LigerFusedCETVDLoss as LigerFusedCETVDLoss
from liger_hw.transformers.divergences import LigerFusedLinearJSD as LigerFusedLinearJSD
from liger_hw.transformers.divergences import LigerFusedLinearKLDivLoss as LigerFusedLinearKLDivLoss
from liger_hw.transformers.divergences import LigerJSD as LigerJSD
from liger_hw.transformers.divergences import LigerKLDIVLoss as LigerKLDIVLoss
from liger_hw.transformers.divergences import LigerTVDLoss as LigerTVDLoss
from liger_hw.transformers.family_modules import LigerBlockSparseTop2MLP as LigerBlockSparseTop2MLP
from liger_hw.transformers.family_modules import LigerExperts as LigerExperts
from liger_hw.transformers.family_modules import LigerFalconH1MLP as LigerFalconH1MLP
from liger_hw.transformers.family_modules import LigerFalconH1SwiGLUMLP as LigerFalconH1SwiGLUMLP
from liger_hw.transformers.family_modules import LigerMLP as LigerMLP
from liger_hw.transformers.family_modules import LigerPhi3SwiGLUMLP as LigerPhi3SwiGLUMLP
from liger_hw.transformers.family_modules import LigerQwen3MoeSwiGLUMLP as LigerQwen3MoeSwiGLUMLP
from liger_hw.transformers.family_modules import LigerRMSNormForMuseGlimmer as LigerRMSNormForMuseGlimmer
from liger_hw.transformers.family_modules import LigerRMSNormForMuseGlimmerTextCentered as LigerRMSNormForMuseGlimmerTextCentered
from liger_hw.transformers.family_modules import LigerSwiGLUMLPForMuseGlimmer as LigerSwiGLUMLPForMuseGlimmer
from liger_hw.transformers.family_modules import LigerTiledGEGLUMLP as LigerTiledGEGLUMLP
from liger_hw.transformers.family_modules import LigerTiledSwiGLUMLP as LigerTiledSwiGLUMLP
from liger_hw.transformers.functional import CrossEntropyOutput as CrossEntropyOutput
from liger_hw.transformers.grpo_loss import triton_grpo_loss as triton_grpo_loss
from liger_hw.transformers.modules import LigerCrossEntropyLoss as LigerCrossEntropyLoss
from liger_hw.transformers.modules import LigerDyT as LigerDyT
from liger_hw.transformers.modules import LigerFusedAddRMSNorm as LigerFusedAddRMSNorm
from liger_hw.transformers.modules import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
from liger_hw.transformers.modules import LigerGEGLUMLP as LigerGEGLUMLP
from liger_hw.transformers.modules import LigerLayerNorm as LigerLayerNorm
from liger_hw.transformers.modules import LigerModulatedRMSNorm as LigerModulatedRMSNorm
from liger_hw.transformers.modules import LigerPolyNorm as LigerPolyNorm
from liger_hw.transformers.modules import LigerRMSNorm as LigerRMSNorm
from liger_hw.transformers.modules import LigerSwiGLUMLP as LigerSwiGLUMLP
from liger_hw.transformers.modules import liger_rotary_pos_emb as liger_rotary_pos_emb
from liger_hw.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as MODEL_TYPE_TO_APPLY_LIGER_FN
from liger_hw.transformers.monkey_patch import _apply_liger_kernel as _apply_liger_kernel
from liger_hw.transformers.monkey_patch import _apply_liger_kernel_to_instance as _apply_liger_kernel_to_instance
from liger_hw.transformers.op_modules import LigerMHC as LigerMHC
from liger_hw.transformers.op_modules import LigerMultiTokenAttention as LigerMultiTokenAttention
from liger_hw.transformers.op_modules import LigerReLUSquared as LigerReLUSquared
from liger_hw.transformers.op_modules import LigerSoftmax as LigerSoftmax
from liger_hw.transformers.op_modules import LigerSparsemax as LigerSparsemax
from liger_hw.transformers.op_modules import LigerVocabParallelCrossEntropy as LigerVocabParallelCrossEntropy
from liger_hw.transformers.rotary_names import liger_llama4_text_rotary_pos_emb as liger_llama4_text_rotary_pos_emb
from liger_hw.transformers.rotary_names import liger_llama4_vision_rotary_pos_emb as liger_llama4_vision_rotary_pos_emb
from typing import Any
def apply_liger_kernel_to_exaone4(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_falcon_h1(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_hunyuan_v1_dense(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_hunyuan_v1_moe(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_llama(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_ministral(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_mistral(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_mixtral(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_olmo2(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_olmo3(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_phi3(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen2(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen2_5_vl(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen3(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen3_moe(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen3_vl_moe(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_smollm3(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_deepseek_v2(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_deepseek_v3(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_glm4(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_glm4v(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_glm4v_moe(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen3_5(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen3_5_moe(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen3_next(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_gemma(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    geglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_gemma2(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    geglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_gemma3_text(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    geglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_gemma3(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    layer_norm: bool = ...,
    rms_norm: bool = ...,
    geglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_paligemma(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    layer_norm: bool = ...,
    rms_norm: bool = ...,
    geglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_gpt_oss(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen3_vl(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_mllama(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    layer_norm: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_muse_glimmer(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    layer_norm: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_internvl(
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    layer_norm: bool = ...,
    model: Any = ...,
    **kwargs: Any,
) -> Any: ...
def apply_liger_kernel_to_smolvlm(
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    layer_norm: bool = ...,
    model: Any = ...,
    **kwargs: Any,
) -> Any: ...
def apply_liger_kernel_to_deepseek_v4(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_gemma4(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    layer_norm: bool = ...,
    rms_norm: bool = ...,
    geglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_gemma4_text(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    geglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_granite(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_llama4(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
    layer_norm: bool = ...,
) -> Any: ...
def apply_liger_kernel_to_llava(
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    model: Any = ...,
    **kwargs: Any,
) -> Any: ...
def apply_liger_kernel_to_nemotron(
    relu_squared: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    model: Any = ...,
    **kwargs: Any,
) -> Any: ...
def apply_liger_kernel_to_pixtral(
    rope: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def apply_liger_kernel_to_qwen2_vl(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    layer_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
def is_transformers_available() -> bool: ...
