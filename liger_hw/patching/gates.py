"""List the gated units of MLPs and experts, and the module attributes that they read."""

from liger_hw.kernels.mlp.clamped_glu import clamped_swiglu
from liger_hw.kernels.mlp.glu import ACTIVATIONS, GELU, activate, geglu, swiglu

GATED_OPS = {op.__name__: op for op in (swiglu, geglu, clamped_swiglu)}
WITHOUT_NUMBERS = ((swiglu, {}), *((geglu, {"approximate": approximate}) for approximate in GELU))
HALVES = {  # order of gate and up in a fused projection -> function that splits them
    "gate first": lambda x: x.chunk(2, dim=-1),
    "up first": lambda x: x.chunk(2, dim=-1)[::-1],
    "interleaved": lambda x: (x[..., ::2], x[..., 1::2]),
}
PROBE_LIMIT, PROBE_ALPHA = 0.5, 1.3  # with these values a clamp and its slope change the result of a probe


def candidates(module):
    """Yield every unit that `module` may compute.

    Each is (op, options, role -> attribute, role -> value in a probe), with the roles "limit" and "alpha".
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
    """Read the numbers that `clamped_swiglu` takes from attributes of `module`, at every call."""
    return {role: getattr(module, names[role]) for role in ("limit", "alpha") if role in names}


def takes_numbers(module, names):
    """Tell whether `clamped_swiglu` takes the numbers of `module`, which a program may have changed."""
    given = numbers(module, names)
    return all(type(number) in (int, float) for number in given.values()) and given["limit"] > 0


def activation_name(op, options):
    """Return the name in `ACTIVATIONS` that the unit named `op` applies to its gate."""
    if "activation" in options:
        return options["activation"]
    return GELU[options["approximate"]] if op == "geglu" else "silu"
