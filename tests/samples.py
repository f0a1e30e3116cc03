"""Inputs for every op: the one list behind the parity, the cross-compile and the benchmark matrix.

Each entry yields (inputs, options); inputs that want a gradient ask for it. Shapes are small enough for the interpreter
and odd enough to meet every mask.
"""

import torch


def randn(*shape, dtype=torch.float32, grad=True, device="cpu"):
    return torch.randn(shape, dtype=torch.float64).to(device, dtype).requires_grad_(grad)


def norms(dtype, device="cpu"):
    for rows, cols in [(5, 123), (3, 1024), (1, 8), (33, 64), (0, 16)]:
        x, w = randn(rows, cols, dtype=dtype, device=device), randn(cols, dtype=dtype, device=device)
        yield (x, w), {}
        yield (x, w), {"offset": 1.0, "casting_mode": "gemma"}
        yield (x, None), {}
    yield (randn(2, 7, 257, dtype=dtype, device=device), randn(257, device=device)), {}  # fp32 weight
    yield (randn(2, 70000, dtype=dtype, device=device), randn(70000, dtype=dtype, device=device)), {}  # a looped row


def fused_add_norms(dtype, device="cpu"):
    for (x, w), options in norms(dtype, device):
        yield (x, randn(*x.shape, dtype=dtype, device=device), w), options


SAMPLES = {"rms_norm": norms, "fused_add_rms_norm": fused_add_norms}
