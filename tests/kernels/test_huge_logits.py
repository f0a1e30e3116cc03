"""Logits near the largest fp32 number, infinite ones and NaN: results and gradients are the reference's."""

from math import inf, nan

import pytest
import torch

from liger_hw import cross_entropy_tvd, use_backend

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

    for a, b in zip(results(backend), results("reference"), strict=True):
        rounding = 1e-5 if b.dtype == torch.float32 else 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(a.float(), b.float(), rtol=rounding, atol=rounding, equal_nan=True)
