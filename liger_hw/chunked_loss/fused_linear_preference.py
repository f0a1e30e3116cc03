"""Base class for a program's own preference losses, with liger_kernel's interface."""

import torch.nn.functional as F

from liger_hw.chunked_loss.custom_loss import CustomLoss, join_results, keep_gradients, loss_and_others
from liger_hw.chunked_loss.functional import reference_of
from liger_hw.losses.preference import preference_loss


class LigerFusedLinearPreferenceBase(CustomLoss):
    """Base class: define `preference_loss_fn`, and call `super().forward(cls, ctx, ...)` in `forward`.

    `preference_loss` of `liger_hw.losses.preference` takes a function as its `loss_type`, without a class.
    """

    bias_at = 3

    @staticmethod
    def preference_loss_fn(chosen_logps, rejected_logps, full_target, **loss_kwargs):
        """Compute the loss of some pairs, divided by the number of all pairs.

        Args:
            chosen_logps, rejected_logps: (P,) of some pairs.
            full_target: (2B, T), the labels of all pairs.
            loss_kwargs: beta, `forward`'s loss_kwargs, and with `use_ref_model` ref_chosen_logps, ref_rejected_logps.

        Returns:
            the loss, or (loss, *others); `forward` also returns the others, numbers or rows.
        """
        raise NotImplementedError("preference_loss_fn: a derived class defines it")

    @staticmethod
    def forward(
        cls, ctx, _input, weight, target, bias=None, chunk_size=1, ignore_index=-100, alpha=1.0, beta=0.1,
        compute_nll_loss=True, nll_target=None, compiled=True, use_ref_model=False, ref_input=None, ref_weight=None,
        ref_bias=None, average_log_prob=True, **loss_kwargs,
    ):  # fmt: skip
        """Compute the loss of pairs and its gradients.

        Args: as in `preference_loss`; chunk_size and compiled have no effect.

        Returns:
            (loss + alpha NLL, (chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss,
            *others of `preference_loss_fn`: numbers summed, rows concatenated)).
        """
        call_outputs = []

        def formula(pairs, beta, label_smoothing):
            ref = {"ref_chosen_logps": pairs.ref_chosen, "ref_rejected_logps": pairs.ref_rejected}
            named = loss_kwargs | (ref if use_ref_model else {})
            returned = cls.preference_loss_fn(pairs.chosen, pairs.rejected, target, beta=beta, **named)
            loss, others = loss_and_others(returned)
            call_outputs.append(others)
            # the caller adds up the pairs' losses
            return F.pad((loss * (target.shape[0] // 2)).reshape(1), (0, len(pairs.chosen) - 1))

        ref_model = reference_of(use_ref_model, ref_input, ref_weight, ref_bias)

        def loss_of(x, weight, bias):
            return preference_loss(
                x, weight, target, bias, formula, beta, alpha=alpha if compute_nll_loss else 0.0,
                average_log_prob=average_log_prob, nll_labels=nll_target, ignore_index=ignore_index, **ref_model,
            )  # fmt: skip

        loss, *others = keep_gradients(ctx, loss_of, _input, weight, bias)
        return loss, (*others[:5], *join_results(call_outputs))
