"""Two decorators: `op` picks who computes, `raw` hides a launch from tracers.

    @op
    def rms_norm(x, weight, eps=1e-6):          # signature, docs, CPU path and parity oracle
        return ...

    @rms_norm.register("triton")                # any GPU
    @rms_norm.register("amd:gfx942")            # this one only, and it wins there

`op` is `functools.singledispatch`, keyed by where the first tensor lives, and by its dtype.
"""

import functools
import inspect
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from liger_hw import backends
from liger_hw._torch import dispatch_modes, has_tangents, is_plain, transforms_active
from liger_hw._triton import AVAILABLE
from liger_hw.checks import KERNEL_DTYPES, explain, refuse_dtype
from liger_hw.hooks import hooks
from liger_hw.tuning import Refused

OPS = {}  # name -> op, for the parity matrix and the docs


class Cost(NamedTuple):
    """The fewest bytes an op must read from and write to memory, and the fewest operations it must do on them.

    A multiplication, an addition, a comparison and an exponential are one operation each.
    """

    forward_bytes: int
    backward_bytes: int
    forward_flops: int
    backward_flops: int


def widen(x):
    """At least fp32, for the arithmetic inside a reference; a float64 input stays float64 and makes it the oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def op(reference):
    """Make `reference` the default implementation, the documentation and the oracle of an op of its name."""
    implementations, chosen, name = {"reference": reference}, {}, reference.__name__
    first = next(iter(inspect.signature(reference).parameters))

    def choose(device, dtype=torch.float32):
        """The implementation that serves tensors on `device`: the first name of its chain that has one.

        Plain torch serves a `dtype` that kernels would round; where they are forced, it is refused.
        """
        if dtype not in KERNEL_DTYPES and backends.forced() is None:
            names = backends.CPU.backends
        else:
            names = backends.backends_for(device)
            if dtype not in KERNEL_DTYPES and "reference" not in names:
                refuse_dtype(first, dtype)
        for candidate in names:
            if candidate in implementations:
                return candidate
        raise NotImplementedError(
            f"{name} has no implementation for backend {backends.forced()!r}, which is forced here "
            f"(tried {', '.join(names)}); it has {', '.join(sorted(implementations))}. "
            f"Set LIGER_HW_BACKEND to one of them or unset it"
        )

    @functools.wraps(reference)
    def call(*args, **kwargs):
        if is_compiling():
            x = args[0] if args else kwargs[first]
            return implementations[_choice_while_tracing(name, x.device.type, x.device.index, x.dtype)](*args, **kwargs)
        try:
            x = args[0] if args else kwargs[first]
            device, dtype = x.device, x.dtype
            implementation = chosen.get((device, dtype, backends._forced))
            if implementation is None:
                implementation = implementations[choose(device, dtype)]
                chosen[(device, dtype, backends.forced())] = implementation
            return implementation(*args, **kwargs)
        except Exception as error:
            explain(error, reference, args, kwargs)
            raise

    def register(backend):
        """Make a function of the same signature the implementation for `backend`, a name of `Device.backends`."""

        def decorator(implementation):
            implementations[backend] = implementation
            chosen.clear()
            return implementation

        return decorator

    def cost(formula):
        """Make a function of the op's arguments, which returns a `Cost`, what every measured time is held against."""
        call.cost_of = formula
        return formula

    call.reference, call.register, call.implementations, call.choose = reference, register, implementations, choose
    call.cost = cost
    OPS[name] = call
    return call


@torch._dynamo.assume_constant_result
def _choice_while_tracing(name, device_type, index, dtype):
    """Nothing of the choice is traced: the compiler sees the chosen function."""
    return OPS[name].choose(torch.device(device_type, index), dtype)


class Function(torch.autograd.Function):
    """An autograd function of kernels: first-order, and cheaper to call than torch's.

    torch's own `apply` looks through every argument for the remains of a functorch transform, which matters only within
    one, and makes a graph node even where gradients are off: 1.6 us (an x86 CPU) and 5 us (an H200's host).

    Raises:
        RuntimeError: a backward with create_graph=True, whose second-order terms no kernel computes; an argument with a
            tangent of forward-mode AD.
    """

    def __init_subclass__(cls):
        backward = cls.backward

        @functools.wraps(backward)
        def first_order(ctx, *grads):
            if torch.is_grad_enabled() and not is_compiling():
                raise RuntimeError(
                    f"{cls.__name__} has no second-order gradients: call backward without create_graph=True, or run "
                    f"under liger_hw.use_backend('reference')"
                )
            return backward(ctx, *grads)

        cls.backward = staticmethod(first_order)
        cls._node = super(torch.autograd.Function, cls).apply  # torch's in C, without its look through the arguments

    @classmethod
    def apply(cls, *args):
        if is_compiling() or transforms_active():
            return super().apply(*args)
        if has_tangents(args):  # without a graph they would be lost, and a missing tangent counts as zero
            raise RuntimeError(
                f"{cls.__name__} has no forward-mode derivatives: run under liger_hw.use_backend('reference')"
            )
        if not torch.is_grad_enabled():
            return cls.forward(_NoGraph(), *args)
        return cls._node(*args)


class _NoGraph:
    """The context of a forward that no backward follows."""

    needs_input_grad = (False,) * 32  # more than any function has

    def save_for_backward(self, *tensors):
        pass

    mark_non_differentiable = set_materialize_grads = save_for_backward


_library = torch.library.Library("liger_hw", "DEF") if AVAILABLE else None


def raw(fake=None, mutates=()):
    """Make a function that launches kernels an op of `torch.ops.liger_hw`, and call it directly wherever that is safe.

    Eager calls run the function itself: a registered op with autograd costs 36 us more a step. Under torch.compile, a
    dispatch mode (FakeTensor, selective checkpointing, FLOP counting) or for a tensor subclass, the registered op is
    called, which those can see, save, shard or refuse.

    Args:
        fake: a function of the same arguments that returns empty outputs of the right shapes and dtypes.
        mutates: names of the tensor arguments written to. Such a function launches one kernel: if a table's winner for
            it cannot be launched, nothing was written yet, and the function runs again with another.
    """

    def decorate(function):
        name = function.__name__.strip("_")
        if _library is None:
            return function
        _library.define(name + torch.library.infer_schema(function, mutates_args=mutates))

        @functools.wraps(function)
        def launches(*args):
            while True:
                try:
                    return function(*args)
                except Refused:  # at a first launch; what serves instead is looked up anew
                    pass

        @functools.wraps(function)
        def run(*args):
            if hooks.observer is not None:
                return hooks.observer(launches, args, not mutates)
            return launches(*args)

        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"liger_hw::{name}", fake or _fakes_nothing, lib=_library)
        opaque = getattr(torch.ops.liger_hw, name).default

        @functools.wraps(function)
        def call(x, *args):
            if is_compiling() or dispatch_modes() or not is_plain(x):
                return opaque(x, *args)
            if hooks.observer is not None:
                return run(x, *args)
            try:
                return function(x, *args)
            except Refused:
                return launches(x, *args)

        call.opaque = opaque
        return call

    return decorate


def _fakes_nothing(*args):
    """For ops that only write to their arguments."""
