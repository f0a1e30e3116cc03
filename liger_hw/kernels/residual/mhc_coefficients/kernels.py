"""Kernels of the coefficients of hyper-connections, and their launch configurations."""

from liger_hw._triton import tl, triton
from liger_hw.kernels._math import dot, in_row
from liger_hw.tuning import Config, power_of_2, tuned


def phi_columns(streams):
    """Return the columns of the tile that holds phi's; matrix units take at least 16."""
    return max(16, power_of_2(streams * (streams + 2)))


@tuned
def mhc_project_config(depth, streams, itemsize, device):
    # Every tile of rows reads all of phi, so tiles are large: with 8 streams 128 rows take 0.11 ms where 16 took 0.82
    # (8192 x 8 x 2048, H200). Two programs of 128 rows must fit a core. Without matrix units (fp32) each lane keeps its
    # operands, of fewer rows and a quarter of the depth.
    columns, stages = phi_columns(streams), 3 if device.async_copy else 2
    fits = device.async_copy and 2 * stages * 128 * (128 + columns) <= device.shared_memory
    rows = max(16, min(128 if fits else 64, (16384 if itemsize < 4 else 2048) // columns))
    meta = {"ROWS": rows, "DEPTH": min(256 // itemsize**2, 8192 // columns)}
    return Config(meta, 256 // device.warp_size, stages, programs=2 if rows == 128 else 4)


@tuned
def mhc_project_backward_config(cols, streams, itemsize, device):
    # A lane keeps its part of phi and of dphi: 128 columns of 4 streams spill on 4 warps (compiled for sm80).
    columns = phi_columns(streams)
    if device.async_copy and itemsize < 4:  # 8192 x 4 x 4096, H200: 0.36 ms; 16 rows in 3 stages 0.61
        block, stages = (64, 1) if columns <= 32 else (32, 3)  # wider ones spill, or read g more often
        depth, lanes = max(16, min(64, 2048 // columns)), max(128, columns)
    else:
        block, depth = max(16, min(64, 2048 // columns)), 16
        # loads may pass their registers, else 8 sums of dphi a lane
        lanes, stages = (128, 3) if device.async_copy else (block * columns // 8, 1)
    return Config({"COLS": block, "DEPTH": depth}, lanes // device.warp_size, stages, programs=12)


def _few_lanes_a_row(streams, device):
    # each sum of an iteration waits for the one before, so the 4 values a lane leave few steps between lanes
    rows = max(1, 4 * device.warp_size // power_of_2(streams) ** 2)
    return Config({"ROWS": rows}, num_warps=1, programs=8)


mhc_coefficients_forward_config = tuned(_few_lanes_a_row, "mhc_coefficients_forward")
mhc_coefficients_backward_config = tuned(_few_lanes_a_row, "mhc_coefficients_backward")


@triton.jit(do_not_specialize=["rows"])
def mhc_project(
    X, PHI, SUMS, rows, x_stride, depth: tl.constexpr, count: tl.constexpr, width: tl.constexpr,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # each row of SUMS has x phi, then the sum of squares; a program has a part of the columns
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k, n = tl.arange(0, DEPTH), tl.arange(0, SIZE)[None, :]
    valid = (row < rows)[:, None]
    part = (depth + DEPTH - 1) // DEPTH
    part = (part + tl.num_programs(1) - 1) // tl.num_programs(1) * DEPTH
    first = tl.program_id(1) * part
    total, squares = tl.zeros((ROWS, SIZE), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in range(first, tl.minimum(first + part, depth), DEPTH):
        at = start + k
        inside = in_row(at, depth, DEPTH)
        x = tl.load(X + row[:, None] * x_stride + at[None, :], valid & inside[None, :], other=0.0)
        phi = tl.load(PHI + at[:, None] * count + n, inside[:, None] & (n < count), other=0.0)
        # Changes no value, but lets the product read registers: Triton 3.6 and 3.9 load the next tile over one that has
        # two uses while a product of sm90 still reads it (errors of 0.01 beside other processes, H200)
        if X.dtype.element_ty.primitive_bitwidth < 32:
            x = tl.where(valid, x, 0.0)
        wide = x.to(tl.float32)
        squares += tl.sum(wide * wide, 1)
        if x.dtype == phi.dtype:
            total = dot(x, phi, total, PRECISION)
        else:
            total = dot(wide, phi.to(tl.float32), total, PRECISION)
    total = tl.where(n == count, squares[:, None], total)
    place = SUMS + (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * width + n
    tl.store(place, total, valid & (n < width))


@triton.jit
def _load_sums(SUMS, WHOLE, at, mask, absent, parts, stride):
    """Add the sums of all parts, `stride` values apart, and store them in WHOLE."""
    total = tl.load(SUMS + at, mask, other=absent)
    for part in range(1, parts):
        total += tl.load(SUMS + part * stride + at, mask, other=0.0)
    if WHOLE is not None:
        tl.store(WHOLE + at, total, mask)
    return total


@triton.jit
def _rstd(SUMS, WHOLE, row, valid, parts, stride, depth, eps, width: tl.constexpr, COUNT: tl.constexpr):
    squares = _load_sums(SUMS, WHOLE, row * width + COUNT, valid, 1.0, parts, stride)
    return 1.0 / tl.sqrt(squares / depth + eps)


@triton.jit
def _logits(SUMS, WHOLE, B, ALPHA, row, at, mask, rstd, parts, stride, width: tl.constexpr):
    """Return mix and z of the values `at` of each row."""
    mix = _load_sums(SUMS, WHOLE, row * width + at, mask, 0.0, parts, stride) * rstd
    return mix, mix * tl.load(ALPHA).to(tl.float32) + tl.load(B + at, mask, other=0.0).to(tl.float32)


@triton.jit
def _softmax(z, inside):
    z = tl.where(inside, z, float("-inf"))
    power = tl.exp(z - tl.max(z, 2)[:, :, None])
    return tl.where(inside, power / tl.sum(power, 2)[:, :, None], 0.0)


@triton.jit
def _divided(m, DIVISORS, place, mask, eps, AXIS: tl.constexpr):
    """Divide by sums along an axis, and store these divisors."""
    d = tl.where(mask, tl.sum(m, AXIS) + eps, 1.0)
    if DIVISORS is not None:
        tl.store(DIVISORS + place, d, mask)
    return m / tl.expand_dims(d, AXIS)


@triton.jit
def _divided_gradient(m, dm, DIVISORS, place, mask, AXIS: tl.constexpr):
    """Return values and gradients before a division."""
    d = tl.expand_dims(tl.load(DIVISORS + place, mask, other=1.0), AXIS)
    return m * d, (dm - tl.expand_dims(tl.sum(dm * m, AXIS), AXIS)) / d


@triton.jit(do_not_specialize=["rows", "parts", "tmax"])
def mhc_coefficients_forward(
    PARTIAL, B, ALPHA_PRE, ALPHA_POST, ALPHA_RES, SUMS, H_PRE, H_POST, H_RES, DIVISORS, rows, parts, depth, tmax,
    rms_eps, pre_eps, sinkhorn_eps, post_mult, streams: tl.constexpr, width: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i, valid, part = tl.arange(0, SIZE), row < rows, rows.to(tl.int64) * width
    rstd = _rstd(PARTIAL, SUMS, row, valid, parts, part, depth, rms_eps, width, streams * (streams + 2))
    mask = valid[:, None] & (i < streams)[None, :]
    place = row[:, None] * streams + i[None, :]
    if H_PRE is not None:
        long, at, factor = row[:, None], i[None, :], rstd[:, None]
        _, z = _logits(PARTIAL, SUMS, B, ALPHA_PRE, long, at, mask, factor, parts, part, width)
        tl.store(H_PRE + place, tl.sigmoid(z) + pre_eps, mask)
        _, z = _logits(PARTIAL, SUMS, B, ALPHA_POST, long, streams + at, mask, factor, parts, part, width)
        tl.store(H_POST + place, tl.sigmoid(z) * post_mult, mask)
    inside = mask[:, :, None] & (i < streams)[None, None, :]
    wide, matrix_at = row[:, None, None], (i[:, None] * streams + i[None, :])[None, :, :]
    res_at = 2 * streams + matrix_at
    _, z = _logits(PARTIAL, SUMS, B, ALPHA_RES, wide, res_at, inside, rstd[:, None, None], parts, part, width)
    m = tl.where(inside, _softmax(z, inside) + sinkhorn_eps, 0.0)
    m = _divided(m, DIVISORS, place, mask, sinkhorn_eps, 1)
    for _ in range(1, tmax):
        place += rows.to(tl.int64) * streams
        m = _divided(m, DIVISORS, place, mask, sinkhorn_eps, 2)
        place += rows.to(tl.int64) * streams
        m = _divided(m, DIVISORS, place, mask, sinkhorn_eps, 1)
    if H_RES is not None:
        tl.store(H_RES + wide * (streams * streams) + matrix_at, m, inside)


@triton.jit(do_not_specialize=["rows", "tmax"])
def mhc_coefficients_backward(
    SUMS, B, ALPHA_PRE, ALPHA_POST, ALPHA_RES, H_RES, DIVISORS, DPRE, DPOST, DRES, G, PARTIAL, rows, depth, tmax,
    rms_eps, post_mult, streams: tl.constexpr, width: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # each row of G has g, then the factor of x in dx; each row of PARTIAL has db and three dalpha
    COUNT: tl.constexpr = streams * (streams + 2)
    i = tl.arange(0, SIZE)
    at = i[:, None] * streams + i[None, :]
    alpha_pre, alpha_post = tl.load(ALPHA_PRE).to(tl.float32), tl.load(ALPHA_POST).to(tl.float32)
    alpha_res = tl.load(ALPHA_RES).to(tl.float32)
    db_pre, db_post = tl.zeros((SIZE,), tl.float32), tl.zeros((SIZE,), tl.float32)
    db_res = tl.zeros((SIZE, SIZE), tl.float32)
    da_pre, da_post = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    da_res = tl.zeros((ROWS,), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        valid = row < rows
        rstd = _rstd(SUMS, None, row, valid, 1, 0, depth, rms_eps, width, COUNT)
        mask = valid[:, None] & (i < streams)[None, :]
        place = row[:, None] * streams + i[None, :]
        g = G + row[:, None] * width + i[None, :]
        mix, z = _logits(SUMS, None, B, ALPHA_PRE, row[:, None], i[None, :], mask, rstd[:, None], 1, 0, width)
        s = tl.sigmoid(z)
        dz = tl.load(DPRE + place, mask, other=0.0) * (s * (1.0 - s))
        along = tl.sum(dz * mix, 1)
        db_pre += tl.sum(dz, 0)
        da_pre += along
        total = alpha_pre * along
        tl.store(g, alpha_pre * dz * rstd[:, None], mask)

        mix, z = _logits(
            SUMS, None, B, ALPHA_POST, row[:, None], streams + i[None, :], mask, rstd[:, None], 1, 0, width
        )
        s = tl.sigmoid(z)
        dz = tl.load(DPOST + place, mask, other=0.0) * (post_mult * s * (1.0 - s))
        along = tl.sum(dz * mix, 1)
        db_post += tl.sum(dz, 0)
        da_post += along
        total += alpha_post * along
        tl.store(g + streams, alpha_post * dz * rstd[:, None], mask)

        inside = mask[:, :, None] & (i < streams)[None, None, :]
        wide, matrix_at = row[:, None, None], at[None, :, :]
        m = tl.load(H_RES + wide * (streams * streams) + matrix_at, inside, other=0.0)
        dm = tl.load(DRES + wide * (streams * streams) + matrix_at, inside, other=0.0)
        place += (2 * tmax - 2) * rows.to(tl.int64) * streams
        for _ in range(1, tmax):
            m, dm = _divided_gradient(m, dm, DIVISORS, place, mask, 1)
            place -= rows.to(tl.int64) * streams
            m, dm = _divided_gradient(m, dm, DIVISORS, place, mask, 2)
            place -= rows.to(tl.int64) * streams
        m, dm = _divided_gradient(m, dm, DIVISORS, place, mask, 1)
        mix, z = _logits(
            SUMS, None, B, ALPHA_RES, wide, 2 * streams + matrix_at, inside, rstd[:, None, None], 1, 0, width
        )
        p = _softmax(z, inside)
        dm = tl.where(inside, dm, 0.0)
        dz = p * (dm - tl.sum(p * dm, 2)[:, :, None])
        along = tl.sum(tl.sum(dz * mix, 2), 1)
        db_res += tl.sum(dz, 0)
        da_res += along
        total += alpha_res * along
        tl.store(G + wide * width + 2 * streams + matrix_at, alpha_res * dz * rstd[:, None, None], inside)
        tl.store(G + row * width + COUNT, rstd * rstd * total / depth, valid)
    partial = PARTIAL + tl.program_id(0) * width
    tl.store(partial + i, db_pre, i < streams)
    tl.store(partial + streams + i, db_post, i < streams)
    tl.store(partial + 2 * streams + at, db_res, (i < streams)[:, None] & (i < streams)[None, :])
    tl.store(partial + COUNT, tl.sum(da_pre, 0))
    tl.store(partial + COUNT + 1, tl.sum(da_post, 0))
    tl.store(partial + COUNT + 2, tl.sum(da_res, 0))


@triton.jit
def _parts(g):
    """Split fp32 into a value of TF32, and the rest."""
    upper = (g.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return upper, g - upper


@triton.jit(do_not_specialize=["rows"])
def mhc_project_backward(
    X, PHI, G, DX, DPHI, rows, x_stride, cols: tl.constexpr, count: tl.constexpr, width: tl.constexpr,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    # a program has a block of columns of every n-th tile of rows, and sums its own dphi
    col, n = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.arange(0, SIZE)[None, :]
    inside = in_row(col, cols, COLS)
    phi_mask = inside[:, None] & (n < count)
    at = col[:, None].to(tl.int64) * count + n
    if DX is not None:
        phi = tl.trans(tl.load(PHI + at, phi_mask, other=0.0).to(tl.float32))
    dphi = tl.zeros((COLS, SIZE), tl.float32)
    for start in range(tl.program_id(1) * DEPTH, rows, tl.num_programs(1) * DEPTH):
        row = (start + tl.arange(0, DEPTH)).to(tl.int64)
        valid = (row < rows)[:, None]
        x = tl.load(X + row[:, None] * x_stride + col[None, :], valid & inside[None, :], other=0.0).to(tl.float32)
        g = tl.load(G + row[:, None] * width + n, valid & (n < count), other=0.0)
        if PRECISION == "tf32":  # which holds x and phi; in one part g would lose half of its bits
            g, rest = _parts(g)
        if DX is not None:
            dx = -tl.load(G + row[:, None] * width + count, valid, other=0.0) * x
            if PRECISION == "tf32":
                dx = dot(rest, phi, dx, PRECISION)
            dx = dot(g, phi, dx, PRECISION)
            tl.store(DX + row[:, None] * cols + col[None, :], dx.to(DX.dtype.element_ty), valid & inside[None, :])
        if DPHI is not None:
            x = tl.trans(x)
            if PRECISION == "tf32":
                dphi = dot(x, rest, dphi, PRECISION)
            dphi = dot(x, g, dphi, PRECISION)
    if DPHI is not None:
        tl.store(DPHI + tl.program_id(1).to(tl.int64) * cols * count + at, dphi.to(DPHI.dtype.element_ty), phi_mask)
