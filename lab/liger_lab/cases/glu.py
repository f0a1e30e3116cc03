"""Cases of gated and plain activations, alone and before a projection."""

from math import inf, nan

import torch

from liger_hw.kernels.mlp.glu import ACTIVATIONS
from liger_hw.testing.case import OpCases, Shape
from liger_hw.testing.inputs import put
from liger_lab.models import MODELS, TOKENS

GEGLU_FORMS = ({}, {"approximate": "none"})
WITHOUT_GATE = (("gelu_new", 10240), ("relu_squared", 9216))  # MLPs of Phi-2 and Minitron-4B


def gated(*options):
    """Make the small cases of an op of gate and up, with each of `options`."""

    def cases(new):
        for shape in [(5, 123), (3, 1024), (2, 3, 2500), (1,), (0, 16)]:
            gate, up = new.randn(*shape), new.randn(*shape)
            for option in options:
                yield (gate, up), option
        yield (new.randn(4, 64), new.randn(4, 64, grad=False)), options[0]
        yield (new.randn(4, 64, grad=False), new.randn(4, 64, dtype=torch.float32)), options[0]

    return cases


def wide_gated(*options):
    def cases(new):
        for shape in [(2, 14336), (1, 1001)]:
            for option in options:
                yield (new.randn(*shape), new.randn(*shape)), option

    return cases


def activations(new):
    for shape in [(5, 123), (2, 3, 2500), (1,), (0, 16)]:
        for activation in ACTIVATIONS:
            yield (new.randn(*shape),), {"activation": activation}
    yield (new.randn(4, 64, grad=False),), {}
    values = [((0, i), value) for i, value in enumerate([0.0, -0.0, nan, inf, -inf])]
    for activation in ACTIVATIONS:
        yield (put(new.randn(2, 16), *values),), {"activation": activation}


def wide_activations(new):
    for shape in [(2, 18432), (1, 1001)]:
        for activation in ACTIVATIONS:
            yield (new.randn(*shape),), {"activation": activation}


def gated_linears(new):
    for shape, features in [((5, 123), 7), ((2, 3, 260), 16), ((9,), 4), ((0, 16), 8)]:
        for activation in ACTIVATIONS:
            inputs = new.randn(*shape), new.randn(*shape), new.randn(features, shape[-1]), new.randn(features)
            yield inputs, {"activation": activation}
            yield (inputs[0], None, *inputs[2:]), {"activation": activation}
        yield (inputs[0], None, inputs[2].detach()), {}
    for learns in [(True, False, True), (False, True, True), (True, True, False), (False, False, True), (False,) * 3]:
        yield tuple(new.randn(*s, grad=grad) for s, grad in zip([(4, 64), (4, 64), (8, 64)], learns)), {}
    yield (new.randn(4, 64), new.randn(4, 64, dtype=torch.float32), new.randn(8, 64, dtype=torch.float32)), {}


def wide_gated_linears(new):
    for shape in [(2, 14336), (1, 1001)]:
        for activation in ACTIVATIONS:
            gate, up, weight = (new.randn(*size) for size in (shape, shape, (8, shape[-1])))
            yield (gate, up, weight), {"activation": activation}
            yield (gate, None, weight), {"activation": activation}


def gated_shape(rows, cols, note="", **options):
    return Shape(f"{rows}x{cols}{note}", lambda new: (new.large(rows, cols), new.large(rows, cols)), options)


def model_shapes(op):
    return [gated_shape(TOKENS, model.intermediate) for model in MODELS if model.activation == op]


def gated_linear_shape(rows, hidden, intermediate, activation):
    def tensors(new):
        gate, up = new.large(rows, intermediate), new.large(rows, intermediate)
        return gate, up, new.large(hidden, intermediate, scale=intermediate**-0.5)

    options = {} if activation == "swiglu" else {"activation": "gelu_tanh"}
    return Shape(f"{rows}x{intermediate}x{hidden}", tensors, options)


def activation_shape(rows, cols, activation):
    return Shape(f"{rows}x{cols} {activation}", lambda new: (new.large(rows, cols),), {"activation": activation})


FURTHER = [
    gated_shape(16384, 14336), gated_shape(16384, 14336, " in place", in_place=True),
    gated_shape(16384, 8192), gated_shape(16384, 8192, " in place", in_place=True),
    gated_shape(8191, 4099), gated_shape(16, 2048),
]  # fmt: skip
CASES = {
    "swiglu": OpCases(gated({}), wide_gated({}), model_shapes("swiglu"), FURTHER),
    "geglu": OpCases(gated(*GEGLU_FORMS), wide_gated(*GEGLU_FORMS), model_shapes("geglu"), FURTHER),
    "activate": OpCases(
        activations, wide_activations,
        [activation_shape(TOKENS, cols, activation) for activation, cols in WITHOUT_GATE],
    ),
    "glu_linear": OpCases(
        gated_linears, wide_gated_linears,
        [gated_linear_shape(TOKENS, model.hidden, model.intermediate, model.activation) for model in MODELS],
    ),
}  # fmt: skip
