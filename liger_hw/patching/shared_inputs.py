"""Compute the linear layers with adapters to which an attention gives one input together.

They are layers as `q_proj`, `k_proj` and `v_proj`, which share the gradient of their input. The attention's own forward
runs. Where its code gives several children the same argument, a call of the first computes all of them, and each of the
others returns its result in the same call of the attention, if nothing that autograd watches has changed since.
"""

import ast
import inspect
import operator
import textwrap
import threading

import torch

from liger_hw._torch import storage_id, tensor_version
from liger_hw.dispatch import autocasts
from liger_hw.kernels.linear.lora_linear import lora_linear_group, share_dx
from liger_hw.patching.hooks import is_intercepted
from liger_hw.patching.projection import adapter_of

_thread = threading.local()


def groups_in(function):
    """Return tuples of names of children to which a method gives one argument.

    They are in the order of its code, which calls each child once, and does not set the argument.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ()
    calls, groups = [], {}
    nodes = list(ast.walk(tree))
    for node in nodes:
        match node:
            case ast.Call(ast.Attribute(ast.Name("self"), child), [ast.Name(argument)], []):
                calls.append((node.lineno, node.col_offset, child, argument))
    children = [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    for *_, child, argument in sorted(calls):
        if children.count(child) == 1 and argument not in assigned:
            groups.setdefault(argument, []).append(child)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


class Sharing:
    """Hold results of one call of `module` for children of `groups`, which share inputs."""

    def __init__(self, module, groups):
        self.module, self.groups, self.results = module, groups, {}

    def __enter__(self):
        self.outer, _thread.sharing = getattr(_thread, "sharing", None), self

    def __exit__(self, *error):
        _thread.sharing = self.outer
        self.results.clear()  # an exception may keep this object

    def take(self, layer, x, adapted):
        """Return the result of `layer` for `x`, or None."""
        if layer in self.results:
            y, facts = self.results.pop(layer)
            return y if _are_equal(facts, _facts(x, adapted)) else None
        modules = self.module._modules
        names = next((names for names in self.groups if modules.get(names[0]) is layer), ())
        layers = [modules.get(name) for name in names]
        if not layers or adapted.dropout or adapted.magnitudes is not None or is_intercepted(layer):
            return None
        adapters = [adapted[:5], *(adapter_of(child, x) for child in layers[1:])]
        if None in adapters or not all(map(_finds_again, layers, adapters)) or not share_dx(x, *adapters):
            return None
        results = lora_linear_group(x, *adapters)
        for child, adapter, y in list(zip(layers, adapters, results))[1:]:
            self.results[child] = y, _facts(x, adapter)
        return results[0]


def result_of(layer, x, adapted):
    """Return what a sibling has computed for `layer`, or now all; None without siblings."""
    sharing = None if torch.compiler.is_compiling() else getattr(_thread, "sharing", None)
    return None if sharing is None else sharing.take(layer, x, adapted)


def _finds_again(layer, adapted):
    """Tell whether a layer has one adapter without a bias, whose tensors another call finds."""
    # an adapter that is not active may hold its weight elsewhere
    factors = [factor._parameters.get("weight") for factor in layer._modules["lora_A"]._modules.values()]
    bias = layer._modules["base_layer"]._parameters.get("bias")
    return adapted[1] is bias and any(adapted[2] is factor for factor in factors)


def _facts(x, adapted):
    """Return what a layer's result depends on: (tensors, values, what keeps them alive)."""
    weight, bias, lora_a, lora_b, scaling = adapted[:5]
    tensors, device, memory = [x, lora_a, lora_b], x.device.type, None
    if isinstance(weight, torch.Tensor):
        tensors.append(weight)
    else:  # of 4 bits, whose numbers are another view of a parameter's memory in each call
        packed, *state = weight
        tensors += [t for t in state if isinstance(t, torch.Tensor)]
        memory = storage_id(packed)
    if bias is not None:
        tensors.append(bias)
    autocast = autocasts(device) and torch.get_autocast_dtype(device)
    return tensors, [*map(tensor_version, tensors), scaling, torch.is_grad_enabled(), autocast, memory], weight


def _are_equal(first, second):
    (tensors, values, _), (others, other_values, _) = first, second
    return values == other_values and all(map(operator.is_, tensors, others))
