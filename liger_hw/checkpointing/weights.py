"""Recompute a module with the parameters and buffers that its forward had."""

import torch

from liger_hw import _torch


def can_recompute(*tensors) -> bool:
    """Tell whether a backward can compute a function of `tensors` again.

    It cannot under torch.func's transforms and forward-mode AD, which torch's checkpointing does not know, and within
    `allow_mutation_on_saved_tensors`, which keeps values of saved tensors alone.
    """
    return not (_torch.transforms_active() or _torch.has_tangents(tensors) or _torch.saved_tensors_may_change())


def with_these_weights(function, module):
    """Return `function`, which uses `module`, for a forward now and a recomputation in the backward.

    The recomputation has the parameters and buffers of now, also where torch.func.functional_call had replaced them for
    the forward alone, and where the forward itself changes buffers, as spectral norm and batch norm do. It raises
    RuntimeError where the program changed one in place since, as autograd does for what it saves. Parameters that FSDP
    shards are left to it: before and after they are whole they are DTensors, or whole ones are views.
    """
    parameters = [
        (owner, name, x, _torch.tensor_version(x))
        for owner in module.modules()
        for name, x in owner._parameters.items()
        if x is not None and _torch.is_plain(x)
    ]
    buffers = _Buffers(module)

    def refuse(owner, name):
        raise RuntimeError(
            f"{name} of {type(owner).__name__} was changed in place between the forward and the backward, which "
            "recomputes the layer: change parameters and buffers after the backward"
        )

    def run(*args):
        tensors = []  # (parameters or buffers of a module, name, the forward's tensor)
        for owner, name, x, version in parameters:
            if _torch.tensor_version(x) != version and not _torch.is_view(x):
                refuse(owner, name)
            now = owner._parameters.get(name)
            if now is not x and now is not None and _torch.is_plain(now) and not _torch.is_view(now):
                tensors.append((owner._parameters, name, x))
        if buffers.entries and buffers.forward_is_over:
            for owner, name in buffers.changed():
                refuse(owner, name)
            tensors += buffers.as_in_forward()
        before = [(members, name, members.get(name, _MISSING)) for members, name, _ in tensors]
        try:
            for members, name, x in tensors:
                members[name] = x
            result = function(*args)
        finally:
            for members, name, x in before:
                if x is _MISSING:
                    members.pop(name, None)
                else:
                    members[name] = x
        if buffers.entries and not buffers.forward_is_over:
            buffers.after_forward()
        return result

    return run


class _Buffers:
    """The buffers of a module as a forward finds them.

    Attributes:
        entries: (its owner, its name, the tensor or None, its version) of each.
        copies: memory -> its values before a forward that writes to it. Buffers may share memory.
        forward_is_over: `after_forward` was called.
    """

    def __init__(self, module):
        self.entries = [
            (owner, name, x, _version(x))
            for owner in module.modules()
            for name, x in owner._buffers.items()
            if x is None or _torch.is_plain(x) and x.layout is torch.strided and not x.is_meta
        ]
        copied = [x for _, _, x, _ in self.entries if x is not None and not x.requires_grad]
        self.copies = {_torch.storage_id(x): x.untyped_storage().clone() for x in copied}
        self.forward_is_over = False

    def after_forward(self):
        """Drop the copies of what the forward left as it was.

        torch's batch norm writes to its running statistics without counting a version.
        """
        self.forward_is_over = True
        written = {
            _torch.storage_id(x)
            for owner, _, x, version in self.entries
            if x is not None and (_version(x) != version or isinstance(owner, _torch.BatchNormBase))
        }
        self.copies = {memory: copy for memory, copy in self.copies.items() if memory in written}

    def changed(self):
        """List the owners and names of buffers that the program wrote to after the forward."""
        return [
            (owner, name) for owner, name, x, version in self.entries
            if x is not None and _torch.storage_id(x) not in self.copies and _version(x) != version
        ]  # fmt: skip

    def as_in_forward(self):
        """List (buffers of a module, name, tensor) as before the forward; written ones are copies."""
        if not self.copies:
            return [(owner._buffers, name, x) for owner, name, x, _ in self.entries]
        tensors = []
        with _torch.without_dispatch_modes():
            copies = {memory: copy.clone() for memory, copy in self.copies.items()}
            for owner, name, x, _ in self.entries:
                copy = None if x is None else copies.get(_torch.storage_id(x))
                if copy is not None:
                    like = x.storage_offset(), x.shape, x.stride()
                    x = torch.empty(0, dtype=x.dtype, device=x.device).set_(copy, *like)
                tensors.append((owner._buffers, name, x))
        return tensors


_MISSING = object()


def _version(x):
    return None if x is None or x.is_inference() else _torch.tensor_version(x)
