"""List the exceptions of models to the rules of zoo.py."""

import torch

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = ROPE | {"mrope_section": [2, 3, 3]}
HALF_MROPE = MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
MROPE_TEXT = {"text_config": {"rope_parameters": MROPE}}
HYBRID = ["linear_attention", "hybrid", "linear_attention", "hybrid"]
INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ngram_vocab_size_base": 64,
    "split_ngram_parts": 1,
}
SPEECH = {"num_filters": 2, "depths": (1,) * 7}
WORDS = {"<image>": 5, "<|extra_200|>": 6, **{f"IMGIMG{letter}Z": 7 + i for i, letter in enumerate("ABCD")}}

CHANGES = {  # model type -> arguments of its configuration, of parts of it as dictionaries
    "qwen2_vl": MROPE_TEXT,
    "qwen2_5_vl": MROPE_TEXT,
    "qwen3_vl": MROPE_TEXT,
    "qwen3_vl_moe": MROPE_TEXT,
    "qwen2_5_omni_thinker": MROPE_TEXT,
    "paddleocr_vl": MROPE_TEXT,
    "glm4v": MROPE_TEXT,
    "glm46v": MROPE_TEXT,
    "glmga": MROPE_TEXT,
    "glm_ocr": MROPE_TEXT,
    "glm4v_moe": {"text_config": {"rope_parameters": HALF_MROPE}},
    "blip-2": {"image_token_index": 101},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {"vocabulary_map": WORDS},
    "cohere_compass": {"text_config": {"rope_parameters": {"full_attention": ROPE}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "cosmos3_edge": MROPE_TEXT,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dory": {"initializer_range": 0.3},  # the size of its scales, which noise of 0.2 would make ten times as large
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "encoder-decoder": {"pad_token_id": 0},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": ROPE | {"mrope_section": [3, 3, 2]}}},
    "flint": {"output_router_logits": False},  # its own forward fails with them, as nllb-moe's
    "florence2": {
        "vision_config": {
            "embed_dim": (16, 16, 32, 64),
            "num_heads": (2,) * 4,
            "num_groups": (2,) * 4,
            "depths": (1,) * 4,
        }
    },
    "emu3": {"vocabulary_map": WORDS, "vq_config": {"base_channels": 32}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    "glm5_next": {"text_config": {"index_kpool": 2}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0]], "downsample_rate": "1/1", "spatial_target_layers": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan_vl": MROPE_TEXT,
    "instructblip": {"image_token_index": 101},
    "instructblipvideo": {"video_token_index": 101, "image_token_index": 101},
    "janus": {"vq_config": {"base_channels": 32}},
    "kosmos-2": {"latent_query_num": 4},
    "kyutai_speech_to_text": {"codec_config": {"upsample_groups": 64}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mistral4": {"head_dim": 16, "qk_head_dim": 16},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}, "text_config": {"rope_scaling_layers": [0, 1]}},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": (8, 16, 32, 64), "depths": (1,) * 4}},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "nllb-moe": {"output_router_logits": False},
    "pp_formulanet": {"vision_config": {"image_size": 128}},  # several tokens, or queries and keys learn nothing
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "local"],
        "hash_seed": 0,
        "hidden_dropout_prob": 0.0,
        "local_attention_probs_dropout_prob": 0.0,
    },
    "step3p7": {"text_config": {"sliding_window": 8}},
    "vibevoice_asr": {
        "acoustic_tokenizer_chunk_size": 3200,
        "acoustic_tokenizer_encoder_config": SPEECH,
        "semantic_tokenizer_encoder_config": SPEECH,
    },
    "vision-encoder-decoder": {"pad_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": HYBRID,
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zamba2": {
        "layers_block_type": HYBRID,
        "num_hidden_layers": 4,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "mamba_headdim": 32,
    },
}


TIMM = "its vision tower comes from the package timm; its text model is compared by itself, where it is one of these"
OMNI = "three models in one, of which generation alone uses all; its thinker is compared by itself"
ASSISTANT = "drafts tokens from another model's hidden states and caches, and learns from no labels of its own"
REASONS = {  # model type -> why there is no tiny one
    "diffusion_gemma": "learns to denoise blocks: its forward takes no labels",
    "fast_vlm": TIMM,
    "gemma3n": TIMM,
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": ASSISTANT,
    "inkling_mm_model": "its vision tower needs the package scipy; its text model is compared by itself",
    "perception_lm": TIMM,
    "pi0": "learns a robot's actions: its forward takes no labels",
    "qwen2_5_omni": OMNI,
    "qwen3_omni_moe": OMNI,
}


def pixels(config, *before):
    """Random images of the size that a part of `config` names, a batch of two."""
    sizes = (getattr(part, "image_size", None) for part in (config, *vars(config).values()))
    size = next((size for size in sizes if size), 32)
    height, width = (size, size) if type(size) is int else size
    return torch.randn(2, *before, 3, height, width, generator=torch.Generator().manual_seed(2))


def with_image_tokens(ids, config, count=4, **more):
    """Text that begins with the places of `count` features of an image."""
    token = getattr(config, "image_token_id", None) or config.image_token_index
    ids = torch.cat((torch.full_like(ids[:, :count], token), ids[:, count:]), 1)
    return {"input_ids": ids, "pixel_values": pixels(config)} | more


def _kosmos(ids, config):
    places = (torch.arange(ids.shape[1]) < config.latent_query_num).expand_as(ids)
    return {"pixel_values": pixels(config), "image_embeds_position_mask": places}


def _codebooks(ids, config):
    count = config.num_codebooks
    codes = ids.repeat_interleave(count, 0) % config.vocab_size
    return {"input_ids": codes, "labels": codes.view(ids.shape[0], count, -1).transpose(1, 2).contiguous()}


def _patches(ids, config):
    width = config.vision_config.patch_embed_hidden_size
    patches = torch.randn(ids.shape[0], 6, 2 + width, generator=torch.Generator().manual_seed(2))
    patches[..., :2] = 1 + torch.arange(6)[:, None]
    return {"flattened_patches": patches}


INPUTS = {  # model type -> (token ids, configuration) -> inputs beside those ids and their labels, or in their place
    "blip": lambda ids, config: {"pixel_values": pixels(config)},
    "blip-2": with_image_tokens,
    "git": lambda ids, config: {"pixel_values": pixels(config)},
    "idefics": lambda ids, config: {
        "pixel_values": pixels(config, 1), "image_attention_mask": torch.ones(*ids.shape, 1, dtype=torch.int64),
    },
    "instructblip": lambda ids, config: with_image_tokens(ids, config, qformer_input_ids=ids),
    "instructblipvideo": lambda ids, config: with_image_tokens(ids, config, qformer_input_ids=ids)
    | {"pixel_values": pixels(config, 1)},
    "kosmos-2": _kosmos,
    "kyutai_speech_to_text": lambda ids, config: {"input_ids": ids[..., None].repeat(1, 1, config.num_codebooks + 1)},
    "molmo2": lambda ids, config: {"mm_token_type_ids": torch.zeros_like(ids)},
    "musicgen": _codebooks,
    "musicgen_melody": _codebooks,
    "pix2struct": _patches,
    "pp_formulanet": lambda ids, config: {"pixel_values": pixels(config)},
    "udop": lambda ids, config: {"bbox": torch.zeros(*ids.shape, 4)},
    "voxtral_realtime": lambda ids, config: {
        "input_features": torch.randn(ids.shape[0], 128, 8 * ids.shape[1], generator=torch.Generator().manual_seed(2))
    },
    "vision-encoder-decoder": lambda ids, config: {"pixel_values": pixels(config)},
}  # fmt: skip
