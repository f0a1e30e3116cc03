"""Match PEFT's LoRA around a linear layer, which `lora_linear` computes in place of six operations.

What the op computes, one adapter on a plain linear layer, depends on the state of the layer, which programs change:
they merge, disable, add and choose adapters. So `served` looks at each call, and PEFT's own forward runs in every other
state.
"""

import sys

import torch

from liger_hw._torch import PLAIN, transforms_active
from liger_hw.kernels.linear.lora_linear import lora_linear
from liger_hw.patching import probing
from liger_hw.patching.hooks import is_intercepted
from liger_hw.patching.match import Match
from liger_hw.patching.projection import Adapted, is_plain_linear
from liger_hw.patching.reading import Pin, read

LAYER = "peft.tuners.lora.layer"
READ = ("forward", "_check_forward_args", "_cast_input_dtype", "merged", "disable_adapters", "active_adapters")
NOT_A_LINEAR = "LoRA around {}, not a plain linear layer"
PROBE_HIDDEN, PROBE_FEATURES, PROBE_RANK = 32, 24, 4


class LoraMatch(Match):
    """Match of PEFT's LoRA around a linear layer."""

    kind = "lora"

    def pins(self, original):
        pins = [Pin(original, name, getattr(original, name)) for name in READ]
        return [*pins, *read(torch.nn.Linear).pins, *read(torch.nn.Dropout).pins], set()

    def members(self, original, unchanged):
        def adapted(self, x):
            """Return the `Adapted` that computes this layer for `x`, or None."""
            return served(self, x) if unchanged(self) else None

        def forward(self, x, *args, **kwargs):
            adapted = None if args or kwargs or not unchanged(self) else served(self, x)
            if adapted is None:
                return original.forward(self, x, *args, **kwargs)
            return lora_linear(x, *adapted)

        return {"forward": forward, "liger_adapted": adapted}


def match_lora(module, remember):
    """Return a match and a reason for leaving a LoRA layer, one of them None.

    The result is None where `module` is no such layer.

    Args:
        remember: a function (key, find) that calls `find` once for each key.
    """
    layers = sys.modules.get(LAYER)
    if layers is None or not isinstance(module, layers.LoraLayer):
        return None
    if type(module) is not layers.Linear or type(module.base_layer) is not torch.nn.Linear:
        return None, NOT_A_LINEAR.format(type(module.get_base_layer()).__name__)
    name = next(iter(module.lora_A), None)
    if name is None:
        return None, "LoRA without an adapter"
    if variant := _variant(module, name):
        return None, f"computes {variant}, which no op does"
    if module.lora_B[name].bias is not None:
        return None, "an adapter with a bias"
    if not remember((LAYER, type(module)), lambda: _computes_the_op(module, name)):
        return None, "this version of PEFT computes its LoRA otherwise"
    return LoraMatch("lora_linear"), None


def _variant(lora, name):
    """Return the name of what an adapter computes instead of plain LoRA, or None."""
    variants = getattr(lora, "lora_variant", {})  # older versions of PEFT have `use_dora`
    if name in variants:
        return type(variants[name]).__name__
    return "DoRA" if getattr(lora, "use_dora", {}).get(name) else None


def _computes_the_op(module, name):
    """Tell whether PEFT's forward gives the bits of the op's reference on random rows."""
    random = probing.generator()
    for dtype, adapter_dtype in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2):
        x = probing.random_rows(random, 2, 5, PROBE_HIDDEN, dtype=dtype)
        weight = probing.random_rows(random, PROBE_FEATURES, PROBE_HIDDEN, dtype=dtype) / 4
        a = probing.random_rows(random, PROBE_RANK, PROBE_HIDDEN, dtype=adapter_dtype) / 4
        b = probing.random_rows(random, PROBE_FEATURES, PROBE_RANK, dtype=adapter_dtype) / 4
        parts = {
            "base_layer": _linear(weight),
            "lora_A": torch.nn.ModuleDict({name: _linear(a)}),
            "lora_B": torch.nn.ModuleDict({name: _linear(b)}),
            "lora_dropout": torch.nn.ModuleDict({name: torch.nn.Identity()}),
        }
        state = {"scaling": {name: 2.5}, "_active_adapter": [name], "_disable_adapters": False, "merged_adapters": []}
        probe = probing.copy_of(module, {}, module._modules | parts, **state)
        if not torch.equal(type(module).forward(probe, x), lora_linear.reference(x, weight, None, a, b, 2.5)):
            return False
    return True


def _linear(weight):
    linear = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
    linear._parameters["weight"] = torch.nn.Parameter(weight)
    return linear


def served(lora, x):
    """Return the arguments with which `lora_linear` computes the layer for `x`, or None."""
    if lora.disable_adapters or lora.merged or type(x) not in PLAIN or x.device.type == "meta" or transforms_active():
        return None
    parts = lora._modules  # an attribute of a module costs 0.5 us
    adapters = parts["lora_A"]._modules
    names = [name for name in lora.active_adapters if name in adapters]
    if len(names) != 1 or not getattr(lora, "cast_input_dtype_enabled", True) or _variant(lora, names[0]):
        return None
    name = names[0]
    base, a, b = parts["base_layer"], adapters[name], parts["lora_B"]._modules[name]
    rate = _rate(parts["lora_dropout"]._modules[name])
    if rate is None or not (is_plain_linear(base) and is_plain_linear(a) and is_plain_linear(b)):
        return None
    (weight, bias), (a, no_bias), (b, no_bias_either) = (layer._parameters.values() for layer in (base, a, b))
    one_dtype = x.dtype == weight.dtype and a.dtype == b.dtype or torch.is_autocast_enabled(x.device.type)
    if not one_dtype or no_bias is not None or no_bias_either is not None:
        return None
    if x.shape[-1:] != weight.shape[1:] or not x.device == weight.device == a.device:
        return None
    return Adapted(weight, bias, a, b, lora.scaling[name], rate)


def _rate(dropout):
    """Return a dropout layer's rate; None where it may do something else."""
    if type(dropout) not in (torch.nn.Identity, torch.nn.Dropout) or is_intercepted(dropout):
        return None
    return dropout.p if type(dropout) is torch.nn.Dropout and dropout.training else 0.0
