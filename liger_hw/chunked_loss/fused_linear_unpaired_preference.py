"""A loss of single answers of one's own: the base class that programs written for liger_kernel derive from."""

import torch

from liger_hw.chunked_loss._own_loss import differentiated, gathered, loss_and_others, scaled
from liger_hw.losses.preference import unpaired_preference_loss

__all__ = ["LigerFusedLinearUnpairedPreferenceBase"]


class LigerFusedLinearUnpairedPreferenceBase(torch.autograd.Function):
    """Derive from it, define `preference_loss_fn`, and let `forward` call `super().forward(cls, ctx, ...)`.

    `unpaired_preference_loss` of `liger_hw.losses.preference` takes such a function as its `loss_type`.
    """

    @staticmethod
    def preference_loss_fn(
        log_prob_chunk, preference_labels_chunk, full_target, ref_log_prob_chunk=None, **loss_kwargs
    ):
        """The loss of some answers divided by the number of all, or (it, *numbers to be returned besides)."""
        raise NotImplementedError("preference_loss_fn: a derived class defines it")

    @staticmethod
    def forward(
        cls, ctx, _input, weight, target, preference_labels, bias=None, chunk_size=1, ignore_index=-100, compiled=True,
        use_ref_model=False, ref_input=None, ref_weight=None, ref_bias=None, average_log_prob=False, **loss_kwargs,
    ):  # fmt: skip
        """(loss, (chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum, *the sums of what
        `preference_loss_fn` returns besides)).

        Args: as in `unpaired_preference_loss`; chunk_size and compiled are without effect.
        """
        calls = []

        def formula(answers, beta):
            ref = {"ref_log_prob_chunk": answers.ref_log_probs} if use_ref_model else {}
            found = cls.preference_loss_fn(answers.log_probs, answers.preferred, target, **ref, **loss_kwargs)
            loss, others = loss_and_others(found)
            calls.append(others)
            # a loss of several answers is shared by them, so that their sum is it again
            return (loss * (target.shape[0] / len(answers.log_probs))).expand(len(answers.log_probs))

        ref = {"ref_x": ref_input, "ref_weight": ref_weight, "ref_bias": ref_bias} if use_ref_model else {}

        def loss_of(x, weight, bias):
            return unpaired_preference_loss(
                x, weight, target, preference_labels, bias, formula, average_log_prob=average_log_prob,
                ignore_index=ignore_index, **ref,
            )  # fmt: skip

        (loss, *others), gradients = differentiated(loss_of, _input, weight, bias)
        ctx.save_for_backward(*gradients)
        return loss, (*others[:4], *gathered(calls))

    @staticmethod
    def backward(ctx, *grad_output):
        """The gradients of the first five arguments."""
        of_input, of_weight, of_bias = scaled(ctx, grad_output[0])
        return of_input, of_weight, None, None, of_bias
