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


def neighborhood_attention(query, key, value, kernel_size=7, dilation=1, scale=None):
    """Attend (B, heads, L, D) from each position to `kernel_size` positions around it, `dilation` apart.

    Raises:
        ValueError: an even kernel size.
    """
    check(kernel_size % 2 == 1, "kernel_size", kernel_size, "an odd number")
    places = torch.arange(query.shape[-2], device=query.device)
    far = (places[:, None] - places).abs()
    near = (far <= kernel_size // 2 * dilation) & (far % dilation == 0)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=near, scale=scale)


def attention_residual(blocks, w_query, w_norm, eps=1e-6):
    """Attend over depth in place of a residual sum (arXiv:2603.15031).

    Args:
        blocks: (N, ..., D) or N tensors (..., D), any N. w_query, w_norm: (D,).
    """
    blocks = torch.stack(tuple(blocks)) if isinstance(blocks, (list, tuple)) else blocks
    wide = blocks.float()
    keys = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * w_norm.float()
    depth = (keys @ w_query.float()).softmax(0)
    return (depth.unsqueeze(-1) * wide).sum(0).to(blocks.dtype)
