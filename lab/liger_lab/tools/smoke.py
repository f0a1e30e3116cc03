"""Check an installed liger_hw without its checkout: names, ops, kernels, tables, the command and patching.

lab/liger_lab/tools/package.py runs it in a fresh environment: the product alone, with transformers, with the
laboratory.
"""

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import liger_hw

COMMAND = Path(sys.executable).with_name("liger-hw")
# without a PYTHONPATH, which could lead the commands to a checkout
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
IN_INTERPRETER = """
import torch, liger_hw
x, weight = torch.randn(4, 96), torch.ones(96)
with liger_hw.use_backend("nvidia:sm90"):
    y = liger_hw.rms_norm(x, weight, 1e-6)
torch.testing.assert_close(y, liger_hw.rms_norm(x, weight, 1e-6))
"""
STAND_IN = """
from liger_kernel.transformers import LigerRMSNorm
assert LigerRMSNorm.__module__.startswith("liger_hw"), LigerRMSNorm.__module__
"""


def output(*command, **variables) -> str:
    """Run a command and return its standard output; fail with its errors."""
    done = subprocess.run(command, env=ENVIRONMENT | variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def check_package() -> None:
    installed = Path(liger_hw.__file__)
    assert installed.is_relative_to(sys.prefix), f"{installed} is not the installed package"
    assert liger_hw.__version__ == importlib.metadata.version("liger_hw")
    assert (installed.parent / "py.typed").is_file()
    assert output(COMMAND, "--version") == f"liger_hw {liger_hw.__version__}\n"
    info = json.loads(output(COMMAND, "info", "--json"))
    assert info["versions"]["torch"] == torch.__version__ and "rms_norm" in info["devices"][0]["ops"]


def check_ops() -> None:
    x, weight = torch.randn(8, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    torch.testing.assert_close(liger_hw.rms_norm(x, weight, 1e-6), F.rms_norm(x, (64,), weight, 1e-6))
    head, labels = torch.randn(100, 64, requires_grad=True), torch.randint(100, (8,))
    losses = liger_hw.fused_linear_cross_entropy(x, head, labels), F.cross_entropy(x @ head.T, labels)
    gradients = [torch.autograd.grad(loss, (x, head)) for loss in losses]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def check_kernels() -> None:
    if importlib.util.find_spec("triton") is None:
        print("no kernel ran: triton is not installed")
        return
    if importlib.util.find_spec("numpy") is None:
        print("no kernel ran: Triton's interpreter needs numpy, which is not installed")
    else:
        output(sys.executable, "-I", "-c", IN_INTERPRETER, TRITON_INTERPRET="1")


def check_models() -> None:
    if importlib.util.find_spec("transformers") is None:
        try:
            liger_hw.AutoLigerKernelForCausalLM  # noqa: B018
        except ModuleNotFoundError as error:
            assert "pip install transformers" in str(error)
            return
        raise AssertionError("AutoLigerKernelForCausalLM exists without transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )
    )  # fmt: skip
    tokens = torch.randint(128, (2, 16))
    plain = model(input_ids=tokens, labels=tokens).loss
    summary = liger_hw.patch(model)
    assert summary.replaced, summary
    torch.testing.assert_close(model(input_ids=tokens, labels=tokens).loss, plain)
    assert json.loads(output(COMMAND, "patch-report", "llama", "--json"))["replaced"]
    file = Path("uses_liger_kernel.py")
    file.write_text(STAND_IN)
    output(sys.executable, "-I", "-m", "liger_hw.run", str(file))


def check_laboratory() -> None:
    if importlib.util.find_spec("liger_lab") is None:
        done = subprocess.run([COMMAND, "doctor"], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.returncode == 2 and "pip install -e lab" in done.stderr, done.stderr
        return
    if importlib.util.find_spec("triton") is not None:
        assert "fit to ship" in output(COMMAND, "tune", "--check")
        forced = {"TRITON_INTERPRET": "1", "LIGER_HW_BACKEND": "nvidia:sm90"}
        assert "rms_norm_forward(4096, 2)" in output(COMMAND, "launches", "rms_norm", **forced)
    assert "rms_norm: " in output(COMMAND, "doctor", "rms_norm")
    bench = "bench", "rms_norm", "--shapes", "16x2048", "--modes", "host", "--against", "eager"
    assert "rms_norm" in output(COMMAND, *bench)
    plan = "plan", "--model", "llama-8b", "--gpus", "8", "--gpu-memory", "80"
    assert "8.03 billion parameters" in output(COMMAND, *plan)


if __name__ == "__main__":
    torch.manual_seed(0)
    for check in (check_package, check_ops, check_kernels, check_models, check_laboratory):
        check()
        print(f"{check.__name__}: passed", flush=True)
