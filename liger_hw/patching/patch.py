"""Patch any Hugging Face model by structure, and unpatch it.

    summary = liger_hw.patch(model)      # print(summary) lists replaced modules with ops, and others with reasons
    liger_hw.unpatch(model)

It needs no list of models: `recognise` finds which op computes each module, `swap` changes the module's class, and
`loss` replaces head and loss where the model computes a common cross entropy.
"""

import functools
import logging
import os
import warnings
from collections import Counter
from typing import overload

import torch

from liger_hw._torch import state_restored
from liger_hw.checkpointing.activations import activations as plan_activations
from liger_hw.checks import check
from liger_hw.patching import built_later, loss
from liger_hw.patching.flags import LOSSES, check_flags, flag_of
from liger_hw.patching.projection import is_projection
from liger_hw.patching.recognition import Memory, reason_for_leaving, recognise
from liger_hw.patching.summary import Summary
from liger_hw.patching.swapping import (
    is_changed_since,
    is_swapped,
    original_class,
    reason_against,
    reason_against_metaclass,
    restore,
    swap,
)

logger = logging.getLogger("liger_hw")

REPLACED_FORWARD = "its forward was replaced on the instance"
WRITTEN_CLASS = "torch.fx writes its code into its class, which no other module has"
CHANGED_SINCE = "patched before, and a parametrization, FSDP or another library changed its class since"


@overload
def patch(model: torch.nn.Module, activations=None, **flags) -> Summary: ...
@overload
def patch(model: type[torch.nn.Module], activations=None, **flags) -> None: ...
def patch(model, activations=None, **flags):
    """Run `model`'s norms, MLPs, experts, rotary embeddings and loss on this library's ops.

    Results stay the same: `patch` replaces a module only after an op returned its bits on many rows and its code showed
    no other operation ("What is shown, and what is not" in the guide). Parameters, their names, hooks, saving, loading,
    copying and adapters do not change. A second call replaces the first one's patch.

    Args:
        model: a `torch.nn.Module`, usually a `PreTrainedModel` or a PEFT model around one. With a class of models
            (`LlamaForCausalLM`), every model of its family built from now on, until `unpatch` of that class.
        activations: the budget of `liger_hw.activations`, which then plans what the model's layers keep, as after a
            call of it; `unpatch` leaves the plan. None: leave the model's activation checkpointing alone.
        rope, rms_norm, layer_norm: whether to replace parts of that kind. Default True.
        swiglu, geglu, relu_squared: whether to replace MLPs, experts and activations with a SiLU, a GELU, a squared
            ReLU. Default True.
        lora: whether to run PEFT's LoRA layers on one op each, those of a later `get_peft_model` too. Default True.
        fused_linear_cross_entropy: compute the loss without the logits, in training when labels are given. The forward
            then also takes `skip_logits`: None keeps this rule, True also skips the logits in evaluation with labels,
            False computes the logits. Default True. (Every patched model of transformers takes `skip_logits`.)
        cross_entropy: compute the loss from the logits with the op `cross_entropy`. Default False.

    Returns:
        a `Summary`; None for a class. Its attribute `activations` holds the plan. It is logged at level INFO, or
        WARNING where nothing was replaced. One line with its counts is logged at level WARNING by the first process of
        a machine, so that it is seen without a configuration of logging. A process logs equal texts once.

    Raises:
        ValueError: `model` is not a model; a flag is unknown, or not True, False or None; cross_entropy together with
            fused_linear_cross_entropy; as `liger_hw.activations`. The model stays unchanged.

    Examples:
        >>> summary = liger_hw.patch(model, rope=False)
    """
    flags = check_flags(flags)
    if isinstance(model, type):
        return built_later.call_when_built(model, functools.partial(patch, activations=activations, **flags))
    _check_model(model)
    summary = Summary(activations=None if activations is None else plan_activations(model, activations))
    unpatch(model)
    memory = Memory()
    try:
        with state_restored(), warnings.catch_warnings():  # which probes change, and Ctrl-C may leave
            _swap_matches(model, flags, memory, summary)
    except BaseException:  # of a model's code, such as a property
        unpatch(model)
        raise
    for part in filter(lambda part: not reason_against(type(part)), loss.models_refusing_skip_logits(model)):
        swap(part, memory.patched_class(type(part), loss.SkipLogitsMatch(lora=bool(flags["lora"]))))
    if loss.has_foreign_head(model):
        summary.left[original_class(model).__name__, loss.NO_HUGGING_FACE_MODEL] += 1
    _log(original_class(model).__name__, summary)
    return summary


def _swap_matches(model, flags, memory, summary):
    """Patch the modules of a model, and count them in `summary`."""
    bypassed = set()  # activations in a replaced MLP, which no longer calls them
    for module in list(model.modules()):
        if module in bypassed:
            continue
        matches, reason = _matches_of(module, flags, memory)
        if against := next((why for part, _ in matches if (why := reason_against(type(part)))), None):
            matches, reason = [], against
        if reason:
            summary.left[type(module).__name__, reason] += 1
        for part, match in matches:
            summary.replaced[type(part).__name__, str(match)] += 1
            swap(part, memory.patched_class(type(part), match))
            if match.kind == "mlp":
                bypassed.update(child for child in part.children() if not is_projection(child))


def _log(name, summary):
    replaced, left = summary.replaced.total(), summary.left.total()
    if not replaced:
        _log_once(logging.WARNING, f"nothing of {name} was replaced; it is as it was\n{summary}")
        return
    _log_once(logging.INFO, f"patched {name}\n{summary}")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _log_once(logging.WARNING, f"liger_hw: {replaced} modules patched, {left} left alone ({name})")


@functools.cache
def _log_once(level, message):
    logger.log(level, message)


def unpatch(model):
    """Undo `patch`: give every module its own class back.

    A module stays patched, with a warning, if its class changed after patching, for example by
    `torch.nn.utils.parametrize` or FSDP.

    Args:
        model: as in `patch`. With a class of models, `patch` no longer changes models built from now on.

    Examples:
        >>> liger_hw.unpatch(model)
    """
    if isinstance(model, type):
        return built_later.stop_calling(model)
    _check_model(model)
    stuck = Counter()
    for module in model.modules():
        if is_swapped(module):
            restore(module)
        elif is_changed_since(module):
            stuck[type(module).__name__] += 1
    if stuck:
        logger.warning(
            "these modules stay patched, as their class was changed after patching: %s. Undo that first (for "
            "torch.nn.utils.parametrize: remove_parametrizations), then call unpatch again",
            ", ".join(f"{name} x{count}" for name, count in stuck.items()),
        )


def _check_model(model):
    check(isinstance(model, torch.nn.Module), "model", type(model).__name__, "a torch.nn.Module or a class of models")


def _matches_of(module, flags, memory):
    """Return ([(module to swap, match)], reason).

    The reason says why `module`, or a part of it beside the matches, is left; None if nothing is.
    """
    if is_changed_since(module):
        return [], CHANGED_SINCE
    for part in (module, *module.children()):
        if reason := reason_against_metaclass(type(part)):
            return [], reason
        if any(map(torch.nn.parameter.is_lazy, part._parameters.values())):
            return [], "has parameters without a shape: call the model once, then patch it"
    if type(module).__module__.startswith("liger_hw."):
        return [], None
    if isinstance(module, torch.fx.GraphModule):
        return [], WRITTEN_CLASS
    if "forward" in vars(module):
        return [], REPLACED_FORWARD if loss.has_a_head(module) or reason_for_leaving(module, memory) else None
    if loss.has_a_head(module):
        return loss.match_loss(module, **{name: flags[name] for name in ("lora", *LOSSES)})
    try:
        match, reason = recognise(module, memory)
    except Exception as error:  # of the module's own code, such as a property
        match, reason = None, f"raises {type(error).__name__}: {error}".partition("\n")[0]
    if match is None:
        return [], reason
    if not flags.get(flag_of(match), True):
        return [], f"{flag_of(match)}=False"
    return [(module, match)], reason
