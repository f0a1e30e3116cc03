r"""Compute group norm over the channels of a group and all positions.

    normed = (x - mean(x)) rstd                             rstd = 1 / sqrt(mean((x - mean(x))^2) + eps), of a group
    y      = normed w + b                                   w and b of the channel; rounded once

    m  = dy w
    dx = rstd (m - mean(m) - normed mean(m normed))         means over a group
    dw = sum over samples and positions of dy normed,  db = sum over samples and positions of dy

Letters: N samples of C channels in G groups, S positions. The kernels read channels, which are rows of S values: a
group is a few rows of any length, and all groups of a sample may be fewer than a GPU has cores. Traffic: forward reads
x twice, for the channels' mean and squared deviations and for y, and writes y (3NCS). Backward reads x and dy twice,
for the channels' sums of dy and dy normed and for dx, and writes dx (5NCS). Small kernels between them merge the
channels of a group, by Chan et al. (1979) forward. All are bound by memory.
"""

from dataclasses import replace

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, op, raw, widen
from liger_hw.kernels._math import in_row, in_tile
from liger_hw.kernels._partials import add_partials
from liger_hw.kernels._rows import contiguous
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


def _validate(x, weight, bias, num_groups):
    check(x.ndim >= 2 and x.is_floating_point(), "x", x, "floating point (N, C, ...)")
    divides = num_groups > 0 and x.shape[1] % num_groups == 0
    check(divides, "num_groups", num_groups, f"a divisor of x's {x.shape[1]} channels")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            fits = parameter.shape == x.shape[1:2] and parameter.device == x.device
            check(fits, name, parameter, "one value for each channel of x, on its device")


@op(validate=_validate)
def group_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, num_groups: int, eps: float = 1e-5
) -> torch.Tensor:
    """Normalise each group of channels to mean 0, variance 1; scale and shift channels (arXiv:1803.08494).

    Like torch.nn.functional.group_norm, in fp32, rounded once.

    Args:
        x: (N, C, ...), any floating dtype; copied if not contiguous. Plain torch computes dtypes other than fp32, fp16
            and bf16.
        weight: (C,), any floating dtype, or None for no scale.
        bias: (C,), any floating dtype, or None for no shift.
        num_groups: a divisor of C; each group has C / num_groups consecutive channels.
        eps: added to the variance.

    Returns:
        Like `x`, contiguous.

    Raises:
        ValueError: `num_groups` does not divide C, or `weight` or `bias` does not fit.

    Examples:
        >>> liger_hw.group_norm(torch.rand(2, 8, 5), torch.ones(8), torch.zeros(8), num_groups=4).shape
        torch.Size([2, 8, 5])
    """
    groups = widen(x).unflatten(1, (num_groups, x.shape[1] // num_groups)).flatten(2)
    groups = groups - groups.mean(-1, keepdim=True)
    normed = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).reshape(x.shape)
    channel_shape = (-1, *[1] * (x.ndim - 2))
    y = normed if weight is None else normed * widen(weight).view(channel_shape)
    return (y if bias is None else y + widen(bias).view(channel_shape)).to(x.dtype)


@group_norm.shards
def _(call):
    rest = " ".join(f"D{i}" for i in range(call.x.ndim - 2))
    return call, {"x": f"n C {rest}", "weight": "C", "bias": "C", "returns": "x"}


@group_norm.cost
def _(x, weight, bias, *options, **named):
    parameters = sum(p.nbytes for p in (weight, bias) if p is not None)
    return Cost(2 * x.nbytes + parameters, 3 * x.nbytes + 2 * parameters, 7 * x.numel(), 13 * x.numel())


@tuned
def group_norm_moments_config(positions, itemsize, device):
    return _loop(positions, 8192, device)


@tuned
def group_norm_forward_config(positions, itemsize, device):
    return _tile(positions, 4096, device)


@tuned
def group_norm_channel_sums_config(positions, itemsize, device):
    return _loop(positions, 4096, device)


@tuned
def group_norm_backward_config(positions, itemsize, device):
    return _tile(positions, 4096, device)


def _tile(positions, elements, device):
    """Return a tile of `elements` values, 16 a lane, of one channel or several."""
    cols = min(power_of_2(positions), elements)
    return Config({"ROWS": elements // cols, "COLS": cols}, row_warps(elements, device, per_lane=16))


def _loop(positions, elements, device):
    """Return that tile for a loop, which loads two blocks ahead without registers."""
    config = _tile(positions, elements, device)
    return replace(config, meta=config.meta | {"STAGES": 3 if device.async_copy else 1})


def _channels_config(channels, device):
    block = min(power_of_2(channels), 2048)
    return Config({"COLS": block}, row_warps(block, device, per_lane=4))


group_norm_statistics_config = tuned(_channels_config, "group_norm_statistics")
group_norm_group_sums_config = tuned(_channels_config, "group_norm_group_sums")


@triton.jit(do_not_specialize=["rows"])
def group_norm_moments(
    X, MEAN, SQUARES, rows, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr
):
    """Compute each channel's mean and sum of squared deviations."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean, squares = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    for start in tl.range(0, cols, COLS, num_stages=STAGES):
        col = start + tl.arange(0, COLS)[None, :]
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        x = tl.load(X + row[:, None] * cols + col, mask, other=0.0).to(tl.float32)
        count = tl.minimum(cols - start, COLS).to(tl.float32)
        block_mean = tl.sum(x, 1) / count
        deviation = tl.where(in_row(col, cols, COLS), x - block_mean[:, None], 0.0)
        difference = block_mean - mean
        share = count / (start + count)
        mean += difference * share
        # 0 in the first block, also where the mean's square is infinite
        squares += tl.sum(deviation * deviation, 1) + difference * (difference * (start * share))
    tl.store(MEAN + row, mean, row < rows)
    tl.store(SQUARES + row, squares, row < rows)


@triton.jit
def group_norm_statistics(
    CHANNEL_MEAN, SQUARES, MEAN, RSTD, positions, eps, cols: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Merge the moments of a group's channels to its mean and rstd."""
    first = tl.program_id(0).to(tl.int64) * cols
    col = tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    for start in range(0, cols, COLS):
        total += tl.load(CHANNEL_MEAN + first + start + col, in_row(start + col, cols, COLS), other=0.0)
    mean = tl.sum(total, 0) / cols
    total = tl.zeros((COLS,), tl.float32)
    for start in range(0, cols, COLS):
        valid = in_row(start + col, cols, COLS)
        difference = tl.load(CHANNEL_MEAN + first + start + col, valid, other=mean) - mean
        within = tl.load(SQUARES + first + start + col, valid, other=0.0) / positions
        total += tl.where(valid, within + difference * difference, 0.0)
    tl.store(MEAN + tl.program_id(0), mean)
    tl.store(RSTD + tl.program_id(0), 1.0 / tl.sqrt(tl.sum(total, 0) / cols + eps))


@triton.jit
def _program_tile(group_channels, channels, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the rows of this program's tile, their groups and channels, and its columns."""
    BLOCKS: tl.constexpr = (cols + COLS - 1) // COLS
    row = tl.program_id(0) // BLOCKS * ROWS + tl.arange(0, ROWS)  # of 32 bits: divisions of 64 are slow, and spill
    return (
        row.to(tl.int64),
        row // group_channels,
        row % channels,
        tl.program_id(0) % BLOCKS * COLS + tl.arange(0, COLS)[None, :],
    )


@triton.jit
def _load_rows(P, at, valid, absent):
    """Load a column of fp32, or return `absent` without P."""
    if P is not None:
        return tl.load(P + at, valid, other=0.0).to(tl.float32)[:, None]
    else:
        return tl.full((1, 1), absent, tl.float32)


@triton.jit(do_not_specialize=["rows"])
def group_norm_forward(
    X, W, B, MEAN, RSTD, Y, rows, channels, group_channels, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row, group, channel, col = _program_tile(group_channels, channels, cols, ROWS, COLS)
    valid, mask = row < rows, in_tile(row, col, rows, cols, ROWS, COLS)
    mean, rstd = _load_rows(MEAN, group, valid, 0.0), _load_rows(RSTD, group, valid, 0.0)
    w, b = _load_rows(W, channel, valid, 1.0), _load_rows(B, channel, valid, 0.0)
    x = tl.load(X + row[:, None] * cols + col, mask, other=0.0).to(tl.float32)
    tl.store(Y + row[:, None] * cols + col, (x - mean) * rstd * w + b, mask)


@triton.jit(do_not_specialize=["rows"])
def group_norm_channel_sums(
    X, DY, MEAN, RSTD, SUM_DY, SUM_PRODUCT, rows, group_channels, cols: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sum dy and dy normed over the positions of each channel."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group, row, valid = row // group_channels, row.to(tl.int64), row < rows
    mean, rstd = _load_rows(MEAN, group, valid, 0.0), _load_rows(RSTD, group, valid, 0.0)
    sum_dy, sum_product = tl.zeros((ROWS, COLS), tl.float32), tl.zeros((ROWS, COLS), tl.float32)
    for start in tl.range(0, cols, COLS, num_stages=STAGES):
        col = start + tl.arange(0, COLS)[None, :]
        mask = in_tile(row, col, rows, cols, ROWS, COLS)
        x = tl.load(X + row[:, None] * cols + col, mask, other=0.0).to(tl.float32)
        dy = tl.load(DY + row[:, None] * cols + col, mask, other=0.0).to(tl.float32)
        sum_dy += dy
        sum_product += dy * ((x - mean) * rstd)
    tl.store(SUM_DY + row, tl.sum(sum_dy, 1), valid)
    tl.store(SUM_PRODUCT + row, tl.sum(sum_product, 1), valid)


@triton.jit
def group_norm_group_sums(
    SUM_DY, SUM_PRODUCT, W, SHIFT, ALONG, positions, groups, cols: tl.constexpr, COLS: tl.constexpr
):  # fmt: skip
    """Compute mean(m) and mean(m normed) of a group from the sums of its channels."""
    first = tl.program_id(0).to(tl.int64) * cols
    shift, along = tl.zeros((COLS,), tl.float32), tl.zeros((COLS,), tl.float32)
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)
        valid = in_row(col, cols, COLS)
        w = tl.full((1,), 1.0, tl.float32)
        if W is not None:
            w = tl.load(W + tl.program_id(0) % groups * cols + col, valid, other=0.0).to(tl.float32)
        shift += tl.load(SUM_DY + first + col, valid, other=0.0) * w
        along += tl.load(SUM_PRODUCT + first + col, valid, other=0.0) * w
    tl.store(SHIFT + tl.program_id(0), tl.sum(shift, 0) / cols / positions)
    tl.store(ALONG + tl.program_id(0), tl.sum(along, 0) / cols / positions)


@triton.jit(do_not_specialize=["rows"])
def group_norm_backward(
    X, DY, W, MEAN, RSTD, SHIFT, ALONG, DX, rows, channels, group_channels, cols: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    row, group, channel, col = _program_tile(group_channels, channels, cols, ROWS, COLS)
    valid, mask = row < rows, in_tile(row, col, rows, cols, ROWS, COLS)
    mean, rstd = _load_rows(MEAN, group, valid, 0.0), _load_rows(RSTD, group, valid, 0.0)
    shift, along = _load_rows(SHIFT, group, valid, 0.0), _load_rows(ALONG, group, valid, 0.0)
    x = tl.load(X + row[:, None] * cols + col, mask, other=0.0).to(tl.float32)
    m = tl.load(DY + row[:, None] * cols + col, mask, other=0.0).to(tl.float32)
    m *= _load_rows(W, channel, valid, 1.0)
    tl.store(DX + row[:, None] * cols + col, rstd * (m - (x - mean) * rstd * along - shift), mask)


def _sizes(x, num_groups):
    """Return the samples, the channels, the channels of a group and the positions."""
    samples, channels, *positions = x.shape
    return samples, channels, channels // num_groups, torch.Size(positions).numel()


def _empty_outputs(x, num_groups):
    mean = x.new_empty(x.shape[0] * num_groups, dtype=torch.float32)
    return x.new_empty(x.shape), mean, torch.empty_like(mean)


@raw(_empty_outputs)
def _group_norm_forward(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, num_groups: int, eps: float,
    *, y, mean, rstd,
):  # fmt: skip
    if not x.numel():
        return
    x = x.contiguous()
    samples, channels, group_channels, positions = _sizes(x, num_groups)
    rows, shape, device = samples * channels, (positions, x.element_size()), device_of(x)
    channel_mean, squares = (x.new_empty(rows, dtype=torch.float32) for _ in range(2))
    config = group_norm_moments_config(*shape, device)
    launch(group_norm_moments, (-(-rows // config["ROWS"]), 1, 1), config, x, channel_mean, squares, rows, positions)
    launch(
        group_norm_statistics, (len(mean), 1, 1), group_norm_statistics_config(group_channels, device),
        channel_mean, squares, mean, rstd, positions, eps, group_channels,
    )  # fmt: skip
    config = group_norm_forward_config(*shape, device)
    launch(
        group_norm_forward, _grid(config, rows, positions), config,
        x, contiguous(weight), contiguous(bias), mean, rstd, y, rows, channels, group_channels, positions,
    )  # fmt: skip


def _grid(config, rows, positions):
    return -(-rows // config["ROWS"]) * -(-positions // config["COLS"]), 1, 1


@_group_norm_forward.backward()
def _group_norm_backward(x, weight, bias, num_groups, mean, rstd, dy, *, dx, dweight, dbias):
    dy_sums, product_sums = (dy.new_zeros(x.shape[:2], dtype=torch.float32) for _ in range(2))
    x, weight, dy = x.contiguous(), contiguous(weight), dy.contiguous()
    samples, channels, group_channels, positions = _sizes(x, num_groups)
    rows, shape, device = samples * channels, (positions, x.element_size()), device_of(x)
    if x.numel():
        config = group_norm_channel_sums_config(*shape, device)
        launch(
            group_norm_channel_sums, (-(-rows // config["ROWS"]), 1, 1), config,
            x, dy, mean, rstd, dy_sums, product_sums, rows, group_channels, positions,
        )  # fmt: skip
    add_partials(product_sums, dweight)
    add_partials(dy_sums, dbias)
    if dx is None or not x.numel():
        return
    shift, along = torch.empty_like(mean), torch.empty_like(mean)
    launch(
        group_norm_group_sums, (len(mean), 1, 1), group_norm_group_sums_config(group_channels, device),
        dy_sums, product_sums, weight, shift, along, positions, num_groups, group_channels,
    )  # fmt: skip
    config = group_norm_backward_config(*shape, device)
    launch(
        group_norm_backward, _grid(config, rows, positions), config,
        x, dy, weight, mean, rstd, shift, along, dx, rows, channels, group_channels, positions,
    )  # fmt: skip


group_norm.register("triton")(_group_norm_forward.apply)
