"""Patch models in Axolotl, as a plugin.

    plugins:
      - liger_hw.integrations.axolotl.LigerHwPlugin

It replaces `axolotl.integrations.liger.LigerPlugin` and takes its keys, for every model type. All keys but
`liger_cross_entropy` default to true. A key that it cannot serve, or does not know, is an error.
"""

from axolotl.integrations.base import BasePlugin
from pydantic import create_model

from liger_hw.checks import check
from liger_hw.patching.patch import patch
from liger_hw.spelling import check_known

PATCHES_BY_FLAG = {  # key of the configuration -> flags of `patch`
    "liger_rope": ("rope",),
    "liger_rms_norm": ("rms_norm",),
    "liger_layer_norm": ("layer_norm",),
    "liger_glu_activation": ("swiglu", "geglu"),
    "liger_swiglu": ("swiglu", "geglu"),  # an older name of the key above
    "liger_cross_entropy": ("cross_entropy",),
    "liger_fused_linear_cross_entropy": ("fused_linear_cross_entropy",),
}
KEYS = (*PATCHES_BY_FLAG, "liger_rms_norm_gated", "liger_use_token_scaling")  # see `check_keys` for the last two
OTHER = "axolotl.integrations.liger.LigerPlugin"


# the keys of a configuration that the plugin reads
LigerHwArgs = create_model("LigerHwArgs", __module__=__name__, **dict.fromkeys(KEYS, (bool | None, None)))


def check_keys(cfg):
    """Refuse keys of liger-kernel's plugin that `patch` has no flag for, and unknown ones.

    Raises:
        ValueError: a key has another value than its default, or is unknown.
    """
    for key in cfg:
        if str(key).startswith("liger_"):
            check_known("key", key, KEYS)
    both = cfg.get("liger_swiglu") is not None and cfg.get("liger_glu_activation") is not None
    check(not both, "liger_swiglu", cfg.get("liger_swiglu"), "None beside liger_glu_activation, its newer name")
    gated, norms = cfg.get("liger_rms_norm_gated"), cfg.get("liger_rms_norm") is not False
    fits = gated is None or gated == norms
    check(fits, "liger_rms_norm_gated", gated, f"{norms} or None: liger_rms_norm decides for both kinds of norms")
    scaled = cfg.get("liger_use_token_scaling")
    call = "call liger_hw.patch and pass use_token_scaling=True to the model"
    check(not scaled, "liger_use_token_scaling", scaled, f"False or None: in a program of your own, {call}")


class LigerHwPlugin(BasePlugin):
    """Patch the model that Axolotl has built, before adapters and sharding."""

    def get_input_args(self):
        """Return the name of the class that declares the plugin's keys."""
        return f"{LigerHwArgs.__module__}.{LigerHwArgs.__qualname__}"

    def register(self, cfg):
        """Refuse to run beside Axolotl's own plugin, and with keys that this one cannot serve.

        Raises:
            ValueError: both are listed, or as `check_keys`. Axolotl drops unknown keys later.
        """
        check_keys(cfg)
        check(OTHER not in (cfg.get("plugins") or ()), "plugins", OTHER, f"one of it and {type(self).__module__}")

    def post_model_build(self, cfg, model):
        """Patch `model` by the keys of `cfg`. `liger_cross_entropy` disables the fused loss."""
        check_keys(cfg)
        flags = {}
        for key, names in PATCHES_BY_FLAG.items():
            value = cfg.get(key)
            flags |= {name: value for name in names if value is not None}
        if flags.get("cross_entropy"):
            flags.setdefault("fused_linear_cross_entropy", False)
        patch(model, **flags)
