"""A tiny model, its tokenizer and texts, which trainers read from a folder.

trainer_files.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 8192  # whose logits are the largest tensor of a step
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = [f"{a}{b}{c} {c}{a}" for a in "abcd" for b in "efgh" for c in "ijkl"]


def tokenizer():
    """Make a tokenizer of single bytes."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=SPECIAL[0], eos_token=SPECIAL[2], additional_special_tokens=SPECIAL[1:2],
        chat_template=CHAT,
    )  # fmt: skip


def model(cls=transformers.Qwen3ForCausalLM, **more):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = transformers.Qwen3Config(**sizes | more)
    return cls(config)


def save(folder):
    """Write the model, and the texts in the format of each trainer."""
    model().save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    alpaca = [{"instruction": f"Reverse {word}.", "input": "", "output": word[::-1]} for word in WORDS]
    chats = [
        {"messages": [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}]}
        for row in alpaca
    ]
    (folder / "alpaca.json").write_text(json.dumps(alpaca))
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "dataset_info.json").write_text(json.dumps({"alpaca": {"file_name": "alpaca.json"}}))


if __name__ == "__main__":
    save(Path(sys.argv[1]))
