"""Cases of clamped SwiGLU: gate and up in one tensor, or in two."""

from math import inf, nan

from liger_hw.testing.case import OpCases, Shape
from liger_hw.testing.inputs import put
from liger_lab.models import TOKENS

CLAMPS = [
    {"limit": 0.5, "alpha": 1.702, "offset": 1.0, "interleaved": True},
    {"limit": 0.5, "alpha": 1.702, "offset": 1.0},
    {"limit": 1.0},
]
GPT_OSS = {"limit": 7.0, "alpha": 1.702, "offset": 1.0, "interleaved": True}


def small(new):
    for shape in [(5, 246), (3, 2048), (2, 3, 5000), (2,), (0, 16)]:
        for options in CLAMPS:
            yield (new.randn(*shape),), options
    yield (new.randn(5, 246),), {"limit": 1.0, "alpha": 0.0}
    gate, up = new.randn(5, 123), new.randn(5, 123)
    for options in CLAMPS[1:]:
        yield (gate, up), options
    values = ((0, 0), nan), ((0, 1), inf), ((0, 2), -inf)
    yield (put(new.randn(5, 123), *values), put(new.randn(5, 123), ((1, 0), nan), ((1, 1), inf))), CLAMPS[1]
    yield (gate, up.detach()), CLAMPS[1]
    yield (gate.detach(), up), CLAMPS[2]


def wide(new):
    for options in CLAMPS:
        yield (new.randn(2, 5760),), options
    yield (new.randn(1, 2002),), CLAMPS[0]
    yield (new.randn(1, 1001), new.randn(1, 1001)), CLAMPS[2]


CASES = {
    "clamped_swiglu": OpCases(
        small, wide,
        [Shape(f"{TOKENS}x2880", lambda new: (new.large(TOKENS, 2 * 2880),), GPT_OSS)],  # gpt-oss-20b's experts
    ),
}  # fmt: skip
