"""MLPs by the roles of their attributes, and the end of every one, down(f(gate) * up) or down(f(x)), the input of its
last projection not kept wherever nobody can tell.

A dictionary of names says which attribute of a module is its "gate", "up" and "down", and, where it has such,
"dropout_before" and "dropout_after" the last projection, "gate_scale", "down_scale", "limit" and "alpha". Without "up"
gate and up are halves of one projection, in the order that "up_first" says. With "up" None nothing is multiplied, and
"gate" is the first of two projections.
"""

import torch
from torch import nn

from liger_hw._torch import is_plain
from liger_hw.kernels.glu import unit
from liger_hw.kernels.glu_linear import glu_linear


def compute(module, names, x, function, options):
    """What `match_mlp` recognises, by the roles of `module`'s attributes; `function` is an op or its reference."""
    gate, up = gate_and_up(module, names, x)
    if "activation" in options:
        y = function(gate, **options)
        y = y if up is None else y * up
    else:
        y = function(gate, up, **options, **numbers(module, names))
    y = dropped(module, names.get("dropout_before"), y)
    return after_down(module, names, getattr(module, names["down"])(y))


def numbers(module, names):
    """The numbers that a clamped unit takes from attributes of `module`."""
    return {role: getattr(module, names[role]) for role in ("limit", "alpha") if role in names}


def gate_and_up(module, names, x):
    """The gate and up activations of `x`, from two projections or from the halves of one; up None without a gate."""
    gate = getattr(module, names["gate"])(x)
    if "up" in names:
        up = names["up"] and getattr(module, names["up"])(x)
    else:
        gate, up = gate.chunk(2, dim=-1)[:: -1 if names.get("up_first", False) else 1]
    scale = names.get("gate_scale")
    return gate if scale is None else gate * getattr(module, scale), up


def after_down(module, names, y):
    scale = names.get("down_scale")
    y = y if scale is None else y * getattr(module, scale)
    return dropped(module, names.get("dropout_after"), y)


def dropped(module, name, x):
    """`x` after the dropout, a child or a probability, that an attribute of `module` is."""
    if name is None:
        return x
    found = getattr(module, name)
    if isinstance(found, torch.nn.Module):
        return found(x)
    return torch.nn.functional.dropout(x, found, module.training)


def sorted_experts(x, first, second, function, options):
    """Each expert's share (T / E, H) of x (T, H) through a gated MLP; first (E, H, 2I), second (E, I, H)."""
    gate, up = torch.bmm(x.view(first.shape[0], -1, first.shape[1]), first).chunk(2, -1)
    return torch.bmm(function(gate, up, **options), second).view(-1, second.shape[-1])


def project_down(down, gate, up, activation):
    """down(f(gate) * up), with the gradients of `gate` and `up` in their place: the caller owns both.

    Args:
        down: the module that projects.
        gate, up: (..., C), what the projections before it returned, and nobody else reads; up None: down(f(gate)).
        activation: one of `glu.ACTIVATIONS`.
    """
    if is_linear_and_nothing_else(down) and is_plain(gate, up):
        return glu_linear(gate, up, down.weight, down.bias, activation, in_place=True)
    return down(unit(gate, up, activation, in_place=True))


def is_linear_and_nothing_else(module):
    """Whether calling `module` is F.linear with its weight and bias, which are there, and has no other effect.

    No adapter, no quantised or sharded weight, no parametrisation, no forward replaced on the instance, and no hooks:
    a hook may bring the weight (ZeRO-3, offloading), or look at the input.
    """
    return (
        type(module) is nn.Linear
        and "forward" not in module.__dict__
        and is_plain(module.weight, module.bias)
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and not nn.modules.module._has_any_global_hook()
    )
