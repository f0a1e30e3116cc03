"""Define liger_kernel's autograd functions of `chunked_loss`; `apply` calls ours.

Its `LigerFusedLinearJSDFunction` is distillation with hard labels, not the function of this name in `ops`.
"""

from liger_hw.chunked_loss import functional
from liger_hw.stand_in.function_class import function_class

# loss -> the function that computes it, the base class of own losses of its kind
LOSSES_BY_NAME = {
    "CPO": ("cpo", "Preference"), "CosineSimilarity": ("cosine", "Distillation"), "DPO": ("dpo", "Preference"),
    "GRPO": ("grpo", "PPO"), "JSD": ("jsd", "Distillation"), "KTO": ("kto", "UnpairedPreference"),
    "ORPO": ("orpo", "Preference"), "SimPO": ("simpo", "Preference"),
}  # fmt: skip
BASE_ADVICE = "call its apply, or derive from LigerFusedLinear{}Base and define its loss function"


def _classes():
    for loss, (ours, base) in LOSSES_BY_NAME.items():
        name = f"LigerFusedLinear{loss}Function"
        yield name, function_class(getattr(functional, f"liger_fused_linear_{ours}"), name, BASE_ADVICE.format(base))


globals().update(_classes())
