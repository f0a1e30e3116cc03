"""Memory layouts of queries and keys, for tests of strides."""

import torch


def tokens_first(x):
    """Make (B, H, T, D) with a projection's memory order, as Hugging Face's attention does."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def of_a_fused_projection(x):
    """Make (B, H, T, D) with other values between its tokens."""
    return torch.cat((x, x.square()), 1).transpose(1, 2).contiguous().transpose(1, 2)[:, : x.shape[1]]


def spread(x):
    """Make stride 2 in the last dimension."""
    return torch.stack((x, x.square()), -1)[..., 0]


LAYOUTS = [tokens_first, of_a_fused_projection, spread]
