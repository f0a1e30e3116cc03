"""What the loss tests share: log-probabilities by whole logits, and the comparison with float64."""

import torch

from liger_hw.testing import parity


def token_log_probs(x, weight, tokens, bias=None, temperature=1.0, ignore_index=-100):
    """Return log-probability and entropy of each token, from all logits; 0 if ignored."""
    logits = torch.nn.functional.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, tokens.clamp(min=0)[..., None].long())[..., 0]
    keep = tokens != ignore_index
    return picked * keep, -(log_p.exp() * log_p).sum(-1) * keep


def leaves(*tensors, dtype=None):
    """Copy the tensors, floats in `dtype` and with the same requires_grad."""
    copies = []
    for t in tensors:
        if torch.is_tensor(t):
            wants = t.requires_grad
            t = t.detach().clone()
            t = t.to(dtype).requires_grad_(wants) if t.is_floating_point() and dtype else t.requires_grad_(wants)
        copies.append(t)
    return copies


def hold(expected, found, inputs, dtype, what=""):
    """`found(*inputs)` in `dtype` against `expected(*inputs)` in float64: loss, everything beside it and gradients.

    Both return the loss and any tensors after it, which are compared as one vector. Its error, and each gradient's, may
    be four times that of `expected` in `dtype` plus four roundings: a kernel's room twice, as its output goes through a
    formula. The error of `expected` is the larger of two orders of the hidden dimension where one is not enough: few
    values, such as a loss alone, may be exact by chance. On a GPU `parity.SHARED` is a rounding, too.
    """
    narrow = leaves(*inputs, dtype=dtype)
    exact = _outcome(expected, leaves(*narrow, dtype=torch.float64))
    plain = _outcome(expected, leaves(*narrow))
    backwards = None
    for i, (e, p, f) in enumerate(zip(exact, plain, _outcome(found, leaves(*narrow)), strict=True)):
        assert f.shape == p.shape and f.dtype == p.dtype, f"output {i} of {what}"
        eps = max(torch.finfo(torch.promote_types(dtype, torch.float32) if i == 0 else dtype).eps, 1e-13)
        eps += 0 if f.device.type == "cpu" or dtype == torch.float64 else parity.SHARED
        own, error = (p.double() - e).abs().max(), (f.double() - e).abs().max()
        if error > 4 * (own + eps * e.abs().max()):
            backwards = backwards or _outcome(expected, leaves(*narrow), backwards=True)
            own = torch.maximum(own, (backwards[i].double() - e).abs().max())
        room = 4 * (own + eps * e.abs().max())
        assert error <= room, f"output {i} of {what}: error {error:.3g}, allowed {room:.3g}"


def _outcome(function, tensors, backwards=False):
    """Return the loss with what is beside it, and the gradients; `backwards`: with the hidden dimension reversed."""
    hidden = tensors[0].shape[-1]

    def turned(t):
        reverse = backwards and torch.is_tensor(t) and t.is_floating_point() and t.ndim > 1 and t.shape[-1] == hidden
        return t.flip(-1) if reverse else t

    given = [turned(t.detach()).requires_grad_(t.requires_grad) if torch.is_tensor(t) else t for t in tensors]
    loss, *beside = function(*given)
    loss.backward()
    vector = torch.cat([value.detach().reshape(-1).double() for value in (loss, *beside)])
    return [vector] + [turned(t.grad) for t in given if torch.is_tensor(t) and t.requires_grad]
