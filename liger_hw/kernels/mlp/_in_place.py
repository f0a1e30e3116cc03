"""Write the gradients of gated linear units over their inputs, where that is safe."""

import torch

from liger_hw._torch import backward_keeps_graph, is_plain, saved_tensors_are_kept
from liger_hw.checks import check
from liger_hw.kernels._rows import rows_of


def goes_in_place(gate, up, in_place):
    """Tell whether the gradients of `gate` and `up` (or None) overwrite them.

    Raises:
        ValueError: `in_place` is set, and the gradients would overwrite other memory.
    """
    if not in_place or up is not None and gate.dtype != up.dtype or torch.compiler.is_compiling():
        return False
    if not is_plain(gate, gate if up is None else up) or saved_tensors_are_kept():
        return False
    if torch.is_grad_enabled() and gate.requires_grad and (up is None or up.requires_grad):
        _check_memory(gate, up)
    return True


def writes_over(in_place, gate_grad, up_grad):
    """Tell whether this backward writes over its inputs.

    One with retain_graph=True does not: another may follow.
    """
    return in_place and gate_grad and up_grad and not backward_keeps_graph()


def overwritten(gate, up):
    """Return `gate` and `up` (or None), which now hold their gradients."""
    for x in (gate,) if up is None else (gate, up):
        torch.autograd.graph.increment_version(x)  # so that another function that saved it raises an error
    return gate.detach(), None if up is None else up.detach()


def _check_memory(gate, up):
    """Refuse inputs whose gradients cannot be written over them without overwriting other values."""
    named = {"x": gate} if up is None else {"gate": gate, "up": up}
    for name, x in named.items():
        check(not x.is_leaf, name, "a leaf that wants a gradient", "with in_place, an intermediate result")
        rows, stride = rows_of(x)
        disjoint = rows.data_ptr() == x.data_ptr() and (x.numel() <= x.shape[-1] or stride >= x.shape[-1])
        check(disjoint, name, f"strides {x.stride()}", "with in_place, rows of unit stride that do not overlap")
    check(up is None or _disjoint(gate, up), "up", "memory shared with gate", "with in_place, memory of its own")


def _disjoint(a, b):
    """Tell whether `a` and `b` share no memory; rows of one stride may alternate."""
    if a.numel() == 0:
        return True
    cols = a.shape[-1]
    steps, distance = a.numel() // cols - 1, b.data_ptr() - a.data_ptr()
    width, stride_a, stride_b = cols * a.element_size(), _row_bytes(a), _row_bytes(b)
    reach_a, reach_b = steps * stride_a + width, steps * stride_b + cols * b.element_size()
    if distance >= reach_a or -distance >= reach_b:
        return True
    return a.dtype == b.dtype and stride_a == stride_b and width <= distance % stride_a <= stride_a - width


def _row_bytes(x):
    return rows_of(x)[1] * x.element_size()
