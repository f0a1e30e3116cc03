"""What the base classes share: a loss of one's own is differentiated where the autograd function that it is in runs."""

import torch


def differentiated(function, *tensors):
    """The outputs of `function(*tensors)`, detached, and the gradients of the first for the tensors that want one."""
    leaves = [t if t is None else t.detach().requires_grad_(t.requires_grad) for t in tensors]
    asked = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    with torch.set_grad_enabled(bool(asked)):
        loss, *others = function(*leaves)
    found = iter(torch.autograd.grad(loss, asked) if asked else ())
    gradients = [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
    return (loss.detach(), *others), gradients


def loss_and_others(found):
    """What a loss function returned, a loss or (loss, *others), as the loss and the detached others."""
    loss, *others = found if isinstance(found, (tuple, list)) else (found,)
    return loss, [torch.as_tensor(other).detach() for other in others]


def gathered(calls):
    """One list of the others of several calls: numbers added up, rows one after the other."""
    return [sum(parts) if parts[0].ndim == 0 else torch.cat(parts) for parts in zip(*calls)]


def scaled(ctx, grad_output):
    """The saved gradients times the loss's, which derived classes hand on by itself or in the tuple that they get."""
    grad_output = grad_output[0] if isinstance(grad_output, tuple) else grad_output
    return [g if g is None else g * grad_output.to(g.dtype) for g in ctx.saved_tensors]
