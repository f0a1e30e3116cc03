"""Base class for a program's own losses of single answers, with liger_kernel's interface."""

from liger_hw.chunked_loss.custom_loss import CustomLoss, join_results, keep_gradients, loss_and_others
from liger_hw.chunked_loss.functional import reference_of
from liger_hw.losses.preference import unpaired_preference_loss


class LigerFusedLinearUnpairedPreferenceBase(CustomLoss):
    """Base class: define `preference_loss_fn`, and call `super().forward(cls, ctx, ...)` in `forward`.

    `unpaired_preference_loss` of `liger_hw.losses.preference` takes a function as its `loss_type`, without a class.
    """

    bias_at = 4

    @staticmethod
    def preference_loss_fn(
        log_prob_chunk, preference_labels_chunk, full_target, ref_log_prob_chunk=None, **loss_kwargs
    ):
        """Compute the loss of some answers, divided by the number of all answers.

        Returns:
            the loss, or (loss, *others); `forward` also returns the sums of the others, which are numbers.
        """
        raise NotImplementedError("preference_loss_fn: a derived class defines it")

    @staticmethod
    def forward(
        cls, ctx, _input, weight, target, preference_labels, bias=None, chunk_size=1, ignore_index=-100, compiled=True,
        use_ref_model=False, ref_input=None, ref_weight=None, ref_bias=None, average_log_prob=False, **loss_kwargs,
    ):  # fmt: skip
        """Compute the loss of answers and its gradients.

        Args: as in `unpaired_preference_loss`; chunk_size and compiled have no effect.

        Returns:
            (loss, (chosen_logps_sum, rejected_logps_sum, chosen_logits_sum, rejected_logits_sum, *sums of the others of
            `preference_loss_fn`)).
        """
        call_outputs = []

        def formula(answers, beta):
            ref = {"ref_log_prob_chunk": answers.ref_log_probs} if use_ref_model else {}
            returned = cls.preference_loss_fn(answers.log_probs, answers.preferred, target, **ref, **loss_kwargs)
            loss, others = loss_and_others(returned)
            call_outputs.append(others)
            # each answer gets an equal share, so that the caller's sum over answers is the loss
            return (loss * (target.shape[0] / len(answers.log_probs))).expand(len(answers.log_probs))

        ref_model = reference_of(use_ref_model, ref_input, ref_weight, ref_bias)

        def loss_of(x, weight, bias):
            return unpaired_preference_loss(
                x, weight, target, preference_labels, bias, formula, average_log_prob=average_log_prob,
                ignore_index=ignore_index, **ref_model,
            )  # fmt: skip

        loss, *others = keep_gradients(ctx, loss_of, _input, weight, bias)
        return loss, (*others[:4], *join_results(call_outputs))
