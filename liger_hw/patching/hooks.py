"""Tell whether anything beside a module's own forward runs when the module is called."""

from liger_hw._torch import has_global_module_hooks


def is_intercepted(module):
    """Tell whether calling `module` also runs hooks, or a forward that was set on the instance.

    A replacement that computes the result of `module` without calling it must not be used then: hooks may look at the
    input, change the output or bring the weight (ZeRO-3, offloading).
    """
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or has_global_module_hooks()
    )
