"""Cases of cross entropy of logits, and of hidden states and a head."""

from math import inf, nan

import torch

from liger_hw.testing.case import OpCases, Shape
from liger_hw.testing.inputs import put
from liger_lab.models import MODELS, TOKENS

MiB = 2**20
OPTIONS = [
    {},
    {"reduction": "none"},
    {"reduction": "sum", "lse_square_scale": 1e-2, "return_z_loss": True},
    {"label_smoothing": 0.1, "softcap": 3.0, "logit_scale": 0.7, "return_predicted_tokens": True},
    {
        "lse_square_scale": 0.01,
        "softcap": 5.0,
        "reduction": "none",
        "return_z_loss": True,
        "return_token_accuracy": True,
    },
    {"num_items": 7, "lse_square_scale": 1e-2, "logit_scale": -1.5, "return_token_accuracy": True},
]
CLASS_WEIGHT_OPTIONS = [
    {},
    {"label_smoothing": 0.2, "reduction": "sum"},
    {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 4.0, "logit_scale": 2.0, "return_z_loss": True},
]


def losses(new):
    for rows, vocabulary, every_option in [
        (5, 130, True),
        (6, 7, False),
        (3, 517, False),
        (0, 8, False),
        (1, 9, False),
    ]:
        x, y = new.randn(rows, vocabulary), new.targets(rows, vocabulary)
        for options in OPTIONS if every_option else OPTIONS[1:2]:
            yield (x, y), options
        w = new.rand(vocabulary)
        for options in CLASS_WEIGHT_OPTIONS if every_option else CLASS_WEIGHT_OPTIONS[2:]:
            yield (x, y, w), options
    x, y = new.randn(4, 130), new.targets(4, 130)
    yield (new.randn(2, 1), torch.zeros(2, dtype=torch.int64, device=new.device)), {}
    yield (x, y), {"in_place": True}
    yield (x, y), {"in_place": True, "reduction": "none", "label_smoothing": 0.1, "softcap": 3.0}
    yield (x, y.int(), new.rand(130, dtype=new.dtype)), {"ignore_index": 3}
    yield (x, torch.full_like(y, -100)), {"return_token_accuracy": True, "return_predicted_tokens": True}
    x, y = put(new.randn(6, 130), ((..., slice(100, None)), -inf), ((4, 7), nan), (5, nan)), new.targets(6, 100)
    yield (x, put(y, (5, -100))), {"reduction": "none", "lse_square_scale": 1e-2}
    x, y = new.randn(2, 40000), torch.tensor([39999, 0], device=new.device)  # looped rows
    yield (x, y), {"return_predicted_tokens": True}
    yield (x, y), {"in_place": True, "label_smoothing": 0.1, "softcap": 3.0}


def wide_losses(new):
    for vocabulary in (128256, 50257, 32000, 300000):
        x, y = new.randn(2, vocabulary), new.targets(2, vocabulary)
        yield (x, y), {}
        yield (x, y), {"in_place": True, "lse_square_scale": 1e-4}
    for vocabulary in (50257, 256000):
        x, y, w = new.randn(2, vocabulary), new.targets(2, vocabulary), new.rand(vocabulary)
        everything = {"label_smoothing": 0.1, "softcap": 30.0, "lse_square_scale": 0.1, "return_predicted_tokens": True}
        yield (x, y, w), everything
        yield (x, y, w), everything | {"in_place": True}


def heads_with_fp32_logits(new):
    """Yield (x, weight, labels, bias) that make fp32 logits, and options."""
    fp32, y = torch.float32, new.targets(9, 61)
    x, w, bias = (new.randn(*shape) for shape in [(9, 16), (61, 16), (61,)])
    yield (x, w, y), {"logits_dtype": fp32}
    yield (x, w, y, bias), {"logits_dtype": fp32, "chunk_memory": 1000, "invariant": True}
    yield (x, new.randn(61, 16, dtype=fp32), y, new.randn(61, dtype=fp32)), {"chunk_memory": 1000}
    yield (new.randn(9, 16, dtype=fp32), w, y, bias), {"chunk_memory": 1000}


def linear_losses(new):
    for rows, features, vocabulary in [(9, 16, 61), (3, 8, 517), (7, 8, 3), (0, 4, 5)]:
        every_option = vocabulary == 61
        x, w = new.randn(rows, features), new.randn(vocabulary, features)
        y, bias = new.targets(rows, vocabulary), new.randn(vocabulary)
        for options in OPTIONS if every_option else OPTIONS[:2]:
            yield (x, w, y), options | {"chunk_memory": 1000}
        for options in CLASS_WEIGHT_OPTIONS if every_option else CLASS_WEIGHT_OPTIONS[2:]:
            yield (x, w, y, bias, new.rand(vocabulary)), options
        if every_option:
            yield (x, w, y, bias), {"use_token_scaling": True, "logit_scale": 0.3, "chunk_memory": 1000}
            everything = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "softcap": 4.0, "reduction": "none"}
            yield (x, w, y, bias, new.rand(vocabulary)), everything | {"use_token_scaling": True}
    yield (x, w, y, bias), {"reduction": "none"}
    x, w = new.randn(5, 16), new.randn(61, 16)
    y, bias = new.targets(5, 61), new.randn(61)
    for learns in [(True, False, False), (False, True, False), (False, False, True), (False, True, True), (False,) * 3]:
        frozen = [t.detach().requires_grad_(grad) for t, grad in zip((x, w, bias), learns)]
        for reduction in ("mean", "none"):
            yield (frozen[0], frozen[1], y, frozen[2]), {"reduction": reduction, "return_token_accuracy": True}
    yield (x, w, y), {"accum_dtype": torch.float32, "chunk_memory": 300}
    yield (x, w, y, bias), {"reduction": "none", "invariant": True}
    yield (x, w, put(y, (slice(2), -100)), bias), {"counted_rows": 3}
    smooths = {"label_smoothing": 0.1, "lse_square_scale": 1e-2, "chunk_memory": 300}
    yield (x, w, y, bias), smooths | {"token_weights": 4 * new.rand(5) - 1}
    yield (x, w, torch.full_like(y, -100), bias), {"lse_square_scale": 0.1, "label_smoothing": 0.1}
    x, w, y = new.randn(4, 8), new.randn(3001, 8), torch.tensor([5, 700, 2900, 3000], device=new.device)
    for options in ({"reduction": "none"}, {"token_weights": 4 * new.rand(4) - 1}):  # several programs a row
        yield (x, w, y), options | {"use_token_scaling": True}
    for inputs, options in heads_with_fp32_logits(new):
        yield inputs, options
    yield inputs, options | {"reduction": "none", "softcap": 4.0, "lse_square_scale": 1e-2}
    # looped rows; x is frozen because 40,000 summands in another order differ by more than a rounding
    x, w = new.randn(2, 4, grad=False), new.randn(40000, 4)
    yield (x, w, torch.tensor([39999, 0], device=new.device)), {}


def wide_linear_losses(new):
    for vocabulary in (128256, 50257):
        x, w, y = new.randn(2, 8), new.randn(vocabulary, 8), new.targets(2, vocabulary)
        yield (x, w, y), {}
        yield (x, w, y), {"reduction": "none", "softcap": 30.0, "use_token_scaling": True, "lse_square_scale": 1e-4}


def logits_shape(rows, vocabulary, note="", **options):
    """Make the shape of an op of logits and labels."""
    return Shape(
        f"{rows}x{vocabulary}{note}", lambda new: (new.large(rows, vocabulary), new.large_targets(rows, vocabulary)),
        options,
    )  # fmt: skip


def head_shape(rows, hidden, vocabulary, note="", **options):
    """Make the shape of an op of hidden states, a head and labels.

    The logits have variance 1: larger ones make a softmax so sharp that a kernel may skip most of the gradient.
    """

    def tensors(new):
        x, weight = new.large(rows, hidden), new.large(vocabulary, hidden, scale=hidden**-0.5)
        return x, weight, new.large_targets(rows, vocabulary)

    return Shape(f"{rows}x{hidden}x{vocabulary}{note}", tensors, options)


CASES = {
    "cross_entropy": OpCases(
        losses, wide_losses,
        [logits_shape(TOKENS, model.vocabulary) for model in MODELS],
        [
            *(logits_shape(TOKENS, n, " in place", in_place=True) for n in (32000, 128256, 256000)),
            logits_shape(4099, 50257), logits_shape(16, 2048),
        ],
    ),
    "fused_linear_cross_entropy": OpCases(
        linear_losses, wide_linear_losses,
        [head_shape(TOKENS, model.hidden, model.vocabulary) for model in MODELS],
        [
            *(
                head_shape(*sizes, note, **options)
                for sizes in [(8192, 4096, 128256), (16384, 2048, 128256), (8192, 2304, 256000), (8192, 896, 151936)]
                for note, options in [("", {}), (" 256 MiB", {"chunk_memory": 256 * MiB}),
                                      (" 1 GiB", {"chunk_memory": 1024 * MiB})]
            ),
            head_shape(8192, 4096, 128256, " fp32 dW", accum_dtype=torch.float32),
            head_shape(4099, 1600, 50257), head_shape(16, 256, 1024),
        ],
    ),
}  # fmt: skip
