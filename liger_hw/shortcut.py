"""A direct call of the C function behind Triton's launcher."""

import copy
import operator


def shortcut(compiled, meta: tuple, grid: tuple, stream, values: tuple):
    """Return a function that launches `compiled` past Triton's launcher, or None if unsafe.

    At every launch, Triton's launcher asks for facts that a kernel has for good, such as needing no scratch memory, and
    then calls a function in C. Skipping it saves 1.1 of 4.7 us a launch (an H200's host). How: call a copy of the
    launcher once with sentinels, record the order in which they reach C, then call C directly.

    The direct call is safe if every argument reaches C once and, with those of a real launch, C receives the same
    objects in the same places as from the launcher. Otherwise the launcher has another form, computes with its
    arguments or keeps one; or the kernel needs scratch memory, which is allocated at every launch.

    Args:
        compiled: Triton's compiled kernel, launched before.
        meta: the kernel's last arguments, the same at every launch.
        grid, stream, values: of a real launch; `values` are the kernel's other arguments, tensors as addresses.

    Returns:
        A function of (x, y, z, stream, values), x to z of a grid, which calls none of Triton's hooks; or None.
    """
    launcher = compiled.run
    if getattr(launcher, "global_scratch_size", 0) or getattr(launcher, "profile_scratch_size", 0):
        return None
    try:
        launch_in_c = launcher.launch
        sentinels = {name: object() for name in ("x", "y", "z", "stream")}
        sentinel_values = tuple(object() for _ in values)
        arrived = _arguments_in_c(compiled, *sentinels.values(), (*sentinel_values, *meta))
        code, constants = _direct_call(arrived, sentinels, (*sentinel_values, *meta))
        if not all(any(x is constant for constant in constants.values()) for x in _handles(compiled)):
            return None
        expected = _arguments_in_c(compiled, *grid, stream, (*values, *meta))
        direct = eval(code, {"meta": meta, "launch": lambda *arguments: arguments, **constants})(*grid, stream, values)
    except Exception:  # a launcher of another version or vendor may raise anything at a sentinel
        return None
    if len(direct) != len(expected) or not all(map(_same, direct, expected)):
        return None
    return eval(code, {"meta": meta, "launch": launch_in_c, **constants})


def _handles(compiled) -> tuple:
    return compiled.function, compiled.packed_metadata


def _arguments_in_c(compiled, x, y, z, stream, arguments: tuple) -> tuple:
    """Call a copy of the launcher that records its arguments to C; return them."""
    calls = []
    recorder = copy.copy(compiled.run)
    recorder.launch = lambda *received: calls.append(received)
    recorder(x, y, z, stream, *_handles(compiled), None, None, None, *arguments)  # no launch metadata and no hooks
    (received,) = calls
    return received


def _direct_call(arrived: tuple, sentinels: dict, arguments: tuple) -> tuple[str, dict]:
    """Return code and constants of a function that calls C in the order `arrived`.

    Raises:
        ValueError: one of `sentinels`, or `arguments` as a whole, arrived never or twice.
    """
    words, constants, place = [], {}, 0
    while place < len(arrived):
        argument, width = arrived[place], 1
        name = next((name for name, sentinel in sentinels.items() if sentinel is argument), None)
        if name is not None:
            words.append(name)
        elif _same(argument, arguments):
            words.append("(*values, *meta)")
        elif _same(arrived[place : place + len(arguments)], arguments):
            words.append("*values, *meta")
            width = len(arguments)
        else:
            words.append(f"constant_{place}")
            constants[words[-1]] = argument
        place += width
    if sorted(word.strip("()") for word in words if word not in constants) != sorted([*sentinels, "*values, *meta"]):
        raise ValueError(f"C received {', '.join(words)}")
    return f"lambda x, y, z, stream, values: launch({', '.join(words)})", constants


def _same(a, b) -> bool:
    """Tell whether `a` and `b` are one object, or tuples of the same objects."""
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(operator.is_, a, b))
    return a is b
