"""Cases of neighborhood attention."""

from liger_hw.testing.case import OpCases, Shape


def small(new):
    def inputs(*shape):
        return tuple(new.randn(*shape) for _ in range(3))

    yield inputs(2, 3, 9, 24), {}  # fewer positions than the kernel reaches
    yield inputs(1, 2, 300, 8), {"kernel_size": 5, "dilation": 3}  # several tiles
    yield inputs(1, 1, 150, 64), {"kernel_size": 9, "dilation": 17}
    for size, dilation in ((1, 1), (1, 4), (3, 2), (13, 1)):
        yield inputs(2, 1, 7, 33), {"kernel_size": size, "dilation": dilation, "scale": 0.5}
    yield inputs(1, 2, 1, 16), {}
    yield inputs(1, 2, 5, 1), {}
    yield inputs(1, 1, 3, 1001), {"kernel_size": 3}
    learned = inputs(1, 2, 12, 16)
    for learns in (0, 1, 2):
        yield tuple(x if i == learns else x.detach() for i, x in enumerate(learned)), {"kernel_size": 3}
        yield tuple(x.detach() if i == learns else x for i, x in enumerate(learned)), {"kernel_size": 3}
    for shape in ((0, 2, 5, 8), (2, 2, 0, 8), (1, 2, 5, 0)):
        yield inputs(*shape), {}


def wide(new):
    for head_dim in (32, 64, 80, 96, 128, 192, 256, 512, 33):
        yield tuple(new.randn(1, 2, 256, head_dim) for _ in range(3)), {}
    # heads that are a transposed dimension
    yield tuple(new.randn(1, 256, 2, 64, grad=False).transpose(1, 2).requires_grad_() for _ in range(3)), {}


def shape(batch, heads, positions, head_dim, **options):
    size = batch, heads, positions, head_dim
    label = " ".join(["x".join(map(str, size)), *(f"{name}={value}" for name, value in options.items())])
    return Shape(label, lambda new: tuple(new.large(*size) for _ in range(3)), options)


CASES = {
    "neighborhood_attention": OpCases(
        small, wide,
        [shape(4, 12, 4096, 64), shape(2, 32, 4096, 128)],  # the heads of a model of 768 columns, of an 8B
        [
            shape(4, 12, 4096, 64, kernel_size=31), shape(4, 12, 4096, 64, dilation=8), shape(2, 16, 2048, 80),
            shape(1, 12, 128, 64),
        ],
    ),
}  # fmt: skip
