"""Define separate forward and backward passes of `liger_kernel.ops`, without an autograd graph.

Losses return their gradients with the loss, and their backward only scales these. In fp16 these gradients are fp32, as
fp16 would lose them before the loss scale arrives in the backward. An autograd function may return them so: autograd
rounds them to the dtype of its inputs. No pass writes in place.
"""

import torch

from liger_hw.chunked_loss.custom_loss import with_gradients
from liger_hw.stand_in import ops
from liger_hw.transformers import functional, rotary_names


def fused_linear_cross_entropy_forward(
    _input, weight, target, ce_weight=None, bias=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, ce_impl=None, ce_mode=None, token_grad_output=None,
    compute_gradients=None, weight_requires_grad=None, chunk_mem_const=1,
):  # fmt: skip
    """Compute the loss of `LigerFusedLinearCrossEntropyFunction` and its gradients.

    Args:
        token_grad_output: with reduction="none" the gradient of each token's loss; default one.
        compute_gradients: whether to compute any gradient; default whether `_input` requires one.
        weight_requires_grad: whether to compute gradients of weight and bias; default whether the weight requires one.
        others: as in `liger_fused_linear_cross_entropy`.

    Returns:
        (loss, z_loss, token_accuracy, predicted_tokens, gradient of the input, of the weight, of the bias), each None
        unless requested.
    """
    grad_input = _input.requires_grad if compute_gradients is None else compute_gradients
    grad_weight = grad_input and (weight.requires_grad if weight_requires_grad is None else weight_requires_grad)
    needed = grad_input, grad_weight, grad_weight
    tensors = [x if x is None else x.detach().requires_grad_(n) for x, n in zip((_input, weight, bias), needed)]

    def loss_of(x, weight, bias):
        return ops.LigerFusedLinearCrossEntropyFunction.apply(
            x, weight, target, bias, ce_weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap,
            return_z_loss, accum_dtype, use_token_scaling, return_token_accuracy, return_predicted_tokens,
            chunk_mem_const=chunk_mem_const,
        )  # fmt: skip

    outputs, gradients = with_gradients(loss_of, tensors, grad_output=token_grad_output)
    return *outputs, *gradients


def fused_linear_cross_entropy_backward(grad_output, grad_input, grad_weight, grad_bias):
    """Scale the gradients of `fused_linear_cross_entropy_forward` by the loss's gradient, a scalar."""
    return _scaled(grad_output, grad_input, grad_weight, grad_bias)


def cross_entropy_forward(
    _input, target, weight, ignore_index, lse_square_scale, label_smoothing, reduction, softcap, return_z_loss,
    return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    """Compute the loss of `LigerCrossEntropyFunction` and the gradient of the logits.

    Returns:
        (loss, z_loss, token_accuracy, predicted_tokens, gradient (N, V), or `_input` where it requires none).
    """
    (loss, z_loss, *others), (gradient,) = with_gradients(
        ops.LigerCrossEntropyFunction.apply, (_input,), target, weight, ignore_index, lse_square_scale,
        label_smoothing, reduction, softcap, return_z_loss, return_token_accuracy, return_predicted_tokens,
    )  # fmt: skip
    loss, z_loss = (t if t is None else t.to(_input.dtype) for t in (loss, z_loss))
    return loss, z_loss, *others, _input if gradient is None else gradient


def cross_entropy_backward(_input, grad_output):
    """Scale the gradient of `cross_entropy_forward` by the loss's, () or per row (N,)."""
    return _input * (grad_output.unsqueeze(1) if grad_output.ndim else grad_output)


def jsd_forward(_input, target, shift_labels, beta, ignore_index, has_label, jsd_impl=None, jsd_mode=None):
    """Return (loss, gradient of `_input`) of `LigerJSDFunction`."""
    tensors, labels = (_input.detach().requires_grad_(), target.detach()), shift_labels if has_label else None
    (loss,), (gradient, _) = with_gradients(functional.liger_jsd, tensors, labels, beta, ignore_index)
    return loss.to(_input.dtype), gradient


def jsd_backward(dX, grad_output):
    """Scale the gradient of `jsd_forward` by the loss's gradient."""
    return dX * grad_output


def fused_linear_jsd_forward(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels, jsd_beta, ignore_index, has_label,
    temperature, jsd_impl=None, jsd_mode=None, accum_dtype=None,
):  # fmt: skip
    """Return (loss, gradients of student input and weight) of `LigerFusedLinearJSDFunction`."""
    tensors = student_input, student_weight, teacher_input.detach(), teacher_weight.detach()
    labels = shift_labels if has_label else None
    (loss,), gradients = with_gradients(
        functional.liger_fused_linear_jsd, tensors, labels, jsd_beta, ignore_index, temperature, accum_dtype
    )
    return loss, *gradients[:2]


def fused_linear_jsd_backward(grad_output, grad_input, grad_weight):
    """Scale the gradients of a forward pass by the loss's gradient."""
    return _scaled(grad_output, grad_input, grad_weight)


def fused_linear_kl_div_forward(
    student_input, student_weight, target, shift_labels, reduction, ignore_index, has_label, temperature, eps,
    accum_dtype=None,
):  # fmt: skip
    """Return (loss, gradients of student input and weight) of `LigerFusedLinearKLDivFunction`."""
    (loss,), gradients = with_gradients(
        functional.liger_fused_linear_kl_div, (student_input, student_weight), target,
        shift_labels if has_label else None, reduction, ignore_index, temperature, eps, accum_dtype,
    )  # fmt: skip
    return loss, *gradients


fused_linear_kl_div_backward = fused_linear_jsd_backward  # it scales the gradients of either forward


def swiglu_forward(a, b, gate_multiplier=1.0):
    """Return (a, b, silu(gate_multiplier * a) * b)."""
    return a, b, ops.LigerSiLUMulFunction.apply(a, b, gate_multiplier)


def swiglu_backward(a, b, dc, gate_multiplier=1.0):
    """Return the gradients of `a` and `b`."""
    return _gradients(lambda a, b: ops.LigerSiLUMulFunction.apply(a, b, gate_multiplier), (a, b), dc)


def swiglu_fused_gate_up_forward(y):
    """Return (y, silu of its first half times the second)."""
    return y, ops.LigerFusedGateUpSiLUMulFunction.apply(y)


def swiglu_fused_gate_up_backward(y, dc, in_place=False):
    """Return the gradient of `y`."""
    (gradient,) = _gradients(ops.LigerFusedGateUpSiLUMulFunction.apply, (y,), dc)
    return gradient


def geglu_forward(a, b):
    """Return (a, b, gelu(a) * b) with the tanh approximation."""
    return a, b, functional.liger_geglu(a, b)


def geglu_backward(a, b, dc):
    """Return the gradients of `a` and `b`."""
    return _gradients(functional.liger_geglu, (a, b), dc)


def relu_squared_forward(X):
    """Return relu(X) squared."""
    return functional.liger_relu_squared(X)


def relu_squared_backward(X, dY):
    """Return the gradient of `X`."""
    (gradient,) = _gradients(functional.liger_relu_squared, (X,), dY)
    return gradient


def rope_forward(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Return (q, k, cos, sin) with q and k rotated."""
    return *functional.liger_rope(q, k, cos, sin, position_ids, unsqueeze_dim, rotary_dim), cos, sin


def rope_backward(dq, dk, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Return the gradients of q and k, rotated by the negative angle."""
    return functional.liger_rope(dq, dk, cos, -sin, position_ids, unsqueeze_dim, rotary_dim)


def qwen2vl_mrope_forward(q, k, cos, sin, mrope_section):
    """Return (q, k, cos, sin) with q and k rotated."""
    return *functional.liger_qwen2vl_mrope(q, k, cos, sin, mrope_section), cos, sin


def qwen2vl_mrope_backward(dq, dk, cos, sin, mrope_section):
    """Return the gradients of q and k, rotated by the negative angle."""
    return functional.liger_qwen2vl_mrope(dq, dk, cos, -sin, mrope_section)


def llama4_rope_forward(q, k, freqs_cis, BLOCK_SIZE=None, imag_sign=1.0):
    """Rotate q and k; with `imag_sign=-1.0` by the negative angle."""
    return rotary_names.liger_llama4_text_rotary_pos_emb(q, k, freqs_cis if imag_sign > 0 else freqs_cis.conj())


def _gradients(function, inputs, grad_output):
    leaves = [x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(function(*leaves), leaves, grad_output)


def _scaled(grad_output, *gradients):
    return tuple(None if g is None else g * grad_output for g in gradients)
