"""Run the code and commands of docs/trainers.md: losses as unpatched, and a line that says what was patched.

`python -m liger_lab.tools.check trainers` runs each framework in an environment of its own.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from packaging.version import Version

import liger_hw
from liger_hw import integrations
from liger_hw.patching import loss
from liger_hw.patching.patch import _log_once
from liger_hw.patching.swapping import is_swapped

for package in ("transformers", "accelerate"):
    if find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed", allow_module_level=True)

import trainer_files  # noqa: E402
import transformers  # noqa: E402
from trainer_files import WORDS  # noqa: E402

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"liger_hw: [1-9]\d* modules patched, \d+ left alone \(\w+\)")
STEPS = 4
ARGUMENTS = {  # of transformers' TrainingArguments, which each framework's configuration has
    "max_steps": STEPS, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 1e-2,
    "report_to": "none", "save_strategy": "steps", "save_steps": STEPS // 2,
}  # fmt: skip


def documented(heading, page="trainers"):
    """Return the blocks of code in a section of the page."""
    page = (ROOT / f"docs/{page}.md").read_text()
    (section,) = re.findall(rf"^## {re.escape(heading)}\n(.*?)^## ", page, re.M | re.S)
    blocks = re.findall(r"^```\w+\n(.*?)^```|((?:^ {4}[^\n]*\n)+)", section, re.M | re.S)
    return [fenced or textwrap.dedent(indented) for fenced, indented in blocks]


def needs(package):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed; the check `trainers` installs it and runs this test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and texts, in which the trainers run."""
    folder = tmp_path_factory.mktemp("trainers")
    trainer_files.save(folder)
    return folder


@pytest.fixture(autouse=True)
def every_line(monkeypatch, folder):
    """Log again what an earlier test has logged, and stay in the folder."""
    _log_once.cache_clear()
    monkeypatch.chdir(folder)


def run(command, folder):
    """Run a command line in `folder`; return its output."""
    variables = {
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "HF_HUB_OFFLINE": "1",
    }
    shell = ["bash", "-ec", command]
    done = subprocess.run(shell, cwd=folder, capture_output=True, text=True, env=os.environ | variables)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    return output


def logged(folder, *names):
    """Return what a trainer logged in its last checkpoint."""
    (file,) = folder.rglob(f"checkpoint-{STEPS}/trainer_state.json")
    logs = json.loads(file.read_text())["log_history"]
    values = {name: [log[name] for log in logs if name in log] for name in ("loss", "grad_norm", *names)}
    assert len(values["loss"]) == STEPS and all(values.values())
    return values


def assert_alike(patched, plain, rtol=1e-5):
    assert plain["loss"][0] != plain["loss"][-1]
    print({name: [round(value, 6) for value in values] for name, values in plain.items()})
    for name, values in plain.items():
        torch.testing.assert_close(
            torch.tensor(patched[name]), torch.tensor(values), rtol=rtol, atol=1e-6,
            msg=lambda m, name=name: f"{name}: {m}",
        )  # fmt: skip


def assert_trains_alike(commands, configs, folder, *names):
    """Run the plain and the patched command; compare their logs."""
    found = []
    for way, command, config in zip(("plain", "patched"), commands, configs):
        output_dir = f"{len(list(folder.iterdir()))}-{way}"
        # a JSON text is YAML
        (folder / "config.yaml").write_text(json.dumps(config | {"output_dir": output_dir}))
        output = run(command.replace("OUTPUT", output_dir), folder)
        assert bool(LINE.search(output)) == (way == "patched"), output[-6000:]
        found.append(logged(folder / output_dir, *names))
    assert_alike(found[1], found[0])


@pytest.mark.parametrize("more", [{"finetuning_type": "full"}, {"finetuning_type": "lora"}], ids=str)
def test_llama_factory(more, folder):
    needs("llamafactory")
    (command,) = documented("LLaMA-Factory")
    config = ARGUMENTS | more | {
        "model_name_or_path": "model", "stage": "sft", "do_train": True, "dataset": "alpaca", "dataset_dir": ".",
        "template": "qwen", "cutoff_len": 64, "val_size": 0.2, "eval_strategy": "steps", "eval_steps": 2,
    }  # fmt: skip
    configs = [config | {"enable_liger_kernel": flag} for flag in (False, True)]
    assert_trains_alike([command] * 2, configs, folder, "eval_loss")


def test_ms_swift(folder):
    needs("swift")
    (block,) = documented("ms-swift")
    options = ARGUMENTS | {
        "model": "model", "model_type": "qwen3", "template": "qwen3", "dataset": "chats.jsonl", "max_length": 128,
        "tuner_type": "full", "torch_dtype": "float32", "split_dataset_ratio": 0.2, "eval_steps": 2, "use_hf": True,
        "output_dir": "OUTPUT",
    }  # fmt: skip
    patched = block.replace("...", " ".join(f"--{name} {value}" for name, value in options.items()))
    plain = patched.replace("--use_liger_kernel true", "--use_liger_kernel false")
    assert plain != patched
    assert_trains_alike([plain, patched], [{}, {}], folder, "eval_loss")


@pytest.mark.parametrize("theirs", [False, True])
def test_axolotl(theirs, folder, monkeypatch):
    needs("axolotl")
    import yaml

    monkeypatch.setenv("AXOLOTL_DO_NOT_TRACK", "1")
    keys, start, other_start = documented("Axolotl")
    config = ARGUMENTS | {
        "base_model": "model", "datasets": [{"path": "alpaca.json", "ds_type": "json", "type": "alpaca"}],
        "sequence_len": 512, "micro_batch_size": 2, "gradient_accumulation_steps": 1, "optimizer": "adamw_torch",
        "lr_scheduler": "linear", "bf16": False, "tf32": False, "special_tokens": {"pad_token": "<|endoftext|>"},
        "dataset_prepared_path": "prepared",
    }  # fmt: skip
    del config["per_device_train_batch_size"], config["report_to"]
    patched = {"plugins": ["axolotl.integrations.liger.LigerPlugin"], "liger_fused_linear_cross_entropy": True}
    patched = config | (patched if theirs else yaml.safe_load(keys))
    assert_trains_alike([start, other_start if theirs else start], [config, patched], folder)


# Programs that call a trainer -------------------------------------------------------------------------------------


def rows():
    ids = torch.randint(3, 250, (16, 24), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]


def without(block, *parts):
    """Return the block of the unpatched run."""
    for part in parts:
        assert part in block
        block = block.replace(part, "")
    return block


def arguments(output_dir):
    return ARGUMENTS | {"output_dir": str(output_dir), "use_cpu": True, "disable_tqdm": True}


@pytest.mark.parametrize("way", ["callback", "flag"])
def test_trainer(way, tmp_path, stand_in, caplog):
    callback, flag, _ = documented("Hugging Face Trainer and its subclasses")
    block = {"callback": callback, "flag": without(flag, "liger_hw.integrations.install()")}[way]
    block = block.replace("TrainingArguments(...", "TrainingArguments(**arguments").replace("...", "train_dataset=rows")
    part = {"callback": "callbacks=[LigerHwCallback()], ", "flag": "use_liger_kernel=True, "}[way]
    half = tmp_path / "patched" / f"checkpoint-{STEPS // 2}"
    resumed = block.replace(".train()", f".train(resume_from_checkpoint={str(half)!r})")
    for name, text in (("patched", block), ("resumed", resumed), ("plain", without(block, part))):
        names = {
            "Trainer": transformers.Trainer, "TrainingArguments": transformers.TrainingArguments,
            "arguments": arguments(tmp_path / name), "model": trainer_files.model(), "rows": rows(),
        }  # fmt: skip
        names["args"] = transformers.TrainingArguments(**names["arguments"])
        exec(text, names)
        assert bool(LINE.search(caplog.text)) == (name != "plain")
        caplog.clear(), _log_once.cache_clear()
    for name in ("patched", "resumed"):
        assert_alike(*(logged(tmp_path / name) for name in (name, "plain")))


def test_options_of_the_loss(tmp_path):
    """They reach the loss, which computes no logits in evaluation, and change no loss."""
    *_, block = documented("Hugging Face Trainer and its subclasses")
    names = {"Trainer": transformers.Trainer}
    exec(block, names)
    found = {}
    for name, trainer_class in (("plain", transformers.Trainer), ("patched", names["SmallLoss"])):
        model = trainer_files.model()
        if name == "patched":
            liger_hw.patch(model)
        settings = transformers.TrainingArguments(**arguments(tmp_path / name))
        trainer = trainer_class(model, settings, train_dataset=rows(), eval_dataset=rows())
        trainer.train()
        with mock.patch.object(loss, "fused_linear_cross_entropy", wraps=loss.fused_linear_cross_entropy) as fused:
            found[name] = logged(tmp_path / name) | {"eval_loss": [trainer.evaluate()["eval_loss"]]}
    assert fused.call_count == 2 and all(call.kwargs["chunk_memory"] == 2**28 for call in fused.mock_calls)
    assert_alike(found["patched"], found["plain"])


LOOP = """
import json, os, torch, liger_hw, trainer_files
from accelerate import Accelerator
from test_trainers_as_documented import rows
from transformers import AutoModelForCausalLM
accelerator = Accelerator(cpu=True)
name, device, losses = "model", "cpu", []
loader = torch.utils.data.DataLoader(rows(), batch_size=2)
{block}
with open(f"{output}-{{os.environ.get('RANK', 0)}}", "w") as file:
    json.dump(losses, file)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_loop(ranks, folder):
    """A loop of one's own, and with accelerate on two processes."""
    (block,) = documented("A loop of your own, and accelerate")
    if ranks == 2:
        block = re.sub(r"^(\s*)# with accelerate: ", r"\1", block, flags=re.M)
        block = re.sub(r"\S+  # with accelerate: ", "", block)
        assert block.count("accelerator.") == 2
    block = block.replace("optimizer.step()", "optimizer.step(); losses.append(loss.item())")
    found = {}
    for way, text in (("patched", block), ("plain", without(block, "liger_hw.patch(model)"))):
        (folder / "loop.py").write_text(LOOP.format(block=text, output=way))
        start = "python" if ranks == 1 else "python -m torch.distributed.run --standalone --nproc-per-node 2"
        output = run(f"export PYTHONPATH=$PYTHONPATH:{ROOT / 'tests/integrations'}\n{start} loop.py", folder)
        assert len(LINE.findall(output)) == (way == "patched"), output[-6000:]
        found[way] = [json.loads((folder / f"{way}-{rank}").read_text()) for rank in range(ranks)]
    assert len({tuple(losses) for losses in found["plain"]}) == ranks, "both ranks had the same rows"
    for losses, expected in zip(found["patched"], found["plain"]):
        assert_alike({"loss": losses}, {"loss": expected})


def test_lightning(tmp_path, caplog):
    needs("lightning")
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = trainer_files.model(), []

        def training_step(self, batch):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def train_dataloader(self):
            return torch.utils.data.DataLoader(rows(), batch_size=2)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    (block,) = documented("Lightning")
    more = f"max_steps={STEPS}, accelerator='cpu', logger=False, default_root_dir={str(tmp_path)!r}"
    block = block.replace("...", more)
    found = {}
    for name, text in (("patched", block), ("plain", without(block, "LigerHwLightningCallback()"))):
        module = Module()
        exec(text, {"lightning": lightning, "module": module})
        assert bool(LINE.search(caplog.text)) == (name == "patched")
        caplog.clear()
        found[name] = {"loss": module.losses}
    assert len(module.losses) == STEPS
    assert_alike(found["patched"], found["plain"])


# TRL ----------------------------------------------------------------------------------------------------------------

LOSSES = ("sft", "dpo", "grpo", "kto")
TRAININGS = ("sft packed", "sft padding-free", "sft lora", "reward", "reward lora",
             "distillation 0.0", "distillation 0.5", "distillation 1.0",
             *(f"{loss}{more}" for loss in LOSSES[1:] for more in ("", " lora")))  # fmt: skip
CLIPS = {f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max", "region_mean")}
LOGITS = {"logits/chosen", "logits/rejected"}
CHANGED = {  # metrics that TRL 1.12 drops or defines otherwise with its flag
    "sft": {"entropy"}, "dpo": {"entropy", "mean_token_accuracy"} | LOGITS, "grpo": {"entropy"} | CLIPS,
    "kto": {"entropy"} | LOGITS, "distillation": {"entropy"}, "reward": set(),
}  # fmt: skip


@functools.cache
def trl_runs(mode):
    """Return training -> results. Each mode has a process, because TRL looks for liger_kernel at import."""
    start = ["-m", "liger_hw.run"] if mode == "stand-in" else []
    path = os.pathsep.join([str(ROOT), str(ROOT / "lab"), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, *start, Path(__file__).with_name("trl_training.py"), mode],
        capture_output=True, text=True, env=os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("training", TRAININGS)
@pytest.mark.parametrize("mode", ["callback", "accelerated", "stand-in"])
def test_trl(mode, training):
    needs("trl")
    old = Version(version("trl")) < Version("1.15")
    if mode == "accelerated" and old:
        pytest.skip("TRL computes log-probabilities in a function of its own from 1.15")
    if old and (mode, training) == ("stand-in", "kto lora"):
        pytest.skip("with an adapter TRL 1.12 tells the loss use_ref_model=False, and it has no reference model")
    if training not in trl_runs("plain"):
        pytest.skip("this TRL has no such trainer")
    plain, found = trl_runs("plain")[training], trl_runs(mode)[training]
    assert found["line"] and not plain["line"]
    changed = CHANGED[training.split()[0]] if old and mode == "stand-in" else set()
    assert plain["values"].keys() - found["values"].keys() == changed - LOGITS
    assert len({*plain["values"]["loss"]}) > 1, "the loss proves nothing"
    for name in plain["values"].keys() - changed:
        values, expected = (
            torch.tensor([math.nan if value is None else value for value in run["values"][name]], dtype=torch.float64)
            for run in (found, plain)
        )
        # GRPO's second step clips every token: AdamW then moves weights by signs of noise, and the plain run's own norm
        # in the third step is 4e-5 another with one thread than with two
        rtol = 2e-4 if name == "grad_norm" and training == "grpo" else 1e-5
        torch.testing.assert_close(  # rewards are differences of log-probabilities of 100, whose eps is 1e-5
            values, expected, rtol=rtol, atol=1e-5, equal_nan=True,
            msg=lambda m, name=name: f"{training} of trl {version('trl')}, {mode}, {name}: {m}",
        )  # fmt: skip
    if training.startswith(LOSSES) or old and training.startswith("distillation"):  # the row of the page's table
        ours = mode == ("stand-in" if old else "accelerated")
        assert found["peak"] < 0.9 * plain["peak"] if ours else found["peak"] < 1.1 * plain["peak"]


@pytest.mark.parametrize(("name", "bits"), [("SFT", 32), ("DPO", 32), ("SFT", 4), ("DPO", 4)])
def test_trl_with_lora_on_one_small_gpu(name, bits, folder, tmp_path):
    """A whole program, its adapter merged without this library, and metrics without all logits."""
    needs("trl" if bits == 32 else "bitsandbytes"), needs("trl")
    if Version(version("trl")) < Version("1.15"):
        pytest.skip("TRL computes log-probabilities in a function of its own from 1.15")
    program, in_4_bits, resume, _, metrics = documented("LoRA: one program, with TRL", "guides/small_gpu")
    (dpo,) = documented("DPO from the adapter", "guides/small_gpu")
    (merge,) = documented("Load and merge the adapter", "guides/small_gpu")
    load = "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\n"
    assert load in program
    model = "model"
    if bits == 4:  # bitsandbytes 0.50 reads layers of fewer columns than a block wrong on a CPU
        program, model = program.replace(load, in_4_bits.replace('{"": 0}', '"cpu"')), str(tmp_path / "wide")
        trainer_files.model(hidden_size=64, intermediate_size=64, head_dim=32).save_pretrained(model)
        trainer_files.tokenizer().save_pretrained(model)
    rows = [{"text": word, "prompt": word[:4], "chosen": word[4:], "rejected": word[::-1]} for word in WORDS]
    kept = ["text"] if name == "SFT" else ["prompt", "chosen", "rejected"]
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({key: row[key] for key in kept}) for row in rows))
    settings = f"bf16=False, use_cpu=True, max_steps={STEPS}, report_to=[]"
    for old, new in {
        "SFT": name, "bf16=True": settings, "torch.bfloat16": "torch.float32", "my-org/my-8b-model": model,
        "texts.jsonl": str(tmp_path / "texts.jsonl"), "1e-4": "1e-2", '"adapter"': repr(str(tmp_path / "adapter")),
        "eval_steps=50": "eval_steps=2", "save_steps=50": "save_steps=2",
    }.items():  # fmt: skip
        program, merge = program.replace(old, new), merge.replace(old, new)
    merge = merge.replace('"merged"', repr(str(tmp_path / "merged")))
    exec(metrics, own := {})
    if (name, bits) == ("SFT", 32):
        more = "compute_metrics=accuracy, preprocess_logits_for_metrics=most_likely, callbacks"
        program = program.replace("callbacks", more) + "evaluation = trainer.evaluate()\n"
        program = program.replace("trainer.train()\n", resume)  # a first run, without a checkpoint
    found = {}
    for way, text in (("patched", program), ("plain", without(program, "accelerate_trl()", "LigerHwCallback()"))):
        names, text = dict(own), text.replace('"run"', repr(str(tmp_path / way)))
        try:
            exec(text, names)
        finally:
            integrations.restore_trl()
        trainer = names["trainer"]
        assert any(map(is_swapped, trainer.model.modules())) == (way == "patched")
        logs = [log for log in trainer.state.log_history if "loss" in log]
        assert len(logs) == STEPS
        found[way] = {key: [log[key] for log in logs] for key in ("loss", "grad_norm", "entropy")}
        found[way]["eval_loss"] = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        assert len(found[way]["eval_loss"]) >= 1 and (tmp_path / way / "checkpoint-2").exists()
        if (name, bits) == ("SFT", 32):
            evaluation = names["evaluation"]
            found[way]["accuracy"] = [evaluation["eval_accuracy"]]
    tolerance = {32: 1e-5, 4: 1e-2}[bits]  # in 4 bits TRL casts the adapters to bf16, whose eps is 7.8e-3
    assert_alike(found["patched"], found["plain"], tolerance)
    if name == "SFT":
        dpo = dpo.replace("my-org/my-8b-model", model)
        goes_on_with_dpo(dpo if bits == 32 else dpo.replace(load, in_4_bits), tmp_path, tolerance)
    if bits == 4:
        return
    exec(merge, names)
    ids = torch.arange(3, 40)[None]
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(merged(ids).logits, trainer.model.eval()(ids).logits, rtol=1e-4, atol=1e-4)


def goes_on_with_dpo(dpo, folder, tolerance):
    """Train the saved adapter by the page's program; its first step's reference is the adapter itself."""
    pairs = [{"prompt": word[:4], "chosen": word[4:], "rejected": word[::-1]} for word in WORDS]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    settings = f"bf16=False, use_cpu=True, max_steps={STEPS}, logging_steps=1, report_to=[], save_strategy='no'"
    for old, new in {
        "bf16=True": settings, "bfloat16": "float32", "5e-6": "1e-2", "pairs.jsonl": str(folder / "pairs.jsonl"),
        '"adapter"': repr(str(folder / "adapter")), '"dpo-adapter"': repr(str(folder / "dpo-adapter")),
        '{"": 0}': '"cpu"',
    }.items():  # fmt: skip
        dpo = dpo.replace(old, new)
    logs = []
    for text in (dpo, without(dpo, "accelerate_trl()", "LigerHwCallback()")):
        try:
            exec(text, names := {})
        finally:
            integrations.restore_trl()
        logs.append([log for log in names["trainer"].state.log_history if "loss" in log])
    found, plain = ({key: [log[key] for log in run] for key in ("loss", "grad_norm")} for run in logs)
    assert abs(plain["loss"][0] - math.log(2)) < tolerance and len({*plain["loss"]}) > 1
    assert_alike(found, plain, tolerance)
    for place in ("dpo-adapter", "dpo-adapter/ref"):  # the trained adapter, and the reference
        assert (folder / place / "adapter_model.safetensors").exists()
