"""Inputs for every op: the one list behind the parity, the cross-compile and the benchmark matrix.

Each entry yields (inputs, options); inputs that want a gradient ask for it. Shapes are small enough for the interpreter
and odd enough to meet every mask.
"""

import torch

from liger_hw.kernels import load_all

load_all()


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


def angles(batch, tokens, rotary_dim, dtype=torch.float32, device="cpu"):
    """Tables of cos and sin, whose halves differ as no model's do, so that no test mistakes one for the other."""
    x = torch.randn(batch, tokens, rotary_dim, dtype=torch.float64)
    return x.cos().to(device, dtype), x.sin().to(device, dtype)


def ropes(dtype, device="cpu"):
    def heads(*shape, grad=True):
        return randn(*shape, dtype=dtype, grad=grad, device=device)

    for q_heads, k_heads, head_dim, rotary_dim in [(4, 2, 16, 16), (3, 1, 20, 12), (1, 1, 2, 2), (5, 3, 512, 512)]:
        tables = angles(2, 3, rotary_dim, dtype, device)
        yield (heads(2, q_heads, 3, head_dim), heads(2, k_heads, 3, head_dim), *tables), {}
        yield (heads(2, 3, q_heads, head_dim), heads(2, 3, k_heads, head_dim), *tables), {"unsqueeze_dim": 2}
    yield (heads(2, 24, 1, 256), heads(2, 1, 1, 256), *angles(1, 1, 256, device=device)), {}  # one fp32 table for all
    yield (heads(1, 2, 2, 8, grad=False), heads(1, 2, 2, 8), *angles(1, 2, 8, dtype, device)), {}
    yield (heads(1, 2, 2, 8), heads(1, 2, 2, 8, grad=False), *angles(1, 2, 8, dtype, device)), {}
    yield (heads(2, 2, 0, 8), heads(2, 2, 0, 8), *angles(1, 0, 8, dtype, device)), {}


def real_norms(dtype):
    for cols in (128, 1024, 4096, 5120, 8192, 16384, 262144, 1001):
        yield (randn(2, cols, dtype=dtype), randn(cols, dtype=dtype)), {}
    yield (randn(2, 4096, dtype=dtype), randn(4096)), {"offset": 1.0, "casting_mode": "gemma"}
    yield (randn(2, 8192), randn(8192)), {}


def real_fused_add_norms(dtype):
    for (x, w), options in real_norms(dtype):
        yield (x, randn(*x.shape, dtype=x.dtype), w), options


def real_gated(dtype, options=({},)):
    for shape in [(2, 14336), (1, 1001)]:
        for option in options:
            yield (randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)), option


def real_geglus(dtype):
    return real_gated(dtype, ({}, {"approximate": "none"}))


def real_ropes(dtype):
    for q_heads, k_heads, head_dim, rotary_dim in [
        (32, 8, 128, 128),
        (14, 2, 64, 64),
        (8, 4, 256, 256),
        (16, 16, 80, 32),
    ]:
        q, k = (randn(1, 2, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (q_heads, k_heads))
        yield (q, k, *angles(1, 2, rotary_dim, dtype)), {}


# For the compile tier: widths of real models and an odd one, few rows. (dtype) -> (inputs, options)
REAL = {
    "rms_norm": real_norms,
    "fused_add_rms_norm": real_fused_add_norms,
    "swiglu": real_gated,
    "geglu": real_geglus,
    "rope": real_ropes,
}

SAMPLES = {
    "rms_norm": norms,
    "fused_add_rms_norm": fused_add_norms,
    "swiglu": gated,
    "geglu": geglus,
    "rope": ropes,
}
