"""Define divergence modules with the names and arguments of `liger_kernel.transformers`."""

from torch import nn

from liger_hw.kernels.vocabulary.cross_entropy_tvd import cross_entropy_tvd
from liger_hw.kernels.vocabulary.divergence import kl_div
from liger_hw.losses.options import OptionsModule
from liger_hw.transformers import functional


class LigerJSD(OptionsModule):
    """`liger_hw.jsd` of log-probabilities log_q (N, V) of the student and log_p of the teacher.

    Args:
        beta: 0 for KL(p, q), 1 for KL(q, p).
        ignore_index: rows with this label in `shift_labels` do not count.
    """

    def __init__(self, beta=0.5, ignore_index=-100):
        super().__init__(locals())

    def forward(self, log_q, log_p, shift_labels=None):
        return functional.liger_jsd(log_q, log_p, shift_labels, **self.options)


class LigerKLDIVLoss(nn.KLDivLoss):
    """`liger_hw.kl_div` of log-probabilities y_pred (N, V) of the student and y_true of the teacher.

    Args:
        eps: lower bound of a probability before its logarithm.
        others: as in torch.nn.KLDivLoss.
    """

    def __init__(self, eps=1e-10, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.eps = eps

    def forward(self, y_pred, y_true):
        return kl_div(y_pred, y_true, self.reduction, self.log_target, self.eps)


class LigerTVDLoss(OptionsModule):
    """`liger_hw.tvd` of student p and teacher q, probabilities (N, V); arguments as `LigerJSD`."""

    def __init__(self, reduction="batchmean", ignore_index=-100):
        super().__init__(locals())

    def forward(self, p, q, shift_labels=None):
        return functional.liger_tvd(p, q, shift_labels, **self.options)


class LigerFusedLinearJSD(OptionsModule):
    """JSD of student_input (N, H) and teacher_input (N, H') through their heads, without logits.

    Args:
        jsd_beta: as `beta` of `LigerJSD`.
        ignore_index: as there.
        temperature: divides both models' logits.
        accum_dtype: None or torch.float32, which accumulates the weight's gradient in fp32 over several chunks.
    """

    def __init__(self, jsd_beta=0.5, ignore_index=-100, temperature=1.0, accum_dtype=None):
        super().__init__(locals())

    def forward(self, student_input, student_weight, teacher_input, teacher_weight, shift_labels=None):
        return functional.liger_fused_linear_jsd(
            student_input, student_weight, teacher_input, teacher_weight, shift_labels, **self.options
        )


class LigerFusedLinearKLDivLoss(OptionsModule):
    """`liger_fused_linear_kl_div` of student_input (N, H), student_weight (V, H), target (N, V)."""

    def __init__(self, reduction="batchmean", ignore_index=-100, temperature=1.0, eps=1e-10, accum_dtype=None):
        super().__init__(locals())

    def forward(self, student_input, student_weight, target, shift_labels=None):
        return functional.liger_fused_linear_kl_div(student_input, student_weight, target, shift_labels, **self.options)


class LigerFusedCETVDLoss(OptionsModule):
    """`liger_hw.cross_entropy_tvd` of logits (N, V) of student and teacher, and target (N,)."""

    def __init__(self, ignore_index=-100):
        super().__init__(locals())

    def forward(self, student_logits, teacher_logits, target):
        return cross_entropy_tvd(student_logits, teacher_logits, target, **self.options)
