"""Apply an MLP to pieces of a sequence, and recompute each piece in the backward.

    forward     y = [f(x_1), ..., f(x_n)]                       keeps x alone
    backward    for each piece: f(x_i) again, then its gradients

For T tokens, hidden size H and intermediate size I a gated MLP of this library keeps x, gate and up: T (H + 2 I)
numbers. In n pieces it keeps x alone, and the backward holds gate and up of one piece. The forward runs twice, 4/3 of
the operations of a step, as with activation checkpointing of the whole MLP, whose backward holds T (H + 2 I).

All pieces are part of one graph. So a parameter's gradient is complete when its hooks run, once: those of DDP, FSDP,
ZeRO and users. Its sum over the pieces is rounded once a piece; up to 32 pieces it keeps to the parity rule in bf16.
"""

import functools

import torch
from torch.compiler import is_compiling
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from liger_hw._torch import backward_number, is_plain
from liger_hw.checkpointing.weights import can_recompute, with_these_weights
from liger_hw.checks import check


class _Whole(torch.autograd.Function):
    """Pass x to its pieces alone.

    So torch adds no other gradient to an unfinished one.
    """

    @staticmethod
    def forward(ctx, x, gradients):
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        ctx.gradients.pop(backward_number(), None)
        return dx, None


class _Piece(torch.autograd.Function):
    """A piece of x, whose gradient goes into the memory of the whole one.

    The first piece of a backward returns that memory, and torch waits for the others before it passes it on.
    """

    @staticmethod
    def forward(ctx, x, start, size, gradients):
        ctx.place, ctx.shape, ctx.gradients = (start, size), x.shape, gradients
        ctx.set_materialize_grads(False)
        return x.narrow(-2, start, size)

    @staticmethod
    def backward(ctx, d):
        if d is None:
            return None, None, None, None
        gradients, number, first = ctx.gradients, backward_number(), None
        if number not in gradients:
            first = gradients[number] = d.new_zeros(ctx.shape)
        gradients[number].narrow(-2, *ctx.place).copy_(d)
        return first, None, None, None


def _pieces(x, pieces):
    """Yield each piece of x when it is needed.

    So its backward comes right after that of its result. torch.chunk's backward would hold the gradient of x twice: in
    pieces, and whole.
    """
    # number of a backward -> memory for its gradient of x: hooks run a backward within another, and threads several
    gradients, size = {}, pieces[0].shape[-2]
    x = _Whole.apply(x, gradients)
    for i, piece in enumerate(pieces):
        yield _Piece.apply(x, i * size, piece.shape[-2], gradients)


def tiled(function, module, x, shards=None):
    """Apply `function(module, x)` to pieces of x, recomputed in the backward.

    Under torch.func's transforms, forward-mode AD and `allow_mutation_on_saved_tensors`, the backward cannot compute a
    piece again, so the pieces keep what autograd keeps. A module with parametrizations or buffers, which may be a state
    (spectral norm), runs whole. Hooks of submodules run once a piece, and again in the backward; remove one after it.
    Parameters are those of the forward. Another change before the backward (of a submodule, an attribute, a hook, train
    or eval) changes what it computes, as with torch's checkpoint.

    Args:
        function: computes each token of its result from the same token of x alone. Random
            numbers (a dropout) are drawn piece by piece, and drawn again alike in the backward.
        x: (..., T, H), any floating dtype.
        shards: number of pieces along T, at most T; None: ceil(T / H).

    Returns:
        (..., T, H'), of the dtype and width that `function` returns.

    Raises:
        ValueError: x has one dimension, or `shards` is no positive integer.
        RuntimeError: in the backward, if a parameter was changed in place after the forward.
    """
    check(x.ndim >= 2, "x", x, "two dimensions or more: (..., T, H)")
    allowed = shards is None or isinstance(shards, int) and not isinstance(shards, bool) and shards > 0
    check(allowed, "shards", shards, "None or a positive integer")
    if any(map(is_parametrized, module.modules())) or next(module.buffers(), None) is not None:
        return function(module, x)
    pieces = x.chunk(shards or max(1, -(-x.shape[-2] // max(1, x.shape[-1]))), -2)
    if not can_recompute(x, *module.parameters()):
        return torch.cat([function(module, piece) for piece in pieces], -2)
    if torch.is_grad_enabled():
        if x.requires_grad and is_plain(x) and not is_compiling():
            pieces = _pieces(x, pieces)
        run_piece = functools.partial(function, module)
        if not is_compiling():
            run_piece = with_these_weights(run_piece, module)
        return torch.cat([checkpoint(run_piece, piece, use_reentrant=False) for piece in pieces], -2)
    part = function(module, pieces[0])
    y = part.new_empty(*part.shape[:-2], x.shape[-2], part.shape[-1])  # torch.cat would hold the result twice
    for i, y_piece in enumerate(y.split(pieces[0].shape[-2] or 1, -2)):
        y_piece.copy_(function(module, pieces[i]) if i else part)
    return y
