"""Tell whether a call of a module runs more than its own forward."""

from liger_hw._torch import has_global_module_hooks


def is_intercepted(module):
    """Tell whether calling `module` also runs hooks or a forward set on the instance.

    A replacement must then call `module` instead of computing its result: hooks may read the input, change the output
    or gather the weight (ZeRO-3, offloading).
    """
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_global_module_hooks()
    )
