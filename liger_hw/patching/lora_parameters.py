"""Match PEFT's LoRA of experts' parameters (`target_parameters`), which `experts` computes without merged weights.

PEFT adds the product of the factors to the weights of all experts at each call, and the backward makes a gradient as
large as these. One wrapper adapts one parameter; wrappers of a module's parameters are nested around it.
"""

import sys

import torch

from liger_hw._torch import CALL, transforms_active
from liger_hw.checks import KERNEL_DTYPES
from liger_hw.dispatch import uncast
from liger_hw.patching import probing
from liger_hw.patching.copies import refusing_writes
from liger_hw.patching.experts import match_experts
from liger_hw.patching.hooks import is_intercepted
from liger_hw.patching.match import Match
from liger_hw.patching.projection import adapter_layers, is_plain_linear
from liger_hw.patching.reading import Pin
from liger_hw.patching.swapping import is_swapped, original_class

LAYER = "peft.tuners.lora.layer"
METHODS = ("_check_forward_args", "_activate_lora", "get_base_layer", "get_param", "get_delta_weight")
METHODS += ("get_delta_factors",)  # of newer versions
WRAPPER_ATTRIBUTES = ("forward", "__call__", "_call_impl", "merged", "disable_adapters", "active_adapters", *METHODS)
PROXIES = ("_LoraParameterProxy", "_LoraFactorsProxy")
ROLES = {"gate_up_proj": "gate_up_lora", "up_proj": "gate_up_lora", "down_proj": "down_lora"}
PROBE_EXPERTS, PROBE_FEATURES, PROBE_HIDDEN, PROBE_RANK = 3, 24, 40, 4
NOT_EXPERTS = "LoRA of a parameter of {}, which `experts` does not compute"
OTHERWISE = "this version of PEFT computes its LoRA of parameters otherwise"


class LoraParameterMatch(Match):
    """Match of PEFT's LoRA of one parameter."""

    kind = "lora_parameter"

    def pins(self, original):
        owners = [vars(sys.modules[LAYER])[name] for name in PROXIES if name in vars(sys.modules[LAYER])]
        pins = [Pin(original, name, getattr(original, name)) for name in WRAPPER_ATTRIBUTES if hasattr(original, name)]
        return [*pins, *(Pin(owner, "forward", owner.forward) for owner in owners)], {*METHODS}

    def members(self, original, unchanged):
        def factors(self):
            """Return [(A, B, scaling)] of the active adapters, or None where PEFT must compute."""
            return _factors(self) if unchanged(self) else None

        def forward(self, x, *args, **kwargs):
            y = _mixed(self, x, *args) if len(args) == 2 and not kwargs else None
            return original.forward(self, x, *args, **kwargs) if y is None else y

        return {"forward": forward, "liger_factors": factors}


def is_wrapper(module):
    """Tell whether `module` is PEFT's LoRA of a parameter."""
    cls = original_class(module)
    return (cls.__module__, cls.__name__) == (LAYER, "ParamWrapper")


def match_parameter(wrapper, remember):
    """Return a match and a reason, as `match_lora`."""
    experts = wrapper.get_base_layer()
    cls = original_class(experts)
    match = type(experts).liger_match if is_swapped(experts) else remember((LAYER, cls), lambda: match_experts(experts))
    serves = getattr(match, "is_whole", False) and wrapper.parameter_name in ROLES
    serves = serves and (cls.__call__, cls._call_impl) == CALL
    if not serves or experts.has_bias or experts.is_transposed:
        return None, NOT_EXPERTS.format(cls.__name__)
    if reason := remember((LAYER, match), lambda: match.reason_against(cls)):
        return None, reason
    if not remember((LAYER, type(wrapper)), lambda: _computes_the_sum(wrapper)):
        return None, OTHERWISE
    return LoraParameterMatch("experts with LoRA"), None


def _computes_the_sum(wrapper):
    """Tell whether PEFT adds the products of factors to a weight, on random rows."""
    random = probing.generator()

    def rows(*shape):
        return probing.random_rows(random, *shape) / 4

    x, weight = rows(5, PROBE_HIDDEN), rows(PROBE_EXPERTS, PROBE_FEATURES, PROBE_HIDDEN)
    for scalings in ([2.5], [2.5, -0.5]):
        factors = [
            (rows(PROBE_EXPERTS * PROBE_RANK, PROBE_HIDDEN), rows(PROBE_FEATURES, PROBE_RANK * PROBE_EXPERTS), scaling)
            for scaling in scalings
        ]
        y = _run_wrapper(wrapper, x, weight, factors)
        merged = weight + sum(s * b @ a for a, b, s in (_by_expert(*f, PROBE_EXPERTS) for f in factors))
        if not probing.equal(y, _Products.forward(_Products(merged), x), exact=False):
            return False
    return True


class _Products(torch.nn.Module):
    """Multiply rows by the weight of each expert."""

    is_transposed = False

    def __init__(self, weight, name="weight"):
        super().__init__()
        self.name = name
        self.register_parameter(name, torch.nn.Parameter(weight))

    def forward(self, x):
        return x @ getattr(self, self.name).transpose(1, 2)


def _run_wrapper(wrapper, x, weight, factors):
    """Return the result of PEFT's forward around other experts."""
    parts = {"base_layer": _Products(weight, wrapper.parameter_name)}
    for part, number in (("lora_A", 0), ("lora_B", 1)):
        linears = {f"adapter {i}": probing.linear(factor[number]) for i, factor in enumerate(factors)}
        parts[part] = torch.nn.ModuleDict(linears)
    names = [*parts["lora_A"]]
    state = {"scaling": {name: factor[2] for name, factor in zip(names, factors)}, "_active_adapter": names}
    state |= {"_disable_adapters": False, "merged_adapters": [], "num_experts": len(weight)}
    probe = probing.copy_of(wrapper, {}, wrapper._modules | parts, **state)
    return probing.run(lambda: original_class(wrapper).forward(probe, x))


def _by_expert(a, b, scaling, experts):
    """Return PEFT's factors as (E, r, inputs) and (E, outputs, r)."""
    return a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1), scaling


def _factors(wrapper):
    if wrapper.disable_adapters or wrapper.merged:
        return None
    parts, adapters = adapter_layers(wrapper, "lora_A", "lora_B"), []
    if parts is None:
        return None
    weight = getattr(wrapper.get_base_layer(), wrapper.parameter_name)
    for name in wrapper.active_adapters:
        if name in parts[0]:
            layers, scaling = [part[name] for part in parts], wrapper.scaling[name]
            if not all(map(is_plain_linear, layers)) or not isinstance(scaling, (int, float)) or weight.ndim != 3:
                return None
            a, b = (layer.weight for layer in layers)
            experts, outputs, inputs = weight.shape
            rank, rest = divmod(a.shape[0], experts)
            if rest or a.shape != (experts * rank, inputs) or b.shape != (outputs, rank * experts):
                return None  # such as those that ZeRO-3 holds elsewhere
            if not {a.dtype, b.dtype} <= {*KERNEL_DTYPES} or not a.device == b.device == weight.device:
                return None
            adapters.append(_by_expert(a, b, scaling, experts))
    return adapters or None


def _mixed(wrapper, x, index, routing_weights):
    """Return the experts' output with the adapters of all nested wrappers, or None."""
    if transforms_active():
        return None
    by_role, module, wrappers = {}, wrapper, []
    while (factors := getattr(type(module), "liger_factors", None)) is not None:
        role, adapters = ROLES[module.parameter_name], factors(module)
        if adapters is None or role in by_role or module is not wrapper and is_intercepted(module):
            return None
        wrappers.append(module)
        by_role[role], module = adapters, module._modules["base_layer"]
    if not is_swapped(module) or not hasattr(module, "liger_mixed") or is_intercepted(module):
        return None
    return module.liger_mixed(x, index, routing_weights, **_join_factors(by_role, x.dtype, wrappers))


def _join_factors(by_role, dtype, wrappers):
    """Return the factors as arguments of `experts`; several adapters are one of all their ranks."""
    scalings = {scaling for factors in by_role.values() for _, _, scaling in factors}
    scale = scalings.pop() if len(scalings) == 1 else None
    arguments = {"lora_scale": 1.0 if scale is None else scale}
    for role, factors in by_role.items():
        with uncast(factors[0][0]):  # autocast to the other dtype of 16 bits refuses to concatenate
            a = torch.cat([a for a, _, _ in factors], 1)
            b = torch.cat([b if scale is not None else b * scaling for _, b, scaling in factors], 2)
        kept = [f for a, b, _ in factors for f, needs in ((a, b.requires_grad), (b, a.requires_grad)) if needs]
        copies = a.to(dtype), b.to(dtype, memory_format=torch.contiguous_format)
        arguments[role] = refusing_writes(copies, kept, wrappers)
    return arguments
