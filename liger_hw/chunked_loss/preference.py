"""Preference losses as the modules of `liger_kernel.chunked_loss`. Their `forward` returns (loss, metrics).

The functions in `functional` have the same arguments; `liger_hw.losses.preference` documents them.
"""

from liger_hw.chunked_loss import functional
from liger_hw.losses.options import OptionsModule


class LigerFusedLinearDPOLoss(OptionsModule):
    """DPO and the other pair losses of `PAIR_LOSSES`; liger_kernel lacks "ipo", "aot" and "aot_pair".

    forward takes hidden states (2B, T, H), chosen answers before rejected ones, and the shifted labels (2B, T).
    It returns (loss, (chosen_logps, rejected_logps, chosen_logits_mean, rejected_logits_mean, nll_loss, chosen_rewards,
    rejected_rewards)).

    Args:
        alpha: weight of the NLL if `compute_nll_loss`.
        label_smoothing: as in `preference_loss`, but "sigmoid" ignores it, as liger_kernel does; use "robust" or CPO
            for smoothing. "bco_pair" has `delta` 0, as in liger_kernel.
        use_ref_model: False ignores the reference model.
        discopop_tau: `tau` of "discopop".

    Raises:
        ValueError: an unknown loss type, or a `label_smoothing` out of range for "exo_pair" or "robust".
    """

    def __init__(
        self, ignore_index=-100, beta=0.1, alpha=1.0, compute_nll_loss=False, compiled=True, use_ref_model=True,
        average_log_prob=False, chunk_size=1, loss_type="sigmoid", label_smoothing=0.0, discopop_tau=0.05,
    ):  # fmt: skip
        super().__init__(locals())
        functional.check_dpo_options(loss_type, label_smoothing)

    def forward(self, lin_weight, _input, target, bias=None, ref_input=None, ref_weight=None, ref_bias=None):
        return functional.liger_fused_linear_dpo(
            _input, lin_weight, target, bias, ref_input, ref_weight, ref_bias, **self.options
        )


class LigerFusedLinearCPOLoss(OptionsModule):
    """CPO: DPO without a reference, with the NLL. Outputs as `LigerFusedLinearDPOLoss`."""

    def __init__(
        self, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True,
        average_log_prob=False, chunk_size=1,
    ):  # fmt: skip
        super().__init__(locals())

    def forward(self, lin_weight, _input, target, bias=None):
        return functional.liger_fused_linear_cpo(_input, lin_weight, target, bias, **self.options)


class LigerFusedLinearSimPOLoss(OptionsModule):
    """SimPO, of averaged log-probabilities. Outputs as `LigerFusedLinearDPOLoss`."""

    def __init__(
        self, ignore_index=-100, beta=0.1, alpha=1.0, label_smoothing=0.0, compute_nll_loss=True, compiled=True,
        gamma=0.5, chunk_size=1,
    ):  # fmt: skip
        super().__init__(locals())

    def forward(self, lin_weight, _input, target, bias=None):
        return functional.liger_fused_linear_simpo(_input, lin_weight, target, bias, **self.options)


class LigerFusedLinearORPOLoss(OptionsModule):
    """ORPO, of averaged log-probabilities. Outputs as `LigerFusedLinearDPOLoss`, and two more.
    They are log_odds_ratio (mean log-sigmoid of the log odds ratio) and log_odds_chosen (its mean)."""

    def __init__(self, ignore_index=-100, beta=0.1, compute_nll_loss=True, compiled=True, chunk_size=1):
        super().__init__(locals())

    def forward(self, lin_weight, _input, target, bias=None, nll_target=None):
        return functional.liger_fused_linear_orpo(
            _input, lin_weight, target, bias, nll_target=nll_target, **self.options
        )


class LigerFusedLinearKTOLoss(OptionsModule):
    """KTO. Outputs: (loss, (chosen_X_sum, rejected_X_sum for X = logps, logits, rewards)).
    `forward` takes the input first."""

    def __init__(
        self, ignore_index=-100, beta=0.1, compiled=True, use_ref_model=False, average_log_prob=False, chunk_size=1
    ):
        super().__init__(locals())

    def forward(
        self, _input, lin_weight, target, bias=None, preference_labels=None, ref_input=None, ref_weight=None,
        ref_bias=None, kl=None,
    ):  # fmt: skip
        return functional.liger_fused_linear_kto(
            _input, lin_weight, target, preference_labels, bias, ref_input, ref_weight, ref_bias, kl, **self.options
        )
