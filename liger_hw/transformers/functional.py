"""Define the ops with the names, argument orders and defaults of `liger_kernel.transformers.functional`.

`in_place` of the norms has no effect: no function here writes over its caller's tensors.
"""

import torch

from liger_hw._torch import legacy_reduction
from liger_hw.checks import check, names_arguments
from liger_hw.kernels.attention.multi_token_attention import multi_token_attention
from liger_hw.kernels.attention.neighborhood_attention import neighborhood_attention
from liger_hw.kernels.attention.rope import rope
from liger_hw.kernels.attention.softmax import softmax, sparsemax
from liger_hw.kernels.mlp.glu import activate, geglu, swiglu
from liger_hw.kernels.norms.dyt import dyt
from liger_hw.kernels.norms.gated_rms_norm import modulated_rms_norm
from liger_hw.kernels.norms.group_norm import group_norm
from liger_hw.kernels.norms.layer_norm import layer_norm
from liger_hw.kernels.norms.poly_norm import poly_norm
from liger_hw.kernels.norms.rms_norm import fused_add_rms_norm, rms_norm
from liger_hw.kernels.residual.attention_residual import attention_residual
from liger_hw.kernels.residual.hyper_connections import mhc_post_res, mhc_pre
from liger_hw.kernels.residual.mhc_coefficients import mhc_coefficients
from liger_hw.kernels.vocabulary.chunked_head import prepare_head, wide_dtype
from liger_hw.kernels.vocabulary.cross_entropy import (
    CrossEntropyOutput as CrossEntropyOutput,  # programs import it from here
)
from liger_hw.kernels.vocabulary.cross_entropy import cross_entropy
from liger_hw.kernels.vocabulary.divergence import jsd, kl_div, tvd
from liger_hw.kernels.vocabulary.divergence.probabilities import Form
from liger_hw.kernels.vocabulary.fused_linear_cross_entropy import fused_linear_cross_entropy
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax
from liger_hw.losses.arguments import check_numbers, flatten_rows, prepare_labels
from liger_hw.losses.distillation import distillation_loss
from liger_hw.losses.engine import CHUNK_MEMORY, Head
from liger_hw.losses.offline_distillation import kl_to_probabilities
from liger_hw.spelling import check_known

STUDENT = "student_input", "student_weight", "bias"  # liger_kernel's names


def liger_cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
    label_smoothing=0.0, lse_square_scale=0.0, softcap=None, return_z_loss=False, return_token_accuracy=False,
    return_predicted_tokens=False,
):  # fmt: skip
    """Compute cross entropy of logits `input` (N, V), in the argument order of `torch.nn.functional.cross_entropy`.

    Args:
        size_average, reduce: torch's deprecated forms of `reduction`, which they override as in torch.
        others: as in `liger_hw.cross_entropy`.

    Returns:
        the loss in the dtype of `input`, as torch returns it, rounded once; or a `CrossEntropyOutput` where a
        `return_*` is True, loss and z_loss in that dtype.
    """
    if size_average is not None or reduce is not None:
        reduction = legacy_reduction(size_average, reduce)
    output = cross_entropy(
        input, target, weight, ignore_index, label_smoothing, lse_square_scale, softcap, reduction=reduction,
        return_z_loss=return_z_loss, return_token_accuracy=return_token_accuracy,
        return_predicted_tokens=return_predicted_tokens,
    )  # fmt: skip
    if torch.is_tensor(output):
        return output.to(input.dtype)
    z_loss = None if output.z_loss is None else output.z_loss.to(input.dtype)
    return output._replace(loss=output.loss.to(input.dtype), z_loss=z_loss)


@names_arguments
def liger_fused_linear_cross_entropy(
    input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
    reduction="mean", softcap=None, return_z_loss=False, accum_dtype=None, use_token_scaling=False,
    return_token_accuracy=False, return_predicted_tokens=False, chunk_mem_const=1,
):  # fmt: skip
    """Compute cross entropy from input (N, H), weight (V, H), target (N,), without logits.

    Args:
        chunk_mem_const: the memory of a chunk of logits, in units of 512 MiB.
        others: as in `liger_hw.fused_linear_cross_entropy`.

    Returns:
        the loss in fp32, or a `CrossEntropyOutput` where a `return_*` is True.
    """
    check_numbers("a positive number", above=0, chunk_mem_const=chunk_mem_const)
    return fused_linear_cross_entropy(
        input, weight, target, bias, ce_weight, ignore_index, label_smoothing, lse_square_scale, softcap,
        reduction=reduction, accum_dtype=accum_dtype, use_token_scaling=use_token_scaling, return_z_loss=return_z_loss,
        return_token_accuracy=return_token_accuracy, return_predicted_tokens=return_predicted_tokens,
        chunk_memory=int(chunk_mem_const * CHUNK_MEMORY),
    )  # fmt: skip


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    """Apply `liger_hw.rms_norm` to X (..., C) with weight W (C,) or None."""
    return rms_norm(X, W, eps, offset, casting_mode)


def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    """Return (RMSNorm of X + R, X + R) by `liger_hw.fused_add_rms_norm`."""
    return fused_add_rms_norm(X, R, W, eps, offset, casting_mode)


def liger_layer_norm(X, W, B, eps):
    """Apply `liger_hw.layer_norm` to X (..., C), weight W and bias B (C,) or None."""
    return layer_norm(X, W, B, eps)


def liger_swiglu(a, b):
    """Return silu(a) * b."""
    return swiglu(a, b)


def liger_geglu(a, b):
    """Return gelu(a) * b with the tanh approximation."""
    return geglu(a, b)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    """Rotate q and k by `liger_hw.rope`, without writing to them.

    Args:
        q, k: (B, heads, T, D), or with `unsqueeze_dim=2` (B, T, heads, D).
        cos, sin: (1|B, T, rotary_dim), or (T, rotary_dim) for every sequence.
        position_ids: no effect, as the tables already belong to the positions.
        rotary_dim: number of leading head entries to rotate; default the width of cos. Tables of half this width (as
            in gpt_oss) have one value for each pair.

    Raises:
        ValueError: `rotary_dim` is not the width of the tables or twice it.

    Examples:
        >>> q, k, angles = torch.rand(1, 4, 5, 8), torch.rand(1, 2, 5, 8), torch.rand(1, 5, 8)
        >>> q, k = liger_hw.liger_rotary_pos_emb(q, k, angles.cos(), angles.sin())
    """
    if cos.ndim == 2:
        cos, sin = cos.unsqueeze(0), sin.unsqueeze(0)
    shared = rotary_dim is not None and 2 * cos.shape[-1] == rotary_dim
    fits = shared or rotary_dim in (None, cos.shape[-1])
    check(fits, "rotary_dim", rotary_dim, f"the width of cos ({cos.shape[-1]}) or twice it")
    return rope(q, k, cos, sin, unsqueeze_dim, shared=shared)


def liger_jsd(input, target, shift_labels=None, beta=0.5, ignore_index=-100):
    """Apply `liger_hw.jsd` to log-probabilities (N, V), student `input` and teacher `target`, in input's dtype."""
    return jsd(input, target, beta, shift_labels, ignore_index).to(input.dtype)


def liger_kl_div(input, target, size_average=True, reduce=True, reduction="mean", log_target=False, eps=1e-10):
    """Apply `liger_hw.kl_div` to log-probabilities `input` (N, V) and `target` probabilities (or logarithms).

    Raises:
        ValueError: `size_average` or `reduce`, torch's deprecated forms of `reduction`, is False.
    """
    check(size_average, "size_average", size_average, "True; reduction='sum' sums")
    check(reduce, "reduce", reduce, "True; reduction='none' keeps the entries")
    return kl_div(input, target, reduction, log_target, eps)


def liger_tvd(input, target, shift_labels=None, reduction="mean", ignore_index=-100):
    """Apply `liger_hw.tvd` to probabilities (N, V) of student (`input`) and teacher (`target`)."""
    return tvd(input, target, reduction, shift_labels, ignore_index)


@names_arguments
def liger_fused_linear_jsd(
    student_input, student_weight, teacher_input, teacher_weight, shift_labels=None, jsd_beta=0.5, ignore_index=-100,
    temperature=1.0, accum_dtype=None,
):  # fmt: skip
    """Compute the JSD of two heads without their logits: see `LigerFusedLinearJSD`.

    Returns:
        fp32 scalar, the mean over the rows whose label is not `ignore_index`.
    """
    check_numbers("0 to 1", least=0, most=1, jsd_beta=jsd_beta)
    return distillation_loss(
        student_input, student_weight, teacher_input, teacher_weight, shift_labels, beta=jsd_beta,
        temperature=temperature, hard_weight=0.0, soft_weight=1.0, ignore_index=ignore_index, accum_dtype=accum_dtype,
    ).loss  # fmt: skip


@names_arguments
def liger_fused_linear_kl_div(
    student_input: torch.Tensor, student_weight: torch.Tensor, target: torch.Tensor,
    shift_labels: torch.Tensor | None = None, reduction: str = "batchmean", ignore_index: int = -100,
    temperature: float = 1.0, eps: float = 1e-10, accum_dtype: torch.dtype | None = None,
):  # fmt: skip
    """Compute KL(target, softmax(student_input @ student_weight.T / temperature)) in chunks of the logits.

    Args:
        student_input: (N, H). student_weight: (V, H). target: (N, V) probabilities.
        shift_labels: (N,) int64 or int32, or None; rows whose label is `ignore_index` do not count.
        reduction: "batchmean" over the rows that count, "mean" over their entries, or "sum".
        eps: lower bound of a probability before its logarithm.
        accum_dtype: None or torch.float32, as in `logits_loss`.

    Returns:
        fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: shapes or dtypes do not fit, or an option is out of its range.
    """
    rows = {"target": target, "shift_labels": shift_labels}
    student_input, target, shift_labels = flatten_rows(student_input, "student_input", **rows)
    x, weight, _ = prepare_head(student_input, student_weight, None, CHUNK_MEMORY, True, STUDENT)
    labels, ignore_index = prepare_labels(x, shift_labels, ignore_index, "shift_labels")
    fits = target.is_floating_point() and target.shape == (len(x), len(weight)) and target.device == x.device
    check(fits, "target", target, f"floats ({len(x)}, {len(weight)}) on {x.device}")
    check_known("reduction", reduction, ("batchmean", "mean", "sum"))
    check_numbers("a positive number", above=0, temperature=temperature)
    rows = (labels != ignore_index).sum().clamp(min=1) if reduction != "sum" else torch.ones((), device=x.device)
    count = rows.to(wide_dtype(x)) * (len(weight) if reduction == "mean" else 1)
    head, form = Head(x, weight, accum_dtype=accum_dtype), Form(False, float(temperature), float(eps))
    rows = target.detach(), labels, 1 / count, ignore_index
    return kl_to_probabilities("liger_fused_linear_kl_div", head, *rows, form)


def liger_fused_linear_scaled_cross_entropy(
    input, weight, target, temperature=1.0, ignore_index=-100, return_entropy=False
):
    """Compute each target's negative log-probability under softmax(input @ weight.T / temperature).

    Args:
        input: (N, H). weight: (V, H). target: (N,).

    Returns:
        fp32 (N,); with `return_entropy` also the entropy, as a pair.
    """
    output = fused_linear_selective_log_softmax(
        input, weight, target, temperature=temperature, ignore_index=ignore_index, return_entropy=return_entropy
    )
    return (-output.log_probs, output.entropy) if return_entropy else -output


def liger_group_norm(X, affine_scaling_weight, affine_shifting_bias, num_channels, num_groups, eps):
    """Apply `liger_hw.group_norm` to X (N, num_channels, ...)."""
    check(X.shape[1] == num_channels, "X", tuple(X.shape), f"(N, {num_channels}, ...)")
    return group_norm(X, affine_scaling_weight, affine_shifting_bias, num_groups, eps)


def liger_modulated_rms_norm(X, W, scale, shift=None, eps=1e-6, offset=0.0, casting_mode="llama", in_place=True):
    """Apply `liger_hw.modulated_rms_norm` to X (..., C), with W, scale and shift."""
    return modulated_rms_norm(X, W, scale, shift, eps, offset, casting_mode)


def liger_poly_norm(X, W, B, eps=1e-6, in_place=True):
    """Apply `liger_hw.poly_norm` to X (..., C), with W (3,) and B."""
    return poly_norm(X, W, B, eps)


def liger_relu_squared(x):
    """Return relu(x) squared."""
    return activate(x, "relu_squared")


def liger_sparsemax(input, dim=-1):
    """Apply `liger_hw.sparsemax` along `dim`."""
    return sparsemax(input.movedim(dim, -1)).movedim(-1, dim)


def liger_attn_res(V, w_query, w_norm, eps=1e-6):
    """Apply `liger_hw.attention_residual` to V (N, ..., D) or N tensors (..., D)."""
    return attention_residual(V, w_query, w_norm, eps)


def liger_qwen2vl_mrope(q, k, cos, sin, mrope_section, unsqueeze_dim=1):
    """Apply `liger_hw.rope` with tables (3, B, T, D) of time, height and width.

    Args:
        mrope_section: the numbers of the D / 2 angles that use time, height and width.
    """
    return rope(q, k, *(merged_mrope_table(table, mrope_section) for table in (cos, sin)), unsqueeze_dim)


def merged_mrope_table(table, mrope_section):
    """Merge sections of `table` (3, B, T, D) in turn into one (B, T, D)."""
    return torch.cat([part[i % 3] for i, part in enumerate(table.split(list(mrope_section) * 2, -1))], -1)


def liger_mhc_coeffs(
    x, phi, b, alpha_pre, alpha_post, alpha_res, *, allow_fp32=False, tmax=20, rms_eps=1e-6, pre_eps=0.0,
    sinkhorn_eps=1e-6, post_mult=2.0,
):  # fmt: skip
    """Compute `liger_hw.mhc_coefficients`.

    Raises:
        AssertionError: x is neither bf16 nor fp16, and `allow_fp32` is False, as in liger_kernel.
    """
    if not allow_fp32 and x.dtype not in (torch.bfloat16, torch.float16):
        raise AssertionError(f"x should be BF16/FP16 (set allow_fp32=True for FP32), got {x.dtype}")
    return mhc_coefficients(
        x, phi, b, alpha_pre, alpha_post, alpha_res, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    )


def liger_mhc_apply(x, f_out, h_pre, h_post, h_res, *, return_x_in=False):
    """Return the streams after layer output `f_out`, with `return_x_in` also the layer's input."""
    out = mhc_post_res(x, f_out, h_post, h_res)
    return (out, mhc_pre(x, h_pre)) if return_x_in else out


def liger_mhc_forward(
    x, layer, phi, b, alpha_pre, alpha_post, alpha_res, *, allow_fp32=False, tmax=20, rms_eps=1e-6, pre_eps=0.0,
    sinkhorn_eps=1e-6, post_mult=2.0, return_coeffs=False,
):  # fmt: skip
    """Apply hyper-connections around `layer`: streams (..., S, C), with `return_coeffs` also coefficients."""
    coefficients = liger_mhc_coeffs(
        x, phi, b, alpha_pre, alpha_post, alpha_res, allow_fp32=allow_fp32, tmax=tmax, rms_eps=rms_eps, pre_eps=pre_eps,
        sinkhorn_eps=sinkhorn_eps, post_mult=post_mult,
    )  # fmt: skip
    h_pre, h_post, h_res = coefficients
    x_in = mhc_pre(x, h_pre)
    parameters = layer.parameters() if isinstance(layer, torch.nn.Module) else ()
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), x_in.dtype)  # not that of quantised weights
    out = mhc_post_res(x, layer(x_in.to(dtype)), h_post, h_res)
    return (out, coefficients) if return_coeffs else out


def liger_multi_token_attention(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False):
    """Call `multi_token_attention`.

    Raises:
        ValueError: as there; with `sparse`, scores that are not fp32.
    """
    check(not sparse or scores.dtype == torch.float32, "scores", scores.dtype, "torch.float32 with sparse=True")
    return multi_token_attention(scores, weight, bias, stride, padding, dilation, groups, sparse)


# ops whose parameters are liger_kernel's
liger_dyt = dyt
liger_fused_neighborhood_attention = neighborhood_attention
liger_mhc_post_res = mhc_post_res
liger_mhc_pre = mhc_pre
liger_softmax = softmax

__all__ = ["CrossEntropyOutput"]
__all__ += [name for name in dir() if name.startswith("liger_")]
