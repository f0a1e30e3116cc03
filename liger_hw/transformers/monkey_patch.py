"""Define `apply_liger_kernel_to_*`: `patch` with the names and flags of `liger_kernel`."""

import inspect
import os
import sys

from liger_hw.checkpointing.budget import BUDGET_VARIABLE
from liger_hw.checks import check
from liger_hw.patching.patch import patch
from liger_hw.spelling import check_known
from liger_hw.transformers.families import FAMILIES, LOSS_DEFAULTS, MODEL_TYPES, OPEN, VISION


def _check_assigned():
    """Refuse a loss that a program put into the stand-in, as Axolotl's key liger_use_token_scaling does.

    Raises:
        ValueError: liger_kernel's models would call it, and those that `patch` makes do not.
    """
    module = sys.modules.get("liger_kernel.transformers.functional")
    if getattr(getattr(module, "__spec__", None), "origin", None) == "liger_hw.stand_in.finder":
        name = "liger_fused_linear_cross_entropy"
        instead = "model(..., use_token_scaling=True), or another option of the loss: patched models do not call it"
        check(name not in vars(module), f"{module.__name__}.{name}", "another function", instead)


def _patch(model, **flags):
    """Call `patch` with the budget of the environment, unless the caller gives one."""
    _check_assigned()
    return patch(model, **{"activations": os.environ.get(BUDGET_VARIABLE)} | flags)


def _function_of(family, defaults, is_open=False):
    """Return `apply_liger_kernel_to_<family>` with the parameters `defaults`."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=default) for name, default in defaults.items()]
    if is_open:
        parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))

    def apply(*args, **kwargs):
        check(len(args) <= len(defaults), "arguments", f"{len(args)} positional ones", f"at most {len(defaults)}")
        arguments = dict(zip(defaults, args))
        for name in kwargs:
            if not is_open:
                check_known("argument", name, defaults)
            check(name not in arguments, name, "two arguments of this name", "one")
        arguments |= kwargs
        model = arguments.pop("model", None)
        return _patch(class_of(family) if model is None else model, **_flags(defaults, arguments))

    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{family}"
    apply.__doc__ = f"""`liger_hw.patch` for the {family} family.

    Args:
        {", ".join(f"{name}={value}" for name, value in defaults.items() if name != "model")}: as in `liger_hw.patch`.
        model: the model to patch; None for every model of the family that is built from now on, until
            `liger_hw.unpatch` of its class.

    Returns:
        what `liger_hw.patch` returns.

    Raises:
        ValueError: an unknown flag, cross_entropy together with fused_linear_cross_entropy, or a family that the
            installed transformers does not have.

    Examples:
        >>> from liger_hw.transformers import apply_liger_kernel_to_{family}
        >>> summary = apply_liger_kernel_to_{family}(model=model)
    """
    apply.__signature__ = inspect.Signature(parameters)
    return apply


def _flags(defaults, arguments):
    """Return the flags of `patch`: a family's defaults with the arguments of a call."""
    flags = dict.fromkeys(LOSS_DEFAULTS, False) | {name: value for name, value in defaults.items() if name != "model"}
    if arguments.get("fused_linear_cross_entropy") and "cross_entropy" not in arguments:
        flags["cross_entropy"] = False  # True is granite's default
    return flags | arguments


def class_of(model_type):
    """Return one model class of a family; `patch` accepts any of them.

    Raises:
        ValueError: the installed transformers has no such model type.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    for mapping in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", None):
        name = f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES"
        names = getattr(modeling_auto, name, {}).get(model_type)
        if names:
            return getattr(transformers, names[0] if isinstance(names, (tuple, list)) else names)
    where = f"a model type of transformers {transformers.__version__}"
    check(MODEL_TYPES.get(model_type, model_type) != model_type, "model_type", repr(model_type), where)
    return class_of(MODEL_TYPES[model_type])


class _ByModelType(dict):
    """Model type -> function, for `MODEL_TYPES` and, on look-up, all other types."""

    def __missing__(self, model_type):
        try:
            class_of(model_type)
        except ValueError as error:
            raise KeyError(model_type) from error
        return self.setdefault(model_type, _function_of(model_type, VISION | {"geglu": True}))

    def __contains__(self, model_type):
        return self.get(model_type) is not None

    def get(self, model_type, default=None):
        try:
            return self[model_type]
        except KeyError:
            return default


_FUNCTIONS = {family: _function_of(family, defaults, family in OPEN) for family, defaults in FAMILIES.items()}
globals().update((function.__name__, function) for function in _FUNCTIONS.values())
MODEL_TYPE_TO_APPLY_LIGER_FN = _ByModelType({name: _FUNCTIONS[family] for name, family in MODEL_TYPES.items()})


def _apply_liger_kernel_to_instance(model, **kwargs):
    """Call `liger_hw.patch(model, **kwargs)`; Hugging Face's Trainer calls this for any model type."""
    return _patch(model, **kwargs)


def _apply_liger_kernel(model_type, **kwargs):
    """Call `apply_liger_kernel_to_<model_type>` without a model, with any flag of `liger_hw.patch`.

    Raises:
        ValueError: Hugging Face has no model of that type, or as `liger_hw.patch`.
    """
    return _patch(class_of(model_type), **kwargs)
