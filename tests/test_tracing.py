"""Check that a tracer sees one registered op forward and one backward, and no launch."""

import numpy
import pytest
import torch
from torch.autograd import forward_ad

from liger_hw import use_backend
from liger_hw._torch import constant_result
from liger_hw._triton import interpreting
from liger_hw.dispatch import OPS
from liger_hw.kernels.vocabulary.cross_entropy import cross_entropy
from liger_hw.testing.inputs import flat
from liger_hw.testing.parity import check
from liger_lab.cases import CASES, DIFFERENTIABLE, training_cases

pytestmark = pytest.mark.skipif(not interpreting(), reason="traces kernels of CPU tensors: needs TRITON_INTERPRET=1")


def case(op):
    """The op's first sample with distinct tensors, all of them with rows."""
    torch.manual_seed(0)
    return next(iter(training_cases(op, torch.float32)))


def gradients(outputs, inputs):
    leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
    return torch.autograd.grad(outputs, leaves, torch.ones_like(outputs)) if leaves else ()


@pytest.mark.parametrize("kind", [numpy.float64, numpy.float32, float])
def test_numbers_of_numpy_in_compiled_code(kind):
    logits, target = torch.randn(5, 7), torch.arange(5)
    loss = torch.compile(lambda number: cross_entropy(logits, target, label_smoothing=number), backend="eager")
    torch.testing.assert_close(loss(kind(0.25)), cross_entropy(logits, target, label_smoothing=0.25))


@pytest.mark.parametrize("op", sorted(CASES))
def test_compiles_without_a_break(op, backend):
    torch._dynamo.reset()
    inputs, options = case(op)

    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return flat(OPS[op](*inputs, **options))

    if op == "experts":  # in a graph its gradients are those of operations, whose sums have another order
        function = torch.compile(OPS[op], fullgraph=True, backend="aot_eager")
        return check(OPS[op], inputs, options, backend, compiled=function)
    with use_backend(backend):
        eager, compiled = Module()(*inputs), torch.compile(Module(), fullgraph=True, backend="aot_eager")(*inputs)
        assert torch.equal(eager, compiled)
        for a, b in zip(gradients(eager, inputs), gradients(compiled, inputs)):
            assert torch.equal(a, b)


@pytest.mark.parametrize("op", sorted(CASES))
def test_an_exported_program_computes_the_op(op):
    inputs, options = case(op)

    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return flat(OPS[op](*inputs, **options))

    others = tuple(x.detach() * 0.5 if torch.is_tensor(x) and x.is_floating_point() else x for x in inputs)
    with use_backend("triton"), torch.no_grad():
        program = torch.export.export(Module(), inputs)
        for exported in (program, program.run_decompositions()):
            torch.testing.assert_close(exported.module()(*others), Module()(*others))


@pytest.mark.parametrize("op", sorted(CASES))
def test_fake_tensors_have_the_real_shapes(op, backend):
    inputs, options = case(op)
    with use_backend(backend):
        real = flat(OPS[op](*inputs, **options))
        grads = gradients(real, inputs)
        with torch._subclasses.FakeTensorMode() as mode:
            fakes = [mode.from_tensor(x) if torch.is_tensor(x) else x for x in inputs]
            fake = flat(OPS[op](*fakes, **options))
            fake_grads = gradients(fake, fakes)
    for a, b in zip((real, *grads), (fake, *fake_grads)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.stride() == b.stride()


@pytest.mark.parametrize("op", sorted(DIFFERENTIABLE))
def test_second_order_is_refused(op, backend):
    inputs, options = case(op)
    with use_backend(backend):
        out = flat(OPS[op](*inputs, **options))
        leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
        with pytest.raises(RuntimeError, match="second-order"):
            torch.autograd.grad(out.sum(), leaves, create_graph=True)


@pytest.mark.parametrize("op", sorted(DIFFERENTIABLE))
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_tangents_are_refused(op, mode, backend):
    """A tangent that is missing counts as zero."""
    inputs, options = case(op)

    def tangent(position, backend):
        duals = [x.detach() if torch.is_tensor(x) else x for x in inputs]
        with use_backend(backend), forward_ad.dual_level(), mode():
            duals[position] = forward_ad.make_dual(duals[position], torch.ones_like(duals[position]))
            return forward_ad.unpack_dual(flat(OPS[op](*duals, **options))).tangent

    refused = 0
    for position, x in enumerate(inputs):
        if not torch.is_tensor(x) or not x.is_floating_point():
            continue
        expected = tangent(position, "reference")
        try:
            found = tangent(position, backend)
        except RuntimeError as error:
            assert "no forward-mode" in str(error) and "use_backend('reference')" in str(error)
            refused += 1
        else:  # torch's own linear after the kernel; a target, which has no gradient
            assert found is expected is None or torch.allclose(found, expected, atol=1e-5)
    assert refused


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, like a DTensor."""

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"no rule for {function}")


@pytest.mark.parametrize("op", sorted(CASES))
@pytest.mark.parametrize("position", [0, 1])
def test_a_subclass_with_its_own_dispatch_is_refused(op, position, backend):
    inputs, options = case(op)
    inputs = [x.detach() if torch.is_tensor(x) else x for x in inputs]
    if position >= len(inputs) or not torch.is_tensor(inputs[position]):
        pytest.skip("that argument is absent in this sample")
    inputs[position] = inputs[position].as_subclass(Wrapped)
    with use_backend(backend), pytest.raises((NotImplementedError, TypeError)):
        OPS[op](*inputs, **options)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "layer_norm", "cross_entropy"])
def test_negated_views_have_their_sign(op, backend):
    """The imaginary part of a conjugate is such a view, and so is its gradient."""
    inputs, options = case(op)

    def negated(x):
        return torch._neg_view(-x.detach()).requires_grad_(x.requires_grad) if x.is_floating_point() else x

    with use_backend(backend):
        expected = flat(OPS[op](*inputs, **options))
        expected_grads = gradients(expected, inputs)
        views = [negated(x) if torch.is_tensor(x) else x for x in inputs]
        found = flat(OPS[op](*views, **options))
        leaves = [x for x in views if torch.is_tensor(x) and x.requires_grad]
        grads = torch.autograd.grad(found, leaves, torch._neg_view(-torch.ones_like(found)))
    for a, b in zip((found, *grads), (expected, *expected_grads)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", ["rms_norm", "swiglu", "layer_norm", "softmax", "rope"])
def test_zeros_without_memory(op, backend):
    """torch makes such a gradient for the sign of a value."""
    inputs, options = case(op)
    with use_backend(backend):
        outputs = OPS[op](*inputs, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        leaves = [x for x in inputs if torch.is_tensor(x) and x.requires_grad]
        grads = torch.autograd.grad(sum(y.sgn().sum() for y in outputs if y is not None), leaves)
        assert not any(grad.any() for grad in grads)
        zeros = [torch._efficientzerotensor(x.shape, dtype=x.dtype) if torch.is_tensor(x) else x for x in inputs]
        found, expected = OPS[op](*zeros, **options), OPS[op].reference(*zeros, **options)
    torch.testing.assert_close(found, expected)


def test_absent_arguments_that_torch_cannot_copy(backend):
    with use_backend(backend), torch.autograd.graph.allow_mutation_on_saved_tensors():
        x = torch.randn(3, 8, requires_grad=True)
        loss = OPS["jsd"](x.log_softmax(-1), torch.randn(3, 8).log_softmax(-1))
        with pytest.raises(RuntimeError, match="allow_mutation_on_saved_tensors fails for an absent argument"):
            loss.backward()


class Called(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the names of ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("saved, recomputed", [(None, True), ("rms_norm_forward", False)])
def test_selective_checkpointing_sees_the_ops(saved, recomputed, backend):
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    x, weight = torch.randn(6, 64, requires_grad=True), torch.randn(64, requires_grad=True)

    def block(x):
        return OPS["swiglu"](OPS["rms_norm"](x, weight), x)

    def policy(context, function, *args, **kwargs):
        keep = function.__name__ == f"{saved}.default"
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    with use_backend(backend):
        plain = block(x)
        expected = torch.autograd.grad(plain, (x, weight), torch.ones_like(plain))
        out = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        with Called() as called:
            found = torch.autograd.grad(out, (x, weight), torch.ones_like(out))
    assert ("rms_norm_forward.default" in called.names) == recomputed
    assert all(torch.equal(a, b) for a, b in zip((out, *found), (plain, *expected)))


@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm", "rope", "swiglu", "geglu", "activate", "glu_linear"])
def test_small_tensors_are_left_to_the_compiler(op, monkeypatch):
    monkeypatch.setattr("liger_hw.dispatch.ops._choice_while_tracing", constant_result(lambda *_: "triton"))

    def launches():
        torch._dynamo.reset()
        (inputs, options), code = case(op), []

        def backend(graph, _):
            code.extend(module.code for module in graph.modules())
            return graph

        outputs = torch.compile(lambda *x: OPS[op](*x, **options), backend=backend)(*inputs)
        torch.testing.assert_close(flat(outputs), flat(OPS[op].reference(*inputs, **options)))
        return any("liger_hw." in text for text in code)

    assert not launches()
    with use_backend("triton"):
        assert launches()
    monkeypatch.setattr("liger_hw.dispatch.ops.FUSED_VALUES", 1)
    assert launches()


FEW = ["rms_norm", "swiglu", "lora_linear", "cross_entropy", "fused_linear_cross_entropy", "experts", "jsd"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("op", FEW)
def test_an_export_has_the_backward_or_is_refused(op, strict):
    """No exported program has the backward of a kernel, also where its inputs need a gradient later."""
    inputs, options = case(op)
    constants = tuple(x.detach() if torch.is_tensor(x) else x for x in inputs)

    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return flat(OPS[op](*inputs, **options))

    with use_backend("triton"):
        for args in (inputs, constants):
            with pytest.raises(Exception, match=r"keeps no backward of .*use_backend\('reference'\)"):
                torch.export.export(Module(), args, strict=strict)
        with torch.no_grad():
            exported = torch.export.export(Module(), inputs, strict=strict).module()
        for recording in (False, True):
            with torch.set_grad_enabled(recording):
                torch.testing.assert_close(exported(*inputs), Module()(*inputs))
    if op == "experts":  # in fp32, which torch's grouped product traces on no CPU
        return
    exported = torch.export.export(Module(), constants, strict=strict).module()
    torch.testing.assert_close(gradients(exported(*inputs), inputs), gradients(Module()(*inputs), inputs))


@pytest.mark.parametrize("op", FEW)
def test_compiled_transforms_are_refused_as_eager_ones(op):
    torch._dynamo.reset()
    inputs, options = case(op)
    first = next(i for i, x in enumerate(inputs) if torch.is_tensor(x) and x.requires_grad)

    def value(x):
        return flat(OPS[op](*inputs[:first], x, *inputs[first + 1 :], **options)).sum()

    def tangent(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(value(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    for function in (torch.func.grad(value), tangent):
        for program in (function, torch.compile(function, backend="eager")):
            with use_backend("triton"), pytest.raises(RuntimeError, match="use_backend.'reference'."):
                program(inputs[first].detach())


@pytest.mark.parametrize("op", ["swiglu", "fused_add_rms_norm", "fused_linear_cross_entropy"])
def test_compiles_with_one_tensor_for_two_arguments(op):
    """Dynamo then breaks the graph within the autograd function."""
    torch._dynamo.reset()
    x = torch.randn(8, 8, requires_grad=True)
    more = {"fused_add_rms_norm": (torch.ones(8),), "fused_linear_cross_entropy": (torch.arange(8),)}.get(op, ())

    def program(x):
        return flat(OPS[op](x, x, *more)).sum()

    with use_backend("triton"):
        compiled, eager = torch.compile(program, backend="aot_eager")(x), program(x)
        torch.testing.assert_close(compiled, eager)
        torch.testing.assert_close(torch.autograd.grad(compiled, x), torch.autograd.grad(eager, x))


def test_jit_trace_of_kernels_is_refused():
    with use_backend("triton"), pytest.raises(RuntimeError, match="torch.jit.trace.*use_backend"):
        torch.jit.trace(OPS["rms_norm"], (torch.randn(3, 8), torch.ones(8)))


@pytest.mark.parametrize("how", ["data", "declared", "exported", "exported strictly"])
@pytest.mark.filterwarnings("ignore")
def test_sizes_that_take_no_guard_are_left_to_the_compiler(how, monkeypatch):
    monkeypatch.setattr("liger_hw.dispatch.ops.FUSED_VALUES", 64)
    torch._dynamo.reset()

    class Norm(torch.nn.Module):
        def forward(self, x, rows):
            return OPS["rms_norm"](x[rows] if how == "data" else x, torch.ones(16))

    x = torch.randn(10, 16)
    if how == "declared":
        torch._dynamo.mark_dynamic(x, 0, min=2, max=100)
    norm, inputs, lengths = Norm(), (x, x[:, 0] > 0), (10,)
    if how.startswith("exported"):
        sizes = {0: torch.export.Dim.DYNAMIC}
        norm = torch.export.export(norm, inputs, dynamic_shapes=(sizes, sizes), strict=how == "exported strictly")
        norm, lengths = norm.module(), (10, 2, 90)
    else:
        norm = torch.compile(norm, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for length in lengths:
            inputs = inputs if length == 10 else (torch.randn(length, 16), torch.ones(length) > 0)
            torch.testing.assert_close(norm(*inputs), Norm()(*inputs))
