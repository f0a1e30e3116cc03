"""Define rotary embeddings under liger_kernel's names for families with other tables."""

from liger_hw.kernels.attention.rope import rope
from liger_hw.patching.flags import FLAGS
from liger_hw.patching.patch import patch
from liger_hw.transformers.functional import liger_qwen2vl_mrope, liger_rope

liger_multimodal_rotary_pos_emb, liger_rotary_pos_emb = liger_qwen2vl_mrope, liger_rope


def liger_rotary_pos_emb_gpt_oss(q, k, cos, sin):
    """Apply `liger_hw.rope` with gpt_oss's tables (1|B, T, D/2), one value per pair."""
    return rope(q, k, cos, sin, shared=True)


def liger_rotary_pos_emb_vision(q, k, cos, sin):
    """Rotate q and k (T, heads, D) by tables (T, D) in fp32, rounded once."""
    q, k, cos, sin = (x.unsqueeze(0) for x in (q, k, cos.float(), sin.float()))
    return tuple(x.squeeze(0) for x in rope(q, k, cos, sin, unsqueeze_dim=2, wide=True))


def liger_llama4_text_rotary_pos_emb(xq, xk, freqs_cis):
    """Rotate neighbouring pairs in fp32, rounded once.

    Args:
        xq, xk: (B, T, heads, D).
        freqs_cis: complex, (B, T, D/2) or (T, D/2).
    """
    freqs = freqs_cis if freqs_cis.ndim == 3 else freqs_cis.unsqueeze(0)
    return rope(xq, xk, freqs.real, freqs.imag, unsqueeze_dim=2, layout="interleaved", shared=True, wide=True)


def liger_llama4_vision_rotary_pos_emb(query, key, freqs_ci):
    """Rotate image query and key (B, T, heads, D) by complex freqs_ci (T, D/2)."""
    freqs = freqs_ci.reshape(-1, freqs_ci.shape[-1]).to(query.device)  # drops further dimensions of 1
    return liger_llama4_text_rotary_pos_emb(query, key, freqs)


def apply_liger_llama4_rope_full(modeling_module):
    """Patch only the rotary functions of every Llama 4 built from now on.

    Args:
        modeling_module: `transformers.models.llama4.modeling_llama4`.
    """
    patch(modeling_module.Llama4ForConditionalGeneration, **dict.fromkeys(FLAGS, False) | {"rope": True})
