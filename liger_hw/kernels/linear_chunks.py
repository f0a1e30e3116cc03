"""What every loss of a linear layer shares: logits by chunks of rows, and gradients added up over the chunks."""

import torch

from liger_hw._torch import has_wide_products
from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import raw
from liger_hw.launch import launch
from liger_hw.tuning import Config, row_warps, tuned

MiB = 1024 * 1024

# Roundings of a 16-bit sum, one after each chunk. Of 16,384 rows with skewed targets 32 of them make half of the error
# that the parity rule allows (worst 0.55, rms 0.34; 8: 0.28, 0.18; 64: 1.04, 0.48); a sum in fp32 would take twice the
# weight's memory.
ROUNDINGS = 32


def prepare_linear(x, weight, bias, chunk_memory, flat=False, names=("x", "weight", "bias")):
    """Refuse what does not fit; under autocast, the linear layer's tensors as `F.linear` would see them.

    `flat`: x must be (N, H). `names`: what the caller calls the tensors.
    """
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    x_name, weight_name, bias_name = names
    fits = x.is_floating_point() and (x.ndim == 2 if flat else x.ndim >= 1)
    check(fits, x_name, x, "floats (N, H)" if flat else "floats (..., H)")
    fits = weight.ndim == 2 and weight.shape[0] > 0 and weight.shape[1] == x.shape[-1]
    fits = fits and weight.dtype == x.dtype and weight.device == x.device
    like = f"{x.dtype} of shape (V, {x.shape[-1]}) on {x.device}, as {x_name} (or torch.autocast)"
    check(fits, weight_name, weight, like)
    if bias is not None:
        fits = bias.shape == weight.shape[:1] and bias.dtype == x.dtype and bias.device == x.device
        check(fits, bias_name, bias, f"{x.dtype} of shape ({weight.shape[0]},) on {x.device}")
    fits = isinstance(chunk_memory, (int, float)) and chunk_memory > 0
    check(fits, "chunk_memory", repr(chunk_memory), "a positive number of bytes")
    return x, weight, bias


def chunk_rows(rows, row_bytes, chunk_memory, device):
    """Rows of a chunk: as many as fit the memory, in equal chunks; of several, in whole tiles of the matrix products.

    Args:
        row_bytes: bytes of a row of logits.
        chunk_memory: bytes a chunk may take.
        device: a Device. A CPU gains nothing from chunks of more than an eighth of the rows. A GPU gains from chunks of
            more than 4,096 rows one reading and writing of dW less: with 8,192, at four shapes, an H200 is -1 to 4%
            faster, for twice the memory. It gets no larger ones but to keep to ROUNDINGS.
    """
    tile = 16 if device.vendor == "cpu" else 256
    useful = max(rows // 8, 16) if device.vendor == "cpu" else max(4096, -(-rows // (ROUNDINGS * tile)) * tile)
    most = max(min(chunk_memory // row_bytes, useful), 1)
    if most >= rows:
        return max(rows, 1)
    most = most // tile * tile or most
    even = -(-rows // -(-rows // most))
    return min(-(-even // tile) * tile, most)


@tuned
def scale_gradients_config(device):
    # 287 MB of bf16 take 0.170 ms on an H200 so, and 0.193 with 8 warps and 4 programs; 2 warps take 0.166, and spill
    # in fp32
    return Config({"BLOCK": 4096}, row_warps(4096, device, per_lane=32), programs=8)


@triton.jit
def _scale(X, size, dloss, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(X + at, at < size, other=0.0).to(tl.float32)
        tl.store(X + at, x * dloss, at < size)


@triton.jit(do_not_specialize=["x_size"])
def scale_gradients(DLOSS, DX, DW, DB, x_size, w_size, b_size, BLOCK: tl.constexpr):
    dloss = tl.load(DLOSS).to(tl.float32)
    if dloss != 1.0:
        _scale(DX, x_size, dloss, BLOCK)
        _scale(DW, w_size, dloss, BLOCK)
        _scale(DB, b_size, dloss, BLOCK)


def logits_buffer(x, vocabulary, rows, stride):
    """(rows, stride) for logits, 0 beyond the vocabulary: a CPU multiplies that by 0 in bf16, so it must not be NaN."""
    buffer = x.new_empty(rows, stride)
    buffer[:, vocabulary:].zero_()
    return buffer


def logits_in_chunks(x, weight, bias, size, stride):
    """Yield a slice of at most `size` rows and their logits, for all slices, the logits in one buffer."""
    rows, vocabulary = x.shape[0], weight.shape[0]
    buffer = logits_buffer(x, vocabulary, size, stride)
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        logits = buffer[: part.stop - start, :vocabulary]
        write_logits(x[part], weight, bias, logits)
        yield part, logits


def write_logits(x, weight, bias, logits):
    if bias is None:
        torch.mm(x, weight.t(), out=logits)
    else:
        torch.addmm(bias, x, weight.t(), out=logits)


def wide_dtype(x):
    return torch.promote_types(x.dtype, torch.float32)


class Gradients:
    """The wanted gradients of a linear layer's tensors, from its output's gradient for one chunk of rows at a time."""

    def __init__(self, x, weight, bias, wanted, chunks, accumulate_fp32):
        self.x, self.weight, self.wanted = x, weight, wanted
        self.dx, self.dw, self.db = empty_gradients(x, weight, bias, wanted)
        if self.dw.dtype != wide_dtype(self.dw) and (accumulate_fp32 or chunks > ROUNDINGS):
            self.dw = self.dw.new_empty(self.dw.shape, dtype=wide_dtype(self.dw))
        self.db = torch.zeros_like(self.db, dtype=wide_dtype(self.db))
        self.first = True

    def add(self, part, dlogits):
        x_wanted, w_wanted, b_wanted = self.wanted
        if x_wanted:
            torch.mm(dlogits, self.weight, out=self.dx[part])
        if w_wanted:
            _add_product(self.dw, dlogits.t(), self.x[part], self.first)
        if b_wanted:
            self.db += dlogits.sum(0, dtype=self.db.dtype)
        self.first = False

    def finished(self):
        if self.x.shape[0] == 0:
            self.dw.zero_()
        return self.dx, self.dw.to(self.weight.dtype), self.db.to(self.weight.dtype)


def _add_product(total, a, b, first):
    """total = a b (+ total), added up in the dtype of `total`, which may be wider than theirs."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif not has_wide_products(a.device.type):
        total.copy_(torch.mm(a, b)) if first else total.add_(torch.mm(a, b))
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def empty_gradients(x, weight, bias, wanted):
    tensors = x, weight, weight if bias is None else bias
    return tuple(tensor.new_empty(tensor.shape if want else 0) for tensor, want in zip(tensors, wanted))


@raw(mutates=["dx", "dw", "db"])
def scale_gradients_of_linear(
    dx: torch.Tensor, dw: torch.Tensor, db: torch.Tensor, dloss: torch.Tensor, with_kernels: bool
) -> None:
    """Multiply the gradients by the incoming one, in place, unless it is 1."""
    if with_kernels:
        config = scale_gradients_config(device_of(dx))
        grid = config.grid_for(-(-max(dx.numel(), dw.numel(), db.numel()) // config["BLOCK"])), 1, 1
        launch(scale_gradients, grid, config, dloss, dx, dw, db, dx.numel(), dw.numel(), db.numel())
    else:
        for gradient in (dx, dw, db):
            gradient.mul_(dloss)
