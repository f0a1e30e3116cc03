r"""Cross entropy of a linear layer's output whose logits never exist all at once.

    logits = x W^T + b           a chunk of rows at a time, in one buffer that every chunk uses
    loss   = cross_entropy(logits, target)
    dx     = dlogits W,   dW = dlogits^T x,   db = sum over rows of dlogits

For "sum" and "mean" the gradients are made in the forward, where dlogits takes the place of the chunk's logits; the
backward multiplies them by the incoming gradient unless that is 1. For "none" the backward makes the logits again.

Letters: N rows of H features, V columns. Operations: 2NVH for each of logits, dx and dW; a frozen input costs nothing.
Memory beside the gradients: one chunk of logits. Traffic of a chunk of M rows: 2MV written and read for the logits, as
much for their gradient, and dW read and written: few large chunks are fast, and `chunk_memory` says how large.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import Cost, Function, check, op, raw
from liger_hw.kernels.cross_entropy import kernels, plain
from liger_hw.kernels.cross_entropy.formula import (
    Formula,
    Terms,
    check_kernel_dtype,
    outcome,
    row_losses,
    terms,
    validate,
)
from liger_hw.launch import launch
from liger_hw.tuning import Config, tuned

MiB = 1024 * 1024


def _prepare(x, weight, target, bias, ce_weight, reduction, num_items, accum_dtype, chunk_memory):
    """Refuse what does not fit; under autocast, the linear layer's tensors as `F.linear` would see them."""
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype)
    check(x.ndim == 2 and x.is_floating_point(), "x", x, "floats (N, H)")
    fits = weight.ndim == 2 and weight.shape[0] > 0 and weight.shape[1] == x.shape[1]
    fits = fits and weight.dtype == x.dtype and weight.device == x.device
    check(fits, "weight", weight, f"{x.dtype} of shape (V, {x.shape[1]}) on {x.device}, as x (or torch.autocast)")
    if bias is not None:
        fits = bias.shape == weight.shape[:1] and bias.dtype == x.dtype and bias.device == x.device
        check(fits, "bias", bias, f"{x.dtype} of shape ({weight.shape[0]},) on {x.device}")
    validate("x", x.shape[0], weight.shape[0], x, target, ce_weight, reduction, num_items)
    check(accum_dtype in (None, torch.float32), "accum_dtype", accum_dtype, "None or torch.float32")
    check(chunk_memory > 0, "chunk_memory", chunk_memory, "a positive number of bytes")
    return x, weight, bias


@op
def fused_linear_cross_entropy(
    x, weight, target, bias=None, ce_weight=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0,
    softcap=None, logit_scale=1.0, reduction="mean", num_items=None, accum_dtype=None, use_token_scaling=False,
    chunk_memory=512 * MiB, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
):  # fmt: skip
    """`cross_entropy(F.linear(x, weight, bias), target)`, in memory for a chunk of the logits.

    Args:
        x: (N, H), any floating dtype; other dtypes than fp32, fp16 and bf16 only without a GPU.
        weight: (V, H) in the dtype of `x`; under torch.autocast both are cast first, as F.linear does.
        target: (N,) int64 or int32, as in `cross_entropy`; so a value outside [0, V) makes the loss NaN, and with it
            the gradients of everything that its row touches.
        bias: (V,) in the dtype of `x`, or None.
        ce_weight: (V,) class weights, or None.
        ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, reduction, num_items: as in
            `cross_entropy`.
        accum_dtype: torch.float32 adds up the chunks' weight gradients in fp32, which takes a copy of the weight in
            fp32. None does so where there are more than 8 chunks; up to there, rounding the sum to the weight's dtype
            after each stays under the rounding of a single large product.
        use_token_scaling: loss, z-loss and gradient of a row are multiplied by the probability of its target, as a
            constant (arXiv:2508.05629).
        chunk_memory: bytes that a chunk of logits may take. Larger is faster until the chunk holds a few thousand rows.
        return_z_loss, return_token_accuracy, return_predicted_tokens: also return these.

    Returns:
        The loss in fp32 (fp64 for fp64 inputs), () or for "none" (N,); a `CrossEntropyOutput` if any `return_*` is set.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or an option is out of its range.
        RuntimeError: a second backward through a "sum" or "mean", whose gradients the first has handed out.
    """
    x, weight, bias = _prepare(x, weight, target, bias, ce_weight, reduction, num_items, accum_dtype, chunk_memory)
    formula = Formula.of(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, use_token_scaling)
    logits = torch.nn.functional.linear(x, weight, bias)
    rows = row_losses(logits, terms(target, ce_weight, reduction, num_items, ignore_index), formula)
    wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
    return outcome(*rows, target, reduction, ignore_index, wanted)


@fused_linear_cross_entropy.cost
def _(x, weight, *options, **named):
    inputs, product = x.nbytes + weight.nbytes, 2 * x.numel() * weight.shape[0]
    return Cost(inputs, 2 * inputs, product, 2 * product)


def chunk_rows(rows, row_bytes, chunk_memory, device):
    """Rows of a chunk: as many as fit the memory, in equal chunks; of several, in whole tiles of the matrix products.

    Args:
        row_bytes: bytes of a row of logits.
        chunk_memory: bytes a chunk may take.
        device: a Device. A CPU gains nothing from chunks of more than an eighth of the rows.
    """
    tile, useful = (16, max(rows // 8, 16)) if device.vendor == "cpu" else (256, rows)
    most = max(min(chunk_memory // row_bytes, useful), 1)
    if most >= rows:
        return max(rows, 1)
    most = most // tile * tile or most
    even = -(-rows // -(-rows // most))
    return min(-(-even // tile) * tile, most)


@tuned
def scale_gradients_config(device):
    return Config({"BLOCK": 4096}, num_warps=8, programs=4)


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


def _chunks(x, weight, bias, size, stride):
    """Yield a slice of at most `size` rows and their logits, for all slices, the logits in one buffer."""
    rows, vocabulary = x.shape[0], weight.shape[0]
    buffer = x.new_empty(size, stride)
    buffer[:, vocabulary:].zero_()  # a CPU's bf16 product multiplies what is beyond the vocabulary by 0: no NaN may be
    for start in range(0, rows, size):
        part = slice(start, min(start + size, rows))
        logits = buffer[: part.stop - start, :vocabulary]
        if bias is None:
            torch.mm(x[part], weight.t(), out=logits)
        else:
            torch.addmm(bias, x[part], weight.t(), out=logits)
        yield part, logits


def _wide(x):
    return torch.promote_types(x.dtype, torch.float32)


ROUNDINGS = 8  # of a 16-bit sum, after each chunk: their errors, being random, add up to less than one of the result


class _Gradients:
    """The wanted gradients of a linear layer's tensors, from its output's gradient for one chunk of rows at a time."""

    def __init__(self, x, weight, bias, wanted, chunks, accumulate_fp32):
        self.x, self.weight, self.wanted = x, weight, wanted
        self.dx, self.dw, self.db = _empty_gradients(x, weight, bias, wanted)
        if self.dw.dtype != _wide(self.dw) and (accumulate_fp32 or chunks > ROUNDINGS):
            self.dw = self.dw.new_empty(self.dw.shape, dtype=_wide(self.dw))
        self.db = torch.zeros_like(self.db, dtype=_wide(self.db))

    def add(self, part, dlogits):
        x_wanted, w_wanted, b_wanted = self.wanted
        if x_wanted:
            torch.mm(dlogits, self.weight, out=self.dx[part])
        if w_wanted:
            _add_product(self.dw, dlogits.t(), self.x[part], part.start == 0)
        if b_wanted:
            self.db += dlogits.sum(0, dtype=self.db.dtype)

    def finished(self):
        if self.x.shape[0] == 0:
            self.dw.zero_()
        return self.dx, self.dw.to(self.weight.dtype), self.db.to(self.weight.dtype)


def _add_product(total, a, b, first):
    """total = a b (+ total), added up in the dtype of `total`, which may be wider than theirs."""
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif not _has_wide_products(a.device.type):
        total.copy_(torch.mm(a, b)) if first else total.add_(torch.mm(a, b))
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@functools.cache
def _has_wide_products(device_type):
    """Whether torch multiplies 16-bit matrices into fp32 on such devices."""
    if device_type == "meta":
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype_out", device_type.upper())


def _empty_gradients(x, weight, bias, wanted):
    tensors = x, weight, weight if bias is None else bias
    return tuple(tensor.new_empty(tensor.shape if want else 0) for tensor, want in zip(tensors, wanted))


def _empty_outputs(x, predicted_wanted):
    """Loss, z-loss, partition (see `forward_rows`) and predicted token of each row."""
    loss = x.new_empty(x.shape[0], dtype=_wide(x))
    predicted = loss.new_empty(loss.shape if predicted_wanted else 0, dtype=torch.int64)
    return loss, torch.empty_like(loss), loss.new_empty(x.shape[0], 2), predicted


class _Plan(NamedTuple):
    """How to go through the rows, in the order in which raw functions take it."""

    chunk_memory: int
    accumulate_fp32: bool
    with_kernels: bool


def _run(x, weight, bias, terms, plan, wanted, rows_pass):
    """The gradients, after `rows_pass(module of row functions, slice, logits, terms)` made them of each chunk's logits.

    A row of logits begins at a 16-byte boundary whatever the vocabulary.
    """
    vector = 16 // x.element_size()
    stride = -(-weight.shape[0] // vector) * vector
    size = chunk_rows(x.shape[0], stride * x.element_size(), plan.chunk_memory, device_of(x))
    gradients = _Gradients(x, weight, bias, wanted, -(-x.shape[0] // size), plan.accumulate_fp32)
    for part, logits in _chunks(x, weight, bias, size, stride):
        rows_pass(kernels if plan.with_kernels else plain, part, logits, terms._replace(target=terms.target[part]))
        if any(wanted):
            gradients.add(part, logits)
    return gradients.finished()


def _fake_forward(x, weight, bias, terms, *options):
    predicted_wanted, wanted = options[-2:]
    return *_empty_outputs(x, predicted_wanted), *_empty_gradients(x, weight, bias, wanted)


@raw(_fake_forward)
def _fused_linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, terms: Sequence[torch.Tensor | None],
    ignore_index: int, label_smoothing: float, lse_square_scale: float, softcap: float | None, logit_scale: float,
    token_scaling: bool, chunk_memory: int, accumulate_fp32: bool, with_kernels: bool, predicted_wanted: bool,
    wanted: Sequence[bool],
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:  # fmt: skip
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, token_scaling)
    loss, z_loss, partition, predicted = _empty_outputs(x, predicted_wanted)

    def forward(rows, part, logits, terms):
        found = predicted[part] if predicted_wanted else None
        rows.forward_rows(logits, terms, formula, loss[part], z_loss[part], partition[part], found, any(wanted))

    plan = _Plan(chunk_memory, accumulate_fp32, with_kernels)
    return loss, z_loss, partition, predicted, *_run(x, weight, bias, Terms(*terms), plan, wanted, forward)


def _fake_backward(x, weight, bias, terms, partition, dloss, *options):
    return _empty_gradients(x, weight, bias, options[-1])


@raw(_fake_backward)
def _fused_linear_cross_entropy_backward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, terms: Sequence[torch.Tensor | None],
    partition: torch.Tensor, dloss: torch.Tensor, ignore_index: int, label_smoothing: float, lse_square_scale: float,
    softcap: float | None, logit_scale: float, token_scaling: bool, chunk_memory: int, accumulate_fp32: bool,
    with_kernels: bool, wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    formula = Formula(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, token_scaling)

    def backward(rows, part, logits, terms):
        rows.backward_rows(logits, terms, formula, partition[part], dloss[part])

    plan = _Plan(chunk_memory, accumulate_fp32, with_kernels)
    return _run(x, weight, bias, Terms(*terms), plan, wanted, backward)


@raw(mutates=["dx", "dw", "db"])
def _fused_linear_cross_entropy_scale(
    dx: torch.Tensor, dw: torch.Tensor, db: torch.Tensor, dloss: torch.Tensor, with_kernels: bool
) -> None:
    if with_kernels:
        config = scale_gradients_config(device_of(dx))
        grid = config.grid_for(-(-max(dx.numel(), dw.numel(), db.numel()) // config["BLOCK"])), 1, 1
        launch(scale_gradients, grid, config, dloss, dx, dw, db, dx.numel(), dw.numel(), db.numel())
    else:
        for gradient in (dx, dw, db):
            gradient.mul_(dloss)


class FusedLinearCrossEntropyFunction(Function):
    """The sum of the rows' losses; the gradients are made in the forward."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, ce_weight, weight_sum, denominator, count, options):
        formula, plan, predicted_wanted, wanted = options
        terms = target, ce_weight, weight_sum, denominator, count
        loss, z_loss, _, predicted, *gradients = _fused_linear_cross_entropy(
            x, weight, bias, terms, *formula, *plan, predicted_wanted, wanted
        )
        if torch.compiler.is_compiling():
            ctx.save_for_backward(*gradients)
        else:  # nothing but the backward may hold them, or autograd copies what it could hand over
            ctx.gradients = gradients
        ctx.with_kernels, ctx.wanted = plan.with_kernels, wanted
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss.sum(), z_loss, predicted

    @staticmethod
    def backward(ctx, dloss, *_):
        if torch.compiler.is_compiling():
            gradients = [gradient * dloss.to(gradient.dtype) for gradient in ctx.saved_tensors]
        elif ctx.gradients is None:
            raise RuntimeError(
                "fused_linear_cross_entropy makes its gradients in the forward, and a first backward has handed them "
                "out: for a second one call it again, or use reduction='none' and reduce its result"
            )
        else:
            gradients, ctx.gradients = ctx.gradients, None
            _fused_linear_cross_entropy_scale(*gradients, dloss, ctx.with_kernels)
        return *(g if wanted else None for g, wanted in zip(gradients, ctx.wanted)), *[None] * 6


class FusedLinearCrossEntropyRowsFunction(Function):
    """The losses of the rows; the backward makes the logits again, and their gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, target, ce_weight, weight_sum, denominator, count, options):
        formula, plan, predicted_wanted, wanted = options
        terms = target, ce_weight, weight_sum, denominator, count
        loss, z_loss, partition, predicted, *_ = _fused_linear_cross_entropy(
            x, weight, bias, terms, *formula, *plan, predicted_wanted, [False] * 3
        )
        ctx.save_for_backward(x, weight, bias, partition, *terms)
        ctx.options = options
        ctx.mark_non_differentiable(z_loss, predicted)
        return loss, z_loss, predicted

    @staticmethod
    def backward(ctx, dloss, *_):
        x, weight, bias, partition, *terms = ctx.saved_tensors
        formula, plan, _, wanted = ctx.options
        gradients = _fused_linear_cross_entropy_backward(
            x, weight, bias, terms, partition, dloss, *formula, *plan, wanted
        )
        return *(g if w else None for g, w in zip(gradients, wanted)), *[None] * 6


def _chunked(with_kernels):
    """The op, chunk by chunk: with Triton kernels, or in plain torch."""

    def implementation(
        x, weight, target, bias=None, ce_weight=None, ignore_index=-100, label_smoothing=0.0, lse_square_scale=0.0,
        softcap=None, logit_scale=1.0, reduction="mean", num_items=None, accum_dtype=None, use_token_scaling=False,
        chunk_memory=512 * MiB, return_z_loss=False, return_token_accuracy=False, return_predicted_tokens=False,
    ):  # fmt: skip
        x, weight, bias = _prepare(x, weight, target, bias, ce_weight, reduction, num_items, accum_dtype, chunk_memory)
        formula = Formula.of(ignore_index, label_smoothing, lse_square_scale, softcap, logit_scale, use_token_scaling)
        if with_kernels:
            check_kernel_dtype("x", x)
        row_terms = terms(target.contiguous(), ce_weight, reduction, num_items, ignore_index)
        plan = _Plan(int(chunk_memory), accum_dtype is not None, with_kernels)
        # needs_input_grad knows nothing of no_grad, so what is wanted is asked here
        wanted = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, weight, bias))
        predicted_wanted = return_predicted_tokens or return_token_accuracy
        if any(wanted):
            function = FusedLinearCrossEntropyRowsFunction if reduction == "none" else FusedLinearCrossEntropyFunction
            options = formula, plan, predicted_wanted, wanted
            loss, z_loss, predicted = function.apply(x, weight, bias, *row_terms, options)
        else:
            loss, z_loss, _, predicted, *_ = _fused_linear_cross_entropy(
                x, weight, bias, row_terms, *formula, *plan, predicted_wanted, wanted
            )
        wanted = return_z_loss, return_token_accuracy, return_predicted_tokens
        return outcome(loss, z_loss, predicted, target, reduction, ignore_index, wanted)

    return implementation


fused_linear_cross_entropy.register("triton")(_chunked(with_kernels=True))
fused_linear_cross_entropy.register("cpu")(_chunked(with_kernels=False))
