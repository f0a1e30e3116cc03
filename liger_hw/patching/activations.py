"""Replace activations of several operations, each of which saves a tensor, by one op."""

import torch

from liger_hw.dispatch import autocasts
from liger_hw.kernels.mlp.glu import activate
from liger_hw.patching import probing
from liger_hw.patching.match import Match, in_memory_order
from liger_hw.patching.witnesses import Proof

WRITTEN_OUT = ("gelu_new", "quick_gelu", "relu_squared")  # torch has the others as one operation
PROBE_WIDTH = 64


class ActivationMatch(Match):
    """Match of a module that is an activation."""

    kind = "activation"
    inputs = ("x",)

    def members(self, original, unchanged):
        activation = dict(self.options)["activation"]

        def forward(self, *args, **kwargs):
            if not unchanged(self, args, kwargs) or args[0].ndim == 0 or widens_under_autocast(args[0]):
                return original.forward(self, *args, **kwargs)
            return in_memory_order(activate, args[0], activation)

        return {"forward": forward}


def widens_under_autocast(x):
    """Tell whether autocast may compute powers of x in fp32, as on a GPU."""
    return x.dtype != torch.float32 and autocasts(x.device.type)


def match_activation(module):
    """Return the `ActivationMatch` of an activation written as several operations, or None."""
    has_parts = module._parameters or module._modules or module._buffers
    if has_parts or type(module).__module__.startswith("torch.") or len(probing.positional_inputs(module)) != 1:
        return None

    def original(training, x):
        return type(module).forward(probing.copy_of(module, {}, {}, training=training), x)

    def at_width(width):
        return probing.case_of(width)(torch.float32, (2, 3))

    for activation in WRITTEN_OUT:

        def replacement(_, x, activation=activation):
            return activate.reference(x, activation)

        proof = Proof(original, replacement, probing.case_of(PROBE_WIDTH), at_width=at_width)
        if proof.holds_for(module):
            return ActivationMatch.of(activate, {"activation": activation}, {})
    return None
