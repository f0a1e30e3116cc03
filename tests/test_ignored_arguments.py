"""Public arguments that influence nothing are those of a table in docs/adapters_and_trainers.md, and no others.

The search reads the source. An argument counts as ignored if no line reads it, or only lines that check it, pass it to
an argument that is itself ignored, or keep it as an attribute that no method reads.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import textwrap
from fnmatch import fnmatch
from pathlib import Path

import liger_hw
from liger_hw import chunked_loss, losses, stand_in, transformers
from liger_hw.dispatch import OPS
from liger_hw.losses.policy import OPTION_NAMES

PACKAGES = (chunked_loss, losses, stand_in, transformers)
CHECKS = ("check", "check_known", "check_numbers", "check_labels", "check_head", "check_choice")
INTERNAL = ("liger_hw.losses.arguments", "liger_hw.losses.engine", "liger_hw.losses.preference_formulas")
NEEDS_TRL = "liger_hw.stand_in.orpo_trainer"
PAGE = Path(__file__).parents[1] / "docs" / "adapters_and_trainers.md"


def modules():
    names = {
        info.name
        for package in PACKAGES
        for info in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
        if info.name != NEEDS_TRL and not info.ispkg
    }
    names |= {getattr(liger_hw, name).__module__ for name in liger_hw.__all__}
    return [importlib.import_module(name) for name in sorted(names)]


def plain(function):
    """Return the function that a method, a decorator or a class's constructor runs, or None."""
    if isinstance(function, (staticmethod, classmethod)):
        function = function.__func__
    if inspect.isclass(function):
        function = vars(function).get("__init__")
    return inspect.unwrap(function) if callable(function) and hasattr(function, "__name__") else None


class Search:
    def __init__(self):
        self.sources = {}  # function -> (tree, class or None, module)
        for module in modules():
            for value in vars(module).values():
                if getattr(value, "__module__", None) != module.__name__:
                    continue
                for member in vars(value).values() if inspect.isclass(value) else [value]:
                    self._add(member, value if inspect.isclass(value) else None, module)
        ops = {inspect.unwrap(op) for op in OPS.values()}  # parity cases hold each of their options
        self.ignored = {
            (function, name)
            for function, (tree, _, _) in self.sources.items()
            if function not in ops and not self._only_raises(tree)
            for name in self._parameters(tree)
        }
        before = None
        while before != len(self.ignored):
            before = len(self.ignored)
            self.ignored -= {found for found in self.ignored if self._reads(*found)}

    def _add(self, member, owner, module):
        function = None if inspect.isclass(member) else plain(member)
        if not inspect.isfunction(function) or function.__code__.co_filename != module.__file__:  # or generated
            return
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        if isinstance(tree, ast.FunctionDef):
            self.sources[function] = tree, owner, module

    @staticmethod
    def _only_raises(tree):
        body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        return all(isinstance(statement, (ast.Raise, ast.Pass)) for statement in body)

    @staticmethod
    def _parameters(tree):
        of = tree.args
        named = [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs, of.vararg, of.kwarg) if a]
        return [name for name in named if name not in ("self", "cls", "ctx") and not name.startswith("_")]

    def _reads(self, function, name):
        tree, owner, module = self.sources[function]
        if self._uses(tree, lambda n: isinstance(n, ast.Name) and n.id == name, owner, module):
            return True
        if "super().__init__(locals())" in ast.unparse(tree):  # of an `OptionsModule`
            return self._option_read(owner, name)
        scopes = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "locals"]
        picks = "policy_options(" in ast.unparse(tree) and "setattr" not in ast.unparse(tree)
        return bool(scopes) and (not picks or name in OPTION_NAMES)

    def _option_read(self, owner, name):
        """Tell whether a method reads `self.name`, or passes `**self.options` to a function that reads `name`."""
        for tree, other, module in self.sources.values():
            if other is None or not (issubclass(other, owner) or issubclass(owner, other)):
                continue
            if self._uses(tree, lambda n: isinstance(n, ast.Attribute) and n.attr == name, other, module):
                return True
            for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
                if any(k.arg is None and ast.unparse(k.value) == "self.options" for k in call.keywords):
                    if (self._callee(call.func, other, module)[0], name) not in self.ignored:
                        return True
        return False

    def _attribute_read(self, owner, name):
        """Tell whether a method of the class, a base or a subclass uses `self.name`, or all attributes."""
        for tree, other, module in self.sources.values():
            if other is None or not (issubclass(other, owner) or issubclass(owner, other)):
                continue
            if "vars(self)" in ast.unparse(tree):
                return True
            if self._uses(tree, lambda n: isinstance(n, ast.Attribute) and n.attr == name, other, module):
                return True
        return False

    def _uses(self, tree, is_it, owner, module):
        """Tell whether the tree reads a node that `is_it` accepts, other than as the page's docstring says."""
        without_effect = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in CHECKS:
                without_effect.update(ast.walk(node))
            elif isinstance(node, ast.Call):
                without_effect.update(value for value in self._passed_to_ignored(node, owner, module) if is_it(value))
            elif isinstance(node, ast.Assign) and owner is not None:
                targets, values = node.targets, [node.value]
                if isinstance(node.value, ast.Tuple) and isinstance(targets[0], ast.Tuple):
                    targets, values = targets[0].elts, node.value.elts
                for target, value in zip(targets, values):
                    if isinstance(target, ast.Attribute) and is_it(value) and ast.unparse(target.value) == "self":
                        without_effect |= {value} if not self._attribute_read(owner, target.attr) else set()
        return any(
            is_it(node) and isinstance(node.ctx, ast.Load) and node not in without_effect for node in ast.walk(tree)
        )

    def _passed_to_ignored(self, call, owner, module):
        callee, skipped = self._callee(call.func, owner, module)
        if callee not in self.sources:
            return
        names = list(inspect.signature(callee).parameters)[skipped:]
        for name, value in zip(names, call.args):
            if isinstance(value, ast.Starred):
                break
            if (callee, name) in self.ignored:
                yield value
        for keyword in call.keywords:
            if (callee, keyword.arg) in self.ignored:
                yield keyword.value

    def _callee(self, node, owner, module):
        """Return (function, parameters that the call fills by itself)."""
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()" and owner is not None:
            for base in owner.__mro__[1:]:
                if node.attr in vars(base):
                    return plain(vars(base)[node.attr]), 0 if isinstance(vars(base)[node.attr], staticmethod) else 1
            return None, 0
        found = vars(module).get(ast.unparse(node).split(".")[0])
        for name in ast.unparse(node).split(".")[1:]:
            found = inspect.getattr_static(found, name, None)
        return plain(found), int(inspect.isclass(found))


def documented():
    """Return (argument, pattern of functions) of each row of the table."""
    section = PAGE.read_text().split("## Arguments without effect\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    names = [[re.findall(r"`([^`]+)`", cell) for cell in row[1:3]] for row in rows]
    return [(argument, pattern) for arguments, patterns in names for argument in arguments for pattern in patterns]


def test_the_table_is_complete_and_current():
    ignored = {
        (name, function.__qualname__.replace(".__init__", "").replace(".apply", "").replace(".forward", ""))
        for function, name in Search().ignored
        if not function.__module__.startswith((*INTERNAL, "liger_hw.kernels"))
        and not any(part.startswith("_") for part in function.__qualname__.replace("__init__", "new").split("."))
        and not function.__name__.startswith("check")
    }
    table = documented()
    missing = {(n, f) for n, f in ignored if not any(n == name and fnmatch(f, p) for name, p in table)}
    assert not missing, f"arguments without effect that docs/adapters_and_trainers.md does not list: {sorted(missing)}"
    served = [(name, p) for name, p in table if not any(n == name and fnmatch(f, p) for n, f in ignored)]
    assert not served, f"the table of docs/adapters_and_trainers.md lists arguments that have an effect: {served}"
