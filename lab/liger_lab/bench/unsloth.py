"""Build a Llama with random weights as unsloth changes it.

unsloth loads models from a disk or a hub; this does the rest of its `from_pretrained`. Import this module before
transformers, as unsloth asks.
"""

from unsloth.models import llama

from liger_lab.bench.training import quantise

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Tokenizer:
    """Stand in for a tokenizer, of which unsloth asks size and side."""

    padding_side = "right"

    def __len__(self):
        return self.words


def build(config, rank, planned, device, dtype):
    """Return the model with adapters, which unsloth computes."""
    import transformers

    unsloth = llama.FastLlamaModel
    unsloth.pre_patch()
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    if "qlora" in planned:
        quantise(model, device)
    tokenizer = Tokenizer()
    tokenizer.words = config.vocab_size
    llama.mark_unsloth_fast_path(model)
    model, _ = unsloth.post_patch(model, tokenizer, correct_dtype=dtype)
    model.max_seq_length = model.model.max_seq_length = planned["seq"]
    model._saved_temp_tokenizer = model.model._saved_temp_tokenizer = tokenizer
    for layer in model.model.layers:
        layer.self_attn.apply_qkv, layer.self_attn.apply_o = llama.original_apply_qkv, llama.original_apply_o
        layer.self_attn.rotary_emb = model.model.rotary_emb
    _rename_training_loop(transformers.Trainer)
    checkpointing = "unsloth" if planned["checkpointing"] else False
    model = unsloth.get_peft_model(model, rank, PROJECTIONS, lora_alpha=8, use_gradient_checkpointing=checkpointing)
    unsloth.for_training(model, use_gradient_checkpointing=checkpointing)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # unsloth makes zeros
            parameter.data.normal_(std=0.02)
    return model


def _rename_training_loop(trainer):
    """Give the Trainer's loop, which nothing calls, the name that unsloth checks."""

    def _fast_inner_training_loop(*args, **options):
        raise NotImplementedError

    trainer._inner_training_loop = _fast_inner_training_loop
