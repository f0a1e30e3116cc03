"""mhc_pre and mhc_post_res."""

import pytest
import torch

from liger_hw import mhc_post_res, mhc_pre, use_backend
from liger_hw._triton import interpreting
from liger_hw.testing.inputs import Inputs
from liger_hw.testing.parity import check, compare, run
from liger_lab.cases import CASES, small_cases
from liger_lab.cases.hyper_connections import post_res_tensors, pre_tensors

OPS = {"mhc_pre": mhc_pre, "mhc_post_res": mhc_post_res}
TENSORS = {"mhc_pre": pre_tensors, "mhc_post_res": post_res_tensors}
ops = pytest.mark.parametrize("op", OPS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs_of(op, shape, device, dtype=torch.float32):
    torch.manual_seed(0)
    new = Inputs(dtype, device)
    return TENSORS[op](new, shape, new.randn)


@ops
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(op, dtype, backend, device):
    torch.manual_seed(0)
    for inputs, options in small_cases(op, dtype, device):
        check(OPS[op], inputs, options, backend)


@ops
@pytest.mark.parametrize("dtype", [torch.float16] if interpreting() else DTYPES[1:], ids=str)  # it truncates to bf16
def test_rounds_once(op, dtype, backend, device):
    inputs = [x.detach() for x in inputs_of(op, (64, 4, 256), device, dtype)]
    with use_backend(backend):
        found = OPS[op](*inputs)
    # fp32 operations in another order can move a result across a tie, rarely
    assert (found != OPS[op].reference(*inputs)).float().mean() < 2e-3


@ops
@pytest.mark.parametrize("streams", [1, 2, 6, 9, 13])
def test_numbers_of_streams(op, streams, backend, device):
    check(OPS[op], inputs_of(op, (3, streams, 20), device), {}, backend)


def test_a_layer_of_another_dtype(backend, device):
    x, f_out, *coefficients = inputs_of("mhc_post_res", (3, 4, 72), device)
    for dtypes in (torch.float16, torch.float32), (torch.float32, torch.bfloat16):
        tensors = [tensor.detach().to(dtype).requires_grad_() for tensor, dtype in zip((x, f_out), dtypes)]
        check(mhc_post_res, (*tensors, *coefficients), {}, backend)


VIEWS = {
    "rows": lambda x: x[::2],
    "transposed": lambda x: x.transpose(0, 1),
    "columns": lambda x: x[..., 1:] if x.shape[-1] == 41 else x,
    "expanded": lambda x: x[:1].expand(x.shape),
}


@ops
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_strided(op, view, backend, device):
    inputs = inputs_of(op, (4, 3, 4, 41), device, torch.float16)

    def of_views(op):
        return lambda *tensors: op(*map(view, tensors))

    reference = OPS[op].reference
    exact = run(of_views(reference), [x.detach().double().requires_grad_() for x in inputs], {})
    plain = run(of_views(reference), inputs, {})
    with use_backend(backend):
        found = run(of_views(OPS[op]), inputs, {})
    compare(exact, plain, found, f"strided {op} on {backend}")


@ops
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 3, 0)], ids=str)
def test_no_values(op, shape, backend, device):
    inputs = inputs_of(op, shape, device)
    with use_backend(backend):
        found = run(OPS[op], inputs, {})
    assert [x.shape for x in found[1:]] == [x.shape for x in inputs] and not any(x.any() for x in found)


@ops
def test_nan_spoils_its_columns_and_sums(op, backend, device):
    inputs = inputs_of(op, (3, 4, 600), device)
    with torch.no_grad():
        inputs[0][1, 2, 500] = float("nan")
    expected = run(OPS[op].reference, inputs, {})
    with use_backend(backend):
        found = run(OPS[op], inputs, {})
    assert expected[0].isnan().any() and all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, expected))


@ops
def test_unneeded_gradients_are_absent(op, backend, device):
    inputs = inputs_of(op, (2, 4, 24), device)
    for i in range(len(inputs)):
        leaves = [x.detach().requires_grad_(i == j) for j, x in enumerate(inputs)]
        with use_backend(backend):
            OPS[op](*leaves).sum().backward()
        assert [x.grad is not None for x in leaves] == [i == j for j in range(len(leaves))]


@ops
def test_deterministic(op, backend, device):
    inputs = inputs_of(op, (8 if interpreting() else 40, 6, 100), device, torch.bfloat16)
    with use_backend(backend):
        first, second = (run(OPS[op], inputs, {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    x, f_out, h_post, h_res = (x.detach() for x in inputs_of("mhc_post_res", (2, 4, 24), device))
    streams = torch.randn(2, 17, 24, device=device)
    cases = [
        (mhc_pre, (x.long(), h_post), "x"), (mhc_pre, (x[0, 0], h_post), "x"), (mhc_pre, (x, h_post[0]), "h_pre"),
        (mhc_pre, (streams, streams[..., 0]), "x"), (mhc_pre, (x[:, :0], h_post[:, :0]), "x"),
        (mhc_post_res, (streams, f_out, h_post, h_res), "x"), (mhc_post_res, (x, x, h_post, h_res), "f_out"),
        (mhc_post_res, (x, f_out, h_res, h_res), "h_post"), (mhc_post_res, (x, f_out, h_post, h_post), "h_res"),
        (mhc_post_res, (x, f_out, h_post.long(), h_res), "h_post"),
    ]  # fmt: skip
    with use_backend(which or backend):
        for op, inputs, argument in cases:
            with pytest.raises(ValueError, match=f"^{argument}: got"):
                op(*inputs)


@pytest.mark.parametrize("position, name", [(1, "f_out"), (2, "h_post"), (3, "h_res")])
def test_kernels_refuse_a_wider_argument(position, name, backend, device):
    inputs = [x.detach() for x in inputs_of("mhc_post_res", (2, 4, 24), device)]
    inputs[position] = inputs[position].double()
    with use_backend(backend), pytest.raises(ValueError, match=f"^{name}: got torch.float64 .*use_backend"):
        mhc_post_res(*inputs)


def test_every_shape_of_a_model_launches(backend):
    for op in OPS:
        for shape in (*CASES[op].models, *CASES[op].further):
            inputs = shape.make("meta", torch.bfloat16)
            with use_backend(backend):
                assert OPS[op](*inputs).shape == OPS[op].reference(*inputs).shape
