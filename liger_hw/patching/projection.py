"""Compute the end of an MLP without saving the input of its last projection."""

from typing import NamedTuple

import torch
from torch import nn

from liger_hw._torch import backward_hooks, constant_result, forward_hooks, has_global_module_hooks, is_plain
from liger_hw.kernels.linear.lora_linear import lora_glu_linear, lora_linear_group, share_dx
from liger_hw.kernels.mlp.glu import unit
from liger_hw.kernels.mlp.glu_linear import glu_linear
from liger_hw.patching.hooks import is_intercepted, module_of, only_gathers, original_class

LINEAR_FORWARD = nn.Linear.forward
# classes whose forward returns a new tensor, which they keep nowhere; adapters hold such a layer as `base_layer`
PRODUCERS = {
    ("bitsandbytes.nn.modules", "Linear4bit"), ("bitsandbytes.nn.modules", "Linear8bitLt"),
    ("peft.tuners.lora.bnb", "Linear4bit"), ("peft.tuners.lora.bnb", "Linear8bitLt"),
    ("peft.tuners.lora.layer", "Linear"), ("transformers.pytorch_utils", "Conv1D"),
}  # fmt: skip


class Adapted(NamedTuple):
    """The arguments of `lora_linear` after x, and the magnitudes of DoRA or None."""

    weight: torch.Tensor | tuple | None
    bias: torch.Tensor | None
    lora_a: torch.Tensor
    lora_b: torch.Tensor
    scaling: float
    dropout: float
    magnitudes: torch.Tensor | None = None


def project_down(down, *others):
    """Compute down(f(gate) * up); arguments as `project_by_op`."""
    y, is_projected = project_by_op(down, *others)
    return y if is_projected else down(y)


def project_by_op(down, gate, up, activation, producers):
    """Compute down(f(gate) * up), or f(gate) * up, by an op.

    The backward is in place where nobody else may read the inputs.

    Args:
        down: the last projection. Unless it is a plain linear layer, alone or with an adapter without dropout, it is
            for the caller to call, and saves its input.
        gate, up: (..., C), outputs of earlier projections; up None: down(f(gate)).
        activation: one of `glu.ACTIVATIONS`.
        producers: the modules whose outputs `gate` and `up` are.

    Returns:
        (result, whether it is projected).
    """
    in_place = return_new_memory(producers)
    if is_plain_linear(down) and is_plain(gate, up):
        return glu_linear(gate, up, down.weight, down.bias, activation, in_place=in_place), True
    adapter = adapter_of(down, gate) if is_plain(up) else None
    if adapter is not None:
        return lora_glu_linear(gate, up, *adapter, activation, in_place), True
    return unit(gate, up, activation, in_place=in_place), False


def project_both(gate, up, x):
    """Return gate(x) and up(x), by one function where both are patched layers of PEFT."""
    adapters = adapter_of(gate, x), adapter_of(up, x)
    if None not in adapters and share_dx(x, *adapters):
        return lora_linear_group(x, *adapters)
    return gate(x), up(x)


def adapter_of(module, x):
    """Return (weight, bias, lora_a, lora_b, scaling) if they compute a call of `module`, or None.

    They do in a patched layer of PEFT without dropout and DoRA.
    """
    adapted = getattr(type(module), "liger_adapted", None)
    adapted = None if adapted is None or is_intercepted(module) else adapted(module, x)
    return None if adapted is None or adapted.dropout or adapted.magnitudes is not None else adapted[:5]


def adapter_layers(lora, *names):
    """Return {adapter: layer} of PEFT's containers, or None where a program set its own."""
    layers, find = [], lora._modules.get
    for name in names:
        container = find(name)
        if type(container) is not nn.ModuleDict:
            return None
        layers.append(container._modules)
    return layers


def return_new_memory(modules):
    """Tell whether a backward may write over the outputs of `modules`: nobody else holds them."""
    return not has_global_module_hooks() and all(map(_returns_new_memory, modules))


def _returns_new_memory(module):
    """Tell whether only the caller of `module` holds its output.

    A hook, a forward of the program's own or an unknown class may keep the output, or return a tensor that the program
    keeps: a parameter, the input, an activation to patch in.
    """
    cls = original_class(module)
    known = cls is nn.Linear and cls.forward is LINEAR_FORWARD or _is_producer(cls)
    if not known or "forward" in module.__dict__:
        return False
    variants = getattr(module, "lora_variant", {}).values()
    if not all(type(variant).__module__.startswith("peft.") for variant in variants):
        return False
    if not all(map(only_gathers, (*forward_hooks(module), *backward_hooks(module)))):
        return False
    base = module._modules.get("base_layer")
    return base is None or _returns_new_memory(base)


@constant_result
def _is_producer(cls):
    """Tell whether a class is one of `PRODUCERS`, with the forward that its module defines."""
    return (cls.__module__, cls.__name__) in PRODUCERS and module_of(cls.forward) == cls.__module__


def is_plain_linear(module):
    """Tell whether calling `module` only computes F.linear with its weight and bias.

    False with an adapter, a quantised or sharded weight, a parametrization, a forward set on the instance, or hooks.
    """
    return type(module) is nn.Linear and not is_intercepted(module) and is_plain(module.weight, module.bias)


def is_projection(module):
    """Tell whether `module` has in and out features, or is a Conv1D."""
    return all(hasattr(module, name) for name in ("in_features", "out_features")) or (
        type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    )
