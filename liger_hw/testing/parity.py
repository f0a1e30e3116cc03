"""The one parity check that every kernel test calls, and the benchmark before it prints a time.

A kernel passes when, against the reference in float64, its error is at most twice that of the reference run in the
kernel's own dtypes plus one rounding of the result, in the worst element and in the root mean square. No tolerance is
chosen by hand.
"""

import torch

from liger_hw import use_backend
from liger_hw.hooks import hooks


def run(function, inputs, options, seed=1):
    """Outputs and gradients of `function`, the outputs' gradients random (seeded apart from the inputs: with dy = x the
    gradient of a norm vanishes)."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format) if torch.is_tensor(x) else x for x in inputs]
    for leaf, x in zip(leaves, inputs):
        if torch.is_tensor(x):
            leaf.requires_grad_(x.requires_grad)
    outs = function(*leaves, **options)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None]
    generator = torch.Generator().manual_seed(seed)
    diffable = [out for out in outs if out.requires_grad]
    grads = [torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out) for out in diffable]
    if diffable:
        torch.autograd.backward(diffable, grads)
    return [out.detach() for out in outs] + [x.grad for x in leaves if torch.is_tensor(x) and x.requires_grad]


def check(op, inputs, options, backend):
    """Hold `op` on `backend` to its reference. Inputs that ask for a gradient get it compared."""
    try:
        wide = [x.detach().double().requires_grad_(x.requires_grad) if _floats(x) else x for x in inputs]
        exact, plain = run(op.reference, wide, options), run(op.reference, inputs, options)
        with use_backend(backend):
            found = run(op, inputs, options)
        compare(exact, plain, found, f"{op.__name__} on {backend}")
    except Exception as error:
        _tell_observer(op, inputs, backend, error)
        raise
    _tell_observer(op, inputs, backend, None)


def _tell_observer(op, inputs, backend, error):
    if hooks.check_observer is not None:
        hooks.check_observer(op, inputs, backend, error)


def compare(exact, plain, found, what):
    """`found` against float64 `exact`, with the room that `plain`, the reference in the same dtypes, leaves it.

    Raises:
        AssertionError: which output of `what` differs and how.
    """
    _hold(len(found) == len(exact) == len(plain), f"{what}: {len(found)} outputs, expected {len(plain)}")
    for i, (e, p, f) in enumerate(zip(exact, plain, found)):
        if e is None or f is None:
            _hold(e is None and f is None and p is None, f"output {i} of {what} is None on one side only")
            continue
        _hold(f.shape == p.shape, f"output {i} of {what}: shape {tuple(f.shape)}, expected {tuple(p.shape)}")
        _hold(f.dtype == p.dtype, f"output {i} of {what}: {f.dtype}, expected {p.dtype}")
        if not f.is_floating_point():
            _hold(torch.equal(f, p), f"output {i} of {what} differs")
            continue
        if f.numel() == 0:
            continue
        _hold(torch.equal(f.isfinite(), p.isfinite()), f"output {i} of {what} is not finite where it should be")
        finite = p.isfinite()
        e, p, f, eps = e[finite].double(), p[finite].double(), f[finite].double(), torch.finfo(f.dtype).eps
        if f.numel() == 0:
            continue
        for name, norm in (("worst", lambda t: t.abs().max()), ("rms", lambda t: t.square().mean().sqrt())):
            room = 2 * (norm(p - e) + eps * norm(e))
            error = norm(f - e)
            _hold(error <= room, f"output {i} of {what}: {name} error {error:.3g}, allowed {room:.3g}")


def _hold(condition, message):
    """An assertion that `python -O` keeps: the benchmark stands on it."""
    if not condition:
        raise AssertionError(message)


def _floats(x):
    return torch.is_tensor(x) and x.is_floating_point()
