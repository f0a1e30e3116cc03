"""Count the rows and sum their losses, in one launch instead of torch's four."""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import raw
from liger_hw.launch import launch
from liger_hw.tuning import Config, row_warps, tuned


@tuned
def cross_entropy_totals_config(device):
    return Config({"ROWS": 4096}, row_warps(4096, device, per_lane=16))


@triton.jit
def _load_rows(TARGET, WEIGHT, LOSS, Z_LOSS, row, valid, classes, ignore_index, MEAN: tl.constexpr, ROWS: tl.constexpr):
    """Return a block's sums: loss, z-loss, class weights of the targets, a column, rows."""
    loss, z_loss, count = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    weights = tl.zeros((ROWS, 1), tl.float32)
    if MEAN:
        y = tl.load(TARGET + row, valid, other=0)
        counts = valid & (y != ignore_index)
        count = counts.to(tl.float32)
        if WEIGHT is not None:
            inside = tl.minimum(tl.maximum(y, 0), classes - 1)[:, None]  # a target outside has a loss of NaN already
            weights = tl.load(WEIGHT + inside, counts[:, None], other=0.0).to(tl.float32)
    if LOSS is not None:
        loss = tl.load(LOSS + row, valid, other=0.0)
    if Z_LOSS is not None:
        z_loss = tl.load(Z_LOSS + row, valid, other=0.0)
    return loss, z_loss, weights, count


@triton.jit(do_not_specialize=["rows", "ignore_index"])
def cross_entropy_totals(
    TARGET, WEIGHT, LOSS, Z_LOSS, LOSS_TOTAL, Z_LOSS_TOTAL, DENOMINATOR, COUNT, rows, classes, ignore_index,
    MEAN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add up all rows in one program, always in the same order."""
    lane = tl.arange(0, ROWS)
    loss, z_loss, count = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    weights = tl.zeros((ROWS, 1), tl.float32)
    whole = rows // ROWS * ROWS
    for start in range(0, whole, ROWS):  # without a mask, in full vectors
        valid = tl.full((ROWS,), True, tl.int1)
        added = _load_rows(TARGET, WEIGHT, LOSS, Z_LOSS, start + lane, valid, classes, ignore_index, MEAN, ROWS)
        loss, z_loss, weights, count = loss + added[0], z_loss + added[1], weights + added[2], count + added[3]
    row = whole + lane
    added = _load_rows(TARGET, WEIGHT, LOSS, Z_LOSS, row, row < rows, classes, ignore_index, MEAN, ROWS)
    loss, z_loss = tl.sum(loss + added[0], 0), tl.sum(z_loss + added[1], 0)
    if MEAN:
        counted = tl.sum(count + added[3], 0)
        denominator = tl.maximum(counted, 1.0)
        if WEIGHT is not None:
            tl.store(COUNT, denominator)
            denominator = tl.sum(tl.sum(weights + added[2], 1), 0)
            without_weight = tl.where(counted > 0.0, float("nan"), 1.0)
            denominator = tl.where(denominator == 0.0, without_weight, denominator)
        if DENOMINATOR is not None:
            tl.store(DENOMINATOR, denominator)
        loss, z_loss = loss / denominator, z_loss / denominator
    if LOSS is not None:
        tl.store(LOSS_TOTAL, loss)
    if Z_LOSS is not None:
        tl.store(Z_LOSS_TOTAL, z_loss)


def launch_totals(target, weight, loss, z_loss, totals, ignore_index, mean):
    """Write two sums, their divisor and the row count to `totals`, fp32 or None."""
    # the divisor, of `mean` alone: the targets' class weights, NaN for 0; without weights the rows that count or 1
    classes = 0 if weight is None else weight.shape[0]
    launch(
        cross_entropy_totals, (1, 1, 1), cross_entropy_totals_config(device_of(target)),
        target, weight, loss, z_loss, *totals, target.shape[0], classes, ignore_index, mean,
    )  # fmt: skip


def _empty_divisors(target, weight):
    denominator = target.new_empty((), dtype=torch.float32)
    return denominator, None if weight is None else torch.empty_like(denominator)


@raw(_empty_divisors)
def divisors(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, *, denominator, count):
    """Return the divisors of "mean": rows and None, or the targets' weights and rows."""
    launch_totals(target, weight, None, None, (None, None, denominator, count), ignore_index, True)


@raw(lambda loss: loss.new_empty(()))
def total(loss: torch.Tensor, *, y):
    """Return the sum of the rows' losses."""
    launch_totals(loss, None, loss, None, (y, None, None, None), 0, False)
