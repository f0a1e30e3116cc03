"""`liger-hw bench losses`, and the table of its results."""

import json

import pytest
import torch

from liger_hw._triton import interpreting
from liger_hw.cli import main
from liger_lab.bench import losses
from liger_lab.bench.loss_cases import cases

pytestmark = pytest.mark.skipif(interpreting(), reason="times of the interpreter are nobody's")


def test_from_the_command_to_the_page(tmp_path, monkeypatch, capsys):
    from liger_lab.tools import readme

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *args, **kwargs: None)
    monkeypatch.setattr(losses, "SECONDS", 0.01)
    assert main(["bench", "losses", "DPO", "tvd", "--against", "torch", "--report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "losses.json").read_text())
    by_name = {(r["op"], r["provider"]): r for r in found["results"]}
    ours, plain = (by_name["DPO", name] for name in ("liger_hw", "torch"))
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5) and ours["peak_bytes"] > ours["gradient_bytes"] > 0
    assert ("DPO", "floor") in by_name and ("tvd", "floor") not in by_name and found["complete"]
    assert "over its matrix products" in printed and "DPO" in printed
    page = tmp_path / "losses.md"
    page.write_text(f"before\n{readme.BEGIN.format(readme.TOOL)}\nstale\n{readme.END}\nafter\n")
    readme.main([page, tmp_path / "losses.json"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "| DPO | 4x16x24x515 |" in text
    assert "stale" not in text


def test_failures_are_reported():
    def fail(*inputs):
        raise RuntimeError("no kernel")

    (case,) = (case for case in cases(["tvd"], losses.SMALL) if case.op == "tvd")
    broken = type(case)(case.op, case.label, case.make, case.providers | {"torch": fail}, (), 0)
    found = {"results": [], "skipped": []}
    clock = losses.Clock(torch.device("cpu"))
    losses._measure(broken, ["liger_hw", "torch", "floor"], torch.float32, clock, found)
    assert found["skipped"][0]["why"] == "RuntimeError: no kernel"
    assert losses.rows(found)[0][4] == "fails"


@pytest.mark.parametrize(
    "arguments, message",
    [(["nothing"], "LOSSES: got nothing"), (["--against", "trl"], "--against: got trl")],
)
def test_refuses(arguments, message, capsys):
    assert main(["bench", "losses", *arguments]) == 2
    assert message in capsys.readouterr().err
