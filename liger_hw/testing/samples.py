"""Inputs for every op: the one list behind the parity, the cross-compile and the benchmark matrix.

Each entry of SAMPLES, (dtype, device) -> iterator, yields (inputs, options); inputs that want a gradient ask for it.
Shapes are small enough for the interpreter and odd enough to meet every mask.
"""

import torch

from liger_hw.kernels import load_all
from liger_hw.kernels.glu import ACTIVATIONS

load_all()


def randn(*shape, dtype=torch.float32, grad=True, device="cpu"):
    return _normal(*shape, device=device).to(device, dtype).requires_grad_(grad)


def _normal(*shape, device):
    """In fp64, made on the CPU so that every device has the same values; "meta" has none to make."""
    return torch.randn(shape, dtype=torch.float64, device="meta" if device == "meta" else "cpu")


def flat(outputs):
    """All floating-point values of an op's outputs as one vector, to differentiate them at once."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat([out.flatten() for out in outputs if out is not None and out.is_floating_point()])


def norms(dtype, device="cpu"):
    for rows, cols in [(5, 123), (3, 1024), (1, 8), (33, 64), (0, 16)]:
        x, w = randn(rows, cols, dtype=dtype, device=device), randn(cols, dtype=dtype, device=device)
        yield (x, w), {}
        yield (x, w), {"offset": 1.0, "casting_mode": "gemma"}
        yield (x, None), {}
    yield (randn(2, 7, 257, dtype=dtype, device=device), randn(257, device=device)), {}  # fp32 weight
    for cols in (12008, 33001):  # several blocks in registers; a looped row
        yield (randn(2, cols, dtype=dtype, device=device), randn(cols, dtype=dtype, device=device)), {}


def fused_add_norms(dtype, device="cpu"):
    for (x, w), options in norms(dtype, device):
        yield (x, randn(*x.shape, dtype=dtype, device=device), w), options


def layer_norms(dtype, device="cpu"):
    for rows, cols in [(5, 123), (3, 1024), (1, 8), (33, 64), (0, 16)]:
        x, w, b = (randn(*shape, dtype=dtype, device=device) for shape in ((rows, cols), (cols,), (cols,)))
        yield (x, w, b), {}
        yield (x, None, None), {"eps": 1e-3}
    yield (x := randn(2, 7, 40, dtype=dtype, device=device), randn(40, device=device), None), {}  # fp32 weight
    yield (x, None, randn(40, device=device)), {}
    yield (x.detach(), randn(40, dtype=dtype, device=device), randn(40, grad=False, dtype=dtype, device=device)), {}
    yield (x.detach(), randn(40, grad=False, dtype=dtype, device=device), randn(40, dtype=dtype, device=device)), {}
    yield (randn(2, 33001, dtype=dtype, device=device), randn(33001, dtype=dtype, device=device), None), {}  # looped


def gated(dtype, device="cpu", options=({},)):
    for shape in [(5, 123), (3, 1024), (2, 3, 2500), (1,), (0, 16)]:
        gate, up = randn(*shape, dtype=dtype, device=device), randn(*shape, dtype=dtype, device=device)
        for option in options:
            yield (gate, up), option
    yield (randn(4, 64, dtype=dtype, device=device), randn(4, 64, dtype=dtype, grad=False, device=device)), options[0]
    yield (randn(4, 64, dtype=dtype, grad=False, device=device), randn(4, 64, device=device)), options[0]  # fp32 up


def geglus(dtype, device="cpu"):
    return gated(dtype, device, ({}, {"approximate": "none"}))


def activations(dtype, device="cpu"):
    for shape in [(5, 123), (2, 3, 2500), (1,), (0, 16)]:
        for activation in ACTIVATIONS:
            yield (randn(*shape, dtype=dtype, device=device),), {"activation": activation}
    yield (randn(4, 64, dtype=dtype, grad=False, device=device),), {}


CLAMPS = [
    {"limit": 0.5, "alpha": 1.702, "offset": 1.0, "interleaved": True},
    {"limit": 0.5, "alpha": 1.702, "offset": 1.0},
    {"limit": 1.0},
]


def clamped(dtype, device="cpu"):
    for shape in [(5, 246), (3, 2048), (2, 3, 5000), (2,), (0, 16)]:
        for options in CLAMPS:
            yield (randn(*shape, dtype=dtype, device=device),), options
    gate, up = randn(5, 123, dtype=dtype, device=device), randn(5, 123, dtype=dtype, device=device)
    for options in CLAMPS[1:]:
        yield (gate, up), options
    yield (gate, up.detach()), CLAMPS[1]
    yield (gate.detach(), up), CLAMPS[2]


def gated_linears(dtype, device="cpu"):
    def leaf(*shape, grad=True, dtype=dtype):
        return randn(*shape, dtype=dtype, grad=grad, device=device)

    for shape, features in [((5, 123), 7), ((2, 3, 260), 16), ((9,), 4), ((0, 16), 8)]:
        for activation in ACTIVATIONS:
            inputs = leaf(*shape), leaf(*shape), leaf(features, shape[-1]), leaf(features)
            yield inputs, {"activation": activation}
            yield (inputs[0], None, *inputs[2:]), {"activation": activation}
        yield (inputs[0], None, inputs[2].detach()), {}
    for learns in [(True, False, True), (False, True, True), (True, True, False), (False, False, True), (False,) * 3]:
        yield tuple(leaf(*s, grad=grad) for s, grad in zip([(4, 64), (4, 64), (8, 64)], learns)), {}
    yield (leaf(4, 64), leaf(4, 64, dtype=torch.float32), leaf(8, 64, dtype=torch.float32)), {}


def angles(batch, tokens, rotary_dim, dtype=torch.float32, device="cpu"):
    """Tables of cos and sin, whose halves differ as no model's do, so that no test mistakes one for the other."""
    x = _normal(batch, tokens, rotary_dim, device=device)
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
    for layout in ("half", "interleaved", "interleaved_to_half"):
        for shared, wide, k in [(False, True, heads(2, 2, 3, 20)), (True, False, None)]:
            tables = angles(1, 3, 6 if shared else 12, dtype, device)
            yield (heads(2, 3, 3, 20), k, *tables), {"layout": layout, "shared": shared, "wide": wide}


LOSS_OPTIONS = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "lse_square_scale": 1e-2, "return_z_loss": True},
    {"label_smoothing": 0.1, "softcap": 3.0, "logit_scale": 0.7, "return_predicted_tokens": True},
    {
        "lse_square_scale": 0.01,
        "softcap": 5.0,
        "reduction": "none",
        "return_z_loss": True,
        "return_token_accuracy": True,
    },
    {"num_items": 7, "lse_square_scale": 1e-2, "logit_scale": -1.5, "return_token_accuracy": True},
]
CLASS_WEIGHT_OPTIONS = [
    {},
    {"label_smoothing": 0.2, "reduction": "sum"},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 4.0, "logit_scale": 2.0, "return_z_loss": True},
]


def targets(rows, classes, device="cpu", ignored=-100):
    """Classes, about a quarter of the rows ignored, the first never."""
    target = torch.randint(0, classes, (rows,))
    target[1:][torch.rand(max(rows - 1, 0)) < 0.25] = ignored
    return target.to(device)


def losses(dtype, device="cpu"):
    for rows, classes, options_too in [(5, 130, True), (6, 7, False), (3, 517, False), (0, 8, False), (1, 9, False)]:
        x, y = randn(rows, classes, dtype=dtype, device=device), targets(rows, classes, device)
        for options in LOSS_OPTIONS if options_too else LOSS_OPTIONS[1:2]:
            yield (x, y), options
        w = torch.rand(classes, device=device)
        for options in CLASS_WEIGHT_OPTIONS if options_too else CLASS_WEIGHT_OPTIONS[2:]:
            yield (x, y, w), options
    x, y = randn(4, 130, dtype=dtype, device=device), targets(4, 130, device)
    yield (randn(2, 1, dtype=dtype, device=device), torch.zeros(2, dtype=torch.int64, device=device)), {}
    yield (x, y), {"in_place": True}
    yield (x, y), {"in_place": True, "reduction": "none", "label_smoothing": 0.1, "softcap": 3.0}
    yield (x, y.int(), torch.rand(130, dtype=dtype, device=device)), {"ignore_index": 3}
    yield (x, torch.full_like(y, -100)), {"return_token_accuracy": True, "return_predicted_tokens": True}
    x, y = randn(2, 40000, dtype=dtype, device=device), torch.tensor([39999, 0], device=device)  # looped rows
    yield (x, y), {"return_predicted_tokens": True}
    yield (x, y), {"in_place": True, "label_smoothing": 0.1, "softcap": 3.0}


def linear_losses(dtype, device="cpu"):
    for rows, features, classes in [(9, 16, 61), (3, 8, 517), (7, 8, 3), (0, 4, 5)]:
        options_too = classes == 61
        x, w = randn(rows, features, dtype=dtype, device=device), randn(classes, features, dtype=dtype, device=device)
        y, bias = targets(rows, classes, device), randn(classes, dtype=dtype, device=device)
        for options in LOSS_OPTIONS if options_too else LOSS_OPTIONS[:2]:
            yield (x, w, y), options | {"chunk_memory": 1000}
        for options in CLASS_WEIGHT_OPTIONS if options_too else CLASS_WEIGHT_OPTIONS[2:]:
            yield (x, w, y, bias, torch.rand(classes, device=device)), options
        if options_too:
            yield (x, w, y, bias), {"use_token_scaling": True, "logit_scale": 0.3, "chunk_memory": 1000}
            everything = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 4.0, "reduction": "none"}
            yield (x, w, y, bias, torch.rand(classes, device=device)), everything | {"use_token_scaling": True}
    yield (x, w, y, bias), {"reduction": "none"}
    x, w = randn(5, 16, dtype=dtype, device=device), randn(61, 16, dtype=dtype, device=device)
    y, bias = targets(5, 61, device), randn(61, dtype=dtype, device=device)
    for learns in [(True, False, False), (False, True, False), (False, False, True), (False, True, True), (False,) * 3]:
        frozen = [t.detach().requires_grad_(wanted) for t, wanted in zip((x, w, bias), learns)]
        for reduction in ("mean", "none"):
            yield (frozen[0], frozen[1], y, frozen[2]), {"reduction": reduction, "return_token_accuracy": True}
    yield (x, w, y), {"accum_dtype": torch.float32, "chunk_memory": 300}
    yield (x, w, torch.full_like(y, -100), bias), {"lse_square_scale": 0.1, "label_smoothing": 0.1}
    # looped rows; x is frozen because 40,000 terms in another order differ by more than a rounding
    x, w = randn(2, 4, dtype=dtype, grad=False, device=device), randn(40000, 4, dtype=dtype, device=device)
    yield (x, w, torch.tensor([39999, 0], device=device)), {}


SELECTIVE_OPTIONS = [
    {},
    {"return_entropy": True, "temperature": 0.7},
    {"return_entropy": True, "return_lse": True, "softcap": 3.0, "logit_scale": -1.5, "temperature": 1.3},
]


def selections(dtype, device="cpu"):
    for rows, classes in [(5, 130), (3, 517), (0, 8), (1, 9), (2, 1)]:
        for options in SELECTIVE_OPTIONS:
            yield (randn(rows, classes, dtype=dtype, device=device), targets(rows, classes, device)), options
    x, y = randn(2, 3, 130, dtype=dtype, device=device), targets(6, 130, device, ignored=3).reshape(2, 3)
    yield (x, y.int()), {"return_lse": True, "ignore_index": 3}
    x = randn(2, 40000, dtype=dtype, device=device)  # looped rows
    yield (x, torch.tensor([39999, 0], device=device)), {"return_entropy": True}


def linear_selections(dtype, device="cpu"):
    x, w = randn(17, 16, dtype=dtype, device=device), randn(61, 16, dtype=dtype, device=device)
    y, bias = targets(17, 61, device), randn(61, dtype=dtype, device=device)
    for options in SELECTIVE_OPTIONS:
        yield (x, w, y), options | {"chunk_memory": 2000}
        yield (x, w, y, bias), options
    for learns in [(True, False, False), (False, True, False), (False, False, True), (False,) * 3]:
        frozen = [t.detach().requires_grad_(wanted) for t, wanted in zip((x, w, bias), learns)]
        yield (frozen[0], frozen[1], y, frozen[2]), {"chunk_memory": 3000, "return_entropy": True}
    yield (randn(2, 3, 16, dtype=dtype, device=device), w, y[:6].reshape(2, 3)), {}
    yield (randn(0, 16, dtype=dtype, device=device), w, y[:0], bias), {"return_lse": True}
    yield (x, w, torch.full_like(y, -100), bias), {"return_entropy": True}
    w = randn(3, 16, dtype=dtype, device=device)  # fewer classes than a vector holds
    yield (x, w, torch.randint(0, 3, (17,), device=device)), {"return_entropy": True}


def log_probs(rows, classes, dtype, device, grad=True):
    """Log-probabilities far enough from each other that a divergence has no cancellation to speak of."""
    x = _normal(rows, classes, device=device).mul_(2).log_softmax(-1)
    return x.to(device, dtype).requires_grad_(grad)


def jsds(dtype, device="cpu"):
    for rows, classes in [(12, 130), (5, 517), (0, 8), (20, 9)]:
        q, p = log_probs(rows, classes, dtype, device), log_probs(rows, classes, dtype, device, False)
        for beta in (0.0, 0.1, 0.5, 1.0):
            yield (q, p), {"beta": beta}
        yield (q, p), {"labels": targets(rows, classes, device)}
    yield (log_probs(2, 20000, dtype, device), log_probs(2, 20000, dtype, device, False)), {}
    yield (q, p), {"labels": torch.full((20,), -100, device=device)}


def kl_divs(dtype, device="cpu"):
    for rows, classes in [(12, 130), (5, 517), (0, 8), (20, 9)]:
        q, p = log_probs(rows, classes, dtype, device), log_probs(rows, classes, dtype, device, False)
        for reduction in ("sum", "mean", "batchmean", "none"):
            yield (q, p.exp()), {"reduction": reduction}
        yield (q, p), {"log_target": True, "reduction": "batchmean"}
    yield (log_probs(2, 20000, dtype, device), log_probs(2, 20000, dtype, device, False)), {"log_target": True}


def tvds(dtype, device="cpu"):
    for rows, classes in [(12, 130), (5, 517), (0, 8), (20, 9)]:
        q, p = (log_probs(rows, classes, dtype, device, False).exp() for _ in range(2))
        q.requires_grad_()
        for reduction in ("sum", "mean", "batchmean", "none"):
            yield (q, p), {"reduction": reduction}
        yield (q, p), {"labels": targets(rows, classes, device)}


SAMPLES = {
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
    "tvd": tvds,
}
