"""Random inputs for the cases of ops."""

from dataclasses import dataclass

import torch


def randn(*shape, dtype=torch.float32, grad=True, device="cpu"):
    """Normal values: made in fp64 on the CPU, so that every device and dtype has the same; "meta" has none."""
    return _normal(*shape, device=device).to(device, dtype).requires_grad_(grad)


def _normal(*shape, device):
    return torch.randn(shape, dtype=torch.float64, device="meta" if device == "meta" else "cpu")


def targets(rows, vocabulary, device="cpu", ignored=-100):
    """Labels (rows,): about a quarter of the rows `ignored`, the first never."""
    target = torch.randint(0, vocabulary, (rows,))
    target[1:][torch.rand(max(rows - 1, 0)) < 0.25] = ignored
    return target.to(device)


def log_probs(rows, vocabulary, dtype, device="cpu", grad=True):
    """Log-probabilities, far enough from each other that a divergence has no cancellation to speak of."""
    x = _normal(rows, vocabulary, device=device).mul_(2).log_softmax(-1)
    return x.to(device, dtype).requires_grad_(grad)


def angles(batch, tokens, rotary_dim, dtype=torch.float32, device="cpu"):
    """Tables of cos and sin, whose halves differ as no model's do, so that no test mistakes one for the other."""
    x = _normal(batch, tokens, rotary_dim, device=device)
    return x.cos().to(device, dtype), x.sin().to(device, dtype)


def flat(outputs):
    """All floating-point values of an op's outputs as one vector, to differentiate them at once."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return torch.cat([out.flatten() for out in outputs if out is not None and out.is_floating_point()])


@dataclass(frozen=True)
class Inputs:
    """Make inputs of one dtype on one device: by the functions above, and as large as a model's tensors.

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

    def rand(self, *shape, dtype=torch.float32):
        """Values from 0 to 1 that want no gradient, such as class weights."""
        return torch.rand(shape, dtype=dtype, device=self.device)

    def large(self, *shape, scale=1.0, grad=True):
        """Normal values times `scale`, made in the dtype on the device."""
        return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(scale).requires_grad_(grad)

    def large_targets(self, rows, vocabulary):
        """Labels (rows,), made on the device, none of them ignored."""
        return torch.randint(vocabulary, (rows,), device=self.device)
