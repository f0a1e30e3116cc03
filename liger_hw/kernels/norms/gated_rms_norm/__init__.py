r"""Compute root-mean-square norms with a gate, or with a scale and shift of rows.

    u    = x, or x f(gate) where the gate is first          f: silu or sigmoid; 1 + scale in a modulated norm
    rstd = 1 / sqrt(mean(u^2) + eps)                        over a row, or over each group of its columns
    n    = u rstd (w + offset)
    y    = n f(gate) (+ shift), or n where the gate is first

    dn    = dy f(gate), or dy where the gate is first
    m     = dn (w + offset)
    du    = rstd (m - u rstd mean(m u rstd))                dx = du, or du f(gate) where the gate is first
    dgate = dy n f'(gate), or du x f'(gate) where the gate is first
    dw    = sum over rows of dn u rstd

Rows that share a scale and shift give them the gradients dscale = (w + offset) D and dshift = sum of dy, where D is the
sum of dy u rstd over these rows; dw is then the sum of (1 + scale) D over groups of rows.

Letters: R rows of C columns. Traffic: a gated norm reads x and gate and writes y (3RC); its backward reads x, gate and
dy and writes dx and dgate (5RC). A scale of few rows leaves 2RC and 3RC. Each backward writes one or two fp32 partial
sums a program. All are bound by memory. A row too wide for a program is read twice.
"""

import torch
from torch import rsqrt  # now, as a program may replace it later

from liger_hw.backends import device_of
from liger_hw.checks import check, check_columns, check_kernel_dtype
from liger_hw.dispatch import Cost, op, raw, widen
from liger_hw.kernels._partials import add_partials, partial_sums, programs_for_blocks
from liger_hw.kernels._rows import contiguous, rows_and_cols, rows_of, rows_or_none
from liger_hw.kernels.norms.gated_rms_norm import kernels
from liger_hw.kernels.norms.gated_rms_norm.kernels import NormForm
from liger_hw.kernels.norms.rms_norm import CASTING_MODES, rms_norm
from liger_hw.launch import launch
from liger_hw.spelling import check_known

__all__ = ["gated_rms_norm", "modulated_rms_norm"]

GATE_ACTIVATIONS = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
GATED_CASTING_MODES = ("llama", "gemma")


def _validate(x, weight):
    check(x.ndim and x.is_floating_point(), "x", x, "floating point rows")
    check_columns("weight", weight, x)


def _validate_gated(x, gate, weight, activation, casting_mode, group_size):
    _validate(x, weight)
    like = gate.shape == x.shape and gate.is_floating_point() and gate.device == x.device
    check(like, "gate", gate, f"floating point of shape {tuple(x.shape)} on {x.device}")
    check_known("activation", activation, GATE_ACTIVATIONS)
    check_known("casting_mode", casting_mode, GATED_CASTING_MODES)
    divides = group_size is None or group_size > 0 and x.shape[-1] % group_size == 0
    check(divides, "group_size", group_size, f"a divisor of the {x.shape[-1]} columns of x, or None")


def _validate_modulated(x, weight, scale, shift, casting_mode):
    _validate(x, weight)
    check_known("casting_mode", casting_mode, CASTING_MODES)
    rows, cols = rows_and_cols(x)
    for name, m in (("scale", scale), ("shift", shift)):
        if m is not None:
            fits = m.ndim and m.shape[-1] == cols and m.is_floating_point() and m.device == x.device
            check(fits, name, m, f"floating point rows of {cols} columns on {x.device}")
            m_rows = rows_and_cols(m)[0]
            check(rows % m_rows == 0 if m_rows else not rows, name, f"{m_rows} rows", f"a divisor of x's {rows}")
            check(
                not _repeats_otherwise(m, x), name, m, f"{name}.expand(x.shape), as it serves rows that do not follow"
            )


def _repeats_otherwise(m, x):
    """Tell whether torch would repeat rows of `m`, (1, T, C), in turns."""
    if m.ndim != x.ndim or m.shape == x.shape:
        return False
    sizes = list(zip(m.shape[:-1], x.shape[:-1]))
    if any(size not in (1, whole) for size, whole in sizes):
        return False
    repeated = [size < whole for size, whole in sizes if whole > 1]
    return repeated != sorted(repeated)


@op(validate=_validate_gated)
def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6,
    activation: str = "silu", gate_first: bool = False, casting_mode: str = "llama", group_size: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute RMSNorm and multiply its output or its input by an activated gate.

    Args:
        x: (..., C), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        gate: of the shape of `x`, any floating dtype.
        weight: (C,), any floating dtype, or None for no scale.
        eps: added to the mean square.
        activation: "silu" or "sigmoid", of the gate in fp32.
        gate_first: whether the gate multiplies x before the norm (Mamba-2), in fp32; otherwise the norm's output
            (gated DeltaNet).
        casting_mode: "llama" rounds to `x.dtype` the normalised row, its product with the weight and, after a gate,
            the result (Qwen3NextRMSNormGated, MambaRMSNormGated with `gate_first`). "gemma" computes everything in
            fp32 and rounds once (KimiLinearRMSNormGated, with "sigmoid").
        group_size: number of consecutive columns that are normalised alone; None: all of a row.

    Returns:
        (..., C) in `x.dtype`.

    Raises:
        ValueError: `gate` or `weight` does not fit `x`, `group_size` does not divide C, or an option is unknown.

    Examples:
        >>> liger_hw.gated_rms_norm(torch.rand(2, 8), torch.rand(2, 8), torch.ones(8)).shape
        torch.Size([2, 8])
    """
    factor = GATE_ACTIVATIONS[activation](widen(gate))
    y = widen(x) * factor if gate_first else widen(x)
    if group_size is not None:
        y = y.unflatten(-1, (-1, group_size))
    y = y * rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = y if group_size is None else y.flatten(-2)
    if casting_mode != "gemma":
        y = widen(y.to(x.dtype))
    y = y if weight is None else weight * y  # in the dtype of y or wider; autograd keeps no copy of the weight
    if gate_first:
        return y.to(x.dtype)
    if casting_mode != "gemma":
        y = widen(y.to(x.dtype))
    return (y * factor).to(x.dtype)


@op(validate=_validate_modulated)
def modulated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, scale: torch.Tensor, shift: torch.Tensor | None = None,
    eps: float = 1e-6, offset: float = 0.0, casting_mode: str = "llama",
) -> torch.Tensor:  # fmt: skip
    """Compute rms_norm(x) (1 + scale) + shift, as diffusion transformers do (adaLN, arXiv:2212.09748).

    Args:
        x: (..., C), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16.
        weight: (C,), any floating dtype, or None for no scale.
        scale: (..., C), any floating dtype, whose number of rows divides that of x: each serves as many consecutive
            rows. One row serves all; (B, 1, C) a row for each of B sequences; the shape of x a row for each row.
            (1, T, C) beside (B, T, C) is refused: expand it.
        shift: as `scale`, or None for no shift. It may have another number of rows, which costs a copy.
        eps, offset, casting_mode: as in `rms_norm`, whose output is rounded to `x.dtype`.

    Returns:
        (..., C) in `x.dtype`; scaled and shifted in fp32 and rounded once.

    Raises:
        ValueError: `weight`, `scale` or `shift` does not fit `x`, or `casting_mode` is unknown.

    Examples:
        >>> x, scale = torch.rand(2, 5, 8), torch.rand(2, 1, 8)
        >>> liger_hw.modulated_rms_norm(x, torch.ones(8), scale).shape
        torch.Size([2, 5, 8])
    """
    y = widen(rms_norm.reference(x, weight, eps, offset, casting_mode))
    y = y * (1 + widen(_for_each_row(scale, x)))
    return (y if shift is None else y + widen(_for_each_row(shift, x))).to(x.dtype)


def _for_each_row(m, x):
    """Repeat each row of `m`, to the shape of `x`."""
    if m.shape == x.shape:
        return m
    m_rows, cols = rows_and_cols(m)
    repeats = rows_and_cols(x)[0] // m_rows if m_rows else 1
    return m.reshape(m_rows, 1, cols).expand(-1, repeats, -1).reshape(x.shape)


gated_rms_norm.shards(x="... H", gate="... H", weight="H", returns="x")
modulated_rms_norm.shards(x="... H", weight="H", scale="...? H", shift="...? H", returns="x")


@gated_rms_norm.cost
def _(x, gate, weight=None, *options, **named):
    w = 0 if weight is None else weight.nbytes
    moved = 2 * x.nbytes + gate.nbytes
    return Cost(moved + w, moved + x.nbytes + gate.nbytes + 2 * w, 9 * x.numel(), 18 * x.numel())


@modulated_rms_norm.cost
def _(x, weight, scale, shift=None, *options, **named):
    scale_shift = scale.nbytes + (0 if shift is None else shift.nbytes)
    w = 0 if weight is None else weight.nbytes
    read = 2 * x.nbytes + scale.nbytes + w
    return Cost(2 * x.nbytes + scale_shift + w, read + x.nbytes + scale_shift + w, 7 * x.numel(), 13 * x.numel())


@raw()
def _gated_rms_norm_forward(
    x: torch.Tensor, gate: torch.Tensor | None, shift: torch.Tensor | None, weight: torch.Tensor | None, form: NormForm,
    *, y,
):  # fmt: skip
    rows, cols = rows_and_cols(x)
    width, groups, *_ = constants = form.constants(cols)
    read = 1 + _has_gate_per_row(gate, form, rows)
    config = kernels.gated_rms_norm_forward_config(width, x.element_size(), read, device_of(x))
    (x, x_stride), (gate, gate_stride), (shift, shift_stride) = rows_of(x), rows_or_none(gate), rows_or_none(shift)
    launch(
        kernels.gated_rms_norm_forward, (-(-rows // config["ROWS"]) * groups, 1, 1), config,
        x, gate, shift, weight, y, rows, _span(rows, form.gate_rows), x_stride, gate_stride, shift_stride, form.eps,
        form.offset, *constants,
    )  # fmt: skip


@raw()
def _gated_rms_norm_backward(
    x: torch.Tensor, gate: torch.Tensor | None, shift: torch.Tensor | None, weight: torch.Tensor | None,
    dy: torch.Tensor, form: NormForm, gate_grad: bool, shift_grad: bool, weight_grad: bool,
    *, dx, dgate, dshift, dweight,
):  # fmt: skip
    """Write the gradients.

    A `dshift` needs rows of the gate that several rows share: otherwise it is dy.
    """
    rows, cols = rows_and_cols(x)
    if not cols:
        return
    width, groups, *_ = constants = form.constants(cols)
    device, gate_per_row = device_of(x), _has_gate_per_row(gate, form, rows)
    shared = gate is not None and not gate_per_row
    spans = form.gate_rows if shared else 1
    config = kernels.gated_rms_norm_backward_config(width, x.element_size(), 2 + gate_per_row, device)
    (x, x_stride), (dy, dy_stride), (gate, gate_stride) = rows_of(x), rows_of(dy), rows_or_none(gate)
    rstd = mean = None
    if width > config["COLS"]:
        rstd, mean = (dy.new_empty(rows * groups, dtype=torch.float32) for _ in range(2))
        launch(
            kernels.gated_rms_norm_sums, (rows * groups, 1, 1),
            kernels.gated_rms_norm_sums_config(width, x.element_size(), device),
            x, gate, weight, dy, rstd, mean, _span(rows, form.gate_rows), x_stride, gate_stride, dy_stride, form.eps,
            form.offset, *constants,
        )  # fmt: skip
    span = rows // spans
    blocks = groups * -(-width // config["COLS"])
    programs = programs_for_blocks(config, rows * cols, span, blocks * spans)
    if shared:
        absent = dweight is None and dgate is None
        dw = None if absent else dy.new_empty((programs * spans, cols), dtype=torch.float32)
    else:
        dw = partial_sums(dweight, programs)
    shift_sums = None if dshift is None else dy.new_empty((programs * spans, cols), dtype=torch.float32)
    launch(
        kernels.gated_rms_norm_backward, (programs * spans * blocks, 1, 1), config,
        x, gate, weight, dy, rstd, mean, dx, None if shared else dgate, dw, shift_sums, span, spans, x_stride,
        gate_stride, dy_stride, form.eps, form.offset, *constants, shared,
    )  # fmt: skip
    if not shared:
        add_partials(dw, dweight)
        return
    span_dw = partial_sums(dweight, spans)
    config = kernels.modulation_gradients_config(cols, device)
    launch(
        kernels.modulation_gradients, (spans * -(-cols // config["COLS"]), 1, 1), config,
        gate, dw, shift_sums, weight, dgate, dshift, span_dw, programs, spans, gate_stride, form.offset, cols,
    )  # fmt: skip
    add_partials(span_dw, dweight)


def _has_gate_per_row(gate, form, rows):
    """Tell whether every row of x has a row of the gate."""
    return gate is not None and form.gate_rows == rows


def _span(rows, gate_rows):
    """Return how many consecutive rows share a row of the gate."""
    return rows // gate_rows if gate_rows else 1


@_gated_rms_norm_forward.backward()
def _(x, gate, shift, weight, form, dy, *, x_grad, gate_grad, shift_grad, weight_grad):
    shift_grad_is_dy = shift_grad and form.gate_rows == rows_and_cols(x)[0]  # the gradient of such a shift is dy
    dx, dgate, dshift, dweight = _gated_rms_norm_backward(
        x, gate, shift, weight, dy, form, gate_grad, shift_grad and not shift_grad_is_dy, weight_grad
    )
    if shift_grad_is_dy:
        # autograd keeps a view as the shift's gradient, and would add later ones to the memory of dy
        dshift = (dy if dy.shape == shift.shape else dy.reshape(shift.shape).clone()).to(shift.dtype)
    return dx, dgate, dshift, dweight


def normalise(x, form, gate=None, shift=None, weight=None):
    return _gated_rms_norm_forward.apply(x, gate, shift, contiguous(weight), form)


@gated_rms_norm.register("triton")
def _(x, gate, weight, eps, activation, gate_first, casting_mode, group_size):
    check_kernel_dtype("gate", gate)
    rows, cols = rows_and_cols(x)
    groups = cols // group_size if group_size else 1
    form = NormForm(eps, 0.0, casting_mode, activation, gate_first, groups, rows)
    return normalise(x, form, gate, weight=weight)


@modulated_rms_norm.register("triton")
def _(x, weight, scale, shift, eps, offset, casting_mode):
    check_kernel_dtype("scale", scale)
    rows = rows_and_cols(scale)[0]
    if shift is not None:
        check_kernel_dtype("shift", shift)
        if rows_and_cols(shift)[0] != rows:
            scale, shift, rows = _for_each_row(scale, x), _for_each_row(shift, x), rows_and_cols(x)[0]
    return normalise(x, NormForm(eps, offset, casting_mode, "modulation", False, 1, rows), scale, shift, weight)
