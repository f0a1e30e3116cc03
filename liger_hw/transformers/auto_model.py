"""`AutoModelForCausalLM` whose models come patched."""

from transformers import AutoModelForCausalLM

from liger_hw.transformers.patching import FLAGS, patch


class AutoLigerKernelForCausalLM(AutoModelForCausalLM):
    """`AutoModelForCausalLM`, with every model patched by structure, whatever its type.

    `from_pretrained` and `from_config` take the flags of `liger_hw.patch` beside their own arguments.
    """

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, **kwargs):
        flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
        return _patched(
            AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs), flags
        )

    @classmethod
    def from_config(cls, config, **kwargs):
        flags = {name: kwargs.pop(name) for name in FLAGS if name in kwargs}
        return _patched(AutoModelForCausalLM.from_config(config, **kwargs), flags)


def _patched(model, flags):
    patch(model, **flags)
    return model
