"""Type checkers see the public names: a wrong argument or name in a user's script is an error."""

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from liger_lab.tools import stubs

SCRIPT = """
import torch
import liger_hw
from liger_hw.chunked_loss import LigerFusedLinearDPOLoss
from liger_hw.integrations import LigerHwCallback
from liger_hw.transformers import LigerRMSNorm, apply_liger_kernel_to_qwen3

x = torch.ones(2, 8)
y = liger_hw.rms_norm(x, torch.ones(8), eps=1e-6)
liger_hw.rms_norm.register("triton")
liger_hw.PreferenceLoss(loss_type="ipo", beta=0.2)
LigerRMSNorm(8, eps=1e-6), LigerHwCallback(rope=False), LigerFusedLinearDPOLoss(beta=0.2), liger_hw.__version__.upper()
print(liger_hw.patch(torch.nn.Linear(8, 8), rope=False).replaced.total())
print(apply_liger_kernel_to_qwen3(rope=False, swiglu=True))
liger_hw.rms_norm(x, epsilon=1e-6)  # wrong
liger_hw.no_such_name  # wrong
liger_hw.preference_loss(x, x, x, bta=0.1, ignore_index="x")  # wrong
apply_liger_kernel_to_qwen3(swigul=False)  # wrong
from liger_hw.integrations import LigerHwCallbak  # wrong
"""
WRONG = {i for i, line in enumerate(SCRIPT.splitlines(), start=1) if line.endswith("# wrong")}


@pytest.fixture
def script(tmp_path):
    (tmp_path / "mypy.ini").write_text(
        f"[mypy]\nmypy_path = {stubs.ROOT}\n[mypy-torch.*,triton.*,transformers.*]\nfollow_imports = skip\n"
        "[mypy-liger_hw.*]\nignore_errors = True\n"
    )
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(stubs.ROOT)]}))
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize("package", stubs.PACKAGES)
def test_stubs_have_the_lazy_names(package):
    path = stubs.file_of(package).with_suffix(".pyi")
    assert path.read_text() == stubs.stub(package), "run python -m liger_lab.tools.stubs"


@pytest.mark.parametrize(
    "checker", [("mypy",), ("pyright", "--pythonpath", sys.executable)], ids=lambda words: words[0]
)
def test_a_users_script(script, checker):
    if importlib.util.find_spec(checker[0]) is None:
        pytest.skip(f"the package {checker[0]} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", *checker, "script.py"], cwd=script, capture_output=True, text=True, timeout=300
    )
    errors = {int(line) for line in re.findall(r"script\.py:(\d+):.*error", done.stdout)}
    assert errors == WRONG, done.stdout + done.stderr
