import pytest
import torch
import torch.nn.functional as F

from liger_hw import use_backend
from liger_hw.kernels.vocabulary.divergence import jsd, kl_div, tvd
from liger_hw.testing.inputs import log_probs, targets
from liger_hw.testing.parity import check

OPS = [jsd, kl_div, tvd]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["kernels", "plain"])
def engine(request, backend):
    """Run the test on the kernels and on a CPU's implementation."""
    with use_backend(backend if request.param == "kernels" else None):
        yield request.param


def pair(rows=6, classes=130, dtype=torch.float32, device="cpu"):
    torch.manual_seed(0)
    return log_probs(rows, classes, dtype, device), log_probs(rows, classes, dtype, device, False)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(op, dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases(op.__name__, dtype, device):
        check(op, inputs, options, backend)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean", "batchmean"])
@pytest.mark.parametrize("log_target", [False, True])
def test_kl_div_is_torchs(reduction, log_target, engine, device):
    q, p = pair(device=device)
    p = p if log_target else p.exp()
    (expected,) = torch.autograd.grad(F.kl_div(q, p, reduction=reduction, log_target=log_target).sum(), q)
    found = kl_div(q, p, reduction, log_target)
    torch.testing.assert_close(found, F.kl_div(q, p, reduction=reduction, log_target=log_target))
    torch.testing.assert_close(torch.autograd.grad(found.sum(), q)[0], expected)


def test_kl_div_of_probabilities_of_0(engine, device):
    q, p = pair(device=device)
    p = torch.where(p > p.median(), p.exp(), 0)
    expected = F.kl_div(q, p, reduction="sum")
    found = kl_div(q, p, "sum", eps=0.0)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, q)[0], torch.autograd.grad(expected, q)[0])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_is_made_of_kl(beta, engine, device):
    q, p = pair(device=device)
    mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()

    def kl(a, b):
        return F.kl_div(b, a, reduction="batchmean", log_target=True)

    expected = {0.0: lambda: kl(p, q), 1.0: lambda: kl(q, p)}.get(
        beta, lambda: beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
    )()
    (grad,) = torch.autograd.grad(expected, q)
    found = jsd(q, p, beta)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found, q)[0], grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("beta", [0.999999, 1 - 1e-9])
def test_gradient_of_jsd_near_the_reverse_kl(beta, engine, device):
    """fp32 rounds such a beta, and of the second one nothing is left of 1 - beta."""
    q, p = pair(device=device)
    exact = q.detach().double().requires_grad_()
    expected = torch.autograd.grad(jsd.reference(exact, p.double(), beta), exact)[0]
    (grad,) = torch.autograd.grad(jsd(q, p, beta), q)
    assert (grad.double() - expected).norm() < 1e-6 * expected.norm()


def test_ignored_rows_do_not_count(engine, device):
    q, p = pair(device=device)
    labels = targets(6, 130, device)
    keep = labels != -100
    for beta in (0.0, 0.3, 0.5, 1.0):  # of rows read as zeros the plain KLs would have a gradient
        found = jsd(q, p, beta, labels)
        torch.testing.assert_close(found, jsd(q[keep], p[keep], beta))
        assert torch.autograd.grad(found, q)[0][~keep].abs().sum() == 0
    probabilities = q.detach().exp().requires_grad_()
    found = tvd(probabilities, p.exp(), labels=labels)
    torch.testing.assert_close(found, tvd(probabilities[keep], p.exp()[keep]))
    found.backward()
    assert probabilities.grad[~keep].abs().sum() == 0
    spoiled = torch.where(keep[:, None], q, float("nan"))
    assert jsd(spoiled, p, labels=labels).isfinite()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_incoming_gradient_and_second_backward(op, backend, device):
    q, p = pair(device=device)
    with use_backend(backend):
        (once,) = torch.autograd.grad(op(q, p), q)
        value = op(q, p) * 3
        torch.testing.assert_close(torch.autograd.grad(value, q, retain_graph=True)[0], once * 3)
        with pytest.raises(RuntimeError, match="second"):
            torch.autograd.grad(value, q)
        with torch.no_grad():
            assert not op(q, p).requires_grad
        assert op(q, p).dtype == op(q.bfloat16(), p.bfloat16()).dtype == torch.float32


def test_equal_distributions(engine, device):
    q, _ = pair(device=device)
    probabilities = q.detach().exp().requires_grad_()
    value = tvd(probabilities, probabilities.detach())
    value.backward()
    assert value == 0 and probabilities.grad.abs().sum() == 0
    assert jsd(q, q.detach()).abs() < 1e-6


def test_strides(engine, device):
    wide = torch.cat(pair(device=device), 1)
    q, p = wide[:, :130], wide[:, 130:].detach()
    # a row that begins between two boundaries is summed in another order
    torch.testing.assert_close(jsd(q, p), jsd(q.contiguous(), p.contiguous()), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "op, argument, change",
    [
        (jsd, "log_p", {"log_p": torch.zeros(6, 129)}),
        (jsd, "log_q", {"log_q": torch.zeros(6)}),
        (jsd, "beta", {"beta": 1.1}),
        (jsd, "labels", {"labels": torch.zeros(5)}),
        (kl_div, "reduction", {"reduction": "rows"}),
        (kl_div, "target", {"target": torch.zeros(5, 130)}),
        (tvd, "reduction", {"reduction": "rows"}),
    ],
)
def test_bad_input(op, argument, change, engine, device):
    q, p = (x.to(device) for x in pair())
    change = {name: x.to(device) if torch.is_tensor(x) else x for name, x in change.items()}
    names = {jsd: ("log_q", "log_p"), kl_div: ("log_q", "target"), tvd: ("q", "p")}[op]
    with pytest.raises(ValueError, match=argument):
        op(**(dict(zip(names, (q, p))) | change))
