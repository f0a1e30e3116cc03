"""The package `liger_kernel`, made of this library while the process runs.

    liger_hw.integrations.install()          # first, before the trainer looks whether liger_kernel is there
    python -m liger_hw.run train.py ...      # the same for a script, and for every Python that it starts

Programs then find its modules, its names and the metadata of its distribution, and get this library. There is no
directory of that name: one in a wheel would overwrite the files of the real package without anybody noticing.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import types
from importlib.machinery import ModuleSpec

from liger_hw.stand_in.names import MODULES

PACKAGE = "liger_kernel"
VERSION = "0.8.5+liger.hw"  # whose names these are; the suffix tells a log's reader what really runs
SITE = str(pathlib.Path(__file__).parent / "site")

_hidden = {}  # modules of the real package that were imported before this one took its place


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
    """Finds and loads the modules of `MODULES`, and the distribution."""

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
        module.__doc__ = (
            f"Stand-in by liger_hw: {', '.join(f'liger_hw.{source}' for source in sources) or 'a package'}."
        )
        if module.__name__ == PACKAGE:
            module.__version__ = VERSION
        # looked up at each use, so that importing a stand-in loads nothing and needs nothing
        module.__getattr__ = lambda name: _look_up(module.__name__, sources, name)
        module.__dir__ = lambda: sorted({*vars(module), *_public(sources)})

    def get_code(self, name):
        """For `python -m`: the source's own `main`."""
        (source,) = MODULES[name.partition(".")[2]] or (None,)
        return compile(f"from liger_hw.{source} import main\nmain()", name, "exec")


def _look_up(module, sources, name):
    if not name.startswith("__"):
        for source in sources:
            found = getattr(importlib.import_module(f"liger_hw.{source}"), name, None)
            # a submodule is imported by its own name
            if found is not None and not isinstance(found, types.ModuleType):
                return found
    raise AttributeError(f"module {module!r}, which liger_hw stands in for, has no attribute {name!r}")


def _public(sources):
    for source in sources:
        module = importlib.import_module(f"liger_hw.{source}")
        yield from getattr(module, "__all__", dir(module))


_FINDER = _Finder()


def is_installed():
    """Whether `import liger_kernel` gives the stand-in."""
    return _FINDER in sys.meta_path


def install(replace=False, children=False):
    """Make `import liger_kernel` give this library, in this process and those forked from it.

    Call it before a trainer is imported, which may look for liger_kernel then and there; transformers is made to look
    again. A second call does nothing new.

    Args:
        replace: take the place of an installed liger_kernel. Modules of it that were imported already are hidden until
            `uninstall`; names that others imported from them keep their meaning.
        children: also for every Python that this process starts, through the environment variable PYTHONPATH.

    Raises:
        RuntimeError: liger_kernel itself is installed and `replace` is False.
    """
    if not is_installed():
        if not replace and importlib.util.find_spec(PACKAGE) is not None:
            raise RuntimeError(
                "the package liger_kernel is installed, and the stand-in does not hide it unasked: "
                "install(replace=True), `python -m liger_hw.run --replace`, or pip uninstall liger-kernel"
            )
        _hidden.update(_evict())
        sys.meta_path.insert(0, _FINDER)
        importlib.invalidate_caches()
    if children:
        paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != SITE]
        os.environ["PYTHONPATH"] = os.pathsep.join([SITE, *paths])
    _let_transformers_look_again()


def uninstall():
    """Undo `install`: what was installed or imported under that name before is there again."""
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
    """What transformers noted about liger_kernel when it was imported is noted anew."""
    noted = sys.modules.get("transformers.utils.import_utils")
    available = getattr(noted, "is_liger_kernel_available", None)
    if hasattr(available, "cache_clear"):
        available.cache_clear()
    if hasattr(noted, "_liger_kernel_available"):  # 4.57
        noted._liger_kernel_available = noted._is_package_available(PACKAGE)
