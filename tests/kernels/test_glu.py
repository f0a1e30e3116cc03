import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.mlp.glu import geglu, swiglu
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = [(swiglu, {}), (geglu, {"approximate": "tanh"}), (geglu, {"approximate": "none"})]
forms = pytest.mark.parametrize("op, options", OPS, ids=["silu", "gelu_tanh", "gelu_erf"])


def one_half(x):
    """Rows of two strides."""
    return x.chunk(2, -1)[0], 3 * x.chunk(2, -1)[1]


def halves(x):
    """Gate and up as a fused projection yields them."""
    return x.chunk(2, -1)


def transposed(x):
    """Gate and up whose rows are not contiguous."""
    return x.mT.chunk(2, -1)


@pytest.mark.parametrize("op", [swiglu, geglu], ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(op, dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases(op.__name__, dtype, device):
        check(op, inputs, options, backend)


@forms
@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounding_order(op, options, dtype, backend, device):
    torch.manual_seed(0)
    gate, up = (torch.randn(64, 256, dtype=dtype, device=device) for _ in range(2))
    with use_backend(backend):
        found = op(gate, up, **options)
    # another exp may differ by an ulp of fp32, which a rounding can amplify to one ulp of the result, rarely
    assert (found != op.reference(gate, up, **options)).float().mean() < 1e-3


@forms
@pytest.mark.parametrize("split", [halves, transposed, one_half], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(2, 6, 128), (8, 70)], ids=str)
def test_strided(op, options, split, shape, backend, device):
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device, dtype=torch.float16, requires_grad=True)]
    exact = run(lambda x: op.reference(*split(x), **options), [inputs[0].detach().double().requires_grad_()], {})
    plain = run(lambda x: op.reference(*split(x), **options), inputs, {})
    with use_backend(backend):
        found = run(lambda x: op(*split(x), **options), inputs, {})
    compare(exact, plain, found, f"strided {op.__name__} on {backend}")


def test_halves_are_not_copied(backend, device, monkeypatch):
    gate, up = halves(torch.randn(3, 4, 64, device=device))
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    with use_backend(backend):
        swiglu(gate, up)


@forms
@pytest.mark.parametrize("split", [halves, lambda x: (2 * x, 3 * x)], ids=["halves", "apart"])
def test_in_place(op, options, split, backend, device):
    """Gradients reuse the memory of gate and up, unless the backward keeps the graph for another one."""
    torch.manual_seed(0)
    x = torch.randn(6, 140, device=device, requires_grad=True)
    dy = torch.randn_like(split(x)[0])
    with use_backend(backend):
        op(*split(x), **options).backward(dy)
        expected, x.grad = x.grad, None
        gate, up = split(1 * x)
        y = op(gate, up, in_place=True, **options)
        kept = torch.autograd.grad(y, (gate, up), dy, retain_graph=True)
        dgate, dup = torch.autograd.grad(y, (gate, up), dy)
        assert dgate.data_ptr() == gate.data_ptr() and dup.data_ptr() == up.data_ptr()
        assert torch.equal(kept[0], dgate) and torch.equal(kept[1], dup)
        with pytest.raises(RuntimeError, match="second time"):
            y.backward(dy)
        op(*split(1 * x), in_place=True, **options).backward(dy)
    assert torch.equal(x.grad, expected)


def test_in_place_tells_other_owners(backend, device):
    x = torch.randn(4, 16, device=device, requires_grad=True)
    with use_backend(backend):
        gate, up = 2 * x, 3 * x
        other = gate.square()  # saves gate, and goes backward after swiglu has
        y = swiglu(gate, up, in_place=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.backward((y.sum(), other.sum()))


def test_in_place_with_one_gradient_leaves_inputs_alone(backend, device):
    gate, up = (torch.randn(4, 16, device=device) for _ in range(2))
    up.requires_grad_()
    before = gate.clone(), up.detach().clone()
    with use_backend(backend):
        swiglu(gate, up, in_place=True).sum().backward()
        geglu(gate, up.detach(), in_place=True)
    assert torch.equal(gate, before[0]) and torch.equal(up, before[1])


@pytest.mark.parametrize("make, argument, problem", [
    (lambda x: (x, 2 * x), "gate", "a leaf"),
    (lambda x: (2 * x, x), "up", "a leaf"),
    (lambda x: ((2 * x).mT, 3 * x.mT), "gate", "strides"),
    (lambda x: (2 * x, (3 * x[:1]).expand(4, 4)), "up", "strides"),
    (lambda x: (2 * x,) * 2, "up", "memory shared"),
    (lambda x: ((2 * x)[:, :3], (2 * x).as_strided((4, 3), (4, 1), 1)), None, None),
])  # fmt: skip
def test_in_place_refuses(make, argument, problem, backend, device):
    gate, up = make(torch.randn(4, 4, device=device, requires_grad=True))
    with use_backend(backend):
        if argument is None:
            swiglu(gate, up, in_place=True)
        else:
            with pytest.raises(ValueError, match=f"{argument}: got {problem}"):
                swiglu(gate, up, in_place=True)


def test_in_place_refuses_overlapping_halves(backend, device):
    x = 2 * torch.randn(4, 6, device=device, requires_grad=True)
    with use_backend(backend):
        swiglu(x[:, :3], x[:, 3:], in_place=True)
        with pytest.raises(ValueError, match="up: got memory shared"):
            swiglu(x[:, :3], x[:, 2:5], in_place=True)
        with pytest.raises(ValueError, match="up: got memory shared"):
            swiglu(x[:, 2:5], x[:, :3], in_place=True)


@pytest.mark.parametrize("which", [None, "triton"])
def test_bad_inputs(which, backend, device):
    x = torch.randn(4, 6, device=device)
    with use_backend(backend if which else "reference"):
        with pytest.raises(ValueError, match="gate: got torch.int64"):
            swiglu(x.long(), x)
        with pytest.raises(ValueError, match=r"up: got .*\(4, 3\).* allowed: .*\(4, 6\)"):
            geglu(x, x[:, :3])
        with pytest.raises(ValueError, match="unknown approximate 'erf'. Approximations: .*tanh.*none"):
            geglu(x, x, approximate="erf")


@forms
def test_deterministic(op, options, backend, device):
    x = torch.randn(5, 200, device=device, requires_grad=True)
    with use_backend(backend):
        first, second = (run(lambda x: op(*halves(x), **options), [x], {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiles_without_a_graph_break(in_place, backend, device):
    x = torch.randn(4, 32, device=device, requires_grad=True)

    def mlp(x):
        return geglu(*halves(2 * x), in_place=in_place)

    with use_backend(backend):
        expected = run(mlp, [x], {})
        found = run(torch.compile(mlp, fullgraph=True, backend="aot_eager"), [x], {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
