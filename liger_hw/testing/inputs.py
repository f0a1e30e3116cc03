"""Make random inputs for the cases of ops."""

from dataclasses import dataclass

import torch


def randn(*shape, dtype=torch.float32, grad=True, device="cpu"):
    """Draw normal values in fp64 on the CPU: the same for every device and dtype."""
    return _normal(*shape, device=device).to(device, dtype).requires_grad_(grad)


def _normal(*shape, device):
    return torch.randn(shape, dtype=torch.float64, device="meta" if device == "meta" else "cpu")


def put(tensor, *values):
    """Write pairs (index, value) into a tensor, and return it."""
    with torch.no_grad():
        for index, value in values:
            tensor[index] = value
    return tensor


def targets(rows, vocabulary, device="cpu", ignored=-100):
    """Draw labels (rows,); about a quarter are `ignored`, never the first."""
    target = torch.randint(0, vocabulary, (rows,))
    target[1:][torch.rand(max(rows - 1, 0)) < 0.25] = ignored
    return target.to(device)


def log_probs(rows, vocabulary, dtype, device="cpu", grad=True):
    """Draw log-probabilities so far apart that a divergence hardly cancels."""
    x = _normal(rows, vocabulary, device=device).mul_(2).log_softmax(-1)
    return x.to(device, dtype).requires_grad_(grad)


def angles(batch, tokens, rotary_dim, dtype=torch.float32, device="cpu"):
    """Draw tables of cos and sin whose halves differ, so tests notice swapped halves."""
    x = _normal(batch, tokens, rotary_dim, device=device)
    return x.cos().to(device, dtype), x.sin().to(device, dtype)


def group_ends(rows, groups, device="cpu"):
    """Draw the ends of groups of `rows`, int32 (groups,); many groups are empty."""
    cuts = torch.randint(0, rows + 1, (groups - 1,)).sort().values
    cuts = torch.where(torch.rand(groups - 1) < 0.3, torch.cat([cuts.new_zeros(1), cuts])[: groups - 1], cuts)
    return torch.cat([cuts.sort().values, cuts.new_tensor([rows])]).to(device, torch.int32)


def chosen_experts(tokens, experts, k, device="cpu"):
    """Draw k experts for each token, (tokens, k); nobody chooses the last, if possible."""
    return torch.rand(tokens, max(experts - 1, k)).argsort(1)[:, :k].to(device)


def tokens(*shape, vocabulary, dtype=torch.int64, device="cpu"):
    """Draw tokens as frequent as words of a text.

    The k-th of the vocabulary has a frequency in proportion to 1 / k.
    """
    drawn = vocabulary ** torch.rand(shape, dtype=torch.float64)
    return (drawn.long() - 1).to(device, dtype)


def integers(*shape, dtype, device="cpu"):
    """Draw integers from all values of `dtype`."""
    values = torch.iinfo(dtype)
    drawn = torch.randint(values.min, values.max + 1, shape, device="meta" if str(device) == "meta" else "cpu")
    return drawn.to(device, dtype)


def flat(outputs):
    """Concatenate the floating-point outputs of an op to one vector, to differentiate them at once.

    The result of an op of integers is one vector, too.
    """
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = [out.flatten() for out in outputs if out is not None]
    return torch.cat([out for out in outputs if out.is_floating_point()] or outputs)


@dataclass(frozen=True)
class Inputs:
    """Make inputs of one dtype on one device, small or as large as a model's.

    On "meta" they have shapes and take no memory.
    """

    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def randn(self, *shape, dtype=None, grad=True):
        return randn(*shape, dtype=dtype or self.dtype, grad=grad, device=self.device)

    def targets(self, rows, vocabulary, ignored=-100):
        return targets(rows, vocabulary, self.device, ignored)

    def log_probs(self, rows, vocabulary, grad=True):
        return log_probs(rows, vocabulary, self.dtype, self.device, grad)

    def angles(self, batch, tokens, rotary_dim, dtype=None):
        return angles(batch, tokens, rotary_dim, dtype or self.dtype, self.device)

    def group_ends(self, rows, groups):
        return group_ends(rows, groups, self.device)

    def chosen_experts(self, tokens, experts, k):
        return chosen_experts(tokens, experts, k, self.device)

    def tokens(self, *shape, vocabulary, dtype=torch.int64):
        return tokens(*shape, vocabulary=vocabulary, dtype=dtype, device=self.device)

    def integers(self, *shape, dtype):
        return integers(*shape, dtype=dtype, device=self.device)

    def rand(self, *shape, dtype=torch.float32):
        """Draw values from 0 to 1 without a gradient, such as class weights."""
        return torch.rand(shape, dtype=dtype, device=self.device)

    def large(self, *shape, scale=1.0, grad=True):
        """Draw normal values times `scale` in the dtype on the device."""
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(scale).requires_grad_(grad)

    def large_targets(self, rows, vocabulary):
        """Draw labels (rows,) on the device, none of them ignored."""
        return torch.randint(vocabulary, (rows,), device=self.device)
