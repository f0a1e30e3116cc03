"""Which op computes what a module computes: proved by running both, never guessed from a name.

The own forward of a probe (see `probing`) and an op's reference run on the same random rows in fp32 and in bf16; a
match is equality of every bit and of the dtype (LayerNorm: of all but the order of fp32 sums).
"""

import dataclasses
import functools
import itertools

import torch

from liger_hw.kernels.clamped_glu import clamped_swiglu
from liger_hw.kernels.glu import ACTIVATIONS, activate, geglu, swiglu
from liger_hw.kernels.layer_norm import layer_norm
from liger_hw.kernels.rms_norm import CASTING_MODES, rms_norm
from liger_hw.patching import gated_norm, mlp, probing, rotary
from liger_hw.patching.probing import DTYPES, TELLING, Match

WRITTEN_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # of norms that have no attribute for it
PROBE_WIDTH = 64  # of a norm without a weight, or with one whose memory is elsewhere (ZeRO-3)
HIDDEN, INTERMEDIATE = 32, 48  # of the probe of a gated MLP
GLU_OPTIONS = ((swiglu, {}), (geglu, {"approximate": "tanh"}), (geglu, {"approximate": "none"}))
WRITTEN_OUT = ("gelu_new", "quick_gelu", "relu_squared")  # activations that torch has not as one operation
HALVES = {  # where in a fused projection gate and up are
    "gate first": lambda x: x.chunk(2, dim=-1),
    "up first": lambda x: x.chunk(2, dim=-1)[::-1],
    "interleaved": lambda x: (x[..., ::2], x[..., 1::2]),
}


def match_norm(module):
    """The `Match` of a module that scales rows to unit size, or None.

    RMSNorm with any rounding order, with `weight` or `1 + weight` or none; LayerNorm with or without weight and bias.
    """
    if type(module) is torch.nn.LayerNorm and len(module.normalized_shape) == 1:
        return probing.match("norm", layer_norm, {}, {"weight": "weight", "bias": "bias", "eps": "eps"})
    if isinstance(module, torch.nn.LayerNorm):
        return _match_layer_norm(module)
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if module._modules or len(parameters) > 1 or any(p.ndim != 1 for p in parameters.values()):
        return None
    if len(probing.inputs_of(module)) != 1:  # a gate that may be there, for one
        return None
    weight = next(iter(parameters), None)
    width = (parameters[weight].numel() if weight else _normalized_width(module)) or PROBE_WIDTH
    modes = itertools.product(CASTING_MODES if weight else CASTING_MODES[:1], (0.0, 1.0) if weight else (0.0,))
    ops = [(rms_norm, {"casting_mode": mode, "offset": offset}) for mode, offset in modes] + [(layer_norm, {})]
    absent = {name: p for name, p in module._parameters.items() if p is None}
    floats = [name for name, v in vars(module).items() if type(v) is float]
    for (op, options), eps in itertools.product(ops, floats or WRITTEN_EPS):
        generator = torch.Generator().manual_seed(0)
        attribute = {eps: 0.05} if floats else {}

        def original(x, w, attribute=attribute):
            return type(module).forward(
                probing.clone(module, absent | ({weight: w} if weight else {}), {}, _buffers={}, **attribute), x
            )

        def replacement(x, w, op=op, options=options, eps=eps):
            return op.reference(x, w if weight else None, eps=0.05 if floats else eps, **options)

        def case(x_dtype, w_dtype, generator=generator, eps=eps):
            scale = 3 if floats else eps**0.5  # where an eps that is written into the code shows
            x = scale * probing.random_rows(generator, 7, width, dtype=x_dtype)
            return x, torch.nn.Parameter(probing.random_rows(generator, width, dtype=w_dtype))

        # torch's own kernels take the sum of squares in another order
        exact = op is rms_norm and type(module) is not torch.nn.RMSNorm
        if probing.agrees(original, replacement, [case(dtype, dtype) for dtype in DTYPES], exact):
            narrow, wide = (
                probing.agrees(original, replacement, [case(*pair)], exact) for pair in (DTYPES[::-1], DTYPES)
            )
            names = {"weight": weight, "bias": None} if op is layer_norm else {"weight": weight}
            if floats:
                return probing.match("norm", op, options, names | {"eps": eps}, narrow, wide)
            return probing.match("norm", op, options | {"eps": eps}, names, narrow, wide)
    return None


def _match_layer_norm(module):
    """Of a class that derives from torch's: with its weight, or with 1 + weight."""
    if len(module.normalized_shape) != 1 or module.weight is None or module._modules:
        return None
    width = module.weight.numel() or PROBE_WIDTH
    parts = [name for name in ("weight", "bias") if getattr(module, name, None) is not None]

    def original(x, *parameters):
        absent = dict.fromkeys(("weight", "bias"))
        return type(module).forward(probing.clone(module, absent | dict(zip(parts, parameters)), {}, eps=0.05), x)

    def case(dtype):
        generator = torch.Generator().manual_seed(0)
        rows = [3 * probing.random_rows(generator, 7, width, dtype=dtype)]
        return rows + [torch.nn.Parameter(probing.random_rows(generator, width, dtype=dtype)) for _ in parts]

    for offset in (0.0, 1.0):

        def replacement(x, w, b=None, offset=offset):
            return layer_norm.reference(x, w + offset, b, 0.05)

        if probing.agrees(original, replacement, [case(dtype) for dtype in DTYPES], exact=False):
            names = {"weight": "weight", "bias": "bias", "eps": "eps"}
            return probing.match("norm", layer_norm, {"offset": offset} if offset else {}, names)
    return None


def match_gated_norm(module):
    """The `Match` of an RMSNorm of x with a gate: one of `gated_norm.FORMS`; or None."""
    weight = next((name for name, p in module._parameters.items() if p is not None), None)
    own = weight is not None and len(module._parameters) == 1 and module._parameters[weight].ndim == 1
    if not own or module._modules or len(probing.inputs_of(module)) != 2:
        return None
    width = module._parameters[weight].numel() or PROBE_WIDTH
    group = getattr(module, "group_size", width)
    floats = [name for name, value in vars(module).items() if type(value) is float]
    if type(group) is not int or group <= 0 or width % group:
        return None
    for (name, form), eps in itertools.product(gated_norm.FORMS.items(), floats):

        def original(x, gate, w, eps=eps):
            return type(module).forward(probing.clone(module, {weight: w}, {}, **{eps: 0.05}), x, gate)

        def replacement(x, gate, w, form=form):
            return form(x, gate, w, 0.05, group, rms_norm.reference, swiglu.reference)

        def case(dtype, gated=True):
            generator = torch.Generator().manual_seed(0)
            x, gate = (3 * probing.random_rows(generator, 2, 7, width, dtype=dtype) for _ in range(2))
            return x, gate if gated else None, torch.nn.Parameter(probing.random_rows(generator, width, dtype=dtype))

        if probing.agrees(original, replacement, [case(dtype) for dtype in DTYPES]):
            alone = probing.agrees(original, replacement, [case(dtype, False) for dtype in DTYPES])
            names = (
                ("eps", eps),
                ("group", "group_size" if hasattr(module, "group_size") else None),
                ("weight", weight),
            )
            return Match("gated_norm", "rms_norm", (("gate", name),), names, narrow=alone)
    return None


def _normalized_width(module):
    shape = getattr(module, "normalized_shape", ())
    return shape[0] if isinstance(shape, (tuple, list, torch.Size)) and len(shape) == 1 else 0


def _linear(generator, rows, cols, bias, dtype):
    linear = torch.nn.Linear(cols, rows, bias=bias, device="meta")
    for name, p in list(linear._parameters.items()):
        if p is not None:
            linear._parameters[name] = torch.nn.Parameter(probing.random_rows(generator, *p.shape, dtype=dtype) / 4)
    return linear


def is_projection(module):
    """Whether `module` is a linear layer of some kind, to look at: its in and out features, or Conv1D's."""
    return all(hasattr(module, name) for name in ("in_features", "out_features")) or (
        type(module).__name__ == "Conv1D" and hasattr(module, "nf")
    )


def match_mlp(module):
    """The `Match` of an MLP, or None: down(f(gate(x)) * up(x)) with f of `ACTIVATIONS`, clamped or not, or without up.

    Gate and up may be two projections or the halves of one, the gate and the result scaled by an attribute, the product
    or the result dropped out. What the projections are made of does not matter (they may be quantised or carry
    adapters); their names do not either.
    """
    linears = {name: c for name, c in module.named_children() if is_projection(c)}
    others = {name: c for name, c in module.named_children() if name not in linears}
    owned = any(p is not None for p in module._parameters.values()) or module._buffers
    if len(linears) not in (2, 3) or owned or any(next(c.parameters(), None) is not None for c in others.values()):
        return None
    dropouts = [name for name, c in others.items() if "dropout" in type(c).__name__.lower()]
    floats = {name: value for name, value in vars(module).items() if type(value) is float}
    names = (*floats, *dropouts)
    each = {name: TELLING + i / (2 * len(names)) for i, name in enumerate(names)}  # alike, they would pass for another
    drops = {name: torch.nn.Dropout(each.pop(name)) for name in dropouts}
    for extras, order, gate in itertools.product(_extras(drops, floats), _roles(linears), _gates(module)):
        op, options, clamps, telling = gate
        if clamps and extras != {} or order.get("up", "") is None and op is not activate:
            continue
        values = floats if extras is None else each | {clamps[role]: value for role, value in telling.items()}
        order = order | (extras or {}) | clamps

        def clone(children, values=values):
            return probing.clone(module, {}, module._modules | drops | children, training=True, **values)

        def original(x, children, clone=clone):
            return type(module).forward(clone(children), x)

        def replacement(x, children, clone=clone, order=order, op=op, options=options):
            return mlp.compute(clone(children), order, x, op.reference, options)

        generator = torch.Generator().manual_seed(0)
        cases = [
            (
                3 * probing.random_rows(generator, 2, 5, HIDDEN, dtype=dtype),
                _projections(linears, order, dtype, generator),
            )
            for dtype in DTYPES
        ]
        if probing.agrees(original, replacement, cases):
            pinned = tuple(floats.items()) if extras is None else ()
            return dataclasses.replace(probing.match("mlp", op, options, order), pinned=pinned)
    return None


def _extras(drops, floats):
    """What an MLP may have beside its projections, as roles; None: as plain as its attributes are now."""
    yield {}
    drops = [*drops, *(name for name in floats if "dropout" in name)]
    for name in drops:
        yield from ({"dropout_before": name}, {"dropout_after": name})
    for before, after in itertools.product(drops, repeat=2):
        yield {"dropout_before": before, "dropout_after": after}
    for gate_scale, down_scale in itertools.permutations(floats, 2):
        yield {"gate_scale": gate_scale, "down_scale": down_scale}
    if floats:
        yield None


def _projections(linears, order, dtype, generator):
    """Small stand-ins for the projections of an MLP."""
    widths = {"gate": (INTERMEDIATE, HIDDEN), "up": (INTERMEDIATE, HIDDEN), "down": (HIDDEN, INTERMEDIATE)}
    if "up" not in order:
        widths["gate"] = (2 * INTERMEDIATE, HIDDEN)
    return {
        order[role]: _linear(generator, *widths[role], getattr(linears[order[role]], "bias", None) is not None, dtype)
        for role in widths
        if order.get(role)
    }


def _roles(linears):
    """Every way to give the projections of an MLP their parts."""
    if len(linears) == 3:
        return [dict(zip(("gate", "up", "down"), names)) for names in itertools.permutations(linears)]
    halves = {"up_first": False}, {"up_first": True}
    return [{"gate": g, "down": d} | up for g, d in itertools.permutations(linears) for up in (*halves, {"up": None})]


def match_activation(module):
    """The `Match` of an activation that is written out in operations, or None."""
    own = module._parameters or module._modules or module._buffers or type(module).__module__.startswith("torch.")
    if own or len(probing.inputs_of(module)) != 1:
        return None
    generator = torch.Generator().manual_seed(0)
    cases = [(3 * probing.random_rows(generator, 7, PROBE_WIDTH, dtype=dtype),) for dtype in DTYPES]
    for activation in WRITTEN_OUT:

        def original(x):
            return type(module).forward(probing.clone(module, {}, {}), x)

        def replacement(x, activation=activation):
            return activate.reference(x, activation)

        if probing.agrees(original, replacement, cases):
            return probing.match("activation", activate, {"activation": activation}, {})
    return None


@functools.cache
def match_rotation(function):
    """The rotation that a rotary function computes, if a replacement was proved to equal it; otherwise None."""

    def agrees(original, replacement, cases):
        def both(*args):
            found = original(*args)
            return tuple(found) if isinstance(found, (tuple, list)) else found

        return probing.agrees(both, replacement, cases)

    return rotary.rotation_of(function, agrees)


def match_rope(cls):
    """(Match, reason): of a class whose methods call rotary functions that the op computes, and why one is left alone.

    Match is None where there is none to replace, reason where none is left. A function is looked up where the method
    would find it, in the globals of its file.
    """
    functions = {n: f for n, f in rotary.rotary_functions(cls).items() if not isinstance(f, type)}
    found = {name: match_rotation(function) for name, function in functions.items()}
    left = [name for name, rotation in found.items() if rotation is None]
    found = {name: rotation for name, rotation in found.items() if rotation is not None}
    why = f"{', '.join(left)} is no rotation that the op rope computes" if left else None
    return (Match("rope", "rope", names=tuple(sorted(found.items()))) if found else None), why


def match_experts(module):
    """The `Match` of experts that transformers' experts interface runs, by what they do between their two products.

    None where there is no such part, or it is none of our units.
    """
    apply_gate = getattr(type(module), "_apply_gate", None)
    if apply_gate is None or not hasattr(module, "has_gate"):
        return None
    if not module.has_gate:
        return _match_plain_experts(module)
    generator = torch.Generator().manual_seed(0)
    cases = [(3 * probing.random_rows(generator, 7, 2 * INTERMEDIATE, dtype=dtype),) for dtype in DTYPES]
    for split, (op, options, names, telling) in itertools.product(HALVES, _gates(module)):
        if op is activate:
            continue
        attributes = {names[role]: value for role, value in telling.items()}

        def original(gate_up, attributes=attributes):
            return apply_gate(
                probing.clone(module, dict(module._parameters), dict(module._modules), **attributes), gate_up
            )

        def replacement(gate_up, split=split, op=op, options=options | telling):
            return op.reference(*HALVES[split](gate_up), **options)

        if probing.agrees(original, replacement, cases):
            return probing.match("experts", op, options, {"split": split} | names)
    return None


def _match_plain_experts(module):
    generator = torch.Generator().manual_seed(0)
    cases = [(3 * probing.random_rows(generator, 7, INTERMEDIATE, dtype=dtype),) for dtype in DTYPES]
    for activation, function in ACTIVATIONS.items():
        if probing.agrees(lambda x: module.act_fn(x), function, cases):
            return probing.match("experts", activate, {"activation": activation}, {"split": None})
    return None


def match_sorted_experts(module):
    """The `Match` of experts whose tokens come sorted and as many for each, as Llama 4's, or None: two batched products
    with a gated unit between, its weights (E, H, 2I) and (E, I, H)."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if len(parameters) != 2 or any(p.ndim != 3 for p in parameters.values()) or len(probing.inputs_of(module)) != 1:
        return None
    (first, (count, hidden, _)), (second, (*_, intermediate, _)) = ((n, p.shape) for n, p in parameters.items())
    small = {count: 2, hidden: HIDDEN, intermediate: INTERMEDIATE}
    sizes = {name: small[value] for name, value in vars(module).items() if type(value) is int and value in small}
    generator = torch.Generator().manual_seed(0)
    shapes = (10, HIDDEN), (2, HIDDEN, 2 * INTERMEDIATE), (2, INTERMEDIATE, HIDDEN)
    cases = [[probing.random_rows(generator, *shape, dtype=dtype) for shape in shapes] for dtype in DTYPES]

    def original(x, *weights):
        clone = probing.clone(module, dict(zip(parameters, weights)), dict(module._modules), **sizes)
        return type(module).forward(clone, x)

    for op, options in GLU_OPTIONS:

        def replacement(x, *weights, op=op, options=options):
            return mlp.sorted_experts(x, *weights, op.reference, options)

        if probing.agrees(original, replacement, cases):
            return probing.match("sorted_experts", op, options, {"first": first, "second": second})
    return None


def _gates(module):
    """(op, options, role -> attribute of a number, role -> a telling value) of what a unit may compute."""
    for op, options in (*GLU_OPTIONS, *((activate, {"activation": name}) for name in ACTIVATIONS)):
        yield op, options, {}, {}
    floats = [name for name, value in vars(module).items() if type(value) in (int, float) and value > 0]
    for limit in (name for name in floats if "limit" in name):
        yield clamped_swiglu, {}, {"limit": limit}, {"limit": 0.5}
        for alpha in (name for name in floats if "alpha" in name):
            for offset in (1.0, 0.0):
                yield clamped_swiglu, {"offset": offset}, {"limit": limit, "alpha": alpha}, {"limit": 0.5, "alpha": 1.3}


def asks_for_gate(module):
    """Whether the experts implementation that `module`'s configuration names calls the module's `_apply_gate`."""
    from transformers.integrations import moe

    chosen = moe.ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation, None)
    return chosen is not None and "_apply_gate" in chosen.__code__.co_names
