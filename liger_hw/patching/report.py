"""Report the effect of `patch` on a model, built from its configuration without its weights."""

import pathlib

import torch

from liger_hw.checks import check
from liger_hw.patching.patch import patch
from liger_hw.spelling import nearest

MAPPINGS = ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_MAPPING")


def patch_report(model, trust_remote_code=False, on_step=lambda step: None, **flags):
    """Report the modules that `liger_hw.patch` replaces and leaves, from a configuration.

    It downloads nothing and reads no weight.

    Args:
        model: a model type of transformers, for its default configuration, or a folder with a config.json.
        trust_remote_code: run the model code in that folder.
        on_step: function that gets a few words before each step.
        flags: of `liger_hw.patch`.

    Returns:
        (the model's class name, the `Summary` of `liger_hw.patch`).

    Raises:
        ValueError: as `build_without_weights`.
    """
    built = build_without_weights(model, trust_remote_code, on_step)
    on_step(f"probing the {sum(1 for _ in built.modules())} modules of {type(built).__name__}")
    return type(built).__name__, patch(built, **flags)


def build_without_weights(model, trust_remote_code=False, on_step=lambda step: None):
    """Build a model on the meta device from its configuration; arguments as `patch_report`.

    Raises:
        ValueError: the model type or folder does not exist, or transformers has no model class for the configuration or
            cannot build a model from it.
    """
    on_step("reading the configuration")
    config = _config(model, trust_remote_code)
    on_step(f"building {config.model_type} without its weights")
    try:
        with torch.device("meta"):
            return _build(config, trust_remote_code)
    except ValueError:
        raise
    except Exception as error:  # the model's own code may raise any exception
        raise ValueError(f"model: transformers cannot build {model} from this configuration: {error!r}") from error


def _config(model, trust_remote_code):
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    path = pathlib.Path(model)
    if (path / "config.json").is_file():
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    allowed = f"a model type of transformers {__version__} (such as llama) or a folder with a config.json"
    if near := None if model in CONFIG_MAPPING else nearest(model, CONFIG_MAPPING.keys(), least_share=0.75):
        raise ValueError(f"unknown model {str(model)!r}; did you mean {near!r}? Allowed: {allowed}")
    check(model in CONFIG_MAPPING, "model", repr(str(model)), allowed)
    return AutoConfig.for_model(model)


def _build(config, trust_remote_code):
    import transformers
    from transformers.models.auto import modeling_auto

    if hasattr(config, "auto_map"):
        names = [name for name in config.auto_map if name.startswith("AutoModel")]
        check(bool(names), "model", "remote code without a model", "an auto_map that names one")
        name = "AutoModelForCausalLM" if "AutoModelForCausalLM" in names else names[0]
        return getattr(transformers, name).from_config(config, trust_remote_code=trust_remote_code)
    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    mapped = [getattr(modeling_auto, mapping).get(type(config), None) for mapping in MAPPINGS]
    cls = next((cls for cls in (*named, *mapped) if cls is not None), None)
    check(cls is not None, "model", config.model_type, "a configuration that transformers has a class of models for")
    return (cls[0] if isinstance(cls, (tuple, list)) else cls)._from_config(config)
