"""Every language model of transformers, tiny: its class from the auto classes' own lists, its configuration the default
one with all sizes reduced by the names that they go by."""

import copy
import inspect
import re

import tiny
import torch
from zoo_changes import CHANGES, INPUTS, REASONS

transformers = tiny.transformers
from transformers.models.auto import configuration_auto, modeling_auto  # noqa: E402

MAPS = "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"
LAYERS = r"num_hidden_layers|num_layers|n_layers?|num_\w*_layers|(en|de)coder_layers|layers|depths?|n_encoder_layer"
SIZES = {  # what a name matches first counts
    r"\w*vocab_size\w*|vocabulary\w*": tiny.VOCABULARY,
    r"first_k_dense_replace|num_dense_layers|first_dense_layers|n_dense_layers": 1,
    LAYERS: 2,
    r"num_\w*experts_per_tok\w*|\w*top_?k(_experts)?|num_selected_experts|moe_k|num_activated_experts": 2,
    r"(num|n)_(shared|zero|null|mod)\w*experts?|\w*n_shared_experts|num_shared_expert": 1,
    r"topk_groups?|n_groups?|num_expert_groups?|n_expert_groups?|num_limited_groups": 1,
    r"(num|n)_(\w+_)?experts|moe_num_experts|ffn_num_experts": 4,
    r"\w*(key_value|kv)_heads|n_head_kv|num_kv_groups|attention_groups": 2,
    r"(num|n)_\w*heads?|\w*attention_heads|n_head|num_heads|heads|nhead|n_heads": 4,
    r"qk_rope_head_dim|qk_nope_head_dim|rotary_dim|qk_pos_emb_head_dim|index_head_dim": 8,
    r"\w*head_dim\w*|d_kv|kv_channels|d_head|head_size|kv_channels": 16,
    r"\w*lora_rank|\w*lora_dim|low_rank\w*|\w*_rank": 16,
    r"moe_\w*(intermediate|ffn_hidden)_size|\w*expert\w*_(intermediate|hidden|ffn)\w*size|expert_ffn\w*": 32,
    r"\w*intermediate_(size|dim)|\w*ffn_dim|d_ff|n_inner|ffn_hidden_size|d_inner|mlp_dim|d_ffn": 96,
    r"\w*hidden_(size|dim)s?\w*|(n_embd|dim|d_model|embed_dim|embedding_(size|dim)|emb_dim|embed_size|width)": 64,
    r"out_hidden_size|output_dim|projection_(size|dim)|embed_proj_dim|word_embed_proj_dim|\w*proj_dim|lru_width": 64,
    r"(max|n)_(position\w*|ctx|seq_len\w*|positions)|max_\w*positions?|seq_len\w*|\w*context_length": 64,
    r"sliding_window\w*|\w*window_size|local_attention_window|attention_chunk_size": 8,
    r"image_size|max_image_size|crop_size": 32,
    r"num_image_tokens|num_queries|num_query_tokens|resampler_n_latents": 4,
    r"mamba_n_groups|mamba_ngroups": 1,
    r"\w*(mamba|ssm|linear|state)\w*(d_state|state_size|state_dim)|state_size|d_state": 8,
    r"\w*chunk_size|block_size": 8,
    r"full_attention_interval|\w*attention_(period|every_n_layers)": 2,
}
TELLING = r"\w*(multiplier|logits?_scal|logit_scal|softcap|residual_scale|scale_emb|scale_depth)\w*"
ROUTERS_LOSS = r"\w*(aux|z)_loss_coef\w*"  # large enough to show beside the loss, and asked for
SPECIAL = r"(\w*_)?(pad|bos|eos|unk|cls|sep|mask|start|decoder_start|forced_\w+)_token_id"
OTHER_TOKEN = r"\w*(token_id|token_index|tok_id)|\w*_(start|end)_id"


def rows():
    """List (model type, class name) of every class that 4.57 does not call deprecated."""
    found, deprecated = {}, getattr(configuration_auto, "DEPRECATED_MODELS", ())
    for name in MAPS:
        lists = getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {})  # older versions have fewer
        for model_type, classes in lists.items():
            if model_type.replace("-", "_") in deprecated:
                continue
            for cls in classes if isinstance(classes, (tuple, list)) else (classes,):
                found.setdefault((model_type, cls))
    return list(found)


def config(config_class, **given):
    """The default configuration of `config_class`, tiny, with telling values of every scale of it."""
    default = config_class()
    values, ordinary = {}, {"id2label", "label2id", "return_dict", "transformers_version"}
    for name, value in vars(default).items():
        if name.startswith("_") or name in ordinary:
            continue
        if isinstance(value, transformers.PretrainedConfig):
            values[name] = config(type(value), **given.pop(name, {}))
        elif type(value) is int:
            small = _small(name, value)
            values |= {} if small is None else {name: small}
        elif name == "output_router_logits":
            values[name] = True
        elif re.fullmatch(ROUTERS_LOSS, name) and type(value) is float:
            values[name] = 0.3
        elif name == "head_dim" and value is None:
            values[name] = 16
        elif re.fullmatch(TELLING, name) and (value is None or value == 1.0 and type(value) is float):
            values[name] = 0.7
        elif re.fullmatch(TELLING, name) and isinstance(value, list) and set(value) == {1.0}:
            values[name] = [0.7 + 0.1 * i for i in range(len(value))]
    if hasattr(default, "qk_rope_head_dim"):  # latent attention: no groups of heads, and head_dim is what rotates
        values |= {"num_key_value_heads": 4, "head_dim": 8}
        values.pop("qk_head_dim", None)
    if "rope_parameters" in given and not hasattr(default, "rope_parameters"):  # its name in 4.57
        given["rope_scaling"] = given.pop("rope_parameters")
    values |= _short_lists(default) | given
    made, parts = config_class(**values), [n for n, v in values.items() if isinstance(v, transformers.PretrainedConfig)]
    if not all(name in vars(made) for name in parts):  # transformers 4.57 takes parts of some as dictionaries alone
        made = config_class(**values | {name: values[name].to_dict() for name in parts})
    return made


def _small(name, value):
    if re.fullmatch(SPECIAL, name):
        return None if value < 3 else 2
    if re.fullmatch(OTHER_TOKEN, name):
        return 100 + sum(map(ord, name)) % 27
    for pattern, small in SIZES.items():
        if re.fullmatch(pattern, name):
            return min(value, small) if value > 0 else None
    return None


def _short_lists(default):
    """Lists of one entry a layer, cut to one layer of each kind."""
    counts = {n: v for n, v in vars(default).items() if type(v) is int and re.fullmatch(LAYERS, n)}
    found = {}
    for name, count in counts.items():
        lists = {n: v for n, v in vars(default).items() if isinstance(v, (list, tuple)) and len(v) == count > 4}
        if not lists:
            continue
        kinds = list(zip(*(map(str, v) for v in lists.values())))
        keep = sorted({kinds.index(kind) for kind in kinds})[:6]
        keep = sorted({*keep, 0, 1}) if len(keep) < 2 else keep
        found |= {n: type(v)(v[i] for i in keep) for n, v in lists.items()} | {name: len(keep)}
    return found


class NotTiny(Exception):
    """A class of models that these rules make no small working model of; says why."""


def build(model_type, cls):
    """Build a tiny fp32 model with perturbed weights, and inputs for training.

    Raises:
        NotTiny: it cannot be built, or its own forward does not run on text alone.
    """
    if model_type in REASONS:
        raise NotTiny(REASONS[model_type])
    try:
        model = _model(model_type, cls)
        given = inputs(model, model_type)
        with torch.no_grad():
            learns = model(**given).loss is not None
    except Exception as error:  # of any kind: of the model's, not of this library's, which is not at work yet
        raise NotTiny(" ".join(f"{type(error).__name__}: {error}".split())[:200]) from error
    if not learns:
        raise NotTiny("its forward gives no loss of labels")
    return model, given


def _model(model_type, cls, seed=0):
    config_class = transformers.CONFIG_MAPPING[model_type]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        small = config(config_class, **copy.deepcopy(CHANGES.get(model_type, {})))
        model_class = getattr(transformers, cls)
        text = next((part for part in vars(small).values() if type(part) is model_class.config_class), None)
        small = small if text is None else text
        for part in (small, small.get_text_config(decoder=True)):
            if getattr(part, "is_encoder_decoder", False) or not hasattr(part, "decoder_start_token_id"):
                part.decoder_start_token_id = 0
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(small).parameters())
        if size > 4e7:
            raise ValueError(f"{size:.1e} parameters")
        model = model_class(small)
        for p in model.parameters():
            # wider sums, of convolutions, would lose the loss's gradient to rounding
            p.data += 0.2 * min(1.0, (64 / max(p[0].numel() if p.ndim else 1, 1)) ** 0.5) * torch.randn_like(p)
    return model.train()


def inputs(model, model_type, batch=2, length=12, seed=0):
    """Make the forward's inputs: token ids, labels, and other required arguments."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 100, (batch, length), generator=generator)
    labels = ids.clone()
    labels[0, :4] = -100
    accepted = inspect.signature(model.forward).parameters
    given = {"input_ids": ids, "labels": labels}
    given |= INPUTS.get(model_type, lambda ids, config: {})(ids, model.config)
    if "use_cache" in accepted:
        given["use_cache"] = False
    return given
