"""Tell whether two runs of a layer have run the same operations so far.

Positions alone do not tell: a program may run one operation more in the forward than in the recomputation, to log a
result for example, and the operations behind it move by one.
"""

import torch

from liger_hw._torch import is_plain, is_view_operation
from liger_hw.checkpointing.operations import memory_of, tensors_in


class Trace:
    """Follow the numbered operations of one run of a layer.

    Attributes:
        digest: a number that two runs share if they ran the same operations so far, each with the same options, on
            tensors of the same layout from the same sources: the result of an earlier operation, or the n-th other
            memory that an operation read.
    """

    def __init__(self):
        self.digest, self.count, self.others = 0, 0, 0
        self.sources = {}  # memory -> number of the operation that made it, or of other memory: -1, -2, ...

    def add(self, operation, args, kwargs):
        """Count an operation that runs now; return how many ran before it."""
        self.digest = hash((self.digest, operation, self._described((args, tuple(kwargs.items())))))
        self.count += 1
        return self.count - 1

    def made(self, results):
        """Note the results of the operation that was added last."""
        for x in tensors_in(results):
            if is_plain(x):
                self.sources[memory_of(x)] = self.count

    def passed(self, operation, results):
        """Note an operation that is not counted.

        Memory that it allocates has no earlier source any more.
        """
        if operation not in _views:
            _views[operation] = is_view_operation(operation) if hasattr(operation, "_schema") else True
        if not _views[operation]:
            for x in tensors_in(results):
                if is_plain(x):
                    self.sources.pop(memory_of(x), None)

    def _described(self, value):
        if isinstance(value, (list, tuple)):
            return tuple(map(self._described, value))
        if not isinstance(value, torch.Tensor):
            return value if value.__hash__ else type(value)
        if not is_plain(value):
            return type(value), value.shape
        memory = memory_of(value)
        source = self.sources.get(memory)
        if source is None:
            self.others -= 1
            source = self.sources[memory] = self.others
        return source, value.dtype, value.shape, value.stride(), value.storage_offset()


_views = {}  # operation -> whether its results share memory with its arguments
