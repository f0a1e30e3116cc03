"""Compute the root-mean-square norm of rows that a program holds, with Triton kernels."""
# the package's docstring has the formulas

import functools
from dataclasses import replace

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.kernels._configs import norm_backward_config, norm_forward_config
from liger_hw.kernels._math import in_row, in_tile, load_parameter, rounded
from liger_hw.kernels._partials import add_partials, partial_sums, programs_for
from liger_hw.kernels._rows import rows_and_cols, rows_of, rows_or_none
from liger_hw.launch import launch
from liger_hw.tuning import tuned


@tuned
def rms_norm_forward_config(cols, itemsize, device):
    return norm_forward_config(cols, device)


@tuned
def rms_norm_backward_config(cols, itemsize, read, device):
    return norm_backward_config(cols, itemsize, device, read)


@triton.jit
def _load_sum(X, RESIDUAL, S, row, at, mask, x_stride, residual_stride, cols: tl.constexpr, STORE: tl.constexpr):
    """Load x, or x + residual rounded, in fp32; store the sum where STORE."""
    x = tl.load(X + row[:, None] * x_stride + at, mask, other=0.0).to(tl.float32)
    if RESIDUAL is not None:
        x += tl.load(RESIDUAL + row[:, None] * residual_stride + at, mask, other=0.0).to(tl.float32)
        x = rounded(x, S.dtype.element_ty)
        if STORE:
            tl.store(S + row[:, None] * cols + at, x, mask)
    return x


@triton.jit
def square(x, dtype: tl.constexpr, CASTING: tl.constexpr):
    return rounded(x * x, dtype) if CASTING == "none" else x * x


@triton.jit
def rstd_of(mean, eps, dtype: tl.constexpr, CASTING: tl.constexpr):
    if CASTING == "none":
        return rounded(1.0 / tl.sqrt(rounded(rounded(mean, dtype) + eps, dtype)), dtype)
    else:
        return 1.0 / tl.sqrt(mean + eps)


@triton.jit
def _factor(w, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Return w + offset in fp32.

    A function apart from the load: a loop over rows loads once and keeps 16 bits.
    """
    w = w.to(tl.float32)
    return rounded(rounded(w, dtype) + offset, dtype) if CASTING == "none" else w + offset


@triton.jit
def _scale(x, rstd, W, w, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    y = x * rstd[:, None]
    if W is not None:
        if CASTING != "gemma":
            y = rounded(y, dtype)
        y *= _factor(w, offset, dtype, CASTING)
    return y


@triton.jit(do_not_specialize=["rows"])
def rms_norm_forward(
    X, RESIDUAL, W, Y, S, rows, x_stride, residual_stride, eps, offset,
    cols: tl.constexpr, CASTING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = Y.dtype.element_ty
    if cols <= COLS:
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        x = _load_sum(X, RESIDUAL, S, row, col, mask, x_stride, residual_stride, cols, True)
        rstd = rstd_of(tl.sum(square(x, dtype, CASTING), 1) / cols, eps, dtype, CASTING)
        tl.store(
            Y + row[:, None] * cols + col,
            _scale(x, rstd, W, load_parameter(W, col, 1.0, cols, COLS), offset, dtype, CASTING),
            mask,
        )
    else:
        total = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, cols, COLS):
            at = start + col
            mask = in_tile(row, at, rows, cols, ROWS, COLS)
            x = _load_sum(X, RESIDUAL, S, row, at, mask, x_stride, residual_stride, cols, False)
            total += square(x, dtype, CASTING)
        rstd = rstd_of(tl.sum(total, 1) / cols, eps, dtype, CASTING)
        for start in range(0, cols, COLS):
            at = start + col
            mask = in_tile(row, at, rows, cols, ROWS, COLS)
            x = _load_sum(X, RESIDUAL, S, row, at, mask, x_stride, residual_stride, cols, True)
            tl.store(
                Y + row[:, None] * cols + at,
                _scale(x, rstd, W, load_parameter(W, at, 1.0, cols, COLS), offset, dtype, CASTING),
                mask,
            )


@triton.jit
def load_rows(P, row, at, mask, stride):
    return tl.load(P + row[:, None] * stride + at, mask, other=0.0)


@triton.jit
def before_weight(dy, W, w, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Return m, the gradient before the multiplication by the weight."""
    if W is not None:
        return dy * _factor(w, offset, dtype, CASTING)
    else:
        return dy


@triton.jit
def store_ds(DS, DS_OUT, s, m, dy, rstd, mean, row, at, mask, ds_out_stride,
              dtype: tl.constexpr, CASTING: tl.constexpr, cols: tl.constexpr):  # fmt: skip
    """Store ds, and return the rows' sum for dw."""
    normed = s * rstd
    ds = rstd * (m - normed * mean)
    if DS_OUT is not None:
        ds += tl.load(DS_OUT + row[:, None] * ds_out_stride + at, mask, other=0.0).to(tl.float32)
    tl.store(DS + row[:, None] * cols + at, ds, mask)
    return dy * (normed if CASTING == "gemma" else rounded(normed, dtype))


@triton.jit(do_not_specialize=["rows"])
def rms_norm_backward(
    S, W, DY, DS_OUT, DS, DW, rows, s_stride, dy_stride, ds_out_stride, eps, offset,
    cols: tl.constexpr, CASTING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A fixed number of programs stride over the rows; each sums its own dw. rstd is recomputed beside the sum that the
    # gradient needs anyway: saving it would cost the forward an allocation and an argument. A wide row takes several
    # blocks, kept in 16 bits: 16,384 columns in one block would spill (H200: 64% of the copy rate against 89%).
    BLOCKS: tl.constexpr = (cols + COLS - 1) // COLS
    col = tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = S.dtype.element_ty
    w = load_parameter(W, col, 1.0, cols, COLS)  # several blocks: each is loaded at its use
    dw = ()
    for _ in tl.static_range(BLOCKS):
        dw = dw + (tl.zeros((ROWS, COLS), tl.float32),)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        s_blocks, dy_blocks = (), ()
        squares, products = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        for i in tl.static_range(BLOCKS):
            mask = in_tile(row, i * COLS + col, rows, cols, ROWS, COLS)
            s_blocks = s_blocks + (load_rows(S, row, i * COLS + col, mask, s_stride),)
            dy_blocks = dy_blocks + (load_rows(DY, row, i * COLS + col, mask, dy_stride),)
            if BLOCKS > 1:
                w = load_parameter(W, i * COLS + col, 1.0, cols, COLS)
            s = s_blocks[i].to(tl.float32)
            m = before_weight(dy_blocks[i].to(tl.float32), W, w, offset, dtype, CASTING)
            squares += square(s, dtype, CASTING)
            products += m * s
        rstd = rstd_of(tl.sum(squares, 1) / cols, eps, dtype, CASTING)[:, None]
        mean = rstd * tl.sum(products, 1)[:, None] / cols
        dw_before, dw = dw, ()
        for i in tl.static_range(BLOCKS):
            mask = in_tile(row, i * COLS + col, rows, cols, ROWS, COLS)
            if BLOCKS > 1:
                w = load_parameter(W, i * COLS + col, 1.0, cols, COLS)
            s, dy = s_blocks[i].to(tl.float32), dy_blocks[i].to(tl.float32)
            m = before_weight(dy, W, w, offset, dtype, CASTING)
            dw_rows = store_ds(
                DS, DS_OUT, s, m, dy, rstd, mean, row, i * COLS + col, mask, ds_out_stride, dtype, CASTING, cols
            )
            dw = dw + (dw_before[i] + dw_rows,)
    if DW is not None:
        for i in tl.static_range(BLOCKS):
            at = i * COLS + col
            dw_at = DW + tl.program_id(0).to(tl.int64) * cols + at
            tl.store(dw_at, tl.sum(dw[i], 0)[None, :], in_row(at, cols, COLS))


@functools.cache
def _without_empty_rows(config):
    """Take tiles of one row: with eps=0, empty rows would be 0 / 0."""
    return replace(config, meta=config.meta | {"ROWS": 1})


def backward_rows(s, weight, dy, ds_out, ds, dweight, eps, offset, casting_mode):
    """Write the gradients `ds` and, unless it is None, `dweight`.

    Args:
        s: the rows that were normalised.
        dy, ds_out: gradients of the normalised rows, and of `s` itself or None.
    """
    rows, cols = rows_and_cols(dy)
    config = rms_norm_backward_config(cols, s.element_size(), 2 if ds_out is None else 3, device_of(dy))
    if eps < (3e-8 if s.element_size() == 2 else 1e-30):  # rounded to 0 in fp16, and near it in fp32 on GPUs
        config = _without_empty_rows(config)
    programs = programs_for(config, rows, cols)
    dw = partial_sums(dweight, programs)
    (s, s_stride), (dy, dy_stride), (ds_out, ds_out_stride) = rows_of(s), rows_of(dy), rows_or_none(ds_out)
    launch(
        rms_norm_backward, (programs, 1, 1), config,
        s, weight, dy, ds_out, ds, dw, rows, s_stride, dy_stride, ds_out_stride, eps, offset, cols, casting_mode,
    )  # fmt: skip
    add_partials(dw, dweight)
