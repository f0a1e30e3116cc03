"""Let code that torch.compile writes launch kernels without a call of their op.

A call of a registered op from compiled code costs 40 us (an H200's host), through torch's dispatcher and Python: a step
of Llama-1B with LoRA makes 460. Code that launches costs what the compiler's own kernels cost.
"""

import functools

import torch

from liger_hw import backends
from liger_hw._torch import INLINED_KERNELS, FunctionalTensor, FunctionalTensorMode
from liger_hw._triton import interpreting, triton
from liger_hw.hooks import hooks


class NotInlined(Exception):
    """A launch that compiled code cannot make: it calls the op."""


def inline(library, operation, run, function, most_rows) -> None:
    """Let compiled code do what `run` does, instead of a call of its op.

    This is what torch.library.triton_op does, for an op that also runs eagerly, interpreted and on any backend.

    Args:
        operation: name of the op, whose first argument are rows.
        function: the declared one; the compiler's cache on disk compares the source of the kernels in its file.
        most_rows: the op stays for more; it takes longer than its call.
    """
    if not most_rows:
        return

    def decompose(mode, operation, types, args, kwargs=None):
        if _may_inline(args) and args[0].shape[0] <= most_rows:
            try:
                with mode, torch.no_grad(), torch.autocast(args[0].device.type, enabled=False):
                    return run(*args)
            except NotInlined:
                pass
        return mode.__torch_dispatch__(operation, types, args, kwargs or {})

    torch.library.register_torch_dispatch(operation, FunctionalTensorMode, decompose, lib=library)
    INLINED_KERNELS[operation] = [x for x in function.__globals__.values() if isinstance(x, triton.JITFunction)]


def _may_inline(args):
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    if torch.compiler.is_exporting() or interpreting() or hooks.launch is not None:
        return False
    if not all(type(x) is FunctionalTensor for x in tensors):
        return False
    sizes = [n for x in tensors for n in (*x.shape, *x.stride())]  # an op takes those that may change
    vendor = backends.detected(tensors[0].device).vendor
    return (
        all(type(n) is int for n in sizes) and vendor in backends.VENDORS and backends.VENDORS[vendor].INLINED_LAUNCHES
    )


def is_traced(x) -> bool:
    """Tell whether `x` is a tensor of code that is being compiled, without values."""
    return type(x) is FunctionalTensor


def launch_later(kernel, grid, config, args) -> None:
    """Record a launch, of the arguments of `launch`, in the code that is being compiled.

    Raises:
        NotInlined: the compiler does not know an option, or the kernel takes the number 1 as any other.
    """
    here = backends.detected(args[0].device)
    options = config.options(here)
    fusion = options.pop("enable_fp_fusion")
    is_known = options.keys() == {"num_warps", "num_stages"} and config.triton in ("", triton.__version__)
    if not is_known or fusion != _default_fusion():
        raise NotInlined
    if any(p.do_not_specialize and arg == 1 for p, arg in zip(kernel.params, args) if type(arg) is int):
        raise NotInlined
    torch.library.wrap_triton(kernel)[grid](*args, *config.meta.values(), **options)


@functools.cache
def _default_fusion():
    """Tell whether Triton rounds a product and a sum once unless an option says otherwise."""
    from triton.compiler import make_backend
    from triton.runtime import driver

    return make_backend(driver.active.get_current_target()).parse_options({}).enable_fp_fusion
