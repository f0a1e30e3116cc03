r"""Compute the coefficients of hyper-connections from their streams (arXiv:2512.24880).

    mix    = (x phi) rstd,  rstd = 1 / sqrt(mean(x^2) + eps)        x: all streams of a token as one row
    z      = alpha mix + b                                          of 2S + S S values, three parts with an alpha each
    h_pre  = sigmoid(z_pre) + pre_eps
    h_post = post_mult sigmoid(z_post)
    h_res  = N_2T-2 ... N_1 N_0 (softmax of each row of z_res + e)  T = tmax; N_k divides columns (even k) or rows (odd)
                                                                    by d_k, their sums + e

    N_k    dM = (dM' - sum of dM' M') / d_k,  M = M' d_k            M' = N_k(M), sums over the same columns or rows
    dmix   = alpha dz,  g = dmix rstd
    dx     = g phi^T - x rstd^2 sum(dmix mix) / (S C)
    dphi   = sum over rows of x^T g,  db = sum over rows of dz,  dalpha = sum over rows of dz mix

Letters: R rows of S streams of C columns, K = S C, N = S S + 2 S. The forward reads x once (RK) in a product with few
columns, whose programs share a row's K columns and sum the squares in the same read. A second kernel adds these fp32
partial sums in a fixed order and computes the coefficients. The backward gets RN sums, repeats that kernel for the
divisors d_k (2 T S values a row, freed at the end), inverts the divisions, and reads x once more and writes dx (2RK):
its last kernel computes dx and partial sums of dphi from the same read. Matrix units multiply 16-bit x and phi without
an error. g is fp32: with 16-bit x and phi, which TF32 holds, two products keep 22 of its bits. Where a tensor is fp32,
or Triton has no TF32, everything but 16-bit x times phi is multiplied in fp32: three products of TF32 missed the parity
rule by a factor of two (H200).
"""

import math

import torch

from liger_hw.backends import device_of
from liger_hw.checks import check, check_kernel_dtype
from liger_hw.dispatch import Cost, empty_rows, op, raw, widen
from liger_hw.kernels._partials import add_partials, partial_sums
from liger_hw.kernels._rows import contiguous, rows_of
from liger_hw.kernels.residual.hyper_connections import check_like, check_streams, wide_product
from liger_hw.kernels.residual.mhc_coefficients import kernels
from liger_hw.launch import launch
from liger_hw.tuning import power_of_2


def _validate(x, phi, b, alpha_pre, alpha_post, alpha_res, tmax):
    check_streams(x)
    streams, cols = x.shape[-2:]
    count = streams * (streams + 2)
    check_like("phi", phi, (streams * cols, count), x)
    check_like("b", b, (count,), x)
    for name, alpha in (("alpha_pre", alpha_pre), ("alpha_post", alpha_post), ("alpha_res", alpha_res)):
        fits = alpha.is_floating_point() and alpha.shape in ((), (1,)) and alpha.device == x.device
        check(fits, name, alpha, f"one floating point value on {x.device}")
    check(tmax >= 1, "tmax", tmax, "at least 1")


@op(validate=_validate)
def mhc_coefficients(
    x: torch.Tensor, phi: torch.Tensor, b: torch.Tensor, alpha_pre: torch.Tensor, alpha_post: torch.Tensor,
    alpha_res: torch.Tensor, tmax: int = 20, rms_eps: float = 1e-6, pre_eps: float = 0.0, sinkhorn_eps: float = 1e-6,
    post_mult: float = 2.0,
):  # fmt: skip
    """Compute the coefficients by which hyper-connections mix S streams of C columns.

    Every parameter is part of every output's graph, so an unused output gives it a gradient of zero, not None.

    Args:
        x: (..., S, C), 1 to 16 streams, any strides and floating dtype; plain torch computes dtypes other than fp32,
            fp16 and bf16.
        phi: (S C, S S + 2 S), any floating dtype. Its columns are those of h_pre, h_post and the rows of h_res.
        b: (S S + 2 S,), any floating dtype.
        alpha_pre, alpha_post, alpha_res: () or (1,), any floating dtype.
        tmax: Sinkhorn iterations, at least 1. The first divides columns alone.
        rms_eps: added to the mean square.
        pre_eps: added to h_pre.
        sinkhorn_eps: added to the softmax and to the sums that divide.
        post_mult: the largest h_post.

    Returns:
        h_pre (..., S), h_post (..., S) and h_res (..., S, S), whose rows and columns add up to 1, in fp32.

    Raises:
        ValueError: `x` has no streams or more than 16, another tensor does not fit it, or `tmax` is less than 1.

    Examples:
        >>> x, phi, b, one = torch.rand(2, 4, 8), torch.rand(32, 24), torch.zeros(24), torch.ones(1)
        >>> h_pre, h_post, h_res = liger_hw.mhc_coefficients(x, phi, b, one, one, one)
    """
    streams = x.shape[-2]
    flat = widen(x.flatten(-2))
    mix = wide_product(flat, phi) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + rms_eps)
    sizes = (streams, streams, streams * streams)
    alphas = torch.cat([widen(a).expand(size) for a, size in zip((alpha_pre, alpha_post, alpha_res), sizes)])
    pre, post, res = (mix * alphas + widen(b)).split(sizes, -1)
    matrix = res.unflatten(-1, (streams, streams)).softmax(-1) + sinkhorn_eps
    matrix = matrix / (matrix.sum(-2, keepdim=True) + sinkhorn_eps)
    for _ in range(tmax - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + sinkhorn_eps)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + sinkhorn_eps)
    return pre.sigmoid() + pre_eps, post.sigmoid() * post_mult, matrix


mhc_coefficients.shards(
    x="... S C", phi="", b="", alpha_pre="", alpha_post="", alpha_res="", returns=("... S", "... S", "... S S")
)


@mhc_coefficients.cost
def _(x, phi, b, alpha_pre, alpha_post, alpha_res, tmax=20, *options, **named):
    streams, cols = x.shape[-2:]
    count = phi.shape[1]
    rows = math.prod(x.shape[:-2])
    parameters = sum(p.nbytes for p in (phi, b, alpha_pre, alpha_post, alpha_res))
    forward = 2 * x.numel() * (count + 1) + 4 * rows * tmax * streams**2
    backward = 2 * x.numel() * (2 * count + 1) + 8 * rows * tmax * streams**2
    small = 4 * rows * count
    return Cost(x.nbytes + parameters + small, 2 * x.nbytes + 2 * parameters + small, forward, backward)


def _precision(device, *dtypes):
    """Return the precision of products: no error for 16-bit tensors, that of fp32 for others."""
    return "tf32" if device.tf32 and torch.float32 not in dtypes else "ieee"


def _sizes(x):
    """Return rows, streams, columns of all streams, coefficients, and values in a row of sums."""
    streams, cols = x.shape[-2:]
    count = streams * (streams + 2)
    return math.prod(x.shape[:-2]), streams, streams * cols, count, -(-(count + 3) // 8) * 8


def _empty_results(x):
    rows, streams, _, _, width = _sizes(x)
    shapes = x.shape[:-1], x.shape[:-1], (*x.shape[:-1], streams), (rows * width,)
    return tuple(x.new_empty(shape, dtype=torch.float32) for shape in shapes)


@raw(_empty_results)
def _mhc_coefficients_forward(
    x: torch.Tensor, phi: torch.Tensor, b: torch.Tensor, alpha_pre: torch.Tensor, alpha_post: torch.Tensor,
    alpha_res: torch.Tensor, tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float,
    *, h_pre, h_post, h_res, sums,
):  # fmt: skip
    """Compute h_pre, h_post, h_res, and for each row x phi and its sum of squares."""
    rows, streams, depth, count, width = _sizes(x)
    device = device_of(x)
    config = kernels.mhc_project_config(depth, streams, x.element_size(), device)
    tiles, steps = -(-rows // config["ROWS"]), -(-depth // config["DEPTH"])
    parts = max(config.grid_for(tiles * steps) // max(tiles, 1), 1)
    partial = sums if parts == 1 else x.new_empty((parts, rows * width), dtype=torch.float32)
    flat, x_stride = rows_of(x.flatten(-2))
    launch(
        kernels.mhc_project, (tiles, parts, 1), config, flat, phi, partial, rows, x_stride, depth, count, width,
        _precision(device, x.dtype, phi.dtype), kernels.phi_columns(streams),
    )  # fmt: skip
    whole = None if parts == 1 else sums
    _launch_coefficients(
        x, partial, b, alpha_pre, alpha_post, alpha_res, whole, h_pre, h_post, h_res, None, parts, tmax, rms_eps,
        pre_eps, sinkhorn_eps, post_mult,
    )  # fmt: skip


def _launch_coefficients(
    x, partial, b, a_pre, a_post, a_res, sums, h_pre, h_post, h_res, divisors, parts, tmax, *options
):
    rows, streams, depth, _, width = _sizes(x)
    config = kernels.mhc_coefficients_forward_config(streams, device_of(x))
    launch(
        kernels.mhc_coefficients_forward, (-(-rows // config["ROWS"]), 1, 1), config, partial, b, a_pre, a_post, a_res,
        sums, h_pre, h_post, h_res, divisors, rows, parts, depth, tmax, *options, streams, width, power_of_2(streams),
    )  # fmt: skip


def _empty_gradients(x, phi, x_grad, phi_grad):
    *_, width = _sizes(x)
    dx, dphi = empty_rows(x) if x_grad else None, empty_rows(phi) if phi_grad else None
    return dx, dphi, x.new_empty(width, dtype=torch.float32)


@raw(_empty_gradients)
def _mhc_coefficients_backward(
    x: torch.Tensor, phi: torch.Tensor, b: torch.Tensor, alpha_pre: torch.Tensor, alpha_post: torch.Tensor,
    alpha_res: torch.Tensor, sums: torch.Tensor, h_res: torch.Tensor, dpre: torch.Tensor, dpost: torch.Tensor,
    dres: torch.Tensor, tmax: int, rms_eps: float, pre_eps: float, sinkhorn_eps: float, post_mult: float, x_grad: bool,
    phi_grad: bool, *, dx, dphi, small,
):  # fmt: skip
    """Compute dx, dphi, and in fp32 db and the gradients of the three alphas."""
    rows, streams, cols, count, width = _sizes(x)
    device, alphas = device_of(x), (alpha_pre, alpha_post, alpha_res)
    divisors = sums.new_empty(2 * tmax - 1, rows, streams)
    _launch_coefficients(
        x, sums, b, *alphas, None, None, None, None, divisors, 1, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult
    )
    config = kernels.mhc_coefficients_backward_config(streams, device)
    programs = config.grid_for(-(-rows // config["ROWS"]))
    g, partial = torch.empty_like(sums), partial_sums(small, programs)
    launch(
        kernels.mhc_coefficients_backward, (programs, 1, 1), config, sums, b, *alphas, h_res, divisors,
        dpre.contiguous(), dpost.contiguous(), dres.contiguous(), g, partial, rows, cols, tmax, rms_eps, post_mult,
        streams, width, power_of_2(streams),
    )  # fmt: skip
    add_partials(partial, small)
    if dx is None and dphi is None:
        return
    config = kernels.mhc_project_backward_config(cols, streams, x.element_size(), device)
    blocks, tiles = -(-cols // config["COLS"]), -(-rows // config["DEPTH"])
    parts = max(config.grid_for(blocks * tiles) // max(blocks, 1), 1)
    partial = partial_sums(dphi, parts)
    flat, x_stride = rows_of(x.flatten(-2))
    launch(
        kernels.mhc_project_backward, (blocks, parts, 1), config, flat, phi, g, dx, partial, rows, x_stride,
        cols, count, width, _precision(device, x.dtype, phi.dtype), kernels.phi_columns(streams),
    )  # fmt: skip
    add_partials(partial, dphi)


@_mhc_coefficients_forward.backward()
def _(
    x, phi, b, alpha_pre, alpha_post, alpha_res, sums, h_res, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult, dh_pre,
    dh_post, dh_res, *, x_grad, phi_grad, b_grad, alpha_pre_grad, alpha_post_grad, alpha_res_grad,
):  # fmt: skip
    parameters = b, alpha_pre, alpha_post, alpha_res
    dx, dphi, small = _mhc_coefficients_backward(
        x, phi, *parameters, sums, h_res, dh_pre, dh_post, dh_res, tmax, rms_eps, pre_eps, sinkhorn_eps, post_mult,
        x_grad, phi_grad,
    )  # fmt: skip
    parts = small[: phi.shape[1] + 3].split([phi.shape[1], 1, 1, 1])
    return dx, dphi, *(part.to(like.dtype).view(like.shape) for part, like in zip(parts, parameters))


@mhc_coefficients.register("triton")
def _(x, phi, b, alpha_pre, alpha_post, alpha_res, *options):
    parameters = phi, contiguous(b), alpha_pre, alpha_post, alpha_res
    for name, tensor in zip(("phi", "b", "alpha_pre", "alpha_post", "alpha_res"), parameters):
        check_kernel_dtype(name, tensor)
    return _mhc_coefficients_forward.apply(x, contiguous(phi), *parameters[1:], *options)
