import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.dispatch import widen
from liger_hw.kernels.mlp.glu import ACTIVATIONS
from liger_hw.kernels.moe.expert_glu import expert_glu_backward_in_place
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import compare


def by_torch(gate, up, d, weights, activation):
    """dgate, dup, the product and dweights, in the operations of a model's backward."""
    inputs = [x.detach().requires_grad_() for x in (gate, up) if x is not None]
    y = ACTIVATIONS[activation](inputs[0])
    y = y if up is None else y * inputs[1]
    gradients = torch.autograd.grad(y, inputs, (weights[:, None] * d).to(d.dtype))
    return *gradients, y.detach(), (widen(d) * widen(y)).sum(1).detach().to(weights.dtype)


# the interpreter truncates to bf16, which adds up
DTYPES = [torch.float32, torch.float16] if interpreting() else [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "not gated"])
def test_parity(dtype, gated, backend, device):
    torch.manual_seed(0)
    activations = ("silu", "gelu_tanh") if gated else ("relu_squared",)
    for (rows, cols), activation in zip([(5, 123), (3, 1024), (2, 2500), (0, 16)], activations * 4):
        both = randn(rows, 2 * cols, dtype=dtype, grad=False, device=device)
        d = randn(rows, cols, dtype=dtype, grad=False, device=device)
        for wide in (dtype, torch.float32):  # of the weights
            weights = torch.rand(rows, dtype=torch.float64).to(device, wide)
            halves = both.clone()
            gate, up = halves.chunk(2, -1) if gated else (halves[:, :cols].contiguous(), None)
            exact, plain = (
                by_torch(*(None if x is None else x.to(as_wide or x.dtype) for x in (gate, up, d, weights)), activation)
                for as_wide in (torch.float64, None)
            )
            y = d.clone()
            with use_backend(backend):
                dweights = expert_glu_backward_in_place(gate, up, y, weights, activation)
            found = (gate, y, dweights) if up is None else (gate, up, y, dweights)
            compare(exact, plain, found, f"experts' {activation} of {rows}x{cols}, weights of {wide}, on {backend}")
