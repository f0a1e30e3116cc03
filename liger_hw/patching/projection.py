"""The end of an MLP, down(f(gate) * up) or down(f(x)), without keeping the input of the last projection."""

from torch import nn

from liger_hw._torch import is_plain
from liger_hw.kernels.glu import unit
from liger_hw.kernels.glu_linear import glu_linear
from liger_hw.patching.hooks import is_intercepted


def project_down(down, gate, up, activation):
    """Compute down(f(gate) * up) and let the gradients of `gate` and `up` take their memory.

    Args:
        down: the module that projects. Unless it is a plain linear layer it is called, with its input kept.
        gate, up: (..., C), outputs of the projections before it, which nothing else reads; up None: down(f(gate)).
        activation: one of `glu.ACTIVATIONS`.
    """
    if is_plain_linear(down) and is_plain(gate, up):
        return glu_linear(gate, up, down.weight, down.bias, activation, in_place=True)
    return down(unit(gate, up, activation, in_place=True))


def is_plain_linear(module):
    """Tell whether calling `module` is F.linear with its weight and bias, and has no other effect.

    False with an adapter, a quantised or sharded weight, a parametrization, a forward set on the instance, or hooks.
    """
    return type(module) is nn.Linear and not is_intercepted(module) and is_plain(module.weight, module.bias)


def is_projection(module):
    """Tell whether `module` looks like a linear layer of some kind: it has in and out features, or is a Conv1D."""
    return all(hasattr(module, name) for name in ("in_features", "out_features")) or (
        type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    )
