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

    The plain tensors of the call, other than the head, are the same on all ranks; results are NaN if the targets are
    not. The gradient of `x` is summed over the ranks once, after all chunks.

    Raises:
        ValueError: `weight` is a DTensor sharded over another dimension than the vocabulary.
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
        _check_placements(call.weight)
    whole, factor = [Replicate()] * mesh.ndim, _one_if_equal(mesh, tensors.values())
    tensors = {
        name: x if is_dtensor(x) else DTensor.from_local(x, mesh, part.get(name, whole), run_check=False)
        for name, x in tensors.items()
    }
    outputs = op(**(call._asdict() | tensors | {"group": None}))
    results = [
        output if output is None else output.to_local() * factor if output.is_floating_point() else output.to_local()
        for output in ([outputs] if torch.is_tensor(outputs) else outputs)
    ]
    return results[0] if torch.is_tensor(outputs) else type(outputs)._make(results)


def _one_if_equal(mesh, tensors):
    """Return 1, or NaN where plain tensors of integers, the targets, differ between ranks.

    Ranks with different batches, as where FSDP2 sharded the head, would compute a loss of neither.
    """
    from torch.distributed.tensor import DTensor, Shard

    factor = 1.0
    for x in tensors:
        if not x.is_floating_point() and not is_dtensor(x):
            gathered = DTensor.from_local(x[None], mesh, [Shard(0)] * mesh.ndim, run_check=False).full_tensor()
            factor = torch.where((gathered == x).all(), factor, float("nan"))
    return factor


def _check_placements(weight):
    """Refuse a weight sharded over the hidden dimension, as FSDP2 may do outside a forward."""
    from torch.distributed.tensor import Shard

    for placement in weight.placements:
        fits = placement.is_replicate() or type(placement) is Shard and placement.dim == 0
        allowed = (
            "Shard(0) or Replicate() beside a plain x; under FSDP2 compute the loss in the forward of a module that "
            "has the model, where the weight is whole"
        )
        check(fits, "weight", f"a DTensor with {placement}", allowed)


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
