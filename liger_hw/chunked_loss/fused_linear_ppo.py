"""Base class for a program's own policy losses, with liger_kernel's interface."""

import torch

from liger_hw.chunked_loss.custom_loss import CustomLoss, join_results, keep_gradients
from liger_hw.chunked_loss.functional import items_per_rank, policy_options, reference_of
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax
from liger_hw.losses.sequences import sequence_loss

NO_TOKEN = -1  # no token has this value: the loss gets the mask


class LigerFusedLinearPPOBase(CustomLoss):
    """Base class: define `ppo_loss_fn`, and call `super().forward(cls=cls, ctx=ctx, ...)` in `forward`."""

    bias_at = 5

    @staticmethod
    def ppo_loss_fn(per_token_logps, attention_mask, advantages, full_attention_mask, **options):
        """Compute k sequences' share of the loss and the metrics; `forward` sums both.

        Args:
            per_token_logps, attention_mask: (k, T) of k sequences. advantages: (k,) or (k, T).
            full_attention_mask: (B, T) of all sequences, for the divisor.
            options: ref_per_token_logps, old_per_token_logps and vllm_is_ratio of the k sequences or None, and the
                options of `forward`.
        """
        raise NotImplementedError("ppo_loss_fn: a derived class defines it")

    @staticmethod
    def forward(
        cls, ctx, _input, weight, selected_token_ids, attention_mask, advantages, bias=None, ref_per_token_logps=None,
        old_per_token_logps=None, ref_input=None, ref_weight=None, ref_bias=None, epsilon_low=0.2, epsilon_high=0.2,
        beta=0.04, loss_type="dapo", max_completion_length=None, importance_sampling_level="token", temperature=1.0,
        compiled=True, use_ref_model=False, chunk_size=1, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05,
        vllm_is_ratio=None, delta=None, use_bias_correction_kl=False, vespo_k_pos=2.0, vespo_lambda_pos=3.0,
        vespo_k_neg=3.0, vespo_lambda_neg=2.0, num_items_in_batch=None,
    ):  # fmt: skip
        """Compute (loss, metrics) from hidden states (B, T, H), and the gradients.

        chunk_size and compiled have no effect.
        """
        options = policy_options(locals()) | {"num_items_in_batch": num_items_in_batch}
        del options["temperature"]  # the log-probabilities have it
        shape = selected_token_ids.shape
        linear = {"temperature": temperature, "ignore_index": NO_TOKEN}
        if use_ref_model and ref_per_token_logps is None:
            reference_of(use_ref_model, ref_input, ref_weight, ref_bias)
            ref_per_token_logps = fused_linear_selective_log_softmax(
                ref_input.reshape(*shape, -1), ref_weight, selected_token_ids, ref_bias, **linear
            )
        rows = {
            "ref_per_token_logps": ref_per_token_logps, "old_per_token_logps": old_per_token_logps,
            "vllm_is_ratio": vllm_is_ratio,
        }  # fmt: skip
        rows = {name: row if row is None else row.detach() for name, row in rows.items()}
        advantages, call_metrics = advantages.detach(), []

        def formula(log_probs, entropy, groups):
            part = {name: row if row is None else row[groups] for name, row in rows.items()}
            loss, metrics = cls.ppo_loss_fn(
                log_probs[0], attention_mask[groups], advantages[groups], attention_mask, **part, **options
            )
            call_metrics.append([torch.as_tensor(metric).detach() for metric in metrics])
            return loss

        def loss_of(x, weight, bias):
            return sequence_loss(formula, x.reshape(*shape, -1), weight, selected_token_ids, bias, **linear)

        loss, *_ = keep_gradients(ctx, loss_of, _input, weight, bias)
        return loss, tuple(join_results(call_metrics))

    @staticmethod
    def _compute_dapo_normalizer(attention_mask, num_items_in_batch=None):
        """Return the divisor of the sum of this rank's token losses."""
        return items_per_rank(attention_mask, num_items_in_batch)

    @staticmethod
    def chunk_forward(input_chunk, weight, selected_token_ids, bias=None, temperature=1.0):
        """Compute the log-probabilities (k, T) of tokens (k, T) from hidden states (k, T, H)."""
        return fused_linear_selective_log_softmax(
            input_chunk, weight, selected_token_ids, bias, temperature=temperature, ignore_index=NO_TOKEN
        )
