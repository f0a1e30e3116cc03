"""Change Triton's interpreter in every process of tests that imports this file.

It becomes faster, its NaN that of GPUs, and an access outside of the memory of a launch's tensors an error.
"""

from bisect import bisect_right
from types import SimpleNamespace

from liger_hw._triton import interpreting

if interpreting():
    import numpy
    import torch
    from torch.utils._pytree import tree_leaves
    from triton import language
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

    # The interpreter patches Triton's language at each launch and at each call of a function inside: half of its time.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)

    # of a NaN and a number GPUs return the number; so do later interpreters than that of Triton 3.6
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmin)
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)

    memory = []  # (first address, address after the last) of the running launch's tensors, in order

    def noting(init_args):
        def init(self, args, kwargs):
            hosts = init_args(self, args, kwargs)
            storages = {x.untyped_storage() for x in tree_leaves(hosts) if isinstance(x, torch.Tensor)}
            memory[:] = sorted({(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages})
            return hosts

        return init

    def is_inside(first, last):
        place = bisect_right(memory, (first, float("inf"))) - 1
        return place >= 0 and last <= memory[place][1]

    def check(pointers, mask):
        """Raise an AssertionError if a valid lane's value lies outside of every tensor's memory."""
        valid = pointers.data if mask is None or mask.data.all() else pointers.data[mask.data]
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        if valid.size and not is_inside(int(valid.min()), int(valid.max()) + size):
            outside = [p for p in valid.flat if not is_inside(int(p), int(p) + size)]
            assert not outside, f"{len(outside)} of {valid.size} accesses lie outside of the memory of all tensors"

    def checked(access, mask_place):
        def accessing(self, pointers, *args):
            check(pointers, args[mask_place])
            return access(self, pointers, *args)

        return accessing

    GridExecutor._init_args_hst = noting(GridExecutor._init_args_hst)
    InterpreterBuilder.create_masked_load = checked(InterpreterBuilder.create_masked_load, 0)
    InterpreterBuilder.create_masked_store = checked(InterpreterBuilder.create_masked_store, 1)
