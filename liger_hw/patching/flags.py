"""Define the flags of `patch`, which allow it to replace parts of a model."""

from liger_hw.checks import check
from liger_hw.spelling import check_known

FLAGS = dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu", "relu_squared", "lora"), True)
FLAGS |= {"cross_entropy": False, "fused_linear_cross_entropy": True}
LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
FLAG_OF = {  # op or activation whose flag has another name -> that flag
    "clamped_swiglu": "swiglu", "silu": "swiglu", "lora_linear": "lora", "experts with LoRA": "lora",
    "l2_norm": "rms_norm", "gelu_tanh": "geglu", "gelu_erf": "geglu", "gelu_new": "geglu", "quick_gelu": "geglu",
}  # fmt: skip


def check_flags(flags):
    """Return `FLAGS` with the caller's changes.

    Raises:
        ValueError: a flag is unknown or not True, False or None, or both losses are True.
    """
    for name in flags:
        check_known("flag", name, [*FLAGS, "activations"])  # a parameter of its own, which does not get here
    for name, value in flags.items():  # Axolotl passes None for a flag that its user left out
        check(value is None or isinstance(value, bool), name, repr(value), "True, False, or None for False")
    flags = FLAGS | flags
    both = flags["cross_entropy"] and flags["fused_linear_cross_entropy"]
    check(not both, "cross_entropy", "True with fused_linear_cross_entropy=True", "one of the two")
    return flags


def flag_of(match):
    """Return the flag that controls a match, or the op's name where no flag does."""
    if match.kind == "gated_norm":
        return "rms_norm"
    part = dict(match.options).get("activation", match.op)
    return FLAG_OF.get(part, part)
