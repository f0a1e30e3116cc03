"""Distillation losses as the modules of `liger_kernel.chunked_loss`."""

from liger_hw.chunked_loss.functional import liger_fused_linear_cosine, liger_fused_linear_jsd
from liger_hw.losses.options import OptionsModule


class _Distillation(OptionsModule):
    """Distil a teacher's output layer into a student's.

    `forward` takes student_input (N, H), student_weight (V, H), teacher_input (N, H'), teacher_weight (V', H') and
    true_labels (N,), or hidden states (B, T, H) and labels (B, T).
    It returns the loss, or with `return_soft_hard_loss` (loss, soft loss, hard loss).

    Args:
        weight_hard_loss, weight_soft_loss: weights. ignore_index: label of skipped rows. temperature: of the soft loss.
    """

    def __init__(
        self, weight_hard_loss=0.5, weight_soft_loss=0.5, beta=0.5, ignore_index=-100, temperature=1.0, compiled=True,
        chunk_size=1024, return_soft_hard_loss=False,
    ):  # fmt: skip
        super().__init__(locals())

    def forward(
        self, student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias=None,
        teacher_bias=None,
    ):  # fmt: skip
        return self._loss(
            student_input, student_weight, teacher_input, teacher_weight, true_labels, student_bias, teacher_bias,
            **self.options,
        )  # fmt: skip


class LigerFusedLinearJSDLoss(_Distillation):
    __doc__ = "Distillation by the generalised Jensen-Shannon divergence.\n\n    " + _Distillation.__doc__
    _loss = staticmethod(liger_fused_linear_jsd)


class LigerFusedLinearCosineSimilarityLoss(_Distillation):
    __doc__ = "Distillation by `beta` times the cosine distance of the logits.\n\n    " + _Distillation.__doc__
    _loss = staticmethod(liger_fused_linear_cosine)
