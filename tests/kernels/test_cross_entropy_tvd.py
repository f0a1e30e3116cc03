"""cross_entropy_tvd."""

import pytest
import torch
import torch.nn.functional as F

from liger_hw import cross_entropy, cross_entropy_tvd, use_backend
from liger_hw.testing.parity import check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("cross_entropy_tvd", dtype, device):
        check(cross_entropy_tvd, inputs, options, backend)


def test_the_reference_is_cross_entropy_and_half_of_a_norm():
    torch.manual_seed(0)
    student, teacher = torch.randn(6, 31, requires_grad=True), torch.randn(6, 31)
    target = torch.tensor([0, 5, -100, 7, 30, 2])
    ce, tvd = cross_entropy_tvd.reference(student, teacher, target)
    torch.testing.assert_close(ce, F.cross_entropy(student, target, reduction="none"))
    torch.testing.assert_close(ce, cross_entropy(student, target, reduction="none"))
    distance = torch.linalg.vector_norm(student.softmax(1) - teacher.softmax(1), 1, dim=1) / 2
    torch.testing.assert_close(tvd, torch.where(target == -100, 0, distance))


def test_equal_and_opposite_models(backend, device):
    """The distance is 0 with a gradient of 0, and 1; logits of 1e4 lose nothing."""
    student = torch.tensor([[1e4, -1e4, 3.0], [1e4, -1e4, 3.0], [0.5, 1.0, 2.0]], device=device, requires_grad=True)
    teacher = torch.tensor([[1e4, -1e4, 3.0], [-1e4, 1e4, 3.0], [0.5, 1.0, 2.0]], device=device)
    target = torch.tensor([1, 0, 2], device=device)
    with use_backend(backend):
        ce, tvd = cross_entropy_tvd(student, teacher, target)
        (gradient,) = torch.autograd.grad(tvd.sum(), student, retain_graph=True)
        again = torch.autograd.grad(ce.sum() + tvd.sum(), student, retain_graph=True)
        assert torch.equal(again[0], torch.autograd.grad(ce.sum() + tvd.sum(), student)[0])
    torch.testing.assert_close(tvd.cpu(), torch.tensor([0.0, 1.0, 0.0]))
    torch.testing.assert_close(ce.cpu()[:2], torch.tensor([2e4, 0.0]))
    assert not gradient.any()


def test_ignored_rows_may_hold_anything(backend, device):
    torch.manual_seed(0)
    student, teacher = (torch.randn(3, 130, device=device, dtype=torch.float16) for _ in range(2))
    student[1], teacher[1] = float("nan"), float("inf")
    student.requires_grad_()
    with use_backend(backend):
        ce, tvd = cross_entropy_tvd(student, teacher, torch.tensor([3, -100, 4], device=device))
        (ce + tvd).sum().backward()
    assert (
        ce[1] == tvd[1] == 0 and not student.grad[1].any() and student.grad[0].any() and student.grad.isfinite().all()
    )


def test_a_target_outside_is_nan(backend, device):
    """A forced backend writes NaN; the reference on a CPU refuses it."""
    student = torch.randn(2, 30, device=device, requires_grad=True)
    target = torch.tensor([0, 30], device=device)
    with use_backend(backend):
        ce, tvd = cross_entropy_tvd(student, torch.randn(2, 30, device=device), target)
        (ce + tvd).sum().backward()
    assert ce[1].isnan() and tvd.isfinite().all() and student.grad[0].isfinite().all() and student.grad[1].isnan().all()


def test_only_the_student_learns(backend, device):
    student, teacher = (torch.randn(2, 64, device=device, requires_grad=True) for _ in range(2))
    target = torch.zeros(2, dtype=torch.int64, device=device)
    with use_backend(backend):
        sum(cross_entropy_tvd(student, teacher, target)).sum().backward()
        assert not any(y.requires_grad for y in cross_entropy_tvd(student.detach(), teacher, target))
    assert teacher.grad is None and student.grad is not None


@pytest.mark.parametrize(
    "argument, change",
    [
        ("student_logits", {"student_logits": torch.zeros(3)}),
        ("teacher_logits", {"teacher_logits": torch.zeros(2, 5)}),
        ("target", {"target": torch.zeros(3)}),
        ("target", {"target": torch.zeros(2, dtype=torch.int64)}),
        ("target", {"target": torch.full((3,), 5)}),
    ],
)
def test_bad_input(argument, change):
    good = {"student_logits": torch.zeros(3, 5), "teacher_logits": torch.zeros(3, 5), "target": torch.zeros(3).long()}
    with pytest.raises(ValueError, match=f"^{argument}: got"):
        cross_entropy_tvd(**good | change)
