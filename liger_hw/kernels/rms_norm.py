r"""Root-mean-square norm over the last dimension, alone or after a residual addition.

    s    = x (+ residual)                                   rounded to x's dtype
    rstd = 1 / sqrt(mean(s^2) + eps)
    y    = s rstd (w + offset)

    m  = dy (w + offset)
    ds = rstd (m - s rstd mean(m s rstd)) (+ ds_out)        dx = dresidual = ds
    dw = sum over rows of dy s rstd

Letters: R rows of C columns. Traffic: forward reads x and writes y (2RC), with a residual reads and writes one more of
each (4RC); backward reads s and dy and writes ds (3RC, with a residual also reads ds_out,
4RC) plus one fp32 partial dw a program. Both are bound by memory. A row too wide for a program is read twice.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import Cost, Function, check, op, raw, widen
from liger_hw.kernels._math import (
    empty_rows,
    in_registers,
    in_row,
    in_tile,
    load_parameter,
    norm_backward_config,
    norm_forward_config,
    norm_wide_sums_config,
    reduce_partials,
    rounded,
    rows_of,
    wide_grid,
)
from liger_hw.launch import launch
from liger_hw.tuning import tuned

CASTING_MODES = ("llama", "gemma", "none")


def _validate(x, weight, casting_mode, residual=None):
    check(x.ndim and x.is_floating_point(), "x", x, "floating point rows")
    check(casting_mode in CASTING_MODES, "casting_mode", casting_mode, CASTING_MODES)
    if weight is not None:
        check(
            weight.shape == x.shape[-1:] and weight.device == x.device,
            "weight",
            weight,
            "one value for each column of x, on its device",
        )
    if residual is not None:
        like = residual.shape == x.shape and residual.dtype == x.dtype and residual.device == x.device
        check(like, "residual", residual, x)


@op
def rms_norm(x, weight=None, eps=1e-6, offset=0.0, casting_mode="llama"):
    """Scale each row of `x` to unit root mean square, then by `weight + offset` (arXiv:1910.07467).

    Args:
        x: (..., C), any floating dtype and strides.
        weight: (C,), any floating dtype, or None for no scale.
        eps: added to the mean square.
        offset: added to the weight; Gemma stores its weight less one and passes 1.0.
        casting_mode: "llama" rounds the normalised row to `x.dtype` before scaling (LlamaRMSNorm), "gemma" scales in
            fp32 and rounds once (GemmaRMSNorm with offset 1, T5-style and Olmo2RMSNorm with 0), "none" rounds to
            `x.dtype` after every operation.

    Returns:
        (..., C) in `x.dtype`.

    Raises:
        ValueError: `weight` does not fit `x`, or `casting_mode` is unknown.
    """
    _validate(x, weight, casting_mode)
    if casting_mode == "none":
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return y if weight is None else (y * (weight.to(x.dtype) + offset)).to(x.dtype)
    wide = widen(x)
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = widen(y.to(x.dtype)) if casting_mode == "llama" else y
        y = y * (widen(weight) + offset)
    return y.to(x.dtype)


@op
def fused_add_rms_norm(x, residual, weight=None, eps=1e-6, offset=0.0, casting_mode="llama"):
    """`rms_norm` of `x + residual`, and that sum, as a pre-norm transformer block uses them.

    Args:
        x: (..., C).
        residual: like `x`.
        weight, eps, offset, casting_mode: as in `rms_norm`.

    Returns:
        (y, s): the normalised sum and the sum, both (..., C) in `x.dtype`; s is rounded before it is normalised.

    Raises:
        ValueError: `residual` is not like `x`, `weight` does not fit, or `casting_mode` is unknown.
    """
    _validate(x, weight, casting_mode, residual)
    s = x + residual
    return rms_norm.reference(s, weight, eps, offset, casting_mode), s


@rms_norm.cost
def _(x, weight=None, *options, **named):
    tensor, w = x.nbytes, 0 if weight is None else weight.nbytes
    return Cost(2 * tensor + w, 3 * tensor + 2 * w, 4 * x.numel(), 9 * x.numel())


@fused_add_rms_norm.cost
def _(x, residual, weight=None, *options, **named):
    tensor, w = x.nbytes, 0 if weight is None else weight.nbytes
    return Cost(4 * tensor + w, 4 * tensor + 2 * w, 5 * x.numel(), 10 * x.numel())


@tuned
def rms_norm_forward_config(cols, itemsize, device):
    return norm_forward_config(cols, device)


@tuned
def rms_norm_backward_config(cols, itemsize, read, device):
    return norm_backward_config(cols, itemsize, device)  # `read`, of 2 or 3 rows, keeps winners of the two apart


@tuned
def rms_norm_wide_sums_config(cols, itemsize, device):
    return norm_wide_sums_config(device)


@tuned
def rms_norm_wide_backward_config(itemsize, device):
    return norm_backward_config(1024, itemsize, device)


@triton.jit
def _load_sum(X, RESIDUAL, S, row, at, mask, x_stride, residual_stride, cols: tl.constexpr):
    """x, or x + residual rounded and stored: the row that is normalised, in fp32."""
    x = tl.load(X + row[:, None] * x_stride + at, mask, other=0.0).to(tl.float32)
    if RESIDUAL is not None:
        x += tl.load(RESIDUAL + row[:, None] * residual_stride + at, mask, other=0.0).to(tl.float32)
        x = rounded(x, S.dtype.element_ty)
        tl.store(S + row[:, None] * cols + at, x, mask)
    return x


@triton.jit
def _square(x, dtype: tl.constexpr, CASTING: tl.constexpr):
    return rounded(x * x, dtype) if CASTING == "none" else x * x


@triton.jit
def _rstd(mean, eps, dtype: tl.constexpr, CASTING: tl.constexpr):
    if CASTING == "none":
        return rounded(1.0 / tl.sqrt(rounded(rounded(mean, dtype) + eps, dtype)), dtype)
    else:
        return 1.0 / tl.sqrt(mean + eps)


@triton.jit
def _factor(w, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    """w + offset in fp32. Apart from the load, which a loop over rows does once and keeps in 16 bits."""
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
        x = _load_sum(X, RESIDUAL, S, row, col, mask, x_stride, residual_stride, cols)
        rstd = _rstd(tl.sum(_square(x, dtype, CASTING), 1) / cols, eps, dtype, CASTING)
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
            x = _load_sum(X, RESIDUAL, S, row, at, mask, x_stride, residual_stride, cols)
            total += _square(x, dtype, CASTING)
        rstd = _rstd(tl.sum(total, 1) / cols, eps, dtype, CASTING)
        for start in range(0, cols, COLS):
            at = start + col
            mask = in_tile(row, at, rows, cols, ROWS, COLS)
            x = _load_sum(X, RESIDUAL, S, row, at, mask, x_stride, residual_stride, cols)
            tl.store(
                Y + row[:, None] * cols + at,
                _scale(x, rstd, W, load_parameter(W, at, 1.0, cols, COLS), offset, dtype, CASTING),
                mask,
            )


@triton.jit
def _load(P, row, at, mask, stride):
    return tl.load(P + row[:, None] * stride + at, mask, other=0.0)


@triton.jit
def _before_weight(dy, W, w, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    """m, the gradient of what the weight multiplied."""
    if W is not None:
        return dy * _factor(w, offset, dtype, CASTING)
    else:
        return dy


@triton.jit
def _store_ds(DS, DS_OUT, s, m, dy, rstd, mean, row, at, mask, ds_out_stride,
              dtype: tl.constexpr, CASTING: tl.constexpr, cols: tl.constexpr):  # fmt: skip
    """Store ds, and return what the rows add to dw."""
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
    # A fixed number of programs stride over the rows, each summing its own dw. rstd is computed again, beside the sum
    # that the gradient needs anyway: saving it would cost the forward an allocation and an argument. A wide row is
    # several blocks, kept in 16 bits: as one block of 16,384 columns it would spill (H200: 64% of the copy rate
    # against 89%).
    BLOCKS: tl.constexpr = (cols + COLS - 1) // COLS
    col = tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = S.dtype.element_ty
    w = load_parameter(W, col, 1.0, cols, COLS)  # of several blocks, each is loaded where it is used
    dw = ()
    for _ in tl.static_range(BLOCKS):
        dw = dw + (tl.zeros((ROWS, COLS), tl.float32),)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        s_blocks, dy_blocks = (), ()
        squares, products = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
        for i in tl.static_range(BLOCKS):
            mask = in_tile(row, i * COLS + col, rows, cols, ROWS, COLS)
            s_blocks = s_blocks + (_load(S, row, i * COLS + col, mask, s_stride),)
            dy_blocks = dy_blocks + (_load(DY, row, i * COLS + col, mask, dy_stride),)
            if BLOCKS > 1:
                w = load_parameter(W, i * COLS + col, 1.0, cols, COLS)
            s = s_blocks[i].to(tl.float32)
            m = _before_weight(dy_blocks[i].to(tl.float32), W, w, offset, dtype, CASTING)
            squares += _square(s, dtype, CASTING)
            products += m * s
        rstd = _rstd(tl.sum(squares, 1) / cols, eps, dtype, CASTING)[:, None]
        mean = rstd * tl.sum(products, 1)[:, None] / cols
        dw_before, dw = dw, ()
        for i in tl.static_range(BLOCKS):
            mask = in_tile(row, i * COLS + col, rows, cols, ROWS, COLS)
            if BLOCKS > 1:
                w = load_parameter(W, i * COLS + col, 1.0, cols, COLS)
            s, dy = s_blocks[i].to(tl.float32), dy_blocks[i].to(tl.float32)
            m = _before_weight(dy, W, w, offset, dtype, CASTING)
            dw_rows = _store_ds(
                DS, DS_OUT, s, m, dy, rstd, mean, row, i * COLS + col, mask, ds_out_stride, dtype, CASTING, cols
            )
            dw = dw + (dw_before[i] + dw_rows,)
    if DW is not None:
        for i in tl.static_range(BLOCKS):
            at = i * COLS + col
            dw_at = DW + tl.program_id(0).to(tl.int64) * cols + at
            tl.store(dw_at, tl.sum(dw[i], 0)[None, :], in_row(at, cols, COLS))


@triton.jit
def rms_norm_wide_sums(
    S, W, DY, RSTD, MEAN, s_stride, dy_stride, eps, offset, cols: tl.constexpr, CASTING: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """rstd and mean(m normed) of a row too wide for one block."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    dtype: tl.constexpr = S.dtype.element_ty
    squares, products = tl.zeros((1, COLS), tl.float32), tl.zeros((1, COLS), tl.float32)
    for start in tl.range(0, cols, COLS, num_stages=STAGES):
        at = start + tl.arange(0, COLS)[None, :]
        w = load_parameter(W, at, 1.0, cols, COLS)
        mask = in_row(at, cols, COLS)
        s = _load(S, row, at, mask, s_stride).to(tl.float32)
        dy = _load(DY, row, at, mask, dy_stride).to(tl.float32)
        squares += _square(s, dtype, CASTING)
        products += _before_weight(dy, W, w, offset, dtype, CASTING) * s
    rstd = _rstd(tl.sum(squares, 1) / cols, eps, dtype, CASTING)
    tl.store(RSTD + row, rstd)
    tl.store(MEAN + row, rstd * tl.sum(products, 1) / cols)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_wide_backward(
    S, W, DY, DS_OUT, DS, DW, RSTD, MEAN, rows, s_stride, dy_stride, ds_out_stride, offset,
    cols: tl.constexpr, CASTING: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # a block of columns of every n-th row, so that their sum for dw stays in registers
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = S.dtype.element_ty
    w = load_parameter(W, col, 1.0, cols, COLS)
    dw = tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        rstd = tl.load(RSTD + row, row < rows, other=0.0)[:, None]
        mean = tl.load(MEAN + row, row < rows, other=0.0)[:, None]
        s = _load(S, row, col, mask, s_stride).to(tl.float32)
        dy = _load(DY, row, col, mask, dy_stride).to(tl.float32)
        m = _before_weight(dy, W, w, offset, dtype, CASTING)
        dw += _store_ds(DS, DS_OUT, s, m, dy, rstd, mean, row, col, mask, ds_out_stride, dtype, CASTING, cols)
    if DW is not None:
        dw_at = DW + tl.program_id(1).to(tl.int64) * cols + col
        tl.store(dw_at, tl.sum(dw, 0)[None, :], in_row(col, cols, COLS))


def _count_rows(x):
    return x.numel() // x.shape[-1] if x.shape[-1] else 0


def _forward(x, residual, weight, y, s, eps, offset, casting_mode):
    rows, cols = _count_rows(x), x.shape[-1]
    x, x_stride = rows_of(x)
    residual, residual_stride = (None, 0) if residual is None else rows_of(residual)
    config = rms_norm_forward_config(cols, x.element_size(), device_of(x))
    launch(
        rms_norm_forward, (-(-rows // config["ROWS"]), 1, 1), config,
        x, residual, weight, y, s, rows, x_stride, residual_stride, eps, offset, cols, casting_mode,
    )  # fmt: skip


@raw(fake=lambda x, *options: empty_rows(x))
def _rms_norm_forward(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting_mode: str
) -> torch.Tensor:
    y = empty_rows(x)
    _forward(x, None, weight, y, None, eps, offset, casting_mode)
    return y


@raw(fake=lambda x, *options: (empty_rows(x), empty_rows(x)))
def _fused_add_rms_norm_forward(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float, casting_mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    y, s = empty_rows(x), empty_rows(x)
    _forward(x, residual, weight, y, s, eps, offset, casting_mode)
    return y, s


def _fake_backward(s, weight, dy, ds_out, eps, offset, casting_mode, weight_grad):
    return empty_rows(dy), empty_rows(weight) if weight_grad else dy.new_empty(0)


@raw(_fake_backward)
def _rms_norm_backward(
    s: torch.Tensor, weight: torch.Tensor | None, dy: torch.Tensor, ds_out: torch.Tensor | None,
    eps: float, offset: float, casting_mode: str, weight_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    rows, cols, ds = _count_rows(dy), dy.shape[-1], empty_rows(dy)
    s, s_stride = rows_of(s)
    dy, dy_stride = rows_of(dy)
    ds_out, ds_out_stride = (None, 0) if ds_out is None else rows_of(ds_out)
    launch_backward = _narrow_backward if in_registers(cols, s.element_size(), device_of(dy)) else _wide_backward
    strides, options = (s_stride, dy_stride, ds_out_stride), (eps, offset, casting_mode)
    dw = launch_backward(s, weight, dy, ds_out, ds, rows, cols, strides, options, weight_grad)
    return ds, reduce_partials(dw, weight.dtype) if weight_grad else dy.new_empty(0)


def _narrow_backward(s, weight, dy, ds_out, ds, rows, cols, strides, options, dw_wanted):
    config = rms_norm_backward_config(cols, s.element_size(), 2 if ds_out is None else 3, device_of(dy))
    programs = config.grid_for(-(-rows // config["ROWS"]))
    dw = dy.new_empty((programs, cols), dtype=torch.float32) if dw_wanted else None
    launch(
        rms_norm_backward, (programs, 1, 1), config,
        s, weight, dy, ds_out, ds, dw, rows, *strides, *options[:2], cols, options[2],
    )  # fmt: skip
    return dw


def _wide_backward(s, weight, dy, ds_out, ds, rows, cols, strides, options, dw_wanted):
    eps, offset, casting_mode = options
    rstd, mean = dy.new_empty(rows, dtype=torch.float32), dy.new_empty(rows, dtype=torch.float32)
    config = rms_norm_wide_sums_config(cols, s.element_size(), device_of(dy))
    launch(
        rms_norm_wide_sums, (rows, 1, 1), config,
        s, weight, dy, rstd, mean, *strides[:2], eps, offset, cols, casting_mode,
    )  # fmt: skip
    config = rms_norm_wide_backward_config(s.element_size(), device_of(dy))
    blocks, groups = wide_grid(config, rows, cols)
    dw = dy.new_empty((groups, cols), dtype=torch.float32) if dw_wanted else None
    launch(
        rms_norm_wide_backward, (blocks, groups, 1), config,
        s, weight, dy, ds_out, ds, dw, rstd, mean, rows, *strides, offset, cols, casting_mode,
    )  # fmt: skip
    return dw


class RMSNormFunction(Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, casting_mode):
        ctx.save_for_backward(x, weight)
        ctx.options = eps, offset, casting_mode
        return _rms_norm_forward(x, weight, eps, offset, casting_mode)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        weight_grad = ctx.needs_input_grad[1]
        dx, dw = _rms_norm_backward(x, weight, dy, None, *ctx.options, weight_grad)
        return dx, dw if weight_grad else None, None, None, None


class FusedAddRMSNormFunction(Function):
    @staticmethod
    def forward(ctx, x, residual, weight, eps, offset, casting_mode):
        y, s = _fused_add_rms_norm_forward(x, residual, weight, eps, offset, casting_mode)
        ctx.save_for_backward(s, weight)
        ctx.options = eps, offset, casting_mode
        ctx.set_materialize_grads(False)
        return y, s

    @staticmethod
    def backward(ctx, dy, ds_out):
        s, weight = ctx.saved_tensors
        if dy is None:  # only the sum was used
            return ds_out, ds_out, None, None, None, None
        weight_grad = ctx.needs_input_grad[2]
        ds, dw = _rms_norm_backward(s, weight, dy, ds_out, *ctx.options, weight_grad)
        return ds, ds, dw if weight_grad else None, None, None, None


@rms_norm.register("triton")
def _(x, weight=None, eps=1e-6, offset=0.0, casting_mode="llama"):
    _validate(x, weight, casting_mode)
    return RMSNormFunction.apply(x, weight, eps, offset, casting_mode)


@fused_add_rms_norm.register("triton")
def _(x, residual, weight=None, eps=1e-6, offset=0.0, casting_mode="llama"):
    _validate(x, weight, casting_mode, residual)
    return FusedAddRMSNormFunction.apply(x, residual, weight, eps, offset, casting_mode)
