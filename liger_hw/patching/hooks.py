"""Tell whether a call of a module runs more than its own forward."""

from liger_hw._torch import has_global_module_hooks


def is_intercepted(module):
    """Tell whether calling `module` also runs hooks or a forward set on the instance.

    A replacement must then call `module` instead of computing its result: hooks may read the input, change the output
    or gather the weight (ZeRO-3, offloading). ZeRO-3's hooks do nothing on a module without parameters.
    """
    hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
    return bool(
        "forward" in module.__dict__
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_global_module_hooks()
        or hooks
        and not (all(is_of_zero3(hook) for hook in hooks) and next(module.parameters(), None) is None)
    )


def own_class(module):
    """Return the class of `module` without the swap of `patch`."""
    cls = type(module)
    return vars(cls).get("liger_original", cls)


def is_of_zero3(hook):
    """Tell whether `hook` is DeepSpeed's, by which ZeRO-3 gathers and frees weights."""
    if _module_of(hook) == "torch._dynamo.eval_frame":  # torch.compiler.disable
        hook = getattr(hook, "__wrapped__", None)
    elif _module_of(hook) == "deepspeed.utils.nvtx" and hook.__closure__:  # its decorator, which keeps no name
        hook = hook.__closure__[0].cell_contents
    return _module_of(hook) == "deepspeed.runtime.zero.parameter_offload"


def _module_of(hook):
    """Return the module that defines a function; functools.wraps copies `__module__` to others."""
    return getattr(hook, "__globals__", {}).get("__name__")
