"""One file per family of ops. Each file registers its ops when it is imported."""

import importlib
import pkgutil


def load_all() -> None:
    """Import every kernel file, so that `dispatch.OPS` and `tuning.CONFIGS` hold everything there is."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
