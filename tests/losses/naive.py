"""What the loss tests share: log-probabilities by whole logits, and the comparison with float64."""

import torch

from liger_hw.parity import compare


def token_log_probs(x, weight, tokens, bias=None, temperature=1.0, ignore_index=-100):
    """(..., H) -> log-probability of each token (...), 0 where ignored, and the entropy; all logits at once."""
    logits = torch.nn.functional.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    log_p = logits.log_softmax(-1)
    picked = log_p.gather(-1, tokens.clamp(min=0)[..., None].long())[..., 0]
    keep = tokens != ignore_index
    return picked * keep, -(log_p.exp() * log_p).sum(-1) * keep


def leaves(*tensors, dtype=None):
    """Fresh copies of the tensors, those of floats in `dtype` and with the original's wish for a gradient."""
    copies = []
    for t in tensors:
        if torch.is_tensor(t):
            wants = t.requires_grad
            t = t.detach().clone()
            t = t.to(dtype).requires_grad_(wants) if t.is_floating_point() and dtype else t.requires_grad_(wants)
        copies.append(t)
    return copies


def hold(expected, found, inputs, dtype, what=""):
    """`found(*inputs)` in `dtype` against `expected(*inputs)` in float64: (loss, logged vector), gradients of the loss.

    Each of the two may return any tensors after the loss; they are compared as one vector.
    """

    def outcome(function, *tensors):
        loss, *logged = function(*tensors)
        loss.backward()
        vector = torch.cat([loss.detach().reshape(1).double(), *(t.detach().reshape(-1).double() for t in logged)])
        return [vector.float() if dtype != torch.float64 else vector] + [
            t.grad for t in tensors if torch.is_tensor(t) and t.requires_grad
        ]

    narrow = leaves(*inputs, dtype=dtype)
    exact = outcome(expected, *leaves(*narrow, dtype=torch.float64))
    plain = outcome(expected, *leaves(*narrow))
    compare(exact, plain, outcome(found, *leaves(*narrow)), what)
