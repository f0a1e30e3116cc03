"""Apply an op to the shards of DTensors by the rule of its family.

    @rms_norm.shards(x="... H", weight="H", returns="... H")

A rule names the dimensions of each tensor argument and result. A dimension in lower case may be sharded: then every
argument that has it is sharded there, and the others are whole. A capital marks a dimension that a rank needs whole.
`...` stands for any number of dimensions that may be sharded, and `?` marks dimensions that may have size 1 instead.

A tensor with another placement, or a partial sum, is redistributed first, as torch does for its own operations. A
result without the sharded dimension is a partial sum over the ranks, and so is the gradient of an argument without it:
a norm's weight gets its gradient from each rank's rows, and the optimizer or `full_tensor` adds them up. The gradients
pass through torch's `to_local` and `from_local`, so the op itself only sees plain tensors.
"""

import math

import torch

from liger_hw._torch import finish_collective
from liger_hw.checks import check


def by_shards(implementation, call, returns, **rule):
    """Call `implementation` on the local tensors of `call`; return DTensors.

    Args:
        call: the op's arguments, a named tuple.
        returns: dimensions of the result, or the name of an argument with its shape; a tuple of them for several.
        rule: dimensions of each tensor argument; "" for one of any shape that every rank needs whole.

    Raises:
        ValueError: an argument is a plain tensor or on another mesh than the first, or its sizes do not fit.
    """
    tensors = {name: getattr(call, name) for name in rule if torch.is_tensor(getattr(call, name))}
    layout = Layout(tensors, rule)
    outputs = implementation(**(call._asdict() | {name: layout.local(name) for name in tensors}))
    returns = (returns,) if isinstance(returns, str) else returns
    if torch.is_tensor(outputs):
        return layout.whole(outputs, returns[0])
    results = [None if result is None else layout.whole(result, dims) for result, dims in zip(outputs, returns)]
    return type(outputs)._make(results) if hasattr(outputs, "_make") else tuple(results)


class Layout:
    """Placements of the tensors of one call.

    Args:
        tensors: name -> DTensor. rule: name -> its dimensions.

    Attributes:
        mesh: their DeviceMesh.
        dims: name -> the names of its dimensions.
        sizes: dimension -> its size over all ranks.
        sharded: for each dimension of the mesh the dimension that it shards, or None.
    """

    def __init__(self, tensors, rule):
        from torch.distributed.tensor import DTensor, Shard

        first = next(iter(tensors))
        self.tensors, self.mesh, self.dims, self.sizes = tensors, tensors[first].device_mesh, {}, {}
        for name, tensor in tensors.items():
            fits = isinstance(tensor, DTensor) and tensor.device_mesh == self.mesh
            allowed = f"a DTensor on the mesh of {first}, for example by distribute_tensor(..., [Replicate()])"
            check(fits, name, f"a {type(tensor).__name__}" + " on another mesh" * isinstance(tensor, DTensor), allowed)
            self.dims[name] = _named(name, tensor.shape, rule[name])
            for dim, size in zip(self.dims[name], tensor.shape):
                self.sizes.setdefault(dim, size)
        self.sharded = [None] * self.mesh.ndim
        for axis in range(self.mesh.ndim):
            for name, tensor in tensors.items():
                placement = tensor.placements[axis]
                dim = self.dims[name][placement.dim % tensor.ndim] if type(placement) is Shard else None
                if dim is not None and not dim.isupper() and self.sharded[axis] is None:
                    self.sharded[axis] = dim

    def _placements(self, dims, otherwise):
        from torch.distributed.tensor import Replicate, Shard

        def placement(dim):
            if dim is None:
                return Replicate()
            return Shard(dims.index(dim)) if dim in dims else otherwise

        return [placement(dim) for dim in self.sharded]

    def local(self, name):
        """Return this rank's part of an argument."""
        from torch.distributed.tensor import Partial, Replicate

        tensor, dims = self.tensors[name], self.dims[name]
        tensor = tensor.redistribute(self.mesh, self._placements(dims, Replicate()))
        finish_collective(tensor)
        return tensor.to_local(grad_placements=self._placements(dims, Partial()))

    def whole(self, result, returns):
        """Return the DTensor of the ranks' results.

        Args:
            returns: the name of an argument with its shape, or its dimensions.
        """
        from torch.distributed.tensor import DTensor, Partial

        if returns in self.dims:
            dims, shape = self.dims[returns], list(self.tensors[returns].shape)
        else:
            dims = _named("result", result.shape, returns)
            shape = [self.sizes[dim] if dim in self.sharded else size for dim, size in zip(dims, result.shape)]
        placements = self._placements(dims, Partial())
        ranks = [math.prod([self.mesh.size(axis) for axis, d in enumerate(self.sharded) if d == dim]) for dim in dims]
        if all(size % count == 0 for size, count in zip(shape, ranks)):
            return DTensor.from_local(result, self.mesh, placements, run_check=False)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            result.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def _named(name, shape, pattern):
    """Return a name for each dimension: numbers for those of "...", None for one of size 1 under "?"."""
    if not pattern:
        return [None] * len(shape)
    names = pattern.split()
    if names and names[0].startswith("..."):
        leading = len(shape) - len(names) + 1
        names = [f"{dim}{names[0][3:]}" for dim in range(leading)] + names[1:]
    check(len(names) == len(shape), name, f"{len(shape)} dimensions", f"({', '.join(pattern.split())})")
    return [None if size == 1 and dim.endswith("?") else dim.rstrip("?") for dim, size in zip(names, shape)]
