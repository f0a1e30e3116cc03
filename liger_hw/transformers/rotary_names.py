"""Rotary embeddings under the names that liger_kernel has for families whose tables differ."""

from liger_hw.kernels.rope import rope
from liger_hw.patching.flags import FLAGS
from liger_hw.patching.patch import patch
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
    """`liger_hw.rope` with tables (1|B, T, D/2) of a value for each pair, as gpt_oss makes them."""
    return rope(q, k, cos, sin, shared=True)


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """`liger_hw.rope` of q and k (T, heads, D) with tables (T, D), computed in fp32 and rounded once."""
    q, k, cos, sin = (x.unsqueeze(0) for x in (q, k, cos.float(), sin.float()))
    return tuple(x.squeeze(0) for x in rope(q, k, cos, sin, unsqueeze_dim=2, wide=True))


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis):
    """Rotation of neighbouring pairs, in fp32 and rounded once.

    Args:
        xq, xk: (B, T, heads, D).
        freqs_cis: complex, (B, T, D/2) or (T, D/2).
    """
    freqs = freqs_cis if freqs_cis.ndim == 3 else freqs_cis.unsqueeze(0)
    return rope(xq, xk, freqs.real, freqs.imag, unsqueeze_dim=2, layout="interleaved", shared=True, wide=True)


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """The same for query and key (B, T, heads, D) of pictures: freqs_ci complex (T, D/2), or with dimensions of 1."""
    freqs = freqs_ci.reshape(-1, freqs_ci.shape[-1]).to(query.device)
    return liger_llama4_text_rotary_pos_emb(query, key, freqs)


def apply_liger_llama4_rope_full(modeling_module):
    """`liger_hw.patch` of every Llama 4 that is built from now on, its rotary functions alone.

    Args:
        modeling_module: `transformers.models.llama4.modeling_llama4`.
    """
    patch(modeling_module.Llama4ForConditionalGeneration, **dict.fromkeys(FLAGS, False) | {"rope": True})
