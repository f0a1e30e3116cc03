"""Run a module's forward and an op on the same random rows, and compare.

The probe is a shallow copy of the module on the CPU with random weights. Its float attributes get values that change
the result: an initial norm weight of 1 and a small eps would hide the norm's arithmetic. The probe changes neither the
module, its weights and its device nor any global random generator.
"""

import contextlib
import contextvars
import functools
import inspect
import warnings

import torch

from liger_hw._torch import TorchDispatchMode, without_global_module_hooks, without_modes

PROBE_DTYPES = (torch.float32, torch.bfloat16)
VISIBLE = 0.37  # at this value, a float attribute that the forward uses changes the result
_uses_actual_floats = contextvars.ContextVar("uses_actual_floats", default=False)


class OwnGenerator(TorchDispatchMode):
    """Generator of dropout's random numbers that always starts at the same seed.

    An operation that takes no generator fails, so no probe uses a global one.
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
    """Tell whether both functions return bitwise equal values of equal dtypes for every case.

    Args:
        original: a model's function or forward. If it fails, the functions do not agree.
        replacement: a function that computes the same with an op's reference.
        cases: tuples of arguments.
        exact: False allows another order of fp32 sums.
    """
    return reproduces(replacement, outputs(original, cases), cases, exact)


def outputs(original, cases):
    """Return the results of `original` for all cases, or None if one fails."""
    try:
        return [_run(original, case) for case in cases]
    except Exception:  # a model's own code may raise any exception on a probe
        return None


def reproduces(replacement, expected, cases, exact=True):
    """Tell whether `replacement` returns the `expected` results of `outputs` for all cases."""
    if expected is None or not depends_on_inputs(expected):
        return False
    try:
        return all(equal(_run(replacement, case), output, exact) for case, output in zip(cases, expected))
    except Exception:  # an op may refuse its arguments
        return False


def _run(function, case):
    return run(lambda: function(*case))


def run(function, observer=None, grad=False, draws=True):
    """Call a function without the program's modes, hooks on all modules, warnings and generators.

    Args:
        observer: a mode in which to call it.
        grad: whether autograd records.
        draws: False where it is known to draw no random numbers: a mode costs 10 us an operation.
    """
    generator, observer = OwnGenerator() if draws else contextlib.nullcontext(), observer or contextlib.nullcontext()
    with without_modes(), without_global_module_hooks(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=False), generator, observer:
            return function()


def equal(actual, expected, exact=True):
    """Tell whether results are bitwise equal, dtype included; NaN equals NaN.

    Args:
        exact: False allows another order of fp32 sums.
    """
    if isinstance(actual, tuple):
        return (
            type(expected) is tuple
            and len(expected) == len(actual)
            and all(equal(a, e, exact) for a, e in zip(actual, expected))
        )
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return False
    if exact:
        return bool(((actual == expected) | actual.isnan() & expected.isnan()).all())
    is_finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), is_finite):
        return False
    actual, expected = actual[is_finite], expected[is_finite]
    if not len(actual):
        return True
    if actual.dtype == torch.float32:
        return bool((actual - expected).abs().max() <= 8 * torch.finfo(torch.float32).eps * expected.abs().max())
    # bf16 results differ where the fp32 sum lies near a tie; another order of rounding changes over 10% of them
    return bool((actual != expected).float().mean() < 0.01)


def depends_on_inputs(results):
    """Tell whether results vary, which those of a function that ignores its inputs do not."""
    flat = [x for result in results for x in tensors(result)]
    return bool(flat) and all(len(x.flatten().unique()) > 1 for x in flat)


def tensors(value):
    """Return the tensors in a value: those of modules, dictionaries, lists and tuples too."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, torch.nn.Module):
        return list(value.parameters())
    if isinstance(value, dict):
        value = list(value.values())
    return [x for item in value for x in tensors(item)] if isinstance(value, (list, tuple)) else []


def linear(weight, bias=None):
    """Return a linear layer with these values."""
    values = {name: x if x is None else torch.nn.Parameter(x) for name, x in (("weight", weight), ("bias", bias))}
    return _shallow_copy(_linear_of(torch.nn.Linear, *weight.shape, bias is not None), {"_parameters": values})


@functools.lru_cache(64)
def _linear_of(cls, rows, cols, bias):
    """Return a linear layer without values, whose initial values would take longer than a probe."""
    return cls(cols, rows, bias, device="meta")


def random_rows(generator, *shape, dtype=torch.float32):
    """Draw normal random numbers on the CPU, independent of the default dtype and device."""
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def random_bytes(generator, *shape):
    """Draw uniform random bytes on the CPU."""
    return torch.randint(256, shape, generator=generator, device="cpu", dtype=torch.uint8)


def case_of(width, rows=1, weights=0):
    """Return a function of (dtype, leading dimensions) that draws rows (*, width), then weights (width,)."""

    def case(dtype, shape):
        random = generator()
        drawn = [random_rows(random, *shape, width, dtype=dtype) for _ in range(rows)]
        return *drawn, *(torch.nn.Parameter(random_rows(random, width, dtype=dtype)) for _ in range(weights))

    return case


def generator():
    """Return a random generator on the CPU with seed 0."""
    return torch.Generator().manual_seed(0)


def copy_of(module, parameters, modules, **attributes):
    """Copy `module` with other parameters and children, without hooks, float attributes `VISIBLE`.

    Within `actual_floats` they keep their values, unless `attributes` has others.
    """
    floats = {} if uses_actual_floats() else dict.fromkeys(float_attributes(module), VISIBLE)
    return _shallow_copy(module, floats | {"_parameters": parameters, "_modules": _without_hooks(modules)} | attributes)


@contextlib.contextmanager
def actual_floats():
    """Let copies keep their float attributes within the block."""
    token = _uses_actual_floats.set(True)
    try:
        yield
    finally:
        _uses_actual_floats.reset(token)


uses_actual_floats = _uses_actual_floats.get


def copy_in_mode(module, training):
    """Copy a module (or None) and its children for training or evaluation."""
    if module is None:
        return None
    children = {name: copy_in_mode(child, training) for name, child in module._modules.items()}
    return _shallow_copy(module, {"training": training, "_modules": children})


def on_the_cpu(module):
    """Copy a module (or None) with random parameters on the CPU."""
    if module is None:
        return None
    random = generator()

    def values(tensors):
        return {name: x if x is None else random_rows(random, *x.shape, dtype=x.dtype) for name, x in tensors.items()}

    children = {name: on_the_cpu(child) for name, child in module._modules.items()}
    state = {"_parameters": values(module._parameters), "_buffers": values(module._buffers), "_modules": children}
    return _shallow_copy(module, state)


def without_hooks(module):
    """Return a shallow copy of `module` without its own and its children's hooks."""
    return _shallow_copy(module, {"_modules": _without_hooks(module._modules)})


def _without_hooks(modules):
    return {name: child if child is None else without_hooks(child) for name, child in modules.items()}


def _shallow_copy(module, attributes):
    copy = object.__new__(type(module))
    hooks = {name: type(value)() for name, value in vars(module).items() if name.endswith("_hooks")}
    copy.__dict__.update(vars(module) | hooks | attributes)
    return copy


def positional_inputs(module):
    """Return the names of a forward's positional parameters; none of code in C or torch.jit."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    try:
        parameters = inspect.signature(module.forward).parameters
    except ValueError:  # a function in C may have no signature
        return []
    return [name for name, p in parameters.items() if p.kind in kinds]


def direct_parameters(module):
    """Return name -> parameter of `module`, without its children's."""
    return {name: p for name, p in module._parameters.items() if p is not None}


def float_attributes(module):
    """Return name -> value of the module's plain attributes that are floats."""
    return {name: value for name, value in vars(module).items() if type(value) is float}
