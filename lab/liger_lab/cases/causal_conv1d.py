"""Cases of the short causal convolution."""

import torch

from liger_hw.testing.case import OpCases, Shape


def small(new):
    def inputs(batch, tokens, channels, taps, bias=True, input_gate=True, output_gate=True, states=True, seq_idx=None):
        size = batch, tokens, channels
        sizes = [size, (channels, taps), (channels,), size, size, (batch, channels, taps - 1)]
        grads = [True, True, bias, input_gate, output_gate, states]
        return *(new.randn(*size) if want else None for size, want in zip(sizes, grads)), seq_idx

    def plain(*sizes, bias=False):
        return inputs(*sizes, bias, False, False, False)

    yield inputs(2, 9, 40, 4)[:-1], {"activation": "silu", "return_final_states": True}
    for taps in (2, 3, 4):
        yield plain(2, 7, 5, taps, bias=True), {"activation": "silu"}
        for tokens in (1, 3):  # also fewer tokens than taps
            yield inputs(2, tokens, 7, taps), {"return_final_states": True}
            yield plain(2, tokens, 7, taps), {"return_final_states": True, "activation": "silu"}
    yield inputs(2, 17, 64, 3, bias=False, states=False), {}  # LFM2
    yield plain(1, 9, 520, 4), {"activation": "silu"}  # several blocks of channels, several programs
    for bias, input_gate, output_gate in ((True, False, True), (False, True, False)):
        packed = (torch.rand(2, 12) < 0.3).cumsum(1).to(new.device, torch.int32)
        yield inputs(2, 12, 24, 4, bias, input_gate, output_gate, False, packed), {"activation": "silu"}
        packed = torch.randint(-1, 2, (2, 12)).to(new.device)  # padding, and sequences of a single token
        yield inputs(2, 12, 24, 3, bias, input_gate, output_gate, False, packed), {}
    learned = inputs(2, 4, 8, 3)[:-1]
    for i in range(len(learned)):
        yield tuple(x if i == j else x.detach() for j, x in enumerate(learned)), {"activation": "silu"}
    yield (new.randn(2, 6, 8), new.randn(8, 3, dtype=torch.float32), new.randn(8, dtype=torch.float32)), {}
    yield plain(0, 4, 8, 3, bias=True), {}
    yield inputs(2, 0, 8, 3), {"return_final_states": True}


def wide(new):
    for channels, taps in ((2048, 3), (8192, 4), (5376, 4), (64, 2), (1001, 4)):
        x, weight = new.randn(2, 32, channels), new.randn(channels, taps)
        yield (x, weight), {"activation": "silu"}
        yield (x, weight, new.randn(channels)), {"activation": "silu"}
        yield (x, weight, None, new.randn(2, 32, channels), new.randn(2, 32, channels)), {}
    packed = torch.zeros(2, 32, dtype=torch.int32, device=new.device)
    yield (
        (new.randn(2, 32, 8192), new.randn(8192, 4), new.randn(8192), None, None, None, packed),
        {"activation": "silu"},
    )
    x, states = new.randn(2, 32, 2048), new.randn(2, 2048, 2)
    yield (x, new.randn(2048, 3), None, x.detach(), x.detach(), states), {"return_final_states": True}


def shape(batch, tokens, channels, taps, bias=False, gated=False, activation=None):
    size = batch, tokens, channels

    def tensors(new):
        parameters = [new.large(channels, taps), *([new.large(channels)] if bias else [None] * gated)]
        return new.large(*size), *parameters, *(new.large(*size) for _ in range(2 * gated))

    words = "x".join(map(str, size)), f"taps={taps}", "bias" * bias, "gated" * gated, activation or ""
    return Shape(" ".join(filter(None, words)), tensors, {"activation": activation})


CASES = {
    "causal_conv1d": OpCases(
        small, wide,
        [
            shape(2, 4096, 2048, 3, gated=True),  # LFM2-1.2B
            shape(2, 4096, 5376, 4, bias=True, activation="silu"),  # Mamba2-2.7B: 5120, and two states of 128
            shape(2, 4096, 8192, 4, activation="silu"),  # Qwen3-Next's gated DeltaNet: queries, keys and values
        ],
        [
            shape(8, 1024, 2048, 3, gated=True), shape(1, 8192, 1001, 4, activation="silu"),
            shape(1, 16, 2048, 3, gated=True),
        ],
    ),
}  # fmt: skip
