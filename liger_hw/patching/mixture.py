r"""Compute the experts of a mixture by two grouped matrix products that save little.

For token t, its k experts e and their routing weights w:

    out[t] = sum over k of w (f(x[t] G_e^T) * (x[t] U_e^T)) D_e^T

The operations, their order and rounding are those of transformers' `grouped_mm_experts_forward`, so the results are
bitwise equal, except that here unrounded fp32 products are added, which changes a rare tie of 16 bits. For every pair
of a token and an expert, transformers saves the gathered input, gate and up, their product and its projection:
2H + 3I values. This function saves gate and up alone (2I), and writes their gradients over them. The backward gathers x
and dout again, recomputes the product in the pass that computes the gradients (`expert_glu`), and computes the routing
weights' gradient before the down projection, where both gradients need the same matrix product:

    dw = <dout[t], y D_e^T> = <dout[t] D_e, y>,      dy = w dout[t] D_e

The gradient of x is a sum over k of gathered rows (`gathered_sum`), while the backward of indexing would sort. Experts
without a gate, f(x U^T) D^T, have no product: they save I values instead of 2H + 2I or more.
"""

import torch

from liger_hw._torch import grouped_mm
from liger_hw.dispatch import Function
from liger_hw.kernels.expert_glu import expert_glu_backward_in_place
from liger_hw.kernels.gathered_sum import sum_gathered
from liger_hw.kernels.glu import glu


def mixture(x, index, routing_weights, first, down, up_first, activation):
    """Compute the experts' output (T, H).

    Args:
        x: (T, H), tokens.
        index, routing_weights: (T, k), the experts of each token and their weights.
        first: (E, 2I, H), gate and up of each expert; (E, I, H) without a gate.
        down: (E, H, I).
        up_first: whether up comes before gate in `first`; None without a gate.
        activation: one of `glu.ACTIVATIONS`.
    """
    form, kept = (up_first, activation), []
    placeholder = MixtureFunction.apply(x, first, down, index, routing_weights, form, kept)
    return ProjectedFunction.apply(placeholder, (down, *kept), form, index.shape)


def grouped(x, weights, offsets):
    """Multiply (S, K) by (E, K, N) or (K, S) by (S, N) per group."""
    return grouped_mm()(x, weights, offs=offsets)  # groups of S end at offsets; (K, S) by (S, N) gives (E, K, N)


class MixtureFunction(Function):
    """First projection of every expert, and the whole backward.

    It takes x (T, H), first, down, index, routing_weights, (up_first, activation) as in `mixture`, and a list, to which
    it adds the tensors that `ProjectedFunction` needs. It returns a placeholder (T, H) of one value for the graph.
    """

    @staticmethod
    def forward(ctx, x, first, down, index, routing_weights, form, kept):
        experts, order = torch.sort(index.reshape(-1))
        tokens = order // index.shape[1]
        counts = experts.float() if x.device.type == "cpu" else experts.int()  # histc takes these dtypes there
        counts = torch.histc(counts, bins=first.shape[0], min=0, max=first.shape[0] - 1)
        offsets = counts.cumsum(0, dtype=torch.int32)
        position = torch.empty_like(order)  # of each pair of a token and an expert among the sorted rows
        position[order] = torch.arange(len(order), device=order.device)
        halves = grouped(x[tokens], first.transpose(1, 2), offsets)
        row_weights = routing_weights.reshape(-1)[order]
        kept += halves, row_weights, position, offsets
        ctx.save_for_backward(x, first, down, halves, row_weights, tokens, position, offsets)
        ctx.form, ctx.shape, ctx.overwritten = form, index.shape, False
        return x.new_empty_strided(x.shape, (0, 0))

    @staticmethod
    def backward(ctx, dout):
        if ctx.overwritten:
            raise RuntimeError(
                "a second backward through patched experts: the first one wrote its gradients over gate and up. Call "
                "the model again, or patch it with swiglu=False"
            )
        x, first, down, halves, row_weights, tokens, position, offsets = ctx.saved_tensors
        up_first, activation = ctx.form
        needs_x, needs_first, needs_down, _, needs_routing_weights, *_ = ctx.needs_input_grad
        dx = dfirst = ddown = drouting_weights = None
        dout = dout[tokens]
        y = grouped(dout, down, offsets)  # dout D_e, which expert_glu_backward_in_place overwrites with the product
        ctx.overwritten = True
        drow_weights = expert_glu_backward_in_place(*_gate_and_up(halves, up_first), y, row_weights, activation)
        if needs_routing_weights:
            drouting_weights = drow_weights[position].view(ctx.shape)
        if needs_down:
            ddown = grouped(dout.mul_(row_weights[:, None]).t(), y, offsets)
        del dout, y
        if needs_first:
            dfirst = grouped(halves.t(), x[tokens], offsets)
        if needs_x:
            dx = sum_gathered(grouped(halves, first, offsets), position.view(ctx.shape), None)
        return dx, dfirst, ddown, None, drouting_weights, None, None


class ProjectedFunction(Function):
    """Second projection of every expert, which passes its gradient unchanged to `MixtureFunction`.

    It saves nothing. Activation checkpointing recomputes up to the last saved tensor, so it skips this function.
    """

    @staticmethod
    def forward(ctx, placeholder, tensors, form, shape):  # autograd does not track tensors in a tuple
        down, halves, row_weights, position, offsets = tensors
        up_first, activation = form
        gate, up = _gate_and_up(halves, up_first)
        projected = grouped(glu(gate, up, activation), down.transpose(1, 2), offsets)
        return sum_gathered(projected, position.view(shape), row_weights)

    @staticmethod
    def backward(ctx, dout):
        return dout, None, None, None


def _gate_and_up(halves, up_first):
    if up_first is None:
        return halves, None
    gate, up = halves.chunk(2, dim=-1)
    return (up, gate) if up_first else (gate, up)
