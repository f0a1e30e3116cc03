import contextlib

import pytest
import torch
from saved import saved_bytes
from torch.utils.flop_counter import FlopCounterMode

from liger_hw import experts, use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.moe.experts import sort_by_expert
from liger_hw.kernels.moe.routing import sort_pairs
from liger_hw.testing.inputs import chosen_experts, randn
from liger_hw.testing.parity import check, run

# the interpreter truncates to bf16, which adds up
DTYPES = [torch.float32, torch.float16] if interpreting() else [torch.float32, torch.float16, torch.bfloat16]


def tensors(tokens=12, number=4, k=2, hidden=32, intermediate=24, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    first = randn(number, 2 * intermediate, hidden, dtype=dtype, device=device)
    second = randn(number, hidden, intermediate, dtype=dtype, device=device)
    index, weights = chosen_experts(tokens, number, k, device), randn(tokens, k, dtype=dtype, device=device)
    return randn(tokens, hidden, dtype=dtype, device=device), first, second, index, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("experts", dtype, device):
        check(experts, inputs, options, backend)


def test_reference_is_each_tokens_sum():
    x, first, second, index, weights = tensors()
    expected = torch.zeros_like(x)
    for t in range(len(x)):
        for e, w in zip(index[t].tolist(), weights[t]):
            gate, up = (first[e] @ x[t]).chunk(2)
            expected[t] += w * (second[e] @ (torch.nn.functional.silu(gate) * up))
    for name in ("reference", None):
        with use_backend(name), torch.no_grad():
            torch.testing.assert_close(experts(x, first, second, index, weights), expected, rtol=1e-4, atol=1e-4)


def test_int32_indices(backend, device):
    x, first, second, index, weights = tensors(device=device)
    with use_backend(backend):
        for a, b in zip(*(run(experts, (x, first, second, i, weights), {}) for i in (index, index.int()))):
            assert torch.equal(a, b)


def test_keeps_gate_and_up_alone(backend, device):
    inputs = tensors(tokens=64, device=device)
    (tokens, k), intermediate = inputs[3].shape, inputs[2].shape[2]
    with use_backend(backend):
        kept = saved_bytes(lambda: experts(*inputs), *inputs)
    assert kept < tokens * k * 4 * (2 * intermediate + 8)


def factors(inputs, rank=4):
    """Factors of both projections, of another scale than 1."""
    torch.manual_seed(1)
    shapes = [(number, outputs, columns) for number, outputs, columns in (inputs[1].shape, inputs[2].shape)]
    like = {"dtype": inputs[0].dtype, "device": inputs[0].device}
    first, second = ((randn(n, rank, k, **like), randn(n, m, rank, **like)) for n, m, k in shapes)
    return {"gate_up_lora": first, "down_lora": second, "lora_scale": 0.5}


def test_keeps_small_products_of_adapters(backend, device):
    inputs = tensors(tokens=64, device=device)
    options = factors(inputs, rank=2)
    (tokens, k), intermediate = inputs[3].shape, inputs[2].shape[2]
    learning = [*inputs, *options["gate_up_lora"], *options["down_lora"]]
    with use_backend(backend):
        kept = saved_bytes(lambda: experts(*inputs, **options), *learning)
    assert kept < tokens * k * 4 * (2 * intermediate + 2 * 2 + 8)


@pytest.mark.parametrize("alone", range(8))
def test_one_gradient_alone_with_adapters(alone, backend, device):
    def gradients(wanted):
        inputs = tensors(device=device)
        options = factors(inputs)
        learning = [x for x in (*inputs, *options["gate_up_lora"], *options["down_lora"]) if x.is_floating_point()]
        for i, x in enumerate(learning):
            x.requires_grad_(i in wanted)
        with use_backend(backend):
            out = experts(*inputs, **options)
        out.backward(torch.cos(torch.arange(out.numel(), device=device)).view(out.shape))
        return [x.grad for x in learning]

    every, found = gradients(range(8)), gradients([alone])
    for i, (x, expected) in enumerate(zip(found, every)):
        assert torch.equal(x, expected) if i == alone else x is None


@pytest.mark.parametrize("adapted", [False, True], ids=["plain", "adapted"])
def test_second_backward(adapted, backend, device):
    inputs = tensors(device=device)
    options = factors(inputs) if adapted else {}
    learning = [*inputs[:3], *(f for lora in options.values() if isinstance(lora, tuple) for f in lora)]
    with use_backend(backend):
        once = torch.autograd.grad(experts(*inputs, **options).sum(), learning)
        out = experts(*inputs, **options).sum()
        for _ in range(2):
            for found, expected in zip(torch.autograd.grad(out, learning, retain_graph=True), once):
                assert torch.equal(found, expected)
        out.backward()
        with pytest.raises(RuntimeError, match="a second time"):  # torch's, of a graph that was freed
            out.backward()


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_unknown_experts(wrong, backend, device):
    x, first, second, index, weights = tensors(device=device)
    index[3, 1] = wrong
    others = torch.arange(len(x)) != 3
    with use_backend(backend):
        out, dx, *_ = run(experts, (x, first, second, index, weights), {})
    for result in out, dx:  # no memory that nothing wrote
        assert result[3].isnan().all() and result[others].isfinite().all()
    if device == "cpu":
        for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
            with use_backend("reference"), mode, pytest.raises(ValueError, match="^top_k_index: "):
                experts(x, first, second, index, weights)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_unknown_experts_in_compiled_code(wrong, device):
    # on a CPU torch compiles grouped products of bf16 alone
    *inputs, index, weights = tensors(device=device, dtype=torch.bfloat16)
    index[3, 1] = wrong
    lora = [randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((4, 2, 24), (4, 32, 2))]
    for low_rank in (None, lora):
        out = torch.compile(experts, backend="aot_eager")(*inputs, index, weights, down_lora=low_rank)
        assert out[3].isnan().all() and out[torch.arange(len(out)) != 3].isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1, 1), (300, 8, 700), (37, 2, 5)])
def test_pairs_are_sorted_as_by_torch(shape, backend, device):
    tokens, k, number = shape
    index, weights = chosen_experts(tokens, number, k, device), torch.rand(tokens, k, device=device)
    order, position, offs = sort_by_expert(index, number)
    with use_backend(backend):
        found = sort_pairs(index, weights, number)
    for a, b in zip(found, (order // k, position.view(tokens, k), weights.flatten()[order], offs)):
        assert torch.equal(a, b) and a.dtype == b.dtype


@pytest.mark.parametrize(
    "place, change",
    [
        (0, lambda x: x[0]),
        (1, lambda x: x[:, 1:]),
        (1, lambda x: x.double()),
        (2, lambda x: x[:, 1:]),
        (2, lambda x: x[:0]),
        (3, lambda x: x.to(torch.int16)),
        (3, lambda x: x[1:]),
        (4, lambda x: x.double()),
        (4, lambda x: x[:, :1]),
    ],
)
def test_bad_arguments(place, change, backend, device):
    inputs = list(tensors(device=device))
    inputs[place] = change(inputs[place])
    name = ("x", "gate_up_proj|down_proj", "down_proj", "top_k_index", "top_k_weights")[place]
    for chosen in (backend, "reference"):
        with use_backend(chosen), pytest.raises(ValueError, match=f"^({name}): "):
            experts(*inputs)
        with use_backend(chosen), pytest.raises(ValueError, match="unknown activation"):
            experts(*tensors(device=device), activation="tanh")


@pytest.mark.parametrize("name", ["gate_up_lora", "down_lora"])
@pytest.mark.parametrize("factors", ["(torch.ones(4, 0, 8), torch.ones(4, 8, 0))", "[torch.ones(4, 2, 8)]", "[]"])
def test_bad_adapters(name, factors, backend, device):
    for chosen in (backend, "reference"):
        with use_backend(chosen), pytest.raises(ValueError, match=rf"^{name}: .*allowed: a pair \(A, B\) of rank 1"):
            experts(*tensors(device=device), **{name: eval(factors)})


@pytest.mark.parametrize("forced", ["reference", None])
def test_autocast_changes_nothing(forced, small_cases):
    inputs, options = next(case for case in small_cases("experts", torch.float32) if case[0][0].numel())
    with use_backend(forced):
        expected = experts(*inputs, **options)
        with torch.autocast("cpu", torch.bfloat16):
            found = experts(*inputs, **options)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("weights", ["of a sorted row", "one for all"])
def test_routing_weights_with_strides(weights, backend, device):
    torch.manual_seed(0)
    x, gate_up, down = randn(5, 16, device=device), randn(2, 48, 16, device=device), randn(2, 16, 24, device=device)
    shares, chosen = torch.softmax(torch.randn(5, 2, device=device), -1).sort(-1, descending=True)
    shares, chosen = shares[:, :1], chosen[:, :1]
    if weights == "one for all":
        shares, chosen = torch.full((1, 1), 0.5, device=device).expand(5, 1), chosen
    expected = experts.reference(x, gate_up, down, chosen, shares)
    with use_backend(backend):
        torch.testing.assert_close(experts(x, gate_up, down, chosen, shares), expected, rtol=1e-4, atol=1e-4)
