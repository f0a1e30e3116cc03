"""Cases of grouped products and of mixtures of experts."""

from dataclasses import dataclass

import torch

from liger_hw.testing.case import OpCases, Shape
from liger_lab.models import TOKENS


@dataclass(frozen=True)
class Mixture:
    """The sizes of the experts of one published model."""

    name: str
    experts: int
    per_token: int
    hidden: int
    intermediate: int


MIXTURES = (
    Mixture("Qwen3-30B-A3B", 128, 8, 2048, 768),
    Mixture("Mixtral-8x7B", 8, 2, 4096, 14336),
    Mixture("DeepSeek-V3", 256, 8, 7168, 2048),
)


def products(new):
    for rows, groups, k, n in [(70, 3, 40, 24), (5, 7, 123, 33), (1, 1, 16, 8), (0, 2, 16, 16)]:
        yield (new.randn(rows, k), new.randn(groups, k, n), new.group_ends(rows, groups)), {}
        yield (new.randn(rows, k), new.randn(groups, n, k).transpose(1, 2), new.group_ends(rows, groups)), {}
    yield (new.randn(33, 24, grad=False), new.randn(2, 24, 40), new.group_ends(33, 2)), {}
    yield (new.randn(33, 24), new.randn(2, 24, 40, grad=False), new.group_ends(33, 2)), {}


def wide_products(new):
    for rows, groups, k, n in [(64, 8, 768, 2048), (64, 2, 4096, 1024), (48, 3, 1001, 2001)]:
        yield (new.randn(rows, k), new.randn(groups, n, k).transpose(1, 2), new.group_ends(rows, groups)), {}


def product(rows, groups, k, n):
    def tensors(new):
        weights = new.large(groups, n, k, scale=k**-0.5).detach().transpose(1, 2).requires_grad_()
        return new.large(rows, k), weights, new.group_ends(rows, groups)

    return Shape(f"{rows}x{k}x{n} of {groups}", tensors)


def mixture_shape(mixture, tokens=TOKENS):
    return product(tokens * mixture.per_token, mixture.experts, mixture.hidden, 2 * mixture.intermediate)


def adapter(new, experts, outputs, inputs, rank):
    """Draw an adapter's factors, whose product is as large as the weights; no rank: none."""
    if rank is None:
        return None
    a, b = new.randn(experts, rank, inputs, grad=False), new.randn(experts, outputs, rank, grad=False)
    return a.mul_(inputs**-0.5).requires_grad_(), b.mul_(rank**-0.5).requires_grad_()


def mixtures(new):
    def tensors(tokens, experts, k, hidden, intermediate, halves=2, dtype=None, grads=(True,) * 4):
        x, weights = new.randn(tokens, hidden, grad=grads[0]), new.randn(tokens, k, dtype=dtype, grad=grads[3])
        # as initialised: with large gates a few values would dominate the sums, and no rounding averages out
        first = new.randn(experts, halves * intermediate, hidden, grad=False).mul_(hidden**-0.5)
        second = new.randn(experts, hidden, intermediate, grad=False).mul_(intermediate**-0.5)
        index = new.chosen_experts(tokens, experts, k)
        return x, first.requires_grad_(grads[1]), second.requires_grad_(grads[2]), index, weights

    yield tensors(20, 4, 2, 32, 48), {}
    yield tensors(9, 5, 3, 33, 17, dtype=torch.float32), {"activation": "gelu_tanh", "up_first": True}
    yield tensors(7, 3, 2, 40, 24, halves=1), {"activation": "relu_squared"}
    yield tensors(1, 1, 1, 16, 8, grads=(True, True, True, False)), {}  # one number's error says nothing of others
    yield tensors(0, 2, 1, 16, 16), {}
    for alone in range(4):
        yield tensors(5, 2, 1, 16, 24, grads=[i == alone for i in range(4)]), {}
    for number, halves, scale, ranks in [
        (4, 2, 0.5, (16, 16)),
        (3, 1, 1.0, (5, None)),
        (3, 2, -1.5, (None, 33)),
        (2, 2, 2.0, (65, 4)),
    ]:
        activation = "silu" if halves == 2 else "relu_squared"
        sizes = (number, halves * 24, 40), (number, 40, 24)
        factors = [adapter(new, *size, rank) for size, rank in zip(sizes, ranks)]
        yield (*tensors(11, number, 2, 40, 24, halves), activation, False, *factors, scale), {}


def wide_mixtures(new):
    for tokens, k, hidden, intermediate, activation in [(8, 2, 1024, 3584, "gelu_tanh"), (4, 10, 7168, 2048, "silu")]:
        first, second = new.randn(16, 2 * intermediate, hidden), new.randn(16, hidden, intermediate)
        index, weights = new.chosen_experts(tokens, 16, k), new.randn(tokens, k)
        yield (new.randn(tokens, hidden), first, second, index, weights), {"activation": activation}


def mixture_layer(mixture, tokens=TOKENS):
    def tensors(new):
        first = new.large(mixture.experts, 2 * mixture.intermediate, mixture.hidden, scale=mixture.hidden**-0.5)
        second = new.large(mixture.experts, mixture.hidden, mixture.intermediate, scale=mixture.intermediate**-0.5)
        index = new.chosen_experts(tokens, mixture.experts, mixture.per_token)
        return new.large(tokens, mixture.hidden), first, second, index, new.large(tokens, mixture.per_token)

    sizes = f"{tokens}x{mixture.hidden}x{mixture.intermediate} {mixture.per_token} of {mixture.experts}"
    return Shape(sizes, tensors)


CASES = {
    "grouped_mm": OpCases(
        products, wide_products, [mixture_shape(mixture) for mixture in MIXTURES],
        [product(1024, m.experts, m.hidden, 2 * m.intermediate) for m in MIXTURES],
    ),
    "experts": OpCases(
        mixtures, wide_mixtures, [mixture_layer(mixture) for mixture in MIXTURES],
        [mixture_layer(mixture, 1024) for mixture in MIXTURES],
    ),
}  # fmt: skip
