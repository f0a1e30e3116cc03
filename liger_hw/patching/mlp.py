"""Match MLPs, down(f(gate(x)) * up(x)) or down(f(first(x))), by the roles of their attributes.

`names` maps the roles "gate", "up" and "down" to attributes of the module and, where the module has them, also
"dropout_before" and "dropout_after" (the last projection), "gate_scale", "down_scale", "limit" and "alpha". Without
"up", gate and up are halves of one projection, and "up_first" gives their order. "calls_up_first": the module calls
the projection of up before that of gate. "casts_under_autocast": there it casts. With "up" None the MLP has no gate,
and "gate" is the first of two projections.
"""

import functools
import itertools

import torch
from torch.compiler import is_compiling

from liger_hw.dispatch import autocasts
from liger_hw.kernels.mlp.glu import activate, unit
from liger_hw.patching import gates, probing, witnesses
from liger_hw.patching.hooks import original_class
from liger_hw.patching.match import Match, compiles_by_itself
from liger_hw.patching.pins import AttributePin, replaced_linear_code
from liger_hw.patching.projection import is_projection, project_both, project_by_op, return_new_memory
from liger_hw.patching.reading import read

WIDENING = 4  # gate and up than the hidden states, in many models
PROBE_HIDDEN, PROBE_INTERMEDIATE, PROBE_OUT = 38, 46, 34  # numbers that code hardly contains
OTHER_NUMBERS = (0.0, 0.2, 0.9, 5.0, -1.7)  # of which those below 1 may be a dropout's
CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double"}
# functions that autocast computes in fp32 on a GPU
WIDENED_STEPS = {"pow", "__pow__", "exp", "expm1", "log", "reciprocal", "softplus"}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class MLPMatch(Match):
    """Match of an MLP."""

    kind = "mlp"
    inputs = ("x",)

    def pins(self, original):
        pins, shadowed = super().pins(original)
        return [*pins, *read(torch.nn.Linear).pins], shadowed  # `project_by_op` does not call the last projection

    def reason_against(self, original):
        if read(original).sets_autocast:
            return "its code sets autocast, which decides the dtype of its products"
        replaced = replaced_linear_code()
        return replaced and f"a program replaced torch's {replaced} of linear layers"

    def members(self, original, unchanged):
        names, options = dict(self.names), dict(self.options)
        clamped = gates.GATED_OPS[self.op] if self.op == "clamped_swiglu" else None
        activation = None if clamped else gates.activation_name(self.op, options)
        down_name, dropout_name = names["down"], names.get("dropout_before")
        producer_names = [names[role] for role in ("gate", "up") if names.get(role)]
        casts = "casts_under_autocast" in names or not CASTS.isdisjoint(read(original).attributes)
        classes = original, *(cls for _, cls in self.bypassed)  # of the module, and of its activation
        widens = any(not WIDENED_STEPS.isdisjoint(read(cls).attributes) for cls in classes)

        def forward(self, *args, **kwargs):
            compiled = is_compiling() and compiles_by_itself(args, wider=WIDENING)
            if compiled or not unchanged(self, args, kwargs) or widens and autocasts(args[0].device.type):
                return original.forward(self, *args, **kwargs)
            down, producers = getattr(self, down_name), [getattr(self, name) for name in producer_names]
            if _stays_unfused(down, args[0]) or casts and _casts(down, names, producers, args[0]):
                return original.forward(self, *args)
            if clamped:
                fits = gates.takes_numbers(self, names)
                return compute(self, names, args[0], clamped, options) if fits else original.forward(self, *args)
            gate, up = _gate_and_up(self, names, args[0])
            drops, projected = dropout_name and _drops(self, dropout_name), False
            try:  # without calls of the program's modules, whose errors are the program's
                if drops:
                    y = unit(gate, up, activation, in_place=return_new_memory(producers))
                else:
                    y, projected = project_by_op(down, gate, up, activation, producers)
            except ValueError:  # projections that a program set later, whose results torch expands or refuses
                y = activate.reference(gate, activation)
                y = y if up is None else y * up
            if not projected:
                y = down(_dropped(self, dropout_name, y) if drops else y)
            return _after_down(self, names, y)

        return {"forward": forward}


def compute(module, names, x, unit_or_reference, options):
    """Compute the MLP of `module` with an op or its reference between the projections."""
    gate, up = _gate_and_up(module, names, x)
    if "activation" in options:
        y = unit_or_reference(gate, **options)
        y = y if up is None else y * up
    else:
        options = options | gates.numbers(module, names)
        try:
            y = unit_or_reference(gate, up, **options)
        except ValueError:  # as above
            y = getattr(unit_or_reference, "reference", unit_or_reference)(gate, up, **options)
    y = _dropped(module, names.get("dropout_before"), y)
    return _after_down(module, names, getattr(module, names["down"])(y))


def _gate_and_up(module, names, x):
    """Return gate and up from two projections or halves; up None without a gate."""
    gate = getattr(module, names["gate"])
    if names.get("calls_up_first"):
        up, gate = project_both(getattr(module, names["up"]), gate, x)
    elif names.get("up"):
        gate, up = project_both(gate, getattr(module, names["up"]), x)
    elif "up" in names:
        gate, up = gate(x), None
    else:
        gate, up = gates.HALVES["up first" if names.get("up_first") else "gate first"](gate(x))
    scale = names.get("gate_scale")
    return gate if scale is None else gate * getattr(module, scale), up


def _after_down(module, names, y):
    scale = names.get("down_scale")
    y = y if scale is None else y * getattr(module, scale)
    return _dropped(module, names.get("dropout_after"), y)


def _dropped(module, name, x):
    """Apply the dropout that attribute `name` of `module` holds: a child or a probability."""
    if name is None:
        return x
    dropout = getattr(module, name)
    if isinstance(dropout, torch.nn.Module):
        return dropout(x)
    return torch.nn.functional.dropout(x, dropout, module.training)


def _drops(module, name):
    dropout = getattr(module, name)
    if isinstance(dropout, torch.nn.Module):  # in training by itself where a program samples from a model's dropout
        return type(dropout) is not torch.nn.Dropout or dropout.training and dropout.p != 0
    return module.training and dropout != 0


def _stays_unfused(projection, x):
    """Tell whether each read of the weight computes it, or it has another float dtype."""
    # a spectral norm changes its state at a read; T5 keeps its last projection in fp32 and casts x, without autocast
    dtype = _weight_dtype(projection, x.dtype)
    return dtype is None or dtype != x.dtype and dtype in FLOATS and not autocasts(x.device.type)


def _weight_dtype(projection, default):
    """Return the dtype of a projection's weight; None where a read computes it."""
    base = projection._modules.get("base_layer") or projection  # of an adapter; an attribute of a module costs 1 us
    if "parametrizations" in base._modules:
        return None
    weight = base._parameters.get("weight")
    return getattr(getattr(projection, "weight", None) if weight is None else weight, "dtype", default)


def _casts(down, names, producers, x):
    """Tell whether a cast in an MLP's code may change a dtype."""
    if not return_new_memory(producers):  # a hook, or a program's layer, may return another dtype
        return True
    if autocasts(x.device.type):
        dtypes = x.dtype, _weight_dtype(down, x.dtype)  # T5 casts to the latter
        unchanged = torch.get_autocast_dtype(x.device.type), torch.float32
        return "casts_under_autocast" in names or any(d in FLOATS and d not in unchanged for d in dtypes)
    return any(_stays_unfused(producer, x) for producer in producers)


def match_mlp(module):
    """Return the `MLPMatch` of a module, or None.

    Gate and up may be two projections or the halves of one. An attribute may scale the gate or the result, and dropout
    may follow the product or the result. The projections may be quantised or have adapters, and have any names.
    """
    projections = {name: child for name, child in module.named_children() if is_projection(child)}
    others = {name: child for name, child in module.named_children() if name not in projections}
    has_direct_tensors = any(p is not None for p in module._parameters.values()) or module._buffers
    if len(projections) not in (2, 3) or has_direct_tensors:
        return None
    if any(next(child.parameters(), None) is not None for child in others.values()):
        return None
    dropouts = [name for name, child in others.items() if "dropout" in type(child).__name__.lower()]
    floats = probing.float_attributes(module)
    attributes = (*floats, *dropouts)
    # all different, as attributes of equal values could be confused
    visible = {name: probing.VISIBLE + i / (2 * len(attributes)) for i, name in enumerate(attributes)}
    probe_dropouts = {name: torch.nn.Dropout(visible.pop(name)) for name in dropouts}
    bypassed = tuple((name, original_class(child)) for name, child in others.items())
    for roles in _projection_roles(projections):
        case = functools.partial(_case, projections, roles)
        cases = [(True, *case(dtype, scale=3)) for dtype in probing.PROBE_DTYPES]
        for values, candidates in _candidates(module, dropouts, floats, visible):

            def probe(children, training, values=values):
                parts = module._modules | probe_dropouts | children
                parts = {name: probing.copy_in_mode(part, training) for name, part in parts.items()}
                numbers = {} if probing.uses_actual_floats() else values
                return probing.copy_of(module, {}, parts, training=training, **numbers)

            def original(training, x, children, probe=probe):
                return type(module).forward(probe(children, training), x)

            expected = probing.outputs(original, cases)
            for op, options, more_roles in candidates if expected else ():
                names = roles | more_roles

                def replacement(training, x, children, probe=probe, names=names, op=op, options=options):
                    return compute(probe(children, training), names, x, op.reference, options)

                without_up = names.get("up", "") is None
                if (op is activate or not without_up) and probing.reproduces(replacement, expected, cases):
                    _confirm(module, original, replacement, probe, names, case)
                    names |= _call_order(original, projections, names, case)
                    if not probing.agree(*map(_under_autocast, (original, replacement)), cases[:1]):
                        names |= {"casts_under_autocast": True}
                    return MLPMatch.of(op, options, names, bypassed=bypassed, pinned=_order_of(module))
    return None


def _confirm(module, original, replacement, probe, names, case):
    """Raise `Objection` unless the op computes the MLP for other rows, sizes and attributes."""
    # in_place=False, as a hook may keep what a projection returned
    roles = tuple(name for name in names.values() if isinstance(name, str))
    witnesses.Proof(original, replacement, case, in_place=False, roles=roles).confirm(module)
    _check_sizes(original, module, names)
    x, children = case(torch.float32)
    for role, attribute in names.items():
        if isinstance(attribute, str) and type(vars(module).get(attribute)) in (int, float):
            numbers = [n for n in OTHER_NUMBERS if "dropout" not in role or 0 <= n < 1]
            for number in (vars(module)[attribute], *numbers):

                def altered(children, training, number=number, attribute=attribute):
                    part = probe(children, training)
                    vars(part)[attribute] = number
                    return part

                with probing.actual_floats():
                    if not _agrees_with_number(original, replacement, altered, x, children):
                        raise witnesses.Objection(f"uses its {attribute} otherwise than the op")


def _agrees_with_number(original, replacement, probe, x, children):
    """Tell whether the op computes the MLP, or refuses the attribute's value."""
    try:
        expected = probing.run(lambda: original(True, x, children, probe))
    except Exception:  # a number that the module does not take
        return True
    try:
        return probing.equal(probing.run(lambda: replacement(True, x, children, probe)), expected)
    except ValueError:
        return True


def _check_sizes(original, module, names):
    """Raise `Objection` if an MLP computes something else than in the sizes of a probe."""
    projections = {
        name: module._modules[name] for role, name in names.items() if role in ("gate", "up", "down") and name
    }
    (hidden, rows), (cols, out) = (_features(projections[names[role]]) for role in ("gate", "down"))
    if rows != (cols if "up" in names else 2 * cols):
        raise witnesses.Objection("leaves out columns of a linear layer")
    small = PROBE_HIDDEN, PROBE_INTERMEDIATE, PROBE_HIDDEN if out == hidden else PROBE_OUT
    cases = [
        (torch.empty(2, 5, sizes[0], device="meta"), _projections(projections, names, sizes, _without_values))
        for sizes in (small, (hidden, cols, out))
    ]
    sizes = dict(zip(small, (hidden, cols, out))) | {2 * PROBE_INTERMEDIATE: 2 * cols}
    witnesses.check_sizes(lambda x, children: original(False, x, children), cases, sizes)


def _features(projection):
    """Return the numbers of inputs and outputs of a linear layer or Conv1D."""
    if hasattr(projection, "in_features"):
        return projection.in_features, projection.out_features
    return projection.nx, projection.nf


def _call_order(original, projections, names, case):
    calls = _called_projections(original, case(torch.float32))
    if sorted(calls) != sorted(projections):
        raise witnesses.Objection("computes with its projections without a call of them")
    return {"calls_up_first": True} if calls[0] == names.get("up") else {}


def _order_of(module):
    """Return pins of the children's names in their order, which a program may change."""
    if not isinstance(module, torch.nn.Sequential):
        return ()
    return (AttributePin((), ("_modules", "keys().__repr__()"), repr(module._modules.keys()), True),)


def _under_autocast(function):
    return torch.autocast("cpu", torch.bfloat16)(function)


def is_mlp_like(module):
    """Tell whether a module has two or three projections, and no other children with parameters."""
    projections = [child for child in module.children() if is_projection(child)]
    others = (child for child in module.children() if not is_projection(child))
    return len(projections) in (2, 3) and not any(next(child.parameters(), None) is not None for child in others)


def _called_projections(original, case):
    """Return the names of projections in the order of a forward's calls."""
    x, children = case
    calls = []
    for name, child in children.items():

        def call(self, *args, name=name):
            calls.append(name)
            return torch.nn.Linear.__call__(self, *args)

        child.__class__ = type("Linear", (torch.nn.Linear,), {"__call__": call})
    probing.outputs(original, [(True, x, children)])
    return calls


def unknown_operation(module):
    """Return the name of an operation of a module that no op of MLPs computes."""
    projections = {name: child for name, child in module.named_children() if is_projection(child)}
    if len(projections) not in (2, 3):
        return None
    for roles in _projection_roles(projections):
        x, children = _case(projections, roles, torch.float32)
        parts = {name: probing.on_the_cpu(part) for name, part in module._modules.items()}
        probe = probing.copy_of(module, dict(module._parameters), parts | children)
        if names := witnesses.operations_of(lambda probe=probe, x=x: type(module).forward(probe, x)):
            return next((name for name in names if not witnesses.is_mlp_operation(name)), None)
    return None


def _candidates(module, dropouts, floats, visible):
    """Yield (float attributes of the probe, [(op, options, roles except projections)]) of possible MLPs.

    The first candidates set attributes to `visible` values. The last keep the module's values, without any role.
    """
    plain = [(op, options) for op, options, attributes, _ in gates.candidates(module) if not attributes]
    dropouts_and_rates = [*dropouts, *(name for name in floats if "dropout" in name)]
    attribute_roles = _extra_roles(dropouts_and_rates, floats)
    yield visible, [(op, options, roles) for roles in attribute_roles for op, options in plain]
    for op, options, attributes, probe_numbers in gates.candidates(module):
        if attributes:
            values = visible | {attributes[role]: number for role, number in probe_numbers.items()}
            yield values, [(op, options, attributes)]
    if floats:
        yield floats, [(op, options, {}) for op, options in plain]


def _extra_roles(dropouts, floats):
    """Yield the roles that dropouts and scales of an MLP may have."""
    yield {}
    for name in dropouts:
        yield from ({"dropout_before": name}, {"dropout_after": name})
    for before, after in itertools.product(dropouts, repeat=2):
        yield {"dropout_before": before, "dropout_after": after}
    for gate_scale, down_scale in itertools.permutations(floats, 2):
        yield {"gate_scale": gate_scale, "down_scale": down_scale}


def _projection_roles(projections):
    """Return every assignment of roles to the projections of an MLP."""
    if len(projections) == 3:
        return [dict(zip(("gate", "up", "down"), order)) for order in itertools.permutations(projections)]
    forms = {"up_first": False}, {"up_first": True}, {"up": None}
    return [{"gate": gate, "down": down} | form for gate, down in itertools.permutations(projections) for form in forms]


def _case(projections, names, dtype, shape=(2, 5), scale=1):
    random = probing.generator()
    sizes = PROBE_HIDDEN, PROBE_INTERMEDIATE, PROBE_HIDDEN
    x = scale * probing.random_rows(random, *shape, PROBE_HIDDEN, dtype=dtype)
    return x, _projections(
        projections, names, sizes, lambda *shape: probing.random_rows(random, *shape, dtype=dtype) / 4
    )


def _without_values(*shape):
    return torch.empty(shape, device="meta")


def _projections(projections, names, sizes, values):
    """Return linear layers of other sizes in place of an MLP's projections.

    Args:
        sizes: features of the hidden states, of gate and up, and of the result.
        values: shape -> the values of a parameter.
    """
    hidden, intermediate, out = sizes
    widths = dict.fromkeys(("gate", "up"), (intermediate, hidden))
    widths["down"] = out, intermediate
    if "up" not in names:
        widths["gate"] = 2 * intermediate, hidden
    linears = {}
    for role, (rows, cols) in widths.items():
        if name := names.get(role):
            has_bias = getattr(projections[name], "bias", None) is not None
            linears[name] = probing.linear(values(rows, cols), values(rows) if has_bias else None)
    return linears
