import pytest
import torch
from saved import saved_bytes
from torch.utils.checkpoint import checkpoint

from liger_hw import dequantize_4bit, use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.linear.lora_linear import lora_glu_linear, lora_linear, lora_linear_group, products, share_dx
from liger_hw.kernels.linear.lora_linear.products import MOST_ROWS, adapter_project
from liger_hw.testing.inputs import integers
from liger_hw.testing.parity import check, compare, run
from liger_lab.cases import small_cases, wide_cases

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = [lora_linear, lora_glu_linear]
both = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def tensors(op, *shape, features=24, rank=4, dtype=torch.float32, adapters=None, device="cpu", trained=False):
    """Make the arguments of an op before scaling, of which the weight is frozen unless `trained`."""
    torch.manual_seed(0)
    adapters = adapters or dtype

    def new(*size, dtype=dtype, grad=True):
        return torch.randn(size, dtype=torch.float64).to(device, dtype).requires_grad_(grad)

    inputs = [new(*shape) for _ in range(1 if op is lora_linear else 2)]
    weight, bias = new(features, shape[-1], grad=trained), new(features, grad=trained)
    return [*inputs, weight, bias, new(rank, shape[-1], dtype=adapters), new(features, rank, dtype=adapters)]


def truncates(op, inputs):
    """Tell whether the interpreter rounds a product in bf16 towards zero, which gradients in fp32 show."""
    return interpreting() and op is lora_glu_linear and inputs[0].dtype == torch.bfloat16 != inputs[-1].dtype


@both
@pytest.mark.parametrize("cases", [small_cases, wide_cases])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(op, cases, dtype, backend, device):
    torch.manual_seed(0)
    for inputs, options in cases(op.__name__, dtype, device):
        if not truncates(op, inputs):
            check(op, inputs, options, backend)


WITHOUT_KERNELS = [
    (torch.float16, torch.float32, 4), (torch.float16, torch.float32, 70), (torch.float32, torch.float16, 4),
    (torch.float16, torch.float16, 70), (torch.bfloat16, torch.bfloat16, 70), (torch.bfloat16, torch.float32, 70),
]  # fmt: skip


@both
@pytest.mark.parametrize("dtype, adapters, rank", WITHOUT_KERNELS, ids=str)
def test_adapters_that_torch_multiplies(op, dtype, adapters, rank, backend, device):
    inputs = tensors(op, 6, 40, dtype=dtype, adapters=adapters, rank=rank, device=device)
    if not truncates(op, inputs):
        check(op, inputs, {"scaling": 0.7}, backend)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_in_fp32(op, dtype, backend, device):
    """Its gradient is a sum in fp32, as those of the adapter."""
    inputs = tensors(op, 6, 40, dtype=dtype, adapters=torch.float32, device=device)
    inputs[-3] = torch.randn(24, device=device).requires_grad_()
    if not truncates(op, inputs):
        check(op, inputs, {"scaling": 0.7}, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout_draws_the_mask_of_torch(dtype, backend, device):
    inputs = tensors(lora_linear, 6, 40, dtype=dtype, device=device)
    options = {"scaling": 2.0, "dropout": 0.3}

    def seeded(function):
        def call(*args, **kwargs):
            torch.manual_seed(3)
            return function(*args, **kwargs)

        return call

    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    mask = run(seeded(lambda x: torch.nn.functional.dropout(torch.ones_like(x), 0.3) * x), inputs[:1], {})[1] != 0
    exact = run(lambda x, w, b, a, c, **_: x @ w.T + b + (x * mask / 0.7 @ a.T @ c.T) * 2.0, wide, options)
    with use_backend(backend):
        found = run(seeded(lora_linear), inputs, options)
    expected = run(seeded(lora_linear.reference), inputs, options)
    compare(exact, expected, found, "dropout", inputs)
    assert not (mask.all() or (~mask).all())


def test_dropout_of_transposed_rows(backend, device):
    x, *others = tensors(lora_linear, 6, 40, device=device)
    results = []
    for rows in (x.view(2, 3, 40).transpose(0, 1), x.view(2, 3, 40).transpose(0, 1).contiguous()):
        torch.manual_seed(3)
        with use_backend(backend):
            results.append(lora_linear(rows, *others, dropout=0.3))
    torch.testing.assert_close(*results)


def test_dropout_of_everything(backend, device):
    inputs = tensors(lora_linear, 3, 16, device=device)
    with use_backend(backend):
        out = lora_linear(*inputs, dropout=1.0)
    torch.testing.assert_close(out, torch.nn.functional.linear(*inputs[:3]))


@both
@pytest.mark.parametrize("wanted", range(8))
def test_only_the_gradients_asked_for(op, wanted, backend, device):
    inputs = tensors(op, 4, 40, device=device)
    for i, x in enumerate((inputs[0], *inputs[-2:])):
        x.requires_grad_(bool(wanted >> i & 1))
    check(op, inputs, {"scaling": 0.5}, backend)


@both
@pytest.mark.parametrize(
    "dtype, rank, u_bytes", [(torch.bfloat16, 4, 6), (torch.bfloat16, 70, 6), (torch.float16, 4, 4)], ids=str
)
def test_keeps_no_input_in_fp32(op, dtype, rank, u_bytes, backend, device):
    """Beside x, or gate and up, and the weights it keeps u alone: three terms of 16 bits, or fp32."""
    inputs = tensors(op, 8, 64, dtype=dtype, adapters=torch.float32, rank=rank, device=device)
    weight, _, lora_a, lora_b = inputs[-4:]
    with use_backend(backend):
        kept = saved_bytes(lambda: op(*inputs))
    assert kept == sum(x.nbytes for x in (*inputs[:-4], weight, lora_a, lora_b)) + 8 * rank * u_bytes


@both
# the interpreter rounds to bf16 towards zero, which results in fp32 show
@pytest.mark.parametrize("autocast", [torch.float16] if interpreting() else [torch.float16, torch.bfloat16], ids=str)
def test_autocast(op, autocast, backend, device):
    inputs = tensors(op, 5, 40, device=device, trained=True)

    def call(*args, op=op):
        with torch.autocast(torch.device(device).type, autocast):
            return op(*args, scaling=2.0)

    wide = [x.detach().double().requires_grad_() for x in inputs]
    with use_backend(backend):
        found = run(call, inputs, {})
    expected = run(lambda *args: call(*args, op=op.reference), inputs, {})
    exact = run(op.reference, wide, {"scaling": 2.0})
    compare(exact, expected, found, "autocast", inputs)


@both
def test_backward_within_autocast(op, backend, device):
    """The gradients are those of the forward's dtypes."""
    inputs = tensors(op, 5, 40, device=device, trained=True)
    with use_backend(backend):
        expected = run(op, inputs, {"scaling": 2.0})
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = op(*leaves, scaling=2.0)
        dy = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(out)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            out.backward(dy)
    assert all(map(torch.equal, [leaf.grad for leaf in leaves], expected[1:]))


@pytest.mark.parametrize("rows", [40, MOST_ROWS + 1])
def test_terms_of_fp32(rows, backend, device):
    """Adapters in fp32 give the sum of three bf16 numbers the bits of fp32: two would leave an error of 2^-16."""
    x, _, _, lora_a, lora_b = tensors(
        lora_linear, rows, 16, dtype=torch.bfloat16, adapters=torch.float32, device=device
    )  # fmt: skip
    with use_backend(backend):
        u = adapter_project(x.detach(), lora_a.detach().t(), 0.7).double().view(-1, 3, 4).sum(1)
    x, lora_a = x.detach().double(), lora_a.detach().double()
    assert ((u - 0.7 * x @ lora_a.t()).abs() <= 2**-20 * 0.7 * x.abs() @ lora_a.t().abs()).all()


def in_4_bits(op, dtype, device="cpu", features=24, compute_dtype=None, **options):
    """Make the arguments of an op as `tensors` does, with a weight in 4 bits, and that weight in `compute_dtype`."""
    inputs = tensors(op, 6, 64, features=features, dtype=dtype, device=device, **options)
    compute_dtype = compute_dtype or dtype
    absmax, code = torch.rand(features * 2, device=device), torch.linspace(-1, 1, 16, device=device)
    weight = dequantize_4bit.arguments(
        integers(features * 32, 1, dtype=torch.uint8).to(device), absmax, code, shape=(features, 64),
        dtype=compute_dtype, block_size=32,
    )  # fmt: skip
    bias = inputs[-3].detach().to(compute_dtype).requires_grad_()
    return [*inputs[:-4], weight, bias, *inputs[-2:]], dequantize_4bit.reference(*weight)


# the interpreter truncates to bf16
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_weight_in_4_bits(op, dtype, backend, device):
    inputs, whole = in_4_bits(op, dtype, device)
    for chosen in (backend, "reference"):
        with use_backend(chosen):
            found = run(op, inputs, {"scaling": 2.0})
            expected = run(op, [*inputs[:-4], whole, *inputs[-3:]], {"scaling": 2.0})
        assert all(map(torch.equal, found, expected)) and len(found) == len(inputs)


@both
@pytest.mark.parametrize("autocast", [False, True])
def test_dtype_of_4_bits(op, autocast, backend, device):
    """The adapter sees x in fp32, unless autocast rounds it; the result has the dtype of x."""
    inputs, whole = in_4_bits(op, torch.float32, device, compute_dtype=torch.float16)

    def call(function):
        def call(*args):
            with torch.autocast(torch.device(device).type, torch.float16, enabled=autocast):
                return function(*args, scaling=2.0)

        return call

    with use_backend(backend):
        found = run(call(op), inputs, {})
    wide = [x.detach().double().requires_grad_() for x in (*inputs[:-4], *inputs[-3:])]
    exact = run(lambda *x: op.reference(*x[:-3], whole.double(), *x[-3:], 2.0), wide, {})
    compare(exact, run(call(op.reference), inputs, {}), found, "4 bits", inputs)
    assert found[0].dtype == torch.float32


@both
@pytest.mark.parametrize("rank", [4, 100])
def test_keeps_no_whole_weight(op, rank, backend, device):
    """The reference, which serves large ranks, does not keep it either."""
    inputs, whole = in_4_bits(op, torch.float16, device, features=512, rank=rank)
    weight, known = inputs[-4], [x for x in inputs if torch.is_tensor(x)]
    for chosen in (backend, "reference"):
        with use_backend(chosen):
            kept = saved_bytes(lambda: op(*inputs), *known)
        assert weight.packed.nbytes <= kept < whole.nbytes


@pytest.mark.parametrize("in_place", [False, True], ids=["fresh", "in place"])
def test_checkpointed_gated_product(in_place, backend, device):
    inputs = tensors(lora_glu_linear, 4, 40, dtype=torch.float16, device=device)

    def call(gate, up, *others):
        return lora_glu_linear(1 * gate, 1 * up, *others, 2.0, "silu", in_place)

    with use_backend(backend):
        expected = run(call, inputs, {})
        found = run(lambda *args: checkpoint(call, *args, use_reentrant=False), inputs, {})
    assert all(map(torch.equal, found, expected))


@both
@pytest.mark.parametrize("layout", ["transposed", "expanded gradient"])
def test_any_layout(op, layout, backend, device):
    inputs = tensors(op, 6, 40, dtype=torch.float16, device=device)

    def through(function):
        def call(*args):
            if layout == "transposed":
                args = [x if x.ndim == 1 else x.mT.contiguous().mT for x in args]
            out = function(*args, scaling=2.0)
            return out.float().sum() if layout == "expanded gradient" else out

        return call

    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in inputs]
    with use_backend(backend):
        found = run(through(op), inputs, {})
    exact, expected = run(through(op.reference), wide, {}), run(through(op.reference), inputs, {})
    first = int(layout == "expanded gradient")  # a sum of many results has the roundings of all
    compare(exact[first:], expected[first:], found[first:], layout, inputs)


@pytest.mark.parametrize(
    "changes, argument",
    [
        ({0: torch.ones(3, 9)}, "weight"), ({1: torch.ones(24, 16, dtype=torch.float64)}, "weight"),
        ({2: torch.ones(5)}, "bias"), ({3: torch.ones(4, 15)}, "lora_a"), ({3: torch.ones(5, 16)}, "lora_a"),
        ({4: torch.ones(24, 4, dtype=torch.float64)}, "lora_b"), ({6: 1.5}, "dropout"),
        ({0: torch.ones(3, 16).int()}, "x"),
    ],
)  # fmt: skip
def test_refuses(changes, argument, backend, device):
    arguments = [*tensors(lora_linear, 3, 16, device=device), 1.0, 0.0]
    for index, value in changes.items():
        arguments[index] = value.to(device) if torch.is_tensor(value) else value
    with use_backend(backend), pytest.raises(ValueError, match=f"^{argument}: got .* allowed: "):
        lora_linear(*arguments)


def test_refuses_4_bits(backend, device):
    (x, weight, *others), _ = in_4_bits(lora_linear, torch.float16, device)
    with use_backend(backend):
        for wrong in (weight._replace(shape=(24, 32)), weight._replace(dtype=torch.float32), tuple(weight)):
            with pytest.raises(ValueError, match="^(weight|bias): got"):
                lora_linear(x, wrong, *others)
        with torch.autocast(torch.device(device).type, torch.bfloat16), pytest.raises(ValueError, match="^weight: "):
            lora_linear(x, weight, *others)


def layers(dtype, device, ranks=(4, 3), **options):
    """Make x and two layers' arguments of different widths, ranks and scalings."""
    (x, *gate), (_, *up) = (
        tensors(lora_linear, 6, 64, features=features, rank=rank, dtype=dtype, device=device, **options)
        for features, rank in zip((24, 40), ranks)
    )
    return x, (*gate, 0.5), (*up, 2.0)


def both_layers(function):
    """Make a function of flat arguments of one of two layers."""

    def call(x, *tensors):
        return function(x, (*tensors[:4], 0.5), (*tensors[4:], 2.0))

    return call


def one_by_one(x, gate, up, op=lora_linear.reference):
    return op(x, *gate), op(x, *up)


@pytest.mark.parametrize(
    "dtype, adapters", [*zip(DTYPES, DTYPES), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)], ids=str
)
def test_two_layers_with_one_gradient_of_x(dtype, adapters, backend, device):
    x, gate, up = layers(dtype, device, adapters=adapters)
    inputs = [x, *gate[:4], *up[:4]]
    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    with use_backend(backend):
        assert share_dx(x, gate, up)
        found = run(both_layers(lora_linear_group), inputs, {})
        separate = run(both_layers(lambda *args: one_by_one(*args, lora_linear)), inputs, {})
    exact, expected = (run(both_layers(one_by_one), tensors, {}) for tensors in (wide, inputs))
    compare(exact, expected, found, "two layers", inputs)
    results = 2  # computed as by two calls; so are the gradients of B
    assert all(map(torch.equal, found[:results], separate[:results]))
    assert all(torch.equal(found[i], separate[i]) for i in (results + 2, results + 4)) and len(found) == results + 5


def test_many_rows_of_three_layers(backend, device, monkeypatch):
    """One product computes u of all, where a layer alone has a product of its own."""
    monkeypatch.setattr(products, "MOST_ROWS", 4)
    x, gate, up = layers(torch.bfloat16, device, adapters=torch.float32)
    third = (*gate[:2], *(torch.randn_like(t).requires_grad_() for t in gate[2:4]), 3.0)
    inputs = [x, *gate[:4], *up[:4], *third[:4]]

    def call(function):
        def call(x, *tensors):
            scalings = gate[4], up[4], third[4]
            return function(x, *((*tensors[4 * i : 4 * i + 4], scaling) for i, scaling in enumerate(scalings)))

        return call

    wide = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    with use_backend(backend):
        assert share_dx(x, gate, up, third)
        found = run(call(lora_linear_group), inputs, {})
    alone = call(lambda x, *layers: tuple(lora_linear.reference(x, *layer) for layer in layers))
    exact, expected = (run(alone, tensors, {}) for tensors in (wide, inputs))
    compare(exact, expected, found, "three layers", inputs)


def test_two_layers_keep_no_more_than_each(backend, device):
    x, gate, up = layers(torch.bfloat16, device, adapters=torch.float32)
    with use_backend(backend):
        together = saved_bytes(lambda: lora_linear_group(x, gate, up))
        assert together == saved_bytes(lambda: one_by_one(x, gate, up, lora_linear))


@pytest.mark.parametrize("wanted", range(16))
def test_gradients_asked_for_of_two_layers(wanted, backend, device):
    x, gate, up = layers(torch.float32, device)
    for i, tensor in enumerate((*gate[2:4], *up[2:4])):
        tensor.requires_grad_(bool(wanted >> i & 1))
    inputs = [x, *gate[:4], *up[:4]]
    with use_backend(backend):
        assert share_dx(x, gate, up)
        found = run(both_layers(lora_linear_group), inputs, {})
    expected = run(both_layers(one_by_one), inputs, {})
    assert len(found) == len(expected) == 3 + wanted.bit_count()
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Stopped(torch.autograd.Function):
    """Return no gradient, as a program's function may."""

    forward = staticmethod(lambda ctx, x: x.clone())
    backward = staticmethod(lambda ctx, dy: None)


@pytest.mark.parametrize("stopped", [(True, True), (True, False), (False, True)])
def test_layers_whose_results_get_no_gradient(stopped, backend, device):
    x, gate, up = layers(torch.float32, device)
    tensors = [x, *gate[2:4], *up[2:4]]

    def gradients_of(results):
        loss = sum((Stopped.apply(y) if stop else y).sum() for y, stop in zip(results, stopped))
        return torch.autograd.grad(loss, tensors, allow_unused=True)

    with use_backend(backend):
        found = gradients_of(lora_linear_group(x, gate, up))
    for a, b in zip(found, gradients_of(one_by_one(x, gate, up)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_two_layers_in_4_bits_and_under_autocast(backend, device):
    dtype = torch.float16
    (x, *gate), whole_gate = in_4_bits(lora_linear, dtype, device)
    (_, *up), whole_up = in_4_bits(lora_linear, dtype, device, features=40)
    gate[1], up[1] = gate[1].detach(), up[1].detach()
    leaves = [x, *gate[2:], *up[2:]]

    def call(function, gate_weight, up_weight, autocast=False):
        def call(x, gate_a, gate_b, up_a, up_b):
            with torch.autocast(torch.device(device).type, dtype, enabled=autocast):
                return function(x, (gate_weight, gate[1], gate_a, gate_b, 0.5), (up_weight, up[1], up_a, up_b, 2.0))

        return call

    with use_backend(backend):
        expected = run(call(lora_linear_group, whole_gate, whole_up), leaves, {})
        assert all(map(torch.equal, run(call(lora_linear_group, gate[0], up[0]), leaves, {}), expected))
        wide = [t.detach().float().requires_grad_() for t in leaves]
        cast = run(call(lora_linear_group, whole_gate.float(), whole_up.float(), True), wide, {})
    for a, b in zip(cast, expected):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-2, atol=1e-2)


def test_layers_that_run_alone(backend, device):
    """A layer that trains its weight or bias, another dtype, a large rank, and x without a gradient."""
    x, gate, up = layers(torch.float32, device)
    trained = up[0].detach().clone().requires_grad_()
    others = [
        (x.detach(), gate, up), (x, gate, (trained, *up[1:])), (x, gate, (up[0], trained[:, 0], *up[2:])),
        (x, gate, (*up[:2], up[2].half(), up[3].half(), 2.0)), layers(torch.float32, device, ranks=(40, 32)),
    ]  # fmt: skip
    with use_backend(backend):
        assert share_dx(x, gate, up) and not any(share_dx(*other) for other in others)
        with torch.no_grad():
            assert not share_dx(x, gate, up)
    with use_backend("reference"):
        assert not share_dx(x, gate, up)
