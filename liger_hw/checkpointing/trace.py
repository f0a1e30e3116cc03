"""Tell whether two runs of a layer have run the same operations so far.

Positions alone do not tell: a program may run one operation more in the forward than in the recomputation, to log a
result for example, and the operations behind it move by one.
"""

import torch

from liger_hw._torch import StorageWeakRef, is_plain, storage_id
from liger_hw.checkpointing.operations import tensors_in, written


class Trace:
    """Follow the operations of one run of a layer.

    Args:
        layer: the module, whose parameters and buffers have names.
        known: a dictionary that the runs of one call share.

    Attributes:
        digest: a number that two runs share if they ran the same operations so far, each with the same options, on
            tensors of the same layout from the same sources: a parameter, the result of an operation, or the n-th
            other memory that an operation read.
    """

    def __init__(self, layer, known):
        self.layer, self.known = layer, known
        self.digest, self.count, self.others = 0, 0, 0
        self.sources = None  # memory -> its source
        self.held = []  # a weak reference keeps the identity of freed memory from being used again

    def add(self, operation, args, kwargs) -> int:
        """Count a numbered operation that runs now; return how many ran before it."""
        self._step(operation, args, kwargs)
        self.count += 1
        return self.count - 1

    def note_results(self, results):
        """Note the results of the operation that was added last."""
        for place, x in enumerate(tensors_in(results)):
            self._name(x, (self.digest, place))

    def mutates(self, operation, args, kwargs):
        """Note an operation that writes to its arguments now."""
        self._step(operation, args, kwargs)
        for place, x in enumerate(written(operation, args, kwargs)):
            self._name(x, (self.digest, place))

    def passed(self, operation, args, results):
        """Note an operation that is not counted: a view, or a cast of a parameter."""
        argument_memory = {storage_id(x) for x in tensors_in(args) if _has_memory(x)}
        new = [x for x in tensors_in(results) if _has_memory(x) and storage_id(x) not in argument_memory]
        if new and self.sources is None:
            self._name_parts()
        for x in new:
            self._name(x, (operation, self._described(args)))

    def _step(self, operation, args, kwargs):
        if self.sources is None:
            self._name_parts()
        step = self.digest, operation, self._described(args), self._described(tuple(kwargs.items()))
        self.digest = self.known.setdefault(step, len(self.known) + 1)

    def _name_parts(self):
        """Name parameters and buffers, at the first operation: FSDP and a recomputation replace them before."""
        self.sources = {}
        for named in (self.layer.named_parameters(), self.layer.named_buffers()):
            for name, x in named:  # several may share memory
                if _has_memory(x) and storage_id(x) not in self.sources:
                    self._name(x, name)

    def _name(self, x, source):
        if _has_memory(x):
            memory = storage_id(x)
            if memory not in self.sources:
                self.held.append(StorageWeakRef(x.untyped_storage()))
            self.sources[memory] = source

    def _described(self, value):
        if isinstance(value, (list, tuple)):
            return tuple(map(self._described, value))
        if isinstance(value, (int, float, complex)):
            return repr(value)  # 1, 1.0 and True are equal
        if not isinstance(value, torch.Tensor):
            return value if value.__hash__ else type(value)
        if not _has_memory(value):
            return type(value), value.layout, value.dtype, value.shape
        source = self.sources.get(storage_id(value))
        if source is None:
            self.others += 1
            source = f"other {self.others}"
            self._name(value, source)
        return source, value.dtype, value.shape, value.stride(), value.storage_offset()


def _has_memory(x):
    return is_plain(x) and x.layout is torch.strided
