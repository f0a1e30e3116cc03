"""Names of a package that load their module on first use, so that importing the package runs nothing."""

import importlib

EXTRAS = {"transformers": "transformers"}  # a package that some names need -> the extra of liger_hw that installs it


def lazy_names(package, modules):
    """`__getattr__`, `__dir__` and `__all__` of `package`.

    Args:
        package: its name.
        modules: module, relative to the package or with its full name -> the names it provides.
    """
    home = {
        name: module if module.startswith("liger_hw.") else f"{package}.{module}"
        for module, names in modules.items()
        for name in names
    }

    def __getattr__(name):
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(home[name]), name)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
            hint = f"{package}.{name} needs the package {error.name}: pip install 'liger_hw[{EXTRAS[error.name]}]'"
            raise ModuleNotFoundError(hint, name=error.name) from error

    public = sorted(name for name in home if not name.startswith("_"))
    return __getattr__, lambda: public, public
