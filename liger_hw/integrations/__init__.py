"""Serve trainers: a stand-in for `liger_kernel`, and plug-ins for trainers with an interface."""

from liger_hw._lazy import lazy_names

_NAMES = {
    "liger_hw.stand_in.finder": ("install", "is_installed", "uninstall"),
    "liger_hw.stand_in.megatron": ("apply_liger_kernel_to_megatron",),
    "trainer_callback": ("LigerHwActivationsCallback", "LigerHwCallback"),
    "lightning_callback": ("LigerHwLightningCallback",),
    "token_metrics": ("TokenMetrics",),
    "trl": ("accelerate_trl", "restore_trl"),
    "hub_kernels": ("register_hub_kernels", "unregister_hub_kernels"),
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _NAMES)
