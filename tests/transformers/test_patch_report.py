"""Run `liger-hw patch-report` on a model type, a folder, and a folder with code."""

import json

import pytest
import tiny
import torch

from liger_hw.cli import main
from liger_hw.patching import probing
from liger_hw.patching.report import patch_report

transformers = tiny.transformers


@pytest.fixture(autouse=True)
def poison():
    """Nothing is poisoned: torch.device("meta") would not reach torch.empty, and models would take memory."""
    torch.utils._device._device_constructors.cache_clear()
    yield
    torch.utils._device._device_constructors.cache_clear()


def report(capsys, *arguments):
    assert main(["patch-report", *map(str, arguments), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    return (
        found["model"],
        {row["class"]: row for row in found["replaced"]},
        {row["class"]: row for row in found["left"]},
    )


def test_folder(tmp_path, capsys):
    tiny.model("seed_oss").config.save_pretrained(tmp_path)
    name, replaced, left = report(capsys, tmp_path)
    assert name == "SeedOssForCausalLM" and replaced["SeedOssRMSNorm"]["modules"] == 5
    assert replaced["SeedOssAttention"]["op"] == "rope"
    _, summary = patch_report(tmp_path, rms_norm=False)
    assert summary.left["SeedOssRMSNorm", "rms_norm=False"] == 5


def test_a_model_that_is_no_language_model_and_one_of_pictures(tmp_path, capsys):
    assert report(capsys, "paligemma")[0] == "PaliGemmaForConditionalGeneration"
    transformers.BertConfig(num_hidden_layers=1, architectures=["BertForMaskedLM"]).save_pretrained(tmp_path)
    assert report(capsys, tmp_path)[0] == "BertForMaskedLM"


def test_table(tmp_path, capsys):
    tiny.model("llama").config.save_pretrained(tmp_path)
    assert main(["patch-report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "LlamaRMSNorm" in out and "rms_norm(casting_mode='llama', offset=0.0)" in out and "modules replaced" in out
    assert "loss: computed without logits" in out


def test_progress_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    tiny.model("llama").config.save_pretrained(tmp_path)
    assert main(["patch-report", str(tmp_path)]) == 0
    steps = capsys.readouterr().err
    assert "building llama without its weights" in steps and "modules of LlamaForCausalLM" in steps


@pytest.mark.parametrize("model", ["gpt2", "bert"])
def test_a_module_that_is_no_mlp_is_dismissed_after_a_few_runs(model, monkeypatch):
    runs, generator = [], probing.OwnGenerator
    monkeypatch.setattr(probing, "OwnGenerator", lambda: runs.append(1) or generator())
    patch_report(model)
    assert len(runs) < 500


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MineConfig(LlamaConfig):
    model_type = "mine"

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


def test_remote_code(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/modeling_mine.py").write_text(REMOTE)
    tiny.model("llama").config.save_pretrained(tmp_path / "mine")
    config = json.loads((tmp_path / "mine/config.json").read_text())
    config |= {"model_type": "mine", "architectures": ["MineForCausalLM"]}
    config["auto_map"] = {
        "AutoConfig": "modeling_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (tmp_path / "mine/config.json").write_text(json.dumps(config))
    name, replaced, _ = report(capsys, tmp_path / "mine", "--trust-remote-code")
    assert name == "MineForCausalLM" and replaced["LlamaRMSNorm"]["modules"] == 5
    assert main(["patch-report", str(tmp_path / "mine")]) == 2
    assert "trust_remote_code" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["unheard_of", "./nowhere"])
def test_what_is_no_model_is_an_error(model, capsys):
    assert main(["patch-report", model]) == 2
    assert "a model type of transformers" in capsys.readouterr().err


def test_a_configuration_that_nothing_can_be_built_from(tmp_path, capsys):
    config = tiny.model("llama").config
    config.vocab_size = -1
    config.save_pretrained(tmp_path)
    assert main(["patch-report", str(tmp_path)]) == 2
    assert "cannot build" in capsys.readouterr().err
