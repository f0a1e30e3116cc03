"""The auto classes of transformers whose models come patched."""

from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from liger_hw.patching.flags import FLAGS
from liger_hw.patching.patch import patch


def _patched(make, args, kwargs):
    flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
    model = make(*args, **kwargs)
    patch(model, **flags)
    return model


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM`, with every model patched by structure, whatever its type.

    `from_pretrained` and `from_config` take the flags of `liger_hw.patch` beside their own arguments.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        # not super(): transformers looks remote code up by the name of the class that is called
        return _patched(AutoModelForCausalLM.from_pretrained, (pretrained_model_name_or_path, *model_args), kwargs)

    @classmethod
    def from_config(cls, config, **kwargs):
        return _patched(AutoModelForCausalLM.from_config, (config,), kwargs)


class AutoLigerKernelForImageTextToText(AutoModelForImageTextToText):
    """`AutoModelForImageTextToText`, with every model patched by structure: as `AutoLigerKernelForCausalLM`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        return _patched(
            AutoModelForImageTextToText.from_pretrained, (pretrained_model_name_or_path, *model_args), kwargs
        )

    @classmethod
    def from_config(cls, config, **kwargs):
        return _patched(AutoModelForImageTextToText.from_config, (config,), kwargs)
