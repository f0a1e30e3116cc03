"""The end of every gated MLP, down(f(gate) * up), its product not kept wherever nobody can tell."""

import torch
from torch import nn

from liger_hw.kernels.glu import GELU, geglu, swiglu
from liger_hw.kernels.glu_linear import glu_linear

PLAIN = (torch.Tensor, nn.Parameter)  # types whose memory is their own, which a DTensor's is not
APPROXIMATE = {activation: approximate for approximate, activation in GELU.items()}


def project_down(down, gate, up, activation):
    """down(f(gate) * up), with the gradients of `gate` and `up` in their place: the caller owns both.

    Args:
        down: the module that projects.
        gate, up: (..., C), what the projections before it returned, and nobody else reads.
        activation: one of `glu.ACTIVATIONS`.
    """
    if is_linear_and_nothing_else(down) and type(gate) in PLAIN and type(up) in PLAIN:
        return glu_linear(gate, up, down.weight, down.bias, activation, in_place=True)
    if activation == "silu":
        return down(swiglu(gate, up, in_place=True))
    return down(geglu(gate, up, APPROXIMATE[activation], in_place=True))


def is_linear_and_nothing_else(module):
    """Whether calling `module` is F.linear with its weight and bias, which are there, and has no other effect.

    No adapter, no quantised or sharded weight, no parametrisation, no forward replaced on the instance, and no hooks:
    a hook may bring the weight (ZeRO-3, offloading), or look at the input.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and type(module.weight) in PLAIN
        and (module.bias is None or type(module.bias) in PLAIN)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not nn.modules.module._has_any_global_hook()
    )
