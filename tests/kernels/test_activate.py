"""Activations without a product, alone and before a projection."""

import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.mlp.glu import ACTIVATIONS, activate
from liger_hw.kernels.mlp.glu_linear import glu_linear
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
activations = pytest.mark.parametrize("activation", ACTIVATIONS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("activate", dtype, device):
        check(activate, inputs, options, backend)


@activations
@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounding_order(activation, dtype, backend, device, monkeypatch):
    if dtype == torch.float16 and device == "cpu":  # where a cube of fp16 alone is rounded once, not twice
        monkeypatch.setattr(torch, "pow", lambda x, _: x * x * x)
    torch.manual_seed(0)
    x = torch.randn(64, 512, dtype=dtype, device=device)
    with use_backend(backend):
        found = activate(x, activation)
    # another exp may differ by an ulp of fp32, which a rounding can amplify to one ulp of the result, rarely
    assert (found != activate.reference(x, activation)).float().mean() < 1e-3


@activations
def test_strided(activation, backend, device):
    torch.manual_seed(0)
    inputs = [torch.randn(2, 6, 70, device=device, dtype=torch.float16, requires_grad=True)]

    def through(op):
        return lambda x: op(x.transpose(0, 1)[..., 5:], activation)

    exact = run(through(activate.reference), [inputs[0].detach().double().requires_grad_()], {})
    plain = run(through(activate.reference), inputs, {})
    with use_backend(backend):
        found = run(through(activate), inputs, {})
    compare(exact, plain, found, f"strided activate on {backend}")


def test_at_zero_and_what_is_no_number(backend, device):
    x = torch.tensor([0.0, -0.0, -2.0, 3.0, float("nan"), float("inf"), -float("inf")], device=device)
    x.requires_grad_()
    with use_backend(backend):
        y = activate(x)
        found = torch.autograd.grad(y.sum(), x)[0]
    expected = activate.reference(x)
    torch.testing.assert_close(y, expected, equal_nan=True)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), x)[0], equal_nan=True)


@activations
def test_in_place(activation, backend, device):
    """The last backward reuses the memory of x; one that retains the graph does not."""
    torch.manual_seed(0)
    leaf = torch.randn(6, 140, device=device, requires_grad=True)
    with use_backend(backend):
        expected = torch.autograd.grad(activate(leaf, activation).sum(), leaf)[0]
        x = 1 * leaf
        y = activate(x, activation, in_place=True)
        retained = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
        assert retained.data_ptr() != x.data_ptr() and torch.equal(retained, expected)
        found = torch.autograd.grad(y.sum(), x)[0]
        assert found.data_ptr() == x.data_ptr() and torch.equal(found, expected)
        with pytest.raises(ValueError, match="x: got a leaf"):
            activate(leaf, activation, in_place=True)


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x = torch.randn(4, 6, device=device)
    with use_backend(which or backend):
        with pytest.raises(ValueError, match="^x: got torch.int64"):
            activate(x.long())
        with pytest.raises(ValueError, match="^unknown activation 'relu'. Activations: .*relu_squared"):
            activate(x, "relu")


@activations
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
def test_a_projection_changes_no_bit(activation, dtype, in_place, backend, device):
    torch.manual_seed(0)
    shapes = (2, 6, 140), (24, 140), (24,)
    inputs = [torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes]

    def one_step(x, weight, bias):
        return glu_linear(1 * x, None, weight, bias, activation, in_place)

    def two_steps(x, weight, bias):
        return torch.nn.functional.linear(activate(1 * x, activation, in_place), weight, bias)

    with use_backend(backend):
        for found, expected in zip(run(one_step, inputs, {}), run(two_steps, inputs, {})):
            assert torch.equal(found, expected)
        assert "GluLinear" in one_step(*inputs).grad_fn.name()
        assert "GluLinear" not in one_step(inputs[0], inputs[1].detach(), inputs[2]).grad_fn.name()


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
def test_compiles_without_a_graph_break(in_place, backend, device):
    x, weight = (torch.randn(8, 8, device=device, requires_grad=True) for _ in range(2))

    def mlp(x, weight):
        return glu_linear(activate(2 * x, "gelu_new", in_place), None, weight, None, "relu_squared", in_place)

    torch._dynamo.reset()
    with use_backend(backend):
        expected = run(mlp, [x, weight], {})
        found = run(torch.compile(mlp, fullgraph=True, backend="aot_eager"), [x, weight], {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
