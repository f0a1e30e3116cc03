"""Engine of the losses of a head, with the logits of one chunk in memory.

    for each chunk of rows:  logits = x W^T + b;  value += loss(logits, rows);  gradients += those of the chunk

The forward computes the gradients and overwrites the logits with their gradient; the backward only scales. For fp16
inputs the forward keeps the gradients in fp32 until the backward brings the loss scale. For x (N, H) and weight (V, H)
that takes 2NH + 2VH bytes more than bf16, and 2 max(NH, VH) more while the backward rounds them.
`logits_loss` takes any torch function of logits. `sequences` has losses of given tokens' log-probabilities, by row or
by group of sequences. A loss that couples the whole batch uses torch over `fused_linear_selective_log_softmax`.

Operations: 2NVH for each of logits, dx and dW. Memory beside the gradients: `chunk_memory`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from liger_hw._torch import is_dtensor, traced, without_saved_tensors_hooks
from liger_hw.checks import check, names_arguments, refuse
from liger_hw.dispatch import widen
from liger_hw.dispatch.function import refuse_lost_backward
from liger_hw.kernels._logits import padded_rows
from liger_hw.kernels.vocabulary._fp16 import largest_finite
from liger_hw.kernels.vocabulary._in_forward import GradientsInForward
from liger_hw.kernels.vocabulary._products import linear, widest_dtype
from liger_hw.kernels.vocabulary.chunked_head import ChunkedHead, MiB, Plan, needed_gradients, prepare_head
from liger_hw.kernels.vocabulary.cross_entropy.formula import check_accum_dtype
from liger_hw.kernels.vocabulary.fused_linear_selective_log_softmax import fused_linear_selective_log_softmax
from liger_hw.losses.arguments import check_numbers

CHUNK_MEMORY = 512 * MiB
SHARDED = (
    "a whole head. Of a head whose vocabulary ranks share there are fused_linear_cross_entropy, "
    "fused_linear_selective_log_softmax, token_loss, sequence_loss, policy_loss, preference_loss, "
    "unpaired_preference_loss and multi_token_loss"
)


class LogitScaling(NamedTuple):
    """How a head scales its logits.

    z = softcap tanh(logit_scale x / softcap), or logit_scale x without a softcap.
    """

    softcap: float | None
    logit_scale: float

    @classmethod
    def of(cls, softcap, logit_scale, prefix=""):
        """Check a caller's numbers; `prefix` of their names, for errors."""
        check_numbers(**{f"{prefix}logit_scale": logit_scale})
        check_numbers("None or a positive number", above=0, **{f"{prefix}softcap": 1 if softcap is None else softcap})
        return cls(softcap, logit_scale)

    @property
    def slope(self):
        """Return the largest slope of z that a gradient may grow by, at least 1."""
        return max(abs(self.logit_scale), 1.0)

    @property
    def buffers(self):
        """Return the memory of the calls below, in multiples of a chunk's 16-bit logits."""
        return 0 if self == UNSCALED else 6  # z, later its gradient, and two steps of the slope, in fp32

    def scaled(self, logits):
        """Compute z in a wide dtype, or return the logits where z is the same."""
        if self == UNSCALED:
            return logits
        z = widen(logits) * self.logit_scale
        return z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)

    def chunk(self, logits):
        """Compute z in rows that begin at 16-byte boundaries, as kernels need."""
        return logits if self == UNSCALED else padded_rows(self.scaled(logits))

    def write_gradient(self, logits, dz, valid):
        """Write the logits' gradient over them, from that of z; 0 where not `valid`."""
        if self != UNSCALED:
            slope = self.logit_scale
            if self.softcap is not None:
                slope = slope * (1 - torch.tanh(widen(logits) * (self.logit_scale / self.softcap)) ** 2)
            logits.copy_((dz * slope).masked_fill_(~valid[:, None], 0))
        elif dz is not logits:
            logits.copy_(dz)


UNSCALED = LogitScaling(None, 1.0)


class Head(NamedTuple):
    """Hold an output layer with its rows, and the options of their logits.

    Attributes:
        x, weight, bias: as `prepare_head` returns them.
        scaling: of the logits.
        chunk_memory, accum_dtype, logits_dtype, invariant: as in `logits_loss`.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scaling: LogitScaling = UNSCALED
    chunk_memory: float = CHUNK_MEMORY
    accum_dtype: torch.dtype | None = None
    logits_dtype: torch.dtype | None = None
    invariant: bool = False

    def plan(self, *tensors):
        """Return the plan for the chunks of `x`, or None to use torch operations.

        None if the caller forces torch operations, `x` is empty, or a compiler, a mode or a subclass of a tensor, of
        `tensors` too, must see them. Raises a ValueError for a DTensor beside a plain `x`.
        """
        check_accum_dtype(self.accum_dtype)
        x, tensors = self.x, (self.weight, self.bias, *tensors)
        if any(map(is_dtensor, tensors)) and not is_dtensor(x):
            refuse("head", "a DTensor beside plain hidden states", SHARDED)
        if traced(x, *tensors) or x.numel() == 0:
            return None
        # of any loss of a head: all have the same backends
        backend = fused_linear_selective_log_softmax.choose(x.device, x.dtype)
        if backend == "reference":
            return None
        products = {"logits_dtype": self.logits_dtype, "invariant": self.invariant}
        return Plan(self.chunk_memory, backend != "cpu", self.accum_dtype is not None, **products)

    def logits(self):
        """Compute all logits by operations of torch."""
        return self.scaling.scaled(linear(*self[:3], self.logits_dtype, self.invariant))


class LossInForward(GradientsInForward):
    """Autograd function that returns the outputs of `compute`, the first with a gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, op, compute, needs_grad, with_kernels, depends):
        with without_saved_tensors_hooks():
            (value, *logged), gradients = compute(needs_grad)
        LossInForward.keep(ctx, gradients, op, (x.dtype, weight.dtype, weight.dtype), with_kernels, weight=weight)
        ctx.mark_non_differentiable(*logged, *([] if any(depends) else [value]))
        return value, *logged


def with_gradients(op, compute, x, weight, bias, plan, depends=(True,)):
    """Return the outputs of `compute`, (value (), *logged); only the value has a gradient.

    Args:
        op: name of the caller's op, for errors.
        compute: (which of x, weight and bias need a gradient) -> ((value, *logged), the gradients of the value), all
            without a graph.
        depends: whether the value of each chunk depends on one of them; a list that `compute` fills.
    """
    refuse_lost_backward()
    needed = needed_gradients(x, weight, bias)
    return LossInForward.apply(x, weight, bias, op, compute, needed, plan.with_kernels, depends)


def sum_over_chunks(op, step, head, plan, buffers, depends=(True,)):
    """Return (value, *logged) of all rows; only the value has a gradient.

    Args:
        op: name of the caller's op, for errors.
        step: (slice of rows, logits (M, V), whether a gradient is needed, `Gradients`) -> (value (), *logged (M,)), all
            without a graph. If a gradient is needed, `step` overwrites the logits with the value's gradient, as
            `ChunkedHead.run` requires.
        head: a `Head` of at least one row, whose `scaling` is left to `step`.
        buffers: memory that `step` takes, logits included, in multiples of a chunk's logits.
        depends: as in `with_gradients`.
    """

    def compute(needs_grad):
        outputs = []
        gradients = ChunkedHead(*head[:3], plan, buffers).run(
            lambda part, logits, gradients: outputs.append(step(part, logits, any(needs_grad), gradients)), needs_grad,
            True,
        )  # fmt: skip
        values, *logged = zip(*outputs)
        return (torch.stack(values).sum(), *(torch.cat(rows) for rows in logged)), gradients

    return with_gradients(op, compute, *head[:3], plan, depends)


def check_result(name, value, shape, meaning):
    """Refuse the result of a caller's function `name` unless it has this shape."""
    fits = torch.is_tensor(value) and value.shape == shape
    check(fits, f"the result of {name}", value, f"{meaning}: a tensor of shape {tuple(shape)}")


def refuse_captured(name, value, leaves):
    """Refuse a caller's function `name` of a further tensor that requires grad."""
    nodes, seen = [value.grad_fn], set()
    captured = [value] if value.requires_grad and value.grad_fn is None else []
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        captured += [node.variable] if hasattr(node, "variable") else []
        nodes += [before for before, _ in node.next_functions]
    for tensor in captured:
        is_argument = any(tensor is leaf for leaf in leaves)
        allowed = "constants alone: detach it, or run under liger_hw.use_backend('reference')"
        check(is_argument, name, f"a function of a further tensor {tuple(tensor.shape)} that requires grad", allowed)


def detached(rows):
    return [row.detach() if torch.is_tensor(row) else row for row in rows]


def slice_rows(rows, part):
    """Return the rows `part` of each tensor; None stays None."""
    return [row if row is None else row[part] for row in rows]


def gradients_of(value, leaves, incoming=None, again=False):
    """Return the gradient of a formula's value by each leaf.

    It is 0 where the value depends on none, as a formula's may be in some of the chunks.
    """
    if not value.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return torch.autograd.grad(value, leaves, incoming, retain_graph=again, materialize_grads=True)


def _scaled_gradient(value, logits, gradients):
    """Return a chunk's fp16 logit gradient, scaled by its own size, by two backwards."""
    (first,) = gradients_of(value, [logits], again=True)
    least = 0.5 if value.dtype == torch.float16 else 2.0**-24  # fp16 holds the factor; the gradient may underflow
    factor = gradients.factor(largest_finite(first).clamp(min=least))
    (scaled,) = gradients_of(value, [logits], factor.to(value.dtype))
    # A function that computes in fp16 can overflow in an intermediate although its gradient would not.
    fits = (scaled.isfinite() | ~first.isfinite()).all()
    return torch.where(fits, scaled, first.float() * factor)


@names_arguments
def logits_loss(
    loss: Callable, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, rows: Sequence = (),
    chunk_memory: float = CHUNK_MEMORY, buffers: float = 4, accum_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None, invariant: bool = False,
):  # fmt: skip
    """Sum `loss(logits, *rows)` over all rows of `x`, in one chunk's memory.

    Args:
        loss: (logits (M, V), the same M rows of each of `rows`) -> the sum of their losses, a scalar. A
            torch function that autograd differentiates; a row's loss must not depend on other rows.
        x: (N, H), any floating dtype. weight: (V, H) and bias: (V,) or None, in the dtype of `x`, or fp32 with 16 bits.
        rows: further arguments of `loss`, constants: tensors of N rows, or None.
        chunk_memory: bytes that a chunk may take.
        buffers: memory that `loss` and its backward take, logits included, in multiples of a chunk's logits. fp16
            logits add four: autograd differentiates `loss` twice, the second time scaled by a factor from the first
            gradient.
        accum_dtype: torch.float32 accumulates the weight's gradient in fp32, for 2VH bytes. None: in the weight's
            dtype, or in fp32 over more than 32 chunks.
        logits_dtype, invariant: of the logits, as in `fused_linear_cross_entropy`.

    Returns:
        the sum, a scalar in the dtype that `loss` returns.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; `loss` returns no scalar, or uses a further tensor that
            requires grad.
        RuntimeError: a second backward.
    """
    x, weight, bias = prepare_head(x, weight, bias, chunk_memory, flat=True, logits_dtype=logits_dtype)
    check(buffers >= 1, "buffers", buffers, "at least 1")
    rows = detached(rows)
    for row in rows:
        check(row is None or row.shape[:1] == x.shape[:1], "rows", row, f"None or tensors of {x.shape[0]} rows")
    head = Head(x, weight, bias, UNSCALED, chunk_memory, accum_dtype, logits_dtype, invariant)
    plan, records, depends = head.plan(), torch.is_grad_enabled(), []

    def value_of(logits, rows):
        value = loss(logits, *rows)
        check_result("loss", value, (), "the sum of the rows' losses")
        return value

    if plan is None:
        return value_of(head.logits(), rows)

    def step(part, logits, differentiate, gradients):
        leaf = logits.detach().requires_grad_(differentiate)
        with torch.set_grad_enabled(records):
            value = value_of(leaf, slice_rows(rows, part))
        if records and not traced(value):
            refuse_captured("loss", value, (leaf,))
        depends.append(value.requires_grad)
        result = value.detach().clone()  # of what may be a view of the logits
        if differentiate:
            scales = gradients.scales
            logits.copy_(_scaled_gradient(value, leaf, gradients) if scales else gradients_of(value, [leaf])[0])
        return (result,)

    if widest_dtype(x, weight, logits_dtype) == torch.float16:
        buffers += 4
    return sum_over_chunks("logits_loss", step, head, plan, buffers, depends)[0]
