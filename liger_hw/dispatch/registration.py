"""Register functions that launch kernels as ops of torch; eager calls run the functions themselves."""

import functools
import inspect

import torch
from torch.compiler import is_compiling

from liger_hw._torch import PLAIN, dispatch_modes
from liger_hw._triton import AVAILABLE
from liger_hw.checks import UnreadableTensor
from liger_hw.dispatch.generated import arguments_by_name, define, described
from liger_hw.dispatch.precision import uncast
from liger_hw.hooks import hooks
from liger_hw.inlining import inline
from liger_hw.tuning import LaunchFailed

_library = torch.library.Library("liger_hw", "DEF") if AVAILABLE else None


def empty_rows(x: torch.Tensor) -> torch.Tensor:
    """Return contiguous memory like `x`: 0.9 us; `new_empty(x.shape)` takes 2.5 (x86)."""
    return torch.empty_like(x) if x.is_contiguous() else x.new_empty(x.shape)


def default_allocation(inputs, results) -> str:
    """Return the statement that allocates results without a function for it.

    A gradient dx is like x, or None where an input x_grad is false. Another result is like the first tensor.
    """
    texts = []
    for result in results:
        name = result[1:] if result[0] == "d" and result[1:] in inputs else next(iter(inputs))
        texts.append(f"{result} = empty_rows({name})" + f" if {name}_grad else None" * (f"{name}_grad" in inputs))
    return "; ".join(texts) or "y = None"


def is_tuple(annotation) -> bool:
    """Tell whether a parameter is a NamedTuple."""
    return hasattr(annotation, "_fields")


def register(function, inputs, results, allocation, mutates=(), writes=True, most_rows=0, **constants):
    """Register an op of torch, and return the function to call.

    Its attribute `opaque` is the registered op.

    Args:
        inputs: name -> annotation. A NamedTuple is one argument here, and one for each field of the registered op.
        results: names of the results; without any it returns `y`.
        writes: the results are parameters of `function`, memory that it writes to; else it returns them.
        allocation: a statement that sets these names or, without them, `y`; for the op's fake, too.
        mutates, most_rows: as in `raw`.
        constants: names that `allocation` uses.
    """
    name, names, returned = _op_name(function), ", ".join(inputs), ", ".join(results) or "y"
    writes = writes and results
    launches = f"function({arguments_by_name(function, [*inputs, *(results if writes else ())])})"
    launches = f"{allocation}; {launches}" if writes else f"{returned} = {launches}"
    first = next(name for name, annotation in inputs.items() if annotation is torch.Tensor)
    fields, flat, rebuilt = _fields(inputs)
    source = f"""
        def run({names}):
            {launches}
            return {returned}

        def run_until_accepted({names}):
            while True:
                try:
                    return run({names})
                except LaunchFailed:  # by the compiler or the driver, at a first launch: look up another configuration
                    pass

        def run_observed({names}):
            if hooks.observer is not None:
                return hooks.observer(run_until_accepted, ({names},), repeatable)
            return run_until_accepted({names})

        def fake({names}):
            {allocation}
            return {returned}

        def run_registered({", ".join(fields)}):
            return run_observed({rebuilt})

        def registered_fake({", ".join(fields)}):
            return fake({rebuilt})

        def call({names}):
            if is_compiling() or dispatch_modes() or type({first}) not in PLAIN:
                return opaque({flat})
            if hooks.observer is not None:
                return run_observed({names})
            try:  # `run_until_accepted`, inlined: saves two calls of Python
                {launches}
                return {returned}
            except LaunchFailed:
                return run_until_accepted({names})
            except UnreadableTensor:  # such as a gradient that torch still receives from other ranks
                return opaque({flat})
    """
    constants |= {
        "function": function, "repeatable": not mutates, "empty_rows": empty_rows, "is_compiling": is_compiling,
        "dispatch_modes": dispatch_modes, "hooks": hooks, "PLAIN": PLAIN, "LaunchFailed": LaunchFailed,
        "UnreadableTensor": UnreadableTensor, "opaque": None, **{f"{name}_type": kind for name, kind in inputs.items()},
    }  # fmt: skip
    functions = define(name, source, **constants)
    call = functools.update_wrapper(functions["call"], function)
    if _library is not None:
        returned = _tensors(len(results)) if results else inspect.signature(function).return_annotation
        call.opaque = functions["opaque"] = _registered(name, fields, returned, functions, mutates)
        inline(_library, f"liger_hw::{name}", functions["run"], function, most_rows)
    return call


def _op_name(function):
    name = function.__name__.strip("_")
    if not name:
        raise TypeError(f"{described(function)}: got the name '_', allowed: one for the op of torch.ops.liger_hw")
    return name


def traced_as_one(fake, most_rows=0):
    """Register a function of `raw` functions and torch as one op for torch.compile.

    Eager calls run the function. Compiled code calls each op through torch's dispatcher, and copies what a function
    writes to in place.

    Args:
        fake: a function of the same arguments that allocates the results.
        most_rows: as in `raw`.
    """

    def decorate(function):
        if _library is None:
            return function
        signature = inspect.signature(function)
        inputs = {p.name: p.annotation for p in signature.parameters.values()}

        def run(*args):
            with uncast(args[0]):  # autocast casts arguments while a program is traced
                return function(*args)

        functions = {"run_registered": run, "registered_fake": fake}
        opaque = _registered(function.__name__, inputs, signature.return_annotation, functions)
        inline(_library, f"liger_hw::{function.__name__}", run, function, most_rows)
        return functools.wraps(function)(lambda *args: opaque(*args) if is_compiling() else function(*args))

    return decorate


def _fields(inputs):
    """Return a schema's annotations, one for each field of a NamedTuple, and two texts.

    These are the arguments of a call of the op, and the expressions that make its inputs of them.
    """
    fields, arguments, texts = {}, [], []
    for name, kind in inputs.items():
        names = {name: kind}
        if is_tuple(kind):
            names = {f"{name}_{field}": annotation for field, annotation in kind.__annotations__.items()}
        fields |= names
        arguments.append(f"*{name}" if is_tuple(kind) else name)
        texts.append(f"{name}_type({', '.join(names)})" if is_tuple(kind) else name)
    return fields, ", ".join(arguments), ", ".join(texts)


def _registered(name, inputs, returned, functions, mutates=()):
    """Define an op of torch whose schema has the annotations `inputs` and `returned`."""
    function = functions["run_registered"]

    def run(*args):
        if not torch.is_grad_enabled():
            return function(*args)
        with torch.no_grad():  # a program exported without autograd, called with it
            return function(*args)

    def prototype():
        """Tell `infer_schema` its signature; nothing calls it."""

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in inputs.items()]
    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returned)
    _library.define(name + torch.library.infer_schema(prototype, mutates_args=mutates))
    _library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"liger_hw::{name}", functions["registered_fake"], lib=_library)
    return getattr(torch.ops.liger_hw, name).default


def _tensors(count):
    """Return the annotation of `count` results, any of which may be None."""
    return torch.Tensor if count == 1 else tuple[(torch.Tensor,) * count]
