"""The program that measures TRL's steps computes the same losses with every head; the page has its table."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from liger_lab.tools import readme, trl_steps

RESULTS = Path(__file__).parents[2] / "lab" / "results" / "trl-h100.json"


@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_heads_in_trls_trainers_give_the_losses_of_fp64(tmp_path):
    trl_steps.measure(tmp_path / "trl.json", trl_steps.TINY)
    results = json.loads((tmp_path / "trl.json").read_text())["results"]
    served = [r for r in results if r["provider"] in (trl_steps.PLAIN, trl_steps.TRL, trl_steps.OURS)]
    assert len(served) == 3 * len(trl_steps.TRAINERS)
    for r in served:
        assert max(r["loss_error"], r["dx_error"], r["dw_error"]) < 1e-5, r


def test_the_page_has_the_table():
    assert trl_steps.table(json.loads(RESULTS.read_text())) in trl_steps.PAGE.read_text()
    assert readme.BEGIN.format("liger_lab.tools.trl_steps") in trl_steps.PAGE.read_text()
