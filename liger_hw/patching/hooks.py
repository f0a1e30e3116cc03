"""Tell whether a call of a module runs more than its own forward."""

import types

from liger_hw import _torch


def is_intercepted(module):
    """Tell whether calling `module` also runs hooks or a forward set on the instance.

    A replacement must then call `module` instead of computing its result: hooks may read the input, change the output
    or gather the weight (ZeRO-3, offloading). ZeRO-3's hooks do nothing on a module without parameters.
    """
    state = module.__dict__
    if "forward" in state or "_call_impl" in state or "_compiled_call_impl" in state:  # they replace its call
        return True
    if not _torch.has_hooks(module):
        return False
    if _torch.has_global_module_hooks() or _torch.backward_hooks(module) or next(module.parameters(), None) is not None:
        return True
    return not all(is_zero3_hook(hook) for hook in _torch.forward_hooks(module))


def _is_intercepted_with_guard(module):
    module.forward  # noqa: B018, torch.compile guards attributes that code reads, not names in a module's `__dict__`
    return _is_intercepted_alone(module)


# the same code by another name: the compiler replaces calls of `is_intercepted` itself
_is_intercepted_alone = types.FunctionType(is_intercepted.__code__, globals(), "_is_intercepted_alone")
_torch.traced_as(is_intercepted, _is_intercepted_with_guard)


def original_class(module):
    """Return the class of `module` without the swap of `patch`."""
    cls = type(module)
    original = getattr(cls, "liger_original", None)  # Dynamo cannot read vars(cls) once a dictionary has changed
    return original if original is not None and cls.__bases__[-1] is original else cls


def only_gathers(hook):
    """Tell whether `hook` gathers and frees weights, and neither keeps nor changes outputs."""
    return _torch.is_fsdp2_hook(hook) or is_zero3_hook(hook)


def is_zero3_hook(hook):
    """Tell whether `hook` is DeepSpeed's, by which ZeRO-3 gathers and frees weights."""
    hook = _torch.without_compiler_disabled(hook)
    if module_of(hook) == "deepspeed.utils.nvtx" and hook.__closure__:  # its decorator, which keeps no name
        hook = hook.__closure__[0].cell_contents
    return module_of(hook) == "deepspeed.runtime.zero.parameter_offload"


def module_of(hook):
    """Return the module that defines a function; functools.wraps copies `__module__` to others."""
    return getattr(hook, "__globals__", {}).get("__name__")
