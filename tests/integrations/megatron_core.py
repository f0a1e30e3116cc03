"""Modules with the interfaces of Megatron-Core 0.16 that `apply_liger_kernel_to_megatron` replaces, in plain torch."""

import sys
import types

import torch
import torch.nn.functional as F

SOURCES = {  # in the order of their imports
    "parallel_state": """
GROUP = None

def get_tensor_model_parallel_group(check_initialized=True):
    assert GROUP is not None or not check_initialized
    return GROUP
""",
    "transformer": "",
    "transformer.torch_norm": """
class WrappedTorchNorm:
    def __new__(cls, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False,
                normalization="LayerNorm"):
        return getattr(torch.nn, config.normalization)(hidden_size, eps=eps)
""",
    "transformer.transformer_block": """
from megatron.core.transformer.torch_norm import WrappedTorchNorm
LayerNormImpl = WrappedTorchNorm
""",
    "models": "",
    "models.gpt": "",
    "models.gpt.gpt_layer_specs": """
from megatron.core.transformer.torch_norm import WrappedTorchNorm
LNImpl = WrappedTorchNorm
""",
    "models.backends": """
from megatron.core.transformer.torch_norm import WrappedTorchNorm

class FusedLayerNorm: pass

LNImpl = FusedLayerNorm

class LocalSpecProvider:
    def layer_norm(self, rms_norm=False, for_qk=False):
        if rms_norm:
            global LNImpl
            LNImpl = WrappedTorchNorm
        return LNImpl
""",
    "fusions": "",
    "fusions.fused_cross_entropy": """
def fused_vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group):
    return native_cross_entropy(vocab_parallel_logits, target, 0.0)
""",
    "tensor_parallel.cross_entropy": """
def vocab_parallel_cross_entropy(vocab_parallel_logits, target, label_smoothing=0.0):
    return native_cross_entropy(vocab_parallel_logits, target, label_smoothing)
""",
    "tensor_parallel": """
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
""",
    "models.common": "",
    "models.common.language_module": "",
    "models.common.language_module.language_module": """
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

def compute_language_model_loss(labels, logits, fused, group):
    if fused:
        return fused_vocab_parallel_cross_entropy(logits, labels, group)
    return tensor_parallel.vocab_parallel_cross_entropy(logits, labels)
""",
    "fusions.fused_bias_swiglu": """
class SwiGLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, fp8_input_store, cpu_offload_input):
        calls.append((fp8_input_store, cpu_offload_input))
        ctx.save_for_backward(input)
        return native_swiglu(input)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return *torch.autograd.grad(native_swiglu(x), x, dy), None, None

calls = []  # options of the calls that reached Megatron's own function

def bias_swiglu_impl(input, bias, fp8_input_store=False, cpu_offload_input=False):
    shape = input.shape
    input = input.view(-1, shape[-1])
    if bias is not None:
        return native_swiglu(input + bias).view(*shape[:-1], -1)
    return SwiGLUFunction.apply(input, fp8_input_store, cpu_offload_input).view(*shape[:-1], -1)
""",
    "transformer.mlp": "from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl",
}


def native_cross_entropy(logits, target, smoothing):
    """Compute Megatron's loss of one rank: `smoothing` is spread over the columns that are no target."""
    log_probs = logits.float().log_softmax(-1)
    alpha = smoothing * logits.shape[-1] / (logits.shape[-1] - 1)
    own = log_probs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return -(1 - alpha) * own - alpha * log_probs.mean(-1)


def native_swiglu(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def install(monkeypatch, without=()):
    """Put the modules into sys.modules; `without`: modules, or (module, name) in them, to leave out.

    Returns:
        module -> module object; names as in `SOURCES`.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    packages = {"megatron", "megatron.core"} | {f"megatron.core.{name}" for name in SOURCES}
    modules = {name: types.ModuleType(name) for name in packages}
    for name in packages:
        modules[name].__path__ = []
    for name in sorted(packages):
        if name.removeprefix("megatron.core.") not in without:
            monkeypatch.setitem(sys.modules, name, modules[name])
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, modules[name])
    shared = {"torch": torch, "native_cross_entropy": native_cross_entropy, "native_swiglu": native_swiglu}
    for name, source in SOURCES.items():
        if name not in without:
            vars(modules[f"megatron.core.{name}"]).update(shared)
            exec(source, vars(modules[f"megatron.core.{name}"]))  # noqa: S102
    for name in without:
        if isinstance(name, tuple):
            delattr(modules[f"megatron.core.{name[0]}"], name[1])
    return {name: modules[f"megatron.core.{name}"] for name in SOURCES}
