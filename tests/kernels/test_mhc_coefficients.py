import pytest
import torch

from liger_hw import mhc_coefficients, use_backend
from liger_hw._triton import interpreting
from liger_hw.testing.inputs import Inputs
from liger_hw.testing.parity import check, compare, expected, run
from liger_lab.cases import CASES, small_cases
from liger_lab.cases.hyper_connections import coefficient_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("x", "phi", "b", "alpha_pre", "alpha_post", "alpha_res")


def inputs_of(shape, device, dtype=torch.float32, seed=0, **more):
    torch.manual_seed(seed)
    new = Inputs(dtype, device)
    return coefficient_tensors(new, shape, new.randn, **more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device):
    torch.manual_seed(0)
    for inputs, options in small_cases("mhc_coefficients", dtype, device):
        check(mhc_coefficients, inputs, options, backend)


OPTIONS = [
    {"tmax": 1}, {"tmax": 2, "sinkhorn_eps": 0.0}, {"tmax": 7, "rms_eps": 0.3, "pre_eps": 0.2, "sinkhorn_eps": 1e-2},
    {"post_mult": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options(options, backend, device):
    check(mhc_coefficients, inputs_of((9, 3, 40), device), options, backend)


def test_gradients_of_alphas(backend, device):
    """Each is one number, so many draws are compared at once."""
    found = [[], [], []]
    for seed in range(12):
        inputs = inputs_of((5, 3, 24), device, seed=seed, grads=(False,) * 3, alpha_grad=True)
        with use_backend(backend):
            ours = run(mhc_coefficients, inputs, {})
        for gradients, outputs in zip(found, (*expected(mhc_coefficients, inputs, {}), ours)):
            gradients.append(torch.stack([x.reshape(()) for x in outputs[3:]]))
    compare(*([torch.stack(part)] for part in found), f"alphas of mhc_coefficients on {backend}")


@pytest.mark.parametrize("rows", [70, 400])
def test_many_rows(rows, backend, device):
    """Several programs share the rows of each gradient that is a sum over rows."""
    check(mhc_coefficients, inputs_of((rows, 2, 80), device), {"tmax": 3}, backend)


PHIS = [(torch.bfloat16, torch.float16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize("of_x, of_phi", PHIS, ids=str)
def test_dtypes_of_phi(of_x, of_phi, backend, device):
    x, phi, *others = inputs_of((5, 4, 40), device)
    inputs = x.detach().to(of_x).requires_grad_(), phi.detach().to(of_phi).requires_grad_(), *others
    check(mhc_coefficients, inputs, {}, backend)


def transposed(x):
    return x.transpose(0, 1)


VIEWS = {  # of x, of phi
    "rows": (lambda x: x[::2], lambda phi: phi),
    "transposed": (transposed, lambda phi: phi),
    "columns": (lambda x: x[..., 1:], lambda phi: phi[4:]),
    "phi": (lambda x: x, lambda phi: phi.view(phi.shape[1], phi.shape[0]).t()),
}


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_strided(views, backend, device):
    inputs = inputs_of((4, 3, 4, 21), device, torch.float16)

    def of_views(op):
        return lambda x, phi, *others: op(views[0](x), views[1](phi), *others)

    exact = run(
        of_views(mhc_coefficients.reference), [x.detach().double().requires_grad_(x.requires_grad) for x in inputs], {}
    )
    plain = run(of_views(mhc_coefficients.reference), inputs, {})
    with use_backend(backend):
        found = run(of_views(mhc_coefficients), inputs, {})
    compare(exact, plain, found, f"strided mhc_coefficients on {backend}")


def test_no_rows(backend, device):
    inputs = inputs_of((0, 3, 8), device, alpha_grad=True)
    with use_backend(backend):
        found = run(mhc_coefficients, inputs, {})
    assert [x.shape for x in found[3:]] == [x.shape for x in inputs] and not any(x.any() for x in found)


def test_nan_spoils_its_row_alone(backend, device):
    inputs = inputs_of((3, 4, 40), device)
    with torch.no_grad():
        inputs[0][1, 2, 5] = float("nan")
    plain = run(mhc_coefficients.reference, inputs, {})
    with use_backend(backend):
        found = run(mhc_coefficients, inputs, {})
    assert found[0][1].isnan().all() and not found[0][::2].isnan().any()
    assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(found, plain))


@pytest.mark.parametrize("needed", range(6))
def test_unneeded_gradients_are_absent(needed, backend, device):
    leaves = [x.detach().requires_grad_(i == needed) for i, x in enumerate(inputs_of((2, 4, 24), device))]
    with use_backend(backend):
        sum(y.sum() for y in mhc_coefficients(*leaves)).backward()
    assert [x.grad is not None for x in leaves] == [i == needed for i in range(6)]


@pytest.mark.parametrize("used", range(3))
def test_an_unused_output_gives_zeros(used, backend, device):
    leaves = [x.detach().requires_grad_() for x in inputs_of((5, 3, 24), device)]
    with use_backend(backend):
        mhc_coefficients(*leaves)[used].square().sum().backward()
    assert [bool(x.grad) for x in leaves[3:]] == [i == used for i in range(3)]


def test_deterministic(backend, device):
    inputs = inputs_of((20 if interpreting() else 90, 4, 40), device, torch.bfloat16, alpha_grad=True)
    with use_backend(backend):
        first, second = (run(mhc_coefficients, inputs, {}) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


@pytest.mark.parametrize("which", ["reference", None])
def test_bad_inputs(which, backend, device):
    inputs = dict(zip(NAMES, (x.detach() for x in inputs_of((2, 4, 24), device))))
    wrong = [
        ("x", inputs["x"].long()), ("x", inputs["x"][0, 0]), ("x", torch.randn(2, 17, 24, device=device)),
        ("phi", inputs["phi"][1:]), ("b", inputs["b"][:-1]), ("b", inputs["b"].long()),
        ("alpha_pre", inputs["b"]), ("alpha_res", torch.ones(1, 1, device=device)), ("tmax", 0),
    ]  # fmt: skip
    with use_backend(which or backend):
        for name, value in wrong:
            with pytest.raises(ValueError, match=f"^{name}: got"):
                mhc_coefficients(**inputs | {name: value})


@pytest.mark.parametrize("name", NAMES[1:])
def test_kernels_refuse_a_wider_argument(name, backend, device):
    inputs = dict(zip(NAMES, (x.detach() for x in inputs_of((2, 4, 24), device))))
    inputs[name] = inputs[name].double()
    with use_backend(backend), pytest.raises(ValueError, match=f"^{name}: got torch.float64 .*use_backend"):
        mhc_coefficients(**inputs)


def test_every_shape_of_a_model_launches(backend):
    for shape in (*CASES["mhc_coefficients"].models, *CASES["mhc_coefficients"].further):
        inputs = shape.make("meta", torch.bfloat16)
        with use_backend(backend):
            outputs = mhc_coefficients(*inputs)
        assert [y.shape for y in outputs] == [y.shape for y in mhc_coefficients.reference(*inputs)]
