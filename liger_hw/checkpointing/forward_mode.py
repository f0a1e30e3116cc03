"""See the operations of a layer's forward, without those of the layer's hooks.

Older versions of transformers checkpoint the whole call of a layer. Its hooks then run within the checkpoint: FSDP2's,
for example, gather the weights in the forward, and not in the recomputation. transformers 5.17 is such a version; 5.23
checkpoints `forward`.
"""

import torch

from liger_hw._torch import TorchDispatchMode, active_dispatch_modes, forward_hooks


class ForwardMode(TorchDispatchMode):
    """Call `begin` where a layer's forward begins, and `see` for each of its operations.

    Args:
        hooked: the layer's hooks run within this mode, and `hooks_of` was called for the layer.
    """

    def __init__(self, hooked):
        super().__init__()
        self.hooked, self.inside = hooked, False

    def __enter__(self):
        self.inside = False
        if not self.hooked:
            self.enter_forward()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        if self.inside:
            self.leave_forward()

    def enter_forward(self):
        self.inside = True
        self.begin()

    def leave_forward(self):
        self.inside = False

    def begin(self):
        """Prepare for the first operation."""

    @classmethod
    def ignore_compile_internals(cls):
        """Let compiled functions that a layer calls run compiled."""
        return True

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        return self.see(operation, args, kwargs) if self.inside else operation(*args, **kwargs)


def runs_hooks(function, layer) -> bool:
    """Tell whether `function`, which transformers checkpoints, runs the hooks of `layer`, those of `hooks_of` too."""
    method = getattr(function, "func", None)
    whole_call = getattr(method, "__func__", None) is torch.nn.Module.__call__
    return whole_call and _enter in forward_hooks(layer)


def hooks_of(layer) -> list:
    """Tell the mode around a call of `layer` where its forward begins and ends.

    The first hook follows FSDP2's, the second precedes it. There are none where transformers checkpoints `forward`.

    Returns:
        the handles of the hooks.
    """
    if type(layer).__call__ is torch.nn.Module.__call__:
        return []
    return [layer.register_forward_pre_hook(_enter), layer.register_forward_hook(_leave, prepend=True)]


def _enter(layer, args):
    if (mode := _current()) is not None:
        mode.enter_forward()


def _leave(layer, args, output):
    if (mode := _current()) is not None:
        mode.leave_forward()


def _current():
    """Return the innermost `ForwardMode`, around which a hook may have entered other modes."""
    return next((mode for mode in reversed(active_dispatch_modes()) if isinstance(mode, ForwardMode)), None)
