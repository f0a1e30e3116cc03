"""Check that lazy logits behave as ordinary logits in every program."""

import contextlib
import copy
import ctypes
import functools
import gc
import importlib
import io
import pickle
import threading
import warnings
import weakref

import numpy
import pytest
import tiny
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack

import liger_hw
from liger_hw._torch import FORBID_MEMORY
from liger_hw.patching.head_call import Forward
from liger_hw.patching.lazy_logits import HeadFunction, LazyLogits, lazy_logits
from liger_hw.patching.record import scale_and_softcap

pytestmark = pytest.mark.usefixtures("recognised_once")
warnings.filterwarnings("ignore", ".*non-leaf Tensor")


class Pair:
    """Make lazy and ordinary logits (2, 5, 12) of one head, with separate graphs."""

    def __init__(self, recording=False, grad=True, dtype=torch.float32):
        generator = torch.Generator().manual_seed(0)

        def leaf(*shape):
            values = torch.randn(shape, generator=generator).to(dtype)
            return [values.clone().requires_grad_(grad) for _ in range(2)]

        self.leaves = [leaf(2, 5, 8), leaf(12, 8), leaf(12)]
        forward = Forward()
        forward.recording = recording
        self.lazy = lazy_logits(*(ours for ours, _ in self.leaves), forward)
        self.real = torch.nn.functional.linear(*(plain for _, plain in self.leaves))

    def both(self):
        return self.lazy, self.real

    def assert_same_gradients(self):
        for ours, plain in self.leaves:
            assert (ours.grad is None) == (plain.grad is None)
            if plain.grad is not None:
                torch.testing.assert_close(ours.grad, plain.grad, equal_nan=True)


def computed(logits):
    return logits.cell.values is not None


@pytest.mark.parametrize(
    "steps, scale, softcap",
    [
        (lambda x: x, 1.0, None),
        (lambda x: x * 2.0 / 4, 0.5, None),
        (lambda x: torch.tanh(x / 30.0) * 30.0, 1.0, 30.0),
        (lambda x: 30.0 * torch.tanh((x * 0.5) / 30.0).float(), 0.5, 30.0),
        (lambda x: x.float().to(torch.float32).contiguous().tanh(), 1.0, 1.0),
        (lambda x: x[:, :-1, :] / 3, 1 / 3, None),
        (lambda x: x[..., 1:, :][:, -2:], 1.0, None),
        (lambda x: (x[..., :7] * 2.0)[:, :, :5].view(-1, 5), 2.0, None),
        (lambda x: (x + torch.arange(12.0))[torch.ones(2, 5) > 0].reshape(5, 2, 12) / 4, 0.25, None),
        (lambda x: torch.arange(12.0) + x, 1.0, None),
        (lambda x: x.contiguous()[:, 1:].contiguous().view(-1, 12), 1.0, None),
        (lambda x: (x[..., :7].contiguous(memory_format=torch.contiguous_format) * 2.0).reshape(10, 7), 2.0, None),
    ],
)
def test_steps_that_a_loss_understands(steps, scale, softcap):
    pair = Pair(recording=True)
    lazy, real = steps(pair.lazy), steps(pair.real)
    assert type(lazy) is LazyLogits and not computed(lazy)
    assert scale_and_softcap(lazy.cell.record.steps) == pytest.approx((scale, softcap))
    assert lazy.shape == real.shape and lazy.dtype == real.dtype and not computed(lazy)
    grad = torch.randn_like(real)
    lazy.backward(grad), real.backward(grad)
    assert not computed(lazy), "a gradient needs no values"
    pair.assert_same_gradients()
    assert torch.equal(lazy, real)


@pytest.mark.parametrize(
    "steps", [lambda x: x / 1e-200 / 1e-200, lambda x: x * float("inf"), lambda x: (x / 1e-200).tanh() * 1e300]
)
def test_scales_that_are_no_number_are_not_fused(steps):
    lazy, real = map(steps, Pair(recording=True).both())
    assert scale_and_softcap(lazy.cell.record.steps) is None
    torch.testing.assert_close(lazy.clone(), real, equal_nan=True)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x + 1, lambda x: torch.ones(()).add(x, alpha=0.5), lambda x: torch.add(torch.ones(12), x, alpha=2),
        lambda x: 1 - x, lambda x: x * torch.tensor(2.0), lambda x: x[..., 2:7], lambda x: x[0, 0],
        lambda x: x > 0, lambda x: -x, lambda x: x.view(-1, 6), lambda x: x @ torch.ones(12), lambda x: x**2,
        lambda x: 2**x, lambda x: torch.cat([x, x]), lambda x: torch.nn.functional.softmax(x, dim=-1),
        lambda x: x / x, lambda x: x.to("cpu", torch.half), lambda x: x.tolist()[0][0][0] * torch.ones(()),
        lambda x: x[x > 0], lambda x: torch.stack(list(x)), lambda x: torch.as_tensor(len(x)), lambda x: x * x,
        lambda x: x == x, lambda x: x.to(torch.int), lambda x: x[()], lambda x: x.view(size=(-1, 4)),
        lambda x: torch.logsumexp(input=x, dim=0), lambda x: torch.as_tensor(0.5 in x), lambda x: x.clone(),
        lambda x: x.detach(), lambda x: torch.vmap(lambda row: row * 2)(x), lambda x: x.new_zeros(3),
        lambda x: torch.from_numpy(x.detach().numpy()), lambda x: x.type(torch.float64), lambda x: x.argmax(-1),
        lambda x: torch.empty_like(x).copy_(x), lambda x: x.expand(3, 2, 5, 12), lambda x: x.mT,
        lambda x: x.unbind(1)[0],
        lambda x: torch.einsum("btv,v->bt", x, torch.ones(12)), lambda x: x.topk(3).values, lambda x: abs(x).floor(),
        lambda x: torch.nn.functional.pad(x, (1, 2)), lambda x: x.data, lambda x: x.index_select(0, torch.tensor([1])),
        lambda x: pickle.loads(pickle.dumps(x.detach())), lambda x: copy.deepcopy(x.detach()), lambda x: x.round(),
        lambda x: torch.tensor(x.detach()), lambda x: torch.asarray(x), lambda x: x.sum(),
        lambda x: x[:, :-1].flatten(0, 1), lambda x: x[:, 1:].flatten(), lambda x: x[..., :5].flatten(0, 1),
        lambda x: (x[:, 1:][..., :5] / 2).flatten(), lambda x: x[:, ::2].unflatten(0, (1, 2)),
        lambda x: x[:1].flatten(), lambda x: x[None, :, 1:].contiguous(memory_format=torch.channels_last),
    ],
)  # fmt: skip
@pytest.mark.parametrize("recording", [False, True])
def test_any_other_step_computes(step, recording):
    pair = Pair(recording)
    found, expected = (step(x) for x in pair.both())
    assert isinstance(found, torch.Tensor) and torch.equal(found, expected)
    assert found.requires_grad == expected.requires_grad and found.dtype == expected.dtype
    if expected.requires_grad:
        grad = torch.randn_like(expected)
        found.backward(grad), expected.backward(grad)
        pair.assert_same_gradients()


@pytest.mark.parametrize("write", [torch.Tensor.zero_, lambda x: x.data.zero_()])
@pytest.mark.parametrize(
    "step, tensor",
    [
        (lambda x, row: x + row, torch.arange(12.0)),
        (lambda x, row: row + x, torch.arange(12.0)[None, None]),
        (lambda x, mask: x[mask], torch.arange(10).view(2, 5) % 3 == 0),
        (lambda x, stop: x[:, :stop], torch.tensor(3)),
    ],
)
def test_tensors_of_a_step_that_are_written_later(step, tensor, write):
    pair = Pair(recording=True)
    results = []
    for logits in pair.both():
        written = tensor.clone()
        results.append(step(logits, written))
        write(written)
    assert torch.equal(*results)


def test_what_torch_says_of_them():
    lazy, real = Pair().both()
    assert isinstance(lazy, torch.Tensor) and torch.is_tensor(lazy) and lazy.grad_fn is not None
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "ndim", "itemsize", "nbytes"):
        assert getattr(lazy, name) == getattr(real, name), name
    for name in (
        "dim",
        "size",
        "numel",
        "stride",
        "is_contiguous",
        "element_size",
        "is_floating_point",
        "storage_offset",
    ):
        assert getattr(lazy, name)() == getattr(real, name)(), name
    assert len(lazy) == len(real) and not computed(lazy)
    assert repr(lazy).startswith("tensor(") and f"{lazy.sum():.3f}" == f"{real.sum():.3f}"
    assert lazy.data_ptr() == lazy.untyped_storage().data_ptr() != 0


def test_a_slice_has_the_strides_of_a_slice():
    for take in (lambda x: x[:, 1:], lambda x: x[..., :5], lambda x: x[:, ::2][..., :7], lambda x: x[:, 1:] * 2):
        lazy, real = (take(x) for x in Pair(True).both())
        assert isinstance(lazy, LazyLogits) and lazy.stride() == real.stride()
        assert lazy.is_contiguous() == real.is_contiguous() and lazy.cell.values is None


NO_LABEL = torch.full((10,), -100)
CASES = [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 3}, {"label_smoothing": 0.1},
    {"weight": torch.rand(7)}, {"size_average": True}, {"target": torch.rand(10, 7).softmax(-1)},
    {"target": NO_LABEL}, {"target": NO_LABEL, "reduction": "sum"}, {"target": NO_LABEL, "weight": torch.rand(7)},
    {"weight": torch.tensor([0.0, 0, 0, 0, 0, 1, 1])},
]  # fmt: skip


def _loss(x, options):
    x = (x + torch.linspace(0, 1, 12))[..., :7].float() / 2
    x = x.view(-1, x.size(-1))
    return torch.nn.functional.cross_entropy(x, **{"target": torch.arange(10) % 5} | options), x


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(options) or "mean")
def test_torchs_cross_entropy_of_them_is_fused(options):
    pair = Pair(recording=True)
    (found, logits), (expected, _) = (_loss(x, options) for x in pair.both())
    fused = "size_average" not in options and not options.get("target", NO_LABEL).is_floating_point()
    assert computed(logits) != fused
    torch.testing.assert_close(found, expected, equal_nan=True)
    found.sum().backward(), expected.sum().backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize(
    "function", [lambda x: x.logsumexp(-1), lambda x: torch.logsumexp(torch.tanh(x[:, 1:] * 0.3), dim=2)]
)
def test_logsumexp_of_them_is_fused(function):
    pair = Pair(recording=True)
    found, expected = (function(x) for x in pair.both())
    torch.testing.assert_close(found, expected)
    assert not computed(pair.lazy)
    found.square().mean().backward(), expected.square().mean().backward()
    pair.assert_same_gradients()
    whole = pair.lazy.logsumexp((1, 2), keepdim=True)
    torch.testing.assert_close(whole, pair.real.logsumexp((1, 2), keepdim=True))


def test_steps_that_the_ops_cannot_express():
    for steps in (
        lambda x: torch.tanh(x) * 2.0 * 2.0, lambda x: torch.tanh(torch.tanh(x)), lambda x: torch.tanh(x) * -1.0,
        lambda x: torch.tanh(x) * 1e-300, lambda x: x * 1e38 * 1e38 * 1e-38 * 1e-38, lambda x: x / 1e38 / 1e38 * 1e38,
    ):  # fmt: skip
        pair = Pair(recording=True)
        lazy, real = (steps(x).view(-1, 12) for x in pair.both())
        assert scale_and_softcap(lazy.cell.record.steps) is None
        found, expected = (torch.nn.functional.cross_entropy(x, torch.arange(10)) for x in (lazy, real))
        torch.testing.assert_close(found, expected, equal_nan=True)
        found.backward(), expected.backward()
        pair.assert_same_gradients()


@pytest.mark.parametrize("steps", [lambda x: x * 1e5, lambda x: x * 1e5 * 1e-5, lambda x: x / 1e5 * 1e5])
def test_scales_that_leave_the_range_of_fp16(steps):
    lazy, real = (steps(x).float().view(-1, 12) for x in Pair(recording=True, dtype=torch.float16).both())
    found, expected = (torch.nn.functional.cross_entropy(x, torch.arange(10)) for x in (lazy, real))
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_a_weight_is_swapped_after_the_backward():
    for model in tiny.pair():
        outputs = model(**tiny.tokens())
        outputs.loss.backward()
        weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        torch.utils.swap_tensors(model.lm_head.weight, weight)
        assert not model.lm_head.weight.any() and outputs.logits is not None


# Memory of logits -----------------------------------------------------------------------------------------------------


class Mine(torch.Tensor):
    """A program's own subclass."""


def _set_data(x):
    x.data = torch.ones(3)
    return x * 2


def _address(x):
    x.sum()
    return torch.tensor(torch._C._data_address(x) == x.data_ptr() != 0)


ACCESSES = [
    lambda x: torch.from_dlpack(x.detach()), lambda x: from_dlpack(torch._C._to_dlpack(x.detach())),
    lambda x: torch.as_tensor(numpy.from_dlpack(x.detach())), lambda x: torch.as_tensor(numpy.asarray(x.detach())),
    lambda x: torch.tensor((ctypes.c_float * 120).from_address(x.data_ptr())[:]),
    lambda x: torch.tensor((ctypes.c_float * 120).from_address(getattr(x, "const_data_ptr", x.data_ptr)())[:]),
    lambda x: torch.tensor(list(x._typed_storage())), lambda x: torch.tensor(list(x.untyped_storage())), _address,
    lambda x: torch.tensor(x.detach().data_ptr() == x.data_ptr() == x.data.data_ptr()),
    lambda x: torch.frombuffer(x.detach().numpy().data, dtype=torch.float32),
    lambda x: torch.tensor(x.detach().share_memory_().is_shared()), lambda x: torch.empty(0).set_(x.detach()),
    lambda x: (lambda rebuild, args: rebuild(*args))(*reduce_tensor(x.detach())),
    lambda x: x.as_subclass(Mine).as_subclass(torch.Tensor) * 2, lambda x: torch.nn.Parameter(x.detach()) * 2,
    lambda x: torch.Tensor._make_subclass(torch.nn.Parameter, x.detach()) * 2, _set_data,
    lambda x: (x.detach().numpy().fill(7), x * 2)[1], lambda x: (x.untyped_storage().fill_(0), x * 2)[1],
    lambda x: (x.data.zero_(), x * 2)[1], lambda x: torch.zeros(2, 5, 12).copy_(x),
    lambda x: (x.detach().resize_(3, 4) * 2),
]  # fmt: skip


@pytest.mark.parametrize("access", ACCESSES)
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_every_access_to_memory_finds_the_values(access):
    lazy, real = Pair().both()
    assert torch.equal(access(lazy), access(real))


def test_without_values_torchs_c_code_finds_no_memory():
    with pytest.raises(RuntimeError, match="not computed" if FORBID_MEMORY else "data"):
        torch._C._to_dlpack(Pair(grad=False).lazy)
    if FORBID_MEMORY:  # other builds of torch give the address 0
        with pytest.raises(RuntimeError, match="not computed"):
            torch._C._data_address(Pair(grad=False).lazy)


def test_data_of_another_tensor():
    for mean in (lambda x: x.square().mean(), lambda x: x[0, 0].sum()):
        pair = Pair()
        for x in pair.both():
            x.data = torch.arange(120.0).view(2, 5, 12)
            mean(x).backward()
        pair.assert_same_gradients()
    taken, lazy = torch.ones(()), Pair(grad=False).lazy
    taken.data, lazy.data = lazy.data, Pair().lazy
    assert torch.equal(taken, lazy.clone())


@pytest.mark.parametrize("read_before", [False, True])
def test_a_parameter_of_them_is_refused_and_one_of_their_values_is_not(read_before):
    lazy = Pair().lazy
    if read_before:
        lazy.sum()
    with pytest.raises(TypeError, match=r"pass logits.detach\(\)"):
        torch.nn.Parameter(lazy)
    assert torch.equal(torch.nn.Parameter(lazy.detach()), lazy)


def test_threads_that_read_at_once_share_the_values():
    lazy, addresses = Pair().lazy, []
    threads = [threading.Thread(target=lambda: addresses.append(lazy.data_ptr())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(addresses)) == 1


# Writing --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.mul_(2.0), lambda x: x.__setitem__((Ellipsis, 3), -1.0), lambda x: x[:, 1:3].zero_(),
        lambda x: x[0].add_(1.0), lambda x: x.view(-1, 12).mul_(0.5), lambda x: x.exp_(),
        lambda x: x.masked_fill_(torch.eye(12, dtype=torch.bool)[0], 0.0), lambda x: x.div_(3),
        lambda x: x[:, -1].div_(7),
        lambda x: x.transpose(0, 1).mul_(2.0), lambda x: x.copy_(torch.ones(12)),
        lambda x: x.__setitem__(x > 0, 0.0), lambda x: x.index_fill_(2, torch.tensor([1]), 5.0),
    ],
)  # fmt: skip
def test_writing_reaches_the_values_and_the_gradient(write):
    pair = Pair()
    lazy, real = pair.both()
    seen = [x.detach() for x in (lazy, real)]
    for x in (lazy, real):
        write(x)
    assert torch.equal(lazy.clone(), real) and torch.equal(*seen) and lazy._version == real._version
    (lazy * 3.0).square().sum().backward(), (real * 3.0).square().sum().backward()
    pair.assert_same_gradients()


def test_augmented_assignment():
    pair = Pair()
    lazy, real = pair.both()
    lazy /= 2.0
    real /= 2.0
    lazy[:, 0] *= 3.0
    real[:, 0] *= 3.0
    assert torch.equal(lazy.clone(), real)
    lazy.sum().backward(), real.sum().backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_casts_to_other_dtypes_than_fp32_compute(dtype):
    lazy, real = Pair(recording=True).both()
    assert torch.equal(lazy.to(dtype), real.to(dtype)) and computed(lazy)


@pytest.mark.parametrize(
    "steps, stays", [(lambda x: x, True), (lambda x: x[:, 1:].contiguous(), True), (lambda x: x * 3.0, False)]
)
def test_a_cast_back_computes_only_after_arithmetic(steps, stays):
    lazy, real = Pair(recording=True, dtype=torch.bfloat16).both()
    found, expected = (steps(x.float()).bfloat16() for x in (lazy, real))
    assert hasattr(found, "cell") == stays and (not stays or not computed(found))
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.detach().zero_(), lambda x: x.data.mul_(2.0), lambda x: x.numpy().fill(0), lambda x: x.zero_(),
        lambda x: from_dlpack(x).zero_(), lambda x: x.untyped_storage().fill_(0), lambda x: x.apply_(abs),
        lambda x: x.map_(torch.zeros_like(x), min), lambda x: torch.ones_like(x).map_(x, min),
    ],
)  # fmt: skip
def test_a_copy_of_another_dtype_is_from_before_a_write(write):
    pair = Pair(grad=False, dtype=torch.float16)
    copies = [x.to(torch.float32) for x in pair.both()]
    assert not computed(copies[0])
    results = [write(x) for x in pair.both()]
    assert torch.equal(*copies) and torch.equal(pair.lazy.clone(), pair.real)
    if torch.is_tensor(results[0]):
        assert torch.equal(*results)


@pytest.mark.parametrize("first", [0, 1])
def test_within_the_model_a_slice_shares_the_memory_of_its_logits(first):
    pair = Pair(recording=True, grad=False)
    slices = [x[:, 1:] for x in pair.both()]
    assert not computed(slices[0])
    for x, rows in zip(pair.both(), slices):
        (x, rows)[first].sum()  # computes one of them
        x.detach().mul_(2.0)
    assert torch.equal(*slices)


COPIES = (
    lambda x: x[:, 1:].contiguous(), lambda x: x[..., :7].contiguous(), lambda x: x[:, ::2].reshape(-1, 12),
    lambda x: x[torch.ones(2, 5) > 0].contiguous(), lambda x: x[..., :7].reshape(-1, 7).float().contiguous(),
)  # fmt: skip


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("write", [lambda x: x.mul_(2.0), lambda x: x.detach().mul_(2.0), lambda x: x.numpy().fill(3)])
@pytest.mark.parametrize("written", ["logits", "copy", "both"])
def test_within_the_model_a_copy_of_a_slice_has_memory_of_its_own(written, write, copied):
    pair = Pair(recording=True, grad=False)
    copies = [copied(x) for x in pair.both()]
    assert not computed(copies[0]) and copies[0].stride() == copies[1].stride()
    for x, copy_of_x in zip(pair.both(), copies):
        for tensor in {"logits": [x], "copy": [copy_of_x], "both": [x, copy_of_x]}[written]:
            write(tensor)
    assert torch.equal(*copies) and torch.equal(pair.lazy.clone(), pair.real)


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize(
    "write",
    [
        lambda x, rows: None, lambda x, rows: x.detach().exp_(), lambda x, rows: x.mul_(2.0),
        lambda x, rows: rows.detach().exp_(),
    ],
)  # fmt: skip
def test_the_loss_of_a_copy_of_a_slice_beside_a_write(write, copied):
    pair, losses = Pair(recording=True), []
    for x in pair.both():
        rows = copied(x)
        rows = rows.view(-1, rows.size(-1))
        write(x, rows)
        losses.append(torch.nn.functional.cross_entropy(rows, torch.arange(len(rows)) % 7))
    torch.testing.assert_close(*losses)
    for x, loss in zip(pair.both(), losses):
        (loss + x.square().mean()).backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize(
    "after",
    [
        lambda x: x / 2, lambda x: x.to(torch.float64), lambda x: x.contiguous(), lambda x: x[:1], lambda x: x.sum(),
        lambda x: torch.nn.functional.cross_entropy(x.reshape(-1, 12), torch.arange(8)), lambda x: x.logsumexp(-1),
    ],
)  # fmt: skip
def test_a_slice_of_written_logits_has_the_written_values(after):
    pair, results = Pair(recording=True), []
    for x in pair.both():
        rows = x[:, 1:]
        x.detach().mul_(2.0)
        results.append(after(rows))
    torch.testing.assert_close(*results)
    for result in results:
        result.double().square().sum().backward()
    pair.assert_same_gradients()


def test_within_the_model_a_write_beside_a_recorded_view_is_an_error():
    lazy = Pair(recording=True).lazy
    view = lazy[:, 1:]
    for x in (lazy, view):
        for write in (lambda x: x.mul_(2.0), lambda x: x.__setitem__((..., slice(3)), 0.0)):
            with pytest.raises(RuntimeError, match="skip_logits=False"):
                write(x)
    del view
    gc.collect()
    halves = Pair(recording=True)
    half = [x / 2.0 for x in halves.both()]
    for x in halves.both():
        x.mul_(7.0)
    assert torch.equal(*half) and torch.equal(halves.lazy.clone(), halves.real)


VIEWS_BY_TORCH = (
    lambda x: x.select(-1, 3), lambda x: x.narrow(-1, 0, 3), lambda x: x.transpose(0, 1),
    lambda x: x.diagonal(dim1=-2, dim2=-1), lambda x: x.unsqueeze(0),
)  # fmt: skip


@pytest.mark.parametrize("view", VIEWS_BY_TORCH)
@pytest.mark.parametrize("recorded", [lambda x: x[:, 1:], lambda x: x.view(-1, 12), lambda x: x.view(-1, 12)[2:]])
@pytest.mark.parametrize(
    "through, read", [(through, read) for through in ("logits", "slice") for read in ("logits", "slice", "both")]
)
@pytest.mark.parametrize(
    "loss_of", [lambda x: x.square().sum(), lambda x: x.logsumexp(-1).sum(), lambda x: (x / 2.0).exp().mean()]
)
def test_within_the_model_a_write_through_a_view_of_a_view(view, recorded, through, read, loss_of):
    """The values are right; a graph that misses the write is refused, as its gradients would be wrong."""
    pair, losses = Pair(recording=True), []
    for x in pair.both():
        tensors = {"logits": x, "slice": recorded(x)}
        view(tensors[through]).mul_(3.0)
        try:
            losses.append(sum(loss_of(tensors[name]) for name in tensors if read in (name, "both")))
        except RuntimeError as error:
            assert x is pair.lazy and read != through and "skip_logits=False" in str(error)
            with torch.no_grad():
                lazy = [tensor.clone() for tensor in tensors.values()]
            view({"logits": pair.real, "slice": recorded(pair.real)}[through]).mul_(3.0)
            assert torch.equal(lazy[0], pair.real) and torch.equal(lazy[1], recorded(pair.real))
            return
    torch.testing.assert_close(*losses)
    losses[0].backward(), losses[1].backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize("recording", [True, False], ids=["within the model", "after it"])
@pytest.mark.parametrize(
    "slice_of", [lambda x: x[:, 2:], lambda x: x[1:], lambda x: x[..., 4:], lambda x: x[:, 1:][1:], lambda x: x[:, :-1]]
)
@pytest.mark.parametrize(
    "part_of",
    [
        lambda x: x[0, 1:], lambda x: x.flatten(0, 1)[1:], lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: x[-1][..., 2:],
        lambda x: x.transpose(0, 1)[1:].narrow(-1, 1, 3), lambda x: x.select(0, 0).t()[2:],
    ],
)  # fmt: skip
def test_a_write_to_a_part_of_a_view_of_a_slice(slice_of, part_of, recording):
    pair, losses = Pair(recording=True), []
    for x in pair.both():
        rows = slice_of(x)
        if x is pair.lazy:
            x.cell.call.forward.recording = recording
        view = rows[:]  # a view by torch
        part_of(view).mul_(3.0)
        part_of(view)[0] = 0.5
        losses.append(view.square().sum())
    torch.testing.assert_close(*losses)
    losses[0].backward(), losses[1].backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize("ask", [lambda x: x.storage_offset(), lambda x: torch.as_strided(x, (2, 2), (1, 1), 0)])
def test_where_the_memory_of_a_slice_begins_is_refused(ask):
    rows = Pair(recording=True).lazy[:, 2:]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="skip_logits=False"):
            ask(rows)
        rows.sum()


def test_views_by_torch_do_not_keep_the_logits():
    lazy = Pair(recording=True).lazy
    rows = lazy[:, 1:]
    lazy.select(-1, 3).sum().backward()
    cell = weakref.ref(lazy.cell)
    gc.disable()
    try:
        del lazy, rows
        assert cell() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "loss_of", [lambda x: x[:, :-1].contiguous(), lambda x: x[:, 1:] / 2, lambda x: x.view(2, 5, 12)[:, 1:].float()]
)
def test_a_checkpoint_within_the_model_around_its_loss(loss_of, reentrant):
    pair, target = Pair(recording=True), torch.arange(8)
    for logits in pair.both():
        loss = checkpoint(
            lambda x: torch.nn.functional.cross_entropy(loss_of(x).reshape(-1, 12), target),
            logits, use_reentrant=reentrant,
        )  # fmt: skip
        if logits is pair.lazy:
            logits.cell.call.forward.recording = False
        loss.backward()
    pair.assert_same_gradients()


# Gradients ------------------------------------------------------------------------------------------------------------


def _models(**flags):
    plain, patched = tiny.pair("llama", num_hidden_layers=1)
    return plain, patched, tiny.tokens()


def _gradients_alike(plain, patched):
    for (name, p), q in zip(plain.named_parameters(), patched.named_parameters()):
        q = q[1]
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(
                q.grad, p.grad, rtol=1e-3, atol=1e-6 + 1e-6 * p.grad.abs().max().item(), msg=name
            )


def _twice(p):
    return 2 * p


PROGRAMS = {
    "backward": lambda out: out.loss.backward(),
    "the logits first": lambda out: (out.logits.sum(), out.loss.backward()),
    "a second loss": lambda out: (out.loss + out.logits.float().softmax(-1).square().sum()).backward(),
    "only a second loss": lambda out: (out.logits.float() / 3).logsumexp(-1).sum().backward(),
    "read under no_grad first": lambda out: (_without_grad(out), (out.logits**2).mean().backward()),
    "a hook that scales": lambda out: (out.logits.register_hook(_twice), out.loss.backward()),
    "a hook that looks": lambda out: (out.logits.register_hook(lambda g: None), out.loss.backward()),
    "a hook that writes": lambda out: (out.logits.register_hook(lambda g: g.mul_(3.0)), out.loss.backward()),
    "two hooks": lambda out: [out.logits.register_hook(_twice), out.logits.register_hook(_twice), out.loss.backward()],
    "a hook of the node": lambda out: (
        out.logits.grad_fn.register_prehook(lambda grads: tuple(2 * g for g in grads)), out.loss.backward(),
    ),
    "scaled loss": lambda out: (out.loss * 1024).backward(),
    "to the logits, then the loss": lambda out: (out.logits.sum().backward(inputs=[out.logits]), out.loss.backward()),
    "the loss to the logits, then they": lambda out: (
        out.loss.backward(inputs=[out.logits]), out.logits.backward(out.logits.grad),
    ),
    "two backwards": lambda out: (out.loss.backward(retain_graph=True), out.logits.sum().backward()),
    "a function of the user's": lambda out: (Double.apply(out.logits).square().mean() + out.loss).backward(),
    "checkpoint": lambda out: torch.utils.checkpoint.checkpoint(
        lambda x: (x.softmax(-1) ** 2).sum(), out.logits, use_reentrant=False
    ).backward(),
    "reentrant checkpoint": lambda out: torch.utils.checkpoint.checkpoint(
        lambda x: (x.softmax(-1) ** 2).sum(), out.logits, use_reentrant=True
    ).backward(),
    "in place": lambda out: (out.logits.div_(2.0), (out.logits**2).mean().backward()),
    "in place and the loss": lambda out: (out.logits.mul_(2.0), out.loss.backward()),
}  # fmt: skip


def _without_grad(out):
    with torch.no_grad():
        return out.logits.sum()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_of_a_model_recomputes_it_once(use_reentrant):
    """A loss whose forward runs autograd must not make torch recompute the model for each of its graphs."""
    *models, inputs = _models()
    calls = []
    for model in models:
        handle = model.model.register_forward_hook(lambda *_: calls.append(1))
        one = torch.ones((), requires_grad=True)
        torch.utils.checkpoint.checkpoint(
            lambda x, model=model: model(**inputs).loss * x, one, use_reentrant=use_reentrant
        ).backward()
        handle.remove()
        assert len(calls) == 2
        calls.clear()
    for p, q in zip(*(model.parameters() for model in models)):
        torch.testing.assert_close(q.grad, p.grad)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_of_users(program):
    plain, patched, inputs = _models()
    results = []
    for model in (plain, patched):
        out = tiny.call(model, **inputs)
        try:
            PROGRAMS[program](out)
            results.append(None)
        except RuntimeError as error:
            results.append(error)
    assert (results[0] is None) == (results[1] is None), results
    _gradients_alike(plain, patched)


def test_gradients_of_the_logits():
    plain, patched, inputs = _models()
    outs = [tiny.call(model, **inputs) for model in (plain, patched)]
    expected, found = (torch.autograd.grad(out.loss, out.logits, retain_graph=True)[0] for out in outs)
    torch.testing.assert_close(found, expected)
    for out in outs:
        out.logits.retain_grad()
        out.loss.backward()
    torch.testing.assert_close(outs[1].logits.grad, outs[0].logits.grad)
    _gradients_alike(plain, patched)


def test_hooks_get_the_gradient_without_computing_it_unless_they_read():
    _, patched, inputs = _models()
    out, shapes = tiny.call(patched, **inputs), []
    out.logits.register_hook(lambda g: shapes.append(g.shape))
    out.loss.backward()
    assert shapes == [out.logits.shape] and not computed(out.logits)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_grad(mode):
    plain, patched, inputs = _models()
    with mode():
        expected, found = (tiny.call(model, **inputs) for model in (plain, patched))
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert found.logits.requires_grad is False and torch.equal(found.logits.clone(), expected.logits)


def test_torch_cross_entropy_is_fp32_under_autocast():
    plain, patched, inputs = _models()
    losses, grads = [], []
    for model in (plain, patched):
        with torch.autocast("cpu", torch.bfloat16):
            logits = tiny.call(model, **inputs).logits
            losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"].flatten()))
        logits.register_hook(grads.append)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
    torch.testing.assert_close(grads[1].clone(), grads[0], rtol=1e-2, atol=1e-5)


LOSSES = {
    "logsumexp": lambda x: x.logsumexp(-1).square().mean(),
    "cross entropy": lambda x: torch.nn.functional.cross_entropy(x.view(-1, 12), torch.arange(10)),
    "slice": lambda x: torch.nn.functional.cross_entropy(x[:, :-1].reshape(-1, 12), torch.arange(8)),
    "double": lambda x: x.double().square().mean(),
    "softmax": lambda x: x.softmax(-1).square().sum(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_compiled_loss_of_a_program(compiler, loss):
    torch._dynamo.reset()
    pair = Pair()
    found, expected = (torch.compile(loss, backend=compiler)(x) for x in pair.both())
    torch.testing.assert_close(found, expected)
    found.backward(), expected.backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("trace", ["jit", "fx", "aot"])
def test_a_traced_loss_of_a_program(trace, loss):
    def result(x):
        if trace == "jit":
            return torch.jit.trace(loss, (x,), check_trace=False)(x)
        if trace == "fx":
            return torch.fx.experimental.proxy_tensor.make_fx(loss)(x)(x.detach() * 2)
        return importlib.import_module("functorch.compile").aot_function(loss, lambda graph, _: graph)(x)

    found, expected = map(result, Pair().both())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_within_a_transform(loss):
    pair, factor = Pair(), torch.tensor(2.0)
    found, expected = (torch.func.grad(lambda f, x=x: loss(x) * f)(factor) for x in pair.both())
    torch.testing.assert_close(found, expected)
    found, expected = (torch.func.vmap(lambda f, x=x: loss(x) * f)(torch.arange(3.0)) for x in pair.both())
    torch.testing.assert_close(found, expected)


class TenTimes(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result if result is NotImplemented else 10 * result.as_subclass(torch.Tensor)


class Duck:
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return func.__name__, [type(arg) for arg in args]


@pytest.mark.parametrize("recording", [False, True])
def test_classes_of_a_program_beside_them(recording):
    pair = Pair(recording)
    for function in (torch.add, lambda x, y: y + x, torch.mul, torch.maximum):
        found, expected = (function(x, torch.arange(12.0).as_subclass(TenTimes)) for x in pair.both())
        torch.testing.assert_close(found, expected)
    assert torch.add(pair.lazy, Duck()) == torch.add(pair.real, Duck()) == ("add", [torch.Tensor, Duck])


@tiny.fails_in_4
def test_jit_trace_computes_the_logits():
    plain, patched, inputs = _models()
    ids, labels = inputs["input_ids"], inputs["labels"]
    patched.config.use_cache = False

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = patched

        def forward(self, ids, labels):
            return self.model(input_ids=ids, labels=labels).loss

    traced = torch.jit.trace(Loss(), (ids, labels), check_trace=False)
    torch.testing.assert_close(traced(ids, labels), tiny.call(plain, **inputs).loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    plain, patched, inputs = _models()
    with torch.autocast("cpu", dtype):
        expected, found = (tiny.call(model, **inputs) for model in (plain, patched))
    assert found.logits.dtype == expected.logits.dtype and torch.equal(found.logits.clone(), expected.logits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-4, atol=0)
    (found.logits.float() ** 2).mean().backward(), (expected.logits.float() ** 2).mean().backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=2e-2, atol=1e-4 + 1e-2 * p.grad.abs().max().item())


# After the weights have changed ---------------------------------------------------------------------------------------

CHANGES = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), 0.1).step(),
    "fused adamw": lambda model: torch.optim.AdamW(model.parameters(), fused=True).step(),
    "data.add_": lambda model: [p.data.add_(0.1) for p in model.parameters()],
    "only the bias": lambda model: model.lm_head.bias.data.add_(1.0),
    "one value": lambda model: model.lm_head.weight.data[5, 3].add_(1.0),
    "numpy": lambda model: model.lm_head.weight.detach().numpy()[5].fill(1.0),
    "rows that change places": lambda model: model.lm_head.weight.data.copy_(model.lm_head.weight.data.flip(0)),
    "columns that change places": lambda model: model.lm_head.weight.data.copy_(model.lm_head.weight.data.flip(1)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "read", [lambda x: x.sum(), lambda x: x[:, -1], lambda x: x.float() / 2, lambda x: x.detach() + 1]
)
def test_logits_of_weights_that_changed_are_an_error(change, read):
    _, patched = tiny.pair("phi", num_hidden_layers=1)  # its head has a bias
    out = patched(**tiny.tokens())
    out.loss.backward()
    CHANGES[change](patched)
    with pytest.raises(RuntimeError, match="skip_logits=False"):
        read(out.logits).sum().item()


def test_logits_of_weights_that_were_freed_are_an_error():
    _, patched, inputs = _models()
    out = tiny.call(patched, **inputs)
    patched.lm_head.weight.untyped_storage().resize_(0)  # as FSDP does
    with pytest.raises(RuntimeError, match="weight lost memory after the forward .*: call .* skip_logits=False"):
        out.logits.sum()


@pytest.mark.parametrize("change", ["data", "functional_call"])
def test_weights_that_were_exchanged_do_not_matter(change):
    plain, patched, inputs = _models()
    expected, found = (tiny.call(model, **inputs) for model in (plain, patched))
    if change == "data":
        for p in patched.parameters():
            p.data = torch.zeros_like(p)
    else:
        other = {name: torch.zeros_like(p) for name, p in patched.named_parameters()}
        torch.func.functional_call(patched, other, kwargs=inputs)
        found = torch.func.functional_call(
            patched, dict(patched.named_parameters()), kwargs=inputs | {"use_cache": False}
        )
    assert torch.equal(found.logits.clone(), expected.logits)


@pytest.mark.parametrize("read", [lambda x: x / 2, lambda x: x[:, 1:], lambda x: x.softmax(-1), lambda x: x.clone()])
def test_what_was_read_before_a_step_stays(read):
    plain, patched, inputs = _models()
    values = []
    for model in (plain, patched):
        out = tiny.call(model, **inputs)
        value = read(out.logits)
        out.loss.backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        values.append(value.clone())
    assert torch.equal(*values)


# Arming ---------------------------------------------------------------------------------------------------------------


def _forward_hook(model):
    model.lm_head.register_forward_hook(lambda module, args, out: out.mul_(2.0))


def _full_backward_hook(model):
    model.lm_head.register_full_backward_hook(lambda module, into, of: (2 * into[0],))


def _pre_hook(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],))


def _spectral_norm(model):
    torch.nn.utils.parametrizations.spectral_norm(model.lm_head)


def _old_weight_norm(model):
    torch.nn.utils.weight_norm(model.lm_head)


def _instance_forward(model):
    head = model.lm_head
    head.forward = lambda x: 2 * torch.nn.functional.linear(x, head.weight)


@pytest.mark.parametrize(
    "change", [_forward_hook, _full_backward_hook, _pre_hook, _spectral_norm, _old_weight_norm, _instance_forward]
)
def test_a_head_that_something_looks_at_computes_its_logits(change):
    plain, patched, inputs = _models()
    torch.manual_seed(0)
    change(plain)
    torch.manual_seed(0)
    change(patched)
    expected, found = (tiny.call(model, **inputs) for model in (plain, patched))
    assert not isinstance(found.logits, LazyLogits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    expected.loss.backward(), found.loss.backward()
    _gradients_alike(plain, patched)
    assert torch.equal(found.logits, expected.logits)


def test_a_teachers_pass_of_the_same_model_within_its_forward():
    plain, patched, inputs = _models()
    teachers = {}
    for model in (plain, patched):

        def teach(module, args, out, model=model):
            if model not in teachers:
                teachers[model] = None
                with torch.no_grad():
                    teachers[model] = model(input_ids=inputs["input_ids"]).logits

        model.model.norm.register_forward_hook(teach)
    expected, found = (tiny.call(model, **inputs) for model in (plain, patched))
    assert tiny.is_lazy(found) and torch.equal(teachers[patched], teachers[plain])
    assert not isinstance(teachers[patched], LazyLogits)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)


def test_two_threads():
    plain, patched, inputs = _models()
    expected = tiny.call(plain, **inputs)
    evaluated = plain(input_ids=inputs["input_ids"]).logits
    failures = []

    def train():
        for _ in range(20):
            out = patched(**inputs)
            if not tiny.is_lazy(out) or abs(out.loss - expected.loss) > 1e-5:
                failures.append("train")

    def evaluate():
        for _ in range(20):
            with torch.no_grad():
                out = patched(input_ids=inputs["input_ids"])
            if isinstance(out.logits, LazyLogits) or not torch.equal(out.logits, evaluated):
                failures.append("evaluate")

    threads = [threading.Thread(target=run) for run in (train, evaluate, train, evaluate)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Memory ---------------------------------------------------------------------------------------------------------------


def test_a_loss_alone_keeps_no_hidden_states(device):
    """On a CPU it does, for infinite gradients of the loss, until the backward."""
    head = torch.nn.Linear(8, 12, device=device)
    hidden = torch.randn(10, 8, device=device, requires_grad=True)
    rows = hidden * 2
    logits = HeadFunction.apply(rows, head.weight, head.bias, Forward())
    source = weakref.ref(logits.cell.source)
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(10, device=device))
    del logits, rows
    gc.collect()
    assert (source() is None) == (hidden.device.type != "cpu")
    loss.backward()
    assert source() is None
    assert hidden.grad is not None


@pytest.mark.parametrize("hook", [False, True])
def test_nothing_waits_for_the_collector(hook):
    """Hidden states and the head's weight go with the graph, also after something asked for the logits' gradient."""
    head = torch.nn.Linear(8, 12)
    logits = HeadFunction.apply(torch.randn(10, 8, requires_grad=True) * 2, head.weight, head.bias, Forward())
    source = weakref.ref(logits.cell.source)
    if hook:  # as FSDP2 does
        logits.register_hook(lambda grad: None)
    gc.disable()
    try:
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(10))
        loss.backward()
        del logits, loss
        assert source() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("retain_graph", [False, True])
def test_hidden_states_and_weight_go_before_the_layers_backward(retain_graph):
    """Hooks on logits, as DeepSpeed's ZeRO-3, keep neither for the layers' backward; a retained graph does."""
    head, seen = torch.nn.Linear(8, 12), []
    hidden = torch.randn(10, 8, requires_grad=True)
    rows = hidden * 2
    logits = HeadFunction.apply(rows, head.weight, head.bias, Forward())
    source = weakref.ref(logits.cell.source)
    logits.register_hook(lambda grad: None)
    hidden.register_hook(lambda grad: seen.append(source() is None))
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(10))
    del logits, rows
    loss.backward(retain_graph=retain_graph)
    assert seen == [not retain_graph]


def test_a_gradient_that_a_hook_keeps_has_values_after_the_backward():
    head, kept = torch.nn.Linear(8, 12), []
    hidden, target = torch.randn(10, 8, requires_grad=True), torch.arange(10)
    logits = HeadFunction.apply(hidden, head.weight, head.bias, Forward())
    logits.register_hook(kept.append)
    loss = torch.nn.functional.cross_entropy(logits, target)
    del logits
    loss.backward()
    plain = torch.nn.functional.linear(hidden, head.weight, head.bias).detach().requires_grad_()
    torch.nn.functional.cross_entropy(plain, target).backward()
    torch.testing.assert_close(kept[0] + 0, plain.grad)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_reads_gradients_of_logits_that_are_gone():
    plain, patched, inputs = _models()
    for model in (plain, patched):
        with torch.autograd.detect_anomaly():
            tiny.call(model, **inputs).loss.backward()
    _gradients_alike(plain, patched)


def test_saving(tmp_path):
    plain, patched, inputs = _models()
    outs = [tiny.call(model, **inputs) for model in (plain, patched)]
    loaded = []
    for out in outs:
        buffer = io.BytesIO()
        torch.save(out.logits.detach(), buffer)
        buffer.seek(0)
        loaded.append(torch.load(buffer))
    assert type(loaded[1]) is torch.Tensor and torch.equal(*loaded)
    assert liger_hw.unpatch(patched) is None


def _penalty(model, loss_of):
    embeds = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    outputs = tiny.call(model, inputs_embeds=embeds, labels=tiny.tokens(2, 6)["labels"])
    return torch.autograd.grad(loss_of(outputs), embeds, create_graph=True)[0].square().sum()


@pytest.mark.parametrize(
    "loss_of", [lambda o: o.loss, lambda o: o.logits.float().logsumexp(-1).mean(), lambda o: o.logits.mean()]
)
def test_second_order_gradients_are_an_error_that_names_the_option(loss_of):
    _, patched = tiny.pair()
    with pytest.raises(RuntimeError, match="no second-order gradients.*skip_logits=False"):
        _penalty(patched, loss_of)


def test_compiled_autograd_is_refused():
    """It took the gradient without memory for an ordinary one, and lost it."""
    _, patched = tiny.pair()
    patched.model.requires_grad_(False)  # a short backward to compile
    loss = tiny.call(patched, **tiny.tokens()).loss
    compiled_autograd = importlib.import_module("torch._dynamo.compiled_autograd")
    with compiled_autograd._enable(torch.compile(backend="eager")), pytest.raises(RuntimeError, match="skip_logits"):
        loss.backward()


def test_second_order_gradients_by_that_option():
    plain, patched = tiny.pair()
    patched.forward = functools.partial(patched.forward, skip_logits=False)
    torch.testing.assert_close(_penalty(patched, lambda o: o.loss), _penalty(plain, lambda o: o.loss))


def test_gradients_by_torch_func():
    labels = tiny.tokens(2, 6)["labels"]
    embeds = torch.randn(2, 6, 64)
    plain, patched = (
        torch.func.grad(lambda x, model=model: tiny.call(model, inputs_embeds=x, labels=labels).loss)(embeds)
        for model in tiny.pair()
    )
    torch.testing.assert_close(patched, plain, rtol=1e-3, atol=1e-5)


def test_a_forward_that_failed_ends_the_record():
    """Later operations on its logits compute at once, from the weight as it was."""
    plain, patched = tiny.pair()
    results = []
    for model in (plain, patched):
        kept = []
        layers = model.model.layers
        layers[0].register_forward_hook(
            lambda module, args, out, model=model, kept=kept: kept.append(
                model.lm_head(out[0] if isinstance(out, tuple) else out)
            )
        )
        layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**tiny.tokens())
        half = kept[0] / 2
        with torch.no_grad():
            model.lm_head.weight.zero_()
        results.append(torch.clone(half))
    assert torch.equal(*results)


def test_a_copy_of_a_head_within_a_forward_is_not_armed():
    _, patched = tiny.pair()
    copies = []
    patched.model.norm.register_forward_hook(lambda *_: copies.append(copy.deepcopy(patched.lm_head)))
    assert tiny.is_lazy(tiny.call(patched, **tiny.tokens()))
    assert type(copies[0](torch.ones(2, 3, 64))) is torch.Tensor


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_weight_of_the_head_written_before_the_backward(autocast, frozen):
    plain, patched, _ = _models()
    errors = []
    for model in (plain, patched):
        model.model.requires_grad_(not frozen)
        with torch.autocast("cpu", enabled=autocast):
            loss = tiny.call(model, **tiny.tokens()).loss
        with torch.no_grad():
            model.lm_head.weight.mul_(1.5)
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(str(error))
    assert len(errors) == (0 if autocast or frozen else 2)
    assert all("modified by an inplace operation" in error for error in errors)
    if not errors:
        torch.testing.assert_close(model.lm_head.weight.grad, plain.lm_head.weight.grad, rtol=0.05, atol=2e-3)


WRITES = {"data": lambda x: x.data.mul_(1.5), "numpy": lambda x: x.detach().numpy().__imul__(1.5)}
KEPT_APART = {  # where the backward of F.linear does not read what was written
    "frozen": contextlib.nullcontext, "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "copied": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("tensor", ["hidden states", "weight"])
@pytest.mark.parametrize("kept_apart", [None, *KEPT_APART])
def test_writes_before_the_backward_that_torch_does_not_count(kept_apart, tensor, write):
    plain, patched, inputs = _models()
    for model in (plain, patched):
        if kept_apart == "frozen":
            (model.lm_head if tensor == "hidden states" else model.model).requires_grad_(False)
        hidden = []
        model.model.norm.register_forward_hook(lambda module, args, y, hidden=hidden: hidden.append(y))
        with KEPT_APART.get(kept_apart, contextlib.nullcontext)():
            loss = tiny.call(model, **inputs).loss
        WRITES[write](hidden[0] if tensor == "hidden states" else model.lm_head.weight)
        if model is patched and kept_apart is None:
            with pytest.raises(RuntimeError, match=f"the head's {tensor} changed .* call backward before"):
                loss.backward()
            return
        loss.backward()
    for p, q in zip(plain.parameters(), patched.parameters()):
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad, rtol=0.05, atol=2e-3)


class Sees(TorchDispatchMode):
    """Mode of a program that changes products, which the logits' own must not be."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) else result


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.nn.functional.linear else result


MODES = {
    "dispatch": [Sees], "two": [Sees, Sees], "functions": [SeesFunctions], "no gradients": [torch.no_grad, Sees],
    "inference": [torch.inference_mode], "inference in a mode": [Sees, torch.inference_mode],
    "mutation": [torch.autograd.graph.allow_mutation_on_saved_tensors],
}  # fmt: skip
READS = {
    "product": lambda x: x * 2, "item": lambda x: x[0, 0], "view": lambda x: x.view(-1),
    "values": lambda x: torch.tensor(x.tolist()), "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "write": lambda x: x.mul_(2),
}  # fmt: skip


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("modes", MODES.values(), ids=MODES)
def test_modes_of_a_program_that_reads_the_logits(modes, read):
    pair = Pair()
    results = []
    for logits in pair.both():
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode())
            results.append(read(logits))
        logits.square().mean().backward()
    found, expected = results
    assert (found.requires_grad, found.is_inference()) == (expected.requires_grad, expected.is_inference())
    torch.testing.assert_close(found.detach(), expected.detach())
    pair.assert_same_gradients()


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("mode", [Sees, torch.inference_mode, torch.autograd.graph.allow_mutation_on_saved_tensors])
def test_a_mode_around_the_backward_alone(mode, family):
    """The mode changes the head's products; a hook reads the gradient of the logits within it."""
    results = []
    for model in tiny.pair(family):
        seen = []
        outputs = model(**tiny.tokens())
        outputs.logits.register_hook(lambda g, seen=seen: seen.append(g * 2))
        with mode():
            outputs.loss.backward()
        results.append(seen + [p.grad for p in model.parameters()])
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "pack",
    [
        lambda x: (x, x.data_ptr())[0],
        lambda x: (x, x.untyped_storage().nbytes())[0],
        lambda x: torch.from_numpy(x.detach().numpy().copy()),
    ],
)
def test_hooks_of_saved_tensors_find_memory(pack):
    pair = Pair()
    for logits in pair.both():
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            assert logits.shape == (2, 5, 12) and logits.size(-1) == 12
            assert logits is pair.real or not computed(logits)
            (logits.square() + logits.softmax(-1)).mean().backward()
    pair.assert_same_gradients()


@pytest.mark.parametrize("loss_of", [lambda out: out.loss, lambda out: out.logits.square().mean()], ids=["loss", "own"])
@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("head", ["tied", "trained", "frozen"])
def test_a_written_weight_of_which_hooks_of_saved_tensors_keep_a_copy(head, copies, loss_of):
    """Torch looks for no writes within hooks, and mixes old and new weights where they copy none."""
    gradients = []
    for model in tiny.pair(tie_word_embeddings=head == "tied"):
        model.lm_head.requires_grad_(head != "frozen")
        pack = torch.clone if copies else lambda x: x
        with torch.autograd.graph.saved_tensors_hooks(lambda x, pack=pack: pack(x.detach()), lambda x: x):
            loss = loss_of(model(**tiny.tokens()))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.requires_grad])
    for expected, found in zip(*gradients):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "place, name", [(torch.nn.functional, "linear"), (torch, "tanh"), (torch.Tensor, "__matmul__")]
)
def test_functions_that_a_program_replaces_after_the_forward(place, name, monkeypatch):
    results = []
    for model in tiny.pair("gemma2"):
        out, gradients = tiny.call(model, **tiny.tokens()), []
        out.logits.register_hook(lambda g, gradients=gradients: gradients.append(g.clone()))
        with monkeypatch.context() as patch:
            own = getattr(place, name)
            patch.setattr(place, name, lambda *args, own=own: own(*args) * 1.5)
            logits = out.logits.clone()
            (out.loss + logits.square().mean()).backward()
        results.append([logits, *gradients, model.lm_head.weight.grad])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_cross_entropy_that_a_program_replaces_before_the_backward(monkeypatch):
    pair, own = Pair(recording=True), torch.nn.functional.cross_entropy
    losses = []
    for logits in pair.both():
        logits.register_hook(lambda g: g * 2)
        losses.append(own(logits.view(-1, 12), torch.arange(10)))
    monkeypatch.setattr(torch.nn.functional, "cross_entropy", lambda *args, **options: own(*args, **options) * 1.5)
    for loss in losses:
        loss.backward()
    pair.assert_same_gradients()


def test_a_head_whose_weight_is_every_second_column():
    plain, patched = tiny.pair()
    for model in (plain, patched):
        model.lm_head.weight.data = model.lm_head.weight.data.repeat_interleave(2, 1)[:, ::2]
    tiny.assert_learns_alike(plain, patched, **tiny.tokens())
