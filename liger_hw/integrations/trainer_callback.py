"""`liger_hw.patch` and `liger_hw.activations` as callbacks of Hugging Face's Trainer and trainers derived from it."""

from transformers import TrainerCallback

from liger_hw.checkpointing.activations import activations
from liger_hw.checks import check
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
        ValueError: as `liger_hw.patch`; activations, which `LigerHwActivationsCallback` plans beside this callback.

    Examples:
        >>> callback = liger_hw.integrations.LigerHwCallback(rope=False)  # Trainer(model, callbacks=[callback])
    """

    def __init__(self, **flags):
        budget = flags.get("activations")
        check(budget is None, "activations", repr(budget), "LigerHwActivationsCallback(budget) beside this callback")
        check_flags(flags)
        self.flags = flags

    def on_init_end(self, args, state, control, model=None, **kwargs):
        """Patch the model unless it is patched; the arguments are the trainer's."""
        if model is not None and not any(is_swapped(module) for module in model.modules()):
            patch(model, **self.flags)

    on_train_begin = on_init_end


class LigerHwActivationsCallback(TrainerCallback):
    """Plans the activations of the trainer's model, in the place of its gradient checkpointing.

    Args:
        budget, host_budget: of `liger_hw.activations`.

    Raises:
        ValueError: as `liger_hw.activations`, when training begins.

    Examples:
        >>> callback = liger_hw.integrations.LigerHwActivationsCallback("60GiB")  # beside LigerHwCallback()
    """

    def __init__(self, budget="auto", host_budget=None):
        self.budget, self.host_budget = budget, host_budget

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Plan for the model, which is on its device now; the arguments are the trainer's."""
        activations(model, self.budget, self.host_budget)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        """Give the model its former checkpointing back."""
        activations(model, None)
