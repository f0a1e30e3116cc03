"""The decorator `op`, which chooses an implementation by device.

    @op
    def rms_norm(x, weight, eps=1e-6):          # signature, docs, CPU path and parity oracle
        return ...

    @rms_norm.register("triton")                # any GPU
    @rms_norm.register("amd:gfx942")            # this GPU only, and preferred there

It is like `functools.singledispatch`, keyed by the device and the dtype of the first tensor, or of the first one of a
list or tuple.
"""

import functools
import inspect
import logging
from collections import namedtuple
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, get_args, overload

import torch
from torch.compiler import is_compiling

from liger_hw import backends
from liger_hw._torch import constant_result, is_dtensor, is_exporting
from liger_hw._triton import AVAILABLE
from liger_hw.checks import KERNEL_DTYPES, PLAIN_NUMBER_TYPES, explain, plain_numbers, refuse_dtype
from liger_hw.dispatch.generated import arguments_by_name, define
from liger_hw.sharding import by_shards
from liger_hw.spelling import check_known

logger = logging.getLogger("liger_hw.dispatch")
FUSED_VALUES = 2**24  # 2,048 rows of 8,192 columns: an H100 moves three such tensors in 30 us
OPS = {}  # name -> op, for the parity matrix and the docs
P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class OpFunction(Protocol[P, R]):
    """Tell type checkers that a call takes the reference's arguments.

    Other attributes are those of `Op`.
    """

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def __getattr__(self, name: str) -> Any: ...


@overload
def op(reference: Callable[P, R]) -> OpFunction[P, R]: ...
@overload
def op(*, validate=None, dtypes=KERNEL_DTYPES, fusible=False) -> Callable[[Callable[P, R]], OpFunction[P, R]]: ...
def op(reference=None, *, validate=None, dtypes=KERNEL_DTYPES, fusible=False):
    """Make an op of `reference`, its default implementation, documentation and oracle.

    The result is a function with the methods of `Op` and the attributes that are documented there.

    Args:
        validate: a function of some of the op's arguments, taken by name, which raises a ValueError for a wrong one.
            It runs before each implementation.
        dtypes: those of the first tensor that kernels take; plain torch serves the others.
        fusible: torch.compile computes small tensors by the reference; see `compiler_fuses`.
    """
    if reference is None:
        return functools.partial(op, validate=validate, dtypes=dtypes, fusible=fusible)
    return Op(reference, validate, dtypes, fusible).function


class Op:
    """A reference, its implementations, and the rules for all of them.

    Attributes:
        function: what programs call. It has the public attributes and methods below, too.
        reference: plain torch.
        implementations: backend -> function of the op's signature, which checks its arguments.
        dtypes: as in `op`.
        arguments: a named tuple of all arguments.
        cost_of: the formula given to `cost`.
    """

    def __init__(self, reference, validate, dtypes, fusible):
        self.name, self.reference, self.dtypes, self._validate = reference.__name__, reference, dtypes, validate
        self._fusible = fusible
        self._parameters = inspect.signature(reference).parameters
        self._first = next(iter(self._parameters))
        defaults = reference.__defaults__
        self.arguments = namedtuple(f"{self.name}_arguments", self._parameters, defaults=defaults)
        self.implementations, self._chosen, self._rule = {"reference": self._checked(reference)}, {}, None
        self._logged = set()
        self.function = self._function()
        public = "reference implementations dtypes arguments choose runs register shards cost"
        for name in public.split():
            setattr(self.function, name, getattr(self, name))
        OPS[self.name] = self.function

    def _function(self):
        first, chosen, implementations, reference = self._first, self._chosen, self.implementations, self.reference
        name, remember, on_shards, fusible = self.name, self._remember, self._on_shards, self._fusible

        @functools.wraps(reference)
        def call(*args, **kwargs):
            if is_compiling():
                x = args[0] if args else kwargs[first]
                x = x[0] if isinstance(x, (list, tuple)) else x
                by_reference = fusible and compiler_fuses(x) or _exports_a_backward()
                kind = x.device.type, x.device.index, x.dtype
                choice = "reference" if by_reference else _choice_while_tracing(name, *kind)
                implementation = implementations[choice]
                return (on_shards(implementation) if is_dtensor(x) else implementation)(*args, **kwargs)
            try:
                x = args[0] if args else kwargs[first]
                kind = type(x)
                if kind is list or kind is tuple:
                    x = x[0]
                    kind = type(x)
                # `_forced` itself, because a call of `forced()` would cost more than the look-up
                implementation = chosen.get((kind, x.device, x.dtype, backends._forced)) or remember(x)
                return implementation(*args, **kwargs)
            except Exception as error:
                explain(error, reference, args, kwargs)
                raise

        return call

    def _remember(self, x):
        """Choose an implementation for `x` and the tensors that have its type, device and dtype."""
        implementation = self.implementations[self.choose(x.device, x.dtype)]
        if is_dtensor(x):
            implementation = self._on_shards(implementation)
        self._chosen[(type(x), x.device, x.dtype, backends.forced())] = implementation
        return implementation

    def choose(self, device, dtype=None):
        """Return the first backend of the chain of `device` that has an implementation.

        A `dtype` that kernels would round, such as fp64, runs the reference; None means one that they take. Level DEBUG
        logs the choice and its reason; an op remembers its choices, so each device and dtype is logged once.

        Raises:
            ValueError: kernels are forced and would round that `dtype`.
            NotImplementedError: the backend that is forced has no implementation.
        """
        dtype = dtype or self.dtypes[0]
        forced, reason = backends.forced(), "the most specific one for this device"
        if forced is not None:
            reason = f"{forced!r} is forced"
        elif not AVAILABLE:
            reason = "the package triton is not installed"
        if dtype not in self.dtypes and forced is None:
            names, reason = backends.CPU.backends, "kernels would round this dtype"  # plain torch, on any device
        else:
            names = backends.backends_for(device)
            if dtype not in self.dtypes and "reference" not in names:
                refuse_dtype(self._first, dtype, self.dtypes)
        for candidate in names:
            if candidate in self.implementations:
                choice = device, dtype, forced, candidate
                if choice not in self._logged:
                    self._logged.add(choice)
                    logger.debug("%s of %s on %s: implementation %r, %s", self.name, dtype, device, candidate, reason)
                return candidate
        raise NotImplementedError(
            f"{self.name} has no implementation for backend {forced!r}, which is forced here "
            f"(tried {', '.join(names)}); it has {', '.join(sorted(self.implementations))}. "
            f"Set LIGER_HW_BACKEND to one of them or unset it"
        )

    def runs(self, x, backend) -> bool:
        """Tell whether a call with `x`, a plain tensor, runs the implementation for `backend`."""
        known = self._chosen.get((type(x), x.device, x.dtype, backends._forced)) or self._remember(x)
        return known is self.implementations[backend]

    def register(self, backend, bound=False):
        """Make a function its implementation for `backend`, one of `Device.backends`.

        The function takes the op's arguments by position, after `validate`.

        Args:
            bound: it takes one argument instead, the op's `arguments`.
        """
        check_known("backend", backend, ("cpu", *backends.BACKENDS), "register takes")

        def decorator(implementation):
            self.implementations[backend] = self._checked(implementation, bound)
            self._chosen.clear()
            return implementation

        return decorator

    def _checked(self, implementation, bound=False):
        """Return `implementation` as a function of the op's signature that checks its arguments."""
        kinds = {name: {p.annotation, *get_args(p.annotation)} for name, p in self._parameters.items()}
        numbers = [name for name in kinds if kinds[name] & {float, int}]
        if self._validate is None and not bound and not numbers:
            return implementation
        names = ", ".join(self._parameters)
        checks = self._validate and f"validate({arguments_by_name(self._validate, self._parameters)})"
        known = " and ".join(f"type({name}) in PLAIN_NUMBER_TYPES" for name in numbers) or None
        plain = f"{', '.join(numbers)}, = plain_numbers(*OTHERS, {', '.join(f'{name}={name}' for name in numbers)})"
        source = f"""
            def {self.name}({names}):
                if not ({known or True}):
                    {plain if numbers else None}
                {checks}
                return implementation({f"arguments({names})" if bound else names})
        """
        functions = define(
            self.name, source, validate=self._validate, implementation=implementation, arguments=self.arguments,
            PLAIN_NUMBER_TYPES=PLAIN_NUMBER_TYPES, plain_numbers=plain_numbers,
            OTHERS=[[name for name in numbers if kind in kinds[name]] for kind in (torch.Tensor, str)],
        )  # fmt: skip
        checked = functools.update_wrapper(functions[self.name], implementation)
        checked.__defaults__ = self.reference.__defaults__
        return checked

    def shards(self, rule=None, **constant):
        """Give the op its rule for DTensors, in the arguments of `by_shards`.

        Args:
            rule: a function of the op's `arguments` that returns them, changed or not, and the rule for this call.
        """
        self._rule = rule or (lambda arguments: (arguments, constant))
        return rule

    def _on_shards(self, implementation):
        if self._rule is None:
            raise NotImplementedError(
                f"{self.name} has no rule for DTensors: pass each rank's part, to_local(), where that gives the right "
                f"result"
            )

        def run(*args, **kwargs):
            bound, rule = self._rule(self.arguments(*args, **kwargs))
            return by_shards(implementation, bound, **rule)

        return run

    def cost(self, formula):
        """Make a function of the op's arguments its `Cost`, to which measured times are compared."""
        self.function.cost_of = formula
        return formula


def compiler_fuses(x, wider=1) -> bool:
    """Tell whether code that torch.compile writes computes a fusible op of `x` by its reference.

    An op's call from compiled code costs 40 us (an H200's host), more than kernels of small tensors take. The compiler
    fuses the reference: a step of Llama-1B with 512 tokens takes 47.6 ms for 57.9 (H200). With 4,096 tokens it would be
    as fast as the kernels, and take 12.9 GiB for 11.6. A forced backend runs its kernels.

    Args:
        wider: how many times more values than `x` the largest tensor has.
    """
    return is_compiling() and not _is_forced() and not _is_large(x.numel() * wider)


def _is_large(values):
    """Tell whether a tensor of so many values is for the kernels.

    Sizes that depend on data take no guard, and one would break a range that a program declares, or that an exported
    program promises: there False, unless no size of them is small.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true  # imports the compiler

    if statically_known_true(values > FUSED_VALUES):
        return True
    has_range = torch.compiler.is_exporting() or statically_known_true(values < 2**62)
    return not has_range and guard_or_false(values > FUSED_VALUES)


def _exports_a_backward():
    """Tell whether torch.export, which keeps no backward of kernels, runs where autograd records."""
    return is_exporting() and torch.is_grad_enabled() and not _is_forced()


@constant_result
def _is_forced():
    return backends.forced() is not None


@constant_result
def _choice_while_tracing(name, device_type, index, dtype):
    """Choose without tracing: the compiler sees the chosen function alone."""
    return OPS[name].choose(torch.device(device_type, index), dtype)
