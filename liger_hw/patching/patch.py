"""Patch any Hugging Face model by structure, and unpatch it.

    summary = liger_hw.patch(model)      # print(summary) shows what was replaced by which op, what was left, and why
    liger_hw.unpatch(model)

There is no list of models: `recognition` proves which op computes what each module computes, `swapping` changes the
module's class, `loss` replaces head and loss where the model has the common tail.
"""

import functools
import logging
from collections import Counter
from dataclasses import dataclass, field

import torch

from liger_hw.checks import check
from liger_hw.patching import built_later, loss, recognition, swapping
from liger_hw.patching.probing import Match
from liger_hw.spelling import check_known

logger = logging.getLogger("liger_hw")

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
FLAG_OF = {"clamped_swiglu": "swiglu", "silu": "swiglu"}  # of what has none of its own name
FLAG_OF |= dict.fromkeys(("gelu_tanh", "gelu_erf", "gelu_new", "quick_gelu"), "geglu")
NO_OP = "no op gives the same bits"
OWN_LOOP = "a loop of its own over its experts, which transformers' experts interface does not run"
NO_ACTIVATION = "what is between its two products is not just an activation that an op computes"
_known = {}  # what a probe of a module depends on -> its Match or None


@dataclass
class Summary:
    """What `patch` did.

    Attributes:
        replaced: (class name, op with its options) -> number of modules.
        left: (class name, reason) -> number of modules that look as if an op could serve them and were left alone.
    """

    replaced: Counter = field(default_factory=Counter)
    left: Counter = field(default_factory=Counter)

    def __str__(self):
        rows = [("class", "modules", "now")]
        rows += [(name, str(count), what) for (name, what), count in self.replaced.items()]
        rows += [(name, str(count), f"as it was: {why}") for (name, why), count in self.left.items()]
        widths = [max(len(row[i]) for row in rows) for i in (0, 1)]
        return "\n".join(f"{a:{widths[0]}}  {b:>{widths[1]}}  {c}" for a, b, c in rows)


def check_flags(flags):
    """`FLAGS` with the caller's changes.

    Raises:
        ValueError: a flag is unknown or of another kind, or both losses are asked for.
    """
    for name in flags:
        check_known("flag", name, FLAGS)
    for name, value in flags.items():  # None is what Axolotl gives for what its user left out
        check(value is None or isinstance(value, bool), name, repr(value), "True, False, or None for False")
    flags = FLAGS | flags
    both = flags["cross_entropy"] and flags["fused_linear_cross_entropy"]
    check(not both, "cross_entropy", "True with fused_linear_cross_entropy=True", "one of the two")
    return flags


def patch(model, **flags):
    """Let `model`'s norms, gated MLPs, rotary embeddings and loss run on this library's ops.

    Results are the same: a module is replaced only when the op was shown to give its bits. Parameters, their names,
    hooks, saving, loading, copying and adapters stay as they are. A model patched before is patched anew.

    Args:
        model: a `torch.nn.Module`, usually a `PreTrainedModel` or a PEFT model around one. A class of models
            (`LlamaForCausalLM`) instead: every model of its family built from now on, until `unpatch` of that class.
        rope, rms_norm, layer_norm: whether to replace parts of that kind. Default True.
        swiglu, geglu, relu_squared: whether to replace MLPs, experts and activations with a SiLU, a GELU, a squared
            ReLU. Default True.
        fused_linear_cross_entropy: compute the loss without the logits, in training when labels are given. The forward
            then also takes `skip_logits`: None means just that, True does so in evaluation too and returns no logits,
            False computes the logits. Default True.
        cross_entropy: compute the loss from the logits with the op `cross_entropy`. Default False.

    Returns:
        a `Summary`, which is also logged once at level INFO, or WARNING where nothing was replaced; None for a class.

    Raises:
        ValueError: no model; an unknown flag, or one that is none of True, False and None; cross_entropy together with
            fused_linear_cross_entropy. The model is as it was.
    """
    flags = check_flags(flags)
    if isinstance(model, type):
        return built_later.call_when_built(model, functools.partial(patch, **flags))
    _check_model(model)
    unpatch(model)
    summary = Summary()
    inside = set()  # activations that an MLP has no more use for
    for module in list(model.modules()):
        name = type(module).__name__
        found, why = ([], None) if module in inside else _find(module, flags)
        for part, match in found:
            summary.replaced[type(part).__name__, str(match)] += 1
            swapping.swap(part, match)
            inside.update(part.children() if match.kind == "mlp" else ())
        if why:
            summary.left[name, why] += 1
    if summary.replaced:
        logger.info("patched %s\n%s", type(model).__name__, summary)
    else:
        logger.warning("nothing of %s was replaced; it is as it was\n%s", type(model).__name__, summary)
    return summary


def unpatch(model):
    """Undo `patch`: every module gets its own class back. For a class of models, models built from now on are plain."""
    if isinstance(model, type):
        return built_later.stop_calling(model)
    _check_model(model)
    for module in model.modules():
        if swapping.is_swapped(module):
            swapping.restore(module)


def _check_model(model):
    check(isinstance(model, torch.nn.Module), "model", type(model).__name__, "a torch.nn.Module or a class of models")


def _find(module, flags):
    """([(module to swap, match)], reason why not or None): what can be done about one module."""
    if type(module).__module__.startswith("liger_hw."):
        return [], None
    if "forward" in vars(module):
        interesting = _why_not(module) or _owns_a_loss(module)
        return [], "its forward was replaced on the instance" if interesting else None
    if _owns_a_loss(module):
        return _find_loss(module, flags)
    match = recognised(
        ("part", *facts(module)),
        lambda: (
            recognition.match_norm(module)
            or recognition.match_gated_norm(module)
            or recognition.match_mlp(module)
            or recognition.match_experts(module)
            or recognition.match_sorted_experts(module)
            or recognition.match_activation(module)
        ),
    )
    if match is None:
        cls = type(module)
        match, why = recognised(("rope", cls), lambda: recognition.match_rope(cls))
        if match is None and why is None:
            return [], _why_not(module)
    else:
        why = None
    if match is not None and not flags.get(flag := _flag(match), True):
        return [], f"{flag}=False"
    if match is not None and match.kind == "experts" and not recognition.asks_for_gate(module):
        return [], f"experts implementation {module.config._experts_implementation!r} does its gate by itself"
    return ([] if match is None else [(module, match)]), why


def _flag(match):
    part = dict(match.options).get("activation", match.op)
    return FLAG_OF.get(part, part)


def facts(module):
    """All that a probe of `module` depends on: its class, the shapes it has parameters of, its children's kinds and its
    plain attributes."""
    shapes = tuple((name, p if p is None else p.shape) for name, p in module._parameters.items())
    children = tuple(
        (name, type(c), getattr(c, "bias", None) is None, str(c) if next(c.parameters(), None) is None else None)
        for name, c in module.named_children()
    )
    plain = tuple(
        (k, v)
        for k, v in vars(module).items()
        if type(v) in (int, bool, str, float, tuple, type(None)) and k != "training"
    )
    return type(module), shapes, children, plain


def recognised(key, find):
    """What `find` found the first time that it was asked for `key`."""
    if key not in _known:
        _known[key] = find()
    return _known[key]


def _why_not(module):
    """Why a module that looks as if an op could serve it is none that one serves; None where it does not look so."""
    name = type(module).__name__.lower()
    if "experts" in name:
        return NO_OP if hasattr(module, "has_gate") else OWN_LOOP
    if "norm" in name and not module._modules:
        return NO_OP
    if not any(part in name for part in ("mlp", "feedforward")):
        return None
    linears = [c for c in module.children() if recognition.is_projection(c)]
    return (NO_ACTIVATION if len(linears) == 2 else NO_OP) if linears else None


def _owns_a_loss(module):
    try:
        from transformers import PreTrainedModel
    except ModuleNotFoundError:
        return False
    return isinstance(module, PreTrainedModel) and loss.head_of(module) is not None


def _find_loss(model, flags):
    if not (flags["fused_linear_cross_entropy"] or flags["cross_entropy"]):
        return [], None
    head = loss.head_of(model)
    if not loss.computes_a_loss(model):
        return [], "its forward computes no cross entropy"
    chosen = tuple((name, flags[name]) for name in ("cross_entropy", "fused_linear_cross_entropy"))
    owner = (model, Match("causal_lm", options=chosen))
    if flags["cross_entropy"]:
        return [owner], None
    copies = getattr(head, "modules_to_save", {})  # PEFT's wrapper around a head that it trains
    heads = [m for m in (head, *copies.values()) if type(m) is torch.nn.Linear or getattr(m, "liger_is_head", False)]
    if not heads:
        return [], f"its head is a {type(head).__name__}: logits as they were"
    # a head may be patched already, by another model around or inside this one
    return [(m, Match("head")) for m in heads if type(m) is torch.nn.Linear] + [owner], None
