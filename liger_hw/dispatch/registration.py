"""Register functions that launch kernels as ops of torch; eager calls run the functions themselves."""

import functools
import inspect

import torch
from torch.compiler import is_compiling

from liger_hw._torch import PLAIN, dispatch_modes
from liger_hw._triton import AVAILABLE
from liger_hw.checks import UnreadableTensor
from liger_hw.dispatch.generated import arguments_by_name, define, described
from liger_hw.hooks import hooks
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


def register(function, inputs, results, allocation, mutates=(), writes=True, **constants):
    """Register an op of torch, and return the function to call.

    Its attribute `opaque` is the registered op.

    Args:
        inputs: name -> annotation. A NamedTuple is one argument here, and one for each field of the registered op.
        results: names of the results; without any it returns `y`.
        writes: the results are parameters of `function`, memory that it writes to; else it returns them.
        allocation: a statement that sets these names or, without them, `y`; for the op's fake, too.
        mutates: as in `raw`.
        constants: names that `allocation` uses.
    """
    name, names, returned = function.__name__.strip("_"), ", ".join(inputs), ", ".join(results) or "y"
    if not name:
        raise TypeError(f"{described(function)}: got the name '_', allowed: one for the op of torch.ops.liger_hw")
    writes = writes and results
    launches = f"function({arguments_by_name(function, [*inputs, *(results if writes else ())])})"
    launches = f"{allocation}; {launches}" if writes else f"{returned} = {launches}"
    first = next(name for name, annotation in inputs.items() if annotation is torch.Tensor)
    flat = ", ".join(f"*{name}" if is_tuple(annotation) else name for name, annotation in inputs.items())
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
        "UnreadableTensor": UnreadableTensor, "opaque": None,
    }  # fmt: skip
    functions = define(name, source, **constants)
    call = functools.update_wrapper(functions["call"], function)
    if _library is not None:
        call.opaque = functions["opaque"] = _registered(function, name, inputs, results, mutates, functions)
    return call


def _registered(function, name, inputs, results, mutates, functions):
    """Register `functions` under `name`, with NamedTuples spread into their fields, as torch's schemas require."""
    flat = []
    for argument, annotation in inputs.items():
        fields = annotation.__annotations__.items() if is_tuple(annotation) else ()
        flat += [(f"{argument}_{field}", kind) for field, kind in fields] or [(argument, annotation)]

    def prototype():
        """Tell `infer_schema` its signature; nothing calls it."""

    prototype.__signature__ = inspect.Signature(
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=kind) for name, kind in flat],
        return_annotation=_tensors(len(results)) if results else inspect.signature(function).return_annotation,
    )

    def rebuild(flat):
        values = iter(flat)
        return [kind(*(next(values) for _ in kind._fields)) if is_tuple(kind) else next(values)
                for kind in inputs.values()]  # fmt: skip

    run, fake = functions["run_observed"], functions["fake"]
    _library.define(name + torch.library.infer_schema(prototype, mutates_args=mutates))
    _library.impl(name, lambda *flat: run(*rebuild(flat)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"liger_hw::{name}", lambda *flat: fake(*rebuild(flat)), lib=_library)
    return getattr(torch.ops.liger_hw, name).default


def _tensors(count):
    """Return the annotation of `count` results, any of which may be None."""
    return torch.Tensor if count == 1 else tuple[(torch.Tensor,) * count]
