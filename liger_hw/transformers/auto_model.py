"""Define auto classes of transformers that patch their models."""

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from liger_hw.patching.flags import FLAGS
from liger_hw.patching.patch import patch


class _PatchesModels:
    """Patch the models that an auto class of transformers builds."""

    # calls the auto class, not super(): transformers looks up remote code by the name of the called class

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        return cls._patched(cls.auto_class.from_pretrained, pretrained_model_name_or_path, *model_args, **kwargs)

    @classmethod
    def from_config(cls, config, **kwargs):
        return cls._patched(cls.auto_class.from_config, config, **kwargs)

    @staticmethod
    def _patched(make, *args, **kwargs):
        flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
        loaded = make(*args, **kwargs)
        patch(loaded[0] if isinstance(loaded, tuple) else loaded, **flags)  # a tuple with output_loading_info=True
        return loaded


class AutoLigerKernelForCausalLM(_PatchesModels, AutoModelForCausalLM):
    """`AutoModelForCausalLM` that patches models of any type by structure.

    `from_pretrained` and `from_config` take the flags of `liger_hw.patch` beside their own arguments.

    Examples:
        >>> model = liger_hw.AutoLigerKernelForCausalLM.from_config(model.config, rope=False, rms_norm=False)
    """

    auto_class = AutoModelForCausalLM


class AutoLigerKernelForImageTextToText(_PatchesModels, AutoModelForImageTextToText):
    """`AutoModelForImageTextToText` that patches models as `AutoLigerKernelForCausalLM` does."""

    auto_class = AutoModelForImageTextToText
