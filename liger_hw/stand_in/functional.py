"""The names of `liger_kernel.functional`: the ops with `impl`, `mode` and `backend`, by which programs choose among
the original's implementations. Here one serves each device (`liger_hw.use_backend` forces another), so that they may be
None or name Triton.
"""

import functools
import inspect

from liger_hw.checks import check
from liger_hw.stand_in import ops

CHOICES = ("impl", "mode", "backend")
KEYWORDS_FROM = {"layer_norm": 4, "rms_norm": 3}  # name -> how many parameters may be given by position; all elsewhere


def _rms_norm(x, weight, eps=1e-6, offset=0.0, casting_mode="llama", in_place=False, row_mode=None):
    return ops.LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode)


def _layer_norm(x, weight, bias=None, eps=1e-6):
    return ops.LigerLayerNormFunction.apply(x, weight, bias, eps)


def _jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    return ops.LigerJSDFunction.apply(_input, target, shift_labels, beta, ignore_index)


def _softmax(x):
    return ops.LigerSoftmaxFunction.apply(x)


def _rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return ops.LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim)


def _cross_entropy(
    input, target, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    return ops.LigerCrossEntropyFunction.apply(
        input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def _fused_add_rms_norm(X, R, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=False):
    return ops.LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


def _fused_linear_jsd(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
    temperature=1.0,
):  # fmt: skip
    return ops.LigerFusedLinearJSDFunction.apply(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature
    )


def _fused_linear_cross_entropy(
    _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    return ops.LigerFusedLinearCrossEntropyFunction.apply(
        _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def _choosing(name, function):
    """`function` with the keywords `CHOICES`."""
    own = list(inspect.signature(function).parameters.values())
    count = KEYWORDS_FROM.get(name, len(own))
    own = own[:count] + [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own[count:]]
    more = [inspect.Parameter(choice, inspect.Parameter.KEYWORD_ONLY, default=None) for choice in CHOICES]

    @functools.wraps(function)
    def chosen(*args, **kwargs):
        for choice in CHOICES:
            value = kwargs.pop(choice, None)
            check(value is None or "triton" in str(value), choice, repr(value), "None or triton")
        return function(*args, **kwargs)

    chosen.__name__ = chosen.__qualname__ = name
    chosen.__signature__ = inspect.Signature(own + more)
    return chosen


globals().update(
    (name, _choosing(name, function))
    for name, function in {
        "cross_entropy": _cross_entropy,
        "fused_add_rms_norm": _fused_add_rms_norm,
        "fused_linear_cross_entropy": _fused_linear_cross_entropy,
        "fused_linear_jsd": _fused_linear_jsd,
        "geglu": ops.LigerGELUMulFunction.apply,
        "jsd": _jsd,
        "kl_div": ops.LigerKLDivLossFunction.apply,
        "layer_norm": _layer_norm,
        "rms_norm": _rms_norm,
        "rope": _rope,
        "softmax": _softmax,
        "swiglu": ops.LigerSiLUMulFunction.apply,
    }.items()
)
