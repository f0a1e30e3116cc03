"""The gated units of MLPs and experts, and the numbers that each may take from attributes of its module."""

from liger_hw.kernels.clamped_glu import clamped_swiglu
from liger_hw.kernels.glu import ACTIVATIONS, GELU, activate, geglu, swiglu

OPS = {op.__name__: op for op in (swiglu, geglu, clamped_swiglu)}
WITHOUT_NUMBERS = ((swiglu, {}), *((geglu, {"approximate": approximate}) for approximate in GELU))
HALVES = {  # where in a fused projection gate and up are
    "gate first": lambda x: x.chunk(2, dim=-1),
    "up first": lambda x: x.chunk(2, dim=-1)[::-1],
    "interleaved": lambda x: (x[..., ::2], x[..., 1::2]),
}
PROBE_LIMIT, PROBE_ALPHA = 0.5, 1.3  # values at which a clamp and its slope show


def candidates(module):
    """(op, options, role -> attribute, role -> its value in a probe) of every unit that `module` may compute.

    The roles are "limit" and "alpha" of `clamped_swiglu`, by attributes of such names.
    """
    for op, options in (*WITHOUT_NUMBERS, *((activate, {"activation": name}) for name in ACTIVATIONS)):
        yield op, options, {}, {}
    positive = [name for name, value in vars(module).items() if type(value) in (int, float) and value > 0]
    for limit in (name for name in positive if "limit" in name):
        yield clamped_swiglu, {}, {"limit": limit}, {"limit": PROBE_LIMIT}
        for alpha in (name for name in positive if "alpha" in name):
            for offset in (1.0, 0.0):
                attributes = {"limit": limit, "alpha": alpha}
                yield clamped_swiglu, {"offset": offset}, attributes, {"limit": PROBE_LIMIT, "alpha": PROBE_ALPHA}


def numbers(module, names):
    """The numbers that `clamped_swiglu` takes from attributes of `module`: read at every call."""
    return {role: getattr(module, names[role]) for role in ("limit", "alpha") if role in names}


def activation_name(op, options):
    """The name in `ACTIVATIONS` of what a unit without numbers does to its gate; `op` is the unit's name."""
    if "activation" in options:
        return options["activation"]
    return GELU[options["approximate"]] if op == "geglu" else "silu"
