"""Compute an output layer's logits by chunks of rows, and accumulate its gradients over them."""

import math
from typing import NamedTuple

import torch

from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.dispatch import autocasts, cast_for_linear
from liger_hw.kernels.vocabulary._fp16 import kept_dtype, largest_finite, power_of_2_below
from liger_hw.kernels.vocabulary._in_forward import scale_in_place
from liger_hw.kernels.vocabulary._products import add_product, widest_dtype, write_logits, write_product

MiB = 1024 * 1024

# Roundings of a 16-bit sum, one a chunk. Of 16,384 rows with skewed targets 32 roundings make half of the error that
# the parity rule allows (worst 0.55, rms 0.34; 8: 0.28, 0.18; 64: 1.04, 0.48). An fp32 sum would take twice the
# weight's memory.
ROUNDINGS = 32
FP32_LOGITS = {torch.float32, torch.bfloat16}, {torch.float32, torch.float16}  # unlike dtypes of x and weight


def prepare_head(x, weight, bias, chunk_memory, flat=False, names=("x", "weight", "bias"), logits_dtype=None):
    """Check a head's tensors and return them, cast as `F.linear` casts under autocast.

    `flat`: x must be (N, H). `names`: the caller's names of the tensors. With a `logits_dtype` autocast casts nothing.
    """
    check(logits_dtype in (None, torch.float32), "logits_dtype", logits_dtype, "None or torch.float32")
    casts = autocasts(x.device.type) and logits_dtype is None
    if casts and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = cast_for_linear(dtype, x, weight, bias)
    x_name, weight_name, bias_name = names
    fits = x.is_floating_point() and (x.ndim == 2 if flat else x.ndim >= 1)
    check(fits, x_name, x, "floats (N, H)" if flat else "floats (..., H)")
    fits = weight.ndim == 2 and weight.shape[0] > 0 and weight.shape[1] == x.shape[-1]
    fits = fits and {x.dtype, weight.dtype} in ({x.dtype}, *FP32_LOGITS) and weight.device == x.device
    like = f"{x.dtype} of shape (V, {x.shape[-1]}) on {x.device}, as {x_name}, or fp32 with 16 bits (or torch.autocast)"
    check(fits, weight_name, weight, like)
    if bias is not None:
        fits = bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.device == x.device
        check(fits, bias_name, bias, f"{weight.dtype} of shape ({weight.shape[0]},) on {x.device}, as {weight_name}")
    fits = isinstance(chunk_memory, (int, float)) and 0 < chunk_memory < math.inf
    check(fits, "chunk_memory", repr(chunk_memory), "a positive, finite number of bytes")
    return x, weight, bias


def chunk_rows(rows, row_bytes, chunk_memory, device):
    """Return the rows of a chunk: as many as fit the memory, in equal chunks.

    Each of several chunks holds whole tiles of the matrix products.

    Args:
        row_bytes: bytes of a row of logits. chunk_memory: bytes a chunk may take.
        device: a Device. A CPU gains nothing from chunks of over a tenth of the rows. A GPU's exceed 4,096 rows only to
            keep to ROUNDINGS: 8,192 only save accesses to dW (H200, four shapes: -1 to 4% faster, twice the memory).
    """
    tile = 16 if device.vendor == "cpu" else 256
    useful = max(rows // 10, 16) if device.vendor == "cpu" else max(4096, -(-rows // (ROUNDINGS * tile)) * tile)
    most = max(min(chunk_memory // row_bytes, useful), 1)
    if most >= rows:
        return max(rows, 1)
    most = most // tile * tile or most
    even = -(-rows // -(-rows // most))
    return min(-(-even // tile) * tile, most)


class Plan(NamedTuple):
    """How to go through the rows.

    Attributes:
        chunk_memory: bytes that a chunk's logits may take.
        with_kernels: Triton kernels turn the logits into losses and gradients, else autograd.
        accumulate_fp32: accumulate the weight's gradient in fp32, however few the chunks.
        first, vocabulary, widest, group: the fields of a `DimensionShard`, where each rank holds a part of the
            vocabulary; without a group the weight is whole.
        logits_dtype: torch.float32 for logits in fp32; None: in the wider dtype of x and weight.
        invariant: a row's results have the same bits beside any other rows.
    """

    chunk_memory: int
    with_kernels: bool
    accumulate_fp32: bool = False
    first: int = 0
    vocabulary: int = 0
    widest: int = 0
    group: str = ""
    logits_dtype: torch.dtype | None = None
    invariant: bool = False

    @classmethod
    def of(cls, call, with_kernels):
        """Return the plan of a head's op, whose `group` is a `DimensionShard` or None."""
        memory, accumulates, shard = int(call.chunk_memory), call.accum_dtype is not None, call.group or ()
        dtype, invariant = call.logits_dtype, call.invariant
        return cls(memory, with_kernels, accumulates, *shard, logits_dtype=dtype, invariant=invariant)

    @property
    def row_by_row(self):
        """Tell whether a chunk is one row, whose products are the same in any batch."""
        return self.invariant and not self.with_kernels

    @property
    def fixed_tiles(self):
        """Tell whether products with rows come from a kernel whose tiles ignore their number."""
        return self.invariant and self.with_kernels


class ChunkedHead:
    """Logits of an output layer, one chunk of rows at a time in one buffer.

    Args:
        x: (N, H). weight: (V, H). bias: (V,) or None.
        buffers: how many times the memory of a chunk's logits is in use, the logits included.
        group: rows that a chunk should hold together, where their logits fit the memory.
        rows: rows of a chunk; None: the plan decides.

    Attributes:
        rows: the most rows of a chunk.
    """

    def __init__(self, x, weight, bias, plan, buffers=1, group=1, rows=None):
        if plan.invariant:  # a launch depends on strides and alignment, a caller's view on its batch
            x = x.clone(memory_format=torch.contiguous_format)
        self.x, self.weight, self.bias, self.plan = x, weight, bias, plan
        dtype = widest_dtype(x, weight, plan.logits_dtype)
        vocabulary, vector = weight.shape[0], 16 // dtype.itemsize
        stride = -(-vocabulary // vector) * vector  # every row begins at a 16-byte boundary
        widest = -(-(plan.widest or vocabulary) // vector) * vector  # ranks go through the same chunks
        row_bytes = widest * dtype.itemsize
        if plan.row_by_row:
            rows = 1
        elif rows is None:
            rows = chunk_rows(x.shape[0], int(buffers * row_bytes), plan.chunk_memory, device_of(x))
            if group * row_bytes <= plan.chunk_memory:  # a CPU's chunks are smaller than the memory allows
                rows = max(rows, group)
        self.rows, self.buffer = rows, x.new_empty(rows, stride, dtype=dtype)
        if stride > vocabulary:
            self.buffer[:, vocabulary:].zero_()  # a CPU multiplies the padding by 0 in bf16, so it must not be NaN
            self.buffer = self.buffer[:, :vocabulary]

    def logits(self, part, at=0):
        """Compute the logits (M, V) of a slice of rows, in the buffer from `at`."""
        logits = sliced(self.buffer, slice(at, at + part.stop - part.start))
        x = self.x[part].clone() if self.plan.row_by_row else sliced(self.x, part)  # bits may follow the alignment
        write_logits(logits, x, self.weight, self.bias, self.plan.fixed_tiles)
        return logits

    def run(self, step, needs_grad=None, in_forward=False):
        """Call `step(slice of rows, logits, gradients)` for every chunk.

        Args:
            step: writes the gradient of the logits over them, where one is needed; where `gradients.scales`, times
                `gradients.factor(...)`.
            needs_grad: whether x, weight and bias need a gradient. None: the step writes none, and gets None for them.
            in_forward: as in `Gradients`.

        Returns:
            the gradients of `Gradients.finished`, or None.
        """
        count = self.x.shape[0]
        gradients = None
        if needs_grad is not None:
            gradients = Gradients(self, needs_grad, -(-count // self.rows), in_forward)
        for start in range(0, count, self.rows):
            part = slice(start, min(start + self.rows, count))
            logits = self.logits(part)
            step(part, logits, gradients)
            if gradients is not None:
                gradients.add(part, logits)
        return gradients and gradients.finished()

    def gradients(self, step, *needs_grad):
        """Return the gradients of `run`, None for unneeded ones."""
        return none_if_unneeded(self.run(step, needs_grad), needs_grad)


def wide_dtype(x):
    return torch.promote_types(x.dtype, torch.float32)


def needed_gradients(*tensors):
    """Tell which tensors need a gradient; under torch.compile `needs_input_grad` ignores no_grad."""
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)


class Gradients:
    """Gradients of a head's x, weight and bias, accumulated over slices of rows.

    Args:
        slices: the number of slices.
        in_forward: the incoming gradient is not known yet. fp16 gradients are then fp32 until it multiplies them, and
            the gradients of the logits are stored times a power of two (see `_fp16`).

    Attributes:
        scales: whether gradients of logits must be multiplied by `factor`.
    """

    def __init__(self, head, needs_grad, slices, in_forward=False):
        self.x, self.weight, self.needs_grad = head.x, head.weight, needs_grad
        self.dx, self.dw, self.db = empty_gradients(head.x, head.weight, head.bias, needs_grad, in_forward)
        self.scales = in_forward and head.buffer.dtype == torch.float16 and any(needs_grad)
        allowed = "False for gradients in fp16, whose factor follows the whole batch: use logits_dtype=torch.float32"
        check(not (self.scales and head.plan.invariant), "invariant", True, allowed)
        self.plan, self.slice_factor = head.plan, None
        self.dtype = self.dw.dtype  # of the weight's and the bias's result
        few = 1 if self.dw.dtype == torch.float16 else ROUNDINGS  # fp16 may overflow between two slices
        if self.dw.dtype != wide_dtype(self.dw) and (head.plan.accumulate_fp32 or slices > few):
            self.dw = self.dw.new_empty(self.dw.shape, dtype=wide_dtype(self.dw))
        if needs_grad[2]:
            self.db = torch.zeros_like(self.db, dtype=wide_dtype(self.db))
        self.first = True

    def factor(self, *values):
        """Return the factor of the next slice's gradient of logits, () fp32, where `scales`.

        The factor never grows, so that the accumulated gradients can follow it: a slice needs no larger factor than the
        largest gradients of all slices allow.

        Args:
            values: tensors on the device of `x`. Their largest finite magnitudes must add up to at least the magnitude
                of the gradient of any logit in the slice.
        """
        factor = power_of_2_below(sum(largest_finite(value) for value in values))
        if self.slice_factor is None:
            self.slice_factor = factor
            return factor
        before, self.slice_factor = self.slice_factor, torch.minimum(factor, self.slice_factor)
        if any(self.needs_grad[1:]):
            scale_in_place(self.dw, self.db, None, self.slice_factor / before, self.plan.with_kernels)
        return self.slice_factor

    def add(self, part, dlogits):
        for_x, for_weight, for_bias = self.needs_grad
        if for_x:
            dx = self.dx[part].clone() if self.plan.row_by_row else sliced(self.dx, part)  # as in `logits`
            write_product(dx, dlogits, self.weight, self.plan.fixed_tiles)
            if self.plan.row_by_row:
                self.dx[part] = dx
            if self.scales:
                self.dx[part].div_(self.slice_factor)
        if for_weight:
            add_product(self.dw, dlogits.t(), sliced(self.x, part), self.first)
        if for_bias:
            self.db += dlogits.sum(0, dtype=self.db.dtype)
        self.first = False

    def finished(self):
        """Return dx, dw and db in their tensors' dtypes; an unneeded gradient has no elements."""
        if self.x.shape[0] == 0:
            self.dw.zero_()
        elif self.scales:
            self.dw.div_(self.slice_factor)
            self.db.div_(self.slice_factor)
        return self.dx, self.dw.to(self.dtype), self.db.to(self.dtype)


def empty_gradients(x, weight, bias, needs_grad, in_forward=False):
    """Return memory for the gradients, without elements for unneeded ones. `in_forward`: as in `Gradients`."""
    tensors = x, weight, weight if bias is None else bias
    return tuple(
        t.new_empty(t.shape if needed else 0, dtype=kept_dtype(t.dtype) if in_forward else t.dtype)
        for t, needed in zip(tensors, needs_grad)
    )


def sliced(tensor, part):
    """Return a slice's rows; all rows without a view, which takes host time."""
    return tensor if part.stop - part.start == len(tensor) else tensor[part]


def none_if_unneeded(gradients, needs_grad):
    return tuple(gradient if needed else None for gradient, needed in zip(gradients, needs_grad))


def gradient_memory(x, weight, bias, x_grad, weight_grad, bias_grad):
    """Return memory for the gradients, None for unneeded ones."""
    needs_grad = x_grad, weight_grad, bias_grad
    return none_if_unneeded(empty_gradients(x, weight, bias, needs_grad), needs_grad)
