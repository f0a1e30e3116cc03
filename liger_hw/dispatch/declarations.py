"""The decorators `raw` and `differentiable`, which declare functions with a backward."""

import inspect

from liger_hw.dispatch.generated import arguments_by_name
from liger_hw.dispatch.registration import default_allocation, register
from liger_hw.dispatch.wiring import with_backward


def raw(outputs=None, *, mutates=(), returns="y", most_rows=0):
    """Register a function that launches kernels as an op of `torch.ops.liger_hw`.

        @raw()
        def _rms_norm_forward(x: torch.Tensor, weight: torch.Tensor | None, eps: float, *, y):
            launch(...)

    The parameters after the star are memory for the results. A caller does not pass them, and gets them as results. The
    registered op's fake, which tracers run, is their allocation.

    Eager calls run the function itself: a registered op with autograd costs 36 us more a step (an H200's host). Under
    torch.compile or a dispatch mode (FakeTensor, selective checkpointing, FLOP counting) and for a tensor subclass, the
    call goes to the registered op, which they can see, save, shard or refuse.

    A parameter annotated with a NamedTuple is one argument of the function. The registered op has one for each field,
    named after both.

    Args:
        outputs: a function of some of the arguments, taken by name, that allocates the results in their order, None for
            an absent one. By default a result has the shape of the first tensor, and a gradient dx that of x, or None
            where a flag x_grad among the inputs is false. A function without a star allocates and returns its results
            itself; then `outputs` is its fake.
        mutates: names of the tensor arguments written to. Such a function launches one kernel, so nothing is written
            yet if that launch fails, and the function can run again with another configuration.
        returns: names of the results of a function without a star, for `backward`.
        most_rows: compiled code launches the kernels itself where the first tensor has no more rows; see `inline`.

    Returns:
        A function with the attributes `opaque`, the registered op, and `backward`: see `wiring.with_backward`.
    """

    def decorate(function):
        parameters = inspect.signature(function).parameters.values()
        inputs = {p.name: p.annotation for p in parameters if p.kind is not p.KEYWORD_ONLY}
        results = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        allocation = default_allocation(inputs, results)
        if outputs is not None:
            allocation = f"{', '.join(results) or 'y'} = allocate({arguments_by_name(outputs, inputs)})"
        call = register(function, inputs, results, allocation, mutates, most_rows=most_rows, allocate=outputs)
        return with_backward(call, inputs, results or returns.split())

    return decorate


def differentiable(returns="y"):
    """Give a function the decorator `backward`, and register nothing.

    The function calls operations of torch or `raw` functions.

    Args:
        returns: names of its results.
    """

    def decorate(function):
        inputs = {p.name: p.annotation for p in inspect.signature(function).parameters.values()}
        return with_backward(function, inputs, returns.split())

    return decorate
