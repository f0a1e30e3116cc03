"""Recompute a module with the weights that its forward had."""

import torch

from liger_hw._torch import has_tangents, is_plain, saved_tensors_may_change, transforms_active


def can_recompute(*tensors) -> bool:
    """Tell whether a backward can compute a function of `tensors` again.

    It cannot under torch.func's transforms and forward-mode AD, which torch's checkpointing does not know, and within
    `allow_mutation_on_saved_tensors`, which keeps values of saved tensors alone.
    """
    return not (transforms_active() or has_tangents(tensors) or saved_tensors_may_change())


class _Applied(torch.nn.Module):
    """A function that uses `module`, as a module."""

    def __init__(self, function, module):
        super().__init__()
        self.function, self.module = function, module

    def forward(self, *args):
        return self.function(*args)


def with_these_weights(function, module):
    """Return `function`, which uses `module`, for a forward now and a recomputation in the backward.

    The recomputation has the parameters and buffers of now, also where torch.func.functional_call had replaced them for
    the forward alone, and where the forward itself changes buffers, as spectral norm and batch norm do. It raises
    RuntimeError where the program changed one in place since, as autograd does for what it saves. Parameters that FSDP
    shards are left to it: before and after they are whole they are DTensors, or whole ones are views.
    """
    then = [
        (owner, name, x, x._version)
        for owner in module.modules()
        for name, x in owner._parameters.items()
        if x is not None and is_plain(x)
    ]
    buffers = [_Buffer(owner, name) for owner in module.modules() for name, x in owner._buffers.items() if is_plain(x)]

    def changed(owner, name):
        raise RuntimeError(
            f"{name} of {type(owner).__name__} was changed in place between the forward and the backward, which "
            "recomputes the layer: change parameters and buffers after the backward"
        )

    def run(*args):
        if not buffers:
            return run_with_parameters(*args)
        if not buffers[0].has_run:
            result = run_with_parameters(*args)
            for buffer in buffers:
                buffer.after_forward()
            return result
        now = [buffer.owner._buffers.get(buffer.name) for buffer in buffers]
        try:
            for buffer in buffers:
                if buffer.was_changed():
                    changed(buffer.owner, buffer.name)
                buffer.owner._buffers[buffer.name] = buffer.of_forward()
            return run_with_parameters(*args)
        finally:
            for buffer, x in zip(buffers, now):
                buffer.owner._buffers[buffer.name] = x

    def run_with_parameters(*args):
        replaced = []
        for owner, name, x, version in then:
            if x._version != version and not x._is_view():
                changed(owner, name)
            now = owner._parameters.get(name)
            if now is not x and now is not None and is_plain(now) and not now._is_view():
                replaced.append((owner, name, x))
        if not replaced:
            return function(*args)
        names = {owner: name for name, owner in _Applied(function, module).named_modules()}
        weights = {f"{names[owner]}.{name}": x for owner, name, x in replaced}
        return torch.func.functional_call(_Applied(function, module), weights, args)

    return run


class _Buffer:
    """A buffer as a forward finds it.

    Attributes:
        has_run: the forward is over.
        copy: its values before a forward that changes it, else None.
    """

    def __init__(self, owner, name):
        self.owner, self.name, self.x, self.has_run = owner, name, owner._buffers[name], False
        self.copy, self.version = None, None
        if self.x is not None:
            self.version = _version(self.x)
            self.copy = None if self.x.requires_grad else self.x.clone()

    def after_forward(self):
        """Drop the copy if the forward left the buffer as it was."""
        self.has_run = True
        if self.owner._buffers.get(self.name) is self.x and (self.x is None or _version(self.x) == self.version):
            self.copy = None

    def was_changed(self):
        """Tell whether the program wrote to the buffer after the forward."""
        return self.copy is None and self.x is not None and _version(self.x) != self.version

    def of_forward(self):
        """Return its values before the forward, in memory that the recomputation may write to.

        torch's batch norm writes to its running statistics without counting a version. A buffer that functional_call
        replaced by a tensor with a gradient stays that tensor.
        """
        x = self.x if self.copy is None else self.copy
        return x if x is None or x.requires_grad else x.clone()


def _version(x):
    return None if x.is_inference() else x._version
