"""Pass values of wrong types: the error names argument, value and allowed types."""

import inspect
from fractions import Fraction
from typing import get_args

import numpy
import pytest
import torch

import liger_hw
from liger_hw import use_backend
from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.checks import ARGUMENT_KINDS, names_arguments
from liger_hw.dispatch import OPS
from liger_hw.transformers import functional
from liger_lab.cases import CASES, DIFFERENTIABLE, small_cases

TEXT, NUMBERS = "text", [1.0, 2.0]


def losses():
    """Calls of every loss that reach all of their arguments."""
    x, weight, labels = torch.randn(4, 5, 8), torch.randn(31, 8), torch.randint(0, 31, (4, 5))
    flat, of_rows = {"x": x.reshape(20, 8), "weight": weight}, labels.reshape(20)
    reference = {"ref_x": x, "ref_weight": weight, "beta": 0.1}
    text = {"x": x, "weight": weight, "labels": labels}
    yield liger_hw.preference_loss, text | reference | {"nll_labels": labels, "alpha": 1.0}
    yield liger_hw.unpaired_preference_loss, text | reference | {"preferred": torch.ones(4, dtype=torch.bool)}
    tokens = {"tokens": labels, "advantages": torch.randn(4)}
    yield liger_hw.policy_loss, {"x": x, "weight": weight} | tokens | reference
    yield liger_hw.policy_loss_of_logits, {"logits": torch.randn(4, 5, 31), "beta": 0.0} | tokens
    yield (
        liger_hw.distillation_loss,
        flat | {"teacher_x": x.reshape(20, 8), "teacher_weight": weight, "labels": of_rows},
    )
    top = {"teacher": torch.randn(20, 3), "teacher_tokens": torch.arange(3).repeat(20, 1)}
    yield liger_hw.offline_distillation_loss, flat | top | {"labels": of_rows, "teacher_lse": torch.randn(20)}
    yield liger_hw.multi_token_loss, {"heads": [x, x], "weight": weight, "labels": labels}
    yield liger_hw.token_loss, flat | {"formula": lambda log_probs, entropy: (-log_probs,), "tokens": of_rows}
    yield (
        liger_hw.sequence_loss,
        {"formula": lambda log_probs, *_: log_probs.sum(), "x": x, "weight": weight, "tokens": labels},
    )


def calls():
    torch.manual_seed(0)
    found = []
    for name, op in OPS.items():
        inputs, options = next(iter(small_cases(name, torch.float32)))
        arguments = dict(zip(inspect.signature(op).parameters, inputs)) | options
        if "labels" in inspect.signature(op).parameters:
            arguments["labels"] = torch.zeros(len(inputs[0]), dtype=torch.int64)
        found.append(pytest.param(op, arguments, id=name))
    return found + [pytest.param(loss, arguments, id=loss.__name__) for loss, arguments in losses()]


@pytest.mark.parametrize("function, arguments", calls())
def test_the_wrong_kind_is_named(function, arguments):
    with use_backend(None):
        function(**arguments)
        for name, parameter in inspect.signature(function).parameters.items():
            kinds = [ARGUMENT_KINDS.get(kind) for kind in get_args(parameter.annotation) or (parameter.annotation,)]
            if None in kinds:  # a flag, for which every value is true or false; the options of a loss
                continue
            for wrong in (TEXT, NUMBERS, None) if parameter.default is parameter.empty else (TEXT, NUMBERS):
                if isinstance(wrong, tuple(kind for kind, _ in kinds)):
                    continue
                with pytest.raises(ValueError, match=f"^{name}: got .*, allowed: "):
                    function(**arguments | {name: wrong})


def test_no_gradient_is_lost():
    """Kernels take numbers and class weights as constants, so one that needs a gradient is an error everywhere."""
    for function, arguments in (call.values for call in calls() if call.id in OPS):
        names = [
            name for name, parameter in inspect.signature(function).parameters.items()
            if float in (parameter.annotation, *get_args(parameter.annotation)) or name == "ce_weight"
        ]  # fmt: skip
        for name in names:
            learned = torch.ones(arguments["weight"].shape[0] if name == "ce_weight" else (), requires_grad=True)
            with use_backend(None), pytest.raises(ValueError, match=f"^{name}: got .*, allowed: "):
                function(**arguments | {name: learned})


@pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")
def options_of_ops():
    """Yield each op that has a case, tensors of the case, and all its numbers by name."""
    for name in CASES:
        tensors, options = next(iter(small_cases(name, OPS[name].dtypes[0])))
        named = list(inspect.signature(OPS[name].reference).parameters.values())[len(tensors) :]
        numbers = {p.name: p.default for p in named} | options
        numbers = {name: n for name, n in numbers.items() if type(n) in (int, float)}
        yield pytest.param(name, tensors, options, numbers, id=name)


def other_types(number):
    """Return a number as those of numpy, as a tensor, and as a fraction."""
    types = [numpy.int64, numpy.int32] if type(number) is int else [numpy.float64, numpy.float32, Fraction]
    return [kind(number) for kind in types] + [torch.tensor(number, dtype=torch.float64 if types[2:] else torch.int64)]


@pytest.mark.parametrize("name, tensors, options, numbers", list(options_of_ops()))
def test_numbers_of_other_types_reach_an_implementation_as_pythons(name, tensors, options, numbers):
    """Triton takes none of them; a tensor, as beta of jsd, is equal to 0 and yet no key 0 of a dict."""
    received = []

    def implementation(*args, **kwargs):
        received.append(OPS[name].arguments(*args, **kwargs))

    checked = OPS[name].register.__self__._checked(implementation)
    for option, number in numbers.items():
        for value in other_types(number):
            checked(*tensors, **options | {option: value})
            assert type(getattr(received.pop(), option)) in (int, float), (option, type(value))


@pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")
@pytest.mark.parametrize("function, arguments", list(losses()))
def test_losses_take_numbers_of_other_types(function, arguments):
    """A schedule of numpy's gives a beta of fp32, and a config an ignore_index of int64."""
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    numbers = {name: n for name, n in (defaults | arguments).items() if type(n) in (int, float)}
    numpys = {name: (numpy.int64 if type(n) is int else numpy.float32)(n) for name, n in numbers.items()}
    with use_backend("triton" if interpreting() else None):
        expected, found = (function(**arguments | n) for n in (numbers, numpys))
    if isinstance(expected, tuple):
        expected, found = expected[0], found[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["jsd_beta", "chunk_mem_const"])
def test_options_of_liger_kernels_functions_keep_their_names(name):
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with pytest.raises(ValueError, match=f"^{name}: got -1"):
        if name == "jsd_beta":
            functional.liger_fused_linear_jsd(x, weight, x, weight, jsd_beta=-1.0)
        else:
            functional.liger_fused_linear_cross_entropy(x, weight, torch.tensor([1, 2, 3]), chunk_mem_const=-1)


def test_a_number_in_the_memory_of_another_device_is_refused():
    with pytest.raises(ValueError, match="eps: got .* on meta, allowed: a number"):
        liger_hw.rms_norm(torch.ones(2, 8), torch.ones(8), torch.ones((), device="meta"))


def test_complex_arguments_are_named():
    x, weight = torch.randn(2, 8), torch.ones(8, dtype=torch.complex64)
    with use_backend("triton"), pytest.raises(ValueError, match="^weight: got torch.complex64 .*, allowed: real"):
        liger_hw.rms_norm(x, weight)


LABELLED = [(call.values, name) for call in calls() for name in ("target", "tokens", "labels")
            if name in (arguments := call.values[1]) and not arguments[name].is_floating_point()]  # fmt: skip


@pytest.mark.parametrize(
    "call, name", LABELLED, ids=lambda value: value if isinstance(value, str) else value[0].__name__
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16], ids=str)
def test_labels_are_whole_numbers(call, name, dtype):
    function, arguments = call
    with use_backend(None), pytest.raises(ValueError, match=f"^{name}: got {dtype} of .* allowed: int64 or int32"):
        function(**arguments | {name: arguments[name].to(dtype)})


def test_distillation_without_hard_labels_refuses_floats_too():
    x, weight = torch.randn(4, 8), torch.randn(31, 8)
    with pytest.raises(ValueError, match="^labels: got torch.float32"):
        liger_hw.distillation_loss(x, weight, x, weight, torch.zeros(4), hard_weight=0.0)


def test_missing_and_unknown_arguments():
    with pytest.raises(TypeError, match="missing a required argument: 'weight'"):
        liger_hw.glu_linear(torch.ones(2, 4), None)
    with pytest.raises(TypeError, match="missing a required argument: 'logits'"):
        liger_hw.cross_entropy()
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        liger_hw.rms_norm(torch.ones(2, 4), epsilon=1e-6)


def test_other_errors_are_unchanged():
    @names_arguments
    def fails(x: torch.Tensor, scale: float = 1.0):
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="^out of luck$"):
        fails(torch.ones(2), 3)
    with pytest.raises(ValueError, match=r"^scale: got torch.float32 of shape \(2,\) on cpu, allowed: a number$"):
        fails(torch.ones(2), torch.ones(2))


@pytest.mark.parametrize("reduced", [torch.ones(2), torch.ones(0)])
def test_items_are_one_number(reduced):
    x, weight, target = torch.randn(4, 8), torch.randn(31, 8), torch.zeros(4, dtype=torch.int64)
    with use_backend(None):
        for call in (
            lambda: liger_hw.cross_entropy(x, target, num_items=reduced),
            lambda: liger_hw.fused_linear_cross_entropy(x, weight, target, num_items=reduced),
            lambda: liger_hw.policy_loss(x[None], weight, target[None], torch.ones(1), num_items=reduced, beta=0.0),
        ):
            with pytest.raises(ValueError, match="^num_items: got .* a tensor of one"):
                call()


@pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_kernels_refuse_dtypes_that_they_would_round(name):
    """On meta tensors, of which a launch computes nothing."""
    inputs, options = next(iter(small_cases(name, torch.float32)))
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    with use_backend("nvidia"):
        OPS[name](*(x.to("meta") for x in inputs), **options)
        first = next(iter(inspect.signature(OPS[name]).parameters))
        with pytest.raises(ValueError, match=f"^{first}: got torch.float64,.*use_backend"):
            OPS[name](*(x.to("meta") for x in wide), **options)


@pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")
@pytest.mark.parametrize(
    "op, wide",
    [("swiglu", "up"), ("geglu", "up"), ("jsd", "log_p"), ("kl_div", "target"), ("tvd", "p"), ("rope", "k")],
)
def test_kernels_refuse_a_wider_second_argument(op, wide):
    inputs, options = next(iter(small_cases(op, torch.float32)))
    inputs = [x.to("meta") for x in inputs]
    inputs[1] = inputs[1].double()
    with use_backend("nvidia"), pytest.raises(ValueError, match=f"^{wide}: got torch.float64 of .*use_backend"):
        OPS[op](*inputs, **options)


@pytest.mark.skipif(not AVAILABLE, reason="kernels need the package triton")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap])
def test_transforms_are_plain_torchs(transform):
    x, weight, target = torch.randn(4, 8), torch.randn(31, 8), torch.zeros(4, dtype=torch.int64)

    def loss(x):
        return liger_hw.fused_linear_cross_entropy(x, weight, target).sum()

    x = x if transform is torch.func.grad else x[None]
    with use_backend(None), pytest.raises(RuntimeError, match="no transforms of torch.func .*'reference'"):
        transform(loss)(x)
    with use_backend("reference"):
        transform(loss)(x)


def test_unknown_names_suggest_the_nearest():
    x, weight = torch.randn(2, 3, 8), torch.randn(31, 8)
    text = {"x": x, "weight": weight, "labels": torch.zeros(2, 3, dtype=torch.int64)}
    policy = {"x": x, "weight": weight, "tokens": text["labels"], "advantages": torch.ones(2)}
    target = torch.zeros(3, dtype=torch.int64)
    for call, words in (
        (lambda: liger_hw.patch(torch.nn.Linear(2, 2), rms_nrom=True), "flag 'rms_nrom'; did you mean 'rms_norm'? Fl"),
        (lambda: use_backend("nvidia:sm42").__enter__(), "backend 'nvidia:sm42'. LIGER_HW_BACKEND and use_backend ta"),
        (lambda: use_backend("gfx1100").__enter__(), "backend 'gfx1100'; did you mean 'amd:gfx1100'? LIGER_HW_BACKEND"),
        (lambda: liger_hw.cross_entropy(x[0], target, reduction="maen"), "reduction 'maen'; did you mean 'mean'? Re"),
        (lambda: liger_hw.geglu(x, x, approximate="tan"), "approximate 'tan'; did you mean 'tanh'? Approximations: "),
        (lambda: liger_hw.preference_loss(**text, loss_type="simp"), "loss_type 'simp'; did you mean 'simpo'? Loss ty"),
        (lambda: liger_hw.preference_loss(**text, gama=1), "option 'gama'. Options of sigmoid: none"),
        (lambda: liger_hw.policy_loss(**policy, loss_type=["grpo"]), "loss_type ['grpo']; did you mean 'grpo'? Loss t"),
        (lambda: liger_hw.policy_loss(**policy, epsilon=1), "option 'epsilon'; did you mean 'epsilon_low'? Options: "),
        (lambda: liger_hw.PolicyLoss(epsilon_hig=1), "option 'epsilon_hig'; did you mean 'epsilon_high'? Options of"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value).startswith(f"unknown {words}")


def test_nothing_at_all_to_compare():
    nothing = torch.zeros(0, 0)
    with use_backend("reference"):
        assert liger_hw.kl_div(nothing, nothing) == liger_hw.tvd(nothing, nothing, "mean") == 0


def test_the_fused_linear_kl_divergence_of_liger_kernels_name():
    from liger_hw.transformers.functional import liger_fused_linear_kl_div

    x, weight, target = torch.randn(4, 8).double(), torch.randn(31, 8).double(), torch.rand(4, 31).double()
    labels = torch.zeros(4, dtype=torch.int64)
    assert liger_fused_linear_kl_div(x, weight, target, labels).dtype == torch.float64
    for name, change in {"student_input": TEXT, "target": None, "shift_labels": labels.float(), "eps": TEXT}.items():
        arguments = {"student_input": x, "student_weight": weight, "target": target, "shift_labels": labels}
        with pytest.raises(ValueError, match=f"^{name}: got "):
            liger_fused_linear_kl_div(**arguments | {name: change})


@pytest.mark.parametrize(
    "call, error, words",
    [
        (
            lambda x, w, t: liger_hw.policy_loss(x, w, t, x[:, 0, 0], old_logps=t), ValueError,
            "'old_logps'; did you mean 'old_log_probs'",
        ),
        (
            lambda x, w, t: liger_hw.preference_loss(x, w, t, ref_weigth=w), ValueError,
            "'ref_weigth'; did you mean 'ref_weight'",
        ),
        (
            lambda x, w, t: liger_hw.fused_linear_cross_entropy(x[0], w, t[0], ignore_idx=3), TypeError,
            r"fused_linear_cross_entropy\(\) got .* 'ignore_idx'; did you mean 'ignore_index'",
        ),
    ],
)  # fmt: skip
def test_a_misspelt_argument_of_a_loss(call, error, words):
    """The nearest name may be an argument of the function, not one of its options."""
    with pytest.raises(error, match=words):
        call(torch.randn(2, 3, 4), torch.randn(5, 4), torch.zeros(2, 3, dtype=torch.int64))
