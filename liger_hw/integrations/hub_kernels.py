"""This library's ops behind the `use_kernels=True` of transformers, in place of the Hub's kernels.

    liger_hw.integrations.register_hub_kernels()
    model = AutoModelForCausalLM.from_pretrained(name, use_kernels=True)

On NVIDIA, AMD and Intel, in training, inference and under torch.compile; nothing is downloaded. In release 5.23 norms
and rotary functions carry a name by which transformers looks kernels up, and gated MLPs and the loss carry none:
`liger_hw.patch` reaches all. A layer runs on an op only if that was proved to give its bits, as in `liger_hw.patch`;
otherwise its own forward runs.
"""

import dataclasses
import importlib
import types

import torch
from torch import nn

from liger_hw.patching.hooks import original_class
from liger_hw.patching.recognition import recognise
from liger_hw.patching.rotary import match_rotation
from liger_hw.patching.rotation import replacement

DEVICES = ("cuda", "rocm", "xpu")
_forwards = {}  # (class, (is it unpatched, has it a weight)) -> function (module, *inputs) that computes its forward
_replaced = []  # (owner, name or key, the original there or None)


class Layer(nn.Module):
    """A layer whose forward becomes that of a model's class."""

    can_torch_compile = True
    has_backward = True


class Norm(Layer):
    """An RMSNorm of any rounding order."""

    def forward(self, hidden_states):
        return _forward_of(self)(self, hidden_states)


class GatedMLP(Layer):
    """down(f(gate(x)) * up(x))."""

    def forward(self, x):
        return _forward_of(self)(self, x)


class Rotary(Layer):
    """The rotation of q and k, by a model's function."""

    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return _forward_of(self)(self, q, k, cos, sin, unsqueeze_dim)


LAYERS = {  # name by which transformers looks a kernel up -> its layer
    "GeGLUMLP": GatedMLP,
    "RMSNorm": Norm,
    "RMSNormZeroCentered": Norm,
    "SwiGLUMLP": GatedMLP,
    "rotary_pos_emb": Rotary,
}


@dataclasses.dataclass(frozen=True)
class Repository:
    """A repository of the package kernels whose layer is here already."""

    layer: type

    def load(self):
        """Return the layer's class."""
        return self.layer


def _forward_of(module):
    # a patched class equals its original
    key = type(module), (type(module) is original_class(module), getattr(module, "weight", None) is not None)
    if key in _forwards:
        return _forwards[key]
    if torch.compiler.is_compiling():  # it cannot trace a proof, which `kernelize` has usually made before
        return type(module).forward
    return _forwards.setdefault(key, _prove(module))


def _prove(module):
    """Return the op's forward if it provably equals the module's; else the module's."""
    cls = type(module)
    if LAYERS.get(cls.kernel_layer_name) is Rotary:
        function = types.MethodType(cls.forward, module)
        rotation = match_rotation(function)
        if rotation is None:
            return cls.forward
        computed = replacement(function, rotation)
        return lambda self, *args: computed(*args)
    match, _ = recognise(module)
    if match is None or match.kind not in ("norm", "mlp"):
        return cls.forward
    return match.members(cls, match.guard(cls))["forward"]


def _proving_first(kernelize):
    def kernelize_with_proofs(model, mode=None):
        for module in model.modules():
            for layer in (module, *getattr(module, "_kernel_funcs", {}).values()):
                if getattr(type(layer), "kernel_layer_name", None) in LAYERS:
                    _forward_of(layer)
        return kernelize(model, mode=mode)

    return kernelize_with_proofs


def register_hub_kernels():
    """Make `use_kernels=True` of transformers use this library's ops.

    The ops serve every name in `LAYERS` on every device in `DEVICES`. A second call changes nothing. Kernelized models
    keep their kernels.

    Raises:
        RuntimeError: the installed kernels and transformers are incompatible.

    Examples:
        >>> liger_hw.integrations.register_hub_kernels()  # doctest: +SKIP
        >>> AutoModelForCausalLM.from_pretrained(name, use_kernels=True)  # doctest: +SKIP
    """
    if _replaced:
        return
    hub_kernels = importlib.import_module("transformers.integrations.hub_kernels")
    get_mapping = getattr(hub_kernels, "get_kernel_mapping_transformers", None)
    if get_mapping is None or not getattr(hub_kernels, "_kernels_enabled", False):
        import transformers

        raise RuntimeError(
            f"transformers {transformers.__version__} finds no package kernels that it can use, or keeps no mapping of "
            "kernels: its transformers.utils.import_utils names the versions it takes"
        )
    from kernels import Mode

    mapping, modes = get_mapping(), (Mode.TRAINING, Mode.INFERENCE)
    every_mode = [mode | compiled for mode in modes for compiled in (Mode.TORCH_COMPILE, mode)]
    modeling_utils = importlib.import_module("transformers.modeling_utils")
    kernelize = modeling_utils.kernelize  # before the first change, as an old release has none
    for name, layer in LAYERS.items():
        devices = mapping.setdefault(name, {})
        for device in DEVICES:
            _replaced.append((devices, device, devices.get(device)))
            devices[device] = dict.fromkeys(every_mode, Repository(layer))
    _replaced.append((vars(modeling_utils), "kernelize", kernelize))
    modeling_utils.kernelize = _proving_first(kernelize)


def unregister_hub_kernels():
    """Undo `register_hub_kernels`, for models that are kernelized from now on.

    Examples:
        >>> liger_hw.integrations.unregister_hub_kernels()
    """
    while _replaced:
        owner, name, original = _replaced.pop()
        if original is None:
            del owner[name]
        else:
            owner[name] = original
