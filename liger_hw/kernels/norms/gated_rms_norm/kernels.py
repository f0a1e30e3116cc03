"""Compute root-mean-square norms with a gate or a modulation, with Triton kernels."""
# the package's docstring has the formulas

from dataclasses import replace
from typing import NamedTuple

from liger_hw._triton import tl, triton
from liger_hw.kernels._configs import norm_backward_config, norm_forward_config, norm_wide_sums_config, widest_block
from liger_hw.kernels._math import in_row, in_tile, load_parameter, rounded, sigmoid
from liger_hw.kernels.norms.rms_norm.kernels import before_weight, load_rows, rstd_of, square
from liger_hw.tuning import Config, row_warps, tuned


class NormForm(NamedTuple):
    """The options of a norm.

    Attributes:
        eps, offset, casting_mode: as in `rms_norm`.
        activation: "silu", "sigmoid", or "modulation", which is 1 + gate.
        gate_first: whether the gate multiplies the input instead of the normalised rows.
        groups: groups of columns in a row, which are normalised alone.
        gate_rows: rows of the gate, each for the same number of consecutive rows of x.
        mean: whether the squares are averaged, or else added up.
    """

    eps: float
    offset: float = 0.0
    casting_mode: str = "llama"
    activation: str = "silu"
    gate_first: bool = False
    groups: int = 1
    gate_rows: int = 0
    mean: bool = True

    def constants(self, cols):
        """Return the kernels' constants after the width of a group of columns."""
        width = cols // self.groups
        return width, self.groups, width if self.mean else 1, self.casting_mode, self.activation, self.gate_first


@tuned
def gated_rms_norm_forward_config(cols, itemsize, read, device):
    # `read`, the tensors with a row for each of x, tells measured entries apart: of 16,384 columns an H200 wants 8
    # warps where 1,024 rows share a gate (45 us; 67 with 16), and 16 where each has its own.
    return norm_forward_config(cols, device)


@tuned
def gated_rms_norm_backward_config(cols, itemsize, read, device):
    # A row that does not fit the registers is read twice; a program then has a narrow block of every n-th row. A gate
    # of each row leaves registers for 8 values a lane: with 16 of 1,024 columns 8 bytes spill (compiled for sm90).
    widest = widest_block(device, 4 if read == 2 else 5)
    config = norm_backward_config(cols if cols <= widest else 1024, itemsize, device, read)
    warps = row_warps(config["ROWS"] * config["COLS"], device, per_lane=8)
    return config if read == 2 else replace(config, num_warps=warps)


@tuned
def gated_rms_norm_sums_config(cols, itemsize, device):
    return norm_wide_sums_config(device, per_lane=16)


@tuned
def modulation_gradients_config(cols, device):
    return Config({"ROWS": 32, "COLS": 64}, row_warps(32 * 64, device, per_lane=16))


@triton.jit
def gate_and_slope(gate, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    """Return the factor f(gate) and f'(gate) in fp32.

    They are as exact as results in `dtype` and a gradient like the gate need.
    """
    narrowest: tl.constexpr = tl.float32 if gate.dtype == tl.float32 else dtype
    gate = gate.to(tl.float32)
    if ACTIVATION == "modulation":
        return 1.0 + gate, tl.full(gate.shape, 1.0, tl.float32)
    else:
        s = sigmoid(gate, narrowest)
        if ACTIVATION == "sigmoid":
            return s, s * (1.0 - s)
        else:
            tl.static_assert(ACTIVATION == "silu")
            return gate * s, s * (1.0 + gate * (1.0 - s))


@triton.jit
def _load_input(X, GATE, row, gate_row, col, mask, x_stride, gate_stride, ACTIVATION: tl.constexpr,
                GATE_FIRST: tl.constexpr):  # fmt: skip
    """Load the rows to normalise in fp32: x, or x f(gate)."""
    x = load_rows(X, row, col, mask, x_stride).to(tl.float32)
    if GATE_FIRST:
        factor, _ = gate_and_slope(load_rows(GATE, gate_row, col, mask, gate_stride), X.dtype.element_ty, ACTIVATION)
        x *= factor
    return x


@triton.jit
def _weighted(normed, W, w, offset, dtype: tl.constexpr, CASTING: tl.constexpr):
    """Return normalised rows times the weight, each rounded as `casting_mode` says."""
    y = normed if CASTING == "gemma" else rounded(normed, dtype)
    return before_weight(y, W, w, offset, dtype, CASTING)


@triton.jit
def _store_output(Y, GATE, SHIFT, W, x, rstd, row, gate_row, col, mask, gate_stride, shift_stride, offset,
                  cols: tl.constexpr, groups: tl.constexpr, CASTING: tl.constexpr, ACTIVATION: tl.constexpr,
                  GATE_FIRST: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    dtype: tl.constexpr = Y.dtype.element_ty
    y = _weighted(x * rstd[:, None], W, load_parameter(W, col, 1.0, cols, COLS), offset, dtype, CASTING)
    if GATE is not None and not GATE_FIRST:
        if CASTING != "gemma" or ACTIVATION == "modulation":
            y = rounded(y, dtype)
        factor, _ = gate_and_slope(load_rows(GATE, gate_row, col, mask, gate_stride), dtype, ACTIVATION)
        y *= factor
        if SHIFT is not None:
            y += load_rows(SHIFT, gate_row, col, mask, shift_stride).to(tl.float32)
    tl.store(Y + row[:, None] * (groups * cols) + col, y, mask)


@triton.jit(do_not_specialize=["rows"])
def gated_rms_norm_forward(
    X, GATE, SHIFT, W, Y, rows, gate_span, x_stride, gate_stride, shift_stride, eps, offset,
    cols: tl.constexpr, groups: tl.constexpr, count: tl.constexpr, CASTING: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // groups * ROWS + tl.arange(0, ROWS)
    gate_row, row = (row // gate_span).to(tl.int64), row.to(tl.int64)
    first = tl.program_id(0) % groups * cols
    X += first
    Y += first
    if GATE is not None:
        GATE += first
    if SHIFT is not None:
        SHIFT += first
    if W is not None:
        W += first
    col = tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = Y.dtype.element_ty
    if cols <= COLS:
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        x = _load_input(X, GATE, row, gate_row, col, mask, x_stride, gate_stride, ACTIVATION, GATE_FIRST)
        rstd = rstd_of(tl.sum(square(x, dtype, CASTING), 1) / count, eps, dtype, CASTING)
        _store_output(
            Y, GATE, SHIFT, W, x, rstd, row, gate_row, col, mask, gate_stride, shift_stride, offset, cols, groups,
            CASTING, ACTIVATION, GATE_FIRST, COLS,
        )  # fmt: skip
    else:
        squares = tl.zeros((ROWS, COLS), tl.float32)
        for start in range(0, cols, COLS):
            at = start + col
            mask = in_tile(row, at, rows, cols, ROWS, COLS)
            x = _load_input(X, GATE, row, gate_row, at, mask, x_stride, gate_stride, ACTIVATION, GATE_FIRST)
            squares += square(x, dtype, CASTING)
        rstd = rstd_of(tl.sum(squares, 1) / count, eps, dtype, CASTING)
        for start in range(0, cols, COLS):
            at = start + col
            mask = in_tile(row, at, rows, cols, ROWS, COLS)
            x = _load_input(X, GATE, row, gate_row, at, mask, x_stride, gate_stride, ACTIVATION, GATE_FIRST)
            _store_output(
                Y, GATE, SHIFT, W, x, rstd, row, gate_row, at, mask, gate_stride, shift_stride, offset, cols, groups,
                CASTING, ACTIVATION, GATE_FIRST, COLS,
            )  # fmt: skip


@triton.jit
def _load_factor(GATE, shared_gate, row, col, mask, stride, dtype: tl.constexpr, ACTIVATION: tl.constexpr,
                 SHARED: tl.constexpr):  # fmt: skip
    """Return the gate's factor and slope, and 1 and 0 without a gate."""
    if GATE is None:
        return tl.full((1, 1), 1.0, tl.float32), tl.full((1, 1), 0.0, tl.float32)
    elif SHARED:
        return gate_and_slope(shared_gate, dtype, ACTIVATION)
    else:
        return gate_and_slope(load_rows(GATE, row, col, mask, stride), dtype, ACTIVATION)


@triton.jit
def _before_norm(x, dy, factor, W, w, offset, dtype: tl.constexpr, CASTING: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Return u, and the gradients before the gate and before the weight."""
    if GATE_FIRST:
        return x * factor, dy, before_weight(dy, W, w, offset, dtype, CASTING)
    else:
        return x, dy * factor, before_weight(dy * factor, W, w, offset, dtype, CASTING)


@triton.jit
def gated_rms_norm_sums(
    X, GATE, W, DY, RSTD, MEAN, gate_span, x_stride, gate_stride, dy_stride, eps, offset,
    cols: tl.constexpr, groups: tl.constexpr, count: tl.constexpr, CASTING: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute rstd and mean(m normed) of a row too wide for a program's registers."""
    row = tl.program_id(0) // groups + tl.arange(0, 1)
    gate_row, row = (row // gate_span).to(tl.int64), row.to(tl.int64)
    first = tl.program_id(0) % groups * cols
    X += first
    DY += first
    if GATE is not None:
        GATE += first
    if W is not None:
        W += first
    dtype: tl.constexpr = X.dtype.element_ty
    squares, products = tl.zeros((1, COLS), tl.float32), tl.zeros((1, COLS), tl.float32)
    for start in tl.range(0, cols, COLS, num_stages=STAGES):
        col = start + tl.arange(0, COLS)[None, :]
        mask = in_row(col, cols, COLS)
        x = load_rows(X, row, col, mask, x_stride).to(tl.float32)
        dy = load_rows(DY, row, col, mask, dy_stride).to(tl.float32)
        factor, _ = _load_factor(GATE, 0.0, gate_row, col, mask, gate_stride, dtype, ACTIVATION, False)
        w = load_parameter(W, col, 1.0, cols, COLS)
        u, _, m = _before_norm(x, dy, factor, W, w, offset, dtype, CASTING, GATE_FIRST)
        squares += square(u, dtype, CASTING)
        products += m * u
    rstd = rstd_of(tl.sum(squares, 1) / count, eps, dtype, CASTING)
    place = tl.program_id(0) + tl.arange(0, 1)
    tl.store(RSTD + place, rstd)
    tl.store(MEAN + place, rstd * tl.sum(products, 1) / count)


@triton.jit(do_not_specialize=["span"])
def gated_rms_norm_backward(
    X, GATE, W, DY, RSTD, MEAN, DX, DGATE, DW, DSHIFT, span, spans, x_stride, gate_stride, dy_stride, eps, offset,
    cols: tl.constexpr, groups: tl.constexpr, count: tl.constexpr, CASTING: tl.constexpr, ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    # A fixed number of programs stride over the rows of a span, which share a row of the gate where SHARED. Each sums
    # dy normed (SHARED) or its share of dw, and dy. One sum serves two gradients: dw adds up its products with the
    # factors of all spans, and a span's gradient of the gate is its product with weight and slope.
    BLOCKS: tl.constexpr = (cols + COLS - 1) // COLS
    block, program = tl.program_id(0) % (groups * BLOCKS), tl.program_id(0) // (groups * BLOCKS)
    programs = tl.num_programs(0) // (groups * BLOCKS * spans)
    first = block // BLOCKS * cols
    X += first
    DY += first
    DX += first
    if GATE is not None:
        GATE += first
    if W is not None:
        W += first
    col = block % BLOCKS * COLS + tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = X.dtype.element_ty
    w = load_parameter(W, col, 1.0, cols, COLS)
    first_row, gate_at = (program % spans).to(tl.int64) * span, (program % spans).to(tl.int64) * gate_stride
    shared_gate = load_parameter(GATE + gate_at if SHARED else None, col, 1.0, cols, COLS)
    dw, dshift = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(program // spans * ROWS, span, programs * ROWS, num_stages=STAGES):
        mask = in_tile(start + tl.arange(0, ROWS), col, span, cols, ROWS, COLS)
        row = first_row + start + tl.arange(0, ROWS)
        x = load_rows(X, row, col, mask, x_stride).to(tl.float32)
        dy = load_rows(DY, row, col, mask, dy_stride).to(tl.float32)
        factor, slope = _load_factor(GATE, shared_gate, row, col, mask, gate_stride, dtype, ACTIVATION, SHARED)
        u, dweighted, m = _before_norm(x, dy, factor, W, w, offset, dtype, CASTING, GATE_FIRST)
        valid = start + tl.arange(0, ROWS) < span
        if RSTD is None:  # absent rows get 0: with eps=0 theirs is infinite, and would make dw NaN
            rstd = rstd_of(tl.sum(square(u, dtype, CASTING), 1) / count, eps, dtype, CASTING)
            rstd = tl.where(valid, rstd, 0.0)[:, None]
            mean = rstd * tl.sum(m * u, 1)[:, None] / count
        else:
            rstd = tl.load(RSTD + row * groups + block // BLOCKS, valid, other=0.0)[:, None]
            mean = tl.load(MEAN + row * groups + block // BLOCKS, valid, other=0.0)[:, None]
        normed = u * rstd
        du = rstd * (m - normed * mean)
        at = row[:, None] * (groups * cols) + col
        tl.store(DX + at, du * factor if GATE_FIRST else du, mask)
        if DGATE is not None:
            if GATE_FIRST:
                dgate = du * x * slope
            else:
                dgate = dy * _weighted(normed, W, w, offset, dtype, CASTING) * slope
            tl.store(DGATE + first + at, dgate, mask)
        dw += (dy if SHARED else dweighted) * (normed if CASTING == "gemma" else rounded(normed, dtype))
        dshift += dy
    partial_at = program.to(tl.int64) * (groups * cols) + first + col
    if DW is not None:
        tl.store(DW + partial_at, tl.sum(dw, 0)[None, :], in_row(col, cols, COLS))
    if DSHIFT is not None:
        tl.store(DSHIFT + partial_at, tl.sum(dshift, 0)[None, :], in_row(col, cols, COLS))


@triton.jit(do_not_specialize=["programs", "spans"])
def modulation_gradients(
    GATE, DNORMED, DSHIFT, W, DGATE_OUT, DSHIFT_OUT, DW_OUT, programs, spans, gate_stride, offset, cols,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Sum a span's partial sums in order; compute its gradients of scale, shift and weight."""
    blocks = (cols + COLS - 1) // COLS
    span = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks * COLS + tl.arange(0, COLS))[None, :]
    valid = col < cols
    dnormed, dshift = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)[:, None]
        at = (program.to(tl.int64) * spans + span) * cols + col
        if DNORMED is not None:
            dnormed += tl.load(DNORMED + at, (program < programs) & valid, other=0.0)
        if DSHIFT is not None:
            dshift += tl.load(DSHIFT + at, (program < programs) & valid, other=0.0)
    at = span * cols + col
    if DGATE_OUT is not None:
        dgate = tl.sum(dnormed, 0)[None, :]
        if W is not None:
            dgate *= tl.load(W + col, valid, other=0.0).to(tl.float32) + offset
        tl.store(DGATE_OUT + at, dgate, valid)
    if DW_OUT is not None:
        factor = 1.0 + tl.load(GATE + span * gate_stride + col, valid, other=0.0).to(tl.float32)
        tl.store(DW_OUT + at, tl.sum(dnormed, 0)[None, :] * factor, valid)
    if DSHIFT_OUT is not None:
        tl.store(DSHIFT_OUT + at, tl.sum(dshift, 0)[None, :], valid)
