"""Cases of the norm of queries and keys with their rotation."""

from liger_hw.kernels.norms.rms_norm import CASTING_MODES
from liger_hw.testing.case import OpCases, Shape
from liger_lab.models import MODELS, TOKENS


def small(new):
    def weights(*sizes, **grad):
        return [new.randn(size, **grad) for size in sizes]

    for q_heads, k_heads, head_dim, rotary_dim, angles in [(4, 2, 16, 16, 2), (3, 1, 20, 12, 1), (40, 40, 64, 6, 2)]:
        q, k = new.randn(2, q_heads, 3, head_dim), new.randn(2, k_heads, 3, head_dim)
        tables = new.angles(angles, 3, rotary_dim)
        yield (q, k, *weights(head_dim, head_dim), *tables), {}
        yield (q, k, *weights(q_heads * head_dim, k_heads * head_dim), *tables), {"casting_mode": "gemma"}
    q, k, tables = new.randn(2, 3, 5, 12), new.randn(2, 3, 3, 12), new.angles(2, 3, 8)
    for casting_mode in CASTING_MODES:
        for layout in ("half", "interleaved", "interleaved_to_half"):
            options = {"offset": 1.0, "casting_mode": casting_mode, "unsqueeze_dim": 2, "layout": layout, "eps": 1e-3}
            yield (q, k, *weights(12, 36), *tables), options
    yield (q, k, *weights(12, 12), *new.angles(1, 3, 2)), {"unsqueeze_dim": 2, "eps": 0.0}
    for grad_bits in range(1, 16):
        wants = [bool(grad_bits & 1 << place) for place in range(4)]
        heads = new.randn(1, 2, 2, 8, grad=wants[0]), new.randn(1, 1, 2, 8, grad=wants[1])
        yield (*heads, new.randn(8, grad=wants[2]), new.randn(8, grad=wants[3]), *new.angles(1, 2, 8)), {}
    yield (new.randn(2, 2, 0, 8), new.randn(2, 2, 0, 8), *weights(8, 8), *new.angles(1, 0, 8)), {}
    yield (new.randn(1, 36, 9, 128), new.randn(1, 4, 9, 128), *weights(128, 128), *new.angles(1, 9, 128)), {}


def wide(new):
    for q_heads, k_heads, head_dim, rotary_dim, joint in [
        (32, 8, 128, 128, False), (14, 2, 64, 64, False), (8, 4, 256, 256, False), (16, 16, 80, 32, False),
        (64, 8, 128, 128, False), (32, 32, 128, 128, True), (40, 8, 128, 128, True),
    ]:  # fmt: skip
        q, k = (new.randn(1, 2, heads, head_dim).transpose(1, 2) for heads in (q_heads, k_heads))
        sizes = (q_heads * head_dim, k_heads * head_dim) if joint else (head_dim, head_dim)
        yield (q, k, *(new.randn(size) for size in sizes), *new.angles(1, 2, rotary_dim)), {}
    q, k = (new.randn(1, 2, heads, 128).transpose(1, 2) for heads in (32, 4))
    yield (q, k, new.randn(128), new.randn(128), *new.angles(1, 2, 64)), {"layout": "interleaved"}


def shape(batch, seq, heads, kv_heads, head_dim, joint=False):
    def tensors(new):
        # a projection's layout: (B, T, H, D) in memory, transposed to (B, H, T, D)
        q, k = (new.large(batch, seq, count, head_dim, grad=False).transpose(1, 2).requires_grad_()
                for count in (heads, kv_heads))  # fmt: skip
        weights = (new.large(count * head_dim if joint else head_dim) for count in (heads, kv_heads))
        return q, k, *weights, new.large(1, seq, head_dim, grad=False), new.large(1, seq, head_dim, grad=False)

    return Shape(f"{batch}x{seq}x{heads}/{kv_heads}x{head_dim}{' joint' if joint else ''}", tensors)


CASES = {
    "qk_norm_rope": OpCases(
        small, wide,
        [shape(TOKENS // 4096, 4096, model.heads, model.kv_heads, model.head_dim) for model in MODELS[:-1]],
        [shape(4, 4096, 32, 8, 128), shape(2, 4096, 32, 32, 128, True), shape(3, 1365, 12, 4, 80),
         shape(1, 16, 16, 4, 64)],
    ),
}  # fmt: skip
