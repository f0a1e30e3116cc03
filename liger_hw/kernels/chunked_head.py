"""An output layer whose logits exist for one chunk of rows at a time, and its gradients added up over the chunks."""

from typing import NamedTuple

import torch

from liger_hw._torch import has_wide_products
from liger_hw.backends import device_of
from liger_hw.checks import check
from liger_hw.kernels._fp16 import kept_dtype, largest_finite, power_of_2_below
from liger_hw.kernels._in_forward import scale_in_place

MiB = 1024 * 1024

# Roundings of a 16-bit sum, one after each chunk. Of 16,384 rows with skewed targets 32 of them make half of the error
# that the parity rule allows (worst 0.55, rms 0.34; 8: 0.28, 0.18; 64: 1.04, 0.48); a sum in fp32 would take twice the
# weight's memory.
ROUNDINGS = 32


def prepare_head(x, weight, bias, chunk_memory, flat=False, names=("x", "weight", "bias")):
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
        device: a Device. A CPU gains nothing from chunks of more than a tenth of the rows. A GPU gains from chunks of
            more than 4,096 rows one reading and writing of dW less: with 8,192, at four shapes, an H200 is -1 to 4%
            faster, for twice the memory. It gets no larger ones but to keep to ROUNDINGS.
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
        with_kernels: Triton kernels turn them into losses and gradients, else autograd.
        accumulate_fp32: add up the weight's gradient in fp32, however few the chunks.
    """

    chunk_memory: int
    with_kernels: bool
    accumulate_fp32: bool = False


class ChunkedHead:
    """The logits of an output layer, a chunk of rows at a time in one buffer.

    Args:
        x: (N, H). weight: (V, H). bias: (V,) or None.
        buffers: how many times the memory of a chunk's logits is in use, the logits included.
        group: rows that a chunk should hold together, where their logits fit the memory.
        rows: of a chunk; by the plan if None.

    Attributes:
        rows: of a chunk, at most.
    """

    def __init__(self, x, weight, bias, plan, buffers=1, group=1, rows=None):
        self.x, self.weight, self.bias, self.plan = x, weight, bias, plan
        vocabulary, vector = weight.shape[0], 16 // x.element_size()
        stride = -(-vocabulary // vector) * vector  # a row begins at a 16-byte boundary whatever the vocabulary
        row_bytes = stride * x.element_size()
        if rows is None:
            rows = chunk_rows(x.shape[0], int(buffers * row_bytes), plan.chunk_memory, device_of(x))
            if group * row_bytes <= plan.chunk_memory:  # a CPU's chunks are smaller than allowed
                rows = max(rows, group)
        buffer = x.new_empty(rows, stride)
        buffer[:, vocabulary:].zero_()  # a CPU multiplies the padding by 0 in bf16, so it must not be NaN
        self.rows, self.buffer = rows, buffer[:, :vocabulary]

    def logits(self, part, at=0):
        """Write the logits of a slice of rows into the buffer, from its row `at` on, and return them: (M, V)."""
        logits = self.buffer[at : at + part.stop - part.start]
        if self.bias is None:
            torch.mm(self.x[part], self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, self.x[part], self.weight.t(), out=logits)
        return logits

    def run(self, step, needs_grad=None, in_forward=False):
        """Call `step(slice of rows, logits, gradients)` for every chunk.

        Args:
            step: leaves the gradient of the logits in their place, where one is needed; where `gradients.scales`, times
                `gradients.factor(...)`.
            needs_grad: whether x, weight and bias need a gradient; None: the step makes none, its gradients are None.
            in_forward: as in `Gradients`.

        Returns:
            the gradients as `Gradients.finished`, or None.
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


def wide_dtype(x):
    return torch.promote_types(x.dtype, torch.float32)


def needed_gradients(*tensors):
    """Tell which tensors need a gradient; `needs_input_grad` knows nothing of no_grad under torch.compile."""
    return tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in tensors)


class Gradients:
    """The gradients of a head's x, weight and bias, from its logits' gradient for one slice of rows at a time.

    Args:
        slices: how many slices there will be.
        in_forward: whether they are made before the incoming gradient is known. Of fp16 they are then fp32 until that
            is multiplied in, and those of logits are stored times a power of two (see `_fp16`).

    Attributes:
        scales: whether gradients of logits must be multiplied by `factor`.
    """

    def __init__(self, head, needs_grad, slices, in_forward=False):
        self.x, self.weight, self.needs_grad = head.x, head.weight, needs_grad
        self.dx, self.dw, self.db = empty_gradients(head.x, head.weight, head.bias, needs_grad, in_forward)
        self.scales = in_forward and head.x.dtype == torch.float16 and any(needs_grad)
        self.with_kernels, self.of_slice = head.plan.with_kernels, None
        if self.dw.dtype != wide_dtype(self.dw) and (head.plan.accumulate_fp32 or slices > ROUNDINGS):
            self.dw = self.dw.new_empty(self.dw.shape, dtype=wide_dtype(self.dw))
        self.db = torch.zeros_like(self.db, dtype=wide_dtype(self.db))
        self.first = True

    def factor(self, *values):
        """Where `scales`, return what the next slice's gradient of logits must be multiplied by, () fp32.

        It only ever falls, so that what is added up can follow it: a slice needs no more than the largest gradients of
        all slices leave room for.

        Args:
            values: tensors on the device of `x` of which the largest finite magnitudes add up to the largest that the
                gradient of one of the slice's logits can be.
        """
        factor = power_of_2_below(sum(largest_finite(value) for value in values))
        if self.of_slice is None:
            self.of_slice = factor
            return factor
        before, self.of_slice = self.of_slice, torch.minimum(factor, self.of_slice)
        if any(self.needs_grad[1:]):
            scale_in_place(self.dw, self.db, None, self.of_slice / before, self.with_kernels)
        return self.of_slice

    def add(self, part, dlogits):
        for_x, for_weight, for_bias = self.needs_grad
        if for_x:
            _product(self.dx[part], dlogits, self.weight)
            if self.scales:
                self.dx[part].div_(self.of_slice)
        if for_weight:
            _add_product(self.dw, dlogits.t(), self.x[part], self.first)
        if for_bias:
            self.db += dlogits.sum(0, dtype=self.db.dtype)
        self.first = False

    def finished(self):
        """Return dx, dw and db in the dtypes of their tensors; those that are not needed have no elements."""
        if self.x.shape[0] == 0:
            self.dw.zero_()
        elif self.scales:
            self.dw.div_(self.of_slice)
            self.db.div_(self.of_slice)
        dtype = self.dx.dtype
        return self.dx, self.dw.to(dtype), self.db.to(dtype)


def _product(out, a, b):
    """out = a b, rounded once, to the dtype of `out`, which may be wider than theirs."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif has_wide_products(a.device.type):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def _add_product(total, a, b, first):
    """total = a b (+ total), added up in the dtype of `total`, which may be wider than theirs."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif not has_wide_products(a.device.type) and a.dtype == torch.float16:  # whose products overflow
        torch.mm(a.to(total.dtype), b.to(total.dtype), out=total) if first else total.addmm_(a.float(), b.float())
    elif not has_wide_products(a.device.type):
        total.copy_(torch.mm(a, b)) if first else total.add_(torch.mm(a, b))
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def empty_gradients(x, weight, bias, needs_grad, in_forward=False):
    """Return memory for the gradients; no elements for those that are not needed. `in_forward`: as in `Gradients`."""
    tensors = x, weight, weight if bias is None else bias
    dtype = kept_dtype(x.dtype) if in_forward else x.dtype
    return tuple(t.new_empty(t.shape if needed else 0, dtype=dtype) for t, needed in zip(tensors, needs_grad))
