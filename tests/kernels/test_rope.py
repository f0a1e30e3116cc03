import pytest
import torch
from head_layouts import LAYOUTS, spread

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.attention.rope import rope
from liger_hw.testing.inputs import angles, randn
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("rope", dtype, device):
        check(rope, inputs, options, backend)


FORMS = [{}, {"layout": "interleaved"}, {"layout": "interleaved_to_half", "shared": True}, {"wide": True}]


@pytest.mark.parametrize("rotary_dim", [64, 24])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounding_order(dtype, form, rotary_dim, backend, device):
    """Forward and backward are bit for bit what Hugging Face's expression and its autograd give."""
    torch.manual_seed(0)
    q, k = randn(2, 4, 5, 64, dtype=dtype, device=device), randn(2, 2, 5, 64, dtype=dtype, device=device)
    inputs = (q, k, *angles(2, 5, rotary_dim // 2 if "shared" in form else rotary_dim, dtype, device))
    expected = run(rope.reference, inputs, form)
    with use_backend(backend):
        found = run(rope, inputs, form)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


def test_queries_alone(backend, device):
    q, k = randn(2, 4, 3, 16, device=device), randn(2, 2, 3, 16, device=device)
    tables = angles(1, 3, 16, device=device)
    with use_backend(backend):
        together, (alone, none) = rope(q, k, *tables), rope(q, None, *tables)
    assert none is None and torch.equal(alone, together[0])
    assert torch.equal(*(torch.autograd.grad(out.square().sum(), q)[0] for out in (alone, together[0])))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_strided(layout, unsqueeze_dim, backend, device):
    torch.manual_seed(0)
    inputs = [randn(2, heads, 3, 16, dtype=torch.float16, device=device) for heads in (4, 1)]
    inputs += [spread(table) for table in angles(1, 3, 16, torch.float16, device)]

    def by(op):
        def function(q, k, cos, sin):
            if unsqueeze_dim == 1:
                return op(layout(q), layout(k), cos, sin)
            outs = op(layout(q).transpose(1, 2), layout(k).transpose(1, 2), cos, sin, unsqueeze_dim=2)
            return tuple(out.transpose(1, 2) for out in outs)

        return function

    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    exact, plain = run(by(rope.reference), wide, {}), run(by(rope.reference), inputs, {})
    with use_backend(backend):
        found = run(by(rope), inputs, {})
    compare(exact, plain, found, f"rope of {layout.__name__} on {backend}")


def test_tables_of_conjugated_numbers(backend, device):
    """The imaginary parts' sign is a bit of the tensor, not in its memory."""
    torch.manual_seed(0)
    q = torch.randn(1, 2, 3, 8, device=device)
    turned = torch.polar(torch.ones(1, 3, 4), torch.randn(1, 3, 4)).to(device).conj()
    assert turned.imag.is_neg()
    with use_backend(backend):
        found = rope(q, None, turned.real, turned.imag, layout="interleaved", shared=True)[0]
    expected = torch.view_as_complex(q.unflatten(-1, (-1, 2))) * turned[:, None]
    torch.testing.assert_close(found, torch.view_as_real(expected).flatten(3))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_nothing_is_copied_and_memory_order_is_kept(layout, backend, device, monkeypatch):
    q, k = (layout(torch.randn(2, heads, 3, 8, device=device)) for heads in (4, 2))
    tables = angles(1, 3, 8, device=device)
    leaf = q.detach().requires_grad_()
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    with use_backend(backend):
        outs = rope(leaf, k, *tables)
        (dq,) = torch.autograd.grad(outs[0], leaf, torch.ones(2, 4, 3, 8, device=device))
    with use_backend("reference"):  # whose gradients torch makes
        outs += rope(q, k, *tables)
    for x, out in zip((q, k, q, k, q), (*outs, dq)):
        heads_inside = x.stride(1) < x.stride(2)
        assert out.transpose(1, 2).is_contiguous() if heads_inside else out.is_contiguous()
        assert out.data_ptr() != x.data_ptr()


def test_only_asked_for_gradients(backend, device):
    """An output requires a gradient only if its input does, to spare attention's backward."""
    q, k = randn(1, 2, 3, 8, device=device), randn(1, 2, 3, 8, grad=False, device=device)
    with use_backend(backend):
        q_out, k_out = rope(q, k, *angles(1, 3, 8, device=device))
        assert q_out.requires_grad and not k_out.requires_grad
        q_out, k_out = rope(q, k.requires_grad_(), *angles(1, 3, 8, device=device))
        k_out.sum().backward()
    assert q.grad is None and k.grad is not None


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    q, k = torch.randn(2, 4, 3, 8, device=device), torch.randn(2, 2, 3, 8, device=device)
    cos, sin = angles(1, 3, 8, device=device)
    bad = {
        "unsqueeze_dim": (q, k, cos, sin, 0),
        "q": (q[0], k, cos, sin),
        "k": (q, k[:, :, :2], cos, sin),
        "cos": (q, k, cos[..., :7], sin[..., :7]),
        "sin": (q, k, cos, sin[..., :6]),
    }
    with use_backend(which or backend):
        for argument, inputs in bad.items():
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                rope(*inputs)
        with pytest.raises(ValueError, match="^unknown layout 'quarters'. Layouts: half, interleaved"):
            rope(q, k, cos, sin, 1, "quarters")
        with pytest.raises(ValueError, match="^cos: got .* rotary_dim / 2"):
            rope(q, k, cos, sin, shared=True)
        with pytest.raises(ValueError, match="^cos: got a tensor that requires grad"):
            rope(q, k, cos.clone().requires_grad_(), sin)


def test_deterministic(backend, device):
    inputs = (randn(2, 3, 4, 32, device=device), randn(2, 1, 4, 32, device=device), *angles(1, 4, 32, device=device))
    with use_backend(backend):
        assert all(torch.equal(a, b) for a, b in zip(run(rope, inputs, {}), run(rope, inputs, {})))


@pytest.mark.parametrize("k_grad", [False, True])
def test_compiles_without_a_graph_break(k_grad, backend, device):
    q, k = randn(2, 3, 4, 8, device=device), randn(2, 3, 2, 8, grad=k_grad, device=device)
    inputs = (q, k, *angles(1, 3, 8, device=device))

    def attention(q, k, cos, sin):
        return rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)

    with use_backend(backend):
        expected = run(attention, inputs, {})
        found = run(torch.compile(attention, fullgraph=True, backend="aot_eager"), inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
