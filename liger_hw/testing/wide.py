"""Inputs at the widths of real models and at odd ones, few rows: what compilers are shown besides `samples.SAMPLES`.

REAL: op -> (dtype) -> iterator of (inputs, options), on "meta": what is compiled runs nowhere.
"""

import functools

import torch

from liger_hw.kernels.glu import ACTIVATIONS
from liger_hw.testing import samples
from liger_hw.testing.samples import CLAMPS

randn = functools.partial(samples.randn, device="meta")
angles = functools.partial(samples.angles, device="meta")
targets = functools.partial(samples.targets, device="meta")


def norms(dtype):
    for cols in (128, 1024, 4096, 5120, 8192, 16384, 262144, 1001):
        yield (randn(2, cols, dtype=dtype), randn(cols, dtype=dtype)), {}
    yield (randn(2, 4096, dtype=dtype), randn(4096)), {"offset": 1.0, "casting_mode": "gemma"}
    yield (randn(2, 8192), randn(8192)), {}


def fused_add_norms(dtype):
    for (x, w), options in norms(dtype):
        yield (x, randn(*x.shape, dtype=x.dtype), w), options


def layer_norms(dtype):
    for cols in (128, 1024, 4096, 8192, 16384, 262144, 1001):
        yield (randn(2, cols, dtype=dtype), randn(cols, dtype=dtype), randn(cols, dtype=dtype)), {}
    yield (randn(2, 4096, dtype=dtype), None, None), {}


def gated(dtype, options=({},)):
    for shape in [(2, 14336), (1, 1001)]:
        for option in options:
            yield (randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)), option


def clamped(dtype):
    for options in CLAMPS:
        yield (randn(2, 5760, dtype=dtype),), options
    yield (randn(1, 2002, dtype=dtype),), CLAMPS[0]
    yield (randn(1, 1001, dtype=dtype), randn(1, 1001, dtype=dtype)), CLAMPS[2]


def geglus(dtype):
    return gated(dtype, ({}, {"approximate": "none"}))


def gated_linears(dtype):
    for shape in [(2, 14336), (1, 1001)]:
        for activation in ACTIVATIONS:
            gate, up, weight = (randn(*size, dtype=dtype) for size in (shape, shape, (8, shape[-1])))
            yield (gate, up, weight), {"activation": activation}
            yield (gate, None, weight), {"activation": activation}


def activations(dtype):
    for shape in [(2, 18432), (1, 1001)]:
        for activation in ACTIVATIONS:
            yield (randn(*shape, dtype=dtype),), {"activation": activation}


def ropes(dtype):
    for q_heads, k_heads, head_dim, rotary_dim in [
        (32, 8, 128, 128),
        (14, 2, 64, 64),
        (8, 4, 256, 256),
        (16, 16, 80, 32),
    ]:
        q, k = (randn(1, 2, heads, head_dim, dtype=dtype).transpose(1, 2) for heads in (q_heads, k_heads))
        yield (q, k, *angles(1, 2, rotary_dim, dtype)), {}
    for heads, head_dim, layout, shared in [(32, 128, "interleaved", False), (32, 64, "interleaved_to_half", True)]:
        q, k = (randn(1, 2, count, head_dim, dtype=dtype).transpose(1, 2) for count in (heads, 1))
        yield (q, k, *angles(1, 2, head_dim // 2 if shared else head_dim, dtype)), {"layout": layout, "shared": shared}


def losses(dtype):
    for classes in (128256, 50257, 32000, 300000):
        x, y = randn(2, classes, dtype=dtype), targets(2, classes)
        yield (x, y), {}
        yield (x, y), {"in_place": True, "lse_square_scale": 1e-4}
    for classes in (50257, 256000):
        x, y, w = randn(2, classes, dtype=dtype), targets(2, classes), torch.rand(classes, device="meta")
        everything = {"label_smoothing": 0.1, "softcap": 30.0, "lse_square_scale": 0.1, "return_predicted_tokens": True}
        yield (x, y, w), everything
        yield (x, y, w), everything | {"in_place": True}


def linear_losses(dtype):
    for classes in (128256, 50257):
        x, w, y = randn(2, 8, dtype=dtype), randn(classes, 8, dtype=dtype), targets(2, classes)
        yield (x, w, y), {}
        yield (x, w, y), {"reduction": "none", "softcap": 30.0, "use_token_scaling": True, "lse_square_scale": 1e-4}


def selections(dtype):
    for classes in (128256, 50257):
        x, y = randn(2, classes, dtype=dtype), targets(2, classes)
        yield (x, y), {}
        yield (x, y), {"softcap": 30.0, "temperature": 0.9, "return_entropy": True, "return_lse": True}


def linear_selections(dtype):
    for classes in (128256, 50257):
        x, w, y = randn(2, 8, dtype=dtype), randn(classes, 8, dtype=dtype), targets(2, classes)
        yield (x, w, y), {}
        yield (x, w, y), {"softcap": 30.0, "return_entropy": True}


def divergences(dtype, *options):
    for classes in (128256, 50257):
        for option in options or ({},):
            yield (randn(2, classes, dtype=dtype), randn(2, classes, dtype=dtype, grad=False)), option


def jsds(dtype):
    return divergences(dtype, *({"beta": beta, "labels": targets(2, 9)} for beta in (0.0, 0.5, 1.0)))


def kl_divs(dtype):
    return divergences(dtype, {}, {"log_target": True})


REAL = {
    "rms_norm": norms,
    "fused_add_rms_norm": fused_add_norms,
    "layer_norm": layer_norms,
    "swiglu": gated,
    "clamped_swiglu": clamped,
    "geglu": geglus,
    "activate": activations,
    "glu_linear": gated_linears,
    "rope": ropes,
    "cross_entropy": losses,
    "fused_linear_cross_entropy": linear_losses,
    "selective_log_softmax": selections,
    "fused_linear_selective_log_softmax": linear_selections,
    "jsd": jsds,
    "kl_div": kl_divs,
    "tvd": divergences,
}
