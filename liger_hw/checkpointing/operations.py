"""Number the operations of a layer, so that a plan can name them."""

import torch

from liger_hw._torch import is_view_operation, operation_schema, written_arguments

# namespaces whose operations have a tag if they draw random numbers, and communicate with no other rank
KNOWN_NAMESPACES = {"aten", "prims", "liger_hw"}

FREE, NUMBERED, MUTATES = "free", "numbered", "mutates"
_kinds = {}  # operation -> its kind, as far as the operation alone decides


def kind_of(operation, args) -> str:
    """Return the kind of an operation that a layer runs.

    Returns:
        NUMBERED: a plan may keep its results. The forward and each recomputation run the same numbered operations.
        MUTATES: it writes to one of its arguments.
        FREE: it costs nothing (views, allocations), or may be missing from one of the two runs: `detach`, which
            checkpointing adds, and casts of parameters, which autocast remembers.
    """
    kind = _kinds.get(operation)
    if kind is None:  # functools.cache takes 0.07 us more a call (an x86 CPU)
        kind = _kinds[operation] = _kind(operation)
    if kind is NUMBERED and not any(_is_computed(x) for x in args):
        return FREE
    return kind


def _kind(operation):
    schema = operation_schema(operation)
    if schema is None or operation.namespace == "prim":  # operations of higher order, queries of metadata
        return FREE
    if schema.is_mutable:
        return MUTATES
    allocates = "empty" in schema.name  # memory without values, which no proof can compare
    return FREE if allocates or is_view_operation(operation) else NUMBERED


def _is_computed(x):
    """Tell whether an argument holds tensors other than parameters."""
    if isinstance(x, torch.Tensor):
        return not isinstance(x, torch.nn.Parameter)
    return isinstance(x, (list, tuple)) and any(map(_is_computed, x))


def tensors_in(values):
    """Yield the tensors among an operation's arguments or results."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def written(operation, args, kwargs):
    """Yield the tensors that an operation writes to."""
    for argument in written_arguments(operation, args, kwargs):
        yield from tensors_in(argument)


def random_state(operation, device):
    """Return the states of the random generators if `operation` may draw, else None."""
    is_tagged = torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())
    if not is_tagged and getattr(operation, "namespace", "") in KNOWN_NAMESPACES:
        return None
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return torch.cat(states)


def communicates(operation):
    """Tell whether ranks run an operation together."""
    if "c10d" in (namespace := getattr(operation, "namespace", "")) or namespace == "symm_mem":
        return True
    schema = None if namespace in KNOWN_NAMESPACES else operation_schema(operation)
    return schema is not None and any(argument.name == "group_name" for argument in schema.arguments)


def memory_of(x) -> int:
    """Return the address of a tensor's storage; 0 of a sparse tensor, which has several."""
    return x.untyped_storage().data_ptr() if x.layout is torch.strided else 0
