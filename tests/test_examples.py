"""Every example, tiny: the same losses and gradients with liger_hw as without."""

import importlib
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor

from liger_hw import integrations
from liger_hw.patching.patch import _log_once

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS = {
    "cuda_graph": "transformers",
    "trainer_sft": "accelerate", "qlora_sft": "bitsandbytes", "trl_sft": "trl", "trl_dpo": "trl", "trl_grpo": "trl",
    "lightning_sft": "lightning", "trl_sft --lora --checkpointing": "trl", "trl_sft --qlora": "bitsandbytes",
    "trl_dpo --lora": "trl", "trl_grpo --lora": "trl",
}  # fmt: skip
ON_RANKS = {  # command line -> the package that it needs
    "trainer_sft --checkpointing": "accelerate", "orpo": "accelerate", "vision_sft": "accelerate",
    "medusa --heads 5": "accelerate", "medusa --stage 2": "accelerate", "fsdp2_sft": "accelerate",
    "tensor_parallel_sft": "transformers", "zero3_sft": "deepspeed", "lightning_sft --strategy ddp": "lightning",
    "lightning_sft --strategy fsdp": "lightning", "lightning_sft --strategy deepspeed_stage_3": "lightning",
}  # fmt: skip
ONLY_ON_GPUS = ("lightning_sft --strategy fsdp", "lightning_sft --strategy deepspeed_stage_3")
BY_FSDP2 = ("trainer_sft", "orpo", "medusa", "vision_sft", "fsdp2_sft")


def run(line, provider, monkeypatch, tmp_path):
    name, *options = line.split()
    arguments = [*options, "--tiny", "--steps", "3", "--provider", provider, "--output", str(tmp_path)]
    if name == "trl_grpo":  # generates token by token
        arguments += ["--seq", "8"]
    monkeypatch.setattr(sys, "argv", [name, *arguments, "--json", str(tmp_path / "result.json")])
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module(name).main()


@pytest.mark.parametrize("line", NEEDS)
def test_example(line, monkeypatch, tmp_path, capsys, caplog):
    for package in ("transformers", "tokenizers", NEEDS[line], *(["trl", "peft"] if " " in line else [])):
        if find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    caplog.set_level("INFO", "liger_hw"), _log_once.cache_clear()
    if torch.accelerator.is_available():
        pytest.skip("compares fp32 runs of a CPU")
    try:
        plain, patched = (run(line, provider, monkeypatch, tmp_path) for provider in ("plain", "liger_hw"))
    finally:
        if line.startswith("trl"):
            integrations.restore_trl()
    assert len(plain["losses"]) == 3 and plain["tokens_per_second"] > 0
    for key in ("losses", "gradient_norms"):
        torch.testing.assert_close(torch.tensor(patched[key]), torch.tensor(plain[key]), rtol=1e-5, atol=1e-6)
    assert "rms_norm" in capsys.readouterr().out + caplog.text and (tmp_path / "result.json").exists()


def learn_alike_on_ranks(name, options, folder):
    sys.path.insert(0, str(FOLDER))
    results, parameters = {}, []
    common = importlib.import_module("common")
    count = common.count
    for provider in ("plain", "liger_hw"):
        os.environ["WORLD_SIZE"] = str(torch.distributed.get_world_size())  # Lightning deletes it after a run
        sys.argv = [name, *options, "--tiny", "--steps", "3", "--provider", provider]
        sys.argv += ["--output", f"{folder}/{provider}"]
        if find_spec("accelerate"):  # it remembers the engine of an earlier run, or of another test
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(True)
        with mock.patch.object(common, "count", lambda model: parameters.extend(model.parameters()) or count(model)):
            results[provider] = importlib.import_module(name).main()
    if name in BY_FSDP2:
        assert all(isinstance(p, DTensor) for p in parameters), "accelerate replicated the model"
    for key in ("losses", "gradient_norms"):
        plain, patched = (torch.tensor(results[provider][key]) for provider in ("plain", "liger_hw"))
        assert len(plain) == (0 if key == "gradient_norms" and name == "lightning_sft" else 3)
        torch.testing.assert_close(patched, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("line", ON_RANKS)
def test_example_on_two_ranks(line, ranks, tmp_path):
    for package in ("transformers", "tokenizers", ON_RANKS[line]):
        if find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    if torch.accelerator.is_available():
        pytest.skip("compares fp32 runs of a CPU")
    if line in ONLY_ON_GPUS:
        pytest.skip("Lightning shards on GPUs alone")
    name, *options = line.split()
    ranks(2, learn_alike_on_ranks, name, options, str(tmp_path))


@pytest.mark.parametrize("line", ON_RANKS)
def test_launch(line, tmp_path):
    if find_spec("deepspeed") is None or find_spec(ON_RANKS[line]) is None:
        pytest.skip("the check `distributed`, which installs deepspeed and lightning, launches the examples")
    if line in ONLY_ON_GPUS and torch.accelerator.device_count() < 2:
        pytest.skip("Lightning shards on GPUs alone")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    name, *options = line.split()
    options += ["--tiny", "--steps", "1", "--output", str(tmp_path), "--json", str(tmp_path / "result.json")]
    done = subprocess.run([*launch, str(FOLDER / f"{name}.py"), *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["gpus"] == 2 and any(line == json.dumps(result) for line in done.stdout.splitlines())


def test_accelerate_launches_its_configuration(tmp_path):
    if find_spec("deepspeed") is None or find_spec("accelerate") is None:
        pytest.skip("the check `distributed`, which installs deepspeed and accelerate, launches the examples")
    result = tmp_path / "result.json"
    words = ["--tiny", "--steps", "1", "--output", str(tmp_path), "--json", str(result)]
    launch = ["-m", "accelerate.commands.launch", "--config_file", str(FOLDER / "fsdp2.yaml")]
    done = subprocess.run(
        [sys.executable, *launch, str(FOLDER / "trainer_sft.py"), *words], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(result.read_text())["gpus"] == 2


def test_measured_on_two_ranks(tmp_path):
    """The tool that measures examples starts the ranks of each run, and goes on after one that fails."""
    pytest.importorskip("accelerate")
    file, lines = tmp_path / "examples.json", ("medusa --stage two", "medusa --stage 2")
    words = ["run", str(file), "--gpus", "2", *lines, "--", "--tiny", "--steps", "1"]
    done = subprocess.run([sys.executable, "-m", "liger_lab.tools.examples", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["command"] == "python -m liger_lab.tools.examples run ... --gpus 2 -- --tiny --steps 1"
    runs = [run for run in found["results"] if run["provider"] != "liger-kernel"]
    assert [run["provider"] for run in runs] == ["plain", "liger_hw"] * 2
    assert all("error" in run for run in runs[:2]) and "invalid int value: 'two'" in done.stdout
    assert all(run["options"] == "--stage 2" and run["gpus"] == 2 for run in runs[2:])


def test_a_run_ends_at_its_limit():
    tool = importlib.import_module("liger_lab.tools.examples")
    assert tool._one("medusa", ["--tiny"], 2, 1) == {"error": "TimeoutError: 1 seconds"}


def test_the_notebook(monkeypatch, tmp_path, capsys):
    for package in ("transformers", "tokenizers"):
        pytest.importorskip(package)
    notebook = json.loads((FOLDER / "finetune.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert "LazyLogits" in capsys.readouterr().out and (names["folder"] / "tuned.pt2").exists()


def test_every_example_is_tested():
    assert {file.stem for file in FOLDER.glob("*.py")} == {*(line.split()[0] for line in (*NEEDS, *ON_RANKS)), "common"}


def test_the_table_and_pictures_are_written_from_results(tmp_path):
    tool = importlib.import_module("liger_lab.tools.examples")

    def result(provider, tokens, memory):
        sizes = {"parameters": 1_240_000_000, "batch": 4, "seq": 2048, "losses": []}
        measured = {"tokens_per_second": tokens, "peak_bytes": memory * 2**30}
        return {"example": "trainer_sft", "provider": provider} | sizes | measured

    found = {
        "device": {"name": "a GPU", "vendor": "nvidia", "arch": "sm90"}, "date": "today", "versions": {"torch": "2"},
        "results": [
            result("plain", 1000, 20), result("liger_hw", 1500, 10),
            {"example": "trainer_sft", "provider": "liger-kernel", "error": "ImportError: nothing"},
            {"example": "trl_sft", "provider": "liger_hw", "error": "ImportError: nothing"},
        ],
    }  # fmt: skip
    lines = tool.table(found).splitlines()
    row = "| `trainer_sft.py` | 1.24B | 4x2048 | 1,000, 20.0 GiB | 1,500, 10.0 GiB | does not run | 1.50x |"
    assert lines[-1] == row and "trl_sft" not in lines[-2]
    file = tmp_path / "a.json"
    file.write_text(json.dumps(found | {"results": [run | {"gpus": 2} for run in found["results"]]}))
    tool.main(["pictures", str(file)])
    assert all((tmp_path / f"a-{kind}.png").read_bytes()[1:4] == b"PNG" for kind in ("speed", "memory"))
    readme = importlib.import_module("liger_lab.tools.readme")
    before, begin, rest = (FOLDER / "README.md").read_text().partition(readme.BEGIN.format("liger_lab.tools.examples"))
    assert begin and readme.END in rest, "there is no place for the table"
