"""`liger-hw doctor MODEL`: each kernel beside the class that it replaces, on what can run kernels here."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "transformers"))
import tiny  # noqa: E402
import transformers  # noqa: E402

from liger_hw import (
    cli,  # noqa: E402
    use_backend,  # noqa: E402
)
from liger_lab.levels import models  # noqa: E402

EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def folder(family, path):
    transformers.AutoConfig.for_model(family, **tiny.TINY | EXPERTS).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral", "qwen3_next", "gpt2", "llama4_text"])
def test_each_kernel_beside_the_class_that_it_replaces(family, backend, device, tmp_path):
    with use_backend(backend):
        rows = list(models.compare(folder(family, tmp_path), torch.device(device)))
    assert models.failures(rows) == []
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"} and not any(row["skipped"] for row in rows)
    assert {row["class"] for row in rows} >= {"Linear"} and len(rows) >= 6
    assert all(row["forward"] < 0.05 and row["gradients"] < 0.05 for row in rows)
    assert all("reference" not in row["by"] for row in rows)


def test_on_a_cpu_it_says_that_no_kernel_ran(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)
    monkeypatch.setattr(models, "interpreting", lambda: False)
    assert cli.main(["doctor", folder("llama", tmp_path), "--report", str(tmp_path / "report")]) == 0
    shown = capsys.readouterr().out
    assert "LlamaRMSNorm" in shown and "bitwise" in shown
    assert "plain torch ran the definition of each op, and no kernel" in shown
    found = json.loads((tmp_path / "report" / "doctor-model.json").read_text())
    assert {row["class"] for row in found["rows"]} == {"LlamaAttention", "LlamaMLP", "LlamaRMSNorm", "Linear"}


def test_a_wrong_kernel_ends_it_with_1(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        models, "fused_linear_cross_entropy", lambda x, w, labels: (x @ w.t()).float().logsumexp(-1).mean()
    )
    assert cli.main(["doctor", folder("llama", tmp_path), "--report", str(tmp_path / "report")]) == 1
    shown = capsys.readouterr().out
    assert shown.count("WRONG") == 2 and "Linear in bfloat16: output 0 of head: worst error" in shown


def test_an_interrupt_keeps_the_rows_so_far(tmp_path, capsys, monkeypatch):
    compared = models._compared

    def one(module, match, dtype, device):
        if dtype != models.DTYPES[0]:
            raise KeyboardInterrupt
        return compared(module, match, dtype, device)

    monkeypatch.setattr(models, "_compared", one)
    assert cli.main(["doctor", folder("llama", tmp_path), "--report", str(tmp_path / "report")]) == 130
    shown = capsys.readouterr().out
    assert "interrupted after 1 comparisons" in shown and shown.count("bitwise") >= 1
    results = json.loads((tmp_path / "report" / "doctor-model.json").read_text())
    assert len(results["rows"]) == 1 and results["interrupted"]


def test_what_is_no_model_and_no_op(capsys):
    assert cli.main(["doctor", "nonsense"]) == 2
    assert "unknown op 'nonsense'" in capsys.readouterr().err
