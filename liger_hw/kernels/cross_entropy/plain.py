"""The kernels' two passes in plain torch, for devices that run no Triton: in place and without autograd.

Both take and give what their namesakes in `kernels` do, in fp32 or, for fp64 logits, in fp64; both lose the logits.
"""

import torch

from liger_hw.dispatch import widen


def _scores(logits, formula):
    """z, in fp32 or wider; the logits themselves where nothing changes them."""
    z = widen(logits)
    if formula.logit_scale != 1:
        z = z * formula.logit_scale
    return z if formula.softcap is None else (z / formula.softcap).tanh_().mul_(formula.softcap)


def _slope(z, formula):
    return None if formula.softcap is None else 1 - (z / formula.softcap).square_()


def _at_target(z, terms):
    """Each row's target, 0 where it is outside, its z and whether it is inside."""
    inside = (terms.target >= 0) & (terms.target < z.shape[1])
    y = torch.where(inside, terms.target, 0).long()[:, None]
    return y, z.gather(1, y)[:, 0], inside


def _factors(y, distance, inside, cols, terms, formula):
    """What multiplies -log p_y (`distance`), each -w_j log p_j, their mean by w_j, and lse^2 in a row's loss."""
    _, weight, weight_sum, denominator, count = terms
    e = formula.label_smoothing
    of_target = (1 - e) * (torch.ones_like(distance) if weight is None else widen(weight)[y[:, 0]])
    of_each = torch.full_like(distance, e / cols)
    of_all = torch.full_like(distance, e) if weight is None else of_each * weight_sum
    of_square = torch.full_like(distance, formula.lse_square_scale)
    if denominator is not None:
        of_target, of_each, of_all = of_target / denominator, of_each / denominator, of_all / denominator
        of_square = of_square / (denominator if count is None else count)
    if formula.token_scaling:
        p_y = torch.exp(-distance)
        of_target, of_each, of_all, of_square = of_target * p_y, of_each * p_y, of_all * p_y, of_square * p_y
    return torch.where(inside, of_target, float("nan")), of_each, of_all, of_square


def _write_gradient(logits, powers, total, lse, slope, y, factors, of_loss, terms, formula):
    """Turn `powers`, exp(z - peak), into the gradient and write it over `logits`."""
    of_target, of_each, of_all, of_square = (factor * (of_loss * formula.logit_scale) for factor in factors)
    dx = powers.mul_(((of_target + of_all + 2 * of_square * lse) / total)[:, None])
    if formula.label_smoothing:
        dx.sub_(of_each[:, None] if terms.weight is None else of_each[:, None] * widen(terms.weight))
    dx.scatter_add_(1, y, -of_target[:, None])
    if slope is not None:
        dx.mul_(slope)
    dx.masked_fill_((terms.target == formula.ignore_index)[:, None], 0)
    if dx is not logits:
        logits.copy_(dx)


def forward_rows(logits, terms, formula, loss, z_loss, partition, predicted=None, gradient=False):
    ignored = terms.target == formula.ignore_index
    if predicted is not None:
        predicted.copy_(torch.where(ignored, -1, (widen(logits) * formula.logit_scale).argmax(-1)))
    z = _scores(logits, formula)
    y, z_y, inside = _at_target(z, terms)
    smoothed = None
    if formula.label_smoothing:
        smoothed = z.sum(-1) if terms.weight is None else z.mv(widen(terms.weight))
    slope = _slope(z, formula) if gradient else None
    peak = z.amax(-1)
    powers = z.sub_(peak[:, None]).exp_()
    total = powers.sum(-1)
    lse, distance = peak + total.log(), (peak - z_y) + total.log()
    factors = of_target, of_each, of_all, of_square = _factors(y, distance, inside, z.shape[1], terms, formula)
    row_z_loss = of_square * lse.square()
    row_loss = of_target * distance + row_z_loss
    if smoothed is not None:
        row_loss += of_all * lse - of_each * smoothed
    loss.copy_(torch.where(ignored, 0, row_loss))
    z_loss.copy_(torch.where(ignored, 0, row_z_loss))
    partition.copy_(torch.stack((peak, total), 1))
    if gradient:
        _write_gradient(logits, powers, total, lse, slope, y, factors, 1, terms, formula)


def backward_rows(logits, terms, formula, partition, dloss):
    z = _scores(logits, formula)
    y, z_y, inside = _at_target(z, terms)
    slope = _slope(z, formula)
    peak, total = partition.unbind(1)
    lse, distance = peak + total.log(), (peak - z_y) + total.log()
    factors = _factors(y, distance, inside, z.shape[1], terms, formula)
    powers = z.sub_(peak[:, None]).exp_()
    _write_gradient(logits, powers, total, lse, slope, y, factors, dloss, terms, formula)
