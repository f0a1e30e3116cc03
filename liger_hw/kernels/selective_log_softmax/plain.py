"""The kernels' two passes in plain torch, for devices that run no Triton: without autograd, the second over the logits.

Both take and give what their namesakes do, in fp32 or, for fp64 logits, in fp64.
"""

import torch

from liger_hw.dispatch import widen

NO_POWER = -1000.0  # an exponent whose power is 0 in fp64 too, but not its product with 0, as that of -inf is


def forward_rows(logits, tokens, scaling, log_probs, entropy, lse, partition):
    z, y, inside = _scores(logits, tokens, scaling)
    ignored = tokens == scaling.ignore_index
    z_y = z.gather(1, y)[:, 0]
    peak = z.amax(-1)
    exponents = z.sub_(peak[:, None])
    if entropy is not None:
        powers = exponents.exp()
        moment = exponents.clamp_(min=NO_POWER).mul_(powers).sum(-1)
    else:
        powers = exponents.exp_()
    total = powers.sum(-1)
    log_probs.copy_(torch.where(ignored, 0, torch.where(inside, (z_y - peak) - total.log(), float("nan"))))
    lse.copy_(torch.where(ignored, 0, peak + total.log()))
    partition.copy_(torch.stack((peak, total), 1))
    if entropy is not None:
        entropy.copy_(torch.where(ignored, 0, total.log() - moment / total))


def backward_rows(logits, tokens, scaling, entropy, partition, dlog_probs, dentropy=None, dlse=None):
    z, y, inside = _scores(logits, tokens, scaling)
    slope = None
    if scaling.softcap is not None:
        slope = 1 - (z * (scaling.temperature / scaling.softcap)).square_()
    peak, total = partition.unbind(1)
    scale = scaling.logit_scale / scaling.temperature
    of_token = torch.where(inside, dlog_probs * scale, float("nan"))
    of_power = -of_token / total if dlse is None else (dlse * scale - of_token) / total
    exponents = z.sub_(peak[:, None])
    if dentropy is None:
        dx = exponents.exp_().mul_(of_power[:, None])
    else:
        of_entropy = (dentropy * scale / total)[:, None]
        powers = exponents.exp()
        exponents.clamp_(min=NO_POWER)
        dx = exponents.add_((entropy - total.log())[:, None]).mul_(-of_entropy).add_(of_power[:, None]).mul_(powers)
    dx.scatter_add_(1, y, of_token[:, None])
    if slope is not None:
        dx.mul_(slope)
    dx.masked_fill_((tokens == scaling.ignore_index)[:, None], 0)
    logits.copy_(dx)


def _scores(logits, tokens, scaling):
    """z in fp32 or wider; each row's token, 0 where it is outside; where it is not."""
    z = widen(logits)
    z = z.clone() if z is logits else z
    if scaling.softcap is None:
        z.mul_(scaling.logit_scale / scaling.temperature)
    else:
        z.mul_(scaling.logit_scale / scaling.softcap).tanh_().mul_(scaling.softcap / scaling.temperature)
    inside = (tokens >= 0) & (tokens < z.shape[1])
    return z, torch.where(inside, tokens, 0).long()[:, None], inside
