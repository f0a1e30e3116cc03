"""Serve the package `liger_kernel` from this library while the process runs.

    liger_hw.integrations.install()          # before a trainer looks for liger_kernel
    python -m liger_hw.run train.py ...      # the same for a script, and for every Python that it starts

Programs then find liger_kernel's modules, names and distribution metadata, and get this library. This library ships no
directory of that name, as it would silently overwrite the files of the real package.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import types
from importlib.machinery import ModuleSpec

from liger_hw.stand_in.names import KERNEL, MODULES, REPLACEMENTS

PACKAGE = "liger_kernel"
STAND_IN_VARIABLE = "LIGER_HW_STAND_IN"  # "replace": `install` takes the place of an installed liger_kernel
VERSION = "0.8.5+liger.hw"  # the release with these names; the suffix identifies this library in logs
IMPLEMENTATIONS = ("LIGER_KERNEL_IMPL", "LIGER_KERNEL_BACKEND")  # and, for one op, such a name with _RMS_NORM
SITE = str(pathlib.Path(__file__).parent / "site")

_hidden = {}  # modules of the real package that were imported before `install`


class _Distribution(importlib.metadata.Distribution):
    FILES = {
        "METADATA": f"Metadata-Version: 2.1\nName: liger-kernel\nVersion: {VERSION}\nSummary: liger_hw in its place\n",
        "top_level.txt": f"{PACKAGE}\n",
    }

    def read_text(self, filename):
        return self.FILES.get(filename)

    def locate_file(self, path):
        return pathlib.Path(__file__).parent / path


class _Finder(importlib.metadata.DistributionFinder):
    """Finder and loader of the modules of `MODULES`, and of the distribution."""

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.partition(".")
        if package == PACKAGE and module in MODULES:
            is_package = any(other.startswith(module and f"{module}.") and other != module for other in MODULES)
            return ModuleSpec(name, self, origin=__name__, is_package=is_package)

    def find_distributions(self, context=None):
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("_", "-") == "liger-kernel":
            yield _Distribution()

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        sources = MODULES[module.__name__.partition(".")[2]]
        served = ", ".join(f"liger_hw.{source}" for source in sources)
        module.__doc__ = f"Stand-in by liger_hw: {served or 'a package'}."
        if module.__name__ == PACKAGE:
            _check_implementations()
            module.__version__ = VERSION
        # look-up at each use, so that the import of a stand-in loads and needs no other module
        module.__getattr__ = lambda name: _look_up(module.__name__, name)
        module.__dir__ = lambda: sorted({*vars(module), *_public(sources)})

    def get_code(self, name):
        """Return the code that `python -m` runs, which calls the source's `main`."""
        (source,) = MODULES[name.partition(".")[2]] or (None,)
        return compile(f"from liger_hw.{source} import main\nmain()", name, "exec")


def _check_implementations():
    """Refuse variables that choose another implementation of liger_kernel, of all ops or of one."""
    for name, implementation in os.environ.items():
        if name.startswith(IMPLEMENTATIONS) and implementation and "triton" not in implementation:
            raise ImportError(
                f"{name}: got {implementation!r}, allowed: 'triton', or unset: liger_hw stands in for liger_kernel and "
                "has no other implementation"
            )


def _look_up(module, name):
    """Return the object for `name` of a stand-in.

    Raises:
        ImportError: liger_kernel has the name but this library does not; the message says what to use. (Python would
            replace the message of an AttributeError by its own.)
        AttributeError: liger_kernel has no such name, or no public one.
    """
    inner = module.partition(".")[2]
    if not name.startswith("__"):
        for source in MODULES[inner]:
            value = getattr(importlib.import_module(f"liger_hw.{source}"), name, None)
            # programs import a submodule by its own name
            if value is not None and not isinstance(value, types.ModuleType):
                return value
    instead = KERNEL if inner.startswith("ops.") and "_kernel" in name else REPLACEMENTS.get((inner, name))
    if instead is not None:
        raise ImportError(f"{module}.{name} is not served by liger_hw: {instead}")
    raise AttributeError(f"module {module!r}, which liger_hw stands in for, has no attribute {name!r}")


def _public(sources):
    for source in sources:
        module = importlib.import_module(f"liger_hw.{source}")
        names = getattr(module, "__all__", vars(module))
        yield from (name for name in names if not isinstance(vars(module).get(name), types.ModuleType))


_FINDER = _Finder()


def is_installed():
    """Tell whether `import liger_kernel` gives the stand-in.

    Examples:
        >>> liger_hw.integrations.is_installed()
        False
    """
    return _FINDER in sys.meta_path


def install(replace=None, children=False):
    """Make `import liger_kernel` give this library, in this process and those forked from it.

    Call it before the import of a trainer, which may then look for liger_kernel. An imported transformers looks again.
    A second call changes nothing.

    Args:
        replace: take the place of an installed liger_kernel. Its imported modules are hidden until `uninstall`; names
            that other modules imported from them do not change. None: if the environment has
            LIGER_HW_STAND_IN=replace, for trainers whose plug-ins call this function and which require liger_kernel.
        children: also for every Python that this process starts, through the environment variable PYTHONPATH.

    Raises:
        RuntimeError: liger_kernel itself is installed and `replace` is False.
        ValueError: LIGER_HW_STAND_IN has another value.

    Examples:
        >>> liger_hw.integrations.install()
        >>> import liger_kernel  # this library
        >>> liger_hw.integrations.uninstall()
    """
    if replace is None:
        value = os.environ.get(STAND_IN_VARIABLE, "")
        if value not in ("", "replace"):  # not by `checks`, which imports torch, in every Python of a launcher
            raise ValueError(f"{STAND_IN_VARIABLE}: got {value!r}, allowed: 'replace', or unset")
        replace = value == "replace"
    if not is_installed():
        if not replace and importlib.util.find_spec(PACKAGE) is not None:
            raise RuntimeError(
                "the package liger_kernel is installed, and the stand-in does not hide it unasked. Call "
                f"install(replace=True), run `python -m liger_hw.run --replace`, set {STAND_IN_VARIABLE}=replace (for "
                "plug-ins of trainers), or pip uninstall liger-kernel"
            )
        _hidden.update(_evict())
        sys.meta_path.insert(0, _FINDER)
        importlib.invalidate_caches()
    if children:
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != SITE]
        os.environ["PYTHONPATH"] = os.pathsep.join([SITE, *paths])
    _let_transformers_look_again()


def uninstall():
    """Undo `install`: let Python find an installed or imported liger_kernel again.

    Examples:
        >>> liger_hw.integrations.uninstall()
    """
    if is_installed():
        sys.meta_path.remove(_FINDER)
        _evict()
        sys.modules.update(_hidden)
        _hidden.clear()
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p != SITE]
    if SITE in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        if not paths:
            del os.environ["PYTHONPATH"]
    _let_transformers_look_again()


def _evict():
    names = [name for name in sys.modules if name == PACKAGE or name.startswith(f"{PACKAGE}.")]
    return {name: sys.modules.pop(name) for name in names}


def _let_transformers_look_again():
    """Clear transformers' cached result of its look-up of liger_kernel."""
    import_utils = sys.modules.get("transformers.utils.import_utils")
    is_available = getattr(import_utils, "is_liger_kernel_available", None)
    if hasattr(is_available, "cache_clear"):
        is_available.cache_clear()
    if hasattr(import_utils, "_liger_kernel_available"):  # 4.57
        import_utils._liger_kernel_available = import_utils._is_package_available(PACKAGE)
