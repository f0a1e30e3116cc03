"""Define liger_kernel's autograd functions of `chunked_loss`; `apply` calls ours."""

from liger_hw.chunked_loss import functional


class LigerFusedLinearCPOFunction:
    """`liger_fused_linear_cpo`."""

    apply = staticmethod(functional.liger_fused_linear_cpo)


class LigerFusedLinearCosineSimilarityFunction:
    """`liger_fused_linear_cosine`."""

    apply = staticmethod(functional.liger_fused_linear_cosine)


class LigerFusedLinearDPOFunction:
    """`liger_fused_linear_dpo`."""

    apply = staticmethod(functional.liger_fused_linear_dpo)


class LigerFusedLinearGRPOFunction:
    """`liger_fused_linear_grpo`."""

    apply = staticmethod(functional.liger_fused_linear_grpo)


class LigerFusedLinearJSDFunction:
    """`liger_fused_linear_jsd` of `chunked_loss`, distillation with hard labels; not that of `ops`."""

    apply = staticmethod(functional.liger_fused_linear_jsd)


class LigerFusedLinearKTOFunction:
    """`liger_fused_linear_kto`."""

    apply = staticmethod(functional.liger_fused_linear_kto)


class LigerFusedLinearORPOFunction:
    """`liger_fused_linear_orpo`."""

    apply = staticmethod(functional.liger_fused_linear_orpo)


class LigerFusedLinearSimPOFunction:
    """`liger_fused_linear_simpo`."""

    apply = staticmethod(functional.liger_fused_linear_simpo)
