"""What the loss tests share: log-probabilities by whole logits, and the comparison with float64."""

import torch


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
    formula.
    """

    def outcome(function, *tensors):
        loss, *beside = function(*tensors)
        loss.backward()
        vector = torch.cat([value.detach().reshape(-1).double() for value in (loss, *beside)])
        return [vector] + [t.grad for t in tensors if torch.is_tensor(t) and t.requires_grad]

    narrow = leaves(*inputs, dtype=dtype)
    exact = outcome(expected, *leaves(*narrow, dtype=torch.float64))
    plain = outcome(expected, *leaves(*narrow))
    for i, (e, p, f) in enumerate(zip(exact, plain, outcome(found, *leaves(*narrow)), strict=True)):
        assert f.shape == p.shape and f.dtype == p.dtype, f"output {i} of {what}"
        eps = max(torch.finfo(torch.promote_types(dtype, torch.float32) if i == 0 else dtype).eps, 1e-13)
        room = 4 * ((p.double() - e).abs().max() + eps * e.abs().max())
        error = (f.double() - e).abs().max()
        assert error <= room, f"output {i} of {what}: error {error:.3g}, allowed {room:.3g}"
