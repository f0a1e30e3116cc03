"""Check that one row adds an architecture, and one file a vendor.

Each test changes a copy of the package in just that way and looks at what a fresh process makes of it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from liger_hw import dispatch
from liger_hw.backends import ARCHITECTURES
from liger_hw.kernels import load_all

PACKAGE = Path(__file__).parent.parent / "liger_hw"
# What a process finds of the architecture ARCH of the vendor VENDOR.
LOOK = """
import json, sys
import torch
from liger_hw import backends
from liger_hw import cli
from liger_lab.levels import compiled, crosscompile, page
from liger_lab.levels.evidence import COMPILED, EvidenceCell
from liger_lab.levels.occupancy import occupancy

vendor, arch = sys.argv[1:]
name = f"{vendor}:{arch}"
with backends.use_backend(name):
    device = backends.device_of(torch.empty(0))
row = backends.ARCHITECTURES[name]
full = occupancy(device.core, 64, 0, 8)
print(json.dumps({
    "compiled": [arch for arch in compiled.ARCHS if crosscompile.DEVICES[arch].vendor == vendor],
    "table": page.rows([EvidenceCell("rope", name, "bf16", COMPILED, 1, 0)])[0],
    "programs": full.programs,
    "nearest": backends.VENDORS[vendor].nearest(arch + "0").arch,
    "bare name": backends.target(vendor, torch.device("cpu")).arch,
}))
cli.main(["architectures", "--json"])
"""


@pytest.fixture
def package(tmp_path):
    for package in (PACKAGE, PACKAGE.parent / "lab" / "liger_lab"):
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "liger_hw"


def insert(file, before, line):
    text = file.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, line + before))


def look(package, vendor, arch):
    command = [sys.executable, "-c", LOOK, vendor, arch]
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    done = subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return map(json.loads, done.stdout.splitlines())


def test_an_architecture_is_one_row(package):
    """The example of CONTRIBUTING.md."""
    (row,) = re.findall(r"^    _row\(.*\n", (PACKAGE.parent / "CONTRIBUTING.md").read_text(), re.M)
    insert(package / "backends/nvidia.py", '    _row("sm80"', row)
    found, names = look(package, "nvidia", "sm130")
    load_all()
    assert found == {
        "compiled": [r.device.arch for r in ARCHITECTURES.values() if r.in_matrix and r.device.vendor == "nvidia"],
        "table": ["NVIDIA sm130", "RTX 70", "-", "-", "-", "-", f"1 of {len(dispatch.OPS)} ops, 1 cases, bf16"],
        "programs": 4,
        "nearest": "sm130",
        "bare name": "sm90",
    }
    numbers = [int(name.removeprefix("nvidia:sm")) for name in names if name.startswith("nvidia:")]
    assert 130 in numbers and numbers == sorted(numbers)


def test_a_new_generation_of_amd_is_one_row(package):
    """The example of CONTRIBUTING.md."""
    (row,) = re.findall(r"^ +(_waves_of_32\(.*\n)", (PACKAGE.parent / "CONTRIBUTING.md").read_text(), re.M)
    insert(package / "backends/amd.py", '    _rdna4("gfx1200"', "    " + row)
    found, names = look(package, "amd", "gfx1300")
    assert found["table"][:2] == ["AMD gfx1300", "RX 10"] and found["nearest"] == "gfx1300"
    assert "gfx1300" not in found["compiled"] and "amd:gfx1300" in names


def test_a_row_with_an_unknown_fact_is_refused(package):
    """`_row` takes further keyword arguments as stages that share code."""
    insert(
        package / "backends/amd.py", '    _cdna("gfx90a"', '    _cdna("gfx999", "X", 1, 64, 1, 1, async_copy=True),\n'
    )
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    command = [sys.executable, "-c", "import liger_hw.backends"]
    done = subprocess.run(command, cwd=package.parent, env=environment, capture_output=True, text=True)
    assert "unknown compiler stage 'async_copy'" in done.stderr and done.returncode == 1


def test_the_lists_have_a_vendor_of_one_file_and_its_name(package):
    """The further places are in CONTRIBUTING.md."""
    text = (package / "backends/nvidia.py").read_text()
    text = text.replace('"nvidia"', '"maker"').replace("NVIDIA", "Maker").replace('"sm', '"mk')
    text = text.replace('device.type == "cuda"', 'device.type == "mk"').replace("in_matrix=True", "in_matrix=False")
    (package / "backends/maker.py").write_text(text)
    insert(package / "backends/__init__.py", ', "intel": intel}', ', "maker": maker')
    insert(package / "backends/__init__.py", ", nvidia\n", ", maker")
    found, names = look(package, "maker", "mk100")
    assert found["compiled"] == [] and found["table"][:2] == ["Maker mk100", "B200, GB200"]
    assert found["bare name"] == "mk90" and {"maker:mk80", "maker:mk121", "nvidia:sm90"} <= set(names)
