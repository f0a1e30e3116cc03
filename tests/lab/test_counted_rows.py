"""The program that measures `counted_rows` runs each loss both ways; the page has its table."""

import json
from pathlib import Path

import pytest
import torch

from liger_lab.tools import counted_rows, readme

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "h100-counted-rows.json"


@pytest.mark.parametrize("name", counted_rows.LOSSES)
def test_a_loss_has_the_gradients_of_all_rows(name):
    tensors = counted_rows.HeadTensors(counted_rows.TINY, torch.device("cpu"))
    rows = tensors.mask(0.5)
    assert rows == 32
    assert 0 < counted_rows.distance(counted_rows.LOSSES[name], tensors, rows) < 1e-2


def test_a_run(tmp_path, monkeypatch):
    name, *_ = counted_rows.LOSSES
    monkeypatch.setattr(counted_rows, "LOSSES", {name: counted_rows.LOSSES[name]})
    monkeypatch.setattr(counted_rows, "MASKED", (0.75,))
    counted_rows.measure(tmp_path / "rows.json", counted_rows.TINY)
    measured = json.loads((tmp_path / "rows.json").read_text())
    (record,) = measured["results"]
    assert record["counted_ms"] > 0 and set(measured["beside_cross_entropy_ms"]) == set(counted_rows.BESIDE)
    assert "75% masked" in counted_rows.table(measured)


def test_the_page_has_the_table():
    assert counted_rows.table(json.loads(RESULTS.read_text())) in counted_rows.PAGE.read_text()
    assert readme.BEGIN.format("liger_lab.tools.counted_rows") in counted_rows.PAGE.read_text()
