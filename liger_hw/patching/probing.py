"""Run a module's forward on random rows beside an op, and compare.

What runs is a shallow copy of the module on the CPU with random weights. Its float attributes get values that show in
the result: a norm's fresh weight is one and its eps too small to see, and both would hide its arithmetic. The module
itself, its weights, its device and every global random generator are left alone.
"""

import inspect
import warnings

import torch

from liger_hw._torch import TorchDispatchMode

DTYPES = (torch.float32, torch.bfloat16)
VISIBLE = 0.37  # a float attribute that takes part in the arithmetic shows at this value


class OwnGenerator(TorchDispatchMode):
    """Draw random numbers (dropout's) from a generator that starts at the same seed each time.

    An operation that takes no generator fails, so that no global one is ever used.
    """

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            kwargs = kwargs | {"generator": self.generator}
        return func(*args, **kwargs)


def agree(original, replacement, cases, exact=True):
    """Tell whether both functions give equal bits and dtypes for every case.

    Args:
        original: a model's function or forward. One that fails does not agree.
        replacement: the same by the reference of an op.
        cases: tuples of arguments.
        exact: False allows another order of fp32 sums.
    """
    return reproduces(replacement, outputs(original, cases), cases, exact)


def outputs(original, cases):
    """What `original` returns for each case, or None where it fails for one."""
    try:
        return [_run(original, case) for case in cases]
    except Exception:  # of a model's own code on a probe, of any kind
        return None


def reproduces(replacement, expected, cases, exact=True):
    """Tell whether `replacement` returns for every case what `outputs` of the original did."""
    if expected is None:
        return False
    try:
        return all(_equal(_run(replacement, case), output, exact) for case, output in zip(cases, expected))
    except Exception:  # of an op, for what it refuses
        return False


def _run(function, case):
    with torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings(), OwnGenerator():
        warnings.simplefilter("ignore")
        return function(*case)


def _equal(actual, expected, exact):
    if isinstance(actual, tuple):
        return all(_equal(a, e, exact) for a, e in zip(actual, expected))
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if exact:
        return torch.equal(actual, expected)
    if actual.dtype == torch.float32:
        return (actual - expected).abs().max() <= 8 * torch.finfo(torch.float32).eps * expected.abs().max()
    # bf16 differs where fp32 lies near the middle of two values; another order of rounding changes over 10%
    return (actual != expected).float().mean() < 0.01


def random_rows(generator, *shape, dtype=torch.float32):
    """Normal random numbers on the CPU, the same of every default dtype and device."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def rows_of_each_dtype(*shape):
    """Cases of one argument, rows three times the usual size, in each of `DTYPES`."""
    random = generator()
    return [(3 * random_rows(random, *shape, dtype=dtype),) for dtype in DTYPES]


def generator():
    """A random generator on the CPU that starts at the same seed each time."""
    return torch.Generator().manual_seed(0)


def copy_of(module, parameters, modules, **attributes):
    """A module of the same class with other parameters and children, no hooks, and `VISIBLE` float attributes."""
    floats = dict.fromkeys(float_attributes(module), VISIBLE)
    return _shallow_copy(module, floats | {"_parameters": parameters, "_modules": _without_hooks(modules)} | attributes)


def without_hooks(module):
    """A shallow copy of `module` that calls no hooks, nor do its children."""
    return _shallow_copy(module, {"_modules": _without_hooks(module._modules)})


def _without_hooks(modules):
    return {name: child if child is None else without_hooks(child) for name, child in modules.items()}


def _shallow_copy(module, attributes):
    copy = object.__new__(type(module))
    hooks = {name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")}
    copy.__dict__.update(vars(module) | hooks | attributes)
    return copy


def positional_inputs(module):
    """The names of the parameters of a module's forward that one may give by position."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds]


def own_parameters(module):
    """name -> parameter of those that `module` itself has."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def float_attributes(module):
    """name -> value of the module's plain attributes that are floats."""
    return {name: value for name, value in vars(module).items() if type(value) is float}
