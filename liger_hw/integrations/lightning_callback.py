"""Call `liger_hw.patch` from a callback of Lightning's Trainer."""

try:
    from lightning.pytorch.callbacks import Callback
except ModuleNotFoundError:  # the same under its older name
    from pytorch_lightning.callbacks import Callback

from liger_hw.patching.flags import check_flags
from liger_hw.patching.patch import patch


class LigerHwLightningCallback(Callback):
    """Patch the module at a stage's set-up, before the strategy wraps or shards it.

    A model that the module builds later, in `configure_model`, stays unpatched: call `liger_hw.patch` there.

    Args:
        flags: the flags of `liger_hw.patch`.

    Raises:
        ValueError: as `liger_hw.patch`.

    Examples:
        >>> from liger_hw.integrations import LigerHwLightningCallback
        >>> LigerHwLightningCallback(rope=False).flags  # a Trainer of Lightning takes it in callbacks=[...]
        {'rope': False}
    """

    def __init__(self, **flags):
        check_flags(flags)
        self.flags = flags

    def setup(self, trainer, pl_module, stage):
        """Patch `pl_module`; the arguments are Lightning's."""
        patch(pl_module, **self.flags)
