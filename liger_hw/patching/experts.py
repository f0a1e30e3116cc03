r"""Experts of a mixture as two grouped matrix products, of which the backward needs as little as it can.

For token t, its k experts e and their routing weights w:

    out[t] = sum over k of w (f(x[t] G_e^T) * (x[t] U_e^T)) D_e^T

in the operations, order and rounding of transformers' `grouped_mm_experts_forward`, so the result has its bits (but for
products in fp32 that are added unrounded, which turn a rare tie of 16 bits). That one keeps, of every pair of a token
and an expert, the gathered input, gate and up, their product and its projection: 2H + 3I values. Here gate and up alone
stay (2I), and their gradients take their place: the backward gathers x and dout again, makes the product again in the
pass that makes the gradients (`expert_glu`), and takes the routing weights' gradient before the down projection, where
both gradients need the same matrix product:

    dw = <dout[t], y D_e^T> = <dout[t] D_e, y>,      dy = w dout[t] D_e

A sum over k of gathered rows (`gathered_sum`) stands where indexing's backward would sort. Experts without a gate,
f(x U^T) D^T, are the same without the product: I values stay instead of 2H + 2I or more.
"""

import torch

from liger_hw._torch import grouped_mm, is_plain
from liger_hw.dispatch import Function
from liger_hw.kernels.expert_glu import expert_glu_backward_in_place
from liger_hw.kernels.gathered_sum import sum_gathered
from liger_hw.kernels.glu import glu, swiglu


def computes(module, x):
    """Whether `mixture` does what this experts module would do with the tokens x, and there is something to save."""
    from transformers.integrations import moe

    weights = [getattr(module, name, None) for name in (_first(module), "down_proj")]
    return (
        module.config._experts_implementation == "grouped_mm"
        and moe.ALL_EXPERTS_FUNCTIONS.get("grouped_mm", None) is moe.grouped_mm_experts_forward
        and not (module.has_bias or module.is_transposed or getattr(module, "has_post_expert_norm", False))
        # hooks bring sharded weights, or mark the tokens that belong to another rank's experts
        and not (getattr(module, "_is_expert_parallel", False) or module._forward_pre_hooks or module._forward_hooks)
        and not torch.compiler.is_compiling()
        and is_plain(x, *weights)
        and all(w is not None and w.dtype == x.dtype for w in weights)
        and torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in (x, *weights))
        and swiglu.choose(x.device, x.dtype) != "reference"
        and moe._can_use_grouped_mm(x, weights[0], None)
    )


def mixture(module, x, index, weights, up_first, activation):
    """The experts' output (T, H) for tokens x (T, H), their experts (T, k) and routing weights (T, k)."""
    first, form = getattr(module, _first(module)), (up_first if module.has_gate else None, activation)
    made = []
    out = MixtureFunction.apply(x, first, module.down_proj, index, weights, form, made)
    return ProjectedFunction.apply(out, (module.down_proj, *made), form, index.shape)


def _first(module):
    return "gate_up_proj" if module.has_gate else "up_proj"


def grouped(x, weights, offsets):
    """(S, K) rows in groups that end at `offsets` times (E, K, N), or (K, S) times (S, N) group by group: (E, K, N)."""
    return grouped_mm()(x, weights, offs=offsets)


class MixtureFunction(Function):
    """x (T, H), gate_up (E, 2I, H), down (E, H, I), index and weights (T, k) -> what stands for (T, H), without memory.

    `form` is whether up comes first, None where there is no gate and gate_up is (E, I, H), and the activation. `made`
    is filled with what `ProjectedFunction` needs.
    """

    @staticmethod
    def forward(ctx, x, gate_up, down, index, weights, form, made):
        experts, order = torch.sort(index.reshape(-1))
        tokens = order // index.shape[1]
        counts = experts.float() if x.device.type == "cpu" else experts.int()  # what histc takes there
        counts = torch.histc(counts, bins=gate_up.shape[0], min=0, max=gate_up.shape[0] - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        halves = grouped(x[tokens], gate_up.transpose(1, 2), offsets)
        share = weights.reshape(-1)[order]
        made += halves, share, place, offsets
        ctx.save_for_backward(x, gate_up, down, halves, share, tokens, place, offsets)
        ctx.form, ctx.shape, ctx.overwritten = form, index.shape, False
        return x.new_empty_strided(x.shape, (0, 0))

    @staticmethod
    def backward(ctx, dout):
        if ctx.overwritten:
            raise RuntimeError(
                "a second backward through patched experts: the first one wrote its gradients over gate and up. Call "
                "the model again, or patch it with swiglu=False"
            )
        x, gate_up, down, halves, share, tokens, place, offsets = ctx.saved_tensors
        up_first, activation = ctx.form
        wants_x, wants_gate_up, wants_down, _, wants_weights, *_ = ctx.needs_input_grad
        dx = dgate_up = ddown = dweights = None
        dout = dout[tokens]
        y = grouped(dout, down, offsets)  # dy before its weight, until the next line but one
        ctx.overwritten = True
        dshare = expert_glu_backward_in_place(*_gate_and_up(halves, up_first), y, share, activation)
        if wants_weights:
            dweights = dshare[place].view(ctx.shape)
        if wants_down:
            ddown = grouped(dout.mul_(share[:, None]).t(), y, offsets)
        del dout, y
        if wants_gate_up:
            dgate_up = grouped(halves.t(), x[tokens], offsets)
        if wants_x:
            dx = sum_gathered(grouped(halves, gate_up, offsets), place.view(ctx.shape), None)
        return dx, dgate_up, ddown, None, dweights, None, None


class ProjectedFunction(Function):
    """The experts' output, for which a `MixtureFunction` only stood in. It keeps nothing, so that under checkpointing,
    which computes again up to the last tensor that is kept, it is not made again.
    """

    @staticmethod
    def forward(ctx, stand_in, tensors, form, shape):  # in a tuple autograd does not see them
        down, halves, share, place, offsets = tensors
        up_first, activation = form
        gate, up = _gate_and_up(halves, up_first)
        projected = grouped(glu(gate, up, activation), down.transpose(1, 2), offsets)
        return sum_gathered(projected, place.view(shape), share)

    @staticmethod
    def backward(ctx, dout):
        return dout, None, None, None


def _gate_and_up(halves, up_first):
    if up_first is None:
        return halves, None
    gate, up = halves.chunk(2, dim=-1)
    return (up, gate) if up_first else (gate, up)
