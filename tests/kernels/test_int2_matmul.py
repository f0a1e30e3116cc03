import itertools

import pytest
import torch

from liger_hw import int2_matmul, pack_int2, unpack_int2, use_backend
from liger_hw.testing.inputs import integers
from liger_hw.testing.parity import check
from liger_lab.cases import small_cases


def draw(rows, depth, cols, device):
    """Draw x and weights."""
    weight = torch.randint(-1, 3, (depth, cols), dtype=torch.int8)
    return integers(rows, depth, dtype=torch.int8, device=device), weight.to(device)


def exact(x, weight):
    return (x.cpu().long() @ weight.cpu().long()).to(torch.int32)


def compare(x, weight, packed, backend):
    for chosen in (backend, "reference"):
        with use_backend(chosen):
            out = int2_matmul(x, packed)
        assert out.dtype == torch.int32 and out.is_contiguous() and not out.requires_grad
        assert torch.equal(out.cpu(), exact(x, weight)), chosen


def test_parity(backend, device):
    torch.manual_seed(0)
    for inputs, options in small_cases("int2_matmul", torch.int8, device):
        check(int2_matmul, inputs, options, backend)


SIZES = [
    *((3, depth, 20) for depth in (1, 2, 3, 4, 5, 6, 7, 8, 9, 125, 126, 127, 128, 129, 253, 256, 509, 512, 515)),
    *((rows, 130, 33) for rows in (1, 15, 16, 17, 32, 33, 64, 65, 129, 200)),
    *((5, 24, cols) for cols in (1, 16, 31, 32, 63, 65, 128, 130, 300)),
    (0, 8, 4), (3, 0, 4), (3, 8, 0),
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_exact(sizes, backend, device):
    x, weight = draw(*sizes, device)
    compare(x, weight, pack_int2(weight), backend)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("value", [-128, 127])
def test_extremes(value, rows, backend, device):
    """Sums of 9,000 products of the largest size: an accumulator of 16 bits would overflow."""
    x = torch.full((rows, 9000), value, dtype=torch.int8, device=device)
    weight = torch.full((9000, 18), 2, dtype=torch.int8, device=device)
    weight[:, 1::2] = -1
    compare(x, weight, pack_int2(weight), backend)


def test_every_byte(backend, device):
    """Each byte is four weights, also beyond the last column of x, where the kernel must leave them out."""
    packed = torch.arange(256, dtype=torch.int16, device=device).to(torch.uint8).reshape(2, 128)
    for depth in (5, 6, 7, 8):
        x = integers(4, depth, dtype=torch.int8, device=device)
        compare(x, unpack_int2(packed)[:depth], packed, backend)


VIEWS = {
    "every second row": lambda x: x[::2],
    "some columns": lambda x: x[:, 3:41],
    "every second column": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "one row": lambda x: x[:1].expand(6, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided_values(view, backend, device):
    x = view(integers(48, 48, dtype=torch.int8, device=device))
    weight = torch.randint(-1, 3, (x.shape[1], 20), device=device)
    compare(x, weight, pack_int2(weight), backend)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided_weights(view, backend, device):
    packed = view(integers(48, 48, dtype=torch.uint8, device=device))
    x = integers(5, 4 * len(packed) - 1, dtype=torch.int8, device=device)
    compare(x, unpack_int2(packed)[:-1], packed, backend)


@pytest.mark.parametrize("shape", [(24,), (2, 3, 24), (2, 0, 24)], ids=str)
def test_any_number_of_dimensions(shape, backend, device):
    weight = torch.randint(-1, 3, (24, 7), device=device)
    compare(integers(*shape, dtype=torch.int8, device=device), weight, pack_int2(weight), backend)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (1,), (7,), (8,), (9, 5), (10, 5), (11, 2, 3), (64, 0)], ids=str)
def test_packing(shape, dtype):
    weight = torch.randint(-1, 3, shape, dtype=dtype)
    before, packed = weight.clone(), pack_int2(weight)
    assert torch.equal(weight, before)
    assert packed.dtype == torch.uint8 and packed.shape == (-(-shape[0] // 4), *shape[1:])
    whole = unpack_int2(packed)
    assert whole.dtype == torch.int32 and whole.shape == (4 * len(packed), *shape[1:])
    assert torch.equal(whole[: shape[0]], weight.int()) and (whole[shape[0] :] == -1).all()


def test_order_of_bits():
    """Quarters of the rows, from the lowest bits up."""
    for values in itertools.product((-1, 0, 1, 2), repeat=4):
        byte = sum((value + 1) << 2 * i for i, value in enumerate(values))
        assert pack_int2(torch.tensor(values)).tolist() == [byte]
    assert pack_int2(torch.tensor([0, 0, 1, 1, 2, 2, -1])).tolist() == [0b00111001, 0b00111001]


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_arguments(which, backend, device):
    x, packed = integers(3, 10, dtype=torch.int8, device=device), integers(3, 4, dtype=torch.uint8, device=device)
    cases = [
        ((x.int(), packed), "x"), ((x.double(), packed), "x"), ((x.half(), packed), "x"), ((x[0, 0], packed), "x"),
        ((x, packed.to(torch.int8)), "packed"), ((x, packed[0]), "packed"), ((x, packed[1:]), "packed"),
        ((x[:, :8], packed), "packed"), ((x, packed.to("meta")), "packed"), ((x, [1, 2]), "packed"),
        ((None, packed), "x"),
    ]  # fmt: skip
    with use_backend(which or backend):
        for inputs, argument in cases:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                int2_matmul(*inputs)


def test_a_dtype_that_no_implementation_takes(backend, device):
    x, packed = torch.ones(3, 8, device=device), integers(2, 4, dtype=torch.uint8, device=device)
    with use_backend(backend), pytest.raises(ValueError, match="^x: got torch.float32, allowed: .torch.int8,.$"):
        int2_matmul(x, packed)


def test_bad_weights():
    for weight in (torch.ones(8), torch.ones(8, dtype=torch.bool), torch.tensor(1)):
        with pytest.raises(ValueError, match="^weight: got"):
            pack_int2(weight)
    for packed in (torch.ones(8), torch.ones(8, dtype=torch.int8), torch.tensor(1, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="^packed: got"):
            unpack_int2(packed)


def test_names_of_liger_kernel():
    from liger_hw.stand_in.mm_int8int2 import matmul, pack_weights, unpack_weights

    x, weight = draw(3, 24, 8, "cpu")
    packed = pack_weights(intweights=weight)
    assert torch.equal(matmul(a=x, b=packed), exact(x, weight)) and torch.equal(unpack_weights(packed), weight.int())
    for function in (pack_weights, unpack_weights):
        with pytest.raises(ValueError, match="^bits: got 4, allowed: 2"):
            function(packed, bits=4)
