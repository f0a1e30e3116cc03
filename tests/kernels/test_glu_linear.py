import gc

import pytest
import torch
from saved import saved_bytes

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.mlp.glu import geglu, swiglu
from liger_hw.kernels.mlp.glu_linear import glu_linear
from liger_hw.testing.parity import check, run

F = torch.nn.functional
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TWO_STEPS = {
    "silu": swiglu,
    "gelu_tanh": geglu,
    "gelu_erf": lambda gate, up, **options: geglu(gate, up, "none", **options),
}
activations = pytest.mark.parametrize("activation", TWO_STEPS)


def two_steps(gate, up, weight, bias=None, activation="silu", in_place=False):
    return F.linear(TWO_STEPS[activation](gate, up, in_place=in_place), weight, bias)


def tensors(*shape, features=24, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    sizes = shape, shape, (features, shape[-1]), (features,)
    return [torch.randn(size, dtype=dtype, device=device, requires_grad=True) for size in sizes]


def fused(out):
    return "GluLinear" in out.grad_fn.name()


def assert_same_bits(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("glu_linear", dtype, device):
        # the interpreter truncates to bf16, always towards zero, which a sum in fp32 of many such products shows
        if not (interpreting() and dtype == torch.bfloat16 != inputs[2].dtype):
            check(glu_linear, inputs, options, backend)


@activations
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("split", [False, True], ids=["apart", "halves"])
@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
def test_same_bits_as_two_steps(activation, dtype, split, in_place, backend, device):
    gate, up, weight, bias = tensors(2, 6, 140, dtype=dtype, device=device)
    both = torch.cat((gate, up), -1).detach().requires_grad_()

    def through(function, with_bias):
        def call(both, weight, bias):
            gate, up = (1 * both).chunk(2, -1)
            if not split:
                gate, up = 1 * gate, 1 * up
            return function(gate, up, weight, bias if with_bias else None, activation, in_place)

        return call

    with use_backend(backend):
        for with_bias in (False, True):
            inputs = both, weight, bias.detach().requires_grad_(with_bias)
            assert_same_bits(*(run(through(f, with_bias), inputs, {}) for f in (glu_linear, two_steps)))


@activations
@pytest.mark.parametrize("layout", ["transposed", "expanded gradient", "one row", "no rows"])
def test_same_bits_in_any_layout(activation, layout, backend, device):
    shape = {"one row": (1, 33), "no rows": (0, 33)}.get(layout, (5, 33))
    gate, up, weight, bias = tensors(*shape, device=device)

    def through(function):
        def call(gate, up, weight, bias):
            if layout == "transposed":
                gate, up, weight = gate.mT.contiguous().mT, up.mT.contiguous().mT, weight.mT.contiguous().mT
            out = function(gate, up, weight, bias, activation)
            return out.sum() if layout == "expanded gradient" else out

        return call

    with use_backend(backend):
        assert_same_bits(*(run(through(f), (gate, up, weight, bias), {}) for f in (glu_linear, two_steps)))


@pytest.mark.parametrize("wanted", range(16))
@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
def test_only_the_gradients_asked_for(wanted, in_place, backend, device):
    inputs = tensors(4, 40, device=device)
    for i, x in enumerate(inputs):
        x.requires_grad_(bool(wanted >> i & 1))

    def through(function):
        return lambda gate, up, weight, bias: function(1 * gate, 1 * up, weight, bias, in_place=in_place)

    with use_backend(backend):
        found, expected = (run(through(f), inputs, {}) for f in (glu_linear, two_steps))
        assert_same_bits(found, expected)
        kept, kept_by_two_steps = (saved_bytes(lambda f=f: through(f)(*inputs)) for f in (glu_linear, two_steps))
    product = 4 * 40 * 4 if wanted & 3 and wanted & 4 else 0
    assert kept == kept_by_two_steps - product


def test_no_columns(backend, device):
    gate, up, weight, bias = tensors(2, 6, 0, device=device)
    with use_backend(backend):
        glu_linear(gate, up, weight, bias).sum().backward()
    assert gate.grad.shape == gate.shape and weight.grad.shape == weight.shape and (bias.grad == 12).all()


def test_keeps_gate_up_and_weight_alone(backend, device):
    gate, up, weight, bias = tensors(8, 64, features=4, device=device)
    with use_backend(backend):
        kept = saved_bytes(lambda: glu_linear(gate, up, weight, bias))
    assert kept == sum(x.nbytes for x in (gate, up, weight))


def test_in_place(backend, device):
    """With in_place, gradients reuse memory, unless the backward keeps the graph for another one."""
    leaf, _, weight, _ = tensors(6, 140, device=device)
    gate, up = 2 * leaf, 3 * leaf
    with use_backend(backend):
        out = glu_linear(gate, up, weight, in_place=True)
        kept = torch.autograd.grad(out.sum(), (gate, up), retain_graph=True)
        dgate, dup = torch.autograd.grad(out.sum(), (gate, up))
        assert dgate.data_ptr() == gate.data_ptr() and dup.data_ptr() == up.data_ptr()
        assert_same_bits(kept, (dgate, dup))
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()
        out = glu_linear(2 * leaf, 3 * leaf, weight)
        first, second = (torch.autograd.grad(out.sum(), (leaf, weight), retain_graph=True) for _ in range(2))
    assert_same_bits(first, second)


def test_in_place_refuses_a_leaf(backend, device):
    gate, up, weight, _ = tensors(4, 16, device=device)
    with use_backend(backend), pytest.raises(ValueError, match="gate: got a leaf"):
        glu_linear(gate, 2 * up, weight, in_place=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("narrow", [True, False], ids=["narrow gate", "wide gate"])
def test_autocast(dtype, narrow, backend, device):
    """What nn.Linear would make of an fp32 weight, and its gradients in fp32."""
    inputs = tensors(4, 40, device=device)

    def through(function):
        def call(gate, up, weight, bias):
            with torch.autocast(device, dtype):
                gate, up = (x.to(dtype) if narrow else 1 * x for x in (gate, up))
                out = function(gate, up, weight, bias)
            assert function is two_steps or fused(out) == narrow
            return out

        return call

    with use_backend(backend):
        found, expected = (run(through(f), inputs, {}) for f in (glu_linear, two_steps))
    assert found[0].dtype == dtype and found[3].dtype == torch.float32
    assert_same_bits(found, expected)


def test_backward_under_autocast(backend, device):
    gate, up, weight, bias = tensors(4, 40, device=device)
    with use_backend(backend):
        out = glu_linear(gate, up, weight, bias)
        with torch.autocast(device, torch.bfloat16):
            out.sum().backward()
    assert gate.grad.dtype == weight.grad.dtype == torch.float32
    expected = run(two_steps, (gate, up, weight, bias), {})[3]
    assert (weight.grad.isfinite() & expected.isfinite()).all()


@pytest.mark.parametrize("which", ["reference", "triton"])
def test_bad_inputs(which, backend, device):
    gate, up, weight, bias = tensors(4, 16, device=device)
    with use_backend(backend if which == "triton" else which):
        with pytest.raises(ValueError, match=r"up: got .*\(4, 3\)"):
            glu_linear(gate, up[:, :3], weight)
        with pytest.raises(ValueError, match=r"weight: got .*\(24, 15\).*allowed: torch.float32 of shape \(H, 16\)"):
            glu_linear(gate, up, weight[:, :15])
        with pytest.raises(ValueError, match="weight: got torch.float16.*allowed: torch.float32.*autocast"):
            glu_linear(gate, up, weight.half())
        with pytest.raises(ValueError, match=r"bias: got .*\(23,\).*allowed: .*\(24,\)"):
            glu_linear(gate, up, weight, bias[:23])
        with pytest.raises(ValueError, match="unknown activation 'relu'. Activations: .*silu.*gelu_tanh.*gelu_erf"):
            glu_linear(gate, up, weight, activation="relu")


def test_compiles_without_a_graph_break_in_place(backend, device):
    leaf, _, weight, bias = tensors(4, 32, device=device)

    def mlp(x, weight, bias):
        return glu_linear(2 * x, 3 * x, weight, bias, "gelu_tanh", in_place=True)

    torch._dynamo.reset()
    with use_backend(backend):
        expected = run(mlp, (leaf, weight, bias), {})
        found = run(torch.compile(mlp, fullgraph=True, backend="aot_eager"), (leaf, weight, bias), {})
    assert_same_bits(found, expected)


@pytest.mark.skipif(interpreting() or not torch.accelerator.is_available(), reason="measures a GPU's memory")
def test_peak_memory_is_lower(device):
    gate, up, weight, bias = tensors(4096, 8192, features=2048, dtype=torch.bfloat16, device=device)

    def peak(function):
        a, b = 1 * gate, 1 * up
        gc.collect()  # what other tests left
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        out = function(a, b, weight, bias, in_place=True)
        del a, b
        torch.autograd.grad(out.sum(), (gate, up, weight, bias))
        return torch.accelerator.max_memory_allocated() - before

    for function in (glu_linear, two_steps):  # what only a first call allocates
        peak(function)
    assert peak(two_steps) - peak(glu_linear) > 0.99 * gate.nbytes  # an allocator rounds


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_no_product_again_that_nobody_needs(reentrant, backend, device):
    from torch.utils.checkpoint import checkpoint

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        products = units = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.products += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            self.units += function is torch.ops.liger_hw.glu.default
            return function(*args, **kwargs or {})

    gate, up, weight, _ = tensors(5, 48, device=device)
    found = {}
    with use_backend(backend):
        for name, unit in {"fused": glu_linear, "two steps": two_steps}.items():
            out = checkpoint(unit, gate, up, weight, use_reentrant=reentrant)
            with Counting() as counting:
                grads = torch.autograd.grad(out.sum(), (gate, up, weight)) if not reentrant else out.sum().backward()
            found[name] = counting.products, counting.units
            if not reentrant:
                assert_same_bits(grads, torch.autograd.grad(unit(gate, up, weight).sum(), (gate, up, weight)))
    products, units = found["two steps"]
    assert found["fused"] == (products, units if reentrant else 0) and units == 1
