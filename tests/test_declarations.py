"""A forward and a backward, wired by the names of their parameters: autograd, fakes and errors."""

import inspect
from typing import NamedTuple

import pytest
import torch

from liger_hw._triton import AVAILABLE
from liger_hw.dispatch import differentiable, empty_rows, raw

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")


@raw(lambda x, needs_grad: (empty_rows(x), empty_rows(x) if needs_grad else None))
def _declared_forward(x: torch.Tensor, weight: torch.Tensor | None, factor: float, needs_grad: bool, *, y, square):
    torch.mul(x if weight is None else x * weight, factor, out=y)
    if square is not None:
        torch.mul(x, x, out=square)


@_declared_forward.backward()
def _declared_backward(x, weight, factor, square, dy, *, dx, dweight):
    assert torch.equal(square, x * x)
    if dx is not None:
        torch.mul(dy if weight is None else dy * weight, factor, out=dx)
    if dweight is not None:
        torch.sum(dy * x * factor, 0, out=dweight)


def leaves(*grads):
    torch.manual_seed(0)
    return torch.randn(4, 3).requires_grad_(grads[0]), torch.randn(3).requires_grad_(grads[1])


@pytest.mark.parametrize("grads", [(True, True), (True, False), (False, True)])
def test_only_needed_gradients_are_computed(grads):
    x, weight = leaves(*grads)
    inputs = [leaf for leaf in (x, weight) if leaf.requires_grad]
    expected = torch.autograd.grad((2 * x * weight).sum(), inputs)
    for function in (_declared_forward.apply, torch.compile(_declared_forward.apply, backend="aot_eager")):
        torch._dynamo.reset()
        gradients = torch.autograd.grad(function(x, weight, 2.0).sum(), inputs)
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected))


def test_without_gradients_nothing_is_kept():
    x, weight = leaves(True, True)
    with torch.no_grad():
        assert _declared_forward.apply(x, weight, 2.0).grad_fn is None
    y, square = _declared_forward(x.detach(), weight.detach(), 2.0, False)
    assert torch.equal(y, 2 * x * weight) and square is None


def test_an_absent_tensor_has_no_gradient():
    x, _ = leaves(True, False)
    _declared_forward.apply(x, None, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_fakes_allocate_and_compute_nothing():
    x, weight = leaves(True, True)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(leaf) for leaf in (x, weight)]
        y = _declared_forward.apply(*fakes, 2.0)
        gradients = torch.autograd.grad(y, fakes, torch.ones_like(y))
    assert [tuple(g.shape) for g in gradients] == [(4, 3), (3,)]


class Pair(NamedTuple):
    scale: torch.Tensor
    shift: torch.Tensor | None


@differentiable("left right")
def _both(x: torch.Tensor, z: torch.Tensor, pair: Pair):
    return x * pair.scale, z * pair.scale


@_both.backward(depends={"left": ["x"], "right": ["z"]})
def _(ctx, pair, once: bool, dleft: torch.Tensor | None, dright: torch.Tensor | None, *, x_grad, z_grad):
    if once:
        ctx.spent = "a second backward through both"
    return None if dleft is None else dleft * pair.scale, None if dright is None else dright * pair.scale


def test_a_result_needs_a_gradient_where_its_inputs_do():
    x, z = torch.ones(3, requires_grad=True), torch.ones(3)
    left, right = _both.apply(x, z, Pair(torch.full((3,), 2.0), None), False)
    assert left.requires_grad and not right.requires_grad
    left.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0)) and z.grad is None


def test_a_result_without_a_gradient_gets_no_zeros():
    x, z = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    left, _ = _both.apply(x, z, Pair(torch.ones(3), None), False)
    left.sum().backward()
    assert x.grad is not None and z.grad is None


def test_a_spent_context_refuses_a_second_backward():
    x, z = torch.ones(3, requires_grad=True), torch.ones(3)
    left, _ = _both.apply(x, z, Pair(torch.ones(3), None), True)
    left.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="^a second backward through both$"):
        left.sum().backward()


@raw(lambda x, logs: (empty_rows(x), empty_rows(x) if logs else None))
def _logged_forward(x: torch.Tensor, weight: torch.Tensor, logs: bool, *, y, log):
    torch.mul(x, weight, out=y)
    if logs:
        log.copy_(y)


@_logged_forward.backward(
    lambda x, weight, x_grad, weight_grad: (x.new_empty(x.shape) if x_grad else None, weight if weight_grad else None),
    without_gradient="log",
)
def _logged_backward(x, weight, dy, *, x_grad, weight_grad):
    return dy * weight if x_grad else None, dy * x if weight_grad else None


@pytest.mark.parametrize("logs", [True, False])
def test_a_registered_backward_returns_gradients(logs):
    x, weight = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    for function in (_logged_forward.apply, torch.compile(_logged_forward.apply, backend="aot_eager", fullgraph=True)):
        torch._dynamo.reset()
        y, log = function(x, weight, logs)
        assert torch.equal(log, y) and not log.requires_grad if logs else log is None
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], weight)
    dx, dweight = _logged_backward.opaque(x, weight, weight, True, False)
    assert torch.equal(dx, weight * weight) and dweight is None


def test_unknown_names_are_refused_at_the_declaration():
    @differentiable()
    def forward(x: torch.Tensor):
        return x

    with pytest.raises(TypeError, match="got dz after the star, allowed: d or _grad with x"):

        @forward.backward()
        def _(x, dy, *, dz):
            """Compute nothing."""

    with pytest.raises(TypeError, match="got no parameter x; add it"):

        @forward.backward()
        def _(dy, *, dx):
            """Compute nothing."""

    with pytest.raises(TypeError, match=r"<locals>._ \(line \d+\): got the name '_', allowed: one for the op"):

        @forward.backward()
        def _(x, dy, *, dx):
            """Compute nothing."""

    with pytest.raises(TypeError, match="got the parameter 'xx'; did you mean 'x'.* with an annotation a further"):

        @forward.backward()
        def _(xx, dy, *, x_grad):
            """Compute nothing."""


def test_generated_functions_show_their_source():
    assert "node(x, weight, factor)" in inspect.getsource(_declared_forward.apply)
