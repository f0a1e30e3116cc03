"""Autograd functions of scalar losses that compute their gradients in the forward, from the logits."""

import weakref

import torch

from liger_hw._torch import tensor_version
from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import Function, raw, widen
from liger_hw.launch import launch
from liger_hw.tuning import Config, row_warps, tuned


@tuned
def scale_gradients_config(device):
    # H200, 287 MB of bf16: 0.170 ms with this configuration, 0.193 with 8 warps and 4 programs, 0.166 with 2 warps,
    # which spill in fp32
    return Config({"BLOCK": 4096}, row_warps(4096, device, per_lane=32), programs=8)


@triton.jit
def _scale(X, size, dloss, BLOCK: tl.constexpr):
    # whole blocks without a mask: under a mask of any size the accesses of bf16 have 2 bytes instead of 16
    whole = size // BLOCK * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, whole, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(X + at, tl.load(X + at).to(tl.float32) * dloss)
    TAIL: tl.constexpr = BLOCK // 8
    for start in range(whole + tl.program_id(0).to(tl.int64) * TAIL, size, tl.num_programs(0) * TAIL):
        at = start + tl.arange(0, TAIL)
        x = tl.load(X + at, at < size, other=0.0).to(tl.float32)
        tl.store(X + at, x * dloss, at < size)


@triton.jit(do_not_specialize=["x_size", "w_size", "b_size"])
def scale_gradients(DLOSS, DX, DW, DB, x_size, w_size, b_size, BLOCK: tl.constexpr):
    dloss = tl.load(DLOSS).to(tl.float32)
    if dloss != 1.0:
        _scale(DX, x_size, dloss, BLOCK)
        _scale(DW, w_size, dloss, BLOCK)
        _scale(DB, b_size, dloss, BLOCK)


@raw(mutates=["dx", "dw", "db"])
def scale_in_place(
    dx: torch.Tensor, dw: torch.Tensor | None, db: torch.Tensor | None, dloss: torch.Tensor, with_kernels: bool
) -> None:
    """Multiply up to three contiguous gradients by the scalar incoming gradient, unless it is 1."""
    gradients = [gradient for gradient in (dx, dw, db) if gradient is not None]
    if not with_kernels:
        for gradient in gradients:
            gradient.mul_(dloss)
        return
    sizes = [gradient.numel() for gradient in gradients]
    config = scale_gradients_config(device_of(dx))
    grid = config.grid_for(-(-max(sizes) // config["BLOCK"])), 1, 1
    absent = 3 - len(sizes)
    launch(scale_gradients, grid, config, dloss, *gradients, *[dx] * absent, *sizes, *[0] * absent)


def _rounded(gradient, dloss, dtype):
    """Return gradient * dloss, rounded once to `dtype`, without another wide tensor."""
    if gradient.dtype == dtype:
        return gradient.mul_(dloss)
    return torch.mul(gradient, dloss, out=gradient.new_empty(gradient.shape, dtype=dtype))


def version_of(weight):
    """Return what `refuse_written` needs: a weak reference and the version, or None without a weight."""
    return None if weight is None else (weakref.ref(weight), tensor_version(weight))


def refuse_written(name, kept):
    """Raise a RuntimeError if a head's weight was written to since `version_of`.

    The gradients do not need it. But a linear layer, whose backward reads the weight, refuses such a program, too.
    """
    weight = None if kept is None else kept[0]()
    if weight is not None and tensor_version(weight) != kept[1]:
        raise RuntimeError(
            f"the weight {tuple(weight.shape)} of {name} was modified by an inplace operation between its forward and "
            "its backward: call backward before anything that writes to weights, such as optimizer.step()"
        )


class GradientsInForward(Function):
    """Base of functions that compute the gradients of a sum in the forward.

    The sum is the first output. A caller of `apply` calls `refuse_lost_backward` first, a forward `keep`. The first
    backward multiplies the gradients by the incoming one, on the device, and returns them. A second backward raises an
    error.
    """

    instead = f"{Function.instead} (of a model: pass skip_logits=False)"

    @staticmethod
    def keep(ctx, gradients, op, dtypes, with_kernels=True, scale=None, again="call it again", weight=None):
        """Hold the gradients of the function's first arguments until the backward.

        Args:
            gradients: one for each of these arguments; any value for an argument that needs none.
            op: the op's name for the error that refuses a second backward; `again`: the advice in that error.
            dtypes: of the gradients that the backward returns. A gradient kept in a wider dtype (see `_fp16`) is
                rounded to it after the multiplication.
            scale: (*gradients, incoming gradient) -> None, multiplies in place; None for contiguous gradients.
            weight: of a head, for `refuse_written`.
        """
        ctx.set_materialize_grads(False)
        ctx.traced = torch.compiler.is_compiling()  # the backward may not be, after a break of the graph
        if ctx.traced:
            ctx.save_for_backward(*gradients)
        else:  # the backward must hold the only reference, or autograd copies the gradients
            ctx.gradients, ctx.weight = gradients, version_of(weight if ctx.needs_input_grad[0] else None)
        ctx.op, ctx.dtypes, ctx.with_kernels, ctx.scale, ctx.again = op, dtypes, with_kernels, scale, again

    @staticmethod
    def backward(ctx, dloss, *_):
        if dloss is None:
            return (None,) * len(ctx.needs_input_grad)
        if ctx.traced:
            kept = zip(ctx.saved_tensors, ctx.dtypes)
            gradients = [(widen(gradient) * dloss).to(dtype) for gradient, dtype in kept]
        elif ctx.gradients is None:
            raise RuntimeError(
                f"{ctx.op} makes its gradients in the forward, and a first backward has taken them: for a second one "
                f"{ctx.again}"
            )
        else:
            refuse_written(ctx.op, ctx.weight)
            gradients, ctx.gradients, ctx.weight = list(ctx.gradients), None, None
            if any(gradient.dtype != dtype for gradient, dtype in zip(gradients, ctx.dtypes)):
                for dtype in ctx.dtypes:  # frees each wide gradient before it rounds the next
                    gradients.append(_rounded(gradients.pop(0), dloss, dtype))
            elif ctx.scale is None:
                scale_in_place(*gradients, *[None] * (3 - len(gradients)), dloss, ctx.with_kernels)
            else:
                ctx.scale(*gradients, dloss)
        needed = ctx.needs_input_grad
        used = [gradient if need else None for gradient, need in zip(gradients, needed)]
        return *used, *[None] * (len(needed) - len(used))
