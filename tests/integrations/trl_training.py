"""Train tiny models with TRL's trainers; print their logs and the memory of a step.

    trl_training.py MODE

MODE is plain, callback (docs/trainers.md has its code), accelerated (with TRL's own log-probabilities by this library,
where TRL has them, too) or stand-in.
"""

import json
import logging
import sys
import tempfile

import peft
import torch
import trainer_files
import transformers
import trl
from datasets import Dataset
from test_trainers_as_documented import LINE, documented, without
from trainer_files import WORDS

import liger_hw.integrations
from liger_hw.patching.patch import _log_once
from liger_lab.bench import memory

MODE = sys.argv[1]
CALLBACK = ", callbacks=[LigerHwCallback()]"


def odd(completion_ids, **_):
    """Reward odd tokens: a text of a random model's tokens is nearly always empty."""
    return [sum(token % 2 for token in tokens) / len(tokens) for tokens in completion_ids]


TEXTS = [{"text": f"{word} {word[::-1]}"[: 6 + i % 12]} for i, word in enumerate(WORDS)]
PAIRS = [{"prompt": word[:4], "chosen": word[4:], "rejected": word[::-1]} for word in WORDS]
ANSWERS = [{"prompt": word[:4], "completion": word[4:], "label": i % 3 > 0} for i, word in enumerate(WORDS)]
PROMPTS = [{"prompt": word[:4]} for word in WORDS]
LORA = {"peft_config": peft.LoraConfig(r=4, target_modules="all-linear")}
CLASSIFIER = {"model": transformers.Qwen3ForSequenceClassification}
GROUPS = {"num_generations": 4, "max_completion_length": 8, "num_iterations": 2}
TRAININGS = {  # trainer, rows, arguments of its configuration and of the trainer itself
    "sft packed": ("SFT", TEXTS, {"packing": True, "max_length": 32}, {}),
    "sft padding-free": ("SFT", TEXTS, {"padding_free": True, "max_length": None}, {}),
    "sft lora": ("SFT", TEXTS, {}, LORA),
    "dpo": ("DPO", PAIRS, {}, {}),
    "dpo lora": ("DPO", PAIRS, {}, LORA),
    "grpo": ("GRPO", PROMPTS, GROUPS, {"reward_funcs": odd}),
    "grpo lora": ("GRPO", PROMPTS, GROUPS, {"reward_funcs": odd} | LORA),
    "kto": ("KTO", ANSWERS, {}, {}),
    "kto lora": ("KTO", ANSWERS, {}, LORA),
    "reward": ("Reward", PAIRS, {}, CLASSIFIER),
    "reward lora": ("Reward", PAIRS, {}, CLASSIFIER | LORA),
}
if hasattr(trl, "DistillationTrainer"):
    TRAININGS |= {
        f"distillation {beta}": ("Distillation", PROMPTS, {"beta": beta, "max_completion_length": 8}, {})
        for beta in (0.0, 0.5, 1.0)  # KL, JSD, reverse KL
    }


def train(name, rows, arguments, more):
    """Run the page's code with another trainer; return what it logs, and the memory of a step."""
    import_callback, *_ = documented("TRL")
    block = import_callback.replace("SFT", name).replace('output_dir="run"', "**arguments")
    block = block.replace(f"{name}Trainer(model,", f"trainer = {name}Trainer(model, **more,")
    block = block.replace(").train()", ")\ntrainer.train()")
    if MODE in ("plain", "stand-in"):
        block = without(block, CALLBACK)
    more = more | {"processing_class": trainer_files.tokenizer()}
    if name in ("DPO", "KTO") and "peft_config" not in more:
        more["ref_model"] = trainer_files.model()
    if name == "Distillation":
        more["teacher_model"] = teacher = trainer_files.model()
        for p in teacher.parameters():
            p.data += torch.randn_like(p) / 10
    arguments = arguments | {
        "output_dir": tempfile.mkdtemp(), "max_steps": 3, "per_device_train_batch_size": 4, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "bf16": False, "save_strategy": "no", "disable_tqdm": True, "seed": 0,
        "learning_rate": 1e-2, "use_liger_kernel": MODE == "stand-in",
    }  # fmt: skip
    if name in ("GRPO", "Distillation"):
        arguments["temperature"] = 1.0
    model_class = more.pop("model", transformers.Qwen3ForCausalLM)
    names = {
        "model": trainer_files.model(model_class, **({"num_labels": 1} if name == "Reward" else {})),
        "arguments": arguments, "more": more, "dataset": Dataset.from_list(rows),
    }  # fmt: skip
    lines.clear(), _log_once.cache_clear()
    exec(block, names)
    trainer = names["trainer"]
    batch = next(iter(trainer.get_train_dataloader()))
    peak = memory.peak(lambda: trainer.training_step(trainer.model, batch, None), torch.device("cpu"))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    values = {key: [log.get(key) for log in logs] for key in logs[0] if "time" not in key and "per_second" not in key}
    return {"values": values, "peak": peak, "line": any(map(LINE.fullmatch, lines))}


lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.getMessage())
logging.getLogger("liger_hw").addHandler(handler)
if MODE == "accelerated":
    liger_hw.integrations.accelerate_trl()
print(json.dumps({name: train(*parts) for name, parts in TRAININGS.items()}))
