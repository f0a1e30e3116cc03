"""Prove by running a rotary function which `rope` computes it, and replace it.

Models differ in the pairs of values that they rotate, in the layout of their tables of cosines and sines, in their
rounding, and in their arguments: q and k, or one of them; cos and sin, or complex numbers.
"""

import functools
import inspect
import itertools
from dataclasses import dataclass, replace

import torch

from liger_hw.checks import KERNEL_DTYPES
from liger_hw.dispatch.generated import define, function_source
from liger_hw.kernels.attention.rope import LAYOUTS, rope
from liger_hw.patching.probing import PROBE_DTYPES, generator, outputs, random_rows
from liger_hw.patching.witnesses import is_torchs

LEADING = {  # form of a function -> names of its leading parameters, None allows any name
    "q, k, cos, sin": (None, None, "cos", "sin"),
    "x, cos, sin": (None, "cos", "sin"),
    "x, sin, cos": (None, "sin", "cos"),
    "q, k, freqs_cis": (None, None, "freqs_cis"),
}
OPTIONAL_ARGUMENTS = {"position_ids", "unsqueeze_dim"}
TABLES = ("full", "first_half", "shared")  # one value per head entry; the same, second half unused; one per pair
SAME = [(dtype, dtype) for dtype in PROBE_DTYPES]  # dtypes of heads and tables
NARROWER = [(dtype, torch.float32) for dtype in (torch.bfloat16, torch.float16)]  # heads than tables
WIDER = [pair[::-1] for pair in NARROWER]
UNLESS_POSITIONS = " if position_ids is defaults.get('position_ids') else None"
DIRECT, PROMOTED = "direct", "promoted"  # for two dtypes, call the op without casts, or cast to the wider dtype


@dataclass(frozen=True)
class Rotation:
    """Arguments with which the op `rope` computes a model's rotary function.

    Attributes:
        form: a key of `LEADING`.
        layout, wide: options of the op.
        tables: one of `TABLES`.
        reverse: the function rotates by the negative angle.
        axis: the heads dimension of q and k, where the function has no `unsqueeze_dim`.
        axes: the heads dimensions that were shown.
        ignores_positions: the function has no `position_ids`, or does not use them.
        partial: of heads wider than the tables, the function rotates the first part and returns the rest unchanged.
        flat: the function also takes (tokens, heads, head_dim) with tables of (tokens, head_dim).
        narrower, wider: `DIRECT`, `PROMOTED` or None (only the function itself computes it), for heads of a narrower
            and of a wider dtype than the tables'.
    """

    form: str
    layout: str = "half"
    wide: bool = False
    tables: str = "full"
    reverse: bool = False
    axis: int | None = None
    axes: tuple = ()
    ignores_positions: bool = True
    partial: bool = False
    flat: bool = False
    narrower: str | None = None
    wider: str | None = None

    @property
    def is_complex(self):
        """Tell whether the table contains complex numbers."""
        return self.form.endswith("freqs_cis")

    def __str__(self):
        """List the options that differ from their defaults."""
        shown = {"layout": "half", "wide": False, "tables": "full", "reverse": False}
        return ", ".join(f"{n}={getattr(self, n)!r}" for n, usual in shown.items() if getattr(self, n) != usual)


def parameters(function):
    """Return the parameters of a function, or of a module's forward."""
    function = function.forward if isinstance(function, torch.nn.Module) else function
    return inspect.signature(function).parameters


def prove_rotation(function, agree):
    """Return the `Rotation` that `function` computes, or None.

    Args:
        function: a model's rotary function.
        agree: (function, replacement, cases) -> bool, whether both are bitwise equal in every case.
    """
    if not callable(function):
        return None
    names = list(parameters(function))
    form = next((form for form, leading in LEADING.items() if _leads(names, leading)), None)
    if form is None or set(names[len(LEADING[form]) :]) - OPTIONAL_ARGUMENTS:
        return None
    axes = (None,) if "unsqueeze_dim" in names else (1, 2)
    is_complex = form.endswith("freqs_cis")
    tables = ("shared",) if is_complex else TABLES
    for axis, table, layout, wide, reverse in itertools.product(axes, tables, LAYOUTS, (False, True), (False, True)):
        if layout != "half" and reverse or is_complex and not wide:
            continue
        rotation = Rotation(form, layout, wide, table, reverse, axis)
        if agree(function, by_op(rotation), _cases(rotation, SAME)):
            return _prove_special_cases(function, rotation, agree)
    return None


def _prove_special_cases(function, rotation, agree):
    """Add the special cases that `rotation` covers; None if the op rotates another part."""
    partial_cases = _cases(rotation, SAME, partial=True)
    partial = agree(function, by_op(rotation), partial_cases)
    if not partial and outputs(function, partial_cases[:1]) is not None:
        return None
    axes = (rotation.axis or 1,)
    if rotation.axis is None:
        second = replace(rotation, axis=2)
        if agree(functools.partial(function, unsqueeze_dim=2), by_op(second), _cases(second, SAME)):
            axes = 1, 2
    flat = rotation.axis == 2 and agree(function, by_op(rotation), _cases(rotation, SAME, flat=True))
    narrower = wider = DIRECT
    if not rotation.is_complex:
        narrower, wider = (_prove_mixed(function, rotation, agree, pairs) for pairs in (NARROWER, WIDER))
    ignores = "position_ids" not in parameters(function) or _ignores_positions(function, rotation, agree)
    return replace(
        rotation, axes=axes, ignores_positions=ignores, partial=partial, flat=flat, narrower=narrower, wider=wider
    )


def _ignores_positions(function, rotation, agree):
    """Tell whether `position_ids` change no result."""
    cases = _cases(rotation, SAME[:1])
    positions = torch.tensor([[3, 0, 1, 4, 2], [1, 1, 0, 2, 0]])
    forms = positions, positions[:1], positions[0]
    return all(agree(functools.partial(function, position_ids=form), by_op(rotation), cases) for form in forms)


def _prove_mixed(function, rotation, agree, pairs):
    """Return `DIRECT` or `PROMOTED` for these pairs of dtypes, or None if neither call agrees."""
    cases = _cases(rotation, pairs)
    for call in (DIRECT, PROMOTED):
        if agree(function, by_op(rotation, promoted=call == PROMOTED), cases):
            return call
    return None


def by_op(rotation, promoted=False):
    """Return the function that computes a rotation with the reference of `rope`."""
    return lambda *args: _rotate(rope.reference, rotation, args, rotation.axis or 1, promoted)


def _leads(names, leading):
    return len(names) >= len(leading) and all(due in (None, name) for due, name in zip(leading, names))


def _cases(rotation, dtypes, **kwargs):
    return [case_of(rotation, *pair, **kwargs) for pair in dtypes]


def case_of(rotation, dtype, table_dtype, partial=False, flat=False, batch=2, length=5, width=16):
    """Build arguments as a model passes them, with different table halves, unlike any model's."""
    random = functools.partial(random_rows, generator())
    axis = rotation.axis or 1
    shapes = [(batch, heads, length, width) if axis == 1 else (batch, length, heads, width) for heads in (4, 2)]
    q, k = (random(*(shape[1:] if flat else shape)).to(dtype) for shape in shapes)
    rotary_dim = width - 4 if partial else width
    angle = random(batch, length, rotary_dim // 2 if rotation.tables == "shared" else rotary_dim)
    angle = angle[0] if flat else angle
    cos, sin = angle.cos().to(table_dtype), angle.sin().to(table_dtype)
    if rotation.is_complex:
        return q, k, torch.complex(angle.cos(), angle.sin())
    if rotation.form.startswith("q"):
        return q, k, cos, sin
    return (q, cos, sin) if rotation.form == "x, cos, sin" else (q, sin, cos)


def _rotate(rope, rotation, args, axis, promoted=False):
    """Call the op or its reference with the leading arguments of a function."""
    q, k, cos, sin = _unpacked(rotation, args)
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


def _unpacked(rotation, args):
    """Return (q, k or None, cos, sin) from the leading arguments of a function."""
    if rotation.is_complex:
        cos, sin = torch.view_as_real(args[2].resolve_conj()).unbind(-1)
        return args[0], args[1], cos, sin
    if rotation.form.startswith("q"):
        return args
    x, first, second = args
    return (x, None, first, second) if rotation.form == "x, cos, sin" else (x, None, second, first)


class _Source(str):
    """A default that a signature shows as source."""

    __repr__ = str.__str__


def replacement(original, rotation):
    """Build a function like `original` that calls the op where a probe agreed."""
    defaults = {p.name: p.default for p in parameters(original).values() if p.default is not p.empty}
    shown = [p.replace(annotation=p.empty) for p in parameters(original).values()]
    shown = [p.replace(default=_Source(f"defaults[{p.name!r}]")) if p.name in defaults else p for p in shown]
    leading = ", ".join(p.name for p in shown[: len(LEADING[rotation.form])])
    passed = ", ".join(f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in shown)
    lines = [
        f"leading, axis = ({leading}), {'unsqueeze_dim' if rotation.axis is None else rotation.axis}",
        f"call = proved_call(rotation, leading, axis){'' if rotation.ignores_positions else UNLESS_POSITIONS}",
        f"return original({passed}) if call is None else rotate(rope, rotation, leading, axis, call == PROMOTED)",
    ]
    function = define(
        "rotary", function_source(f"apply_rotary_pos_emb{inspect.Signature(shown)}", lines), original=original,
        rotation=rotation, defaults=defaults, proved_call=_proved_call, rotate=_rotate, rope=rope, PROMOTED=PROMOTED,
    )["apply_rotary_pos_emb"]  # fmt: skip
    function.replaces = original, rotation
    return function


def _proved_call(rotation, leading, axis):
    """Return `DIRECT` or `PROMOTED`, or None where no probe proved agreement."""
    if not all(map(is_torchs, leading)):  # without k, some return q alone
        return None
    if rotation.is_complex and not leading[2].is_complex():
        return None
    q, k, cos, sin = _unpacked(rotation, leading)
    if q.dtype not in KERNEL_DTYPES or cos.dtype not in KERNEL_DTYPES or cos.requires_grad or sin.requires_grad:
        return None
    if (sin.dtype, sin.shape) != (cos.dtype, cos.shape) or k is not None and (k.dtype, k.ndim) != (q.dtype, q.ndim):
        return None
    if (q.ndim, cos.ndim) != (4, 3):
        if not (rotation.flat and (q.ndim, cos.ndim) == (3, 2)):
            return None
    elif cos.shape[0] not in (1, q.shape[0]):
        return None
    if axis not in rotation.axes or cos.shape[-2] != q.shape[q.ndim - 1 - axis]:
        return None
    heads = q.ndim - 4 + axis
    if k is not None and (k.shape[:heads], k.shape[heads + 1 :]) != (q.shape[:heads], q.shape[heads + 1 :]):
        return None
    rotary_dim = cos.shape[-1] * (2 if rotation.tables == "shared" else 1)
    if rotary_dim % 2 or rotary_dim != q.shape[-1] and not (rotation.partial and rotary_dim < q.shape[-1]):
        return None
    if rotation.is_complex or q.dtype == cos.dtype:
        return DIRECT
    promoted = torch.promote_types(q.dtype, cos.dtype)
    if promoted not in (q.dtype, cos.dtype):  # fp16 and bf16
        return None
    return rotation.wider if promoted == q.dtype else rotation.narrower
