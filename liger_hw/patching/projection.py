"""Compute the end of an MLP without saving the input of its last projection."""

from torch import nn

from liger_hw._torch import is_plain
from liger_hw.kernels.mlp.glu import unit
from liger_hw.kernels.mlp.glu_linear import glu_linear
from liger_hw.patching.hooks import is_intercepted


def project_down(down, gate, up, activation):
    """Compute down(f(gate) * up); the backward writes the gradients over `gate` and `up`.

    Args:
        down: the last projection. If it is not a plain linear layer, the function calls it and saves its input.
        gate, up: (..., C), outputs of earlier projections, which nothing else reads; up None: down(f(gate)).
        activation: one of `glu.ACTIVATIONS`.
    """
    if is_plain_linear(down) and is_plain(gate, up):
        return glu_linear(gate, up, down.weight, down.bias, activation, in_place=True)
    return down(unit(gate, up, activation, in_place=True))


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
