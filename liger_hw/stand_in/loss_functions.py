"""Define liger_kernel's autograd functions of `chunked_loss`; `apply` calls ours."""

from liger_hw.chunked_loss import functional
from liger_hw.stand_in.served import Served, own_loss


class LigerFusedLinearCPOFunction(metaclass=Served):
    """`liger_fused_linear_cpo`."""

    advice = own_loss("LigerFusedLinearPreferenceBase")
    apply = staticmethod(functional.liger_fused_linear_cpo)


class LigerFusedLinearCosineSimilarityFunction(metaclass=Served):
    """`liger_fused_linear_cosine`."""

    advice = own_loss("LigerFusedLinearDistillationBase")
    apply = staticmethod(functional.liger_fused_linear_cosine)


class LigerFusedLinearDPOFunction(metaclass=Served):
    """`liger_fused_linear_dpo`."""

    advice = own_loss("LigerFusedLinearPreferenceBase")
    apply = staticmethod(functional.liger_fused_linear_dpo)


class LigerFusedLinearGRPOFunction(metaclass=Served):
    """`liger_fused_linear_grpo`."""

    advice = own_loss("LigerFusedLinearPPOBase")
    apply = staticmethod(functional.liger_fused_linear_grpo)


class LigerFusedLinearJSDFunction(metaclass=Served):
    """`liger_fused_linear_jsd` of `chunked_loss`, distillation with hard labels; not that of `ops`."""

    advice = own_loss("LigerFusedLinearDistillationBase")
    apply = staticmethod(functional.liger_fused_linear_jsd)


class LigerFusedLinearKTOFunction(metaclass=Served):
    """`liger_fused_linear_kto`."""

    advice = own_loss("LigerFusedLinearUnpairedPreferenceBase")
    apply = staticmethod(functional.liger_fused_linear_kto)


class LigerFusedLinearORPOFunction(metaclass=Served):
    """`liger_fused_linear_orpo`."""

    advice = own_loss("LigerFusedLinearPreferenceBase")
    apply = staticmethod(functional.liger_fused_linear_orpo)


class LigerFusedLinearSimPOFunction(metaclass=Served):
    """`liger_fused_linear_simpo`."""

    advice = own_loss("LigerFusedLinearPreferenceBase")
    apply = staticmethod(functional.liger_fused_linear_simpo)
