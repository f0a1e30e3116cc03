"""How a module is run on random rows beside an op, without touching it, and what is remembered of a match.

A probe is a shallow copy of the module on the CPU with random weights, every float attribute set to a telling value
(a norm's fresh weight is one and its eps too small to see; both hide its arithmetic). The module itself, its weights,
its device and torch's random state are not touched.
"""

import inspect
import warnings
from dataclasses import dataclass

import torch

from liger_hw._torch import TorchDispatchMode

DTYPES = (torch.float32, torch.bfloat16)
TELLING = 0.37  # a float attribute that takes part in the arithmetic shows at this value


@dataclass(frozen=True)
class Match:
    """An op, with the options and attributes that make it compute what a class computes.

    Attributes:
        kind: "norm", "gated_norm", "mlp", "activation", "experts", "sorted_experts", "rope", or the parts of a loss,
            "head" and "causal_lm".
        op: the name of the op, or "" where the kind says it.
        options: keyword arguments of the op, as sorted pairs.
        names: role -> attribute of the module, as pairs, None where it has no such part; for rope: global name ->
            `Rotation`.
        narrow, wide: the op agrees, too, where x has a narrower, a wider dtype than the weight; narrow of a gated norm:
            where there is no gate.
        pinned: attribute of the module -> value, as pairs: it computes this while they have these values.
    """

    kind: str
    op: str = ""
    options: tuple = ()
    names: tuple = ()
    narrow: bool = False
    wide: bool = False
    pinned: tuple = ()

    def __str__(self):
        options = ", ".join(f"{name}={value!r}" for name, value in self.options)
        if self.kind == "rope":
            options = "; ".join(sorted({str(rotation) for _, rotation in self.names} - {""}))
        return f"{self.op or self.kind}({options})" if options else self.op or self.kind


def match(kind, op, options, names, narrow=False, wide=False):
    return Match(kind, op.__name__, tuple(sorted(options.items())), tuple(names.items()), narrow, wide)


def _same(found, expected, exact):
    if isinstance(found, tuple):
        return all(_same(f, e, exact) for f, e in zip(found, expected))
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if exact:
        return torch.equal(found, expected)
    if found.dtype == torch.float32:
        return (found - expected).abs().max() <= 8 * torch.finfo(torch.float32).eps * expected.abs().max()
    return (found != expected).float().mean() < 0.01  # where fp32 lies on the edge; another order of rounding: 10% up


def random_rows(generator, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def clone(module, parameters, modules, **attributes):
    """A module of the same class with other parameters and children, and float attributes that show in the result."""
    found = object.__new__(type(module))
    state = {name: TELLING if type(value) is float else value for name, value in vars(module).items()}
    hooks = {name: type(value)() for name, value in state.items() if name.endswith("_hooks")}
    found.__dict__.update(state | hooks | {"_parameters": parameters, "_modules": modules} | attributes)
    return found


class OwnGenerator(TorchDispatchMode):
    """Draw random numbers (dropout's) from a generator that starts at the same seed each time; no global one is asked.

    An operation that takes no generator fails.
    """

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            kwargs = kwargs | {"generator": self.generator}
        return func(*args, **kwargs)


def agrees(original, replacement, cases, exact=True):
    """Whether both functions give the same bits on every case, or without `exact` the same to the order of fp32 sums.
    A function that cannot run a case does not agree."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return all(_same(_run(replacement, case), _run(original, case), exact) for case in cases)
    except Exception:  # a stranger's forward on a stand-in of its module may fail in any way: then nothing is proved
        return False


def _run(function, case):
    with OwnGenerator():
        return function(*case)


def inputs_of(module):
    """The parameters of a module's forward that one may give by position."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
    return [name for name, p in inspect.signature(module.forward).parameters.items() if p.kind in kinds]
