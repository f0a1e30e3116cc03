"""Cases of rotary position embeddings."""

import torch

from liger_hw.testing.case import OpCases, Shape
from liger_lab.models import MODELS, TOKENS


def small(new):
    for q_heads, k_heads, head_dim, rotary_dim in [(4, 2, 16, 16), (3, 1, 20, 12), (1, 1, 2, 2), (5, 3, 512, 512)]:
        tables = new.angles(2, 3, rotary_dim)
        yield (new.randn(2, q_heads, 3, head_dim), new.randn(2, k_heads, 3, head_dim), *tables), {}
        yield (new.randn(2, 3, q_heads, head_dim), new.randn(2, 3, k_heads, head_dim), *tables), {"unsqueeze_dim": 2}
    one_for_all = new.randn(2, 24, 1, 256), new.randn(2, 1, 1, 256)
    yield (*one_for_all, *new.angles(1, 1, 256, dtype=torch.float32)), {}
    yield (new.randn(1, 2, 2, 8, grad=False), new.randn(1, 2, 2, 8), *new.angles(1, 2, 8)), {}
    yield (new.randn(1, 2, 2, 8), new.randn(1, 2, 2, 8, grad=False), *new.angles(1, 2, 8)), {}
    yield (new.randn(2, 2, 0, 8), new.randn(2, 2, 0, 8), *new.angles(1, 0, 8)), {}
    for layout in ("half", "interleaved", "interleaved_to_half"):
        for shared, wide, k in [(False, True, new.randn(2, 2, 3, 20)), (True, False, None)]:
            tables = new.angles(1, 3, 6 if shared else 12)
            yield (new.randn(2, 3, 3, 20), k, *tables), {"layout": layout, "shared": shared, "wide": wide}


def wide(new):
    for q_heads, k_heads, head_dim, rotary_dim in [
        (32, 8, 128, 128), (14, 2, 64, 64), (8, 4, 256, 256), (16, 16, 80, 32),
    ]:  # fmt: skip
        q, k = (new.randn(1, 2, heads, head_dim).transpose(1, 2) for heads in (q_heads, k_heads))
        yield (q, k, *new.angles(1, 2, rotary_dim)), {}
    for heads, head_dim, layout, shared in [(32, 128, "interleaved", False), (32, 64, "interleaved_to_half", True)]:
        q, k = (new.randn(1, 2, count, head_dim).transpose(1, 2) for count in (heads, 1))
        yield (q, k, *new.angles(1, 2, head_dim // 2 if shared else head_dim)), {"layout": layout, "shared": shared}


def shape(batch, seq, heads, kv_heads, head_dim):
    def tensors(new):
        # attention's layout: (B, T, H, D) in memory, transposed to (B, H, T, D)
        q, k = (new.large(batch, seq, count, head_dim, grad=False).transpose(1, 2).requires_grad_()
                for count in (heads, kv_heads))  # fmt: skip
        return q, k, new.large(1, seq, head_dim, grad=False), new.large(1, seq, head_dim, grad=False)

    return Shape(f"{batch}x{seq}x{heads}/{kv_heads}x{head_dim}", tensors)


CASES = {
    "rope": OpCases(
        small, wide,
        [shape(TOKENS // 4096, 4096, model.heads, model.kv_heads, model.head_dim) for model in MODELS],
        [shape(4, 4096, 32, 8, 128), shape(3, 1365, 12, 4, 80), shape(1, 16, 16, 4, 64)],
    ),
}  # fmt: skip
