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


def gated(dtype, device="cpu", options=({},)):
    for shape in [(5, 123), (3, 1024), (2, 3, 2500), (1,), (0, 16)]:
        gate, up = randn(*shape, dtype=dtype, device=device), randn(*shape, dtype=dtype, device=device)
        for option in options:
            yield (gate, up), option
    yield (randn(4, 64, dtype=dtype, device=device), randn(4, 64, dtype=dtype, grad=False, device=device)), options[0]
    yield (randn(4, 64, dtype=dtype, grad=False, device=device), randn(4, 64, device=device)), options[0]  # fp32 up


def geglus(dtype, device="cpu"):
    return gated(dtype, device, ({}, {"approximate": "none"}))


SAMPLES = {"rms_norm": norms, "fused_add_rms_norm": fused_add_norms, "swiglu": gated, "geglu": geglus}
