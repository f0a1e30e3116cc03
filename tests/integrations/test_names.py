"""Every public name of liger_kernel, and every import of it in the trainers, through the stand-in.

`liger_kernel.json` holds facts of release 0.8.5: module -> name -> what takes parameters -> its parameters.
`imports.json` holds what released trainers import: package and version -> module -> names.
"""

import importlib
import inspect
import json
import pathlib

import pytest
import torch

pytest.importorskip("transformers")
HERE = pathlib.Path(__file__).parent
NAMES = json.loads((HERE / "liger_kernel.json").read_text())
IMPORTS = json.loads((HERE / "imports.json").read_text())
MUST_BE_GIVEN = inspect.Parameter.empty


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


@pytest.mark.parametrize("module", NAMES)
def test_names_and_parameters(module, stand_in):
    """The same parameters in the same order, with the same defaults; what must be given there may be left out here."""
    found = importlib.import_module(f"liger_kernel.{module}")
    for name, signatures in NAMES[module].items():
        thing = getattr(found, name)
        assert name in dir(found) or name.startswith(("_", "Liger", "liger", "apply", "torch")), name
        for what, expected in signatures.items():
            function = thing if what in ("call", "new") else getattr(thing, what)
            ours = parameters(function)
            theirs = parameters(eval(f"lambda {expected}: 0", {"torch": torch}))  # noqa: S307
            assert [p[:2] for p in ours] == [p[:2] for p in theirs], (name, what)
            for (parameter, _, default), (_, _, promised) in zip(ours, theirs):
                assert promised is MUST_BE_GIVEN or default == promised, (name, what, parameter)


@pytest.mark.parametrize("package", IMPORTS)
def test_imports_of_trainers(package, stand_in):
    for module, names in IMPORTS[package].items():
        for name in names:
            scope = {}
            exec(f"from {module} import {name}", scope)  # noqa: S102
            assert scope[name] is not None


def test_unknown_names_and_modules_are_the_usual_errors(stand_in):
    with pytest.raises(ImportError, match="unheard_of"):
        from liger_kernel.transformers import unheard_of  # noqa: F401
    with pytest.raises(ModuleNotFoundError, match="liger_kernel.unheard_of"):
        import liger_kernel.unheard_of  # noqa: F401
    with pytest.raises(AttributeError, match="stands in"):
        importlib.import_module("liger_kernel.ops").unheard_of  # noqa: B018
