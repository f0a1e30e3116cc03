"""Write the stubs (`__init__.pyi`) of packages with lazy names, which type checkers read.

    python -m liger_lab.tools.stubs

tests/test_types.py fails where a stub differs from the names of its package.
"""

import ast
import importlib
import inspect
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("liger_hw", "liger_hw.chunked_loss", "liger_hw.integrations", "liger_hw.transformers")
HEADER = "# Written by `python -m liger_lab.tools.stubs` from the names of __init__.py.\n"


def file_of(module: str) -> Path:
    """Return the source file of a module without importing it."""
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def names_in_source(module: str) -> set[str]:
    """Return the names that statements at the top of a module's source bind."""
    names = set()
    for node in ast.parse(file_of(module).read_text()).body:
        names |= {getattr(node, "name", None)}
        names |= {alias.asname or alias.name for alias in getattr(node, "names", ())}
        names |= {target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)}
    return names


def declaration(module: str, name: str) -> str:
    """Declare a function that its module makes at run time."""
    function = getattr(importlib.import_module(module), name)
    kinds = {inspect.Parameter.VAR_KEYWORD: "**{}: Any"}
    parameters = [
        kinds.get(p.kind, "{}: bool = ..." if isinstance(p.default, bool) else "{}: Any = ...").format(p.name)
        for p in inspect.signature(function).parameters.values()
    ]
    lines = "".join(f"    {p},\n" for p in parameters)
    return f"def {name}(\n{lines}) -> Any: ..."


def stub(package: str) -> str:
    """Write the stub of a package: its lazy names and its functions."""
    imports, declarations = ["from typing import Any"], ["__version__: str"] * (package == "liger_hw")
    for relative, names in importlib.import_module(package)._NAMES.items():
        module = relative if relative.startswith("liger_hw.") else f"{package}.{relative}"
        written = names_in_source(module)
        imports += [f"from {module} import {name} as {name}" for name in names if name in written]
        declarations += [declaration(module, name) for name in names if name not in written]
    functions = [node for node in ast.parse(file_of(package).read_text()).body if isinstance(node, ast.FunctionDef)]
    declarations += [f"def {function.name}() -> bool: ..." for function in functions]
    return HEADER + "\n".join([*sorted(imports), *declarations]) + "\n"


if __name__ == "__main__":
    for package in PACKAGES:
        file_of(package).with_suffix(".pyi").write_text(stub(package))
