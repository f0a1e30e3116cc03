"""`liger_hw.patch` as a callback of Hugging Face's Trainer and the trainers derived from it."""

from transformers import TrainerCallback

from liger_hw.patching.flags import check_flags
from liger_hw.patching.patch import patch
from liger_hw.patching.swapping import is_swapped


class LigerHwCallback(TrainerCallback):
    """Patches the trainer's model before anything wraps or shards it.

    Given to the trainer's constructor (`callbacks=[LigerHwCallback()]`) it patches when that ends; given to
    `add_callback`, when training begins, which is too late for FSDP. A model that `model_init` makes anew is patched
    anew.

    Args:
        flags: of `liger_hw.patch`.

    Raises:
        ValueError: as `liger_hw.patch`.
    """

    def __init__(self, **flags):
        check_flags(flags)
        self.flags = flags

    def on_init_end(self, args, state, control, model=None, **kwargs):
        """Patch the model unless it is patched; the arguments are the trainer's."""
        if model is not None and not any(is_swapped(module) for module in model.modules()):
            patch(model, **self.flags)

    on_train_begin = on_init_end
