"""Check an op against its reference by the one rule of tests and benchmarks.

Errors are differences from the reference in float64. A kernel's error may be at most twice the sum of two: the error of
the reference in the kernel's dtypes, and one rounding. Nobody sets a tolerance by hand. The rule holds for

- the worst element, and the root mean square of the whole result;
- the root mean square of each row, and of each slice of a dimension: a column, a head, a batch;
- the bias of the whole result, of each row and of each slice: the error's projection on the exact values, and on their
  signs. Roundings are independent, so that in a projection of n values they cancel to one rounding by the root of n. An
  error of one sign does not: in a few hundred values of 16 bits, half a rounding is more than the rule allows.
"""

import torch

from liger_hw import use_backend
from liger_hw._torch import tree_leaves, tree_map_only
from liger_hw._triton import interpreting
from liger_hw.hooks import hooks

FP32_ROUNDOFF = 2.0**-24  # the unit roundoff of fp32, in which kernels compute
# The largest error in fp32 that many values may share, such as that of rstd: GPUs compute exponentials, roots and
# quotients to 2^-22 (PTX ISA: ex2.approx, div.full). Below it, a bias of fp32 results is no mistake of an op:
# qk_norm_rope of 6 tokens has 0.7 roundings in 15,360 values, from 6 roots that are rounded correctly.
SHARED = 2.0**-22
MULTIPLE = 16  # times that values of a result occur, from which on their roundings are not independent
FEW = 64  # in fewer values, chance is more than half a rounding
SHARES = "its values as shares of their roundings"


def run(function, inputs, options, seed=1):
    """Return the outputs and gradients of `function` for random gradients of its outputs.

    The seed differs from the inputs': with dy = x the gradient of a norm vanishes.
    """
    leaves = tree_map_only(torch.Tensor, _leaf, list(inputs))
    outs = function(*leaves, **options)
    outs = [out for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None]
    generator = torch.Generator().manual_seed(seed)
    diffable = [out for out in outs if out.requires_grad]
    grads = [torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out) for out in diffable]
    if diffable:
        torch.autograd.backward(diffable, grads)
    learning = [x for x in tree_leaves(leaves) if torch.is_tensor(x) and x.requires_grad]
    return [out.detach() for out in outs] + [x.grad for x in learning]


def _leaf(x):
    return x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x.requires_grad)


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
        compare(exact, reference, outputs, f"{op.__name__} on {backend}", inputs)
    except Exception as error:
        _tell_observer(op, inputs, backend, error)
        raise
    _tell_observer(op, inputs, backend, None)


def expected(op, inputs, options) -> tuple[list, list]:
    """Return the reference's outputs and gradients in float64, and in the inputs' dtypes."""
    wide = tree_map_only(torch.Tensor, _widened, list(inputs))
    return run(op.reference, wide, options), run(op.reference, inputs, options)


def _widened(x):
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


def _tell_observer(op, inputs, backend, error):
    if hooks.check_observer is not None:
        hooks.check_observer(op, inputs, backend, error)


def compare(exact, reference, outputs, name, inputs=()):
    """Compare `outputs` with float64 `exact`; `reference`, in the same dtypes, sets the allowed error.

    Args:
        exact, reference, outputs: lists of tensors or None.
        name: of what is compared, for the error.
        inputs: those of the op, whose dtypes say whether the interpreter truncated; see `_rounding`.

    Returns:
        the largest error as a share of the allowed one, 0 to 1.

    Raises:
        AssertionError: says which output of `name` differs and by how much.
    """
    share, truncated = 0.0, interpreting() and any(_is_bf16(x) for x in (*inputs, *outputs))
    _hold(len(outputs) == len(exact) == len(reference), f"{name}: {len(outputs)} outputs, expected {len(reference)}")
    for i, (e, r, out) in enumerate(zip(exact, reference, outputs)):
        label = f"output {i} of {name}"
        if e is None or out is None:
            _hold(e is None and out is None and r is None, f"{label} is None on one side only")
            continue
        _hold(out.shape == r.shape, f"{label}: shape {tuple(out.shape)}, expected {tuple(r.shape)}")
        _hold(out.dtype == r.dtype, f"{label}: {out.dtype}, expected {r.dtype}")
        dtype = out.dtype
        if not out.is_floating_point():
            _hold(torch.equal(out, r), f"{label} differs")
            continue
        if out.numel() == 0:
            continue
        _hold(
            torch.equal(out.isfinite(), r.isfinite()), f"{label} is finite where the reference is not, or the reverse"
        )
        finite = r.isfinite()
        e, r, out = (torch.where(finite, t.double(), 0.0) for t in (e, r, out.detach()))
        for measure, error, allowed in _measures(e, r - e, out - e, _rounding(e, dtype, truncated), not truncated):
            ratio = torch.where(error > 0, error / allowed, 0.0)
            worst = ratio.argmax()
            if not ratio[worst] <= 1:
                measure = measure.format(worst.item())
                _hold(False, f"{label}: {measure} {error[worst]:.3g}, allowed {allowed[worst]:.3g}")
            share = max(share, ratio[worst].item())
    return share


def _rounding(exact, dtype, truncated):
    """Return the largest errors of one rounding to `dtype` and one in fp32.

    Triton's interpreter truncates to bf16 where hardware rounds: up to a whole unit in the last place instead of half
    of one, and always towards zero. There, an op with a tensor in bf16 is held to that unit, and not to the tests of
    bias and of rows; the same kernel in fp16, which the interpreter rounds, is.
    """
    facts = torch.finfo(dtype)
    units = 1 if truncated and dtype == torch.bfloat16 else 0.5
    smallest = facts.smallest_normal * facts.eps  # the distance of values below the normal ones
    return ((units * facts.eps + FP32_ROUNDOFF) * exact.abs()).clamp(min=units * smallest)


def _measures(exact, reference_error, error, rounding, strict):
    """Yield (name, errors, allowed errors) of `error`; `reference_error` is the reference's.

    Args:
        exact, reference_error, error: float64, of one shape.
        rounding: see `_rounding`.
        strict: whether to test rows, slices and bias.
    """
    yield "worst error", error.abs().max()[None], 2 * (reference_error.abs().max() + rounding.max())[None]
    for name, slices in _slices(exact.shape) if strict else [_WHOLE]:
        e, g, d, once = (slices(t).flatten(1) for t in (exact, reference_error, error, rounding))
        shared = SHARED * e if name else torch.zeros_like(e)
        yield f"rms error{name}", _rms(d), 2 * (_rms(g).max() + _rms(once) + _rms(shared))
        for along, direction in _directions(e, once) if strict else ():
            bias, reference_bias = ((t * direction).sum(1).abs() for t in (d, g))
            variance = ((g.square() + once.square()) * direction.square()).sum(1)
            variance += (SHARED * (e * direction).sum(1)).square()
            # errors that the values of a row or of a column share, such as that of a rounded rstd
            table = (g * direction).view(slices(exact).shape)
            variance += table.sum(1).square().sum(1) + table.sum(2).square().sum(1)
            # Of many slices one exceeds twice by chance: 1.3 times in fp32. Among shares of roundings small values
            # decide alone, and kernels round them more often than the reference: 1.9 times in bf16 on an H100.
            factor = 4 if along == SHARES else 3 if name else 2
            if (bias > factor * (reference_bias.max() + variance.sqrt())).any():
                variance += _repeated(e, once * direction)
            yield f"bias{name} along {along}", bias, factor * (reference_bias.max() + variance.sqrt())


def _repeated(exact, roundings):
    """Return the variance of each row's sum where equal exact values have one rounding.

    The exponentials of 50,257 log-probabilities in bf16 are a few dozen different values. Of rows with more than one
    value in MULTIPLE that is different, 0: there equal values are chance.
    """
    values, order = exact.sort(dim=1)
    different = values.diff(dim=1, prepend=values[:, :1]) != 0
    sums = torch.zeros_like(values).scatter_add_(1, different.cumsum(1), roundings.gather(1, order))
    few = MULTIPLE * (different & (values != 0)).sum(1) <= (values != 0).sum(1)
    return torch.where(few, sums.square().sum(1), 0)


def _directions(exact, rounding):
    """Yield names and unit vectors of the directions of bias, for each row."""
    yield "the exact result", _unit(exact)
    yield "its sign", _unit(exact.sign())
    if len(exact) == 1 and exact.numel() >= FEW:
        # each value counts by its error, or one value of a hundred, such as a target's gradient, decides alone
        yield SHARES, _unit(exact / (rounding.square() + (SHARED * exact.abs().max()).square()))


def _unit(rows):
    return torch.nn.functional.normalize(rows, dim=1, eps=1e-150)  # of zeros: zeros


def _matrices(t):
    """Make a matrix of each entry of the first dimension; columns stay columns."""
    return t.reshape(t.shape[0], -1, t.shape[-1] if t.ndim > 1 else 1)


_WHOLE = "", lambda t: _matrices(t[None])


def _slices(shape):
    """Yield pairs of a name and a function that makes a matrix of each slice.

    The slices are the whole, rows of the last dimension, and what has one index in a dimension.
    """
    yield _WHOLE
    if len(shape) > 2:
        yield " of row {}", lambda t: t.reshape(-1, 1, t.shape[-1])
    for dim, size in enumerate(shape) if len(shape) > 1 else ():
        if size > 1:
            yield f" of slice {{}} of dimension {dim}", lambda t, dim=dim: _matrices(t.movedim(dim, 0))


def _rms(matrix):
    return matrix.square().mean(1).sqrt()


def _hold(condition, message):
    """Raise an AssertionError unless `condition` holds, also under `python -O`."""
    if not condition:
        raise AssertionError(message)


def _is_bf16(x):
    return torch.is_tensor(x) and x.dtype == torch.bfloat16
