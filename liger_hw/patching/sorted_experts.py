"""Match experts that take sorted tokens, equally many each (Llama 4), as two batched products."""

import torch

from liger_hw._torch import is_plain
from liger_hw.patching import gates, probing
from liger_hw.patching.hooks import original_class
from liger_hw.patching.match import Match
from liger_hw.patching.witnesses import Proof, check_sizes

PROBE_EXPERTS, PROBE_HIDDEN, PROBE_INTERMEDIATE = 2, 38, 46
PROBE_TOKENS = 5 * PROBE_EXPERTS


class SortedExpertsMatch(Match):
    """Match of sorted experts with weights "first" (E, H, 2I) and "second" (E, I, H)."""

    kind = "sorted_experts"
    inputs = ("x",)

    def members(self, original, unchanged):
        op, options, names = gates.GATED_OPS[self.op], {"in_place": True, **dict(self.options)}, dict(self.names)

        def forward(self, *args, **kwargs):
            weights = [getattr(self, names[role]) for role in ("first", "second")]
            if not unchanged(self, args, kwargs) or not is_plain(*args, *weights):
                return original.forward(self, *args, **kwargs)
            return _compute(args[0], *weights, op, options)

        return {"forward": forward}


def _compute(x, first, second, unit, options):
    """Apply each expert's gated MLP to its T / E rows of x (T, H)."""
    gate, up = torch.bmm(x.view(first.shape[0], -1, first.shape[1]), first).chunk(2, -1)
    return torch.bmm(unit(gate, up, **options), second).view(-1, second.shape[-1])


def _shapes(experts, hidden, intermediate, tokens):
    """Return the shapes of rows and weights."""
    return (*tokens, hidden), (experts, hidden, 2 * intermediate), (experts, intermediate, hidden)


def match_sorted_experts(module):
    """Return the `SortedExpertsMatch` of a module, or None."""
    parameters = probing.direct_parameters(module)
    if (
        len(parameters) != 2
        or any(p.ndim != 3 for p in parameters.values())
        or len(probing.positional_inputs(module)) != 1
    ):
        return None
    (first, (experts, hidden, _)), (second, (*_, intermediate, _)) = ((n, p.shape) for n, p in parameters.items())
    small = {experts: PROBE_EXPERTS, hidden: PROBE_HIDDEN, intermediate: PROBE_INTERMEDIATE}
    sizes = {name: small[value] for name, value in vars(module).items() if type(value) is int and value in small}

    def case(dtype, tokens):
        random = probing.generator()
        shapes = _shapes(PROBE_EXPERTS, PROBE_HIDDEN, PROBE_INTERMEDIATE, tokens)
        return [probing.random_rows(random, *shape, dtype=dtype) for shape in shapes]

    def original(training, x, *weights, attributes=sizes):
        parts = {name: probing.copy_in_mode(part, training) for name, part in module._modules.items()}
        probe = probing.copy_of(module, dict(zip(parameters, weights)), parts, training=training, **attributes)
        return type(module).forward(probe, x)

    def without_values(attributes, *sizes):
        tensors = [torch.empty(shape, device="meta") for shape in _shapes(*sizes, (5 * sizes[0],))]
        return original(False, *tensors, attributes=attributes)

    for op, options in gates.WITHOUT_NUMBERS:

        def replacement(_, x, *weights, op=op, options=options):
            return _compute(x, *weights, op.reference, options)

        if Proof(original, replacement, case, shapes=((PROBE_TOKENS,), (PROBE_EXPERTS,))).holds_for(module):
            small, whole = (PROBE_EXPERTS, PROBE_HIDDEN, PROBE_INTERMEDIATE), (experts, hidden, intermediate)
            places = {n * a: n * b for a, b in zip(small, whole) for n in (1, 2)} | {PROBE_TOKENS: 5 * experts}
            check_sizes(without_values, [(sizes, *small), ({}, *whole)], places)
            bypassed = tuple((name, original_class(child)) for name, child in module.named_children())
            return SortedExpertsMatch.of(op, options, {"first": first, "second": second}, bypassed=bypassed)
    return None
