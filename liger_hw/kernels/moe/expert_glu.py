r"""Compute the backward between experts' grouped products, in one pass and in place.

For a row, one pair of a token and an expert, of routing weight w, and d = dout W_down:

    dy    = w d, rounded as the product w * projection was          y = f(gate) up as in glu.py, rounded
    dgate = dy up f'(gate)                                          over gate
    dup   = dy f(gate)                                              over up
    y                                                               over d: the down projection's gradient needs it
    dw    = <d, y>                                                  added up in fp32

Letters: R rows of C columns. Traffic: 6RC, without a gate 4RC. torch's operations around glu's backward, with fp32
copies of d and y for dw, move 22RC and take 7RC of memory.
"""

import torch

from liger_hw._triton import tl, triton
from liger_hw.backends import device_of
from liger_hw.dispatch import raw
from liger_hw.kernels._math import activated, activated_with_slope, in_row, rounded
from liger_hw.kernels._rows import rows_of, rows_or_none
from liger_hw.launch import launch
from liger_hw.tuning import Config, power_of_2, row_warps, tuned


@tuned
def expert_glu_backward_config(width, itemsize, device):
    # twice the values spill 8 bytes a lane on sm_90, with the fp32 tanh
    block = min(width, 2048 // itemsize)
    return Config({"COLS": block}, row_warps(block, device))


@triton.jit
def expert_glu_backward(
    G, U, D, W, DW, g_stride, u_stride, cols: tl.constexpr, ACTIVATION: tl.constexpr, COLS: tl.constexpr
):
    # One thread reads and writes each value.
    row = tl.program_id(0).to(tl.int64)
    w = tl.load(W + row).to(tl.float32)
    dw = tl.zeros([COLS], tl.float32)
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)
        mask = in_row(col, cols, COLS)
        g = tl.load(G + row * g_stride + col, mask, other=0.0).to(tl.float32)
        if U is not None:
            u = tl.load(U + row * u_stride + col, mask, other=0.0).to(tl.float32)
        else:
            u = 1.0
        d = tl.load(D + row * cols + col, mask, other=0.0).to(tl.float32)
        dy = rounded(w * d, D.dtype.element_ty)
        f, slope = activated_with_slope(g, ACTIVATION)
        y = rounded(activated(g, G.dtype.element_ty, ACTIVATION) * u, D.dtype.element_ty)  # bitwise equal to forward's
        tl.store(G + row * g_stride + col, dy * u * slope, mask)
        if U is not None:
            tl.store(U + row * u_stride + col, dy * f, mask)
        tl.store(D + row * cols + col, y, mask)
        dw += d * y
    tl.store(DW + row, tl.sum(dw, 0))


@raw(lambda weights: weights.new_empty(weights.shape), mutates=("gate", "up", "d"))
def expert_glu_backward_in_place(
    gate: torch.Tensor, up: torch.Tensor | None, d: torch.Tensor, weights: torch.Tensor, activation: str,
    *, dweights,
):  # fmt: skip
    """Write gradients over `gate` and `up`, the product over `d`; return the weights' gradient.

    Args:
        gate, up: (R, C) rows of unit stride, which may be halves of one tensor; up None: experts without a gate.
        d: (R, C) contiguous, in the dtype of `gate`.
        weights: (R,) floats.
        activation: one of `glu.ACTIVATIONS`.
    """
    rows, cols = gate.shape
    (gate, g_stride), (up, u_stride) = rows_of(gate), rows_or_none(up)
    config = expert_glu_backward_config(power_of_2(cols), gate.element_size(), device_of(gate))
    launch(
        expert_glu_backward, (rows, 1, 1), config, gate, up, d, weights, dweights, g_stride, u_stride, cols, activation
    )
