"""Logits near the largest fp32 number, infinite ones and NaN: results and gradients are the reference's."""

from math import inf, nan

import pytest
import torch

from liger_hw import (
    cross_entropy,
    cross_entropy_tvd,
    fused_linear_selective_log_softmax,
    selective_log_softmax,
    use_backend,
)
from liger_hw.kernels._logits import padded_rows
from liger_hw.kernels.vocabulary.divergence import DIVERGENCE_KINDS
from liger_hw.kernels.vocabulary.divergence.logits import divergence_rows, soft_rows
from liger_hw.kernels.vocabulary.divergence.probabilities import Form, kl_by_row, kl_rows

HUGE, LARGEST = 3e38, torch.finfo(torch.float32).max


def huge_rows(cols, dtype, device):
    """Make rows and their targets, whose logits are the row's largest, its least, or neither."""
    x = torch.randn(12, cols)
    x[0], x[0, 0], x[1], x[2], x[3] = -HUGE, HUGE, HUGE, -HUGE, -LARGEST
    x[4, 5], x[5, 5], x[6, 7], x[7, 7] = HUGE, -HUGE, inf, -inf
    x[8], x[9, 3], x[10, ::2], x[10, 1::2] = -inf, nan, HUGE, -HUGE
    x[11] *= 1e37
    finite = torch.finfo(dtype).max
    x = torch.where(x.isinf(), x, x.clamp(-finite, finite)).to(dtype).to(device)
    return x, torch.tensor([0, 3, 3, 3, 5, 5, 3, 7, 3, 3, 3, 4], device=device)


def compare(results, dtype, backend):
    # largest differences, of 1 + the value: fp32 1.2e-6 on an H200 and 7.4e-7 interpreted; bf16 3.2e-3, fp16 2.5e-4
    for a, b in zip(results(backend), results("reference"), strict=True):
        rounding = 1e-5 if b.dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(a.float(), b.float(), rtol=rounding, atol=rounding, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cols", [37, 64])
def test_cross_entropy_tvd(cols, dtype, backend, device):
    torch.manual_seed(0)
    x, target = huge_rows(cols, dtype, device)

    def results(name):
        student = x.clone().requires_grad_()
        with use_backend(name):
            rows = cross_entropy_tvd(student, x.roll(1, 1), target)
            return *rows, *torch.autograd.grad(sum(row.sum() for row in rows), student)

    compare(results, dtype, backend)


@pytest.mark.parametrize("options", [{}, {"logit_scale": -0.5}, {"softcap": 30.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cols", [37, 64])
def test_cross_entropy(cols, dtype, options, backend, device):
    torch.manual_seed(0)
    x, target = huge_rows(cols, dtype, device)

    def results(name):
        logits = x.clone().requires_grad_()
        with use_backend(name):
            rows = cross_entropy(logits, target, reduction="none", **options)
            return rows, torch.autograd.grad(rows.sum(), logits)[0]

    compare(results, dtype, backend)


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0}, {"softcap": 30.0, "temperature": 0.7}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("cols", [37, 64])
def test_selective_log_softmax(cols, dtype, options, backend, device):
    torch.manual_seed(0)
    x, tokens = huge_rows(cols, dtype, device)

    def results(name):
        logits = x.clone().requires_grad_()
        with use_backend(name):
            rows = selective_log_softmax(logits, tokens, return_entropy=True, return_lse=True, **options)
            gradient = torch.autograd.grad(rows.log_probs.sum() + rows.entropy.sum(), logits)[0]
            return rows.log_probs, rows.entropy, rows.lse[:6], gradient  # of a row with inf it is NaN

    compare(results, dtype, backend)


@pytest.mark.parametrize("options", [{}, {"softcap": 30.0, "temperature": 0.7}], ids=str)
def test_statistics(options, backend, device):
    x, tokens = (t[:6] for t in huge_rows(37, torch.float32, device))
    head = torch.eye(37, device=device)

    def results(name):
        with use_backend(name):
            rows = fused_linear_selective_log_softmax(
                x, head, tokens, return_is_top1=True, return_log_sum_sq_probs=True, **options
            )
        return rows.log_probs, rows.is_top1.float(), rows.log_sum_sq_probs

    compare(results, torch.float32, backend)


def hold_rows(soft, gradient, student, expected):
    """Compare losses and gradients of rows; a gradient may be the difference of two values of a loss's size."""
    (expected_gradient,) = torch.autograd.grad(expected.sum(), student)
    torch.testing.assert_close(soft, expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
    size = 1 + torch.where(expected.isfinite(), expected.detach().abs(), 0)[:, None]
    torch.testing.assert_close(gradient / size, expected_gradient / size, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("kind", [*DIVERGENCE_KINDS, "cosine"])
@pytest.mark.parametrize("cols", [37, 64])
def test_divergence_of_logits(cols, kind, temperature, backend, device):
    torch.manual_seed(0)
    x, labels = huge_rows(cols, torch.float32, device)
    plain, tiny = torch.randn(3 * 12, cols, device=device).view(3, 12, cols), 10.0 ** -torch.arange(12, device=device)
    for s, t in ((x, x.roll(1, 1)), (x, plain[0]), (plain[0], x), (plain[1] * tiny[:, None] ** 3, plain[2])):
        student, gradient = s.clone().requires_grad_(), padded_rows(s.clone())
        soft, hard, factors = plain.new_empty(12), plain.new_empty(12), plain.new_ones(2)
        beta = 0.5 if kind == "even_jsd" else 0.3
        with use_backend(backend):
            divergence_rows(
                gradient, padded_rows(t), labels, factors, soft, hard, kind, beta, temperature, -100, True
            )  # fmt: skip
        expected = torch.nn.functional.cross_entropy(student, labels, reduction="none")
        torch.testing.assert_close(hard, expected.detach(), rtol=1e-5, atol=1e-5, equal_nan=True)
        gradient -= torch.autograd.grad(expected.sum(), student)[0]
        hold_rows(soft, gradient, student, soft_rows(student, t, kind, beta, temperature))


@pytest.mark.parametrize("kind", [*DIVERGENCE_KINDS, "cosine"])
@pytest.mark.parametrize("student_cols, teacher_cols", [(4096, 4104), (4096, 8192), (8192, 4096)])
def test_vocabularies_of_whole_blocks(student_cols, teacher_cols, kind, backend, device):
    """A block of 4,096 columns divides the narrower row, and the loop goes on to the wider one's end."""
    torch.manual_seed(0)
    memory, teacher = torch.full((3, student_cols), 7.0, device=device), torch.randn(2, teacher_cols, device=device)
    rows, labels = memory[:2], torch.tensor([5, student_cols - 1], device=device)
    rows.normal_()
    student, soft, hard = rows.clone().requires_grad_(), memory.new_empty(2), memory.new_empty(2)
    with use_backend(backend):
        divergence_rows(rows, teacher, labels, memory.new_ones(2), soft, hard, kind, 0.5, 2.0, -100, True)
    assert (memory[2] == 7).all()  # the memory behind the rows
    expected = torch.nn.functional.cross_entropy(student, labels, reduction="none")
    torch.testing.assert_close(hard, expected.detach())
    rows -= torch.autograd.grad(expected.sum(), student)[0]
    # in float64: torch's fp32 sums of 8,192 columns are 1.3e-5 off on some CPUs, the kernel's 5e-7
    hold_rows(soft, rows, student, soft_rows(student.double(), teacher.double(), kind, 0.5, 2.0).float())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("logarithms", [False, True])
@pytest.mark.parametrize("cols", [37, 64])
def test_divergence_of_probabilities(cols, logarithms, temperature, backend, device):
    torch.manual_seed(0)
    x, labels = huge_rows(cols, torch.float32, device)
    p, form = torch.randn(12, cols, device=device).softmax(-1), Form(logarithms, temperature, 1e-10)
    if logarithms:
        p = p.log()
        p[:, 2], p[3, 4] = -HUGE, -inf
    student, soft, gradient = x.clone().requires_grad_(), torch.empty(12, device=device), padded_rows(x.clone())
    with use_backend(backend):
        kl_rows(gradient, p, labels, torch.ones((), device=device), soft, form, -100, True)
    hold_rows(soft, gradient, student, kl_by_row(student, p, form))
