"""Match PEFT's LoRA around a linear layer, which `lora_linear` computes in place of six operations.

The op computes one adapter on a linear layer, plain or in 4 bits. Active adapters without dropout are one whose A has
the rows of all, and B the columns. An adapter's bias adds to the layer's. DoRA scales the op's result. Programs change
a layer's state: they merge, disable, add and choose adapters, and quantise weights. So `adapter_arguments` looks at
each call, and PEFT's own forward runs in every other state.
"""

import functools
import importlib
import logging
import math
import sys
from types import SimpleNamespace

import torch

from liger_hw._torch import PLAIN, is_plain, transforms_active, without_modes
from liger_hw.checks import KERNEL_DTYPES
from liger_hw.dispatch import autocasts, kept_casts, uncast
from liger_hw.kernels.linear.dequantize_4bit import dequantize_4bit, dequantize_arguments
from liger_hw.kernels.linear.lora_linear import lora_linear
from liger_hw.patching import probing
from liger_hw.patching.copies import refusing_writes
from liger_hw.patching.hooks import is_intercepted
from liger_hw.patching.lora_parameters import is_wrapper, match_parameter
from liger_hw.patching.match import Match, remember
from liger_hw.patching.projection import Adapted, adapter_layers
from liger_hw.patching.reading import Pin, read
from liger_hw.patching.shared_inputs import result_of
from liger_hw.patching.summary import Summary
from liger_hw.patching.swapping import is_swapped, patched_class, swap
from liger_hw.patching.values import MISSING
from liger_hw.patching.witnesses import can_be_kept

logger = logging.getLogger("liger_hw")

LAYER = "peft.tuners.lora.layer"
CLASSES = (LAYER, "Linear"), ("peft.tuners.lora.bnb", "Linear4bit")
DORA = ("peft.tuners.lora.variants", "DoraLinearVariant"), ("peft.tuners.lora.dora", "DoraLinearLayer")
HELPERS = ("_check_forward_args", "_cast_input_dtype")
LAYER_ATTRIBUTES = ("forward", "__call__", *HELPERS, "merged", "disable_adapters", "active_adapters")
DORA_METHODS = ("get_weight_norm", "get_lora_weight")
DORA_READS = ("transpose", "dequantize_module_weight", "ENABLE_DORA_CACHING")  # of its module
NOT_A_LINEAR = "LoRA around {}, not a plain linear layer"
NOT_QUANTISED = "LoRA around {} before its weight is quantised: patch again after that"
PROBE_HIDDEN, PROBE_FEATURES, PROBE_RANK = 32, 24, 4
FEW_ROWS = 512  # up to so many bitsandbytes 0.50.2 multiplies 4-bit numbers without writing the weight, where faster


class LoraMatch(Match):
    """Match of PEFT's LoRA around a linear layer."""

    kind = "lora"

    def pins(self, original):
        pins = [Pin(cls, "forward", cls.forward) for cls in dict(self.bypassed).values()]
        return pins + layer_pins(original) + _dora_pins(), set(HELPERS)

    def members(self, original, unchanged):
        def adapted(self, x):
            """Return the `Adapted` that computes this layer for `x`, or None."""
            return adapter_arguments(self, x) if unchanged(self) else None

        def forward(self, x, *args, **kwargs):
            adapted = None if args or kwargs or not unchanged(self) else adapter_arguments(self, x)
            if adapted is None:
                return original.forward(self, x, *args, **kwargs)
            if adapted.magnitudes is not None:
                return _dora(x, *adapted)
            y = result_of(self, x, adapted)
            return lora_linear(x, *adapted[:-1]) if y is None else y

        return {"forward": forward, "liger_adapted": adapted}


def layer_pins(original):
    """Return `Pin`s of what a layer of PEFT runs."""
    pins = [Pin(original, name, getattr(original, name)) for name in LAYER_ATTRIBUTES]
    for cls in (torch.nn.Linear, torch.nn.Dropout, torch.nn.Identity):
        pins += [*read(cls).pins, Pin(cls, "__call__", cls.__call__)]
    return pins


def _dora_pins():
    if not (classes := _dora_classes()):
        return []
    variant_class, layer_class = classes
    module = sys.modules[layer_class.__module__]
    reads = [(variant_class, "forward"), *((layer_class, name) for name in ("forward", "__call__", *DORA_METHODS))]
    reads += [(torch.linalg, "norm"), *((module, name) for name in DORA_READS)]
    return [Pin(owner, name, getattr(owner, name)) for owner, name in reads if hasattr(owner, name)]


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
            if reason is not None:
                summary.left[type(module).__name__, reason] += 1
    if summary.replaced or summary.left:
        logger.info("patched layers that PEFT added\n%s", summary)


def match_lora(module, remember):
    """Return a match and a reason for leaving a LoRA layer, or None for either.

    The result is None where `module` is no such layer. Both are given if PEFT's forward runs with some adapters.

    Args:
        remember: a function (key, find) that calls `find` once for each key.
    """
    layers = sys.modules.get(LAYER)
    if layers is None or not isinstance(module, layers.LoraLayer):
        return None
    if is_wrapper(module):
        return match_parameter(module, remember)
    base, cls = module.base_layer, type(module)
    is_plain_base = type(base) is torch.nn.Linear
    has_4_bits = isinstance(base, torch.nn.Linear) and hasattr(base, "compute_dtype")
    if (cls.__module__, cls.__name__) not in CLASSES or not (is_plain_base or has_4_bits):
        return None, NOT_A_LINEAR.format(type(module.get_base_layer()).__name__)
    variants = [variant(module, name) for name in module.lora_A]
    if not variants:
        return None, "LoRA without an adapter"
    has_dora = is_plain_base and remember((LAYER, cls, DORA), lambda: _computes_dora(module))
    if has_dora:
        variants = [None if name == DORA[0][1] else name for name in variants]
    reason = next((f"an adapter computes {name}, which no op does" for name in variants if name), None)
    if all(variants):
        return None, reason
    if not is_plain_base:
        arguments = dequantize_arguments(base.weight)
        if arguments is None or arguments.packed.is_meta:
            return None, NOT_QUANTISED.format(type(base).__name__)
        key = LAYER, type(base), base.weight.quant_state.quant_type
        if not remember(key, lambda: _computes_4_bits(base, arguments)):
            return None, f"this version of {type(base).__name__} computes its 4 bits otherwise"
    if not remember((LAYER, cls), lambda: _computes_the_op(module)):
        return None, "this version of PEFT computes its LoRA otherwise"
    names = (("magnitudes", "lora_magnitude_vector"),) if has_dora else ()
    bypassed = () if is_plain_base else (("base_layer", type(base)),)
    return LoraMatch("lora_linear", names=names, bypassed=bypassed), reason


def variant(lora, name):
    """Return the name of what an adapter computes instead of plain LoRA, or None."""
    variants = getattr(lora, "lora_variant", {})  # older versions of PEFT have `use_dora`
    if name in variants:
        return type(variants[name]).__name__
    return "DoRA" if getattr(lora, "use_dora", {}).get(name) else None


def _computes_the_op(module):
    """Tell whether PEFT's forward gives the op's results on random rows.

    Results of one adapter are bitwise equal. Two, with biases, are added in another order.
    """
    random, fp32, bf16 = probing.generator(), torch.float32, torch.bfloat16
    for dtype, adapter_dtype, count in ((fp32, fp32, 1), (bf16, fp32, 1), (bf16, bf16, 1), (fp32, fp32, 2)):

        def rows(*shape, dtype=adapter_dtype):
            return probing.random_rows(random, *shape, dtype=dtype) / 4

        x, weight = rows(2, 5, PROBE_HIDDEN, dtype=dtype), rows(PROBE_FEATURES, PROBE_HIDDEN, dtype=dtype)
        adapters = [
            Adapted(None, bias, rows(PROBE_RANK, PROBE_HIDDEN), rows(PROBE_FEATURES, PROBE_RANK), scaling, 0.0)
            for bias, scaling in ([(None, 2.5)] if count == 1 else [(rows(PROBE_FEATURES), s) for s in (2.5, -0.5)])
        ]
        y = _run_layer(module, x, weight, None, adapters)
        *joined, _ = _join_adapters(x, weight, None, adapters)
        # around 4 bits PEFT rounds the adapter's part once more
        update = lora_linear.reference(x, torch.zeros_like(weight), *joined[1:])
        allowed = lora_linear.reference(x, *joined), torch.nn.functional.linear(x, weight) + update
        if not any(probing.equal(y, other, exact=count == 1) for other in allowed):
            return False
    return True


def _dora_classes():
    """Return PEFT's classes of a DoRA adapter; none in a version that has others."""
    try:
        return [getattr(importlib.import_module(module), name) for module, name in DORA]
    except (ImportError, AttributeError):
        return []


def _computes_dora(module):
    """Tell whether PEFT's forward gives the results of `_dora` on random rows."""
    if not (classes := _dora_classes()):
        return False
    variant_class, layer_class = classes
    random, shapes = probing.generator(), ((PROBE_FEATURES,), (PROBE_FEATURES,), (PROBE_FEATURES, PROBE_HIDDEN))
    shapes = (5, PROBE_HIDDEN), (PROBE_RANK, PROBE_HIDDEN), (PROBE_FEATURES, PROBE_RANK), *shapes
    x, lora_a, lora_b, bias, magnitudes, weight = (probing.random_rows(random, *shape) / 4 for shape in shapes)
    layer = layer_class(fan_in_fan_out=False)
    layer.weight = torch.nn.Parameter(magnitudes)
    adapter = Adapted(None, None, lora_a, lora_b, 2.5, 0.0, magnitudes)
    y = _run_layer(module, x, weight, bias, [adapter], layer, variant_class())
    adapted = adapter._replace(weight=weight, bias=bias)
    return probing.equal(y, probing.run(lambda: _dora(x, *adapted)), exact=False)


def _run_layer(module, x, weight, bias, adapters, *dora):
    """Return the result of PEFT's forward with other weights.

    `dora`: PEFT's layer and variant of the adapter.
    """
    named = {f"adapter {i}": adapter for i, adapter in enumerate(adapters)}
    parts = {
        "lora_A": {name: probing.linear(adapter.lora_a) for name, adapter in named.items()},
        "lora_B": {name: probing.linear(adapter.lora_b, adapter.bias) for name, adapter in named.items()},
        "lora_dropout": {name: torch.nn.Identity() for name in named},
        "lora_magnitude_vector": dict(zip(named, dora[:1])),
    }
    parts = {name: torch.nn.ModuleDict(part) for name, part in parts.items()}
    parts["base_layer"] = probing.linear(weight, bias)
    state = {"scaling": {name: adapter.scaling for name, adapter in named.items()}, "_active_adapter": [*named]}
    state |= {"_disable_adapters": False, "merged_adapters": [], "use_dora": {}}
    state |= {"lora_variant": dict(zip(named, dora[1:]))}
    probe = probing.copy_of(module, {}, module._modules | parts, **state)
    return probing.run(lambda: type(module).forward(probe, x))


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
        layer_state = {"compute_dtype": dtype, "compute_type_is_set": True, "training": True}
        probe = probing.copy_of(base, parameters, {}, **layer_state)
        y = probing.outputs(probe.forward, [(x.to(input_dtype),)])
        expected = torch.nn.functional.linear(x, dequantize_4bit.reference(*dequantize_arguments(weight)).float(), bias)
        if y is None or y[0].dtype != input_dtype or (y[0] - expected).abs().max() > 0.02 * expected.abs().max():
            return False
    return True


def _dora(x, weight, bias, lora_a, lora_b, scaling, _, magnitudes):
    """Scale each feature by its magnitude over the norm of its weights, a constant (arXiv:2402.09353)."""
    with torch.no_grad():
        a, b = (factor.to(lora_a.dtype) for factor in kept_casts(lora_a, lora_b))
        norms = weight.to(lora_a.dtype, copy=True).addmm_(b, a, alpha=scaling).norm(dim=1)
    y = lora_linear(x, weight, None, lora_a, lora_b, scaling)
    scaled = y * (magnitudes / norms)
    return (scaled if bias is None else scaled + bias).to(y.dtype)


def adapter_arguments(lora, x):
    """Return the arguments with which `lora_linear` computes the layer for `x`, or None."""
    if lora.disable_adapters or lora.merged or type(x) not in PLAIN or not can_be_kept(x) or transforms_active():
        return None
    dtype, device, parts = x.dtype, x.device, lora._modules  # an attribute of a module costs 0.5 us
    if dtype not in KERNEL_DTYPES or x.ndim < 2 or device.type == "meta":
        return None
    layers = adapter_layers(lora, "lora_A", "lora_B", "lora_dropout")
    if layers is None:
        return None
    adapters = [_adapter(lora, name, layers) for name in lora.active_adapters if name in layers[0]]
    if not adapters or None in adapters or not getattr(lora, "cast_input_dtype_enabled", True):
        return None
    base, first = parts["base_layer"], adapters[0]
    if first.dropout and not x.is_contiguous():
        return None  # whose mask torch draws in another order
    if type(base) is torch.nn.Linear:
        weight, bias = _weight_and_bias(base)
        casts = autocasts(device.type)
        if weight is None or weight.device != device or not (dtype == weight.dtype or casts):
            return None
    elif not type(lora).liger_match.bypassed:
        return None  # a plain layer when it was matched, changed since
    else:
        weight, bias = _weight_in_4_bits(base, x, first.lora_a, first.dropout)
        casts = False
        if weight is None or weight.packed.device != device:
            return None
    features, cols = weight.shape
    if cols != x.shape[-1]:
        return None
    if bias is not None:
        one_dtype = casts or bias.dtype == weight.dtype or bias.dtype == torch.float32
        if bias.device != device or bias.shape != (features,) or not one_dtype:
            return None
    return _join_adapters(x, weight, bias, adapters)


def _weight_and_bias(linear):
    """Return the parameters of a plain linear layer; (None, None) for another one.

    Replicas of DataParallel, pruned and reparametrized layers hold theirs elsewhere.
    """
    parameters = linear._parameters
    if type(linear) is torch.nn.Linear and len(parameters) == 2 and not is_intercepted(linear):
        weight, bias = parameters.get("weight"), parameters.get("bias", MISSING)
        if weight is not None and is_plain(weight, bias):
            return weight, bias
    return None, None


def _adapter(lora, name, layers):
    """Return the `Adapted` of one adapter without its layer, None where PEFT must compute."""
    layers_a, layers_b, dropouts = layers
    lora_a, bias_a = _weight_and_bias(layers_a[name])
    lora_b, bias = _weight_and_bias(layers_b[name])
    rate, scaling = dropout_rate(dropouts[name]), lora.scaling[name]
    if rate is None or not isinstance(scaling, (int, float)) or lora_a is None or lora_b is None:
        return None
    fits = bias_a is None and lora_a.dtype in KERNEL_DTYPES
    adapter = Adapted(None, bias, lora_a, lora_b, scaling, rate) if fits else None
    return _with_magnitudes(lora, name, adapter) if variant(lora, name) else adapter


def _with_magnitudes(lora, name, adapter):
    """Return the `Adapted` of DoRA; None with dropout, which the layer's weight also sees."""
    attribute = dict(type(lora).liger_match.names).get("magnitudes")
    if attribute is None or adapter is None or adapter.bias is not None or adapter.dropout:
        return None
    layers = adapter_layers(lora, attribute)
    layer = layers[0].get(name) if layers else None
    if [type(lora.lora_variant[name]), type(layer)] != _dora_classes():
        return None
    magnitudes = layer.weight
    if is_intercepted(layer) or not is_plain(magnitudes) or layer.fan_in_fan_out:
        return None
    if any(method in layer.__dict__ for method in DORA_METHODS):
        return None
    return adapter._replace(magnitudes=magnitudes) if magnitudes.device == adapter.lora_a.device else None


def _join_adapters(x, weight, bias, adapters):
    """Return the `Adapted` of a layer with several adapters.

    None where they differ in dtype, do not fit the layer, or one draws a mask of its own.
    """
    (features, cols), dtype, is_alone = weight.shape, adapters[0].lora_a.dtype, len(adapters) == 1
    for _, shift, lora_a, lora_b, scaling, dropout, magnitudes in adapters:
        rank = lora_a.shape[0] if lora_a.ndim else 0
        if rank == 0 or lora_a.shape != (rank, cols) or lora_b.shape != (features, rank):
            return None
        if lora_a.dtype != dtype or lora_b.dtype != dtype or not lora_a.device == lora_b.device == x.device:
            return None
        if not is_alone and (dropout or magnitudes is not None):
            return None
        if shift is not None:
            shift = shift * scaling
            bias = shift.to(torch.promote_types(shift.dtype, weight.dtype)) if bias is None else bias + shift
    if is_alone:
        return Adapted(weight, bias, lora_a, lora_b, scaling, dropout, magnitudes)
    factors_a, factors_b = ([adapter[i] for adapter in adapters] for i in (2, 3))
    with uncast(x):  # autocast to the other dtype of 16 bits refuses to concatenate
        copies = torch.cat(factors_a), torch.cat([adapter.lora_b * adapter.scaling for adapter in adapters], 1)
    kept = factors_a if x.requires_grad else []  # by PEFT's layers
    kept += factors_b if x.requires_grad or copies[0].requires_grad else []
    return Adapted(weight, bias, *refusing_writes(copies, kept), 1.0, 0.0)


def _weight_in_4_bits(base, x, lora_a, rate):
    """Return (arguments of `dequantize_4bit`, bias) of a layer in 4 bits.

    (None, None) where its own forward must run.
    """
    weight, bias, dtype = base._parameters["weight"], base._parameters["bias"], base.compute_dtype
    arguments = dequantize_arguments(weight)
    if arguments is None or dtype not in KERNEL_DTYPES or weight.requires_grad or not base.compute_type_is_set:
        return None, None  # its first call sets the dtype
    if bias is not None and (not is_plain(bias) or bias.dtype != dtype):
        return None, None  # a call casts the parameter
    if autocasts(x.device.type):
        cast = torch.get_autocast_dtype(x.device.type)
        if dtype != cast or x.dtype not in (cast, torch.float32) or rate and x.dtype != lora_a.dtype:
            return None, None  # PEFT drops values in x's dtype there
    if not torch.is_grad_enabled() and x.numel() < FEW_ROWS * x.shape[-1]:
        return None, None
    if x.device.type == "cpu" and not (base.training or x.requires_grad):
        return None, None  # where the CPU has instructions for it, a call stores the weight in another layout
    return arguments._replace(dtype=dtype), bias


def dropout_rate(dropout):
    """Return a dropout layer's rate; None where it may do or write more."""
    if type(dropout) not in (torch.nn.Identity, torch.nn.Dropout) or is_intercepted(dropout):
        return None
    drops = type(dropout) is torch.nn.Dropout and dropout.training
    return (None if dropout.inplace else dropout.p) if drops else 0.0
