import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from liger_hw import dequantize_4bit, use_backend
from liger_hw._triton import interpreting
from liger_hw.backends import ARCHITECTURES
from liger_hw.kernels.linear.dequantize_4bit import BLOCK_SIZES, dequantize_arguments, dequantize_blocks_config
from liger_hw.testing.inputs import integers
from liger_hw.testing.parity import check
from liger_lab.cases import small_cases

NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FP4 = [n / 12 for n in (0, 0.0625, 8, 12, 4, 6, 2, 3)]  # 2 bits of exponent, 1 of fraction, divided by the largest
CODES = {"nf4": NF4, "fp4": FP4 + [-x for x in FP4]}
# Triton's interpreter truncates to bf16
DTYPES = [torch.float32, torch.float16] if interpreting() else [torch.float32, torch.float16, torch.bfloat16]


def code_of(kind, device="cpu"):
    return torch.tensor(CODES[kind], dtype=torch.float32, device=device)


def draw(shape, block_size, nested, device="cpu", kind="nf4", nested_block_size=256):
    """Return the tensors of a weight, by name."""
    values = math.prod(shape)
    blocks = -(-values // block_size)
    tensors = {"packed": integers(-(-values // 2), 1, dtype=torch.uint8), "code": code_of(kind)}
    if not nested:
        tensors["absmax"] = torch.rand(blocks) + 0.1
    else:
        tensors["absmax"] = integers(blocks, dtype=torch.uint8)
        tensors["nested_absmax"] = torch.rand(-(-blocks // nested_block_size)) + 0.1
        tensors["nested_code"] = torch.rand(256) * 2 - 1
        tensors["offset"] = torch.tensor(0.7)
    return {name: x.to(device) for name, x in tensors.items()}


def defined(t, shape, block_size, nested_block_size=256):
    """Compute each value in fp32 by numpy, where no two operations become one."""
    t = {name: x.cpu().numpy() for name, x in t.items()}
    scales = t["absmax"]
    if "nested_absmax" in t:
        nested = t["nested_absmax"].repeat(nested_block_size)[: len(scales)]
        scales = t["nested_code"][scales] * nested + t["offset"]
    packed = t["packed"].reshape(-1)
    numbers = np.stack([packed // 16, packed % 16], 1).reshape(-1)[: math.prod(shape)]
    return torch.from_numpy(t["code"][numbers] * scales.repeat(block_size)[: len(numbers)]).reshape(shape)


def compare(t, shape, backend, dtype=torch.float32, block_size=64, **options):
    expected = defined(t, shape, block_size, **options).to(dtype)
    for chosen in (backend, "reference"):
        with use_backend(chosen):
            y = dequantize_4bit(**t, shape=shape, dtype=dtype, block_size=block_size, **options)
        assert y.dtype == dtype and y.shape == torch.Size(shape) and y.is_contiguous() and not y.requires_grad
        assert torch.equal(y.cpu(), expected), chosen


def test_parity(backend, device):
    torch.manual_seed(0)
    for inputs, options in small_cases("dequantize_4bit", torch.uint8, device):
        check(dequantize_4bit, inputs, options, backend)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CODES)
def test_every_byte(kind, dtype, backend, device):
    """Each byte is two values, the first in the high bits."""
    t = draw((512,), 64, nested=False, device=device, kind=kind)
    t["packed"] = torch.arange(256, dtype=torch.int16, device=device).to(torch.uint8)
    compare(t, (512,), backend, dtype)
    t["absmax"].fill_(1.0)
    with use_backend(backend):
        y = dequantize_4bit(**t, dtype=torch.float32)
    code = code_of(kind, device)
    assert torch.equal(y[0::2], code.repeat_interleave(16)) and torch.equal(y[1::2], code.repeat(16))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("nested", [False, True])
def test_blocks(nested, block_size, backend, device):
    """Parts of a block, several blocks in a tile, and a last block and byte that are not whole."""
    for shape in [(2 * block_size + 3,), (70, 131)]:
        compare(draw(shape, block_size, nested, device), shape, backend, torch.float16, block_size)


SHAPES = [(1,), (2,), (1, 3), (5, 13), (3, 5, 7), (64, 64), (33, 1024), (0, 8), (1, 4099)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, backend, device):
    compare(draw(shape, 32, True, device), shape, backend, dtype, block_size=32)


@pytest.mark.parametrize("nested_block_size", [1, 3, 64])
def test_nested_blocks(nested_block_size, backend, device):
    t = draw((37, 101), 32, True, device, nested_block_size=nested_block_size)
    compare(t, (37, 101), backend, block_size=32, nested_block_size=nested_block_size)


def test_the_scale_rounds_its_product_and_its_sum(backend, device):
    """With one rounding for both, 1 - 1 would leave the product's error."""
    t = draw((32,), 32, True, device)
    product = torch.tensor(1 + 2.0**-12)
    t["nested_code"].fill_(product)
    t["nested_absmax"].fill_(product)
    t["offset"] = -(product * product).to(device)
    compare(t, (32,), backend, block_size=32)
    assert not defined(t, (32,), 32).any()
    for row in ARCHITECTURES.values():  # the interpreter never fuses
        assert not dequantize_blocks_config(64, 2, row.device).fp_fusion


def test_into_memory(backend, device):
    """The same buffer takes one weight after the other."""
    out = torch.empty(40, 33, dtype=torch.float16, device=device)
    for chosen in (backend, "reference"):
        for kind in CODES:
            t = draw((40, 33), 64, True, device, kind)
            with use_backend(chosen):
                assert dequantize_4bit(**t, shape=(40, 33), dtype=torch.float16, out=out) is out
            assert torch.equal(out.cpu(), defined(t, (40, 33), 64).half())


def test_a_write_to_saved_memory_is_counted(backend, device):
    x, out = torch.randn(3, 64, device=device, requires_grad=True), torch.empty(64, 64, device=device)
    t = draw((64, 64), 64, False, device, "nf4")
    for chosen in (backend, "reference"):
        y = x @ out.t()
        with use_backend(chosen):
            dequantize_4bit(**t, shape=(64, 64), dtype=torch.float32, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


VIEWS = {"every second byte": lambda x: x[::2], "from the second byte on": lambda x: x[1:], "a row": lambda x: x.t()}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views(view, backend, device):
    t = draw((24, 100), 64, False, device)
    t["packed"] = view(t["packed"])
    values = 2 * t["packed"].numel()
    t["absmax"] = t["absmax"].repeat_interleave(2)[::2][: -(-values // 64)]
    compare(t, (values,), backend)


def stored(t, dtype, shape, **changes):
    """Return an object with the attributes of a 4-bit parameter of bitsandbytes."""
    nested = None
    if "nested_absmax" in t:
        nested = SimpleNamespace(
            absmax=t["nested_absmax"], code=t["nested_code"], blocksize=256, dtype=torch.float32, nested=False
        )
    state = {"absmax": t["absmax"], "code": t["code"], "blocksize": 64, "quant_type": "nf4", "dtype": dtype,
             "shape": torch.Size(shape), "offset": t.get("offset"), "state2": nested}  # fmt: skip
    weight = t["packed"].clone()
    weight.quant_state = SimpleNamespace(**state | changes)
    return weight


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
def test_arguments(storage, nested):
    """Also of bytes that a sharded model stores as numbers of another dtype."""
    t = draw((16, 48), 64, nested)
    weight = stored(t, torch.float16, (16, 48))
    state, weight = weight.quant_state, weight.view(-1).view(storage).unsqueeze(1)
    weight.quant_state = state
    y = dequantize_4bit(*dequantize_arguments(weight))
    assert torch.equal(y, defined(t, (16, 48), 64).half())


def test_other_weights_have_no_arguments():
    t = draw((16, 48), 64, True)
    of_bf16 = SimpleNamespace(dtype=torch.bfloat16, nested=False)
    for weight in (
        torch.ones(3), torch.nn.Parameter(torch.ones(3)), stored(t, torch.float16, (16, 48), quant_type="int8"),
        stored(t, torch.float16, (16, 48), packing_format_for_cpu=True),
        stored(t, torch.float16, (16, 48), state2=of_bf16),
    ):  # fmt: skip
        assert dequantize_arguments(weight) is None
    weight = torch.ones(3)
    weight.quant_state = None  # of a Linear4bit before it moves to its device
    assert dequantize_arguments(weight) is None


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", CODES)
def test_bitsandbytes(kind, nested, backend, device):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="the package bitsandbytes is not installed")
    for dtype in DTYPES:
        for block_size in (32, 64, 4096):
            for shape in [(3, 5), (70, 130), (64, 1024)]:
                weight = torch.randn(shape, device=device).to(dtype)
                packed, state = bitsandbytes.functional.quantize_4bit(
                    weight, blocksize=block_size, compress_statistics=nested, quant_type=kind
                )
                assert torch.equal(state.code, code_of(kind, device))
                expected = bitsandbytes.functional.dequantize_4bit(packed, state)
                parameter = bitsandbytes.nn.Params4bit(packed, quant_state=state, requires_grad=False)
                for chosen in (backend, "reference"):
                    with use_backend(chosen):
                        assert torch.equal(dequantize_4bit(*dequantize_arguments(parameter)), expected)


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_arguments(which, backend, device):
    right = {"shape": (3, 21), "dtype": torch.float16, "block_size": 32} | draw((3, 21), 32, True, device)
    wrong = [
        ("packed", right["packed"][1:]), ("packed", None), ("shape", 63), ("packed", right["packed"].to(torch.int8)),
        ("absmax", right["absmax"].float()), ("absmax", right["absmax"][1:]), ("absmax", right["absmax"].to("meta")),
        ("code", right["code"].half()), ("code", right["code"][1:]), ("code", None), ("block_size", 48),
        ("block_size", 16), ("nested_code", None), ("nested_code", right["code"]), ("offset", None), ("offset", 0.5),
        ("nested_absmax", torch.ones(2, device=device)), ("nested_block_size", 0), ("dtype", torch.float64),
        ("out", torch.empty(3, 21, device=device)), ("out", torch.empty(21, 3, device=device).half()),
        ("out", torch.empty(21, 3, device=device).half().t()),
    ]  # fmt: skip
    with use_backend(which or backend):
        dequantize_4bit(**right)
        for name, value in wrong:
            expected = "packed|dtype" if name == "packed" else name
            with pytest.raises(ValueError, match=f"^({expected}): got"):
                dequantize_4bit(**right | {name: value})
