from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from liger_hw import fused_linear_cross_entropy, selective_log_softmax, use_backend
from liger_hw.kernels.vocabulary.cross_entropy import CrossEntropyOutput, cross_entropy
from liger_hw.testing.inputs import randn, targets
from liger_hw.testing.parity import check, compare, run

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def case(rows=6, classes=61, device="cpu"):
    torch.manual_seed(0)
    return randn(rows, classes, device=device), targets(rows, classes, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parity(dtype, backend, device, small_cases):
    torch.manual_seed(0)
    for inputs, options in small_cases("cross_entropy", dtype, device):
        check(cross_entropy, inputs, options, backend)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
def test_is_torchs(reduction, label_smoothing, backend, device):
    x, y = case(device=device)
    weight = torch.rand(61, device=device)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    for w in (None, weight):
        wide = None if w is None else w.double()
        exact = run(F.cross_entropy, (x.detach().double().requires_grad_(), y), options | {"weight": wide})
        plain = run(F.cross_entropy, (x, y), options | {"weight": w})
        compare(exact, plain, run(cross_entropy.reference, (x, y), options | {"weight": w}), "the reference")
        with use_backend(backend):
            compare(exact, plain, run(cross_entropy, (x, y), options | {"weight": w}), backend)


def test_loss_is_fp32(backend, device):
    x, y = case(device=device)
    with use_backend(backend):
        found = cross_entropy(x.bfloat16(), y)
    expected = F.cross_entropy(x.bfloat16().float(), y)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_ignored_rows_are_not_read(in_place, backend, device):
    x, y = case(device=device)
    y[:] = torch.tensor([-100, 3, -100, 4, 5, -100])
    x = x.detach()
    x[y == -100] = float("nan")
    logits = x.clone().requires_grad_()
    with use_backend(backend):
        loss = cross_entropy(logits * 1, y, in_place=in_place)
        loss.backward()
    assert loss.isfinite() and logits.grad.isfinite().all() and (logits.grad[y == -100] == 0).all()


@pytest.mark.parametrize("in_place", [False, True])
def test_nothing_to_learn(in_place, backend, device):
    x, y = case(device=device)
    with use_backend(backend):
        loss = cross_entropy(x * 1, torch.full_like(y, -100), in_place=in_place)
        loss.backward()
    assert loss == 0 and (x.grad == 0).all()


@pytest.mark.parametrize("wrong", [61, 10**12, -1])
@pytest.mark.parametrize("in_place", [False, True])
def test_target_outside_the_vocabulary(wrong, in_place, backend, device):
    x, y = case(device=device)
    y[2] = wrong
    with use_backend(backend):
        rows = cross_entropy(x * 1, y, reduction="none", in_place=in_place)
        rows.sum().backward()
    bad = torch.arange(6, device=device) == 2
    assert torch.equal(rows.isnan(), bad) and torch.equal(x.grad.isnan(), bad[:, None].expand(6, 61))


@pytest.mark.parametrize("in_place", [False, True])
def test_no_grad_leaves_the_logits(in_place, backend, device):
    x, y = case(device=device)
    before = x.detach().clone()
    with use_backend(backend), torch.no_grad():
        cross_entropy(x, y, in_place=in_place)
    assert torch.equal(x, before)


def test_only_in_place_takes_the_logits(backend, device):
    x, y = case(device=device)
    before = x.detach().clone()
    with use_backend(backend):
        cross_entropy(x, y).backward()
        assert torch.equal(x, before)
        logits = x * 1
        cross_entropy(logits, y, in_place=True).backward()
    torch.testing.assert_close(logits.detach() * 2, x.grad)


def test_backward_twice(backend, device):
    x, y = case(device=device)
    with use_backend(backend):
        loss = cross_entropy(x, y)
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        assert torch.equal(first, torch.autograd.grad(loss, x)[0])
        loss = cross_entropy(x * 1, y, in_place=True)
        torch.autograd.grad(loss, x, retain_graph=True)
        with pytest.raises(RuntimeError, match="in_place=False"):
            torch.autograd.grad(loss, x)


def test_in_place_over_logits_that_another_backward_needs(backend, device):
    x, y = case(device=device)
    with use_backend(backend):
        loss = cross_entropy(torch.tanh(x), y, in_place=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :61],  # a padded vocabulary
        lambda x: x[:, 1:62],  # rows off the 16-byte boundaries, each as far
        lambda x: x[1:, :61],
        lambda x: x.flatten()[3 : 3 + 7 * 61].view(7, 61),  # each row off by another distance
        lambda x: x[:, :61].t().contiguous().t(),
        lambda x: x[:1, :61].expand(7, 61),
        lambda x: x[::2, :4],
    ],
)
def test_strides(view, in_place, backend, device):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(8, 72, dtype=dtype, device=device)
        logits = view(x)
        y = targets(*logits.shape, device)
        options = {"label_smoothing": 0.1}
        exact = run(cross_entropy.reference, (logits.double().requires_grad_(), y), options)
        plain = run(cross_entropy.reference, (logits.contiguous().requires_grad_(), y), options)
        leaf = x.clone().requires_grad_()
        with use_backend(backend):
            loss = cross_entropy(view(leaf * 1), y, in_place=in_place, **options)
            (loss * 3).backward()
        expected = x.double().requires_grad_()
        (cross_entropy.reference(view(expected), y, **options) * 3).backward()
        compare(exact[:1], plain[:1], [loss.detach()], "the loss")
        torch.testing.assert_close(leaf.grad.double(), expected.grad, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_masked_vocabulary(backend, device):
    """Logits of -inf, as of masked tokens, also in a whole block."""
    torch.manual_seed(0)
    x = torch.randn(2, 20000, device=device)
    x[:, 5:] = float("-inf")
    x[1] = x[1].flip(0)
    y = torch.tensor([3, 19997], device=device)
    exact, plain = (
        run(cross_entropy.reference, (x.to(d).requires_grad_(), y), {}) for d in (torch.double, torch.float)
    )
    with use_backend(backend):
        compare(exact, plain, run(cross_entropy, (x.requires_grad_(), y), {}), backend)


def test_large_logits(backend, device):
    x, y = case(device=device)
    x = (x * 2000).detach().requires_grad_()
    with use_backend(backend):
        loss = cross_entropy(x, y)
        loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(x, y), rtol=1e-6, atol=0)
    assert x.grad.isfinite().all()


def copied_logits(x, y, **options):
    return cross_entropy(x * 1, y, **options)


WIDTHS = [61, 64, 40003]  # columns: odd, whole vectors, several blocks


@pytest.mark.parametrize("classes", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("square", [0.0, 0.1, -0.1])
def test_infinite_logits(square, dtype, classes, backend, device):
    """Loss and gradient are NaN, as a log-softmax; the z-loss is that of a log-sum-exp of +inf, without NaN."""
    torch.manual_seed(0)
    x, y = torch.randn(6, classes, device=device, dtype=dtype), torch.arange(6, device=device)
    for row, col in enumerate((0, classes // 2, classes - 1, slice(None))):
        x[row, col] = float("inf")
    x[4, 3], x[4, -2], x[3, ::2] = float("inf"), float("nan"), float("-inf")
    for smoothing in (0.0, 0.1):
        options = {"reduction": "none", "lse_square_scale": square, "label_smoothing": smoothing, "return_z_loss": True}
        expected = run(cross_entropy.reference, (x.requires_grad_(), y), options)
        for in_place in (False, True):
            with use_backend(backend):
                results = run(copied_logits, (x, y), options | {"in_place": in_place})
            assert expected[1][:4].isinf().all() == (square != 0) and expected[2][:5].isnan().all()
            torch.testing.assert_close(results, expected, rtol=1e-3, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("classes", WIDTHS)
@pytest.mark.parametrize("logits", ["equal", "lowest", "rising", "falling", "shifted"])
def test_smoothing_of_large_logits(logits, classes, backend, device):
    """The mean of log-probabilities is as exact as the definition's where a sum of logits overflows."""
    torch.manual_seed(0)
    steps = torch.linspace(3e38 * (1 - 1e-5), 3e38, classes).repeat(3, 1)
    x = {
        "equal": torch.full_like(steps, 3e38), "lowest": torch.full_like(steps, -3.4e38), "rising": steps,
        "falling": steps.flip(1), "shifted": torch.randn_like(steps) + 1e6,
    }[logits].to(device)  # fmt: skip
    y, weight = torch.tensor([1, classes // 2, classes - 1], device=device), torch.rand(classes, device=device)
    for w in (None, weight):
        options = {"reduction": "none", "label_smoothing": 0.3, "weight": w}
        exact = run(cross_entropy.reference, (x.double().requires_grad_(), y), options)
        plain = run(cross_entropy.reference, (x.requires_grad_(), y), options)
        assert plain[0].isfinite().all()
        with use_backend(backend):
            compare(exact, plain, run(cross_entropy, (x, y), options), backend)


@pytest.mark.parametrize("op", ["cross_entropy", "selective_log_softmax"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("classes", [1024, 1025, 1027, 2049])
def test_widths_beside_whole_blocks(classes, in_place, op, backend, device):
    """Blocks of 1,024 columns divide the width up to its last whole vector; rows begin at 16 bytes."""
    torch.manual_seed(0)
    padded = classes + -classes % 4
    x = torch.randn(4, padded + 4, device=device).requires_grad_()  # with memory behind each row, and a row
    target, factors = torch.tensor([classes - 1, 0, 5], device=device), torch.rand(3, device=device)
    expected = F.cross_entropy(x[:3, :classes], target, reduction="none")
    (expected,) = torch.autograd.grad(expected, x, factors)
    memory = 1 * x
    with use_backend(backend):
        if op == "cross_entropy":
            losses = cross_entropy(memory[:3, :classes], target, reduction="none", in_place=in_place)
        else:
            losses = -selective_log_softmax(memory[:3, :classes], target, in_place=in_place)
        (found,) = torch.autograd.grad(losses, x, factors)
    torch.testing.assert_close(found, expected)
    assert torch.equal(memory[:, padded:], x[:, padded:]) and torch.equal(memory[3], x[3])


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_nan_is_not_hidden(softcap, backend, device):
    x, y = case(device=device)
    x = x.detach()
    x[0, 7] = float("nan")
    with use_backend(backend):
        assert cross_entropy(x, y, softcap=softcap).isnan()


def test_same_bits_every_run(backend, device):
    x, y = case(33, 517, device=device)
    with use_backend(backend):
        first, second = run(cross_entropy, (x, y), {}), run(cross_entropy, (x, y), {})
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_outputs(backend, device):
    x, y = case(device=device)
    with use_backend(backend):
        assert torch.is_tensor(cross_entropy(x, y))
        found = cross_entropy(x, y, return_token_accuracy=True, lse_square_scale=0.1, return_z_loss=True)
    assert isinstance(found, CrossEntropyOutput) and found.predicted_tokens is None and not found.z_loss.requires_grad
    counted = y != -100
    torch.testing.assert_close(found.token_accuracy, (x.argmax(-1) == y)[counted].float().mean())
    torch.testing.assert_close(found.z_loss, 0.1 * x.logsumexp(-1)[counted].square().mean().detach())


@pytest.mark.parametrize("kind", [Fraction, torch.tensor])
def test_num_items(kind, backend, device):
    x, y = case(device=device)
    with use_backend(backend):
        torch.testing.assert_close(cross_entropy(x, y, num_items=kind(10)), F.cross_entropy(x, y, reduction="sum") / 10)


@pytest.mark.parametrize(
    "argument, change",
    [
        ("logits", {"logits": torch.zeros(2, 3, 4)}),
        ("logits", {"logits": torch.zeros(6, 61, dtype=torch.int64)}),
        ("target", {"target": torch.zeros(5, dtype=torch.int64)}),
        ("target", {"target": torch.zeros(6)}),
        ("target", {"target": torch.zeros(6, dtype=torch.int64, device="meta")}),
        ("weight", {"weight": torch.zeros(60)}),
        ("reduction", {"reduction": "batchmean"}),
        ("label_smoothing", {"label_smoothing": 1.5}),
        ("softcap", {"softcap": -30.0}),
        ("num_items", {"num_items": 3, "reduction": "sum"}),
        ("num_items", {"num_items": "3"}),
    ],
)
def test_bad_input(argument, change):
    x, y = case()
    with pytest.raises(ValueError, match=argument):
        cross_entropy(**({"logits": x, "target": y} | change))


def test_kernels_refuse_float64(backend, device):
    x, y = case(device=device)
    with use_backend(backend), pytest.raises(ValueError, match="logits: got torch.float64"):
        cross_entropy(x.double(), y)


@pytest.mark.parametrize("in_place", [False, True])
def test_compiles_whole(in_place, backend, device):
    x, y = case(device=device)

    def loss(x):
        return cross_entropy(x * 1, y, label_smoothing=0.1, in_place=in_place)

    with use_backend(backend):
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for a, b in zip(run(loss, (x,), {}), run(compiled, (x,), {})):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_the_mean_of_rows_without_weight_is_nan(smoothing, backend, device):
    logits = torch.randn(2, 3, device=device, requires_grad=True)
    y, weight = torch.tensor([0, 0], device=device), torch.tensor([0.0, 1.0, 2.0], device=device)
    identity, options = torch.eye(3, device=device), {"label_smoothing": smoothing}
    assert F.cross_entropy(logits, y, weight, **options).isnan()
    for name in (backend, "reference"):
        with use_backend(name):
            for loss in (
                cross_entropy(logits, y, weight, **options),
                fused_linear_cross_entropy(logits, identity, y, None, weight, **options),
            ):
                assert loss.isnan() and torch.autograd.grad(loss, logits)[0].isnan().all()
            ignored = cross_entropy(logits, y, weight, ignore_index=0, **options)  # of no row: 0
            assert ignored == 0 and not torch.autograd.grad(ignored, logits)[0].any()
