"""Run every operation of torch's own tests on lazy and on ordinary logits."""

import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves

from liger_hw.patching.head_call import Forward
from liger_hw.patching.lazy_logits import lazy_logits

pytest.importorskip("expecttest")  # torch's list of operations needs it
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

SAMPLES = 2  # of each operation
WITHOUT_VALUES = ("empty", "new_empty")  # return memory as it comes


def _suits(x):
    """Return whether a product with the identity can make logits equal to `x`: finite values."""
    dense = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.ndim >= 2 and x.numel() > 0
    return dense and x.is_contiguous() and x.dtype == torch.float32 and x.isfinite().all()


def _operands(x):
    return x.detach().clone().requires_grad_(x.requires_grad), torch.eye(x.shape[-1])


def _outcome(function, x, hidden):
    """What the operation returns and the gradient of `hidden`, or the error."""
    torch.manual_seed(0)
    try:
        outputs = tree_leaves(function(x))
    except Exception as error:
        return type(error)
    roots = [y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]
    try:
        if roots:
            torch.manual_seed(1)
            torch.autograd.backward(roots, [torch.randn_like(y) for y in roots])
    except Exception as error:
        return type(error)
    return outputs, hidden.grad


def _same(found, expected):
    if not isinstance(expected, torch.Tensor):
        return found is expected or found == expected or expected != expected
    alike = (found.shape, found.dtype, found.requires_grad) == (expected.shape, expected.dtype, expected.requires_grad)
    if expected.layout != torch.strided or expected.dtype == torch.complex32:
        return alike
    return alike and torch.allclose(found.detach(), expected.detach(), rtol=1e-6, atol=1e-7, equal_nan=True)


def _differs(operation, sample):
    x = sample.input

    def function(x):
        return operation.op(x, *sample.args, **sample.kwargs)

    hidden, head = _operands(x)
    expected = _outcome(function, torch.nn.functional.linear(hidden, head), hidden)
    hidden, head = _operands(x)
    forward = Forward()
    forward.recording = False
    logits = lazy_logits(hidden, head, None, forward)
    found = _outcome(function, logits, hidden)
    if isinstance(expected, type) or isinstance(found, type):
        return found is not expected
    outputs = len(found[0]) == len(expected[0]) and all(map(_same, found[0], expected[0]))
    if operation.name in WITHOUT_VALUES or operation.name.startswith(WITHOUT_VALUES):
        return len(found[0]) != len(expected[0])
    gradients = (
        found[1] is expected[1]
        or None not in (found[1], expected[1])
        and torch.allclose(found[1], expected[1], rtol=1e-5, atol=1e-6, equal_nan=True)
    )
    return not (outputs and gradients)


def test_every_operation_of_torch():
    wrong, count = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for operation in op_db:
            if torch.float32 not in operation.dtypes:
                continue
            torch.manual_seed(0)
            suitable = 0
            for sample in operation.sample_inputs("cpu", torch.float32, requires_grad=operation.supports_autograd):
                if _suits(sample.input):
                    suitable += 1
                    count += 1
                    if _differs(operation, sample):
                        wrong.append(operation.name)
                if suitable == SAMPLES:
                    break
    assert not wrong and count > 700, (wrong, count)
