# Written by `python -m liger_lab.tools.stubs` from the names of __init__.py.
from liger_hw.backends import use_backend as use_backend
from liger_hw.checkpointing.activations import activations as activations
from liger_hw.kernels.attention.causal_conv1d import causal_conv1d as causal_conv1d
from liger_hw.kernels.attention.multi_token_attention import multi_token_attention as multi_token_attention
from liger_hw.kernels.attention.neighborhood_attention import neighborhood_attention as neighborhood_attention
from liger_hw.kernels.attention.qk_norm_rope import qk_norm_rope as qk_norm_rope
from liger_hw.kernels.attention.rope import rope as rope
from liger_hw.kernels.attention.softmax import softmax as softmax
from liger_hw.kernels.attention.softmax import sparsemax as sparsemax
from liger_hw.kernels.linear.dequantize_4bit import dequantize_4bit as dequantize_4bit
from liger_hw.kernels.linear.lora_linear import lora_glu_linear as lora_glu_linear
from liger_hw.kernels.linear.lora_linear import lora_linear as lora_linear
from liger_hw.kernels.mlp.clamped_glu import clamped_swiglu as clamped_swiglu
from liger_hw.kernels.mlp.glu import activate as activate
from liger_hw.kernels.mlp.glu import geglu as geglu
from liger_hw.kernels.mlp.glu import swiglu as swiglu
from liger_hw.kernels.mlp.glu_linear import glu_linear as glu_linear
from liger_hw.kernels.mlp.int2_matmul import int2_matmul as int2_matmul
from liger_hw.kernels.mlp.int2_matmul import pack_int2 as pack_int2
from liger_hw.kernels.mlp.int2_matmul import unpack_int2 as unpack_int2
from liger_hw.kernels.moe.experts import experts as experts
from liger_hw.kernels.moe.grouped_mm import grouped_mm as grouped_mm
from liger_hw.kernels.moe.routing import load_balancing_loss as load_balancing_loss
from liger_hw.kernels.moe.routing import router as router
from liger_hw.kernels.moe.routing import router_z_loss as router_z_loss
from liger_hw.kernels.norms.dyt import dyt as dyt
from liger_hw.kernels.norms.gated_rms_norm import gated_rms_norm as gated_rms_norm
from liger_hw.kernels.norms.gated_rms_norm import modulated_rms_norm as modulated_rms_norm
from liger_hw.kernels.norms.group_norm import group_norm as group_norm
from liger_hw.kernels.norms.l2_norm import l2_norm as l2_norm
from liger_hw.kernels.norms.layer_norm import layer_norm as layer_norm
from liger_hw.kernels.norms.poly_norm import poly_norm as poly_norm
from liger_hw.kernels.norms.rms_norm import fused_add_rms_norm as fused_add_rms_norm
from liger_hw.kernels.norms.rms_norm import rms_norm as rms_norm
from liger_hw.kernels.residual.attention_residual import attention_residual as attention_residual
from liger_hw.kernels.residual.hyper_connections import mhc_post_res as mhc_post_res
from liger_hw.kernels.residual.hyper_connections import mhc_pre as mhc_pre
from liger_hw.kernels.residual.mhc_coefficients import mhc_coefficients as mhc_coefficients
from liger_hw.kernels.vocabulary.cross_entropy import CrossEntropyOutput as CrossEntropyOutput
from liger_hw.kernels.vocabulary.cross_entropy import cross_entropy as cross_entropy
from liger_hw.kernels.vocabulary.cross_entropy_tvd import cross_entropy_tvd as cross_entropy_tvd
from liger_hw.kernels.vocabulary.divergence import jsd as jsd
from liger_hw.kernels.vocabulary.divergence import kl_div as kl_div
from liger_hw.kernels.vocabulary.divergence import tvd as tvd
from liger_hw.kernels.vocabulary.embedding import embedding as embedding
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy as fused_linear_cross_entropy
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax as fused_linear_selective_log_softmax
from liger_hw.kernels.vocabulary.selective_log_softmax import SelectedLogProbs as SelectedLogProbs
from liger_hw.kernels.vocabulary.selective_log_softmax import selective_log_softmax as selective_log_softmax
from liger_hw.losses.distillation import distillation_loss as distillation_loss
from liger_hw.losses.modules import DistillationLoss as DistillationLoss
from liger_hw.losses.modules import MultiTokenLoss as MultiTokenLoss
from liger_hw.losses.modules import OfflineDistillationLoss as OfflineDistillationLoss
from liger_hw.losses.modules import PolicyLoss as PolicyLoss
from liger_hw.losses.modules import PreferenceLoss as PreferenceLoss
from liger_hw.losses.modules import UnpairedPreferenceLoss as UnpairedPreferenceLoss
from liger_hw.losses.multi_token import multi_token_loss as multi_token_loss
from liger_hw.losses.offline_distillation import offline_distillation_loss as offline_distillation_loss
from liger_hw.losses.policy import policy_loss as policy_loss
from liger_hw.losses.policy import policy_loss_of_logits as policy_loss_of_logits
from liger_hw.losses.preference import preference_loss as preference_loss
from liger_hw.losses.preference import unpaired_preference_loss as unpaired_preference_loss
from liger_hw.losses.sequences import sequence_loss as sequence_loss
from liger_hw.losses.sequences import token_loss as token_loss
from liger_hw.patching.patch import patch as patch
from liger_hw.patching.patch import unpatch as unpatch
from liger_hw.transformers.auto_model import AutoLigerKernelForCausalLM as AutoLigerKernelForCausalLM
from liger_hw.transformers.modules import LigerCrossEntropyLoss as LigerCrossEntropyLoss
from liger_hw.transformers.modules import LigerFusedAddRMSNorm as LigerFusedAddRMSNorm
from liger_hw.transformers.modules import LigerFusedLinearCrossEntropyLoss as LigerFusedLinearCrossEntropyLoss
from liger_hw.transformers.modules import LigerGEGLUMLP as LigerGEGLUMLP
from liger_hw.transformers.modules import LigerLayerNorm as LigerLayerNorm
from liger_hw.transformers.modules import LigerRMSNorm as LigerRMSNorm
from liger_hw.transformers.modules import LigerSwiGLUMLP as LigerSwiGLUMLP
from liger_hw.transformers.modules import liger_rotary_pos_emb as liger_rotary_pos_emb
from typing import Any
__version__: str
def apply_liger_kernel_to_llama(
    rope: bool = ...,
    cross_entropy: bool = ...,
    fused_linear_cross_entropy: bool = ...,
    rms_norm: bool = ...,
    swiglu: bool = ...,
    model: Any = ...,
) -> Any: ...
