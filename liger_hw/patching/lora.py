"""Match PEFT's LoRA around a linear layer, which `lora_linear` computes in place of six operations.

What the op computes, one adapter on a plain linear layer or on one in 4 bits, depends on the state of the layer, which
programs change: they merge, disable, add and choose adapters, and quantise weights. So `served` looks at each call, and
PEFT's own forward runs in every other state.
"""

import functools
import logging
import math
import sys
from types import SimpleNamespace

import torch

from liger_hw._torch import PLAIN, is_plain, transforms_active, without_modes
from liger_hw.checks import KERNEL_DTYPES
from liger_hw.kernels.linear.dequantize_4bit import dequantize_4bit, dequantize_arguments
from liger_hw.kernels.linear.lora_linear import lora_linear
from liger_hw.patching import probing
from liger_hw.patching.hooks import is_intercepted
from liger_hw.patching.match import Match, remember
from liger_hw.patching.projection import Adapted, is_plain_linear
from liger_hw.patching.reading import Pin, read
from liger_hw.patching.summary import Summary
from liger_hw.patching.swapping import is_swapped, patched_class, swap

logger = logging.getLogger("liger_hw")

LAYER = "peft.tuners.lora.layer"
CLASSES = (LAYER, "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")
READ = ("forward", "_check_forward_args", "_cast_input_dtype", "merged", "disable_adapters", "active_adapters")
NOT_A_LINEAR = "LoRA around {}, not a plain linear layer"
NOT_QUANTISED = "LoRA around {} before its weight is quantised: patch again after that"
PROBE_HIDDEN, PROBE_FEATURES, PROBE_RANK = 32, 24, 4
FEW_ROWS = 512  # up to so many bitsandbytes 0.50.2 multiplies 4-bit numbers without writing the weight, where faster


class LoraMatch(Match):
    """Match of PEFT's LoRA around a linear layer."""

    kind = "lora"

    def pins(self, original):
        pins = [Pin(original, name, getattr(original, name)) for name in READ]
        pins += [Pin(base, "forward", base.forward) for _, base in self.bypassed]
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


class PeftConfig:
    """Patch the layers that PEFT adds before it sets a model's attribute `peft_config`."""

    def __get__(self, model, owner=None):
        if model is not None and "peft_config" not in model.__dict__:
            raise AttributeError("peft_config")
        return self if model is None else model.__dict__["peft_config"]

    def __set__(self, model, configs):
        model.__dict__["peft_config"] = configs
        _patch_layers(model)

    def __delete__(self, model):
        self.__get__(model)
        del model.__dict__["peft_config"]


def _patch_layers(model):
    """Patch the LoRA layers in `model` that are not."""
    summary, results = Summary(), {}
    with without_modes():
        for module in [m for m in model.modules() if not is_swapped(m)]:
            match, reason = match_lora(module, functools.partial(remember, results)) or (None, None)
            if match is not None:
                key = type(module), match
                summary.replaced[type(module).__name__, str(match)] += 1
                swap(module, remember(results, key, lambda key=key: patched_class(*key)))
            elif reason is not None:
                summary.left[type(module).__name__, reason] += 1
    if summary.replaced or summary.left:
        logger.info("patched layers that PEFT added\n%s", summary)


def match_lora(module, remember):
    """Return a match and a reason for leaving a LoRA layer, one of them None.

    The result is None where `module` is no such layer.

    Args:
        remember: a function (key, find) that calls `find` once for each key.
    """
    layers = sys.modules.get(LAYER)
    if layers is None or not isinstance(module, layers.LoraLayer):
        return None
    base, cls = module.base_layer, type(module)
    is_plain_base = type(base) is torch.nn.Linear
    has_4_bits = isinstance(base, torch.nn.Linear) and hasattr(base, "compute_dtype")
    if (cls.__module__, cls.__name__) not in CLASSES or not (is_plain_base or has_4_bits):
        return None, NOT_A_LINEAR.format(type(module.get_base_layer()).__name__)
    name = next(iter(module.lora_A), None)
    if name is None:
        return None, "LoRA without an adapter"
    if variant := _variant(module, name):
        return None, f"computes {variant}, which no op does"
    if module.lora_B[name].bias is not None:
        return None, "an adapter with a bias"
    if not is_plain_base:
        arguments = dequantize_arguments(base.weight)
        if arguments is None or arguments.packed.is_meta:
            return None, NOT_QUANTISED.format(type(base).__name__)
        key = LAYER, type(base), base.weight.quant_state.quant_type
        if not remember(key, lambda: _computes_4_bits(base, arguments)):
            return None, f"this version of {type(base).__name__} computes its 4 bits otherwise"
    if not remember((LAYER, cls), lambda: _computes_the_op(module, name)):
        return None, "this version of PEFT computes its LoRA otherwise"
    return LoraMatch("lora_linear", bypassed=() if is_plain_base else (("base_layer", type(base)),)), None


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
        # around 4 bits PEFT rounds the adapter's part once more
        parts = lora_linear.reference(x, torch.zeros_like(weight), None, a, b, 2.5)
        allowed = lora_linear.reference(x, weight, None, a, b, 2.5), torch.nn.functional.linear(x, weight) + parts
        y = probing.run(lambda probe=probe, x=x: type(module).forward(probe, x))
        if not any(torch.equal(y, other) for other in allowed):
            return False
    return True


def _computes_4_bits(base, arguments):
    """Tell whether a layer's forward multiplies by `dequantize_4bit`'s weight.

    The result must have the input's dtype.
    Not bitwise: the layer's kernels on a CPU may round scales (AVX512), and those of a GPU differ from them anyway.
    """
    random, shape = probing.generator(), (PROBE_FEATURES, 2 * PROBE_HIDDEN)
    state = SimpleNamespace(**vars(base.weight.quant_state) | {"nested": False, "state2": None, "offset": None})
    state.shape, state.code, state.blocksize = torch.Size(shape), arguments.code.cpu(), 64
    weight = torch.nn.Parameter(probing.random_bytes(random, math.prod(shape) // 2, 1), requires_grad=False)
    for dtype, input_dtype in ((torch.float32,) * 2, (torch.bfloat16, torch.float32), (torch.bfloat16,) * 2):
        x, bias = (probing.random_rows(random, *sizes, dtype=torch.float32) for sizes in ((5, shape[1]), shape[:1]))
        state.absmax, state.dtype, weight.quant_state = probing.random_rows(random, shape[0]).abs(), dtype, state
        parameters = {"weight": weight, "bias": torch.nn.Parameter(bias.to(dtype))}
        state_of_layer = {"compute_dtype": dtype, "compute_type_is_set": True, "training": True}
        probe = probing.copy_of(base, parameters, {}, **state_of_layer)
        y = probing.outputs(probe.forward, [(x.to(input_dtype),)])
        expected = torch.nn.functional.linear(x, dequantize_4bit.reference(*dequantize_arguments(weight)).float(), bias)
        if y is None or y[0].dtype != input_dtype or (y[0] - expected).abs().max() > 0.02 * expected.abs().max():
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
    rate, scaling = _rate(parts["lora_dropout"]._modules[name]), lora.scaling[name]
    if rate is None or not isinstance(scaling, (int, float)) or not (is_plain_linear(a) and is_plain_linear(b)):
        return None
    (a, no_bias), (b, no_bias_either) = (layer._parameters.values() for layer in (a, b))
    if type(base) is torch.nn.Linear:
        weight, bias = base._parameters.values()
        fits = is_plain_linear(base) and (x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type))
        device = weight.device
    elif not type(lora).liger_match.bypassed:
        return None  # a plain layer when it was matched, changed since
    else:
        weight, bias = _of_4_bits(base, x, a, rate)
        fits, device = weight is not None, weight and weight.packed.device
    if not fits or a.dtype != b.dtype or no_bias is not None or no_bias_either is not None:
        return None
    if tuple(weight.shape) != (b.shape[0], x.shape[-1]) or not x.device == device == a.device:
        return None
    return Adapted(weight, bias, a, b, scaling, rate)


def _of_4_bits(base, x, lora_a, rate):
    """Return (arguments of `dequantize_4bit`, bias) of a layer in 4 bits.

    (None, None) where its own forward must run.
    """
    weight, bias, dtype = base._parameters["weight"], base._parameters["bias"], base.compute_dtype
    arguments = dequantize_arguments(weight)
    if arguments is None or dtype not in KERNEL_DTYPES or weight.requires_grad or not base.compute_type_is_set:
        return None, None  # its first call sets the dtype
    if bias is not None and (not is_plain(bias) or bias.dtype != dtype):
        return None, None  # a call casts the parameter
    if torch.is_autocast_enabled(x.device.type):
        cast = torch.get_autocast_dtype(x.device.type)
        if dtype != cast or x.dtype not in (cast, torch.float32) or rate and x.dtype != lora_a.dtype:
            return None, None  # PEFT drops values in x's dtype there
    if not torch.is_grad_enabled() and x.numel() < FEW_ROWS * x.shape[-1]:
        return None, None
    if x.device.type == "cpu" and not (base.training or x.requires_grad):
        return None, None  # where the CPU has instructions for it, a call stores the weight in another layout
    return arguments._replace(dtype=dtype), bias


def _rate(dropout):
    """Return a dropout layer's rate; None where it may do something else."""
    if type(dropout) not in (torch.nn.Identity, torch.nn.Dropout) or is_intercepted(dropout):
        return None
    return dropout.p if type(dropout) is torch.nn.Dropout and dropout.training else 0.0
