"""Autograd functions that cost little host time."""

import functools

import torch
from torch.compiler import is_compiling

from liger_hw._torch import (
    constant_result,
    has_batched,
    has_tangents,
    in_forward_ad,
    is_exporting,
    no_saved_tensors_hooks,
    saved_tensors_may_change,
    transforms_active,
)

DESCRIPTOR = vars(torch.autograd.Function)["apply"]  # torch 2.15 has C's, which takes the class as an argument itself
TORCHS_APPLY = getattr(DESCRIPTOR, "__func__", DESCRIPTOR)
REFERENCE_ADVICE = "run under liger_hw.use_backend('reference')"


@constant_result
def _within_transforms():
    return transforms_active()


def refuse_lost_backward(advice=REFERENCE_ADVICE):
    """Raise a RuntimeError where a tracer would lose a function's backward."""
    if torch.is_grad_enabled() and is_exporting():
        raise RuntimeError(
            f"torch.export keeps no backward of liger_hw's kernels: {advice}, or export under torch.no_grad()"
        )
    differentiates = torch.is_grad_enabled() and _within_transforms() or in_forward_ad()
    if differentiates and torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            f"torch.compile loses derivatives by torch.func, and in forward mode, of liger_hw's kernels: {advice}"
        )


def save(ctx, *tensors):
    """Keep tensors, or None, for the backward of a function that reads them by `saved`."""
    ctx.save_for_backward(*tensors)
    ctx.strides = None if no_saved_tensors_hooks() else strides(tensors)


def strides(tensors):
    """Return the strides of tensors, which hooks of a program may change."""
    return None if is_compiling() else [None if x is None else x.stride() for x in tensors]


def saved(ctx):
    """Return the tensors that `save` kept, with the strides that they had."""
    if ctx.strides is None:
        return ctx.saved_tensors
    return tuple(x if x is None else _with_strides(x, strides) for x, strides in zip(ctx.saved_tensors, ctx.strides))


def _with_strides(x, strides):
    if x.stride() == strides or x.layout != torch.strided:
        return x
    part = x
    for dim, stride in enumerate(strides):  # memory for one row of those that were one
        part = part[(slice(None),) * dim + (slice(0, 1),)] if stride == 0 else part
    return part.new_empty_strided(part.shape, strides).copy_(part).expand(x.shape)


class Function(torch.autograd.Function):
    """An autograd function of kernels: first-order, and cheaper to call than torch's own.

    torch's `apply` searches every argument for the wrappers of functorch, which only matters within a transform, and
    makes a graph node even where gradients are off: 1.6 us (an x86 CPU) and 5 us (an H200's host).

    Attributes:
        instead: the advice in the errors below.

    Raises:
        RuntimeError: a backward with create_graph=True, whose second-order terms no kernel computes, or with batched
            gradients; a kept tensor that a program has written to; an argument with a tangent of forward-mode AD.
    """

    instead = REFERENCE_ADVICE

    def __init_subclass__(cls):
        if "backward" in vars(cls):  # not where a base has wrapped it
            backward = cls.backward

            @functools.wraps(backward)
            def first_order(ctx, *grads):
                if torch.is_grad_enabled() and not is_compiling():
                    raise RuntimeError(
                        f"{cls.__name__} has no second-order gradients: call backward without create_graph=True, or "
                        f"{cls.instead}"
                    )
                try:
                    return backward(ctx, *grads)
                except Exception as error:  # only now, as the question costs host time
                    if "has been modified by an inplace operation" in str(error):
                        raise RuntimeError(
                            f"a tensor that {cls.__name__} keeps for its backward was modified by an inplace "
                            f"operation: write to a copy, or {cls.instead}"
                        ) from error
                    if saved_tensors_may_change() and isinstance(error, AttributeError):
                        raise RuntimeError(
                            f"torch.autograd.graph.allow_mutation_on_saved_tensors fails for an absent argument that "
                            f"{cls.__name__} may write to: {cls.instead}"
                        ) from error
                    if not has_batched(grads):
                        raise
                    raise RuntimeError(
                        f"{cls.__name__} takes no batched gradients (is_grads_batched=True, vectorize=True): "
                        f"pass one at a time, or {cls.instead}"
                    ) from error

            cls.backward = staticmethod(first_order)
        cls.apply_with_graph = super(torch.autograd.Function, cls).apply  # torch's in C, which searches for no wrappers

    @classmethod
    def apply(cls, *args):
        if is_compiling() or transforms_active():
            return TORCHS_APPLY(cls, *args)  # Dynamo, which traces this where it breaks a graph, knows no super()
        if has_tangents(args):  # without a graph they would be lost, and a missing tangent counts as zero
            raise RuntimeError(f"{cls.__name__} has no forward-mode derivatives: {cls.instead}")
        if not torch.is_grad_enabled():
            return cls.forward(_NoGraph(), *args)
        return cls.apply_with_graph(*args)


class _NoGraph:
    """The context of a forward without a backward, which keeps nothing."""

    needs_input_grad = (False,) * 32  # no function has more arguments

    def save_for_backward(self, *tensors):
        pass

    mark_non_differentiable = set_materialize_grads = save_for_backward
