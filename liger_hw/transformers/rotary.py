"""Rotary embeddings under the names that liger_kernel has for families whose tables differ."""

import torch

from liger_hw.kernels.rope import rope
from liger_hw.transformers.functional import liger_qwen2vl_mrope as liger_multimodal_rotary_pos_emb
from liger_hw.transformers.functional import liger_rope as liger_rotary_pos_emb

__all__ = [
    "apply_liger_llama4_rope_full",
    "liger_llama4_text_rotary_pos_emb",
    "liger_llama4_vision_rotary_pos_emb",
    "liger_multimodal_rotary_pos_emb",
    "liger_rotary_pos_emb",
    "liger_rotary_pos_emb_gpt_oss",
    "liger_rotary_pos_emb_vision",
]


def liger_rotary_pos_emb_gpt_oss(q, k, cos, sin):
    """`liger_hw.rope` with tables (1|B, T, D/2) of half the width, as gpt_oss makes them."""
    return rope(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """`liger_hw.rope` of q and k (T, heads, D) with tables (T, D), computed in fp32 and rounded once."""
    wide = (x.float().unsqueeze(0) for x in (q, k, cos, sin))
    return tuple(y.squeeze(0).to(q.dtype) for y in rope(*wide, unsqueeze_dim=2))


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis):
    """Rotation of neighbouring pairs, as complex numbers in fp32: xq, xk (B, T, heads, D), freqs_cis complex
    (B, T, D/2) or (T, D/2)."""
    freqs = (freqs_cis if freqs_cis.ndim == 3 else freqs_cis.unsqueeze(0)).unsqueeze(2)
    return _rotated(xq, freqs), _rotated(xk, freqs)


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """The same for query, key (B, T, heads, D) of pictures: freqs_ci complex (T, D/2) or (1, T, 1, D/2)."""
    freqs = freqs_ci.reshape(1, freqs_ci.numel() // freqs_ci.shape[-1], 1, freqs_ci.shape[-1]).to(query.device)
    return _rotated(query, freqs), _rotated(key, freqs)


def _rotated(x, freqs):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs).flatten(-2).to(x.dtype)


def apply_liger_llama4_rope_full(modeling_module):
    """Nothing to do: the rotary functions of Llama 4 are plain PyTorch here too, so its module keeps its own."""
