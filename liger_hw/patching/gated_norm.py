"""RMSNorms with a gate, as Mamba-2, gated DeltaNet and Kimi's linear attention end in, composed of the ops.

Three ops where the models' own code runs ten: the norm, the gated unit and a cast read and write 26 bytes a value in 16
bits, where theirs move 62.
"""

import torch

from liger_hw.kernels.glu import swiglu
from liger_hw.kernels.rms_norm import rms_norm


def silu_after(x, gate, weight, eps, group, rms_norm=rms_norm, swiglu=swiglu):
    """Qwen3NextRMSNormGated: the norm, rounded and scaled as Llama's, times silu(gate) in fp32."""
    return swiglu(gate.float(), rms_norm(x, weight, eps)).to(x.dtype)


def sigmoid_after(x, gate, weight, eps, group, rms_norm=rms_norm, swiglu=swiglu):
    """KimiLinearRMSNormGated: the norm and its scale in fp32, times sigmoid(gate) in fp32."""
    return (rms_norm(x.float(), weight.float(), eps, casting_mode="gemma") * torch.sigmoid(gate.float())).to(x.dtype)


def silu_before(x, gate, weight, eps, group, rms_norm=rms_norm, swiglu=swiglu):
    """MambaRMSNormGated: x silu(gate) in fp32, the norm of each group of columns of it, rounded, then scaled."""
    wide = x.float() if gate is None else swiglu(gate.float(), x.float())
    return weight * rms_norm(wide.unflatten(-1, (-1, group)), None, eps).flatten(-2).to(x.dtype)


FORMS = {form.__name__: form for form in (silu_after, sigmoid_after, silu_before)}
