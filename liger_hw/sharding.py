"""Apply an op to the shards of DTensors by the rule of its family.

    @rms_norm.shards(x="... H", weight="H", returns="... H")

A rule names the dimensions of each tensor argument and result. A dimension in lower case may be sharded: then every
argument that has it is sharded there, and the others are whole. A capital marks a dimension that a rank needs whole.
`...` means any number of dimensions that may be sharded, and `?` marks dimensions that may have size 1 instead.

A tensor with another placement, or a partial sum, is redistributed first, as torch does for its own operations. A
result without the sharded dimension is a partial sum over the ranks, and so is the gradient of an argument without it:
a norm's weight gets its gradient from each rank's rows, and the optimizer or `full_tensor` adds them up. The gradients
pass through torch's `to_local` and `from_local`, so the op itself only sees plain tensors.
"""

import math
from typing import NamedTuple

import torch

from liger_hw._torch import finish_collective
from liger_hw.checks import check


class DimensionShard(NamedTuple):
    """This rank's part of a dimension over which an op reduces its results itself.

    Attributes:
        first: index of its first element. size: of the dimension, over all ranks. widest: size of the largest part.
        group: name of the process group.
    """

    first: int
    size: int
    widest: int
    group: str


def part_of(mesh, axis, size):
    """Return the `DimensionShard` of a dimension; None if a rank has no part."""
    ranks = mesh.size(axis)
    widest = -(-size // ranks)
    if (ranks - 1) * widest >= size:
        return None
    return DimensionShard(widest * mesh.get_local_rank(axis), size, widest, mesh.get_group(axis).group_name)


def by_shards(implementation, call, returns, reduces=None, **rule):
    """Call `implementation` on the local tensors of `call`; return DTensors.

    Args:
        call: the op's arguments, a named tuple.
        returns: dimensions of the result, or the name of an argument with its shape; a tuple of them for several.
        reduces: a dimension, one of the names, over which `implementation` reduces its results itself. Its argument
            `group` is then the `DimensionShard`.
        rule: dimensions of each tensor argument; "" for one of any shape that every rank needs whole.

    Raises:
        ValueError: an argument is a plain tensor or on another mesh than the first, or its sizes do not fit.
    """
    tensors = {name: getattr(call, name) for name in rule if torch.is_tensor(getattr(call, name))}
    layout = Layout(tensors, rule, reduces)
    local = {name: layout.local(name) for name in tensors}
    if reduces is not None and reduces in layout.sharded:
        local["group"] = part_of(layout.mesh, layout.sharded.index(reduces), layout.sizes[reduces])
    outputs = implementation(**(call._asdict() | local))
    returns = (returns,) if isinstance(returns, str) else returns
    if torch.is_tensor(outputs):
        return layout.whole(outputs, returns[0])
    results = [None if result is None else layout.whole(result, dims) for result, dims in zip(outputs, returns)]
    return type(outputs)._make(results) if hasattr(outputs, "_make") else tuple(results)


class Layout:
    """Placements of the tensors of one call.

    Args:
        tensors: name -> DTensor. rule: name -> its dimensions. reduces: as in `by_shards`.

    Attributes:
        mesh: their DeviceMesh.
        dims: name -> the names of its dimensions.
        sizes: dimension -> its size over all ranks.
        sharded: for each dimension of the mesh the dimension that it shards, or None.
    """

    def __init__(self, tensors, rule, reduces=None):
        from torch.distributed.tensor import DTensor, Shard

        first = next(iter(tensors))
        self.tensors, self.mesh, self.dims, self.sizes = tensors, tensors[first].device_mesh, {}, {}
        self.reduces = reduces
        for name, tensor in tensors.items():
            fits = isinstance(tensor, DTensor) and tensor.device_mesh == self.mesh
            allowed = f"a DTensor on the mesh of {first}, for example by distribute_tensor(..., [Replicate()])"
            check(fits, name, f"a {type(tensor).__name__}" + " on another mesh" * isinstance(tensor, DTensor), allowed)
            self.dims[name] = _named(name, tensor.shape, rule[name])
            for dim, size in zip(self.dims[name], tensor.shape):
                self.sizes.setdefault(dim, size)
        self.sharded = [None] * self.mesh.ndim
        for axis in range(self.mesh.ndim):
            dims = []
            for name, tensor in tensors.items():
                placement = tensor.placements[axis]
                dim = self.dims[name][placement.dim % tensor.ndim] if type(placement) is Shard else None
                if dim is not None and not dim.isupper():
                    dims.append(dim)
            if reduces in dims and self._can_reduce(axis):
                self.sharded[axis] = reduces
            else:
                self.sharded[axis] = next((dim for dim in dims if dim != reduces), None)

    def _can_reduce(self, axis):
        """Tell whether each rank of this axis can hold a part of the reduced dimension."""
        return self.reduces not in self.sharded and part_of(self.mesh, axis, self.sizes[self.reduces]) is not None

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

        given, dims = self.tensors[name], self.dims[name]
        tensor = given.redistribute(self.mesh, self._placements(dims, Replicate()))
        if tensor.requires_grad and any(placement.is_partial() for placement in given.placements):
            tensor.register_hook(_added_up)
        finish_collective(tensor)
        return tensor.to_local(grad_placements=self._placements(dims, Partial()))

    def whole(self, result, returns):
        """Return the DTensor of the ranks' results.

        Args:
            returns: the name of an argument with its shape, or its dimensions.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if returns in self.dims:
            dims, shape = self.dims[returns], list(self.tensors[returns].shape)
        else:
            dims = _named("result", result.shape, returns)
            shape = [self.sizes[dim] if dim in self.sharded else size for dim, size in zip(dims, result.shape)]
        placements = [
            Replicate() if dim is not None and dim == self.reduces else placement
            for dim, placement in zip(self.sharded, self._placements(dims, Partial()))
        ]
        ranks = [math.prod([self.mesh.size(axis) for axis, d in enumerate(self.sharded) if d == dim]) for dim in dims]
        if all(size % count == 0 for size, count in zip(shape, ranks)):
            return DTensor.from_local(result, self.mesh, placements, run_check=False)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            result.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )


def _added_up(grad):
    """Add up a gradient's partial sums, of which torch 2.10 would keep this rank's alone."""
    from torch.distributed.tensor import Replicate

    return grad.redistribute(grad.device_mesh, [Replicate() if p.is_partial() else p for p in grad.placements])


def _named(name, shape, pattern):
    """Name each dimension: numbers for "...", None for size 1 under "?"."""
    if not pattern:
        return [None] * len(shape)
    names = pattern.split()
    if names and names[0].startswith("..."):
        leading = len(shape) - len(names) + 1
        names = [f"{dim}{names[0][3:]}" for dim in range(leading)] + names[1:]
    check(len(names) == len(shape), name, f"{len(shape)} dimensions", f"({', '.join(pattern.split())})")
    return [None if size == 1 and dim.endswith("?") else dim.rstrip("?") for dim, size in zip(names, shape)]
