import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liger_hw import backends, cli, dispatch
from liger_hw._triton import AVAILABLE
from liger_hw.backends import nvidia
from liger_hw.hooks import hooks
from liger_hw.testing import parity
from liger_lab import cases
from liger_lab.levels import evidence, page
from liger_lab.levels.evidence import COMPILED, EXECUTED, INTERPRETED, MEASURED, EvidenceCell, Recorder
from liger_lab.tools import hardware

HERE = Path(__file__).parents[1]
RUN = {"r": {"level": INTERPRETED, "date": "2026-01-02 03:04", "commit": "abc", "versions": {"torch": "2.11.0"}}}
GOOD = EvidenceCell("rms_norm", "amd:gfx942", "bf16", INTERPRETED, 3, 0, [], "r")
BAD = EvidenceCell("rope", "intel:bmg", "fp32", INTERPRETED, 2, 1, ["AssertionError: <worst> error"], "r")
OPS = len(cases.CASES)  # of the package
needs_triton = pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")


def shown_evidence(capsys, tmp_path, *arguments):
    status = cli.main(["evidence", *map(str, arguments), "--report", str(tmp_path / "report")])
    return status, capsys.readouterr()


def test_evidence_survives_writing_and_reading(tmp_path):
    file = evidence.write(tmp_path / "a.json", RUN, [GOOD, BAD], kernels=[1])
    assert evidence.read([file]) == (RUN, [GOOD, BAD])
    assert json.loads(file.read_text())["kernels"] == [1]


def test_a_cell_in_two_files_counts_once_and_runs_add_up(tmp_path):
    evidence.write(tmp_path / "a" / "part.json", RUN, [GOOD])
    evidence.write(tmp_path / "a" / "merged.json", RUN, [GOOD, BAD])
    other = EvidenceCell("rms_norm", "amd:gfx942", "bf16", INTERPRETED, 5, 1, ["late"], "s")
    evidence.write(tmp_path / "b.json", {"s": RUN["r"]}, [other])
    (tmp_path / "a" / "another.json").write_text('{"something": "else"}')
    runs, cells = evidence.read([tmp_path / "a", tmp_path / "b.json"])
    assert set(runs) == {"r", "s"} and len(cells) == 3
    total = evidence.total(cells)[GOOD.key]
    assert (total.passed, total.failed, total.failures) == (8, 1, ["late"])


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"evidence": 2, "runs": {}, "cells": []}', '{"evidence": 1, "runs": {}, "cells": [{"op": "x"}]}',
     json.dumps({"evidence": 1, "runs": {}, "cells": [vars(GOOD)]})],
)  # fmt: skip
def test_other_files_than_evidence_are_refused(text, tmp_path, capsys):
    (tmp_path / "x.json").write_text(text)
    status, shown = shown_evidence(capsys, tmp_path, tmp_path / "x.json")
    assert status == 2 and "x.json, allowed: evidence" in shown.err
    status, shown = shown_evidence(capsys, tmp_path, tmp_path)
    assert status == 2 and "there is no evidence" in shown.err
    status, shown = shown_evidence(capsys, tmp_path, tmp_path / "absent.json")
    assert status == 2 and "absent.json" in shown.err


def test_a_benchmark_is_evidence_of_its_times():
    (file,) = (HERE.parent / "lab/results").glob("h200.json")
    runs, cells = evidence.read([file])
    assert {facts["level"] for facts in runs.values()} == {MEASURED}
    cell = evidence.total(cells)["rms_norm", "nvidia:sm90", "bf16", MEASURED]
    shapes = {r["shape"] for r in json.loads(file.read_text())["results"]
              if (r["op"], r["provider"]) == ("rms_norm", "liger_hw")}  # fmt: skip
    assert (cell.passed, cell.failed) == (len(shapes), 0)


def test_the_evidence_is_shown_and_red_where_a_case_failed(tmp_path, capsys):
    evidence.write(tmp_path / "good.json", RUN, [GOOD])
    status, shown = shown_evidence(capsys, tmp_path, tmp_path / "good.json")
    assert status == 0 and f"1 of {OPS} ops, 3 cases, bf16" in shown.out and "FAILED" not in shown.out
    text = (tmp_path / "report" / "evidence.html").read_text()
    assert 'class="ok" title="interpreted: 3 passed, 0 failed"' in text and 'class="bad"' not in text
    assert evidence.read([tmp_path / "report" / "evidence.json"]) == (RUN, [GOOD])

    evidence.write(tmp_path / "bad.json", RUN, [GOOD, BAD])
    status, shown = shown_evidence(capsys, tmp_path, tmp_path / "bad.json")
    assert status == 1 and f"0 of {OPS} ops (rope failed), 2 cases, fp32, 1 FAILED" in shown.out
    assert "rope on intel:bmg in fp32, interpreted: 1 of 3 cases failed: AssertionError: <worst> error" in shown.out
    text = (tmp_path / "report" / "evidence.html").read_text()
    assert 'class="bad"' in text and "<worst>" not in text and "&lt;worst&gt;" in text
    assert not re.search(r"""(src|href)=|<script|url\(""", text)


def test_a_failed_test_that_is_no_parity_case_is_red(tmp_path, capsys):
    runs = {"r": RUN["r"] | {"tests": {"passed": 9, "skipped": 3, "failed": 2}, "command": "pytest -n auto"}}
    evidence.write(tmp_path / "e.json", runs, [GOOD])
    status, shown = shown_evidence(capsys, tmp_path, tmp_path / "e.json")
    assert status == 1 and "2 tests failed in the run of 2026-01-02 03:04: pytest -n auto" in shown.out
    assert "2 tests failed" in (tmp_path / "report" / "evidence.html").read_text()


def test_complete_means_every_op_wherever_one_is(tmp_path, capsys):
    cells = [EvidenceCell(op, "amd:gfx942", "bf16", INTERPRETED, 1, 0, [], "r") for op in dispatch.OPS]
    evidence.write(tmp_path / "all.json", RUN, cells)
    assert shown_evidence(capsys, tmp_path, tmp_path / "all.json", "--complete")[0] == 0
    compiled = EvidenceCell("rope", "amd:gfx942", "bf16", COMPILED, 1, 0, [], "r")
    evidence.write(tmp_path / "all.json", RUN, [*cells, compiled])
    assert shown_evidence(capsys, tmp_path, tmp_path / "all.json")[0] == 0
    status, shown = shown_evidence(capsys, tmp_path, tmp_path / "all.json", "--complete")
    assert status == 1 and "rms_norm on amd:gfx942 in bf16: not compiled" in shown.out
    assert "\nrope on" not in shown.out


def test_every_architecture_has_cards_on_the_page():
    cells = [EvidenceCell("rope", name, "bf16", COMPILED, 1, 0, [], "r") for name in backends.ARCHITECTURES]
    rows = page.rows(cells)
    assert [row[0] for row in rows][:3] == ["NVIDIA sm80", "NVIDIA sm86", "NVIDIA sm89"]
    assert len(rows) == sum(len(vendor.ROWS) for vendor in backends.VENDORS.values())
    assert all(row[1] for row in rows)
    (unknown,) = page.rows([EvidenceCell("rope", "nvidia:sm999", "bf16", COMPILED, 1, 0, [], "r")])
    assert unknown[:2] == ["NVIDIA sm999", ""]


def test_the_summary_joins_gpus_with_equal_evidence():
    def cells(backend, level, failed=0):
        return [
            EvidenceCell(op, backend, "bf16", level, 3, failed * (op == "rope"), [], "r") for op in ("rope", "rms_norm")
        ]

    every = [*cells("amd:gfx942", COMPILED), *cells("amd:gfx950", COMPILED), *cells("amd:gfx1100", COMPILED, 1),
             *cells("nvidia:sm90", COMPILED), *cells("nvidia:sm90", INTERPRETED, 1)]  # fmt: skip
    assert page.summary(every) == [
        ["NVIDIA", "H200", "-", "-", "-", f"1 of {OPS} ops (rope failed)", f"2 of {OPS} ops"],
        ["AMD", "MI300X, MI350X", "-", "-", "-", "-", f"2 of {OPS} ops"],
        ["AMD", "RX 7900 XTX", "-", "-", "-", "-", f"1 of {OPS} ops (rope failed)"],
    ]


def test_the_documents_match_the_evidence():
    assert hardware.main(["--check"]) == 0, "python -m liger_lab.tools.hardware"
    _, found = evidence.read([HERE.parent / "lab/results"])
    executed, measured = (len({cell.op for cell in found if cell.level == level}) for level in (EXECUTED, MEASURED))
    assert f"executed {executed} of {OPS} ops and timed {measured}" in (HERE.parent / "README.md").read_text()


def test_the_table_of_a_vendor_whose_name_has_two_words(monkeypatch):
    monkeypatch.setattr(hardware.VENDORS["intel"], "NAME", "Two Words")
    texts = hardware.tables({}, [EvidenceCell("rope", "intel:bmg", "fp32", INTERPRETED, 2, 0, [], "r")])
    assert "| Two Words bmg |" in texts["intel"]


def test_the_tables_of_the_documents(monkeypatch, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    page_file = tmp_path / "docs" / "hardware.md"
    page_file.write_text((HERE.parent / "docs" / "hardware.md").read_text())
    compiled_file = tmp_path / "docs" / "compiled.md"
    compiled_file.write_text("<!-- proven waves: begin, by liger_lab.tools.hardware -->\n<!-- proven: end -->\n")
    facts = {"arch": "gfx942", "op": "rope", "case": "c", "kernel": "rope_rotate", "warps": 2, "programs": 2,
             "elements": 8192, "per element": 43.3, "widths": {"16": 0.75, "2": 0.25}, "lds": 0.0, "banks": None,
             "wait": 113, "registers": 81, "occupancy": 0.62}  # fmt: skip
    other = facts | {"arch": "gfx1100", "kernel": "glu_forward"}  # the page shows one architecture
    cell = EvidenceCell("rope", "intel:bmg", "fp32", INTERPRETED, 2, 0, [], "r")
    runs = RUN | {"s": RUN["r"] | {"date": "2026-01-05 00:00"}}
    file = evidence.write(tmp_path / "e.json", runs, [GOOD, cell], waves=[facts, other])
    monkeypatch.setattr(hardware, "ROOT", tmp_path)
    assert hardware.main(["--check", str(file)]) == 1
    assert hardware.main([str(file)]) == 0
    assert "docs/hardware.md, docs/compiled.md" in capsys.readouterr().out
    row = "| rope | rope_rotate, 2 waves | 43.3 | 16: 75%, 2: 25% | - | - | 113 | 81 | 62% |"
    assert "begin, by liger_lab.tools.hardware -->\n| op | kernel |" in compiled_file.read_text()
    assert row in compiled_file.read_text() and "glu_forward" not in compiled_file.read_text()
    assert hardware.main([str(file), "--check"]) == 0
    amd = f"| AMD gfx942 | MI300X, MI300A, MI325X | - | - | - | 1 of {OPS} ops, 3 cases, bf16 | - |"
    intel = f"| Intel bmg | Arc B580, B570, Pro B60 | - | - | - | 1 of {OPS} ops, 2 cases, fp32 | - |"
    text = page_file.read_text()
    before, _, after = text.partition("## Intel")
    assert amd in before and intel in after
    assert "| interpreted | 2 | 2026-01-02 03:04 | 2026-01-05 00:00 | abc |  | torch 2.11.0 |" in text
    for level, says in evidence.SAYS.items():
        assert f"| {level} | {says} |" in text
    (newer,) = re.findall("no run has seen (.*) yet", text)
    assert newer.count("`") == 2 * (OPS - 2) and "`rope`" not in newer


# recording -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def double():
    """An op whose kernel is right on every backend, until the test breaks it."""
    state = SimpleNamespace(factor=2)

    def double(x):
        return x * 2

    state.op = dispatch.op(double)
    state.op.register("triton")(lambda x: x * state.factor)
    yield state
    del dispatch.OPS["double"]


@needs_triton
def test_device_that_a_check_proves(double, monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(evidence, "interpreting", lambda: True)
    monkeypatch.setattr(backends, "interpreting", lambda: True)
    x = torch.randn(3, dtype=torch.float16)
    with hooks.observe_checks(recorder.add):
        parity.check(double.op, (x,), {}, "amd:gfx1100")
        parity.check(double.op, (x,), {}, "intel")
        parity.check(double.op, (x,), {}, None)  # plain torch on a CPU: of no GPU
        double.factor = 3
        with pytest.raises(AssertionError):
            parity.check(double.op, (x,), {}, "intel:pvc")
    assert recorder.dump() == [
        ["double", "amd:gfx1100", "fp16", INTERPRETED, 1, 0, []],
        ["double", "intel:pvc", "fp16", INTERPRETED, 1, 1, [recorder.dump()[1][-1][0]]],
    ]
    assert recorder.dump()[1][-1][0].startswith("AssertionError: output 0 of double on intel:pvc: worst error")
    other = Recorder()
    other.load(recorder.dump())
    other.load(recorder.dump())
    assert [(cell.passed, cell.failed) for cell in other.cells("r")] == [(2, 0), (2, 2)]


@needs_triton
def test_only_the_device_that_is_here_is_executed(double, monkeypatch):
    monkeypatch.setattr(evidence, "interpreting", lambda: False)
    monkeypatch.setattr(backends, "interpreting", lambda: True)  # so that CPU tensors count as a GPU's
    monkeypatch.setitem(backends._devices, torch.device("cpu"), nvidia.ARCHS["sm90"])
    x = torch.randn(3)
    for backend, found in [
        (None, EXECUTED), ("nvidia", EXECUTED), ("nvidia:sm90", EXECUTED), ("triton", EXECUTED),
        ("nvidia:sm80", None), ("amd", None), ("reference", None),
    ]:  # fmt: skip
        where = evidence.proven(double.op, (x,), backend)
        assert where == (("double", "nvidia:sm90", "fp32", found) if found else None), backend


TESTS = """
import pytest, torch
from liger_hw import dispatch
from liger_hw.testing import parity

@dispatch.op
def twice(x):
    return x * 2

twice.register("triton")(lambda x: x * (2 if x.dtype == torch.float32 else 3))

@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2])
def test_twice(rows, dtype, backend, device):
    parity.check(twice, (torch.ones(rows, dtype=dtype),), {}, backend)
"""


@needs_triton
def test_a_worker_passes_its_counts_on(tmp_path):
    pytest.importorskip("xdist")
    (tmp_path / "test_twice.py").write_text(TESTS)
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent, HERE.parent / "lab"))),
    }
    environment |= {"LIGER_HW_BACKEND": "", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-n", "1", "--archs", "all", "--evidence", "e.json"]
    done = subprocess.run([*command, "test_twice.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    runs, cells = evidence.read([tmp_path / "e.json"])
    (facts,) = runs.values()
    every = len(backends.ARCHITECTURES)
    assert facts["level"] == INTERPRETED and facts["tests"] == {"passed": 2 * every, "failed": 2 * every}
    assert facts["command"].startswith("pytest -p conftest -n 1")
    assert {(cell.dtype, cell.passed, cell.failed) for cell in cells} == {("fp32", 2, 0), ("fp16", 0, 2)}
    assert len(cells) == 2 * every and page.problems(cells)


@pytest.fixture
def plugin(request):
    return request.config.pluginmanager.get_plugin(str(HERE / "conftest.py"))


def a_config(**options):
    values = {"--needs-device": False, "--evidence": None} | options
    return SimpleNamespace(getoption=values.get, workerinput={"workerid": "gw5"})


def test_a_runner_without_a_device_fails(plugin, monkeypatch):
    needs = a_config(**{"--needs-device": True})
    monkeypatch.setattr(plugin, "interpreting", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    plugin.pytest_configure(a_config())
    with pytest.raises(pytest.UsageError, match="finds no accelerator"):
        plugin.pytest_configure(needs)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    plugin.pytest_configure(needs)
    monkeypatch.setattr(plugin, "interpreting", lambda: True)
    with pytest.raises(pytest.UsageError, match="TRITON_INTERPRET is set"):
        plugin.pytest_configure(needs)


def test_workers_spread_over_the_devices(plugin, monkeypatch):
    taken = []
    monkeypatch.setattr(plugin, "interpreting", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    plugin.pytest_configure(a_config())
    assert taken == [1]  # the sixth worker's
    assert plugin.pytest_xdist_auto_num_workers(None) == 4 * plugin.WORKERS_A_GPU
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert plugin.pytest_xdist_auto_num_workers(None) == 3
    monkeypatch.setattr(plugin, "interpreting", lambda: True)
    assert plugin.pytest_xdist_auto_num_workers(None) is None
    plugin.pytest_configure(a_config())
    assert taken == [1]
