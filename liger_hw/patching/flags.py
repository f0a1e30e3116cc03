"""The flags of `patch`: which parts of a model may be replaced."""

from liger_hw.checks import check
from liger_hw.spelling import check_known

FLAGS = {
    "rope": True,
    "rms_norm": True,
    "layer_norm": True,
    "swiglu": True,
    "geglu": True,
    "relu_squared": True,
    "cross_entropy": False,
    "fused_linear_cross_entropy": True,
}
LOSSES = ("cross_entropy", "fused_linear_cross_entropy")
FLAG_OF = {  # op or activation without a flag of its name -> its flag
    "clamped_swiglu": "swiglu", "silu": "swiglu",
    "gelu_tanh": "geglu", "gelu_erf": "geglu", "gelu_new": "geglu", "quick_gelu": "geglu",
}  # fmt: skip


def check_flags(flags):
    """Return `FLAGS` with the caller's changes.

    Raises:
        ValueError: a flag is unknown or of another kind, or both losses are asked for.
    """
    for name in flags:
        check_known("flag", name, FLAGS)
    for name, value in flags.items():  # Axolotl gives None for what its user left out
        check(value is None or isinstance(value, bool), name, repr(value), "True, False, or None for False")
    flags = FLAGS | flags
    both = flags["cross_entropy"] and flags["fused_linear_cross_entropy"]
    check(not both, "cross_entropy", "True with fused_linear_cross_entropy=True", "one of the two")
    return flags


def flag_of(match):
    """The name of the flag that switches a match off; a name that is no flag where none does."""
    part = dict(match.options).get("activation", match.op)
    return FLAG_OF.get(part, part)
