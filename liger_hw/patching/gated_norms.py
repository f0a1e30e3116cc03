"""Match gated RMSNorms (Mamba-2, gated DeltaNet, Kimi's linear attention).

One kernel replaces ten operations of the models' code. In 16-bit dtypes it moves 6 bytes per value forward, the models'
code 62.
"""

import functools
import itertools
from dataclasses import dataclass

from liger_hw.kernels.norms.gated_rms_norm import GATE_ACTIVATIONS, GATED_CASTING_MODES, gated_rms_norm
from liger_hw.patching import probing
from liger_hw.patching.match import Match
from liger_hw.patching.norms import PROBE_EPS, PROBE_WIDTH, check_eps
from liger_hw.patching.reading import read
from liger_hw.patching.witnesses import Proof

NORM_OPTIONS = {  # option of the op -> its values, the default first
    "gate_first": (False, True),
    "activation": tuple(GATE_ACTIVATIONS),
    "casting_mode": GATED_CASTING_MODES,
}
FORMS = [
    {name: value for name, value in zip(NORM_OPTIONS, values) if value != NORM_OPTIONS[name][0]}
    for values in itertools.product(*NORM_OPTIONS.values())
]


@dataclass(frozen=True)
class GatedNormMatch(Match):
    """Match of a gated RMSNorm."""

    kind = "gated_norm"
    inputs = ("x", "gate")

    def members(self, original, unchanged):
        names, options = dict(self.names), dict(self.options)
        weight_name, eps_name, group_name = names["weight"], names["eps"], names["group"]

        def forward(self, *args, **kwargs):
            if not unchanged(self, args, kwargs):
                return original.forward(self, *args, **kwargs)
            x, gate, weight = args[0], args[1] if len(args) == 2 else kwargs.get("gate"), getattr(self, weight_name)
            fits = gate is not None and gate.shape == x.shape and x.shape[-1:] == weight.shape
            if not fits or not x.dtype == gate.dtype == weight.dtype:
                return original.forward(self, *args, **kwargs)
            group = getattr(self, group_name) if group_name else None
            return gated_rms_norm(x, gate, weight, getattr(self, eps_name), group_size=group, **options)

        return {"forward": forward}


def match_gated_norm(module):
    """Return the `GatedNormMatch` of an RMSNorm of x with a gate, or None."""
    parameters = probing.direct_parameters(module)
    if (len(parameters), len(module._parameters), len(module._modules)) != (1, 1, 0):
        return None
    if len(probing.positional_inputs(module)) != 2:
        return None
    ((weight_name, weight),) = parameters.items()
    width = weight.numel() or PROBE_WIDTH
    group_name = "group_size" if "group_size" in read(type(module)).names and hasattr(module, "group_size") else None
    group = getattr(module, group_name) if group_name else width
    if weight.ndim != 1 or type(group) is not int or group <= 0 or width % group:
        return None

    case = probing.case_of(width, rows=2, weights=1)
    for form, eps_name in itertools.product(FORMS, probing.float_attributes(module)):

        def with_eps(eps, training, x, gate, weight, eps_name=eps_name):
            attributes = {eps_name: eps, "training": training}
            return type(module).forward(probing.copy_of(module, {weight_name: weight}, {}, **attributes), x, gate)

        def by_op(eps, _, x, gate, weight, form=form):
            return gated_rms_norm.reference(x, gate, weight, eps, group_size=group, **form)

        functions = (functools.partial(function, PROBE_EPS) for function in (with_eps, by_op))
        if Proof(*functions, case, roles=(eps_name,)).holds_for(module):
            check_eps(with_eps, by_op, module, eps_name, case)
            names = {"eps": eps_name, "group": group_name, "weight": weight_name}
            return GatedNormMatch.of(gated_rms_norm, form, names)
    return None
