"""A module becomes faster by changing its class, and plain again by changing it back.

The new class is a subclass whose forward calls an op; parameters, buffers, hooks and names stay where they are. So a
copy of a patched module computes with the copy's weights, which a closure on `forward` would not, and nothing outside
that one model changes.
"""

import functools

import torch

from liger_hw._torch import is_plain
from liger_hw.kernels.clamped_glu import clamped_swiglu
from liger_hw.kernels.glu import GELU, activate, geglu, swiglu, unit
from liger_hw.kernels.layer_norm import layer_norm
from liger_hw.kernels.rms_norm import rms_norm
from liger_hw.patching import experts, gated_norm, mlp, rotary
from liger_hw.patching.recognition import HALVES

NORMS = {op.__name__: op for op in (rms_norm, layer_norm)}
WIDE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
GLUS = {op.__name__: op for op in (swiglu, geglu, clamped_swiglu)}


def swap(module, match):
    """Give `module` the subclass of its class that computes with `match`'s op."""
    module.__class__ = patched_class(type(module), match)


def restore(module):
    """Give a swapped `module` its own class back."""
    module.__class__ = type(module).liger_original


def is_swapped(module):
    return "liger_original" in vars(type(module))


@functools.cache
def patched_class(original, match):
    """The subclass of `original` that computes with `match`'s op: one per class and match in a process.

    Its name contains the original's, which other libraries look for. It has the same `__module__`, and pickles as the
    original class and the match, to come back patched.
    """
    members = MEMBERS[match.kind](original, match)
    name = members.pop("__name__", f"Liger{original.__name__}")
    identity = {"__module__": original.__module__, "__qualname__": name, "__doc__": original.__doc__}
    cls = type(name, (original,), identity | members | {"liger_original": original, "liger_match": match})
    cls.__reduce_ex__ = functools.partialmethod(_reduce, cls)
    return cls


def _reduce(self, cls, protocol):
    if type(self) is not cls:  # a subclass made by somebody else, FSDP for one, has its own way
        return super(cls, self).__reduce_ex__(protocol)
    _, _, *state = super(cls, self).__reduce_ex__(max(protocol, 2))
    return _rebuild, (cls.liger_original, cls.liger_match), *state


def _rebuild(original, match):
    return object.__new__(patched_class(original, match))


def _norm(original, match):
    op, options, names = NORMS[match.op], dict(match.options), dict(match.names)
    weight_name, bias_name, eps_name = names["weight"], names.get("bias"), names.get("eps")
    written_eps = options.pop("eps", None)
    # torch's own layers run in fp32 under autocast; the others are written out in operations that it leaves alone
    widens_under_autocast = original.__module__.startswith("torch.nn")
    narrow, wide = match.narrow, match.wide
    offset = options.pop("offset", None) if op is layer_norm else None
    derived = original is not torch.nn.LayerNorm and issubclass(original, torch.nn.LayerNorm)

    def forward(self, *args, **kwargs):
        if len(args) != 1 or kwargs or derived and torch.is_autocast_enabled(args[0].device.type):
            return original.forward(self, *args, **kwargs)
        x = args[0]
        weight = getattr(self, weight_name) if weight_name else None
        if weight is not None and weight.dtype != x.dtype:
            if not (wide if torch.promote_types(x.dtype, weight.dtype) == x.dtype else narrow):
                return original.forward(self, x)
        if widens_under_autocast and x.dtype != torch.float32 and torch.is_autocast_enabled(x.device.type):
            return original.forward(self, x)
        eps = getattr(self, eps_name) if eps_name else written_eps
        if bias_name:
            weight = weight if offset is None else weight + offset
            return op(x, weight, getattr(self, bias_name), eps, **options)
        return op(x, weight, eps=eps, **options)

    return {"forward": forward}


def _gated_norm(original, match):
    names, form = dict(match.names), gated_norm.FORMS[dict(match.options)["gate"]]
    weight_name, eps_name, group_name, gateless = names["weight"], names["eps"], names["group"], match.narrow

    def forward(self, *args, **kwargs):
        gate = args[1] if len(args) == 2 else kwargs.get("gate")
        weight = getattr(self, weight_name)
        alike = len(args) in (1, 2) and set(kwargs) <= {"gate"} and weight.dtype == args[0].dtype
        if not alike or (not gateless if gate is None else gate.shape != args[0].shape or gate.dtype != weight.dtype):
            return original.forward(self, *args, **kwargs)
        group = getattr(self, group_name) if group_name else weight.shape[0]
        return form(args[0], gate, weight, getattr(self, eps_name), group)

    return {"forward": forward}


def _mlp(original, match):
    names, options, pinned = dict(match.names), dict(match.options), match.pinned
    clamped = GLUS[match.op] if match.op == "clamped_swiglu" else None
    activation = options.get("activation") or GELU.get(options.get("approximate"), "silu")
    down_name, dropout_name = names["down"], names.get("dropout_before")

    def forward(self, *args, **kwargs):
        if len(args) != 1 or kwargs or any(getattr(self, name) != value for name, value in pinned):
            return original.forward(self, *args, **kwargs)
        down = getattr(self, down_name)
        if _in_another_dtype(down, args[0]):  # T5 keeps its last projection in fp32, and casts what it projects
            return original.forward(self, *args)
        if clamped:
            return mlp.compute(self, names, args[0], clamped, options)
        gate, up = mlp.gate_and_up(self, names, args[0])
        if dropout_name and _drops(self, dropout_name):
            y = down(mlp.dropped(self, dropout_name, unit(gate, up, activation, in_place=True)))
        else:
            y = mlp.project_down(down, gate, up, activation)
        return mlp.after_down(self, names, y)

    return {"forward": forward}


def _in_another_dtype(projection, x):
    """Whether the projection's weight is no quantised one and has not the dtype of `x`, and autocast is not at work."""
    dtype = getattr(getattr(projection, "weight", None), "dtype", x.dtype)
    return dtype != x.dtype and dtype in WIDE and not torch.is_autocast_enabled(x.device.type)


def _activation(original, match):
    activation = dict(match.options)["activation"]

    def forward(self, *args, **kwargs):
        if len(args) != 1 or kwargs or not args[0].is_floating_point() or args[0].ndim == 0:
            return original.forward(self, *args, **kwargs)
        return activate(args[0], activation)

    return {"forward": forward}


def _drops(module, name):
    found = getattr(module, name)
    return module.training and (found.p if hasattr(found, "p") else found) != 0


def _rope(original, match):
    found = rotary.rotary_functions(original)
    replaced = {name: rotary.replacement(found[name], rotation) for name, rotation in match.names}
    return rotary.with_rotations(original, replaced)


def _sorted_experts(original, match):
    op, options, names = GLUS[match.op], {"in_place": True, **dict(match.options)}, dict(match.names)

    def forward(self, *args, **kwargs):
        weights = [getattr(self, names[role]) for role in ("first", "second")]
        if len(args) != 1 or kwargs or not is_plain(*args, *weights):
            return original.forward(self, *args, **kwargs)
        return mlp.sorted_experts(args[0], *weights, op, options)

    return {"forward": forward}


def _experts(original, match):
    options, names = dict(match.options), dict(match.names)

    def forward_of(activation):
        def forward(self, *args, **kwargs):
            if len(args) == 3 and not kwargs and experts.computes(self, args[0]):
                return experts.mixture(self, *args, names["split"] == "up first", activation)
            return original.forward(self, *args, **kwargs)

        return forward

    if "activation" in options:
        return {"forward": forward_of(options["activation"])}
    op = GLUS[match.op]
    fused_row = match.op == "clamped_swiglu" and names["split"] != "up first"  # it takes the row as it is
    interleaved, split = names["split"] == "interleaved", HALVES[names["split"]]

    def _apply_gate(self, gate_up_out):
        if fused_row:
            return op(gate_up_out, interleaved=interleaved, **options, **mlp.numbers(self, names))
        gate, up = split(gate_up_out)
        more = {"in_place": gate.stride(-1) == 1} if match.op != "clamped_swiglu" else mlp.numbers(self, names)
        return op(gate, up, **options, **more)

    if match.op == "clamped_swiglu" or interleaved:
        return {"_apply_gate": _apply_gate}
    activation = GELU[options["approximate"]] if match.op == "geglu" else "silu"
    return {"_apply_gate": _apply_gate, "forward": forward_of(activation)}


MEMBERS = {
    "norm": _norm,
    "gated_norm": _gated_norm,
    "mlp": _mlp,
    "activation": _activation,
    "experts": _experts,
    "sorted_experts": _sorted_experts,
    "rope": _rope,
}  # kind -> members of the subclass; loss.py adds the parts of a loss
