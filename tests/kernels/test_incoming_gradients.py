"""Every op takes incoming gradients of any size that a loss scale makes: from fp16's least to near its largest.

The losses themselves are in tests/losses/test_loss_scale.py; `liger_lab.tools.loss_scale` tabulates
the errors of both.
"""

import functools
import itertools

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from unreached import Unreached

from liger_hw import use_backend
from liger_hw._triton import interpreting
from liger_hw.dispatch import OPS
from liger_hw.testing import parity
from liger_lab.cases import DIFFERENTIABLE, small_cases

CASES_OF_AN_OP = 3
SAVED = ("aten.mm aten.addmm", "aten", "liger_hw", "")  # names of operations that a checkpoint saves; "" is all
DTYPES = [torch.float16, torch.bfloat16]
SCALES = [2.0**k for k in (0, 8, 16, 24, 28)]  # loss scales; the last takes gradients near the largest of fp16
HERE = [(dtype, scale) for dtype in DTYPES for scale in SCALES]
if interpreting():  # slow: both ends in fp16; bf16 has the exponents of fp32
    HERE = [(torch.float16, SCALES[0]), (torch.float16, SCALES[-1]), (torch.bfloat16, SCALES[2])]
ITEMS = 2.0**20  # what a mean over a batch divides by


class Scaled(torch.autograd.Function):
    """The identity, whose incoming gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.scale, None


@pytest.fixture
def in_turns(pytestconfig):
    """Whether each op takes one of several variants, as each takes seconds in the interpreter."""
    return interpreting() and pytestconfig.getoption("--archs") == "turns"


def scaled(op, scale):
    def run(*inputs, **options):
        outputs = op(*inputs, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(y if y is None or not y.requires_grad else Scaled.apply(y, scale) for y in outputs)

    return run


def check(op, scale, dtype, backend, device, first=0, cases=CASES_OF_AN_OP):
    """Hold the op for incoming gradients times `scale` to the parity rule; return the worst share."""
    share = 0.0
    for inputs, options in itertools.islice(small_cases(op.__name__, dtype, device), first, first + cases):
        wide = [
            x.detach().double().requires_grad_(x.requires_grad) if torch.is_tensor(x) and x.is_floating_point() else x
            for x in inputs
        ]
        exact, plain = (parity.run(scaled(op.reference, scale), of, options) for of in (wide, inputs))
        with use_backend(backend):
            ours = parity.run(scaled(op, scale), inputs, options)
        what = f"{op.__name__} on {backend}, {dtype}, incoming gradients times {scale:g}"
        share = max(share, parity.compare(exact, plain, ours, what))
    return share


@pytest.mark.parametrize(("dtype", "scale"), HERE, ids=str)
@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_incoming_gradients_of_any_size(op, dtype, scale, backend, device, in_turns):
    if op in ("experts", "lora_glu_linear") and dtype == torch.bfloat16 and interpreting():
        pytest.skip("the interpreter truncates to bf16, and here several roundings follow one another")
    part = (HERE.index((dtype, scale)), 1) if in_turns else ()  # each of the three pairs takes another case
    arguments = OPS[op], scale / ITEMS, dtype, backend, device, *part
    try:
        check(*arguments)
    except AssertionError as error:
        if "bias" not in str(error):
            raise
        check(*arguments)  # with other numbers: of 1,000 sums of roundings one exceeds its bound by chance


def gradients_of(op, inputs, options, backend, reaches):
    """Return the gradients of an op's inputs where only the results that `reaches` names by place pass one on."""
    leaves = [x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in inputs]
    views = [x.view_as(x) if torch.is_tensor(x) and x.requires_grad else x for x in leaves]  # as in a model
    with use_backend(backend):
        outputs = OPS[op](*views, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    learning = [y for y in outputs if y is not None and y.requires_grad]
    parts = [y if i in reaches else Unreached.apply(y) for i, y in enumerate(learning)]
    anchor = torch.zeros((), requires_grad=True, device=learning[0].device)
    (anchor + sum(part.square().sum() for part in parts)).backward()
    return [x.grad for x in leaves if torch.is_tensor(x) and x.requires_grad], len(learning)


def results_that_learn(op, inputs, options, place):
    """Tell for each result whether it requires a gradient where the input at `place` alone does."""
    inputs = [x.detach().requires_grad_(i == place) if is_float(x) else x for i, x in enumerate(inputs)]
    outputs = op(*inputs, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [y is not None and y.requires_grad for y in outputs]


def is_float(x):
    return torch.is_tensor(x) and x.is_floating_point()


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_results_require_a_gradient_as_the_references(op, backend, device):
    inputs, options = next(iter(small_cases(op, torch.float32, device)))
    for place, x in enumerate(inputs):
        if is_float(x) and x.requires_grad:
            with use_backend("reference"):
                expected = results_that_learn(OPS[op], inputs, options, place)
            with use_backend(backend):
                assert results_that_learn(OPS[op], inputs, options, place) == expected, place


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_no_incoming_gradient_stays_none(op, backend, device):
    """An optimizer decays the weight whose gradient is zeros, not the one without a gradient."""
    inputs, options = next(iter(small_cases(op, torch.float32, device)))
    grads, results = gradients_of(op, inputs, options, backend, ())
    assert all(grad is None for grad in grads)
    for place in range(results if results > 1 else 0):
        ours, plain = (gradients_of(op, inputs, options, name, (place,))[0] for name in (backend, "reference"))
        assert [grad is None for grad in ours] == [grad is None for grad in plain]
        for grad, exact in zip(ours, plain):
            if exact is not None:
                torch.testing.assert_close(grad, exact, rtol=1e-3, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_gradients_have_memory_of_their_own(op, backend, device, in_turns):
    """Autograd keeps a view of the incoming gradient as a leaf's gradient, and adds later ones to the program's."""
    for inputs, options in itertools.islice(small_cases(op, torch.float32, device), 1 if in_turns else CASES_OF_AN_OP):
        leaves = [x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in inputs]
        with use_backend(backend):
            outputs = OPS[op](*leaves, **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs = [y for y in outputs if y is not None and y.requires_grad]
        incoming = [torch.ones_like(y) for y in outputs]
        torch.autograd.backward(outputs, incoming)
        theirs = {x.untyped_storage().data_ptr() for x in (*incoming, *outputs) if x.numel()}
        grads = [x.grad for x in leaves if torch.is_tensor(x) and x.grad is not None]
        assert not any(grad.untyped_storage().data_ptr() in theirs for grad in grads)


def in_other_strides(x):
    """Return the same values with their dimensions in the reverse order in memory, and gaps."""
    return torch.stack((x, x), 0).mT.contiguous().mT[0] if x.ndim > 1 else torch.stack((x, x), -1)[..., 0]


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_hooks_that_return_kept_tensors_with_other_strides(op, backend, device, in_turns):
    for inputs, options in itertools.islice(small_cases(op, torch.float32, device), 1 if in_turns else CASES_OF_AN_OP):
        with use_backend(backend):
            expected = parity.run(OPS[op], inputs, options)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, in_other_strides):
                found = parity.run(OPS[op], inputs, options)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_what_hooks_keep_of_saved_tensors_stays(op, backend, device):
    """A backward may write over what it saved, but not over what a program's hook keeps."""
    inputs, options = next(iter(small_cases(op, torch.float32, device)))
    takes_logits = op in ("cross_entropy", "selective_log_softmax")  # whose in_place gives them up
    if "in_place" in OPS[op].arguments._fields and not takes_logits:
        options = options | {"in_place": True}
    leaves = [x.detach().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in inputs]
    results = [x * 1 if torch.is_tensor(x) and x.requires_grad else x for x in leaves]  # in_place takes no leaves
    kept = []

    def keep(x):
        kept.append((x, x.clone()))
        return x

    with use_backend(backend), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        outputs = OPS[op](*results, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(y.square().sum() for y in outputs if y is not None and y.requires_grad).backward()
    for x, before in kept:
        torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", DIFFERENTIABLE)
def test_selective_checkpointing_gets_what_it_saved(op, backend, device, in_turns):
    """It hands the results of saved operations to the recomputation: nothing may have written to them."""
    inputs, options = next(iter(small_cases(op, torch.float32, device)))

    def policy(names, context, operation, *args, **kwargs):
        saves = str(operation).startswith(names) if names else True
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    def computed(*inputs):
        outputs = OPS[op](*[x * 1 if is_float(x) else x for x in inputs], **options)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(y.sin() if y is not None and y.requires_grad else y for y in outputs)

    def checkpointed(names, *inputs):
        contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(policy, names))
        return checkpoint(computed, *inputs, use_reentrant=False, context_fn=contexts)

    with use_backend(backend):
        expected = parity.run(computed, inputs, {})
        for saved in [SAVED[list(DIFFERENTIABLE).index(op) % len(SAVED)]] if in_turns else SAVED:
            names = tuple(f"{name}." for name in saved.split())
            found = parity.run(functools.partial(checkpointed, names), inputs, {})
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, equal_nan=True, msg=lambda text, saved=saved: f"{saved}: {text}")
