"""Check that no loss holds more than the gradients and a part of the logits."""

import pytest
import torch

from liger_hw._triton import interpreting
from liger_hw.losses.distillation import SOFT_LOSSES, distillation_loss
from liger_hw.losses.offline_distillation import offline_distillation_loss
from liger_hw.losses.policy import policy_loss
from liger_hw.losses.preference import preference_loss, unpaired_preference_loss
from liger_lab.bench.memory import peak

pytestmark = pytest.mark.skipif(interpreting(), reason="the interpreter's own memory counts")

ROWS, LENGTH, FEATURES, CLASSES = 8, 128, 8, 4096
LOGITS = ROWS * LENGTH * CLASSES * 4


def inputs():
    torch.manual_seed(0)
    x, w = torch.randn(ROWS, LENGTH, FEATURES, requires_grad=True), torch.randn(CLASSES, FEATURES, requires_grad=True)
    return x, w, torch.randint(0, CLASSES, (ROWS, LENGTH))


def policy(x, w, y, **options):
    return policy_loss(x, w, y, torch.randn(ROWS), beta=0.0, **options)


LOSSES = {
    "dpo": lambda x, w, y: preference_loss(x, w, y, ref_x=x.detach(), ref_weight=w.detach(), alpha=1.0),
    "kto": lambda x, w, y: unpaired_preference_loss(x, w, y, torch.arange(ROWS) % 2 == 0),
    "grpo": policy,
    "gspo": lambda x, w, y: policy(x, w, y, importance_sampling_level="sequence"),
}
for _name in SOFT_LOSSES:

    def _distil(x, w, y, name=_name):
        x, y = x.flatten(0, 1), y.flatten()
        return distillation_loss(x, w, x.detach(), w.detach(), y, soft_loss=name, chunk_memory=LOGITS // 2)

    LOSSES[_name] = _distil


def stored(x, w, y, k):
    x, log_p = x.flatten(0, 1), torch.randn(ROWS * LENGTH, CLASSES).log_softmax(1)
    values, tokens = (log_p, None) if k is None else log_p.topk(k)
    return lambda: offline_distillation_loss(x, w, values, tokens, chunk_memory=LOGITS // 2).backward()


@pytest.mark.parametrize("k", [None, 8])
def test_memory_of_a_stored_teacher(k):
    device = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if device.type != "cpu":
        pytest.skip("counts the CPU's allocations")
    x, w, y = inputs()
    taken = peak(stored(x, w, y, k), device)
    assert taken < 0.6 * LOGITS + (x.numel() + w.numel()) * 4, f"{taken / LOGITS:.2f} of the logits"


@pytest.mark.parametrize("name", LOSSES)
def test_memory(name):
    device = torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    if device.type != "cpu":
        pytest.skip("counts the CPU's allocations")
    x, w, y = inputs()
    gradients = (x.numel() + w.numel()) * 4
    taken = peak(lambda: LOSSES[name](x, w, y).loss.backward(), device)
    assert taken < 0.6 * LOGITS + gradients, f"{taken / LOGITS:.2f} of the logits"
