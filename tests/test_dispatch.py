from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from liger_hw import backends, dispatch, use_backend
from liger_hw._triton import AVAILABLE
from liger_hw.backends import nvidia
from liger_hw.checks import check
from liger_hw.dispatch import OPS, differentiable, op
from liger_hw.kernels.norms.rms_norm import rms_norm
from liger_hw.losses.sequences import token_loss
from liger_hw.testing.inputs import flat
from liger_lab.cases import CASES, DIFFERENTIABLE, small_cases


@pytest.fixture
def double():
    """An op with a reference alone; forgotten again afterwards."""

    @op
    def double(x, by=2):
        """Twice x."""
        return ("reference", x * by)

    yield double
    del dispatch.OPS["double"]


@pytest.fixture
def on_gpu(monkeypatch):
    """CPU tensors are taken to be on an H200."""
    monkeypatch.setitem(backends._devices, torch.device("cpu"), nvidia.ARCHS["sm90"])
    monkeypatch.setattr(backends, "AVAILABLE", True)
    monkeypatch.setattr(backends, "interpreting", lambda: True)


def names(op):
    return op(torch.ones(2))[0]


def register(op, *backend_names):
    for name in backend_names:
        op.register(name)(lambda x, by=2, name=name: (name, x * by))


def test_the_reference_documents_the_op(double):
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")
    assert dispatch.OPS["double"] is double and double.reference(torch.ones(1))[0] == "reference"


def test_arguments_by_position_and_by_name(double):
    for found in (double(torch.ones(1), 3), double(torch.ones(1), by=3), double(x=torch.ones(1), by=3)):
        assert found == ("reference", torch.full((1,), 3.0))


def test_the_most_specific_implementation_serves(double, on_gpu):
    assert names(double) == "reference"
    for name in ("triton", "nvidia", "nvidia:sm90"):
        register(double, name)  # each is seen at once, though the choice before it was remembered
        assert names(double) == name
    register(double, "amd", "nvidia:sm100")
    assert names(double) == "nvidia:sm90"


def test_registering_again_replaces(double, on_gpu):
    register(double, "triton")
    assert names(double) == "triton"
    double.register("triton")(lambda x: ("newer", x))
    assert names(double) == "newer"


def test_unknown_backends_are_refused(double):
    with pytest.raises(ValueError, match="unknown backend 'tritn'; did you mean 'triton'. register takes: cpu, ref"):
        register(double, "tritn")


def test_plain_torch_serves_dtypes_that_kernels_would_round(double, on_gpu):
    register(double, "triton")
    assert names(double) == "triton" and double(torch.ones(2).half())[0] == "triton"
    assert double(torch.ones(2).double())[0] == "reference"
    double.register("cpu")(lambda x, by=2: ("cpu", x * by))  # plain torch in chunks, on any device
    assert double(torch.ones(2).double())[0] == "cpu" and names(double) == "triton"
    with use_backend("nvidia"), pytest.raises(ValueError, match="^x: got torch.float64, allowed: .*'reference'"):
        double(torch.ones(2).double())


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_float64_is_float64_everywhere(name, on_gpu):
    """On a GPU too, where kernels compute in fp32: this GPU could not launch any."""
    torch.manual_seed(0)
    inputs, options = next(iter(small_cases(name, torch.float64)))
    found, expected = (flat(op(*inputs, **options)) for op in (OPS[name], OPS[name].reference))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def results(name, inputs, options):
    copies = tree_map_only(torch.Tensor, lambda x: x.detach().clone(), inputs)  # some ops write in place
    return OPS[name](*copies, **options)


FOLLOW_AUTOCAST = {  # as F.linear and F.conv2d
    "glu_linear", "lora_linear", "lora_glu_linear", "fused_linear_cross_entropy", "fused_linear_selective_log_softmax",
    "multi_token_attention",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CASES if name in OPS and name not in FOLLOW_AUTOCAST])
def test_autocast_rounds_no_reference(name):
    for inputs, options in small_cases(name, torch.float32, torch.device("cpu")):
        if name == "cross_entropy":
            inputs = inputs[0], inputs[1].clamp(0), *inputs[2:]  # a CPU refuses the absent targets of these cases
        expected = results(name, inputs, options)
        with torch.autocast("cpu", torch.bfloat16):
            found = results(name, inputs, options)
        torch.testing.assert_close(flat(found), flat(expected), rtol=0, atol=0, equal_nan=True)


def test_losses_in_float64_are_plain_torchs(on_gpu):
    x, weight, tokens = torch.randn(6, 8).double().requires_grad_(), torch.randn(31, 8).double(), torch.arange(6)
    found = token_loss(lambda log_probs, entropy: (-log_probs,), x, weight, tokens, chunk_memory=500)[0]
    expected = torch.nn.functional.cross_entropy(x @ weight.t(), tokens, reduction="sum")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, x)[0] for loss in (found, expected)), rtol=1e-11, atol=1e-12)


def test_forced_means_forced(double, on_gpu):
    register(double, "triton", "nvidia")
    with use_backend("reference"):
        assert names(double) == "reference"
    with use_backend("nvidia:sm90"):
        assert names(double) == "nvidia"
    del double.implementations["triton"], double.implementations["nvidia"]
    with use_backend("nvidia"), pytest.raises(NotImplementedError) as error:
        double(torch.ones(1))
    for word in ("double", "'nvidia'", "nvidia:sm90, nvidia, triton", "it has reference", "LIGER_HW_BACKEND"):
        assert word in str(error.value)


def test_each_choice_is_logged_once_with_its_reason(double, on_gpu, monkeypatch, caplog):
    monkeypatch.setattr("liger_hw.dispatch.ops.AVAILABLE", True)
    register(double, "triton")
    double(torch.ones(2))  # before the level is set
    caplog.set_level("DEBUG", "liger_hw")
    for x in (torch.ones(2), torch.ones(3), torch.ones(2).half(), torch.ones(2).half(), torch.ones(2).double()):
        double(x)
        double.choose(x.device, x.dtype)  # as ops that ask another
    with use_backend("reference"):
        double(torch.ones(2))
    assert [record.getMessage().partition(" of torch.")[2] for record in caplog.records] == [
        "float16 on cpu: implementation 'triton', the most specific one for this device",
        "float64 on cpu: implementation 'reference', kernels would round this dtype",
        "float32 on cpu: implementation 'reference', 'reference' is forced",
    ]


def test_a_vendor_whose_device_is_absent(double, on_gpu):
    """Its own implementation, or the portable one; never that of the device that is present."""
    register(double, "triton", "nvidia", "amd:gfx942")
    with use_backend("amd:gfx942"):
        assert names(double) == "amd:gfx942"
    with use_backend("intel"):
        assert names(double) == "triton"


def test_cpu_tensors_cannot_run_kernels(double, monkeypatch):
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    monkeypatch.setattr(backends, "AVAILABLE", True)
    register(double, "triton")
    assert names(double) == "reference"
    with use_backend("triton"), pytest.raises(RuntimeError) as error:
        double(torch.ones(1))
    for word in ("'triton'", "cpu", "TRITON_INTERPRET=1", "unset LIGER_HW_BACKEND"):
        assert word in str(error.value)
    monkeypatch.setattr(backends, "interpreting", lambda: True)
    with use_backend("triton"):
        assert names(double) == "triton"


@pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")
@pytest.mark.parametrize("name", ["nvidia", "amd", "intel"])
def test_meta_tensors_launch_nothing(name):
    """What the tuner and `liger-hw launches` ask with."""
    x, w = torch.ones(4, 64, device="meta", requires_grad=True), torch.ones(64, device="meta", requires_grad=True)
    with use_backend(name):
        y = rms_norm(x, w)
        y.backward(torch.empty_like(y))
    assert y.is_meta and x.grad.shape == x.shape and w.grad.shape == w.shape


def test_without_triton(double, monkeypatch):
    monkeypatch.setattr(backends, "AVAILABLE", False)
    register(double, "triton")
    assert names(double) == "reference"
    with use_backend("nvidia"), pytest.raises(RuntimeError, match="the package triton is not installed"):
        double(torch.ones(1))


class Doubled(dispatch.Function):
    @staticmethod
    def forward(ctx, x, by):
        return x * by

    @staticmethod
    def backward(ctx, dy):
        return dy * 2, None


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])  # inference mode: torch itself drops them
def test_tangents_are_refused_and_not_dropped(mode):
    """A tangent that is missing counts as zero."""
    x = torch.ones(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones(3))
        with mode():
            with pytest.raises(RuntimeError, match="Doubled has no forward-mode .*use_backend.'reference'"):
                Doubled.apply(dual, 2)
            assert torch.equal(Doubled.apply(x, 2), 2 * x)  # carries none


def test_check_describes_tensors_only_when_it_fails():
    check(True, "x", object(), "anything")
    with pytest.raises(ValueError, match=r"^x: got torch.float32 of shape \(2,\) on cpu, allowed: integers$"):
        check(False, "x", torch.ones(2), "integers")


class Numbers(NamedTuple):
    factor: int
    limit: float | None


class Rows(NamedTuple):
    values: torch.Tensor
    weights: torch.Tensor | None


@pytest.mark.skipif(not AVAILABLE, reason="ops are registered beside kernels, which need the package triton")
def test_named_tuples_are_one_argument_here_and_fields_of_the_registered_op():
    @dispatch.raw(lambda x, rows, numbers, flags: torch.empty_like(x))
    def sums_for_test_dispatch(
        x: torch.Tensor, rows: Rows, numbers: Numbers, flags: Sequence[bool]
    ) -> torch.Tensor:  # fmt: skip
        assert isinstance(rows, Rows) and isinstance(numbers, Numbers)
        return (x + rows.values) * numbers.factor

    def call(x):
        return sums_for_test_dispatch(x, Rows(x * 2, None), Numbers(3, None), (True, False))

    names = [argument.name for argument in sums_for_test_dispatch.opaque._schema.arguments]
    assert names == ["x", "rows_values", "rows_weights", "numbers_factor", "numbers_limit", "flags"]
    x = torch.arange(3.0)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert torch.equal(call(x), 9 * x) and torch.equal(compiled(x), 9 * x)


def test_no_zeros_for_results_without_a_gradient():
    @differentiable("y rows")
    def twice(x: torch.Tensor):
        return 2 * x, 3 * x

    @twice.backward(without_gradient="rows")
    def _(dy, *, x_grad):
        return 2 * dy

    x = torch.ones(3, requires_grad=True)
    y, _ = twice.apply(x)
    with torch.autograd.profiler.profile() as profile:
        y.backward(torch.ones(3))
    assert x.grad.tolist() == [2, 2, 2] and "aten::zeros" not in {event.name for event in profile.function_events}
