"""Make the shapes of an op's sweep over vocabularies, widths or tokens."""

from liger_hw.checks import check
from liger_hw.testing.case import Case
from liger_lab.cases import cross_entropy, embedding, glu, norms, rope, softmax
from liger_lab.models import TOKENS

SIZES = {  # what grows -> its sizes; the two others keep those of Llama-3-8B
    "vocab": (40960, 81920, 122880, 163840), "width": (4096, 8192, 12288, 16384),
    "tokens": (1024, 2048, 4096, 8192, 16384),
}  # fmt: skip
FIXED = {"vocab": 128256, "width": 4096, "tokens": TOKENS}


def _rows(matrices, parameters):
    return lambda tokens, width, vocab: norms.shapes([(tokens, width)], matrices, parameters)[0]


def _gated(tokens, width, vocab):
    return glu.gated_shape(tokens, width, " in place", in_place=True)


SHAPES = {  # op -> its shape at (tokens, width, vocab); in place as in a patched model, and as the peers
    "rms_norm": _rows(1, 1), "fused_add_rms_norm": _rows(2, 1), "layer_norm": _rows(1, 2), "l2_norm": _rows(1, 0),
    "gated_rms_norm": lambda tokens, width, vocab: norms.gated_shape(tokens, width),
    "poly_norm": lambda tokens, width, vocab: norms.poly_norm_shape(tokens, width),
    "dyt": lambda tokens, width, vocab: norms.dyt_shape(tokens, width),
    "softmax": lambda tokens, width, vocab: softmax.shape(tokens, width),
    "swiglu": _gated, "geglu": _gated,
    "rope": lambda tokens, width, vocab: rope.shape(1, tokens, width // 128, max(width // 512, 1), 128),
    "embedding": lambda tokens, width, vocab: embedding.shape(tokens, vocab, width),
    "cross_entropy": lambda tokens, width, vocab: cross_entropy.logits_shape(tokens, vocab, " in place", in_place=True),
    "fused_linear_cross_entropy": lambda tokens, width, vocab: cross_entropy.head_shape(tokens, width, vocab),
}  # fmt: skip


def cases(ops, grows: str, sizes=()) -> dict[int, list[Case]]:
    """Return size -> the case of each op.

    Args:
        ops: names of ops; empty means all that have this size.
        grows: "vocab", "width" or "tokens". sizes: its values, or empty for those of SIZES.

    Raises:
        ValueError: an op has no such size.
    """
    having = [op for op, shape in SHAPES.items() if _label(shape, grows, 256) != _label(shape, grows, 512)]
    for op in ops:
        check(op in having, "--sweep", f"{grows} of {op}", f"{grows} of {', '.join(having)}")
    return {
        size: [Case(**vars(SHAPES[op](**FIXED | {grows: size})), op=op) for op in ops or having]
        for size in sorted(sizes or SIZES[grows])
    }


def _label(shape, grows, size):
    return shape(**FIXED | {grows: size}).label
