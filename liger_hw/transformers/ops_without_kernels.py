"""Define in PyTorch the ops of liger_kernel that have no kernel here.

PyTorch computes their gradients. They give correct results on any device, but save no memory.
"""

import torch
import torch.nn.functional as F

from liger_hw.checks import check
from liger_hw.kernels.softmax import softmax, sparsemax

FAR_BELOW = -1e9  # masked scores in multi-token attention; finite, because a convolution reads them


def multi_token_attention(scores, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, sparse=False):
    """Convolve the causal softmax (or sparsemax) of scores (B, C, L, L), mask again (arXiv:2504.00927)."""
    check(not sparse or scores.dtype == torch.float32, "scores", scores.dtype, "torch.float32 with sparse=True")
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    masked = scores.masked_fill(future, FAR_BELOW)
    weights = sparsemax(masked) if sparse else softmax(masked)
    out = F.conv2d(weights, weight, bias, stride, padding, dilation, groups)
    return out.masked_fill(torch.ones(out.shape[-2:], dtype=torch.bool, device=out.device).triu(1), 0.0)


def mhc_coefficients(
    x, phi, b, alpha_pre, alpha_post, alpha_res, tmax=20, rms_eps=1e-6, pre_eps=0.0, sinkhorn_eps=1e-6, post_mult=2.0
):
    """Compute the coefficients by which hyper-connections (arXiv:2512.24880) mix streams, in fp32.

    Every parameter is part of every output's graph, so an unused output gives it a gradient of zero, not None.

    Args:
        x: (..., S, C), S streams. phi: (S C, S S + 2 S). b: (S S + 2 S,). alpha_*: () or (1,).
        tmax: Sinkhorn iterations.

    Returns:
        h_pre (..., S), h_post (..., S) and h_res (..., S, S), whose rows and columns add up to 1.
    """
    streams = x.shape[-2]
    flat = x.flatten(-2).float()
    mix = (flat @ phi.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    sizes = (streams, streams, streams * streams)
    alphas = torch.cat([a.float().expand(size) for a, size in zip((alpha_pre, alpha_post, alpha_res), sizes)])
    pre, post, res = (mix * alphas + b.float()).split(sizes, -1)
    matrix = res.unflatten(-1, (streams, streams)).softmax(-1) + sinkhorn_eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(tmax - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + sinkhorn_eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + sinkhorn_eps)
    return pre.sigmoid() + pre_eps, post.sigmoid() * post_mult, matrix


def mhc_pre(x, h_pre):
    """Compute sum_i h_pre_i x_i: (..., S, C) and (..., S) -> (..., C)."""
    return (h_pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype)


def mhc_post_res(x, f_out, h_post, h_res):
    """Compute sum_i h_res_oi x_i + h_post_o f_out: (..., S, C)."""
    return (h_res @ x.float() + h_post.unsqueeze(-1) * f_out.float().unsqueeze(-2)).to(x.dtype)
