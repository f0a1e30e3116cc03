"""The kernels' two passes in plain torch, for devices that run no Triton: in place and without autograd.

Both take and give what their namesakes in `kernels` do, in fp32 or, for fp64 logits, in fp64.
"""

import torch

from liger_hw.dispatch import widen


def _scores(logits, formula):
    """z, in fp32 or wider; the logits themselves where nothing changes them."""
    z = widen(logits)
    if formula.logit_scale != 1:
        z = z * formula.logit_scale
    return z if formula.softcap is None else (z / formula.softcap).tanh_().mul_(formula.softcap)


def _factors(z, lse, terms, formula):
    """-log p_y of each row, and what multiplies it, each -w_j log p_j, their mean by w_j, and lse^2 in its loss."""
    target, weight, weight_sum, denominator, count = terms
    cols, e = z.shape[1], formula.label_smoothing
    inside = (target >= 0) & (target < cols)
    y = torch.where(inside, target, 0).long()
    distance = lse - z.gather(1, y[:, None])[:, 0]
    of_target = (1 - e) * (torch.ones_like(lse) if weight is None else widen(weight)[y])
    of_each = torch.full_like(lse, e / cols)
    of_all = torch.full_like(lse, e) if weight is None else of_each * weight_sum
    of_square = torch.full_like(lse, formula.lse_square_scale)
    if denominator is not None:
        of_target, of_each, of_all = of_target / denominator, of_each / denominator, of_all / denominator
        of_square = of_square / (denominator if count is None else count)
    if formula.token_scaling:
        p_y = torch.exp(-distance)
        of_target, of_each, of_all, of_square = of_target * p_y, of_each * p_y, of_all * p_y, of_square * p_y
    return y, distance, torch.where(inside, of_target, float("nan")), of_each, of_all, of_square


def _write_gradient(logits, z, lse, y, ignored, factors, of_loss, weight, formula):
    """Turn `logits`, of which `z` may be another name, into their gradient."""
    of_target, of_each, of_all, of_square = (factor * (of_loss * formula.logit_scale) for factor in factors)
    slope = None if formula.softcap is None else 1 - (z / formula.softcap).square_()
    dx = z.sub_(lse[:, None]).exp_().mul_((of_target + of_all + 2 * of_square * lse)[:, None])
    if formula.label_smoothing:
        dx.sub_(of_each[:, None] if weight is None else of_each[:, None] * widen(weight))
    dx.scatter_add_(1, y[:, None], -of_target[:, None])
    if slope is not None:
        dx.mul_(slope)
    dx.masked_fill_(ignored[:, None], 0)
    if dx is not logits:
        logits.copy_(dx)


def forward_rows(logits, terms, formula, loss, z_loss=None, lse=None, predicted=None, gradient=False):
    ignored = terms.target == formula.ignore_index
    if predicted is not None:
        scaled = widen(logits) * formula.logit_scale
        predicted.copy_(torch.where(ignored, -1, scaled.argmax(-1)))
    z = _scores(logits, formula)
    row_lse = torch.logsumexp(z, -1)
    y, distance, *factors = _factors(z, row_lse, terms, formula)
    of_target, of_each, of_all, of_square = factors
    row_z_loss = of_square * row_lse.square()
    row_loss = of_target * distance + row_z_loss
    if formula.label_smoothing:
        sums = z.sum(-1) if terms.weight is None else z.mv(widen(terms.weight))
        row_loss += of_all * row_lse - of_each * sums
    loss.copy_(torch.where(ignored, 0, row_loss))
    if z_loss is not None:
        z_loss.copy_(torch.where(ignored, 0, row_z_loss))
    if lse is not None:
        lse.copy_(row_lse)
    if gradient:
        _write_gradient(logits, z, row_lse, y, ignored, factors, 1, terms.weight, formula)


def backward_rows(logits, terms, formula, lse, dloss):
    z = _scores(logits, formula)
    y, _, *factors = _factors(z, lse, terms, formula)
    ignored = terms.target == formula.ignore_index
    _write_gradient(logits, z, lse, y, ignored, factors, dloss, terms.weight, formula)
