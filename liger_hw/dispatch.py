"""Two decorators: `op` chooses an implementation by device, `raw` shows launches to tracers as ops.

    @op
    def rms_norm(x, weight, eps=1e-6):          # signature, docs, CPU path and parity oracle
        return ...

    @rms_norm.register("triton")                # any GPU
    @rms_norm.register("amd:gfx942")            # this GPU only, and preferred there

`op` is like `functools.singledispatch`, keyed by the device and the dtype of the first tensor, or of the first one of a
list or tuple.
"""

import functools
import inspect
import logging
from collections import namedtuple
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from liger_hw import backends
from liger_hw._torch import PLAIN, constant_result, dispatch_modes, has_tangents, is_dtensor, transforms_active
from liger_hw._triton import AVAILABLE
from liger_hw.checks import KERNEL_DTYPES, UnreadableTensor, explain, refuse_dtype
from liger_hw.hooks import hooks
from liger_hw.sharding import by_shards
from liger_hw.tuning import Refused

logger = logging.getLogger(__name__)
OPS = {}  # name -> op, for the parity matrix and the docs


class Cost(NamedTuple):
    """The fewest bytes that an op can move, and the fewest operations it can do.

    Bytes are read from and written to memory. A multiplication, an addition, a comparison and an exponential are one
    operation each.
    """

    forward_bytes: int
    backward_bytes: int
    forward_flops: int
    backward_flops: int


def widen(x):
    """Return `x` in fp32 or wider; float64 stays, for the tests' oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def uncast(x):
    """Return a context without autocast for the device of `x`."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)  # it does not know "meta"


def op(reference):
    """Make an op of `reference`, its default implementation, documentation and oracle.

    The op has the attributes `reference`, `implementations` (backend -> function), and `choose`, `register`, `cost` and
    `shards`, which are documented below; `cost_of`, the formula, where one was given; `dtypes`, those of the first
    tensor that kernels take, which an op of integers replaces.
    """
    implementations, chosen, name = {"reference": reference}, {}, reference.__name__
    parameters = inspect.signature(reference).parameters
    first = next(iter(parameters))
    defaults = [p.default for p in parameters.values() if p.default is not p.empty]
    arguments = namedtuple(f"{name}_arguments", parameters, defaults=defaults)

    def choose(device, dtype=None):
        """Return the first backend of the chain of `device` that has an implementation.

        Plain torch serves a `dtype` that kernels would round; None means one that they take. Level DEBUG logs the
        choice and its reason; an op remembers its choices, so each device and dtype is logged once.

        Raises:
            ValueError: kernels are forced and would round that `dtype`.
            NotImplementedError: the backend that is forced has no implementation.
        """
        dtype = dtype or call.dtypes[0]
        forced, reason = backends.forced(), "the most specific one for this device"
        if forced is not None:
            reason = f"{forced!r} is forced"
        elif not AVAILABLE:
            reason = "the package triton is not installed"
        if dtype not in call.dtypes and forced is None:
            names, reason = backends.CPU.backends, "kernels would round this dtype"  # plain torch, on any device
        else:
            names = backends.backends_for(device)
            if dtype not in call.dtypes and "reference" not in names:
                refuse_dtype(first, dtype, call.dtypes)
        for candidate in names:
            if candidate in implementations:
                logger.debug("%s of %s on %s: implementation %r, %s", name, dtype, device, candidate, reason)
                return candidate
        raise NotImplementedError(
            f"{name} has no implementation for backend {forced!r}, which is forced here "
            f"(tried {', '.join(names)}); it has {', '.join(sorted(implementations))}. "
            f"Set LIGER_HW_BACKEND to one of them or unset it"
        )

    @functools.wraps(reference)
    def call(*args, **kwargs):
        if is_compiling():
            x = args[0] if args else kwargs[first]
            x = x[0] if isinstance(x, (list, tuple)) else x
            implementation = implementations[_choice_while_tracing(name, x.device.type, x.device.index, x.dtype)]
            return (on_shards(implementation) if is_dtensor(x) else implementation)(*args, **kwargs)
        try:
            x = args[0] if args else kwargs[first]
            kind = type(x)
            if kind is list or kind is tuple:
                x = x[0]
                kind = type(x)
            device, dtype = x.device, x.dtype
            # `_forced` itself, because a call of `forced()` would cost more than the look-up
            implementation = chosen.get((kind, device, dtype, backends._forced))
            if implementation is None:
                implementation = implementations[choose(device, dtype)]
                if is_dtensor(x):
                    implementation = on_shards(implementation)
                chosen[(kind, device, dtype, backends.forced())] = implementation
            return implementation(*args, **kwargs)
        except Exception as error:
            explain(error, reference, args, kwargs)
            raise

    def register(backend, bound=False):
        """Make a function of the op's signature its implementation for `backend`, one of `Device.backends`.

        Args:
            bound: the function takes one argument instead, the op's `arguments`: a named tuple of all of them.
        """

        def decorator(implementation):
            def bind(*args, **kwargs):
                return implementation(arguments(*args, **kwargs))

            implementations[backend] = bind if bound else implementation
            chosen.clear()
            return implementation

        return decorator

    def shards(rule=None, **constant):
        """Give the op its rule for DTensors, in the arguments of `by_shards`.

        Args:
            rule: a function of the op's `arguments` that returns them, changed or not, and the rule for this call.
        """
        call.rule = rule or (lambda arguments: (arguments, constant))
        return rule

    def on_shards(implementation):
        if call.rule is None:
            raise NotImplementedError(
                f"{name} has no rule for DTensors: pass each rank's part, to_local(), where that gives the right result"
            )

        def run(*args, **kwargs):
            bound, rule = call.rule(arguments(*args, **kwargs))
            return by_shards(implementation, bound, **rule)

        return run

    def cost(formula):
        """Make a function of the op's arguments its `Cost`, to which measured times are compared."""
        call.cost_of = formula
        return formula

    call.reference, call.register, call.implementations, call.choose = reference, register, implementations, choose
    call.cost, call.arguments, call.shards, call.rule, call.dtypes = cost, arguments, shards, None, KERNEL_DTYPES
    OPS[name] = call
    return call


@constant_result
def _choice_while_tracing(name, device_type, index, dtype):
    """Choose without tracing: the compiler sees the chosen function alone."""
    return OPS[name].choose(torch.device(device_type, index), dtype)


class Function(torch.autograd.Function):
    """An autograd function of kernels: first-order, and cheaper to call than torch's own.

    torch's `apply` searches every argument for the wrappers of functorch, which only matters within a transform, and
    makes a graph node even where gradients are off: 1.6 us (an x86 CPU) and 5 us (an H200's host).

    Attributes:
        instead: the advice in the errors below.

    Raises:
        RuntimeError: a backward with create_graph=True, whose second-order terms no kernel computes; an argument with a
            tangent of forward-mode AD.
    """

    instead = "run under liger_hw.use_backend('reference')"

    def __init_subclass__(cls):
        if "backward" in vars(cls):  # not where a base has wrapped it
            backward = cls.backward

            @functools.wraps(backward)
            def first_order(ctx, *grads):
                if torch.is_grad_enabled() and not is_compiling():
                    raise RuntimeError(
                        f"{cls.__name__} has no second-order gradients: call backward without create_graph=True, or "
                        f"{cls.instead}"
                    )
                return backward(ctx, *grads)

            cls.backward = staticmethod(first_order)
        cls._node = super(torch.autograd.Function, cls).apply  # torch's in C, which searches for no wrappers

    @classmethod
    def apply(cls, *args):
        if is_compiling() or transforms_active():
            return super().apply(*args)
        if has_tangents(args):  # without a graph they would be lost, and a missing tangent counts as zero
            raise RuntimeError(f"{cls.__name__} has no forward-mode derivatives: {cls.instead}")
        if not torch.is_grad_enabled():
            return cls.forward(_NoGraph(), *args)
        return cls._node(*args)


class _NoGraph:
    """The context of a forward without a backward, which keeps nothing."""

    needs_input_grad = (False,) * 32  # no function has more arguments

    def save_for_backward(self, *tensors):
        pass

    mark_non_differentiable = set_materialize_grads = save_for_backward


_library = torch.library.Library("liger_hw", "DEF") if AVAILABLE else None


def raw(fake=None, mutates=()):
    """Register a function that launches kernels as an op of `torch.ops.liger_hw`.

    Eager calls run the function itself: a registered op with autograd costs 36 us more a step (an H200's host). Under
    torch.compile or a dispatch mode (FakeTensor, selective checkpointing, FLOP counting) and for a tensor subclass, the
    call goes to the registered op, which they can see, save, shard or refuse.

    A parameter annotated with a NamedTuple is one argument of the function and of its fake. The registered op has one
    for each field, named after both.

    Args:
        fake: a function of the same arguments that returns empty outputs of the right shapes and dtypes.
        mutates: names of the tensor arguments written to. Such a function launches one kernel, so nothing is written
            yet if that launch is refused, and the function can run again with another configuration.
    """

    def decorate(function):
        name = function.__name__.strip("_")
        if _library is None:
            return function
        prototype, flatten, rebuild = _flat(function)
        _library.define(name + torch.library.infer_schema(prototype, mutates_args=mutates))

        @functools.wraps(function)
        def run_until_accepted(*args):
            while True:
                try:
                    return function(*args)
                except Refused:  # by the compiler or the driver, at a first launch: look up another configuration
                    pass

        @functools.wraps(function)
        def run_observed(*args):
            if hooks.observer is not None:
                return hooks.observer(run_until_accepted, args, not mutates)
            return run_until_accepted(*args)

        _library.impl(name, lambda *flat: run_observed(*rebuild(flat)), "CompositeExplicitAutograd")
        empty_outputs = fake or _fakes_nothing
        torch.library.register_fake(f"liger_hw::{name}", lambda *flat: empty_outputs(*rebuild(flat)), lib=_library)
        opaque = getattr(torch.ops.liger_hw, name).default

        @functools.wraps(function)
        def call(x, *args):
            if is_compiling() or dispatch_modes() or type(x) not in PLAIN:
                return opaque(x, *flatten(args))
            if hooks.observer is not None:
                return run_observed(x, *args)
            try:  # not `run_until_accepted` at once: one call fewer
                return function(x, *args)
            except Refused:
                return run_until_accepted(x, *args)
            except UnreadableTensor:  # such as a gradient that torch still receives from other ranks
                return opaque(x, *flatten(args))

        call.opaque = opaque
        return call

    return decorate


def _fakes_nothing(*args):
    """Return no output, for functions that only write to their arguments."""


def _flat(function):
    """Spread NamedTuple parameters of a function into their fields, as torch's schemas require.

    Returns:
        (a prototype of that signature, the arguments after the first -> flat ones, all flat ones -> the arguments).
    """
    signature = inspect.signature(function)
    kinds = [p.annotation if hasattr(p.annotation, "_fields") else None for p in signature.parameters.values()]
    spread = []
    for p, kind in zip(signature.parameters.values(), kinds):
        fields = kind.__annotations__.items() if kind else ()
        spread += [p.replace(name=f"{p.name}_{name}", annotation=of_field) for name, of_field in fields] or [p]

    def prototype():
        """Tell `infer_schema` its signature; nothing calls it."""

    prototype.__signature__ = signature.replace(parameters=spread)

    def flatten(args):
        return [value for arg, kind in zip(args, kinds[1:]) for value in (arg if kind else (arg,))]

    def rebuild(flat):
        values = iter(flat)
        return [kind(*(next(values) for _ in kind._fields)) if kind else next(values) for kind in kinds]

    return prototype, flatten, rebuild
