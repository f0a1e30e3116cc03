"""Define functions by source text, where a loop or a closure would cost host time."""

import inspect
import itertools
import linecache
import textwrap

_numbers = itertools.count()


def define(name: str, source: str, **constants) -> dict:
    """Run `source`, and return its names.

    Tracebacks and debuggers show its lines.

    Args:
        constants: names that the source uses. They stay in the result, where a later change has effect.
    """
    source = textwrap.dedent(source)
    filename = f"<liger_hw {name} {next(_numbers)}>"
    linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename
    exec(compile(source, filename, "exec"), constants)
    return constants


def function_source(signature: str, lines) -> str:
    """Return the source of a function of these lines."""
    return "\n".join([f"def {signature}:", *(f"    {line}" for line in lines), "", ""])


def described(function) -> str:
    """Name a function in an error, with its line: many are called `_`."""
    return f"{function.__module__}.{function.__qualname__} (line {function.__code__.co_firstlineno})"


def arguments_by_name(function, available) -> str:
    """Return the text of a call's arguments, each a name of `available`.

    A parameter that is not available keeps its default. A function with `*others` gets all by position.

    Raises:
        TypeError: such a parameter has no default.
    """
    texts, skipped, parameters = [], False, inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return ", ".join(available)
    for p in parameters:
        if p.name in available:
            texts.append(f"{p.name}={p.name}" if skipped or p.kind is p.KEYWORD_ONLY else p.name)
        elif p.default is p.empty:
            allowed = ", ".join(available)
            raise TypeError(f"{described(function)}: got the parameter {p.name!r}, allowed: {allowed}")
        else:
            skipped = True
    return ", ".join(texts)
