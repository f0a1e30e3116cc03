"""Base class for a program's own distillation losses, with liger_kernel's interface."""

import functools

import torch
import torch.nn.functional as F

from liger_hw.checks import check
from liger_hw.chunked_loss.custom_loss import CustomLoss, keep_gradients
from liger_hw.losses.arguments import flatten_rows
from liger_hw.losses.engine import logits_loss


class LigerFusedLinearDistillationBase(CustomLoss):
    """Base class: define `distillation_loss_fn`, and call `super().forward(cls, ctx, ...)` in `forward`.

    Memory holds the student's logits and their gradient for one chunk of rows at a time. `logits_loss` of
    `liger_hw.losses.engine` does the same for any torch function, without a class.
    """

    bias_at = 5

    @staticmethod
    def distillation_loss_fn(student_logits, teacher_logits, target, ignore_index, **loss_kwargs):
        """Sum the soft loss over rows of logits (M, V), already divided by the temperature."""
        raise NotImplementedError("distillation_loss_fn: a derived class defines it")

    @staticmethod
    def forward(
        cls, ctx, student_input, student_weight, teacher_input, teacher_weight, target, student_bias=None,
        teacher_bias=None, chunk_size=1024, ignore_index=-100, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5,
        compute_ce_loss=True, temperature=1.0, compiled=True, return_soft_hard_loss=False, **loss_kwargs,
    ):  # fmt: skip
        """Compute weight_hard_loss * cross entropy + weight_soft_loss * soft loss, averaged over rows not ignored.

        Args:
            student_input (..., H), student_weight (V, H), teacher_input (..., H'), teacher_weight (V', H'), V' >= V.
            target: (...). `distillation_loss_fn` gets flat rows.
            temperature: divides the logits of the soft loss.
            beta: passed to `distillation_loss_fn`, with `loss_kwargs`.
            compute_ce_loss: False leaves the cross entropy out.
            chunk_size, compiled: no effect.
            return_soft_hard_loss: return (loss, soft loss, hard loss), the last two without a gradient.
        """
        check(temperature > 0, "temperature", temperature, "more than 0")
        widths = teacher_weight.shape[0], student_weight.shape[0]
        check(widths[0] >= widths[1], "teacher_weight", f"{widths[0]} rows", f"at least the student's {widths[1]}")
        rows = {"teacher_input": teacher_input, "target": target}
        _, teacher_input, target = flatten_rows(student_input, "student_input", **rows)
        count = (target != ignore_index).sum().clamp(min=1)

        teacher = teacher_weight.detach(), None if teacher_bias is None else teacher_bias.detach()

        def soft(logits, target, teacher_x):
            teacher_logits = F.linear(teacher_x, *teacher)
            logits = F.pad(logits, (0, teacher_logits.shape[-1] - logits.shape[-1]))
            options = {"target": target, "ignore_index": ignore_index, "beta": beta, **loss_kwargs}
            return cls.distillation_loss_fn(logits / temperature, teacher_logits / temperature, **options).float()

        def hard(logits, target, teacher_x):
            if not compute_ce_loss:
                return logits.new_zeros((), dtype=torch.float32)  # a banned token's logit of -inf times 0 is NaN
            return F.cross_entropy(logits.float(), target, ignore_index=ignore_index, reduction="sum")

        def both(*args):
            return weight_soft_loss * soft(*args) + weight_hard_loss * hard(*args)

        def mean_of(part, x, weight, bias):
            return logits_loss(part, x.flatten(0, -2), weight, bias, (target, teacher_input)) / count

        tensors = student_input, student_weight, student_bias
        (loss,) = keep_gradients(ctx, functools.partial(mean_of, both), *tensors)
        if not return_soft_hard_loss:
            return loss
        detached = [None if x is None else x.detach() for x in tensors]
        parts = [mean_of(part, *detached) for part in (soft, hard)]
        ctx.mark_non_differentiable(*parts)
        return loss, *parts
