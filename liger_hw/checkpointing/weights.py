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

    The recomputation has the parameters of now, also where torch.func.functional_call had replaced them for the forward
    alone. It raises RuntimeError where one was changed in place since, as autograd does for what it saves. Parameters
    that FSDP shards are left to it: before and after they are whole they are DTensors, or whole ones are views.
    """
    then = [
        (owner, name, x, x._version)
        for owner in module.modules()
        for name, x in owner._parameters.items()
        if x is not None and is_plain(x)
    ]

    def run(*args):
        replaced = []
        for owner, name, x, version in then:
            if x._version != version and not x._is_view():
                raise RuntimeError(
                    f"{name} of {type(owner).__name__} was changed in place between the forward and the backward, "
                    "which recomputes the layer: change parameters after the backward"
                )
            now = owner._parameters.get(name)
            if now is not x and now is not None and is_plain(now) and not now._is_view():
                replaced.append((owner, name, x))
        if not replaced:
            return function(*args)
        names = {owner: name for name, owner in _Applied(function, module).named_modules()}
        weights = {f"{names[owner]}.{name}": x for owner, name, x in replaced}
        return torch.func.functional_call(_Applied(function, module), weights, args)

    return run
