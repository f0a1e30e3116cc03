"""The ops under the names, argument orders and defaults of `liger_kernel.transformers.functional`.

`in_place` of the norms is accepted and has no effect: no functional op here writes over its caller's tensors.
"""

import torch
from torch.nn._reduction import legacy_get_string

from liger_hw.dispatch import check
from liger_hw.kernels.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_hw.kernels.divergence import jsd, kl_div, tvd
from liger_hw.kernels.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.kernels.glu import geglu, swiglu
from liger_hw.kernels.layer_norm import layer_norm
from liger_hw.kernels.rms_norm import fused_add_rms_norm, rms_norm
from liger_hw.kernels.rope import rope
from liger_hw.losses.distillation import distillation_loss

__all__ = [
    "CrossEntropyOutput",
    "liger_cross_entropy",
    "liger_fused_add_rms_norm",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_jsd",
    "liger_geglu",
    "liger_jsd",
    "liger_kl_div",
    "liger_layer_norm",
    "liger_rms_norm",
    "liger_rope",
    "liger_swiglu",
    "liger_tvd",
]


def liger_cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, return_token_accuracy=False,
    return_predicted_tokens=False,
):  # fmt: skip
    """Cross entropy of logits `input` (N, V), in the argument order of `torch.nn.functional.cross_entropy`.

    Args:
        size_average, reduce: torch's deprecated forms of `reduction`, which they override as they do there.
        others: as in `liger_hw.cross_entropy`.

    Returns:
        the loss in fp32, or a `CrossEntropyOutput` where a `return_*` is True.
    """
    if size_average is not None or reduce is not None:
        reduction = legacy_get_string(size_average, reduce)
    return cross_entropy(
        input, target, weight, ignore_index, label_smoothing, lse_square_scale, softcap, reduction=reduction,
        return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )  # fmt: skip


def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    """Cross entropy of `input @ weight.T + bias` without those logits: input (N, H), weight (V, H), target (N,).

    The arguments mean what they mean in `liger_hw.fused_linear_cross_entropy`. Returns as `liger_cross_entropy`.
    """
    return fused_linear_cross_entropy(
        input, weight, target, bias, ce_weight, ignore_index, label_smoothing, lse_square_scale, softcap,
        reduction=reduction, accum_dtype=accum_dtype, use_token_scaling=use_token_scaling, return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
    )  # fmt: skip


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    """`liger_hw.rms_norm` of X (..., C) with weight W (C,) or None."""
    return rms_norm(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    """`liger_hw.fused_add_rms_norm`: (the norm of X + R, X + R)."""
    return fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def liger_layer_norm(X, W, B, eps):
    """`liger_hw.layer_norm` of X (..., C) with weight W and bias B, both (C,) or None."""
    return layer_norm(X, W, B, eps)


def liger_swiglu(a, b):
    """silu(a) * b."""
    return swiglu(a, b)


def liger_geglu(a, b):
    """gelu(a) * b with the tanh approximation."""
    return geglu(a, b)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """`liger_hw.rope`. `position_ids` is accepted as Hugging Face once had it and has no effect: cos and sin are
    already those of the positions. The inputs are not written to."""
    return rope(q, k, cos, sin, unsqueeze_dim)


def liger_jsd(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    """`liger_hw.jsd` of log-probabilities (N, V), `input` the student's and `target` the teacher's."""
    return jsd(input, target, beta, shift_labels, ignore_index)


def liger_kl_div(input, target, size_average=True, reduce=True, reduction="mean", log_target=False, eps=1e-10):
    """`liger_hw.kl_div` of log-probabilities `input` (N, V) and `target`. `size_average` and `reduce` are accepted and
    have no effect."""
    return kl_div(input, target, reduction, log_target, eps)


def liger_tvd(input, target, shift_labels=None, reduction="mean", ignore_index=-100):
    """`liger_hw.tvd` of probabilities (N, V), `input` the student's and `target` the teacher's."""
    return tvd(input, target, reduction, shift_labels, ignore_index)


def liger_fused_linear_jsd(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
    temperature=1.0, accum_dtype=None,
):  # fmt: skip
    """JSD of two output layers' distributions without their logits, mean over the rows that count: see
    `LigerFusedLinearJSD`."""
    check(accum_dtype in (None, torch.float32), "accum_dtype", accum_dtype, "None or torch.float32")
    return distillation_loss(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, beta=jsd_beta,
        temperature=temperature, hard_weight=0.0, soft_weight=1.0, ignore_index=ignore_index,
    ).loss  # fmt: skip
