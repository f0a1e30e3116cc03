"""Make autograd functions of a forward and a backward by the names of their parameters."""

import functools
import inspect
from typing import get_args

import torch
from torch.compiler import is_compiling

from liger_hw._torch import in_forward_ad, no_saved_tensors_hooks, transforms_active
from liger_hw.dispatch.function import Function, refuse_lost_backward, saved, strides
from liger_hw.dispatch.generated import arguments_by_name, define, described, function_source
from liger_hw.dispatch.registration import default_allocation, is_tuple, register
from liger_hw.spelling import nearest


def with_backward(forward, inputs, results):
    """Return `forward` with the decorator `backward`, after whose use it has `apply`.

    Args:
        inputs: name -> annotation. results: names.
    """
    forward.backward = functools.partial(_backward, forward, inputs, results)
    return forward


def _backward(forward, inputs, results, outputs=None, *, without_gradient="", depends=None, mutates=()):
    """Make the function below the backward of `forward`, and `forward.apply` its differentiable call.

        @_rms_norm_forward.backward()
        def _rms_norm_backward(x, weight, eps, dy, *, dx, dweight):
            launch(...)

    Its parameters before the star, by name: inputs and results of the forward, which the forward keeps for it; for a
    result y that `apply` returns, the incoming gradient dy. With the annotation `torch.Tensor | None` it is None
    instead of zeros where no gradient reaches y. `apply` does not take an input `needs_grad: bool` of the forward: it
    tells the forward whether a backward may follow.

    The parameters after the star are the inputs that get gradients, either as

    - dx, dweight: memory for the gradients, None for one that nobody needs. The function writes to it, and is
      registered like a `raw` function, with flags x_grad and weight_grad as its last inputs.
    - x_grad, weight_grad: whether each gradient is needed. The function returns them, None for an absent one. Without
      `outputs` it is not registered, and calls `raw` functions or torch.

    A further parameter with an annotation is a last argument of `apply`, which the forward does not see, unless it has
    a default. `ctx` is the context, where the function may set `spent`, the error of a second backward.

    Args:
        outputs: as in `raw`, for the gradients. By default each has the shape of its input.
        without_gradient: names of further results that `apply` returns.
        depends: result -> the inputs on which it depends. Where none of them needs a gradient, the result needs none.
        mutates: as in `raw`.
    """

    def decorate(function):
        wiring = _Wiring(forward, inputs, results, function, outputs, without_gradient.split(), depends or {})
        gradient = function
        if wiring.registered:
            gradient = register(
                function, wiring.backward_inputs(), [f"d{name}" for name in wiring.gradients],
                wiring.allocation(), mutates, wiring.writes, allocate=outputs,
            )  # fmt: skip
        forward.apply = wiring.apply(gradient)
        return gradient

    return decorate


class _Wiring:
    """The source of the functions between autograd and a forward and its backward.

    Attributes:
        arguments: inputs that a caller passes. results: of the forward. returned: those that a caller gets.
        incoming: names of their gradients. gradients: inputs that get one.
        saved: tensors, and NamedTuples of tensors, that the backward reads. options: other inputs that it reads.
        writes: the backward writes to memory for the gradients, else it returns them. registered: it is an op of torch.
    """

    def __init__(self, forward, inputs, results, backward, outputs, without_gradient, depends):
        self.forward, self.inputs, self.results, self.depends = forward, inputs, results, depends
        self.backward, self.outputs = backward, outputs
        self.arguments = [name for name in inputs if name != "needs_grad"]
        self.without_gradient = without_gradient
        self.parameters = inspect.signature(backward).parameters
        outgoing = [p.name for p in self.parameters.values() if p.kind is p.KEYWORD_ONLY]
        read = [name for name in self.parameters if name not in outgoing]
        known = [*inputs, *results, *(f"d{name}" for name in results), "ctx"]
        required = [name for name in read if self.parameters[name].default is inspect.Parameter.empty]
        self.further = [name for name in required if name not in known]
        for name in (n for n in self.further if self.parameters[n].annotation is inspect.Parameter.empty):
            near = nearest(name, known)
            raise TypeError(
                f"{described(backward)}: got the parameter {name!r}{f'; did you mean {near!r}?' if near else '.'} "
                f"Allowed: {', '.join(known)}, or with an annotation a further argument of apply"
            )
        self.arguments += self.further
        self.returned = [name for name in results if f"d{name}" in read or name in without_gradient]
        self.incoming = [f"d{name}" for name in self.returned]
        self.writes = all(name[1:] in inputs for name in outgoing)
        self.registered = outputs is not None or self.writes
        self.gradients = [name[1:] if self.writes else name.removesuffix("_grad") for name in outgoing]
        unknown = [name for name in self.gradients if name not in self.arguments]
        if unknown or not outgoing:
            raise TypeError(
                f"{described(backward)}: got {', '.join(outgoing) or 'nothing'} after the star, allowed: d or _grad "
                f"with {', '.join(self.arguments)}"
            )
        kept = [name for name in read if name in (*inputs, *results, *self.further)]
        self.saved = [name for name in kept if name in results or _has_tensors(inputs.get(name))]
        self.options = [name for name in kept if name not in self.saved]
        self.flags = [f"{name}_grad" for name in self.gradients]
        differentiable = [name for name in self.incoming if name[1:] not in without_gradient]
        optional = {n for n in differentiable if type(None) in get_args(self.parameters[n].annotation)}
        # the gradients that the backward takes as zeros where another result has one
        self.filled = [n for n in differentiable if n not in optional] if len(differentiable) > 1 else []
        self.takes_context = "ctx" in read
        arguments_by_name(backward, ["ctx", *kept, *self.incoming, *outgoing])  # raises a TypeError for others

    def backward_inputs(self):
        """Return name -> annotation of the inputs of a backward that is registered."""
        annotations = {}
        for name, p in self.parameters.items():
            if p.kind is not p.KEYWORD_ONLY:
                known = self.inputs.get(name, torch.Tensor)
                annotations[name] = known if p.annotation is p.empty else p.annotation
        return annotations | dict.fromkeys(self.flags, bool)

    def allocation(self):
        names = [f"d{name}" for name in self.gradients]
        if self.outputs is not None:
            return f"{', '.join(names)} = allocate({arguments_by_name(self.outputs, self.backward_inputs())})"
        unread = [name for name in self.gradients if name not in self.parameters]
        if unread:
            raise TypeError(
                f"{described(self.backward)}: got no parameter {', '.join(unread)}; add it, or pass `outputs`"
            )
        return default_allocation(self.backward_inputs(), names)

    def apply(self, gradient):
        """Return the differentiable function of `arguments`."""
        name, names = self.forward.__name__.strip("_").removesuffix("_forward"), ", ".join(self.arguments)
        returned = ", ".join(self.returned)
        node = f"{''.join(word.title() for word in name.split('_'))}Function"
        functions = define(
            name,
            function_source(f"forward(ctx, {names})", [*self._forward(), *self._save(), f"return {returned}"])
            + function_source(f"backward(ctx, {', '.join(self.incoming)})", [*self._restore(), *self._gradients()])
            + function_source(f"apply({names})", [
                "if is_compiling() or transforms_active() or in_forward_ad():",
                "    refuse_lost_backward()",
                f"    return Node.apply({names})",
                "if not is_grad_enabled():",
                *(f"    {line}" for line in [*self._forward("False"), f"return {returned}"]),
                f"return node({names})",
            ]),
            run_forward=self.forward, run_backward=gradient, is_compiling=is_compiling, in_forward_ad=in_forward_ad,
            transforms_active=transforms_active, is_grad_enabled=torch.is_grad_enabled,
            refuse_lost_backward=refuse_lost_backward, saved=saved, strides=strides,
            no_saved_tensors_hooks=no_saved_tensors_hooks,
            shape_and_kind=_shape_and_kind, zeros_for_none=_zeros_for_none,
            **{f"{name}_type": self.inputs[name] for name in self.saved if is_tuple(self.inputs.get(name))},
        )  # fmt: skip
        members = {part: staticmethod(functions[part]) for part in ("forward", "backward")}
        functions["Node"] = type(node, (Function,), members | {"__module__": self.forward.__module__})
        functions["node"] = functions["Node"].apply_with_graph
        return functions["apply"]

    def _forward(self, needs_grad="True in ctx.needs_input_grad"):
        arguments = ", ".join(needs_grad if name == "needs_grad" else name for name in self.inputs)
        return [f"{', '.join(self.results)} = run_forward({arguments})"]

    def _save(self):
        if self.saved:
            saved = ", ".join(f"*{name}" if is_tuple(self.inputs.get(name)) else name for name in self.saved)
            yield f"ctx.save_for_backward({saved})"  # `save`, inlined
            yield f"ctx.strides = None if no_saved_tensors_hooks() else strides(({saved},))"
        if self.options:
            yield f"ctx.options = {', '.join(self.options)},"
        yield "ctx.set_materialize_grads(False)"
        if self.filled:
            yield f"ctx.like = {', '.join(f'shape_and_kind({name[1:]})' for name in self.filled)},"
        if self.takes_context:
            yield "ctx.spent = None"
        if self.without_gradient:
            yield f"ctx.mark_non_differentiable(*[x for x in ({', '.join(self.without_gradient)},) if x is not None])"
        for result in self.depends:
            yield f"if {result} is not None and not ({self._needed(result)}):"
            yield f"    ctx.mark_non_differentiable({result})"

    def _needed(self, result):
        """Return the condition that a result which `depends` on inputs needs a gradient."""
        return " or ".join(f"ctx.needs_input_grad[{self.arguments.index(name)}]" for name in self.depends[result])

    def _restore(self):
        if self.takes_context:
            yield "if ctx.spent is not None:"
            yield "    raise RuntimeError(ctx.spent)"
        for result in self.depends:
            yield f"d{result} = d{result} if {self._needed(result)} else None"
        # no gradient stays none, as in torch's own functions: an optimizer decays a parameter whose gradient is zeros
        yield f"if {' and '.join(f'{name} is None' for name in self.incoming)}:"
        yield f"    return {'None, ' * len(self.arguments)}"
        if self.filled:
            yield f"{', '.join(self.filled)} = zeros_for_none(({', '.join(self.filled)}), ctx.like)"
        fields = {name: self.inputs[name]._fields for name in self.saved if is_tuple(self.inputs.get(name))}
        fields = {name: [f"{name}_{field}" for field in names] for name, names in fields.items()}
        if self.saved:
            tensors = [", ".join(fields.get(name, [name])) for name in self.saved]
            yield f"{', '.join(tensors)}, = saved(ctx)"
        for name, names in fields.items():
            yield f"{name} = {name}_type({', '.join(names)})"
        if self.options:
            yield f"{', '.join(self.options)}, = ctx.options"
        for flag, name in zip(self.flags, self.gradients):
            yield f"{flag} = ctx.needs_input_grad[{self.arguments.index(name)}]"

    def _gradients(self):
        known = ["ctx", *self.saved, *self.options, *self.incoming, *self.flags]
        if self.registered:
            arguments = ", ".join(name if name in known else "None" for name in self.backward_inputs())
        else:
            arguments = arguments_by_name(self.backward, known)
        yield f"{', '.join(f'd{name}' for name in self.gradients)} = run_backward({arguments})"
        yield f"return {', '.join(f'd{name}' if name in self.gradients else 'None' for name in self.arguments)},"


def _shape_and_kind(result):
    """Return what zeros like a result need; None for an absent one."""
    return None if result is None else (result.shape, {"dtype": result.dtype, "device": result.device})


def _zeros_for_none(grads, like):
    """Return the gradients of several results, zeros where there is none.

    `like`: `_shape_and_kind` of each result.
    """
    return [
        torch.zeros(known[0], **known[1]) if grad is None and known is not None else grad
        for grad, known in zip(grads, like)
    ]


def _has_tensors(annotation):
    if is_tuple(annotation):
        return any(map(_has_tensors, annotation.__annotations__.values()))
    return torch.Tensor in (annotation, *get_args(annotation))
