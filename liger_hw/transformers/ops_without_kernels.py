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
