"""Check an op against its reference by the one rule of tests and benchmarks.

Errors are differences from the reference in float64. A kernel's error may be at most twice the sum of two: the error of
the reference in the kernel's dtypes, and one rounding of the result. This holds for the worst element and for the root
mean square. Nobody sets a tolerance by hand.
"""

import torch

from liger_hw import use_backend
from liger_hw.hooks import hooks


def run(function, inputs, options, seed=1):
    """Return the outputs and gradients of `function` for random gradients of its outputs.

    The seed differs from the inputs': with dy = x the gradient of a norm vanishes.
    """
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


def check(op, inputs, options, backend, compiled=None):
    """Compare `op` on `backend` with its reference: outputs, and gradients of inputs that require one.

    Args:
        op: an op. inputs: its positional arguments. options: its keyword arguments.
        backend: the name to force by `use_backend`, or None for the automatic choice.
        compiled: a compiled form of `op` to run instead of it.

    Raises:
        AssertionError: an output or a gradient differs by more than the rule allows.
    """
    try:
        exact, reference = expected(op, inputs, options)
        with use_backend(backend):
            outputs = run(compiled or op, inputs, options)
        compare(exact, reference, outputs, f"{op.__name__} on {backend}")
    except Exception as error:
        _tell_observer(op, inputs, backend, error)
        raise
    _tell_observer(op, inputs, backend, None)


def expected(op, inputs, options) -> tuple[list, list]:
    """Return the reference's outputs and gradients in float64, and in the inputs' dtypes."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) if _floats(x) else x for x in inputs]
    return run(op.reference, wide, options), run(op.reference, inputs, options)


def _tell_observer(op, inputs, backend, error):
    if hooks.check_observer is not None:
        hooks.check_observer(op, inputs, backend, error)


def compare(exact, reference, outputs, name):
    """Compare `outputs` with float64 `exact`; `reference`, in the same dtypes, sets the allowed error.

    Returns:
        the largest error as a share of the allowed one, 0 to 1.

    Raises:
        AssertionError: says which output of `name` differs and by how much.
    """
    share = 0.0
    _hold(len(outputs) == len(exact) == len(reference), f"{name}: {len(outputs)} outputs, expected {len(reference)}")
    for i, (e, r, out) in enumerate(zip(exact, reference, outputs)):
        label = f"output {i} of {name}"
        if e is None or out is None:
            _hold(e is None and out is None and r is None, f"{label} is None on one side only")
            continue
        _hold(out.shape == r.shape, f"{label}: shape {tuple(out.shape)}, expected {tuple(r.shape)}")
        _hold(out.dtype == r.dtype, f"{label}: {out.dtype}, expected {r.dtype}")
        if not out.is_floating_point():
            _hold(torch.equal(out, r), f"{label} differs")
            continue
        if out.numel() == 0:
            continue
        _hold(
            torch.equal(out.isfinite(), r.isfinite()), f"{label} is finite where the reference is not, or the reverse"
        )
        finite = r.isfinite()
        e, r, out, eps = e[finite].double(), r[finite].double(), out[finite].double(), torch.finfo(out.dtype).eps
        if out.numel() == 0:
            continue
        for measure, norm in (("worst", lambda t: t.abs().max()), ("rms", lambda t: t.square().mean().sqrt())):
            allowed = 2 * (norm(r - e) + eps * norm(e))
            error = norm(out - e)
            _hold(error <= allowed, f"{label}: {measure} error {error:.3g}, allowed {allowed:.3g}")
            if error:
                share = max(share, (error / allowed).item())
    return share


def _hold(condition, message):
    """Raise an AssertionError unless `condition` holds, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def _floats(x):
    return torch.is_tensor(x) and x.is_floating_point()
