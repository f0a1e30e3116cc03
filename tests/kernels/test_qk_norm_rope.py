import importlib
from dataclasses import replace

import pytest
import torch
from head_layouts import LAYOUTS, spread

from liger_hw import qk_norm_rope, rms_norm, rope, use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.norms.rms_norm import CASTING_MODES
from liger_hw.testing.inputs import angles, randn
from liger_hw.testing.parity import check, compare, run

module = importlib.import_module("liger_hw.kernels.attention.qk_norm_rope")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("qk_norm_rope", dtype, device):
        check(qk_norm_rope, inputs, options, backend)


def apart(q, k, q_weight, k_weight, cos, sin, eps=1e-6, offset=0.0, casting_mode="llama"):
    """Norm and rotation of each head of (B, H, T, D), one after the other."""
    q, k = (rms_norm(x, w, eps, offset, casting_mode) for x, w in ((q, q_weight), (k, k_weight)))
    return rope(q, k, cos, sin)


def powers_of_two(*shape, dtype, device):
    """Values whose squares have an exact mean, so that the norm rounds no sum."""
    return (2.0 ** torch.randint(-1, 2, (*shape[:-1], 1)) * torch.randn(*shape).sign()).to(device, dtype)


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounding_order(dtype, casting_mode, backend, device):
    """The forward is bit for bit that of the norm and the rotation, one after the other."""
    torch.manual_seed(0)
    q, k = (powers_of_two(2, heads, 5, 64, dtype=dtype, device=device) for heads in (4, 2))
    weights = [randn(64, dtype=dtype, device=device, grad=False) for _ in range(2)]
    inputs = q, k, *weights, *angles(2, 5, 24, dtype, device)
    with use_backend("reference"):
        expected = apart(*inputs, 0.0, 1.0, casting_mode)
    with use_backend(backend):
        found = qk_norm_rope(*inputs, 0.0, 1.0, casting_mode)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_strided(layout, joint, unsqueeze_dim, backend, device):
    torch.manual_seed(0)
    dtype = torch.float16
    inputs = [randn(2, heads, 3, 16, dtype=dtype, device=device) for heads in (4, 2)]
    inputs += [randn(16 * heads if joint else 16, dtype=dtype, device=device) for heads in (4, 2)]
    inputs += angles(1, 3, 16, dtype, device)

    def by(op):
        def function(q, k, q_weight, k_weight, cos, sin):
            q, k, *rest = layout(q), layout(k), spread(q_weight), spread(k_weight), spread(cos), sin
            if unsqueeze_dim == 1:
                return op(q, k, *rest)
            return tuple(x.transpose(1, 2) for x in op(q.transpose(1, 2), k.transpose(1, 2), *rest, unsqueeze_dim=2))

        return function

    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    exact, plain = run(by(qk_norm_rope.reference), wide, {}), run(by(qk_norm_rope.reference), inputs, {})
    with use_backend(backend):
        found = run(by(qk_norm_rope), inputs, {})
    compare(exact, plain, found, f"qk_norm_rope of {layout.__name__} on {backend}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_nothing_is_copied_and_memory_order_is_kept(layout, backend, device, monkeypatch):
    q, k = (layout(torch.randn(2, heads, 3, 8, device=device)) for heads in (4, 2))
    rest = torch.ones(8, device=device), torch.ones(8, device=device), *angles(1, 3, 8, device=device)
    leaf = q.detach().requires_grad_()
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    with use_backend(backend):
        outs = qk_norm_rope(leaf, k, *rest)
        (dq,) = torch.autograd.grad(outs[0], leaf, torch.ones(2, 4, 3, 8, device=device))
    for x, out in zip((q, k, q), (*outs, dq)):
        heads_inside = x.stride(1) < x.stride(2)
        assert out.transpose(1, 2).is_contiguous() if heads_inside else out.is_contiguous()
        assert out.data_ptr() != x.data_ptr()


def test_one_output_alone(backend, device):
    """A gradient of the keys' output alone reaches the keys and their weight alone."""
    torch.manual_seed(0)
    q, k = randn(1, 4, 3, 8, device=device), randn(1, 2, 3, 8, device=device)
    weights = randn(8, device=device), randn(8, device=device)
    tables = angles(1, 3, 8, device=device)
    with use_backend(backend):
        outs = qk_norm_rope(q, k, *weights, *tables)
        found = torch.autograd.grad(outs[1].square().sum(), (q, k, *weights), allow_unused=True)
        assert not qk_norm_rope(q.detach(), k, weights[0].detach(), weights[1], *tables)[0].requires_grad
    expected = torch.autograd.grad(apart(q, k, *weights, *tables)[1].square().sum(), (k, weights[1]))
    assert found[0] is None and found[2] is None
    torch.testing.assert_close((found[1], found[3]), expected)


def test_a_tokens_heads_beyond_the_registers(backend, device):
    """Two ops compute them, one after the other."""
    torch.manual_seed(0)
    q, k = randn(1, 70, 2, 256, device=device), randn(1, 1, 2, 256, device=device)
    inputs = q, k, randn(70 * 256, device=device), randn(256, device=device), *angles(1, 2, 256, device=device)
    check(qk_norm_rope, inputs, {}, backend)


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    q, k, w = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8), torch.ones(8)
    q, k, w, cos, sin = (x.to(device) for x in (q, k, w, *angles(1, 3, 8)))
    bad = {
        "q": (q[0], k, w, w, cos, sin),
        "k": (q, k[:, :, :2], w, w, cos, sin),
        "q_weight": (q, k, w.repeat(2), w, cos, sin),
        "k_weight": (q, k, w, w.half(), cos, sin),
        "cos": (q, k, w, w, cos[..., :7], sin[..., :7]),
        "unsqueeze_dim": (q, k, w, w, cos, sin, 1e-6, 0.0, "llama", 0),
    }
    with use_backend(which or backend):
        for argument, inputs in bad.items():
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                qk_norm_rope(*inputs)
        with pytest.raises(ValueError, match="^unknown casting_mode 'lama'"):
            qk_norm_rope(q, k, w, w, cos, sin, casting_mode="lama")


def with_rows(rows, chosen):
    """Return a choice of configurations that differs from `chosen` in ROWS, as an entry of a table could."""

    def config(*numbers):
        return replace(chosen(*numbers), meta=chosen(*numbers).meta | {"ROWS": rows})

    return config


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_table_cannot_change_the_result(rows, joint, backend, device, monkeypatch):
    """Heads that are normalised together stay in one tile, whatever ROWS an entry has."""
    for name in ("qk_norm_rope_forward_config", "qk_norm_rope_backward_config"):
        monkeypatch.setattr(module, name, with_rows(rows, getattr(module, name)))
    torch.manual_seed(0)
    heads = [randn(2, count, 3, 16, device=device) for count in (5, 2)]
    weights = [randn(16 * count if joint else 16, device=device) for count in (5, 2)]
    check(qk_norm_rope, (*heads, *weights, *angles(1, 3, 12, device=device)), {}, backend)


def test_deterministic(backend, device):
    tokens = 30 if interpreting() else 300  # of several programs
    q, k = randn(2, 8, tokens, 16, device=device), randn(2, 2, tokens, 16, device=device)
    inputs = q, k, randn(16, device=device), randn(16, device=device), *angles(1, tokens, 16, device=device)
    with use_backend(backend):
        first, second = run(qk_norm_rope, inputs, {}), run(qk_norm_rope, inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_a_dynamic_number_of_heads_compiles(unsqueeze_dim, backend, device):
    torch._dynamo.reset()
    q, k = torch.randn(2, 3, 4, 8, device=device), torch.randn(2, 3, 4, 8, device=device)
    tables = [torch.randn(1, q.shape[3 - unsqueeze_dim], 8, device=device) for _ in range(2)]
    weight = torch.ones(8, device=device)

    def rotated(q, k):
        return qk_norm_rope(q, k, weight, weight, *tables, unsqueeze_dim=unsqueeze_dim)

    with use_backend(backend):
        compiled = torch.compile(rotated, backend="aot_eager", dynamic=True)
        torch.testing.assert_close(compiled(q, k), rotated(q, k))
