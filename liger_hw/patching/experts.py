"""Match experts of a mixture that transformers' experts interface runs (`grouped_mm`, `batched_mm`, others).

`patch` replaces the gated unit between their two matrix products (`_apply_gate`). With the implementation `grouped_mm`
it replaces the whole forward by the op `experts`, which saves less for the backward.
"""

import inspect
import itertools
import types
from dataclasses import dataclass

import torch

from liger_hw._torch import forward_hooks, is_plain
from liger_hw.kernels.mlp.glu import ACTIVATIONS, activate
from liger_hw.kernels.moe import experts
from liger_hw.patching import gates, probing, witnesses
from liger_hw.patching.hooks import original_class
from liger_hw.patching.match import Match
from liger_hw.patching.pins import AttributePin, code_guard, digest
from liger_hw.patching.reading import Pin, read, read_function
from liger_hw.patching.values import MISSING, replaced_function

PROBE_ROWS, PROBE_INTERMEDIATE = 7, 48


@dataclass(frozen=True)
class ExpertsMatch(Match):
    """Match of experts; `names["split"]` is a key of `gates.HALVES`, None without a gate.

    Attributes:
        is_interface: the module's forward is transformers', which calls an implementation.
    """

    kind = "experts"
    is_interface: bool = False

    def pins(self, original):
        pins, shadowed = super().pins(original)
        # LoRA of parameters computes without a call of the module
        pins += [Pin(original, name, getattr(original, name)) for name in ("forward", "__call__", "_call_impl")]
        return pins, shadowed | {"_apply_gate"}

    def reason_against(self, original):
        # DeepSpeed replaces torch.arange while it builds a model in shards
        known = ("torch", "transformers", "builtins", "deepspeed")
        replaced = self.is_whole and replaced_function(_interface_pins(), known)
        return f"a program replaced {replaced}, which grouped experts call" if replaced else None

    def digest(self, original):
        return digest([*self.pins(original)[0], *(_interface_pins() if self.is_whole else ())])

    def members(self, original, unchanged):
        options, names = dict(self.options), dict(self.names)
        gate = {} if names["split"] is None else {"_apply_gate": _gate_of(original, self.op, options, names, unchanged)}
        if not self.is_whole:
            return gate
        activation = gates.activation_name(self.op, options)
        return gate | _forward_of(original, names["split"] == "up first", activation, unchanged)

    @property
    def is_whole(self):
        """Tell whether `experts` computes the whole forward, not the gated unit alone."""
        computes = self.op != "clamped_swiglu" and dict(self.names)["split"] != "interleaved"
        return self.is_interface and computes


def _is_interface(forward):
    """Tell whether a forward is transformers', which calls one of transformers' implementations."""
    from transformers.integrations import moe

    if not isinstance(forward, types.FunctionType) or forward.__globals__ is not vars(moe):
        return False
    chosen = inspect.getclosurevars(forward).nonlocals.get("experts_interface", moe.ALL_EXPERTS_FUNCTIONS)
    return chosen is moe.ALL_EXPERTS_FUNCTIONS


def _interface_pins():
    """Return `Pin`s of transformers' grouped experts: their caller, and the functions that they call."""
    from transformers.integrations import moe

    interface, grouped, name = moe.ALL_EXPERTS_FUNCTIONS, moe.grouped_mm_experts_forward, "get_interface"
    pins = [Pin(type(interface), name, getattr(type(interface), name)), Pin(vars(interface), name, MISSING)]
    pins += [Pin(moe, "grouped_mm_experts_forward", grouped), *read_function(grouped).pins]
    # transformers overwrites all that empty_like returns, and makes no tensor of the default dtype: arange has integers
    return [pin for pin in pins if pin.name not in ("empty_like", "dtype")]


def _forward_of(original, up_first, activation, unchanged):
    from transformers.integrations import moe

    interface, grouped = moe.ALL_EXPERTS_FUNCTIONS, moe.grouped_mm_experts_forward
    interface_unchanged = code_guard(_interface_pins())

    def mixed(self, x, index, routing_weights, **lora):
        """Return the output of `experts`, or None where the module must compute."""
        if torch.compiler.is_compiling() or not unchanged(self) or not witnesses.cover(x):
            return None
        up = getattr(self, "gate_up_proj" if self.has_gate else "up_proj", None)  # (E, 2I, H), or (E, I, H)
        down = getattr(self, "down_proj", None)
        is_grouped = self.config._experts_implementation == "grouped_mm" and interface.get("grouped_mm") is grouped
        if is_grouped and _can_mix(self, x, up, down, index, routing_weights) and interface_unchanged():
            return experts.experts(x, up, down, index, routing_weights, activation, up_first, **lora)
        return None

    def forward(self, *args, **kwargs):
        y = mixed(self, *args) if len(args) == 3 and not kwargs else None
        return original.forward(self, *args, **kwargs) if y is None else y

    return {"forward": forward, "liger_mixed": mixed}


def _gate_of(original, op_name, options, names, unchanged):
    op = gates.GATED_OPS[op_name]
    takes_numbers = op_name == "clamped_swiglu"
    takes_whole_rows = takes_numbers and names["split"] != "up first"
    interleaved, split = names["split"] == "interleaved", gates.HALVES[names["split"]]

    def _apply_gate(self, gate_up_out):
        if not unchanged(self) or not witnesses.cover(gate_up_out):
            return original._apply_gate(self, gate_up_out)
        is_result = gate_up_out.is_contiguous() and not gate_up_out.is_leaf
        try:
            if takes_whole_rows:
                return op(gate_up_out, interleaved=interleaved, **options, **gates.numbers(self, names))
            gate, up = split(gate_up_out)
            in_place = {"in_place": is_result and gate.stride(-1) == 1}
            return op(gate, up, **options, **(gates.numbers(self, names) if takes_numbers else in_place))
        except ValueError:  # a limit that the op does not take
            return original._apply_gate(self, gate_up_out)

    return _apply_gate


def _can_mix(module, x, up, down, index, routing_weights):
    """Tell whether `experts` computes this module's output for x."""
    return (
        not (module.has_bias or module.is_transposed or getattr(module, "has_post_expert_norm", False))
        # hooks gather sharded weights, or mark the tokens that belong to another rank's experts
        and not (getattr(module, "_is_expert_parallel", False) or forward_hooks(module))
        and not (up is None or down is None)
        and is_plain(x, index, routing_weights, up, down)
        and x.dtype == up.dtype == down.dtype
        and index.dtype in (torch.int64, torch.int32)
        and routing_weights.dtype in (x.dtype, torch.float32)
        and x.ndim == index.ndim == 2
        and index.shape == routing_weights.shape
        and x.shape[0] == index.shape[0]
        and module.num_experts == down.shape[0]
        and experts.experts.choose(x.device, x.dtype) not in ("cpu", "reference")
    )


def match_experts(module):
    """Return the `ExpertsMatch` of a module, or None."""
    apply_gate = getattr(type(module), "_apply_gate", None)
    if apply_gate is None or not hasattr(module, "has_gate"):
        return None
    is_interface = _is_interface(type(module).forward)
    if not module.has_gate:
        return _match_experts_without_gate(module) if is_interface else None

    for split, (op, options, attributes, probe_numbers) in itertools.product(gates.HALVES, gates.candidates(module)):
        if op is activate:
            continue
        values = {attributes[role]: value for role, value in probe_numbers.items()}

        def original(training, gate_up, values=values):
            parts = {name: probing.copy_in_mode(part, training) for name, part in module._modules.items()}
            probe = probing.copy_of(module, dict(module._parameters), parts, training=training, **values)
            return apply_gate(probe, gate_up)

        def replacement(_, gate_up, numbers=probe_numbers, split=split, op=op, options=options):
            return op.reference(*gates.HALVES[split](gate_up), **options | numbers)

        constants = read(type(module), ("_apply_gate",)).constants
        if _prove(original, replacement, 2, module, constants, tuple(attributes.values())):
            _check_numbers(module, attributes, original, replacement)
            names = {"split": split} | attributes
            return ExpertsMatch.of(
                op, options, names, methods=("_apply_gate",), bypassed=_children(module), is_interface=is_interface
            )
    return None


def _match_experts_without_gate(module):
    is_module = isinstance(module.act_fn, torch.nn.Module)
    constants = witnesses.constants_of(module.act_fn) if is_module else set()
    if isinstance(module.act_fn, types.FunctionType):
        constants = read_function(module.act_fn).constants

    def original(training, x):
        return (probing.copy_in_mode(module.act_fn, training) if is_module else module.act_fn)(x)

    for name, function in ACTIVATIONS.items():

        def replacement(_, x, function=function):
            return function(x)

        if _prove(original, replacement, 1, module, constants):
            pinned = () if is_module else (AttributePin((), ("act_fn",), module.act_fn, True),)
            return ExpertsMatch.of(
                activate, {"activation": name}, {"split": None}, methods=(), pinned=pinned,
                bypassed=_children(module), is_interface=True,
            )  # fmt: skip
    return None


def _check_numbers(module, attributes, original, replacement):
    """Raise `Objection` if the gate uses a number with a role otherwise than the op."""
    given = {role: vars(module)[name] for role, name in attributes.items()}
    x = probing.case_of(2 * PROBE_INTERMEDIATE)(torch.float32, (PROBE_ROWS,))[0]
    for role, number in itertools.product(attributes, (None, 0.2, 5.0)):
        numbers = given if number is None else given | {role: number}
        values = {attributes[name]: value for name, value in numbers.items()}
        expected = probing.run(lambda values=values: original(False, 9 * x, values))
        if not probing.equal(probing.run(lambda numbers=numbers: replacement(False, 9 * x, numbers)), expected):
            raise witnesses.Objection(f"uses its {attributes[role]} otherwise than the op")


def _prove(original, replacement, parts, module, constants, roles=()):
    """Tell whether both compute the same.

    Args:
        parts: of a row: 2 for gate and up, 1 for a gate alone.
    """
    proof = witnesses.Proof(
        original, replacement, probing.case_of(parts * PROBE_INTERMEDIATE), shapes=((PROBE_ROWS,), (1,)),
        at_width=lambda width: probing.case_of(parts * width)(torch.float32, (3,)), roles=roles,
    )  # fmt: skip
    return proof.holds_for(module, constants)


def _children(module):
    return tuple((name, original_class(child)) for name, child in module.named_children())


def calls_gate(module):
    """Tell whether the configured experts implementation calls the module's `_apply_gate`."""
    from transformers.integrations import moe

    implementation = moe.ALL_EXPERTS_FUNCTIONS.get(module.config._experts_implementation, None)
    return implementation is not None and "_apply_gate" in implementation.__code__.co_names
