"""A distillation loss of one's own: the base class that programs written for liger_kernel derive from."""

import torch
import torch.nn.functional as F

from liger_hw.checks import check
from liger_hw.losses.engine import logits_loss


class LigerFusedLinearDistillationBase(torch.autograd.Function):
    """Derive from it, define `distillation_loss_fn`, and let `forward` call `super().forward(cls, ctx, ...)`.

    The student's logits and their gradient exist for one chunk of rows at a time. `logits_loss` of
    `liger_hw.losses.engine` does the same for any torch function, without a class.
    """

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target, ignore_index, **loss_kwargs):
        """The sum of the soft loss over the rows of two logits (M, V), both divided by the temperature."""
        raise NotImplementedError("distillation_loss_fn: a derived class defines it")

    @staticmethod
    def forward(
        cls, ctx, student_input, student_weight, teacher_input, teacher_weight, target, student_bias=None,
        teacher_bias=None, chunk_size=1024, ignore_index=-100, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5,
        compute_ce_loss=True, temperature=1.0, compiled=True, return_soft_hard_loss=False, **loss_kwargs,
    ):  # fmt: skip
        """weight_hard_loss * cross entropy + weight_soft_loss * soft loss, both divided by the rows that count.

        Args:
            student_input (N, H), student_weight (V, H), teacher_input (N, H'), teacher_weight (V', H'), V' >= V.
            target: (N,).
            temperature: divides the logits of the soft loss.
            beta: given to `distillation_loss_fn`, with `loss_kwargs`.
            compute_ce_loss: False leaves the cross entropy out.
            chunk_size, compiled: without effect.
            return_soft_hard_loss: return (loss, soft loss, hard loss), the last two without a gradient.
        """
        check(temperature > 0, "temperature", temperature, "more than 0")
        widths = teacher_weight.shape[0], student_weight.shape[0]
        check(widths[0] >= widths[1], "teacher_weight", f"{widths[0]} rows", f"at least the student's {widths[1]}")
        count = (target != ignore_index).sum().clamp(min=1)

        def soft(logits, target, teacher):
            theirs = F.linear(teacher, teacher_weight, teacher_bias)
            ours = F.pad(logits, (0, theirs.shape[-1] - logits.shape[-1])) / temperature
            options = {"target": target, "ignore_index": ignore_index, "beta": beta, **loss_kwargs}
            return cls.distillation_loss_fn(ours, theirs / temperature, **options).float()

        def hard(logits, target, teacher):
            if not compute_ce_loss:
                return logits.new_zeros((), dtype=torch.float32) + 0 * logits.sum()
            return F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="sum")

        def both(*args):
            return weight_soft_loss * soft(*args) + weight_hard_loss * hard(*args)

        leaves = [None if x is None else x.detach() for x in (student_input, student_weight, student_bias)]
        wanted = [x is not None and x.requires_grad for x in (student_input, student_weight, student_bias)]
        for leaf, want in zip(leaves, wanted):
            if leaf is not None:
                leaf.requires_grad_(want)
        with torch.enable_grad():
            loss = logits_loss(both, *leaves, (target, teacher_input)) / count
            asked = [leaf for leaf, want in zip(leaves, wanted) if leaf is not None and want]
            gradients = iter(torch.autograd.grad(loss, asked) if asked else ())
        kept = [next(gradients) if leaf is not None and want else None for leaf, want in zip(leaves, wanted)]
        ctx.save_for_backward(*kept)
        if not return_soft_hard_loss:
            return loss.detach()
        plain = [None if x is None else x.detach() for x in leaves]
        parts = [logits_loss(part, *plain, (target, teacher_input)) / count for part in (soft, hard)]
        ctx.mark_non_differentiable(*parts)
        return loss.detach(), *parts

    @staticmethod
    def backward(ctx, grad_output, *_):
        """The gradients of the first six arguments."""
        of_input, of_weight, of_bias = (None if g is None else g * grad_output for g in ctx.saved_tensors)
        return of_input, of_weight, None, None, None, of_bias
