"""Patch models in Axolotl, as a plugin.

    plugins:
      - liger_hw.integrations.axolotl.LigerHwPlugin

It replaces `axolotl.integrations.liger.LigerPlugin` and takes its keys, for every model type. All keys but
`liger_cross_entropy` default to true.
"""

from axolotl.integrations.base import BasePlugin
from pydantic import create_model

from liger_hw.checks import check
from liger_hw.patching.patch import patch

FLAGS = {  # key of the configuration -> flags of `patch`
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_layer_norm": ("layer_norm",),
    "liger_glu_activation": ("swiglu", "geglu"),
    "liger_cross_entropy": ("cross_entropy",),
    "liger_fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
}
OTHER = "axolotl.integrations.liger.LigerPlugin"


# the keys of a configuration that the plugin reads
LigerHwArgs = create_model("LigerHwArgs", __module__=__name__, **dict.fromkeys(FLAGS, (bool | None, None)))


class LigerHwPlugin(BasePlugin):
    """Patch the model that Axolotl has built, before adapters and sharding."""

    def get_input_args(self):
        """Return the name of the class that declares the plugin's keys."""
        return f"{LigerHwArgs.__module__}.{LigerHwArgs.__qualname__}"

    def register(self, cfg):
        """Refuse to run beside Axolotl's own plugin.

        Raises:
            ValueError: both are listed.
        """
        check(OTHER not in (cfg.get("plugins") or ()), "plugins", OTHER, f"one of it and {type(self).__module__}")

    def post_model_build(self, cfg, model):
        """Patch `model` by the keys of `cfg`. `liger_cross_entropy` disables the fused loss."""
        flags = {}
        for key, names in FLAGS.items():
            value = getattr(cfg, key, None)
            flags |= {name: value for name in names if value is not None}
        if flags.get("cross_entropy"):
            flags.setdefault("fused_linear_cross_entropy", False)
        patch(model, **flags)
