"""Train tiny models with TRL's trainers; print losses and the memory of a step.

    trl_training.py MODE FOLDER

MODE is plain, patched (with TRL's own log-probabilities by this library, where TRL has them) or stand-in.
"""

import json
import sys

import torch
import transformers
import trl
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import liger_hw
from liger_hw import integrations
from liger_hw.patching import swapping
from liger_lab.bench import memory

mode, folder = sys.argv[1:]
VOCABULARY = 8192  # whose logits are the largest tensor of a step
LETTERS = "abcdefghijklmnopqrstuvwxyz "
WORDS = [f"{a}{b}{c} {c}{a}" for a in "abcd" for b in "efgh" for c in "ijkl"]


def tokenizer():
    vocabulary = {letter: i for i, letter in enumerate(["<pad>", "<s>", "</s>", "<unk>", *LETTERS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )


def model():
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        head_dim=8, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    made = transformers.Qwen3ForCausalLM(config)
    if mode == "patched":
        liger_hw.patch(made)
    return made


def train(trainer, config, rows, *others, **more):
    made = model()
    arguments = config(
        folder, max_steps=3, per_device_train_batch_size=4, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
        save_strategy="no", disable_tqdm=True, learning_rate=1e-2, seed=0, use_liger_kernel=mode == "stand-in", **more,
    )  # fmt: skip
    trained = trainer(
        made, *others, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()
    )
    trained.train()
    batch = next(iter(trained.get_train_dataloader()))
    peak = memory.peak(lambda: trained.training_step(trained.model, batch, None), torch.device("cpu"))
    logs = [log for log in trained.state.log_history if "loss" in log]
    return {
        "losses": [log["loss"] for log in logs], "gradient_norms": [log["grad_norm"] for log in logs],
        "peak": peak, "swapped": sum(map(swapping.is_swapped, made.modules())),
    }  # fmt: skip


def vowels(completions, **_):
    return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]


if mode == "patched" and Version(trl.__version__) >= Version("1.15"):
    integrations.accelerate_trl()
prompts = [{"prompt": word[:4], "chosen": word[4:], "rejected": word[::-1]} for word in WORDS]
print(json.dumps({
    "sft": train(SFTTrainer, SFTConfig, [{"text": word} for word in WORDS]),
    "dpo": train(DPOTrainer, DPOConfig, prompts, model()),
    "grpo": train(
        GRPOTrainer, GRPOConfig, [{"prompt": row["prompt"]} for row in prompts], vowels, num_generations=4,
        max_completion_length=8,
    ),
}))  # fmt: skip
