import itertools

import pytest
import torch

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.norms.gated_rms_norm import GATED_CASTING_MODES, gated_rms_norm, modulated_rms_norm
from liger_hw.kernels.norms.rms_norm import CASTING_MODES
from liger_hw.testing.inputs import randn
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = [gated_rms_norm, modulated_rms_norm]
ROUNDED = [torch.float16] if interpreting() else DTYPES[1:]  # the interpreter truncates to bf16
FORMS = [  # both activations and both widths of a group among them
    {"casting_mode": mode, "gate_first": first, "activation": "sigmoid" if mode == "gemma" else "silu",
     "group_size": 64 if first else None}
    for mode, first in itertools.product(GATED_CASTING_MODES, (False, True))
]  # fmt: skip


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(op, dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases(op.__name__, dtype, device):
        check(op, inputs, options, backend)


def nearly_all_equal(found, expected):
    # a sum's order may move rstd by an ulp of fp32, which a rounding can amplify to one ulp of the result, rarely
    assert (found != expected).float().mean() < 1e-3


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_rounding_order_of_a_gate(form, dtype, backend, device):
    torch.manual_seed(0)
    x, gate, w = (torch.randn(*shape, dtype=dtype, device=device) for shape in ((64, 256), (64, 256), (256,)))
    with use_backend(backend):
        found = gated_rms_norm(x, gate, w, **form)
    nearly_all_equal(found, gated_rms_norm.reference(x, gate, w, **form))


@pytest.mark.parametrize("form", [form for form in FORMS if form["casting_mode"] != "gemma"], ids=str)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_rounding_order_of_the_gradients(form, dtype, backend, device):
    """One row, whose gradients of an fp32 weight and, after the norm, of an fp32 gate are products without a sum."""
    torch.manual_seed(0)
    x = torch.randn(1, 4096, dtype=dtype, device=device)
    w = torch.ones(4096, device=device, requires_grad=True)
    if form["gate_first"]:
        gate, learning = torch.randn(1, 4096, device=device), [w]
    else:  # silu(32) is 32 and its slope 1 in fp32, so that only the row is rounded
        gate = torch.full((1, 4096), 32.0, device=device, requires_grad=True)
        learning = [w, gate]
    grads = []
    for op in (gated_rms_norm, gated_rms_norm.reference):
        with use_backend(backend if op is gated_rms_norm else None):
            grads.append(torch.autograd.grad(op(x, gate, w, **form).sum(), learning))
    for found, expected in zip(*grads, strict=True):
        nearly_all_equal(found, expected)


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtype", ROUNDED, ids=str)
def test_rounding_order_of_a_modulation(casting_mode, dtype, backend, device):
    torch.manual_seed(0)
    x, w, scale, shift = (
        torch.randn(*shape, dtype=dtype, device=device) for shape in ((8, 8, 256), (256,), (8, 1, 256), (8, 1, 256))
    )
    with use_backend(backend):
        found = modulated_rms_norm(x, w, scale, shift, 1e-6, 1.0, casting_mode)
    nearly_all_equal(found, modulated_rms_norm.reference(x, w, scale, shift, 1e-6, 1.0, casting_mode))


VIEWS = {"rows": lambda x: x[:, ::2], "mT": lambda x: x.mT, "cols": lambda x: x[..., :5]}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_strided(op, view, backend, device):
    torch.manual_seed(0)
    x, other = (randn(3, 8, 6, dtype=torch.float16, device=device) for _ in range(2))

    def of_views(op):
        if op in (gated_rms_norm, gated_rms_norm.reference):
            return lambda x, other: op(view(x), view(other))
        return lambda x, other: op(view(x), None, view(other), view(other))

    exact = run(of_views(op.reference), [t.detach().double().requires_grad_() for t in (x, other)], {})
    plain = run(of_views(op.reference), (x, other), {})
    with use_backend(backend):
        found = run(of_views(op), (x, other), {})
    compare(exact, plain, found, f"strided {op.__name__} on {backend}")


@pytest.mark.parametrize("shared", [(4, 1, 32), (32,), (4, 8, 32)], ids=str)
def test_every_subset_of_gradients_of_a_modulation(shared, backend, device):
    """Each subset of gradients is the same as together with all others."""
    torch.manual_seed(0)
    inputs = [randn(*shape, device=device) for shape in ((4, 8, 32), (32,), shared, shared)]
    with use_backend(backend):
        together = run(modulated_rms_norm, inputs, {})
        for subset in range(1, 15):
            wanted = [bool(subset >> i & 1) for i in range(4)]
            alone = run(modulated_rms_norm, [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted)], {})
            expected = [together[0], *(grad for grad, w in zip(together[1:], wanted) if w)]
            assert len(alone) == len(expected) and all(torch.equal(a, b) for a, b in zip(alone, expected))


@pytest.mark.parametrize("shape", [(4, 0, 16), (0, 8, 16), (4, 8, 0)], ids=str)
def test_nothing_to_normalise(shape, backend, device):
    x, w = randn(*shape, device=device), randn(shape[-1], device=device)
    scale, shift = (randn(shape[0], 1, shape[-1], device=device) for _ in range(2))
    with use_backend(backend):
        found = run(modulated_rms_norm, (x, w, scale, shift), {}) + run(gated_rms_norm, (x, x.detach(), w), {})
    assert not any(grad.any() for grad in found)


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x, w = torch.randn(4, 6, device=device), torch.randn(6, device=device)
    gated = [((x.long(), x), {}, "x"), ((x, x[:2]), {}, "gate"), ((x, x, w[:5]), {}, "weight")]
    gated += [((x, x), {"activation": "relu"}, "activation"), ((x, x), {"group_size": 4}, "group_size")]
    gated += [((x, x), {"casting_mode": "none"}, "casting_mode")]
    cube, rows = x.new_ones(2, 3, x.shape[1]), x.new_ones(1, 3, x.shape[1])
    assert torch.equal(modulated_rms_norm(cube, None, rows[:, :1], cube), modulated_rms_norm(cube, None, cube, cube))
    modulated = [((cube, None, rows), {}, "scale"), ((cube, None, cube, rows), {}, "shift")]
    modulated += [((x, None, x[:3]), {}, "scale"), ((x, None, x, x[:, :5]), {}, "shift"), ((x, w[:5], x), {}, "weight")]
    with use_backend(which or backend):
        for op, cases in ((gated_rms_norm, gated), (modulated_rms_norm, modulated)):
            for inputs, options, argument in cases:
                with pytest.raises(ValueError, match=f"^{argument}: got|unknown {argument}"):
                    op(*inputs, **options)


def test_deterministic(backend, device):
    inputs = [randn(*shape, device=device) for shape in ((4, 10, 100), (100,), (4, 1, 100), (4, 1, 100))]
    with use_backend(backend):
        first, second = (run(modulated_rms_norm, inputs, {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_compiles_without_a_graph_break(op, backend, device):
    shapes = [(4, 32), (4, 32), (32,)] if op is gated_rms_norm else [(4, 32), (32,), (2, 32), (2, 32)]
    inputs = [randn(*shape, device=device) for shape in shapes]
    with use_backend(backend):
        expected = run(op, inputs, {})
        found = run(torch.compile(lambda *x: op(*x), fullgraph=True, backend="aot_eager"), inputs, {})
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
