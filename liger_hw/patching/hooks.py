"""Tell whether a call of a module runs more than its own forward."""

from liger_hw._torch import (
    backward_hooks,
    forward_hooks,
    has_global_module_hooks,
    has_hooks,
    is_fsdp2_hook,
    without_compiler_disabled,
)


def is_intercepted(module):
    """Tell whether calling `module` also runs hooks or a forward set on the instance.

    A replacement must then call `module` instead of computing its result: hooks may read the input, change the output
    or gather the weight (ZeRO-3, offloading). ZeRO-3's hooks do nothing on a module without parameters.
    """
    state = module.__dict__
    if "forward" in state or "_call_impl" in state or "_compiled_call_impl" in state:  # they replace its call
        return True
    if not has_hooks(module):
        return False
    if has_global_module_hooks() or backward_hooks(module) or next(module.parameters(), None) is not None:
        return True
    return not all(is_zero3_hook(hook) for hook in forward_hooks(module))


def original_class(module):
    """Return the class of `module` without the swap of `patch`."""
    cls = type(module)
    original = getattr(cls, "liger_original", None)  # Dynamo cannot read vars(cls) once a dictionary has changed
    return original if original is not None and cls.__bases__[-1] is original else cls


def only_gathers(hook):
    """Tell whether `hook` gathers and frees weights, and neither keeps nor changes outputs."""
    return is_fsdp2_hook(hook) or is_zero3_hook(hook)


def is_zero3_hook(hook):
    """Tell whether `hook` is DeepSpeed's, by which ZeRO-3 gathers and frees weights."""
    hook = without_compiler_disabled(hook)
    if module_of(hook) == "deepspeed.utils.nvtx" and hook.__closure__:  # its decorator, which keeps no name
        hook = hook.__closure__[0].cell_contents
    return module_of(hook) == "deepspeed.runtime.zero.parameter_offload"


def module_of(hook):
    """Return the module that defines a function; functools.wraps copies `__module__` to others."""
    return getattr(hook, "__globals__", {}).get("__name__")
