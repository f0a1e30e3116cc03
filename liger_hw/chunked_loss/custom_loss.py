"""Parts of the base classes for a program's own losses.

Such a loss is an autograd function with liger_kernel's interface: its forward computes the gradients.
"""

from contextlib import nullcontext

import torch
from torch.compiler import is_compiling

from liger_hw._torch import without_saved_tensors_hooks
from liger_hw.dispatch import uncast, widen
from liger_hw.losses.engine import gradients_of

SLICE = 2**22  # values of a gradient that are in fp32 at once


def with_gradients(function, tensors, *arguments, grad_output=None):
    """Call `function(*tensors, *arguments)` and differentiate its first output, before a loss scale is known.

    In fp16, also that of autocast, the function gets fp32 tensors and returns fp32 gradients: those rounded to fp16
    would underflow. Autograd rounds a gradient to its tensor's dtype after the multiplication by the loss scale.

    Args:
        function: returns the loss, or (loss, *others).
        tensors: each may be None.
        arguments: constants.
        grad_output: gradient of the first output; ones by default.

    Returns:
        (its outputs, the first detached; the gradient of each tensor, None if the tensor requires none).
    """
    context = nullcontext()
    if in_fp16(tensors[0]):
        context = uncast(tensors[0])
        tensors = [t if t is None else t.detach().float().requires_grad_(t.requires_grad) for t in tensors]
    with context, without_saved_tensors_hooks():
        loss, others, leaves = _with_graph(function, tensors, *arguments)
        grad_output = torch.ones_like(loss) if grad_output is None else grad_output.to(loss.dtype)
        return (loss.detach(), *others), _gradients(loss, leaves, grad_output)


def in_fp16(x):
    """Tell whether products of `x` are fp16, by its dtype or by autocast."""
    kind = x.device.type
    autocast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16
    return autocast or x.dtype == torch.float16


def keep_gradients(ctx, function, *tensors):
    """Call `function(*tensors)` and keep the gradients of its first output for `CustomLoss.backward`.

    In fp16 it keeps the graph instead: gradients rounded before the loss scale is known would underflow.

    Args:
        ctx: of an autograd function. function: returns the loss, or (loss, *others). tensors: each may be None.

    Returns:
        its outputs, the first detached.
    """
    if in_fp16(tensors[0]):
        loss, others, leaves = _with_graph(function, tensors)
        ctx.graph = loss, leaves
        return loss.detach(), *others
    outputs, gradients = with_gradients(function, tensors)
    ctx.save_for_backward(*gradients)
    return outputs


class CustomLoss(torch.autograd.Function):
    """Base class of a program's own losses.

    The `forward` of a derived class calls `keep_gradients` with input, weight and bias.

    Attributes:
        bias_at: position of the bias among the arguments, of which input and weight are the first.
    """

    bias_at: int

    @classmethod
    def backward(cls, ctx, grad_output, *_):
        """Return the gradients of the arguments up to the bias.

        Raises:
            RuntimeError: create_graph=True, as the gradients are constants of the forward.
        """
        if torch.is_grad_enabled() and not is_compiling():
            raise RuntimeError(
                f"{cls.__name__} has no second-order gradients: call backward without create_graph=True, or compute "
                "this loss from logits by functions of torch"
            )
        grad_output = grad_output[0] if isinstance(grad_output, tuple) else grad_output
        if hasattr(ctx, "graph"):
            grad_input, grad_weight, grad_bias = _gradients(*ctx.graph, grad_output)
        else:
            kept = ctx.saved_tensors
            grad_input, grad_weight, grad_bias = (g if g is None else _scaled(g, grad_output) for g in kept)
        return grad_input, grad_weight, *[None] * (cls.bias_at - 2), grad_bias


def _with_graph(function, tensors, *arguments):
    """Call `function` on detached leaves with the tensors' requires_grad: (loss, others, leaves)."""
    leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    with torch.set_grad_enabled(any(leaf is not None and leaf.requires_grad for leaf in leaves)):
        returned = function(*leaves, *arguments)
    loss, *others = returned if isinstance(returned, tuple) else (returned,)
    return loss, others, leaves


def _gradients(loss, leaves, grad_output):
    """Differentiate the loss: the gradient of each leaf, None if the leaf requires none."""
    differentiable = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    gradients = iter(gradients_of(loss, differentiable, grad_output) if differentiable else ())
    return [next(gradients) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def loss_and_others(returned):
    """Split a loss function's output, loss or (loss, *others), into (loss, detached others)."""
    loss, *others = returned if isinstance(returned, (tuple, list)) else (returned,)
    return loss, [torch.as_tensor(other).detach() for other in others]


def join_results(call_outputs):
    """Join the others of several calls: sum numbers, concatenate rows."""
    return [sum(parts) if parts[0].ndim == 0 else torch.cat(parts) for parts in zip(*call_outputs)]


def _scaled(gradient, factor):
    """Return gradient * factor, rounded once, without a copy in fp32 of the whole."""
    if is_compiling() or gradient.itemsize > 2:
        return (widen(gradient) * factor).to(gradient.dtype)
    scaled, rows = torch.empty_like(gradient), max(SLICE // max(gradient[:1].numel(), 1), 1)
    for part, result in zip(gradient.split(rows), scaled.split(rows)):
        result.copy_(widen(part) * factor)
    return scaled
