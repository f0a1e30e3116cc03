"""Add the op of CONTRIBUTING.md to a copy of the package; every list finds it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from liger_hw._triton import AVAILABLE, interpreting
from liger_lab.levels import evidence
from liger_lab.levels.evidence import COMPILED, INTERPRETED

pytestmark = pytest.mark.skipif(not AVAILABLE or interpreting(), reason="starts the interpreter by itself")
ROOT = Path(__file__).parent.parent
OP = "sigmoid_gate"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copy package and tests, and add the blocks of CONTRIBUTING.md's example."""
    folder = tmp_path_factory.mktemp("checkout")
    for part in ("liger_hw", "lab/liger_lab", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    blocks = dict(re.findall(r"`(\S+)`:\n\n```python\n(.*?)```", text, re.S))
    name = blocks.pop("liger_hw/__init__.py")
    for file, code in blocks.items():
        assert not (folder / file).exists()
        (folder / file).write_text(code)
    public = folder / "liger_hw/__init__.py"
    public.write_text(public.read_text().replace("_NAMES = {\n", f"_NAMES = {{\n{name}"))
    return folder


def run(checkout, *command, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "LIGER_HW_BACKEND"}
    environment |= {
        "PYTHONPATH": f"{checkout}:{checkout}/lab",
        "LIGER_HW_CACHE_DIR": str(checkout / "cache"),
        "PYTEST_ADDOPTS": "",
    }
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=checkout, env=environment | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_code_is_clean(checkout):
    pytest.importorskip("ruff")
    files = [f"liger_hw/kernels/attention/{OP}.py", f"lab/liger_lab/cases/{OP}.py", f"tests/kernels/test_{OP}.py"]
    run(checkout, "ruff", "check", *files)
    run(checkout, "ruff", "format", "--check", *files)


def test_its_parity_and_all_that_tests_hold_every_op_to(checkout):
    """In the interpreter, with every vendor's launches; and as evidence, in the table."""
    files = [f"kernels/test_{OP}.py", "test_tracing.py", "test_bad_input.py", "test_public_api.py"]
    tests = "pytest", "-k", OP, "--evidence", "interpreted.json", *(f"tests/{file}" for file in files)
    shown = run(checkout, *tests, TRITON_INTERPRET="1")
    assert int(re.search(r"(\d+) passed", shown)[1]) >= 9 + 5 * 3 + 2 + 1
    cells = evidence.read([checkout / "interpreted.json"])[1]
    found = {(cell.op, cell.backend, cell.dtype, cell.level, cell.passed, cell.failed) for cell in cells}
    assert found == {(OP, backend, dtype, INTERPRETED, 6, 0) for backend in ("nvidia:sm90", "amd:gfx942", "intel:pvc")
                     for dtype in ("fp32", "bf16", "fp16")}  # fmt: skip
    shown = run(checkout, "liger_hw", "evidence", "interpreted.json")
    assert re.search(r"\b1 of \d+ ops, 18 cases, fp32 bf16 fp16", shown)


def test_it_is_compiled(checkout):
    report = checkout / "compiled"
    command = "liger_hw", "compile", "--archs", "sm90", "--ops", OP, "--report", str(report)
    assert re.search(rf"^{OP} +\d+$", run(checkout, *command), re.M)
    cells = evidence.read([report / "compiled.json"])[1]
    assert {(cell.op, cell.backend, cell.level, cell.failed) for cell in cells} == {(OP, "nvidia:sm90", COMPILED, 0)}
    kernels = {row["kernel"] for row in json.loads((report / "kernels.json").read_text())}
    assert kernels == {f"{OP}_forward", f"{OP}_backward"}


def test_its_launches_are_shown(checkout):
    forced = {"LIGER_HW_BACKEND": "nvidia:sm90", "TRITON_INTERPRET": "1"}
    (device,) = json.loads(run(checkout, "liger_hw", "info", "--json", **forced))["devices"]
    assert device["ops"][OP] == {"implementation": "triton"}
    (device,) = json.loads(run(checkout, "liger_hw", "launches", OP, "--json", **forced))
    assert {c["key"].partition("(")[0] for c in device["configurations"]} == {f"{OP}_forward", f"{OP}_backward"}


def test_the_op_of_a_program(tmp_path):
    """The programs of the guide; and their checks fail where a gradient is wrong."""
    guide = (ROOT / "docs" / "guides" / "own_op.md").read_text()
    code, learned, columns = re.findall(r"```python\n(.*?)```", guide, re.S)
    programs = {
        "own_op": code, "wrong": code.replace("2 * scale * x * dy", "scale * x * dy"),
        "learned": learned, "wrong_sum": learned.replace("tl.sum(x * x * dy)", "tl.sum(x * dy)"),
        "columns": columns, "wrong_parts": columns.replace("tl.sum(x * x * dy, 0)", "tl.sum(x * dy, 0)"),
    }  # fmt: skip
    environment = os.environ | {"TRITON_INTERPRET": "1", "LIGER_HW_BACKEND": "", "PYTHONPATH": f"{ROOT}:{ROOT}/lab"}
    results = {}
    for name, text in programs.items():
        (tmp_path / f"{name}.py").write_text(text)
        command = [sys.executable, f"{name}.py"]
        results[name] = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    for name in ("own_op", "learned", "columns"):
        assert results[name].returncode == 0 and results[name].stdout.count("passed") == 3, results[name].stderr
    assert "AssertionError: output 1 of scaled_square on nvidia" in results["wrong"].stderr
    assert "AssertionError: output 2 of learned_square on nvidia" in results["wrong_sum"].stderr
    assert "AssertionError: output 2 of column_square on nvidia" in results["wrong_parts"].stderr
