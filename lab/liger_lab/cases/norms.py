"""Cases of RMSNorm, with and without the residual addition, and of layer norm."""

import itertools

import torch

from liger_hw.testing.case import PARTIAL_WIDTHS, WIDE_ROWS, OpCases, Shape
from liger_lab.models import MODELS, TOKENS

SMALL = ((5, 123), (3, 1024), (1, 8), (33, 64), (0, 16))
HIDDEN = [(TOKENS, model.hidden) for model in MODELS]
HEADS = (TOKENS * 32, 128)  # query heads of one layer whose norm is per head, as Qwen3's
LONG_ROWS = ((2048, 65536), (512, 262144))
LAYER_NORMS = [(TOKENS, cols) for cols in (768, 1024, 4608, 8192)]  # GPT-2, BERT-large, StarCoder2-7B, Command R
FURTHER = (
    (32768, 1024), (16384, 4096), (16384, 8192), (8192, 16384), HEADS, *LONG_ROWS, (8192, 1001), (4099, 3001),
    (16, 2048),
)  # fmt: skip


def rms_norms(new):
    for rows, cols in SMALL:
        x, w = new.randn(rows, cols), new.randn(cols)
        yield (x, w), {}
        yield (x, w), {"offset": 1.0, "casting_mode": "gemma"}
        yield (x, None), {}
    yield (new.randn(2, 7, 257), new.randn(257, dtype=torch.float32)), {}
    for cols in (12008, 33001):  # several blocks in registers; a looped row
        yield (new.randn(2, cols), new.randn(cols)), {}


def wide_rms_norms(new):
    for cols in (128, 1024, 4096, 5120, 8192, 16384, 262144, 1001, *PARTIAL_WIDTHS):
        yield (new.randn(WIDE_ROWS, cols), new.randn(cols)), {}
    yield (new.randn(WIDE_ROWS, 4096), new.randn(4096, dtype=torch.float32)), {"offset": 1.0, "casting_mode": "gemma"}
    yield (new.randn(WIDE_ROWS, 8192, dtype=torch.float32), new.randn(8192, dtype=torch.float32)), {}


def with_residual(cases):
    """Add a residual to the cases of an op of x and weight."""

    def cases_with_residual(new):
        for (x, w), options in cases(new):
            yield (x, new.randn(*x.shape, dtype=x.dtype), w), options

    return cases_with_residual


def layer_norms(new):
    for rows, cols in SMALL:
        x, w, b = new.randn(rows, cols), new.randn(cols), new.randn(cols)
        yield (x, w, b), {}
        yield (x, None, None), {"eps": 1e-3}
    yield (x := new.randn(2, 7, 40), new.randn(40, dtype=torch.float32), None), {}
    yield (x, None, new.randn(40, dtype=torch.float32)), {}
    yield (x.detach(), new.randn(40), new.randn(40, grad=False)), {}
    yield (x.detach(), new.randn(40, grad=False), new.randn(40)), {}
    yield (new.randn(2, 33001), new.randn(33001), None), {}  # looped


def wide_layer_norms(new):
    for cols in (128, 1024, 4096, 8192, 16384, 262144, 1001, *PARTIAL_WIDTHS):
        yield (new.randn(WIDE_ROWS, cols), new.randn(cols), new.randn(cols)), {}
    yield (new.randn(WIDE_ROWS, 4096), None, None), {}


GATED_FORMS = (
    {}, {"gate_first": True}, {"activation": "sigmoid", "casting_mode": "gemma"},
    {"gate_first": True, "activation": "sigmoid", "casting_mode": "gemma"},
)  # fmt: skip


def gated_rms_norms(new):
    for (rows, cols), options in zip(SMALL, itertools.cycle(GATED_FORMS)):
        yield (new.randn(rows, cols), new.randn(rows, cols), new.randn(cols)), options
    for options in ({"group_size": 21}, {"group_size": 9, "gate_first": True}):
        yield (new.randn(2, 7, 63), new.randn(2, 7, 63), new.randn(63, dtype=torch.float32)), options
    yield (new.randn(3, 40), new.randn(3, 40, dtype=torch.float32), None), {}
    yield (new.randn(3, 40), new.randn(3, 40), new.randn(40)), {"eps": 0.0}
    for learns in ((False, True, True), (True, False, True), (True, True, False), (False, False, True)):
        yield tuple(new.randn(*size, grad=grad) for size, grad in zip([(3, 40), (3, 40), (40,)], learns)), {}
    for options in GATED_FORMS[:2]:  # looped
        yield (new.randn(2, 33001), new.randn(2, 33001), new.randn(33001)), options


def wide_gated_rms_norms(new):
    for cols, options in itertools.product((4096, 8192, 16384, *PARTIAL_WIDTHS), GATED_FORMS[:2]):
        yield (new.randn(WIDE_ROWS, cols), new.randn(WIDE_ROWS, cols), new.randn(cols)), options
    for cols, options in ((128, {}), (1001, {}), (8192, {"group_size": 1024, "gate_first": True})):
        yield (new.randn(WIDE_ROWS, cols), new.randn(WIDE_ROWS, cols), new.randn(cols)), options


def modulated_rms_norms(new):
    for scale in ((2, 5, 123), (2, 1, 123), (123,)):  # a row for each row, each sequence, all
        yield (new.randn(2, 5, 123), new.randn(123), new.randn(*scale), new.randn(*scale)), {}
    x, scale, w = new.randn(3, 4, 40), new.randn(3, 1, 40), new.randn(40, dtype=torch.float32)
    yield (x, None, scale, None), {}
    yield (x, w, scale, new.randn(3, 4, 40)), {"offset": 1.0, "casting_mode": "gemma"}  # more rows than scale
    yield (x, w, scale, scale.detach()), {"offset": 0.5, "casting_mode": "none"}
    yield (x.detach(), None, scale.detach(), new.randn(3, 1, 40)), {}
    yield (x.detach(), w, scale.detach(), None), {}
    yield (new.randn(0, 16), new.randn(16), new.randn(16), new.randn(16)), {}
    scale = new.randn(2, 1, 17001)  # the backward loops on every architecture; the forward at the next width
    yield (new.randn(2, 2, 17001), new.randn(17001), scale, new.randn(2, 1, 17001)), {}
    yield tuple(new.randn(*size) for size in ((1, 2, 33001), (33001,), (1, 2, 33001), (1, 2, 33001))), {}


def wide_modulated_rms_norms(new):
    for cols in (1152, 3072, 5120, 8192, 16384, 1001, *PARTIAL_WIDTHS):
        yield (new.randn(32, cols), new.randn(cols), new.randn(WIDE_ROWS, cols), new.randn(WIDE_ROWS, cols)), {}
    yield (new.randn(4, 4096), new.randn(4096), new.randn(4, 4096), new.randn(4, 4096)), {}
    yield (new.randn(4, 3072), None, new.randn(2, 3072), new.randn(2, 3072)), {}


def l2_norms(new):
    for rows, cols in SMALL:
        yield (new.randn(rows, cols),), {}
        yield (new.randn(rows, cols),), {"casting_mode": "none"}
    yield (new.randn(2, 33001),), {}  # looped
    yield (new.randn(3, 40, grad=False),), {}


def wide_l2_norms(new):
    for cols in (64, 128, 256, 4096, 16384, 1001, *PARTIAL_WIDTHS):
        yield (new.randn(WIDE_ROWS, cols),), {}


def single_values(new, *sizes):
    """Make parameters whose gradient is a sum of everything, wanted in 16 bits alone.

    A sum of fp32 products of random sign may cancel to less than the error of any order of its additions. The tests of
    the ops check such sums in fp32 without cancellation.
    """
    return tuple(new.randn(size, grad=new.dtype != torch.float32) for size in sizes)


def dyts(new):
    for rows, cols in SMALL:
        yield (new.randn(rows, cols), *single_values(new, 1), new.randn(cols), new.randn(cols)), {}
    yield (new.randn(300, 600), *single_values(new, 1), new.randn(600), None), {}  # several programs for each column
    inputs = new.randn(2, 7, 40), *single_values(new, 1), new.randn(40, dtype=torch.float32), new.randn(40)
    yield inputs, {}
    for learns in (0, 2, 3):
        yield tuple(x if i == learns else x.detach() for i, x in enumerate(inputs)), {}


def wide_dyts(new):
    for cols in (64, 1152, 4096, 1001):
        yield (new.randn(WIDE_ROWS, cols), new.randn(1), new.randn(cols), new.randn(cols)), {}


def poly_norms(new):
    for rows, cols in SMALL:
        yield (new.randn(rows, cols), *single_values(new, 3, 1)), {}
    yield (new.randn(2, 7, 40), new.randn(3, dtype=torch.float32, grad=False), *single_values(new, 1)), {"eps": 1e-3}
    yield (new.randn(3, 40), *(x.detach() for x in single_values(new, 3, 1))), {}
    yield (new.randn(3, 40), *single_values(new, 3, 1)), {"eps": 0.0}
    yield (new.randn(2, 33001), *single_values(new, 3, 1)), {}  # looped


def wide_poly_norms(new):
    for cols in (128, 1024, 4096, 8192, 14336, 1001, *PARTIAL_WIDTHS):
        yield (new.randn(WIDE_ROWS, cols), new.randn(3), new.randn(1)), {}


def dyt_shape(rows, cols):
    return Shape(
        f"{rows}x{cols}", lambda new: (new.large(rows, cols), new.large(1), new.large(cols), new.large(cols))
    )  # fmt: skip


def poly_norm_shape(rows, cols):
    return Shape(f"{rows}x{cols}", lambda new: (new.large(rows, cols), new.large(3), new.large(1)))


def group_norms(new):
    for shape, groups in (((2, 6, 5, 7), 3), ((3, 8), 2), ((1, 4, 1), 4), ((2, 3, 5001), 1), ((0, 4, 9), 2)):
        yield (new.randn(*shape), new.randn(shape[1]), new.randn(shape[1])), {"num_groups": groups}
    x = new.randn(2, 4, 40)
    yield (x, None, None), {"num_groups": 2, "eps": 1e-3}
    yield (x, new.randn(4, dtype=torch.float32), None), {"num_groups": 2}
    yield (x.detach(), new.randn(4), new.randn(4, grad=False)), {"num_groups": 2}
    yield (x.detach(), None, new.randn(4, dtype=torch.float32)), {"num_groups": 2}


def wide_group_norms(new):
    for channels, groups, positions in ((320, 32, 4096), (512, 32, 64), (512, 512, 16000), (64, 8, 1001)):
        x, w, b = new.randn(1, channels, positions), new.randn(channels), new.randn(channels)
        yield (x, w, b), {"num_groups": groups}


def group_norm_shape(groups, *shape):
    def tensors(new):
        return new.large(*shape), new.large(shape[1]), new.large(shape[1])

    return Shape("x".join(map(str, shape)) + f" num_groups={groups}", tensors, {"num_groups": groups})


def modulated_shape(sequences, tokens, cols):
    """Make a shape whose scale and shift have a row for each sequence."""

    def tensors(new):
        scale, shift = (new.large(sequences, 1, cols) for _ in range(2))
        return new.large(sequences, tokens, cols), new.large(cols), scale, shift

    return Shape(f"{sequences}x{tokens}x{cols}", tensors)


def gated_shape(rows, cols, **options):
    label = " ".join([f"{rows}x{cols}", *(f"{name}={value}" for name, value in options.items())])
    return Shape(label, lambda new: (new.large(rows, cols), new.large(rows, cols), new.large(cols)), options)


def shapes(sizes, matrices, parameters):
    """Make the shapes of an op of `matrices` tensors (rows, cols) and `parameters` tensors (cols,)."""

    def shape(rows, cols):
        def tensors(new):
            return *(new.large(rows, cols) for _ in range(matrices)), *(new.large(cols) for _ in range(parameters))

        return Shape(f"{rows}x{cols}", tensors)

    return [shape(*size) for size in sizes]


CASES = {
    "rms_norm": OpCases(rms_norms, wide_rms_norms, shapes([HEADS, *HIDDEN, *LONG_ROWS], 1, 1), shapes(FURTHER, 1, 1)),
    "fused_add_rms_norm": OpCases(
        with_residual(rms_norms), with_residual(wide_rms_norms), shapes(HIDDEN, 2, 1), shapes(FURTHER, 2, 1)
    ),
    "gated_rms_norm": OpCases(
        gated_rms_norms, wide_gated_rms_norms,
        [
            gated_shape(TOKENS * 32, 128),  # Qwen3-Next's gated DeltaNet
            gated_shape(TOKENS * 32, 128, activation="sigmoid", casting_mode="gemma"),  # Kimi Linear
            gated_shape(TOKENS, 5120, gate_first=True),  # Mamba2-2.7B
            gated_shape(TOKENS, 8192, gate_first=True, group_size=1024),  # Nemotron-H-8B
            gated_shape(TOKENS, 4096), gated_shape(2048, 16384, gate_first=True),
        ],
        [gated_shape(16, 2048)],
    ),
    "modulated_rms_norm": OpCases(
        modulated_rms_norms, wide_modulated_rms_norms,
        [
            modulated_shape(32, 256, 1152),  # DiT-XL, 256 patches
            modulated_shape(4, 4096, 3072),  # FLUX.1, an image of 1024 x 1024
            modulated_shape(1, 16384, 5120),  # Wan2.1-14B
            modulated_shape(8, 1024, 4096), modulated_shape(2, 1024, 16384),
        ],
        [modulated_shape(16384, 1, 3072), modulated_shape(1, 16, 2048)],
    ),
    "l2_norm": OpCases(
        l2_norms, wide_l2_norms,
        shapes([HEADS, (TOKENS * 16, 256)], 1, 0),  # keys of gated DeltaNet: Qwen3-Next, and a wide head
        shapes([(TOKENS, 4096), (16, 2048)], 1, 0),
    ),
    "poly_norm": OpCases(
        poly_norms, wide_poly_norms,
        [poly_norm_shape(*size) for size in ((TOKENS, 5504), (TOKENS, 14336))],  # MLPs of a Llama-1B with PolyCom, 8B
        [poly_norm_shape(*size) for size in ((16384, 4096), (2048, 65536), (16, 2048))],
    ),
    "dyt": OpCases(
        dyts, wide_dyts,
        [dyt_shape(*size) for size in ((32768, 768), (32768, 1152), (TOKENS, 4096))],  # ViT-B, DiT-XL, Llama-7B
        [dyt_shape(*size) for size in ((16384, 8192), (16, 2048))],
    ),
    "group_norm": OpCases(
        group_norms, wide_group_norms,
        [
            group_norm_shape(32, 8, 320, 128, 128),  # UNet of Stable Diffusion XL, an image of 1024 x 1024
            group_norm_shape(32, 2, 128, 512, 512),  # its decoder
            group_norm_shape(512, 8, 512, 3199),  # Wav2Vec2's first convolution, a second of sound
        ],
        [
            group_norm_shape(32, 1, 512, 128, 128), group_norm_shape(32, 64, 1280, 32, 32),
            group_norm_shape(8, 4, 64, 32),
        ],
    ),
    "layer_norm": OpCases(
        layer_norms, wide_layer_norms, shapes([*LAYER_NORMS, *LONG_ROWS], 1, 2), shapes(FURTHER, 1, 2)
    ),
}  # fmt: skip
