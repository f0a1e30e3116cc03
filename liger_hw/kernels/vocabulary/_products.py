"""Multiply matrices of unlike dtypes as if all had the widest.

torch multiplies 16-bit matrices into fp32 on some devices. No product takes an fp32 gradient of logits and a 16-bit
weight. Where the weight is in bf16, these functions split the gradient into three terms of bf16 whose sum it is, and
add up three products in fp32: forward and backward of 8,192 rows, 4,096 features and 128,256 columns take 174 ms, and
404 with products of fp32 (H200, torch 2.11). Elsewhere they widen the weight by blocks of rows. A result is rounded
once.

`invariant`: a row of the result has the same bits beside any other rows. torch's library may choose another kernel for
another number of rows, so the product comes from the kernel of `grouped_mm`, in tiles that ignore it.
"""

import torch

from liger_hw._torch import has_wide_products
from liger_hw.dispatch import uncast
from liger_hw.kernels.moe.grouped_mm import multiply_by_fixed_tiles

BLOCK_BYTES = 2**25  # of a block's wide copy: 2,048 rows of 4,096 features in fp32
TERM_BYTES = 2**25  # of a block's term of 16 bits: 16,384 columns of 1,024 rows


def widest_dtype(x, weight, logits_dtype=None):
    """Return the widest of the dtypes of x and weight and, unless None, `logits_dtype`."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return dtype if logits_dtype is None else torch.promote_types(dtype, logits_dtype)


def linear(x, weight, bias, logits_dtype=None, invariant=False):
    """Define a head's logits: F.linear of its tensors, widened to the logits' dtype."""
    if invariant:  # row by row, each in memory of its own: bits may follow the alignment
        rows = [linear(row.clone(), weight, bias, logits_dtype) for row in x.split(1)]
        for row in rows:
            if row.requires_grad:
                row.register_hook(torch.clone)
        return torch.cat(rows)
    dtype = widest_dtype(x, weight, logits_dtype)
    if x.dtype == weight.dtype == dtype and logits_dtype is None:
        return torch.nn.functional.linear(x, weight, bias)
    with uncast(x):  # autocast would cast fp32 operands, for which a caller asked
        wide = (t if t is None else t.to(dtype) for t in (x, weight, bias))
        return torch.nn.functional.linear(*wide)


def write_logits(logits, x, weight, bias, invariant=False):
    """Write `linear` of x (M, H) and weight (V, H) to `logits` (M, V)."""
    dtype = logits.dtype
    if invariant:
        operands = x.dtype if x.dtype == weight.dtype else dtype
        x = x.to(operands)
        for rows in _blocks(weight, operands, always=bias is not None or logits.stride(0) != logits.shape[1]):
            columns = weight[rows].to(operands).t()
            _write_invariant(logits[:, rows], x, columns, None if bias is None else bias[rows])
        return
    if x.dtype == weight.dtype == dtype:
        if bias is None:
            torch.mm(x, weight.t(), out=logits)
        else:
            torch.addmm(bias, x, weight.t(), out=logits)
        return
    if x.dtype == weight.dtype and has_wide_products(x.device.type):
        torch.mm(x, weight.t(), out_dtype=dtype, out=logits)
    else:
        x = x.to(dtype)
        for rows in _blocks(weight, dtype):
            torch.mm(x, weight[rows].to(dtype).t(), out=logits[:, rows])
    if bias is not None:
        logits += bias


def write_product(out, a, b, invariant=False):
    """Compute out = a b, rounded once to the dtype of `out`.

    Args:
        a: in the widest dtype of the three, or in 16 bits, as `b`.
    """
    if invariant:
        if a.dtype == b.dtype:
            return _write_invariant(out, a, b)
        total, block = out.new_zeros(out.shape, dtype=a.dtype), out.new_empty(out.shape, dtype=a.dtype)
        for rows in _blocks(b, a.dtype):
            factor = b[rows] if _is_split(a, b) else b[rows].to(a.dtype)
            for term in _bf16_summands(a[:, rows]) if _is_split(a, b) else [a[:, rows]]:
                _write_invariant(block, term, factor)
                total += block
        out.copy_(total)
    elif out.dtype == a.dtype == b.dtype:
        torch.mm(a, b, out=out)
    elif a.dtype.itemsize > 2:
        total = out if out.dtype == a.dtype else out.new_empty(out.shape, dtype=a.dtype)
        if _is_split(a, b):
            for rows in _term_blocks(b, len(a)):
                for place, term in enumerate(_bf16_summands(a[:, rows])):
                    add_product(total, term, b[rows], first=rows.start + place == 0)
        else:
            for rows in _blocks(b, a.dtype):
                torch.addmm(total, a[:, rows], b[rows].to(a.dtype), beta=int(rows.start > 0), out=total)
        if total is not out:
            out.copy_(total)
    elif has_wide_products(a.device.type):
        torch.mm(a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def add_product(total, a, b, first):
    """Add the product a b to `total`, or write it where it is `first`.

    Args:
        a: in the widest dtype of the three, or in 16 bits, as `b`; then `total` may be wider.
    """
    if total.dtype == a.dtype == b.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif _is_split(a, b):
        for rows in _term_blocks(a, a.shape[1]):
            block = total[rows].to(a.dtype)
            for place, term in enumerate(_bf16_summands(a[rows])):
                add_product(block, term, b, first and place == 0)
            if total.dtype != a.dtype:
                total[rows] = block
    elif a.dtype.itemsize > 2:
        b = b.to(a.dtype)
        for rows in _blocks(total, a.dtype):
            block = total[rows].to(a.dtype)
            torch.addmm(block, a[rows], b, beta=int(not first), out=block)
            if total.dtype != a.dtype:
                total[rows] = block
    elif not has_wide_products(a.device.type) and a.dtype == torch.float16:  # an fp16 product may overflow
        torch.mm(a.to(total.dtype), b.to(total.dtype), out=total) if first else total.addmm_(a.float(), b.float())
    elif not has_wide_products(a.device.type):
        total.copy_(torch.mm(a, b)) if first else total.add_(torch.mm(a, b))
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


def _write_invariant(out, a, b, bias=None):
    """Write a b + bias to `out`, of any strides, rounded once."""
    if bias is None and out.is_contiguous():
        return multiply_by_fixed_tiles(a, b, out)
    total = out.new_empty(out.shape, dtype=torch.float32)
    multiply_by_fixed_tiles(a, b, total)
    out.copy_(total if bias is None else total.add_(bias))


def _is_split(a, b):
    """Tell whether the product is computed as three products of bf16."""
    return (a.dtype, b.dtype) == (torch.float32, torch.bfloat16) and has_wide_products(a.device.type)


def _bf16_summands(a):
    """Yield three matrices of bf16 whose sum is `a`."""
    for place in range(3):
        term = a.to(torch.bfloat16)
        yield term
        if place < 2:
            a = torch.where(term.isinf(), 0.0, a - term)  # inf - inf is NaN


def _term_blocks(matrix, rows):
    """Return slices of `matrix` whose products with `rows` rows have terms of TERM_BYTES."""
    return _slices(len(matrix), TERM_BYTES // max(2 * rows, 1))


def _blocks(matrix, dtype, always=False):
    """Return slices of rows whose copies in `dtype` take BLOCK_BYTES; one without a copy.

    `always`: several also without a copy.
    """
    size = len(matrix)
    if matrix.dtype != dtype or always:
        size = BLOCK_BYTES // max(matrix.shape[1] * dtype.itemsize, 1)
    return _slices(len(matrix), size)


def _slices(count, size):
    size = max(size, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
