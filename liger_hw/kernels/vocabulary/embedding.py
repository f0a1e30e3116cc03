r"""Take rows of a table by index; the backward adds gradients of equal indices.

    y_i  = W_t                t = indices_i
    dW_t = sum over i with indices_i = t of dy_i              in fp32, in a fixed order; rounded once

Letters: n indices, C columns, V rows of the table. Traffic: forward reads and writes n rows (2nC), by torch's gather.
Backward reads dy (nC), writes zeros to the whole table (VC) and the sums over them (nC at most).

The backward sorts the indices, so that equal ones are a run. A program has a chunk of sorted positions: it stores the
sum of each run that lies in the chunk, and fp32 sums of the parts of runs that cross an end of the chunk, which a
second kernel adds. So 16,384 equal indices take 4 steps of 8 rows and then 64 of 8 parts, not 2,048 steps.
"""

import torch
from torch.nn import functional as F

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import Cost, differentiable, op
from liger_hw.kernels._math import in_row
from liger_hw.kernels._rows import rows_of
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


def _validate(weight, indices, padding_idx):
    check(weight.ndim == 2 and weight.is_floating_point(), "weight", weight, "floating point (rows, columns)")
    whole = indices.dtype in (torch.int32, torch.int64) and indices.device == weight.device
    check(whole, "indices", indices, f"int32 or int64 on {weight.device}")
    if padding_idx is not None:
        rows = weight.shape[0]
        check(type(padding_idx) is int, "padding_idx", padding_idx, "an int or None")
        check(-rows <= padding_idx < rows, "padding_idx", padding_idx, f"{-rows} to {rows - 1}, or None")


@op(validate=_validate)
def embedding(weight: torch.Tensor, indices: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """Return the rows of `weight` that `indices` name.

    The backward adds the gradients of equal indices in fp32, always in the same order, and rounds once. torch's adds
    them by a slower kernel.

    Args:
        weight: (rows, columns), any strides and floating dtype; plain torch computes dtypes other than fp32, fp16 and
            bf16.
        indices: int32 or int64, any shape. As in torch, one outside the table is an error, on a GPU of the device.
        padding_idx: the gradient of this row is zero; a negative one counts from the end.

    Returns:
        (*indices.shape, columns), contiguous, bitwise equal to the rows.

    Raises:
        ValueError: `weight` is no table, `indices` has another dtype or device, or `padding_idx` is outside the table.

    Examples:
        >>> liger_hw.embedding(torch.eye(3), torch.tensor([2]))
        tensor([[0., 0., 1.]])
    """
    return F.embedding(indices, weight, padding_idx)


embedding.shards(weight="V h", indices="...", returns="... h")


@embedding.cost
def _(weight, indices, *options, **named):
    rows, values = indices.numel() * weight.shape[1] * weight.element_size(), indices.numel() * weight.shape[1]
    # the forward compares each index with both ends of the table
    return Cost(2 * rows + indices.nbytes, rows + weight.nbytes + indices.nbytes, 2 * indices.numel(), values)


def _block(width, itemsize, device):
    """Return 8 rows of 2 KiB, or 4 where a lane has 64 registers.

    Loads of 16 KiB are in flight at once, in 32 registers a lane; six programs share a core (compiled for sm90). A
    wide row takes several programs.
    """
    block = min(width, 2048 // itemsize)
    return Config({"ROWS": min(8, device.registers // 16), "COLS": block}, row_warps(block, device, 16 // itemsize))


embedding_backward_config = tuned(_block, "embedding_backward")
embedding_add_parts_config = tuned(_block, "embedding_add_parts")


@triton.jit
def _only_if(valid, mask):
    """Mask everything unless the number `valid` is true.

    A comparison, because the interpreter makes integers of an int1 that it broadcasts.
    """
    return mask & (tl.full([1], valid, tl.int32) != 0)


@triton.jit(do_not_specialize=["count", "chunks", "padding"])
def embedding_backward(
    TOKENS, ORDER, DY, DW, PARTS, count, chunk, chunks, padding, dy_stride, cols: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    begin = index * chunk
    end = tl.minimum(begin + chunk, count)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = in_row(col, cols, COLS)
    before = tl.load(TOKENS + begin - 1, begin > 0, other=-1)  # a run of this token begins in an earlier chunk
    total = tl.zeros([COLS], tl.float32)
    for start in range(begin, end, ROWS):
        previous = tl.load(TOKENS + start - 1, start > 0, other=-1)
        tokens, rows = (), ()
        for i in tl.static_range(ROWS + 1):  # also the token after the last row
            tokens = tokens + (tl.load(TOKENS + start + i, start + i < count, other=-1),)
        for i in tl.static_range(ROWS):  # no row waits for the sum of those before
            row = tl.load(ORDER + start + i, start + i < end, other=0)
            valid = (start + i < end) & (tokens[i] != padding)
            rows = rows + (tl.load(DY + row * dy_stride + col, _only_if(valid, mask), other=0.0),)
        for i in tl.static_range(ROWS):
            token = tokens[i]
            total = tl.where(token == previous, total, 0.0) + rows[i].to(tl.float32)
            ends = token != tokens[i + 1]
            if (start + i < end) & (token != padding) & (ends | (start + i == end - 1)):
                if ends & (token != before):
                    tl.store(DW + token.to(tl.int64) * cols + col, total, mask)
                else:  # the first `chunks` parts go on from an earlier chunk, the others begin runs
                    part = index + tl.where(token == before, 0, chunks)
                    tl.store(PARTS + part * cols + col, total, mask)
            previous = token


@triton.jit(do_not_specialize=["chunks", "padding"])
def embedding_add_parts(
    TOKENS, PARTS, DW, chunk, chunks, padding, cols: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Add the parts of the run that begins in this chunk and crosses its end."""
    index = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    mask = in_row(col, cols, COLS)
    token = tl.load(TOKENS + (index + 1) * chunk)
    begins = token != tl.load(TOKENS + index * chunk - 1, index > 0, other=-1)
    crosses = (token == tl.load(TOKENS + (index + 1) * chunk - 1)) & begins & (token != padding)
    total = tl.load(PARTS + (chunks + index) * cols + col, _only_if(crosses, mask), other=0.0)
    other, more = index + 1, crosses
    while more:
        at = other + tl.arange(0, ROWS)
        valid = tl.load(TOKENS + at * chunk, at < chunks, other=-1) == token
        parts = tl.load(PARTS + at[:, None] * cols + col[None, :], valid[:, None] & mask[None, :], other=0.0)
        total += tl.sum(parts, 0)
        more = tl.sum(valid.to(tl.int32), 0) == ROWS
        other += ROWS
    tl.store(DW + token.to(tl.int64) * cols + col, total, _only_if(crosses, mask))


def _chunk_of(count):
    """Return how many sorted positions a program has.

    32 are four steps of 8 rows. 1,024 chunks fill any device, and the second kernel adds as many parts at most.
    """
    return max(32, power_of_2(-(-count // 1024)))


@differentiable()
def _embedding(weight: torch.Tensor, indices: torch.Tensor, rows: int, padding: int):
    return F.embedding(indices, weight)


@_embedding.backward(lambda dy, rows: dy.new_empty(rows, dy.shape[-1]))
def _embedding_backward(dy, indices, rows, padding, *, dweight):
    """Compute the gradient of a table of `rows` rows.

    That of row `padding` is zero; -1 means none.
    """
    cols, count = dy.shape[-1], indices.numel()
    dweight.zero_()
    if dweight.numel() == 0 or count == 0:
        return
    # the sort of 32-bit keys takes half the steps of 64-bit ones
    tokens, order = torch.sort(indices.reshape(-1).to(torch.int32 if rows < 2**31 else torch.int64), stable=True)
    chunk = _chunk_of(count)
    chunks = -(-count // chunk)
    parts = dy.new_empty((2 * chunks, cols), dtype=torch.float32)
    numbers = power_of_2(cols), dy.element_size(), device_of(dy)
    config = embedding_backward_config(*numbers)
    grid = chunks, -(-cols // config["COLS"]), 1
    dy, dy_stride = rows_of(dy)
    launch(
        embedding_backward, grid, config,
        tokens, order, dy, dweight, parts, count, chunk, chunks, padding, dy_stride, cols,
    )  # fmt: skip
    config = embedding_add_parts_config(*numbers)
    grid = chunks - 1, -(-cols // config["COLS"]), 1
    launch(embedding_add_parts, grid, config, tokens, parts, dweight, chunk, chunks, padding, cols)


@embedding.register("triton")
def _(weight, indices, padding_idx):
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return _embedding.apply(weight, indices, weight.shape[0], padding)
