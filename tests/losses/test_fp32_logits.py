"""Logits in fp32 of a 16-bit head: every loss against itself on tensors that were widened before the call."""

import pytest
import torch

import liger_hw
from liger_hw._triton import interpreting
from liger_hw.kernels.vocabulary import _products
from liger_hw.losses.engine import logits_loss
from liger_hw.testing.parity import compare
from liger_lab.bench.memory import peak

pytestmark = pytest.mark.skipif(interpreting(), reason="the ops' tests run the kernels on fp32 logits")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
LABELS = torch.randint(0, 31, (4, 5), generator=torch.Generator().manual_seed(1))
TEXT, TEACHER = {"labels": LABELS}, torch.randn(20, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
HEAD = torch.randn(31, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
REFERENCE = {"ref_x": TEACHER.reshape(4, 5, 8), "ref_weight": HEAD}


def flat(loss, x, weight, bias, **options):
    return loss(x.reshape(20, 8), weight, bias=bias, **options)


def squares(x, weight, bias, **options):
    return logits_loss(lambda logits: logits.float().square().sum(), x.reshape(20, 8), weight, bias, **options)


def multi_token(x, weight, bias, **options):
    heads = torch.stack([x, x.detach()])
    return liger_hw.multi_token_loss(heads, weight, LABELS, bias=bias, **options).loss


def offline(x, weight, bias, **options):
    top = torch.full((20, 3), -2.0), torch.arange(3).repeat(20, 1)
    return liger_hw.offline_distillation_loss(x.reshape(20, 8), weight, *top, bias=bias, **options)


LOSSES = {
    "cross entropy": lambda *head, **options: flat(
        liger_hw.fused_linear_cross_entropy, *head, target=LABELS.reshape(20), **options
    ),
    "log-probabilities": lambda *head, **options: flat(
        liger_hw.fused_linear_selective_log_softmax, *head, tokens=LABELS.reshape(20), **options
    ).sum(),
    "pairs": lambda *head, **options: liger_hw.preference_loss(*head[:2], LABELS, head[2], **REFERENCE, **options)[0],
    "aot": lambda *head, **options: liger_hw.preference_loss(*head[:2], LABELS, head[2], "aot", **options)[0],
    "answers": lambda *head, **options: liger_hw.unpaired_preference_loss(
        *head[:2], LABELS, torch.arange(4) % 2 == 0, head[2], **REFERENCE, **options
    )[0],
    "policy": lambda *head, **options: liger_hw.policy_loss(
        *head[:2], LABELS, torch.tensor([1.0, -2.0, 0.5, 3.0]), None, head[2], **REFERENCE, **options
    )[0],
    "teacher": lambda *head, **options: flat(
        liger_hw.distillation_loss, *head, teacher_x=TEACHER, teacher_weight=HEAD, labels=LABELS.reshape(20), **options
    )[0],
    "stored teacher": offline,
    "multi-token": multi_token,
    "own": squares,
}


def head(x_dtype=BF16, weight_dtype=BF16):
    generator = torch.Generator().manual_seed(0)
    dtypes = {(4, 5, 8): x_dtype, (31, 8): weight_dtype, (31,): weight_dtype}
    return [torch.randn(shape, generator=generator).to(d).requires_grad_() for shape, d in dtypes.items()]


def value_and_gradients(loss, tensors, scale=1.0, dtype=None):
    value = loss(*(t if dtype is None else t.to(dtype) for t in tensors), logits_dtype=FP32)
    return [value.detach(), *torch.autograd.grad(value * scale, tensors)]


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (FP16, FP16), (BF16, FP32), (FP32, BF16), (FP16, FP32)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss(name, dtypes, monkeypatch):
    monkeypatch.setattr(_products, "BLOCK_BYTES", 300)  # several blocks
    tensors, scale = head(*dtypes), 64.0 if FP16 in dtypes else 1.0
    found = value_and_gradients(LOSSES[name], tensors, scale)
    expected = value_and_gradients(LOSSES[name], tensors, scale, FP32)
    exact = value_and_gradients(LOSSES[name], [t.detach().double().requires_grad_() for t in tensors], scale)
    compare(exact, expected, found, name)


@pytest.mark.parametrize("name", LOSSES)
def test_other_dtypes_are_refused(name):
    with pytest.raises(ValueError, match=r"logits_dtype: got torch.float64, allowed: None or torch.float32"):
        LOSSES[name](*head(), logits_dtype=torch.float64)


def test_autocast_casts_nothing():
    tensors = head(FP32, FP32)
    expected = LOSSES["policy"](*tensors, logits_dtype=FP32)
    with torch.autocast("cpu", BF16):
        assert torch.equal(LOSSES["policy"](*tensors, logits_dtype=FP32), expected)
        assert not torch.equal(LOSSES["policy"](*tensors), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_casts_no_reference(name):
    tensors = head(FP32, FP32)
    with liger_hw.use_backend("reference"):
        expected = LOSSES[name](*tensors, logits_dtype=FP32)
        with torch.autocast("cpu", BF16):
            assert torch.equal(LOSSES[name](*tensors, logits_dtype=FP32), expected)


def test_no_wide_copy_of_the_weight(monkeypatch):
    if torch.accelerator.is_available():
        pytest.skip("counts the CPU's allocations")
    monkeypatch.setattr(_products, "BLOCK_BYTES", 2**16)
    x, weight = (torch.randn(n, 256).bfloat16().requires_grad_() for n in (64, 4096))
    run = liger_hw.fused_linear_cross_entropy
    taken = peak(
        lambda: run(x, weight, torch.zeros(64, dtype=torch.int64), chunk_memory=2**18, logits_dtype=FP32).backward(),
        torch.device("cpu"),
    )
    assert taken < weight.nbytes * 2  # its gradient, a chunk with autograd's, and x; a copy would take twice its bytes
