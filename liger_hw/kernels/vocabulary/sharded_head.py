"""Prepare a head whose vocabulary is sharded over ranks for the ops."""

import torch

from liger_hw._torch import is_dtensor, process_group
from liger_hw.checks import check
from liger_hw.sharding import DimensionShard


def vocabulary_of(call):
    """Return the size of the vocabulary over all ranks."""
    return call.group.size if isinstance(call.group, DimensionShard) else call.weight.shape[0]


def check_invariant(call):
    """Refuse `invariant` where ranks share the vocabulary: their sums follow the size of a message."""
    check(call.group is None or not call.invariant, "invariant", True, "False where ranks share the vocabulary")


def needs_distribution(call):
    """Tell whether `x` is plain, and the head a DTensor or this rank's part."""
    return call.group is not None and not isinstance(call.group, DimensionShard) or is_dtensor(call.weight)


def distributed(op, call):
    """Call `op` on DTensors; return plain tensors.

    The plain tensors of the call, other than the head, are the same on all ranks. The gradient of `x` is summed over
    the ranks once, after all chunks.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    tensors = {name: value for name, value in call._asdict().items() if torch.is_tensor(value) and name != "num_items"}
    part = {}
    if call.group is not None:
        allowed = "None for a weight that is a DTensor, or a process group"
        check(not is_dtensor(call.weight) and hasattr(call.group, "group_name"), "group", call.group, allowed)
        mesh = DeviceMesh.from_group(call.group, call.x.device.type)
        part = {"weight": [Shard(0)], "bias": [Shard(0)]}
    else:
        mesh = call.weight.device_mesh
    whole = [Replicate()] * mesh.ndim
    tensors = {
        name: x if is_dtensor(x) else DTensor.from_local(x, mesh, part.get(name, whole), run_check=False)
        for name, x in tensors.items()
    }
    outputs = op(**(call._asdict() | tensors | {"group": None}))
    if torch.is_tensor(outputs):
        return outputs.to_local()
    return type(outputs)._make(output if output is None else output.to_local() for output in outputs)


def all_columns(logits, shard):
    """Gather the columns of all ranks; without a `shard` they are here already."""
    if shard is None:
        return logits
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh.from_group(process_group(shard.group), logits.device.type)
    shape = torch.Size((*logits.shape[:-1], shard.size))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride).full_tensor()
