"""Define liger_kernel's autograd functions of `chunked_loss`; `apply` calls ours.

Its `LigerFusedLinearJSDFunction` is distillation with hard labels, not the function of this name in `ops`.
"""

from liger_hw.chunked_loss import functional
from liger_hw.stand_in.function_class import function_class

LOSSES = {"CPO": "cpo", "CosineSimilarity": "cosine", "DPO": "dpo", "GRPO": "grpo", "JSD": "jsd", "KTO": "kto",
          "ORPO": "orpo", "SimPO": "simpo"}  # fmt: skip

globals().update(
    {
        (name := f"LigerFusedLinear{loss}Function"): function_class(
            getattr(functional, f"liger_fused_linear_{ours}"), name
        )
        for loss, ours in LOSSES.items()
    }
)
