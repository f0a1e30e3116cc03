"""Check every loss of the benchmark at small sizes against plain torch.

On an accelerator the kernels run, elsewhere the chunks of plain torch.
"""

from contextlib import contextmanager

import pytest
import torch
from old_torch import traces_whole_losses

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.kernels.vocabulary.cross_entropy import formula
from liger_hw.losses import arguments, distillation, multi_token, offline_distillation, policy, preference
from liger_lab.bench.loss_cases import OURS, SMALL, TORCH, cases

CASES = {f"{case.op} {case.label}": case for case in cases(sizes=SMALL)}
HAS_DEVICE = not interpreting() and torch.accelerator.is_available()
DEVICE = torch.accelerator.current_accelerator(check_available=True).type if HAS_DEVICE else "cpu"
pytestmark = pytest.mark.skipif(interpreting(), reason="the other tests run the kernels in the interpreter")


@pytest.fixture(params=CASES)
def case(request):
    with use_backend(None):
        yield CASES[request.param]


def make(case, dtype=torch.float32):
    torch.manual_seed(0)
    inputs = case.make(DEVICE, dtype)
    return inputs, [x for x in inputs if x.requires_grad]


def test_it_is_plain_torchs(case):
    inputs, leaves = make(case)
    losses = [case.providers[name](*inputs) for name in (OURS, TORCH)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(loss, leaves) for loss in losses)
    for a, b in zip(ours, theirs):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max()


def test_same_bits_again(case):
    inputs, leaves = make(case, torch.bfloat16)
    runs = []
    for _ in range(2):
        loss = case.providers[OURS](*inputs)
        runs.append((loss, *torch.autograd.grad(loss, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs))


def test_the_loss_is_wider_than_its_inputs(case):
    """Rows accumulate in fp32: rounding each row to bf16 would change the third digit."""
    inputs, _ = make(case, torch.bfloat16)
    loss = case.providers[OURS](*inputs)
    assert loss.dtype == torch.float32
    if not case.products:  # the logits of a head are bf16 in plain torch, too, which computes the rest in fp32
        inputs = [x.float() if x.is_floating_point() else x for x in inputs]
    torch.testing.assert_close(loss, case.providers[TORCH](*inputs), rtol=3e-3, atol=3e-3)


def test_second_backward(case):
    """It is right, or it says that there is none."""
    inputs, leaves = make(case)
    loss = case.providers[OURS](*inputs)
    once = torch.autograd.grad(loss, leaves, retain_graph=True)
    try:
        again = torch.autograd.grad(loss, leaves)
    except RuntimeError as error:
        assert "second" in str(error)
    else:
        assert all(torch.equal(a, b) for a, b in zip(once, again))


def test_gradients_for_what_asks(case):
    inputs, leaves = make(case)
    every = torch.autograd.grad(case.providers[OURS](*inputs), leaves)
    for leaf, expected in zip(leaves, every):
        alone = [x if x is leaf else x.detach() for x in inputs]
        torch.testing.assert_close(torch.autograd.grad(case.providers[OURS](*alone), leaf)[0], expected)
    frozen = [x.detach() for x in inputs]
    assert not case.providers[OURS](*frozen).requires_grad


@contextmanager
def nobody_waits(monkeypatch):
    """Raise an error if the host waits for the device within the block."""
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return

    with monkeypatch.context() as patch, NobodyWaits():
        for module in (
            formula,
            arguments,
            distillation,
            multi_token,
            policy,
            preference,
        ):  # they look at labels on a CPU alone
            patch.setattr(module, "check_labels", lambda *args: None)
        patch.setattr(offline_distillation, "check_top_k", lambda *args: None)
        yield


class NobodyWaits(torch.overrides.TorchFunctionMode):
    """Watch by a mode, because names set on torch.Tensor would change its type for good."""

    NAMES = {"__bool__", "__int__", "__float__", "__index__", "item", "tolist", "nonzero", "cpu", "numpy"}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in self.NAMES:
            raise AssertionError(f"the host waits for a tensor: Tensor.{name}")
        if name in ("__getitem__", "__setitem__"):
            keys = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(torch.is_tensor(key) and key.dtype == torch.bool for key in keys):
                raise AssertionError("the host waits for a tensor: an index of bools")
        return function(*args, **(kwargs or {}))


def test_nobody_waits(case, monkeypatch):
    inputs, leaves = make(case)
    torch.autograd.grad(case.providers[OURS](*inputs), leaves)  # the first call may compile and ask the driver
    with nobody_waits(monkeypatch):
        torch.autograd.grad(case.providers[OURS](*inputs), leaves)


def test_the_watch_sees_a_wait(monkeypatch):
    x = torch.ones(3, device=DEVICE)
    for wait in (lambda: x.sum().item(), lambda: x[x > 0], lambda: bool(x.sum() > 0)):
        with nobody_waits(monkeypatch), pytest.raises((AssertionError, RuntimeError), match="wait|synchroniz"):
            wait()


COMPILED = [
    "KTO", "distillation, jsd and labels", "distillation, cosine and labels", "offline distillation, top 64",
    "offline distillation, all tokens", "GSPO", "VESPO", "jsd", "kl_div", "tvd",
    "multi-token prediction",
]  # fmt: skip


@traces_whole_losses
@pytest.mark.parametrize("name", COMPILED)
def test_compiles(name):
    (case,) = (case for case in CASES.values() if case.op == name)
    inputs, leaves = make(case)
    with use_backend(None):
        compiled = torch.compile(case.providers[OURS], backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs), case.providers[OURS](*inputs))
        expected = torch.autograd.grad(case.providers[OURS](*inputs), leaves)
        for a, b in zip(torch.autograd.grad(compiled(*inputs), leaves), expected):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
