r"""Declare an op once: its registered op of torch, fake, autograd function and dispatch follow.

    def _validate(x, weight): ...                            raises ValueErrors

    @op(validate=_validate)
    def scaled(x: torch.Tensor, weight: torch.Tensor, factor: float = 1.0):
        return ...                                           reference: signature, docs, CPU path and parity oracle

    scaled.shards(x="... c", weight="c", returns="x")        DTensors: see `liger_hw.sharding`

    @scaled.cost
    def _(x, weight, factor=1.0): return Cost(...)           bytes and operations, for the benchmark

    @raw()
    def _scaled_forward(x: torch.Tensor, weight: torch.Tensor, factor: float, *, y):
        launch(...)                                          writes to y, memory like x

    @_scaled_forward.backward()
    def _scaled_backward(x, weight, factor, dy, *, dx, dweight):
        launch(...)                                          writes to the gradients that are not None

    scaled.register("triton")(_scaled_forward.apply)         any GPU

Names connect the functions. The backward reads x, weight and factor, so the autograd function keeps them; statistics
that the forward writes are read by their names, too. It takes dy, so `apply` returns y. It has dx and dweight after the
star, so x and weight get gradients; each is None where nobody needs it. `torch.ops.liger_hw` has both functions under
their names, without the underscore; their fakes are the allocations of what follows the star.

| the op has | declare |
|---|---|
| results that are not one tensor like the first | `@raw(lambda x: (empty_rows(x), x.new_empty(...)))`, `*, y, mean` |
| statistics for the backward alone | an input `needs_grad: bool`, which `apply` fills; None for them in `@raw` |
| a gradient not like its input | `@_scaled_forward.backward(lambda dy, rows: dy.new_empty(rows, dy.shape[-1]))` |
| a result that may get no gradient | `dy: torch.Tensor \| None`: no zeros are made for it |
| a backward of other `raw` functions or of torch's | `*, x_grad, weight_grad`, and it returns the gradients, or None |
| the same, as one op of torch | `@_scaled_forward.backward(fake)`, a function that allocates these gradients |
| a forward of them | `@differentiable()` instead of `@raw()` |
| a part of one, one op where torch.compile traces it | `@traced_as_one(fake)`, a function that allocates its results |
| a reference that compilers fuse with its neighbours | `@op(fusible=True)`: they compute small tensors by it |
| a kernel so short that an op's call takes longer | `@raw(..., most_rows=2048)`: compiled code launches it itself |
| a kernel that writes over its arguments | `mutates=("x",)` |
| options that only the backward reads | further annotated parameters of the backward: the last arguments of `apply` |
| results without a gradient, such as counts | `without_gradient="counts"` for `backward`; `apply` returns them |
| results that depend on some inputs alone | `depends={"q_out": ["q"]}`: q_out needs a gradient where q does |
| a backward that destroys what it reads | `ctx` as a parameter; it sets `ctx.spent` to the error of a second backward |
| a caller of its backward | a bool for each gradient: `_scaled_backward(x, weight, factor, dy, True, False)` |
| an option | an input with an annotation of torch's schemas: bool, int, float, str, or None beside them |
| arguments to prepare | a function under `@scaled.register("triton")` that calls `_scaled_forward.apply` |

`op` is in `ops.py`, `raw` and `differentiable` are in `declarations.py`. `registration.py` and `wiring.py` generate the
functions between autograd and those of a kernel's file;
`linecache.getlines(_scaled_forward.apply.__code__.co_filename)` shows them. An op of torch needs a name of its own;
other functions, which register nothing, may be called `_`.
"""

from liger_hw.dispatch.cost import Cost
from liger_hw.dispatch.declarations import differentiable, raw
from liger_hw.dispatch.function import Function
from liger_hw.dispatch.ops import OPS, Op, op
from liger_hw.dispatch.precision import autocast_as, autocasts, cast_for_linear, kept_casts, uncast, widen
from liger_hw.dispatch.registration import empty_rows, traced_as_one

__all__ = [
    "OPS", "Cost", "Function", "Op", "autocast_as", "autocasts", "cast_for_linear", "differentiable", "empty_rows",
    "kept_casts", "op", "raw", "traced_as_one", "uncast", "widen",
]  # fmt: skip
