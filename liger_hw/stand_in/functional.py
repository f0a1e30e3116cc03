"""Define the names of `liger_kernel.functional`: ops with `impl`, `mode` and `backend`.

These arguments choose an implementation of liger_kernel. This library has one for each device, so each argument must be
None or a name of Triton. `liger_hw.use_backend` forces another backend.
"""

from liger_hw.checks import check
from liger_hw.stand_in import ops


def check_choice(**choices):
    """Raise a ValueError unless every choice of an implementation is None or names Triton."""
    for name, choice in choices.items():
        check(choice is None or "triton" in str(choice), name, repr(choice), "None or triton; see liger_hw.use_backend")


def cross_entropy(
    input, target, weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0, reduction="mean",
    softcap=None, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False, *, impl=None,
    mode=None, backend=None,
):  # fmt: skip
    """Call `ops.LigerCrossEntropyFunction`; return (loss, z_loss, token_accuracy, predicted_tokens)."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerCrossEntropyFunction.apply(
        input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
        return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def fused_add_rms_norm(
    X, R, W, eps=1e-6, offset=0.0, casting_mode="llama", in_place=False, *, impl=None, mode=None, backend=None
):
    """Return (RMSNorm of X + R, X + R)."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerFusedAddRMSNormFunction.apply(X, R, W, eps, offset, casting_mode)


def fused_linear_cross_entropy(
    _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, *, impl=None, mode=None, backend=None,
):  # fmt: skip
    """Call `ops.LigerFusedLinearCrossEntropyFunction`; return (loss, z_loss, token_accuracy, predicted_tokens)."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerFusedLinearCrossEntropyFunction.apply(
        _input, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
        return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip


def fused_linear_jsd(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
    temperature=1.0, *, impl=None, mode=None, backend=None,
):  # fmt: skip
    """Call `ops.LigerFusedLinearJSDFunction`."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerFusedLinearJSDFunction.apply(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, temperature
    )


def geglu(a, b, *, impl=None, mode=None, backend=None):
    """Return gelu(a) * b with the tanh approximation."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerGELUMulFunction.apply(a, b)


def jsd(_input, target, shift_labels=None, beta=0.5, ignore_index=-100, *, impl=None, mode=None, backend=None):
    """Call `ops.LigerJSDFunction`."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerJSDFunction.apply(_input, target, shift_labels, beta, ignore_index)


def kl_div(y_pred, y_true, reduction="batchmean", log_target=False, eps=1e-10, *, impl=None, mode=None, backend=None):
    """Call `ops.LigerKLDivLossFunction`."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerKLDivLossFunction.apply(y_pred, y_true, reduction, log_target, eps)


def layer_norm(x, weight, bias=None, eps=1e-6, *, impl=None, mode=None, backend=None):
    """Call `ops.LigerLayerNormFunction`."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerLayerNormFunction.apply(x, weight, bias, eps)


def rms_norm(
    x, weight, eps=1e-6, *, offset=0.0, casting_mode="llama", in_place=False, row_mode=None, impl=None, mode=None,
    backend=None,
):  # fmt: skip
    """Call `ops.LigerRMSNormFunction`."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerRMSNormFunction.apply(x, weight, eps, offset, casting_mode)


def rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, *, impl=None, mode=None, backend=None):
    """Call `ops.LigerRopeFunction`."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerRopeFunction.apply(q, k, cos, sin, position_ids, unsqueeze_dim)


def softmax(x, *, impl=None, mode=None, backend=None):
    """Compute the softmax over the last dimension."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerSoftmaxFunction.apply(x)


def swiglu(a, b, gate_multiplier=1.0, down_multiplier=1.0, *, impl=None, mode=None, backend=None):
    """Return silu(gate_multiplier * a) * b * down_multiplier."""
    check_choice(impl=impl, mode=mode, backend=backend)
    return ops.LigerSiLUMulFunction.apply(a, b, gate_multiplier, down_multiplier)
