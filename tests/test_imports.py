"""Fresh processes in which something is not installed."""

import subprocess
import sys
from importlib.util import find_spec

import pytest

BLOCK = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
"""


def run(code, *blocked):
    return subprocess.run(
        [sys.executable, "-c", BLOCK.format(packages=set(blocked)) + code], capture_output=True, text=True, timeout=120
    )


def passes(code, *blocked):
    found = run(code, *blocked)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_import_runs_nothing():
    out = passes("import liger_hw; print([m for m in ('torch', 'triton', 'transformers') if m in sys.modules])")
    assert out.strip() == "[]"


def test_a_public_name_is_looked_up_once():
    out = passes("import liger_hw; liger_hw.rms_norm; print(vars(liger_hw)['rms_norm'] is liger_hw.rms_norm)")
    assert out.strip() == "True"


def test_the_stand_in_loads_no_torch():
    """Every Python below `python -m liger_hw.run` installs it at its start."""
    out = passes("import liger_hw.stand_in.finder as f; f.install(); print('torch' in sys.modules)")
    assert out.strip() == "False"


def test_without_triton_the_references_run():
    passes(
        """
import torch, liger_hw
x, w = torch.randn(3, 16, requires_grad=True), torch.ones(16)
liger_hw.rms_norm(x, w).sum().backward()
liger_hw.LigerFusedLinearCrossEntropyLoss()(torch.randn(8, 16), x, torch.tensor([1, 2, 3])).backward()
assert x.grad is not None
try:
    with liger_hw.use_backend("triton"):
        liger_hw.rms_norm(x, w)
except RuntimeError as error:
    assert "triton" in str(error)
else:
    raise AssertionError("a forced backend must not fall back")
""",
        "triton",
    )


def test_without_triton_a_patched_model_learns():
    passes(
        """
import torch, transformers, liger_hw
sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=1))
patched = transformers.LlamaForCausalLM(plain.config)
patched.load_state_dict(plain.state_dict())
assert not liger_hw.patch(patched).left
ids = torch.arange(8)[None]
losses = [model(input_ids=ids, labels=ids).loss for model in (plain, patched)]
torch.testing.assert_close(*losses)
losses[1].backward()
assert all(p.grad is not None for p in patched.parameters())
""",
        "triton",
    )


def test_without_transformers_modules_and_patch_work():
    passes(
        """
import torch, liger_hw
from liger_hw.transformers import LigerRMSNorm, LigerSwiGLUMLP, LigerCrossEntropyLoss, liger_rotary_pos_emb, functional
modules = torch.nn.Sequential(torch.nn.LayerNorm(8))
assert liger_hw.patch(modules).replaced
liger_hw.unpatch(modules)
""",
        "transformers",
    )


def test_names_that_need_transformers_name_it_in_the_error():
    found = run("from liger_hw import AutoLigerKernelForCausalLM", "transformers")
    assert found.returncode and "pip install transformers" in found.stderr
    found = run("import liger_hw; liger_hw.apply_liger_kernel_to_llama()", "transformers")
    assert found.returncode and "transformers" in found.stderr.splitlines()[-1]


def test_a_package_that_triton_needs_is_named():
    """Triton imports numpy under TRITON_INTERPRET=1, and does not depend on it."""
    found = run("import os; os.environ['TRITON_INTERPRET'] = '1'; import liger_hw; liger_hw.rms_norm", "numpy")
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    assert found.returncode and "pip install numpy" in found.stderr.splitlines()[-1]
