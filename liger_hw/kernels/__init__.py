"""Kernels, one file for each family of ops; importing a file registers its ops."""

import importlib
import pkgutil


def load_all() -> None:
    """Import every kernel file, so that `dispatch.OPS` and `tuning.choice.CONFIGS` are complete."""
    for module in pkgutil.walk_packages(__path__, f"{__name__}."):
        importlib.import_module(module.name)
