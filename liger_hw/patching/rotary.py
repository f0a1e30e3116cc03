"""Rotary functions of models: what one computes, proved by running it, and the same by the op `rope`.

Models differ in which values make a pair, in how their tables of cosines and sines are laid out, in where they round,
and in what their function is given: q and k, or one of them; cos and sin, or complex numbers.
"""

import inspect
import itertools
import types
from dataclasses import dataclass

import torch

from liger_hw.kernels.rope import LAYOUTS, rope
from liger_hw.patching.probing import DTYPES

LEADING = {  # the form of a function -> names of its leading parameters, None for any
    "q, k, cos, sin": (None, None, "cos", "sin"),
    "x, cos, sin": (None, "cos", "sin"),
    "x, sin, cos": (None, "sin", "cos"),
    "q, k, freqs_cis": (None, None, "freqs_cis"),
}
OPTIONAL = {"position_ids", "unsqueeze_dim"}  # Hugging Face's functions do not use the first
TABLES = ("full", "first_half", "shared")  # a value for each of the head's; that, its second half unused; for each pair
MIXED = (DTYPES[::-1], DTYPES)  # narrower heads than tables, and wider
# what the op must be given to return what the function returns, where the tables' dtype is not the heads'
DIRECT, PROMOTED = "direct", "promoted"


@dataclass(frozen=True)
class Rotation:
    """How the op `rope` computes what a model's rotary function computes.

    Attributes:
        form: a key of `LEADING`.
        layout, wide: options of the op.
        tables: one of `TABLES`.
        reverse: it turns the other way.
        axis: the dimension of q and k that counts heads, where the function has no `unsqueeze_dim`.
        partial: it rotates the head of a wider tensor, too, and passes on the rest.
        flat: it takes, too, (tokens, heads, head_dim) and tables of (tokens, head_dim).
        narrower, wider: `DIRECT`, `PROMOTED` or None (the function itself must do it), for heads of a narrower and of a
            wider dtype than the tables'.
    """

    form: str
    layout: str = "half"
    wide: bool = False
    tables: str = "full"
    reverse: bool = False
    axis: int | None = None
    partial: bool = False
    flat: bool = False
    narrower: str | None = None
    wider: str | None = None

    def __str__(self):
        """What is special about it."""
        shown = {"layout": "half", "wide": False, "tables": "full", "reverse": False}
        return ", ".join(f"{n}={getattr(self, n)!r}" for n, usual in shown.items() if getattr(self, n) != usual)


def parameters(function):
    """The parameters of a function, or of a module's forward."""
    function = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(function).parameters


def rotation_of(function, agrees):
    """The `Rotation` of a function, or None.

    Args:
        function: of a model.
        agrees: (its name for original, replacement, cases) -> bool, whether both give the same bits of every case.
    """
    if not callable(function):
        return None
    names = list(parameters(function))
    forms = [form for form, leading in LEADING.items() if _leads(names, leading)]
    if not forms or set(names[len(LEADING[forms[0]]) :]) - OPTIONAL:
        return None
    form = forms[0]
    axes = (None,) if "unsqueeze_dim" in names else (1, 2)
    is_complex = form.endswith("freqs_cis")
    tables = ("shared",) if is_complex else TABLES
    for axis, table, layout, wide, reverse in itertools.product(axes, tables, LAYOUTS, (False, True), (False, True)):
        if layout != "half" and reverse or is_complex and not wide:
            continue
        found = Rotation(form, layout, wide, table, reverse, axis)

        def cases(*dtypes, found=found, **kwargs):
            return [_case(found, *pair, **kwargs) for pair in dtypes]

        def ours(found, promoted=False):
            return lambda *args: _rotate(found, args, found.axis or 1, promoted)

        if not agrees(function, ours(found), cases(*zip(DTYPES, DTYPES))):
            continue
        partial = cases(*zip(DTYPES, DTYPES), partial=True)
        rotates_partly = agrees(function, ours(found), partial)
        if not rotates_partly and _runs(function, partial[0]):
            return None  # some other part of a wider tensor than the op's
        mixed = [
            next(
                (how for how in (DIRECT, PROMOTED) if agrees(function, ours(found, how == PROMOTED), cases(pair))), None
            )
            for pair in (() if is_complex else MIXED)
        ] or [DIRECT, DIRECT]
        return Rotation(
            form, layout, wide, table, reverse, axis,
            rotates_partly,
            axis == 2 and agrees(function, ours(found), cases(*zip(DTYPES, DTYPES), flat=True)),
            *mixed,
        )  # fmt: skip
    return None


def _runs(function, args):
    try:
        function(*args)
    except Exception:  # of a stranger's function, of any kind
        return False
    return True


def _leads(names, leading):
    return len(names) >= len(leading) and all(want in (None, name) for want, name in zip(leading, names))


def _case(rotation, dtype, table_dtype, partial=False, flat=False, batch=2, length=5, width=16):
    """Arguments for a function, as a model would give it. The two halves of the tables differ, as no model's do."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    axis = rotation.axis or 1
    shapes = [(batch, heads, length, width) if axis == 1 else (batch, length, heads, width) for heads in (4, 2)]
    q, k = (random(*(shape[1:] if flat else shape)).to(dtype) for shape in shapes)
    rotary_dim = width - 4 if partial else width
    angle = random(batch, length, rotary_dim // 2 if rotation.tables == "shared" else rotary_dim)
    angle = angle[0] if flat else angle
    cos, sin = angle.cos().to(table_dtype), angle.sin().to(table_dtype)
    if rotation.form.endswith("freqs_cis"):
        freqs = torch.complex(angle.cos(), angle.sin())
        return q, k, freqs
    if rotation.form.startswith("q"):
        return q, k, cos, sin
    return (q, cos, sin) if rotation.form == "x, cos, sin" else (q, sin, cos)


def _rotate(rotation, args, axis, promoted=False):
    """The op on the leading arguments of a function."""
    q, k, cos, sin = _unpacked(rotation.form, args)
    flat = q.ndim == 3
    if flat:
        q, k, cos, sin = (None if x is None else x.unsqueeze(0) for x in (q, k, cos, sin))
    if promoted:
        dtype = torch.promote_types(q.dtype, cos.dtype)
        q, k = (None if x is None else x.to(dtype) for x in (q, k))
        cos, sin = cos.to(dtype), sin.to(dtype)
    if rotation.tables == "first_half":
        cos, sin = (t[..., : t.shape[-1] // 2] for t in (cos, sin))
    if rotation.reverse:
        sin = -sin
    shared = rotation.tables != "full"
    q, k = rope(q, k, cos, sin, unsqueeze_dim=axis, layout=rotation.layout, shared=shared, wide=rotation.wide)
    if flat:
        q, k = (None if x is None else x.squeeze(0) for x in (q, k))
    return q if rotation.form.startswith("x") else (q, k)


def _unpacked(form, args):
    if form.endswith("freqs_cis"):
        cos, sin = torch.view_as_real(args[2].resolve_conj()).unbind(-1)
        return args[0], args[1], cos, sin
    if form.startswith("q"):
        return args
    x, first, second = args
    return (x, None, first, second) if form == "x, cos, sin" else (x, None, second, first)


def replacement(original, rotation):
    """A function of the signature of a model's own `original`, computed by the op wherever it was proved to agree."""
    described = parameters(original)
    names, count = list(described), len(LEADING[rotation.form])
    usual_axis = described["unsqueeze_dim"].default if rotation.axis is None else rotation.axis

    def apply_rotary_pos_emb(*args, **kwargs):
        bound = dict(zip(names, args)) | kwargs
        leading = tuple(bound.get(name) for name in names[:count])
        axis = bound.get("unsqueeze_dim", usual_axis)
        how = _how(rotation, leading, axis)
        if how is None:
            return original(*args, **kwargs)
        return _rotate(rotation, leading, axis, how == PROMOTED)

    return apply_rotary_pos_emb


def _how(rotation, leading, axis):
    """`DIRECT` or `PROMOTED`, or None where these arguments are none that the op was shown to agree on."""
    if any(x is None for x in leading):  # without k, some return q alone
        return None
    is_complex = rotation.form.endswith("freqs_cis")
    if is_complex and not leading[2].is_complex():
        return None
    q, k, cos, sin = _unpacked(rotation.form, leading)
    if cos.dtype != sin.dtype or cos.requires_grad or k is not None and k.dtype != q.dtype:
        return None
    if (q.ndim, cos.ndim) != (4, 3):
        if not (rotation.flat and (q.ndim, cos.ndim) == (3, 2)):
            return None
    elif cos.shape[0] not in (1, q.shape[0]):
        return None
    if axis not in (1, 2) or cos.shape[-2] != q.shape[q.ndim - 1 - axis]:
        return None
    rotary_dim = cos.shape[-1] * (2 if rotation.tables == "shared" else 1)
    if rotary_dim != q.shape[-1] and not (rotation.partial and rotary_dim < q.shape[-1]):
        return None
    if is_complex or q.dtype == cos.dtype:
        return DIRECT
    return rotation.wider if torch.promote_types(q.dtype, cos.dtype) == q.dtype else rotation.narrower


def rotary_functions(cls):
    """name -> function of every global whose name says rotary and that a method of `cls` calls."""
    found = {}
    for function in _methods(cls).values():
        inner = innermost(function)
        for name in inner.__code__.co_names:
            if "rotary" in name and callable(inner.__globals__.get(name)):
                found[name] = inner.__globals__[name]
    return found


def with_rotations(cls, replaced):
    """The methods of `cls` that call one of `replaced`'s names, calling what those map to."""
    return {
        name: with_globals(function, replaced)
        for name, function in _methods(cls).items()
        if set(innermost(function).__code__.co_names) & set(replaced)
    }


def _methods(cls):
    """The functions that `cls` defines or inherits from a model's file."""
    found = {}
    for base in cls.__mro__:
        if base.__module__.startswith(("torch.", "builtins")):
            continue
        for name, member in vars(base).items():
            if isinstance(member, types.FunctionType) and not name.startswith("__"):
                found.setdefault(name, member)
    return found


def innermost(function):
    """What decorators have been put around."""
    while isinstance(getattr(function, "__wrapped__", None), types.FunctionType):
        function = function.__wrapped__
    return function


def with_globals(function, replaced):
    """A copy of `function` that finds other objects under some of its global names, below its decorators."""
    wrapped = getattr(function, "__wrapped__", None)
    namespace, closure = function.__globals__, function.__closure__
    if isinstance(wrapped, types.FunctionType):
        copy = with_globals(wrapped, replaced)
        closure = tuple(types.CellType(copy) if _content(cell) is wrapped else cell for cell in closure or ())
    else:
        copy = None
        namespace = {**namespace, **replaced}
        # Dynamo would look the names up in the module of that name, where they are the old ones
        namespace.pop("__name__", None)
    made = types.FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, closure)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(vars(function) | ({} if copy is None else {"__wrapped__": copy}))
    for name in ("__doc__", "__annotations__", "__module__", "__qualname__"):
        setattr(made, name, getattr(function, name))
    return made


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:
        return None
