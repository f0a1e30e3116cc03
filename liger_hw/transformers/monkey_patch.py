"""`apply_liger_kernel_to_*`: `patch` under the names and flags of `liger_kernel.transformers.monkey_patch`."""

from liger_hw.dispatch import check
from liger_hw.transformers.patching import patch

STANDARD = {
    "rope": True, "cross_entropy": False, "fused_linear_cross_entropy": True, "rms_norm": True, "swiglu": True,
}  # fmt: skip
# model type -> the flags of its function and their defaults
FAMILIES = {"llama": STANDARD}


def _make(model_type, defaults):
    """`apply_liger_kernel_to_<model_type>`: its flags, then `model`."""
    names = (*defaults, "model")

    def apply(*args, **kwargs):
        check(len(args) <= len(names), "arguments", f"{len(args)} positional ones", f"at most {len(names)}")
        given = dict(zip(names, args))
        for name in kwargs:
            check(name in names and name not in given, name, "an argument of this name", ", ".join(names))
        flags = defaults | given | kwargs
        model = flags.pop("model", None)
        return patch(_class_of(model_type) if model is None else model, **flags)

    apply.__name__ = apply.__qualname__ = f"apply_liger_kernel_to_{model_type}"
    apply.__doc__ = f"""`liger_hw.patch` for the {model_type} family.

    Args:
        {", ".join(f"{name}={value}" for name, value in defaults.items())}: as in `liger_hw.patch`.
        model: the model to patch; None for every model of the family that is built from now on, until
            `liger_hw.unpatch` of its class.

    Returns:
        what `liger_hw.patch` returns.

    Raises:
        ValueError: an unknown flag, or cross_entropy together with fused_linear_cross_entropy.
    """
    apply.__signature__ = _signature(defaults)
    return apply


def _signature(defaults):
    from inspect import Parameter, Signature

    both = (*defaults.items(), ("model", None))
    return Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=default) for name, default in both])


def _class_of(model_type):
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) or MODEL_MAPPING_NAMES.get(model_type)
    return getattr(transformers, names[0] if isinstance(names, (tuple, list)) else names)


MODEL_TYPE_TO_APPLY_LIGER_FN = {model_type: _make(model_type, defaults) for model_type, defaults in FAMILIES.items()}
apply_liger_kernel_to_llama = MODEL_TYPE_TO_APPLY_LIGER_FN["llama"]


def _apply_liger_kernel_to_instance(model, **flags):
    """`liger_hw.patch(model, **flags)`, under the name that Hugging Face's Trainer calls. Any model type will do."""
    return patch(model, **flags)


def _apply_liger_kernel(model_type, **flags):
    """`apply_liger_kernel_to_<model_type>` without a model.

    Raises:
        ValueError: Hugging Face has no model of that type.
    """
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    check(model_type in MODEL_MAPPING_NAMES, "model_type", repr(model_type), "a model type of transformers")
    return patch(_class_of(model_type), **flags)
