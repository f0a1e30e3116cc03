"""Mini models trained patched become what they become unpatched; `liger_lab.tools.converge` trains every family."""

import pytest
import torch

import liger_hw  # noqa: E402
from liger_lab.tools import converge

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("model_type", "dtype", "dropout"),
    [("llama", "fp32", 0.1), ("gemma2", "bf16", 0.0), ("llava", "fp32", 0.0)],
)
def test_trained_alike(model_type, dtype, dropout):
    cls = next(cls for name, cls in converge.families() if name == model_type)
    row = converge.compare(model_type, cls, dtype, CPU, dropout)
    assert converge.worst(row) <= 1, row
    assert row["last loss"] < row["first loss"] - 0.1


def test_a_mistake_shows():
    def wrong(model):
        liger_hw.patch(model)
        model.lm_head.weight.register_hook(lambda grad: grad * 0.5 + 0.01)

    row = converge.compare("llama", "LlamaForCausalLM", "fp32", CPU, patch=wrong)
    assert converge.worst(row) > 1
