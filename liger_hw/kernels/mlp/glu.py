r"""Compute gated linear units, an activation of the gate times up, or activations alone.

    y   = f(gate) up                                        f(gate) rounded to gate's dtype, then the product to y's
    dgate = dy up f'(gate)
    dup   = dy f(gate)

    silu         f(x) = x s(x)                              f'(x) = s(x) (1 + x (1 - s(x)))             s: sigmoid
    gelu, tanh   f(x) = x (1 + t) / 2                       f'(x) = (1 + t) / 2 + x (1 - t^2) u'(x) / 2
                 t = tanh(u), u = sqrt(2/pi) (x + 0.044715 x^3)
    gelu, erf    f(x) = x (1 + erf(x / sqrt(2))) / 2        f'(x) = f(x) / x + x exp(-x^2 / 2) / sqrt(2 pi)
    gelu, quick  f(x) = x s(1.702 x)                        f'(x) = s(1.702 x) (1 + 1.702 x (1 - s(1.702 x)))
    relu squared f(x) = max(x, 0)^2                         f'(x) = 2 max(x, 0)

Letters: R rows of C columns. Traffic: forward reads gate and up and writes y (3RC), backward reads gate, up and dy and
writes their gradients (5RC), recomputing f instead of keeping it; 2RC and 3RC without up. Both are bound by memory.
Contiguous tensors are one long row; the halves of a fused projection are rows with a stride.
"""

import functools
import math

import torch
from torch import relu, sigmoid, square, tanh  # now, as a program may replace it later

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.checks import check, check_kernel_dtype
from liger_hw.dispatch import Cost, empty_rows, op, raw
from liger_hw.kernels._math import activated, activated_with_slope
from liger_hw.kernels._rows import rows_or_none
from liger_hw.kernels.mlp._in_place import goes_in_place, overwritten, writes_over
from liger_hw.launch import launch
from liger_hw.spelling import check_known
from liger_hw.tuning import Config, power_of_2, tuned

GELU = {"tanh": "gelu_tanh", "none": "gelu_erf"}  # torch's names of the approximation -> the kernel's activation
ACTIVATIONS = {  # the kernel's activation -> torch's, with torch's roundings
    "silu": torch.nn.functional.silu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,  # on a CPU, 153 values of bf16 give results that depend on the strides
    "gelu_new": lambda x: 0.5 * x * (1.0 + tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu_squared": lambda x: square(relu(x)),
}


def validate(gate, up):
    check(gate.is_floating_point() and gate.ndim > 0, "gate", gate, "floating point rows")
    like = up is None or up.is_floating_point() and up.shape == gate.shape and up.device == gate.device
    check(like, "up", up, gate)


def _validate_geglu(gate, up, approximate):
    validate(gate, up)
    check_known("approximate", approximate, GELU, "Approximations")


def _validate_activation(x, activation):
    check(x.is_floating_point() and x.ndim > 0, "x", x, "floating point rows")
    check_known("activation", activation, ACTIVATIONS)


@op(validate=validate, fusible=True)
def swiglu(gate: torch.Tensor, up: torch.Tensor, in_place: bool = False) -> torch.Tensor:
    """Compute silu(gate) * up (arXiv:2002.05202), as LlamaMLP does.

    Args:
        gate: (..., C), any floating dtype; plain torch computes dtypes other than fp32, fp16 and bf16. Rows may be
            strided (the halves of a fused projection are read in place); other layouts are copied once.
        up: (..., C), like `gate`; another floating dtype promotes the result.
        in_place: the backward writes the gradients over `gate` and `up`. For a module that owns both and shares them
            with nothing else. The backward of any other function that saved one of them then raises a RuntimeError.
            Has no effect in a backward with retain_graph=True, where only one of the two wants a gradient or their
            dtypes differ, in the reference (a CPU), and under torch.compile, which reuses dead memory by itself.

    Returns:
        (..., C), contiguous, in the promoted dtype; silu(gate) is rounded to `gate.dtype` before the product.

    Raises:
        ValueError: `up` does not fit `gate`, or with `in_place` one of them is a leaf that wants a gradient, overlaps
            the other or itself, or has no unit stride.

    Examples:
        >>> liger_hw.swiglu(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[0., 0.]])
    """
    return ACTIVATIONS["silu"](gate) * up


@op(validate=_validate_geglu, fusible=True)
def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "tanh", in_place: bool = False) -> torch.Tensor:
    """Compute gelu(gate) * up (arXiv:2002.05202), as GemmaMLP does.

    Args:
        gate, up, in_place: as in `swiglu`.
        approximate: "tanh" or "none" (the error function), as in torch.nn.functional.gelu.

    Returns:
        (..., C), contiguous, in the promoted dtype; gelu(gate) is rounded to `gate.dtype` before the product.

    Raises:
        ValueError: as in `swiglu`, or `approximate` is unknown.

    Examples:
        >>> liger_hw.geglu(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[0., 0.]])
    """
    return ACTIVATIONS[GELU[approximate]](gate) * up


@op(validate=_validate_activation, fusible=True)
def activate(x: torch.Tensor, activation: str = "relu_squared", in_place: bool = False) -> torch.Tensor:
    """Compute f(x), keeping only x for the backward.

    Args:
        x: (..., C), of a dtype and strides as `gate` in `swiglu`.
        activation: "relu_squared" (arXiv:2109.08668); "gelu_new" and "quick_gelu", which transformers writes as several
            operations that each round; "silu", "gelu_tanh" and "gelu_erf", which are one operation in torch.
        in_place: the backward writes the gradient over `x`; otherwise as in `swiglu`.

    Returns:
        (..., C), contiguous, in `x.dtype`.

    Raises:
        ValueError: `activation` is unknown, or with `in_place` `x` is a leaf that wants a gradient, overlaps itself or
            has no unit stride.

    Examples:
        >>> liger_hw.activate(torch.tensor([-1.0, 3.0]), "relu_squared")
        tensor([0., 9.])
    """
    return ACTIVATIONS[activation](x)


def unit(gate, up, activation, in_place=False):
    """Compute f(gate) * up, or f(gate) without `up`, by one op where possible."""
    if up is not None and activation == "silu":
        return swiglu(gate, up, in_place)
    if up is not None and activation in GELU.values():
        return geglu(gate, up, {form: approximate for approximate, form in GELU.items()}[activation], in_place)
    y = activate(gate, activation, in_place)
    return y if up is None else y * up


swiglu.shards(gate="...", up="...", returns="gate")
geglu.shards(gate="...", up="...", returns="gate")
activate.shards(x="...", returns="x")


@swiglu.cost
def _(gate, up, *options, **named):
    return _cost(gate, up, 5, 10)


@geglu.cost
def _(gate, up, *options, **named):
    return _cost(gate, up, 10, 18)


@activate.cost
def _(x, activation="relu_squared", *options, **named):
    return _cost(x, None, *{"relu_squared": (2, 3), "silu": (4, 8), "quick_gelu": (5, 9)}.get(activation, (9, 16)))


def _cost(gate, up, forward, backward):
    y = gate.numel() * (gate.itemsize if up is None else max(gate.itemsize, up.itemsize))
    inputs = gate.nbytes + (0 if up is None else up.nbytes)
    return Cost(inputs + y, 2 * inputs + y, forward * gate.numel(), backward * gate.numel())


def tile_config(width, itemsize, device, tile, lanes):
    """Return the configuration of a `tile`-byte tile a tensor for `lanes`; short rows share one."""
    elements = tile // itemsize
    cols = min(width, elements)
    return Config({"ROWS": elements // cols, "COLS": cols}, num_warps=max(lanes // device.warp_size, 1))


# An activation alone reads one tensor, a gated unit two. bf16 on an H200: on 64 lanes instead of 128 the forward of one
# tensor is 3 to 5% faster, of two 1 to 2% slower. The backward of one is 6% faster with half of the tile on 32 lanes.
# The backward of two is as fast with half of a tile and takes fewer registers: at rows of any alignment a B200's core
# then keeps all the needed bytes in flight, instead of 85%.
@tuned
def glu_forward_config(width, itemsize, read, device):
    return tile_config(width, itemsize, device, tile=4096, lanes=64 if read == 1 else 128)


@tuned
def glu_backward_config(width, itemsize, read, device):
    return tile_config(width, itemsize, device, tile=2048, lanes=16 * itemsize if read == 1 else 128)


@triton.jit
def program_tile(rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return the rows and first column of this program's tile, and whether it is full."""
    blocks = (cols - 1) // COLS + 1  # the sum in tl.cdiv would exceed 32 bits near 2^31 values
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS
    start = (tl.program_id(0) % blocks).to(tl.int64) * COLS
    return (row + tl.arange(0, ROWS))[:, None], start, (row + ROWS <= rows) & (start + COLS <= cols)


@triton.jit
def _load(U, at, mask):
    """Load the up projection; return 1 without one."""
    if U is not None:
        return tl.load(U + at, mask).to(tl.float32)
    else:
        return 1.0


@triton.jit
def _forward_tile(G, U, Y, row, col, mask, g_stride, u_stride, y_stride, ACTIVATION: tl.constexpr):
    g = tl.load(G + row * g_stride + col, mask).to(tl.float32)
    u = _load(U, row * u_stride + col, mask)
    tl.store(Y + row * y_stride + col, activated(g, G.dtype.element_ty, ACTIVATION) * u, mask)


@triton.jit(do_not_specialize=["rows"])
def glu_forward(
    G, U, Y, rows, cols, g_stride, u_stride, y_stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row, start, whole = program_tile(rows, cols, ROWS, COLS)
    col = (start + tl.arange(0, COLS))[None, :]
    if whole:  # at an odd width a mask would make every access one value wide
        _forward_tile(G, U, Y, row, col, None, g_stride, u_stride, y_stride, ACTIVATION)
    else:
        mask = (row < rows) & (col < cols)
        _forward_tile(G, U, Y, row, col, mask, g_stride, u_stride, y_stride, ACTIVATION)


@triton.jit
def _backward_tile(
    G, U, DY, DG, DU, Y, row, col, mask, g_stride, u_stride, dy_stride, dg_stride, du_stride, y_stride,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    g = tl.load(G + row * g_stride + col, mask).to(tl.float32)
    u = _load(U, row * u_stride + col, mask)
    dy = tl.load(DY + row * dy_stride + col, mask).to(tl.float32)
    f, slope = activated_with_slope(g, ACTIVATION)
    if DG is not None:
        tl.store(DG + row * dg_stride + col, dy * u * slope, mask)
    if DU is not None:
        tl.store(DU + row * du_stride + col, dy * f, mask)
    if Y is not None:
        # bitwise equal to the forward's: glu_linear uses it in its place
        tl.store(Y + row * y_stride + col, activated(g, G.dtype.element_ty, ACTIVATION) * u, mask)


@triton.jit(do_not_specialize=["rows"])
def glu_backward(
    G, U, DY, DG, DU, Y, rows, cols, g_stride, u_stride, dy_stride, dg_stride, du_stride, y_stride,
    ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    # An output may be an input's memory (DG over G, DU over U, Y over DY) where all have one dtype: the same thread
    # then reads and writes a value.
    row, start, whole = program_tile(rows, cols, ROWS, COLS)
    col = (start + tl.arange(0, COLS))[None, :]
    if whole:
        _backward_tile(
            G, U, DY, DG, DU, Y, row, col, None, g_stride, u_stride, dy_stride, dg_stride, du_stride, y_stride,
            ACTIVATION,
        )  # fmt: skip
    else:
        mask = (row < rows) & (col < cols)
        _backward_tile(
            G, U, DY, DG, DU, Y, row, col, mask, g_stride, u_stride, dy_stride, dg_stride, du_stride, y_stride,
            ACTIVATION,
        )  # fmt: skip


def _launch(kernel, find_config, activation, *tensors):
    """Launch `kernel` over tensors of one shape; the first exists, the others may be None."""
    first = tensors[0]
    # A width of 4,096 fills any tile (at most 4,096 bytes a tensor), so all larger widths share a configuration.
    if all(x is None or x.is_contiguous() for x in tensors):
        rows, cols, strides, width = 1, first.numel(), [0] * len(tensors), 4096
    else:
        cols = first.shape[-1]
        rows, width = first.numel() // cols, min(power_of_2(cols), 4096)
        tensors, strides = zip(*map(rows_or_none, tensors))
    config = find_config(width, first.element_size(), 1 if tensors[1] is None else 2, device_of(first))
    tiles = -(-rows // config["ROWS"]) * -(-cols // config["COLS"])
    launch(kernel, (tiles, 1, 1), config, *tensors, rows, cols, *strides, activation)


def launch_backward(gate, up, dy, dgate, dup, y, activation):
    """Write the gradients and the recomputed product, each unless None; `glu_backward` allows overwriting."""
    _launch(glu_backward, glu_backward_config, activation, gate, up, dy, dgate, dup, y)


def _empty_product(gate, up):
    if up is None or up.dtype == gate.dtype:
        return empty_rows(gate)
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@raw(_empty_product)
def glu(gate: torch.Tensor, up: torch.Tensor | None, activation: str, *, y):
    _launch(glu_forward, glu_forward_config, activation, gate, up, y)


@raw()
def _glu_backward(
    gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, activation: str, gate_grad: bool, up_grad: bool,
    *, dgate, dup,
):  # fmt: skip
    launch_backward(gate, up, dy, dgate, dup, None, activation)


@raw(mutates=("gate", "up"))
def _glu_backward_in_place(gate: torch.Tensor, up: torch.Tensor | None, dy: torch.Tensor, activation: str) -> None:
    launch_backward(gate, up, dy, gate, up, None, activation)


@glu.backward()
def _(gate, up, activation, in_place: bool, dy, *, gate_grad, up_grad):
    if writes_over(in_place, gate_grad, up is None or up_grad):
        _glu_backward_in_place(gate, up, dy, activation)
        return overwritten(gate, up)
    return _glu_backward(gate, up, dy, activation, gate_grad, up_grad)


def gated(gate, up, activation, in_place):
    """Compute f(gate) * up, or f(gate) where `up` is None, with the kernels."""
    if up is not None:
        check_kernel_dtype("up", up)
    return glu.apply(gate, up, activation, goes_in_place(gate, up, in_place))


@swiglu.register("triton")
def _(gate, up, in_place):
    return gated(gate, up, "silu", in_place)


@geglu.register("triton")
def _(gate, up, approximate, in_place):
    return gated(gate, up, GELU[approximate], in_place)


@activate.register("triton")
def _(x, activation, in_place):
    return gated(x, None, activation, in_place)
