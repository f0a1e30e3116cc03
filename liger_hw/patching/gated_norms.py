"""Replace gated RMSNorms (Mamba-2, gated DeltaNet, Kimi's linear attention) by compositions of ops.

Three operations (norm, gated unit, cast) replace the ten of the models' code. In 16-bit dtypes they read and write 26
bytes per value, the models' code 62.
"""

import itertools
from dataclasses import dataclass

import torch

from liger_hw.kernels.glu import swiglu
from liger_hw.kernels.rms_norm import rms_norm
from liger_hw.patching import probing
from liger_hw.patching.match import Match
from liger_hw.patching.norms import PROBE_EPS, PROBE_ROWS, PROBE_WIDTH


def silu_after(x, gate, weight, eps, group, rms_norm=rms_norm, swiglu=swiglu):
    """Compute Qwen3NextRMSNormGated: Llama's norm, rounded and scaled, times silu(gate) in fp32."""
    return swiglu(gate.float(), rms_norm(x, weight, eps)).to(x.dtype)


def sigmoid_after(x, gate, weight, eps, group, rms_norm=rms_norm, swiglu=swiglu):
    """Compute KimiLinearRMSNormGated: norm and scale in fp32, times sigmoid(gate) in fp32."""
    return (rms_norm(x.float(), weight.float(), eps, casting_mode="gemma") * torch.sigmoid(gate.float())).to(x.dtype)


def silu_before(x, gate, weight, eps, group, rms_norm=rms_norm, swiglu=swiglu):
    """Compute MambaRMSNormGated: x silu(gate) in fp32, normalised by column group, rounded, scaled."""
    wide = x.float() if gate is None else swiglu(gate.float(), x.float())
    return weight * rms_norm(wide.unflatten(-1, (-1, group)), None, eps).flatten(-2).to(x.dtype)


FORMS = {form.__name__: form for form in (silu_after, sigmoid_after, silu_before)}


@dataclass(frozen=True)
class GatedNormMatch(Match):
    """Match of a gated RMSNorm; the option `gate` names one of `FORMS`.

    Attributes:
        gate_optional: the form also agrees where the gate is None.
    """

    kind = "gated_norm"
    gate_optional: bool = False

    def members(self, original):
        names, form = dict(self.names), FORMS[dict(self.options)["gate"]]
        weight_name, eps_name, group_name = names["weight"], names["eps"], names["group"]
        gate_optional = self.gate_optional

        def forward(self, *args, **kwargs):
            gate = args[1] if len(args) == 2 else kwargs.get("gate")
            weight = getattr(self, weight_name)
            proved = len(args) in (1, 2) and set(kwargs) <= {"gate"} and weight.dtype == args[0].dtype
            if gate is None:
                proved = proved and gate_optional
            else:
                proved = proved and gate.shape == args[0].shape and gate.dtype == weight.dtype
            if not proved:
                return original.forward(self, *args, **kwargs)
            group = getattr(self, group_name) if group_name else weight.shape[0]
            return form(args[0], gate, weight, getattr(self, eps_name), group)

        return {"forward": forward}


def match_gated_norm(module):
    """Return the `GatedNormMatch` of an RMSNorm of x with a gate, or None."""
    parameters = probing.own_parameters(module)
    if (
        len(parameters) != 1
        or len(module._parameters) != 1
        or module._modules
        or len(probing.positional_inputs(module)) != 2
    ):
        return None
    ((weight_name, weight),) = parameters.items()
    width = weight.numel() or PROBE_WIDTH
    group = getattr(module, "group_size", width)
    if weight.ndim != 1 or type(group) is not int or group <= 0 or width % group:
        return None

    def case(dtype, gated=True):
        random = probing.generator()
        x, gate = (3 * probing.random_rows(random, 2, PROBE_ROWS, width, dtype=dtype) for _ in range(2))
        return x, gate if gated else None, torch.nn.Parameter(probing.random_rows(random, width, dtype=dtype))

    for (name, form), eps_name in itertools.product(FORMS.items(), probing.float_attributes(module)):

        def original(x, gate, weight, eps_name=eps_name):
            return type(module).forward(
                probing.copy_of(module, {weight_name: weight}, {}, **{eps_name: PROBE_EPS}), x, gate
            )

        def replacement(x, gate, weight, form=form):
            return form(x, gate, weight, PROBE_EPS, group, rms_norm.reference, swiglu.reference)

        if probing.agree(original, replacement, [case(dtype) for dtype in probing.DTYPES]):
            gate_optional = probing.agree(original, replacement, [case(dtype, gated=False) for dtype in probing.DTYPES])
            group_name = "group_size" if hasattr(module, "group_size") else None
            names = {"eps": eps_name, "group": group_name, "weight": weight_name}
            return GatedNormMatch.of(rms_norm, {"gate": name}, names, gate_optional=gate_optional)
    return None
