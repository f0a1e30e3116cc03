"""Cases of log-probabilities of given tokens, from logits, and from hidden states and a head."""

from math import inf, nan

import torch

from liger_hw.testing.case import OpCases
from liger_hw.testing.inputs import put
from liger_lab.cases.cross_entropy import head_shape, heads_with_fp32_logits, logits_shape
from liger_lab.models import SMALL_AND_MEDIUM, TOKENS

OPTIONS = [
    {},
    {"return_entropy": True, "temperature": 0.7},
    {"return_entropy": True, "return_lse": True, "softcap": 3.0, "logit_scale": -1.5, "temperature": 1.3},
]


def selections(new):
    for rows, vocabulary in [(5, 130), (3, 517), (0, 8), (1, 9), (2, 1)]:
        for options in OPTIONS:
            yield (new.randn(rows, vocabulary), new.targets(rows, vocabulary)), options
    x, y = new.randn(2, 3, 130), new.targets(6, 130, ignored=3).reshape(2, 3)
    yield (x, y.int()), {"return_lse": True, "ignore_index": 3}
    x, y = put(new.randn(6, 130), ((..., slice(100, None)), -inf), ((4, 7), nan), (5, nan)), new.targets(6, 100)
    yield (x, put(y, (5, -100))), {"return_entropy": True, "return_lse": True}
    x = new.randn(2, 40000)  # looped rows
    yield (x, torch.tensor([39999, 0], device=new.device)), {"return_entropy": True}


def wide_selections(new):
    for vocabulary in (128256, 50257):
        x, y = new.randn(2, vocabulary), new.targets(2, vocabulary)
        yield (x, y), {}
        yield (x, y), {"softcap": 30.0, "temperature": 0.9, "return_entropy": True, "return_lse": True}


def linear_selections(new):
    x, w = new.randn(17, 16), new.randn(61, 16)
    y, bias = new.targets(17, 61), new.randn(61)
    for options in OPTIONS:
        yield (x, w, y), options | {"chunk_memory": 2000}
        yield (x, w, y, bias), options
    for learns in [(True, False, False), (False, True, False), (False, False, True), (False,) * 3]:
        frozen = [t.detach().requires_grad_(grad) for t, grad in zip((x, w, bias), learns)]
        yield (frozen[0], frozen[1], y, frozen[2]), {"chunk_memory": 3000, "return_entropy": True}
    yield (new.randn(2, 3, 16), w, y[:6].reshape(2, 3)), {}
    yield (new.randn(0, 16), w, y[:0], bias), {"return_lse": True}
    yield (x, w, torch.full_like(y, -100), bias), {"return_entropy": True}
    yield (x, w, y, bias), {"invariant": True}
    for inputs, options in heads_with_fp32_logits(new):
        yield inputs, options | {"return_entropy": True, "temperature": 0.7}
    statistics = {f"return_{name}": True for name in ("is_top1", "mean_logits", "log_sum_sq_probs")}
    for options in OPTIONS:  # gradients have cases of their own
        yield (x.detach(), w.detach(), y, bias.detach()), options | statistics | {"chunk_memory": 2000}
    yield (x, w, y), {"return_is_top1": True}
    yield (new.randn(0, 16), w, y[:0]), statistics
    w = new.randn(3, 16)  # a smaller vocabulary than a vector holds
    yield (x, w, torch.randint(0, 3, (17,), device=new.device)), {"return_entropy": True}


def wide_linear_selections(new):
    for vocabulary in (128256, 50257):
        x, w, y = new.randn(2, 8), new.randn(vocabulary, 8), new.targets(2, vocabulary)
        yield (x, w, y), {}
        yield (x, w, y), {"softcap": 30.0, "return_entropy": True}


CASES = {
    "selective_log_softmax": OpCases(
        selections, wide_selections, [logits_shape(TOKENS, model.vocabulary) for model in SMALL_AND_MEDIUM]
    ),
    "fused_linear_selective_log_softmax": OpCases(
        linear_selections, wide_linear_selections,
        [head_shape(TOKENS, model.hidden, model.vocabulary) for model in SMALL_AND_MEDIUM],
    ),
}  # fmt: skip
