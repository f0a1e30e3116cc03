"""Leave the logits of a column-parallel head uncomputed.

Each rank holds a part of the vocabulary. The styles of torch (`parallelize_module`) and of transformers (`tp_plan`)
gather the logits after the head's forward. The head of a patched model returns `ColumnParallelLogits` instead, from
which the fused loss of a sharded vocabulary computes. Any other use by the model gathers the logits as the style would,
on all ranks alike.
"""

import inspect

import torch

from liger_hw._torch import column_parallel_input, finish_collective, forward_hooks, is_dtensor
from liger_hw.patching.traced_logits import TracedLogits
from liger_hw.sharding import part_of

# steps; others concern columns, which may be another rank's
SHARDED_STEPS = {"copy", "div", "mul", "rows", "tanh", "to", "view"}


class ColumnParallelLogits(TracedLogits):
    """Uncomputed logits of a head whose weight is a DTensor with Shard(0)."""

    @property
    def group(self):
        return part_of(self.head.weight.device_mesh, 0, self.head.weight.shape[0])

    @property
    def fits(self):
        return super().fits and SHARDED_STEPS.issuperset(name for name, _ in self.record.steps)

    def _tensors(self):
        bias = self.head.bias
        return self.record.hidden, self.head.weight.to_local(), None if bias is None else bias.to_local()


def column_parallel_logits(head, hidden):
    """Return `ColumnParallelLogits`; None for another style or a rank without a part."""
    from torch.distributed.tensor import Partial, Shard

    whole_input = column_parallel_input(head) or _transformers_input(head)
    sharded = is_dtensor(head.weight) and head.weight.placements == (Shard(0),)
    if not sharded or whole_input is None or part_of(head.weight.device_mesh, 0, head.weight.shape[0]) is None:
        return None
    hidden = whole_input(hidden)
    finish_collective(hidden)
    return ColumnParallelLogits.after(head, hidden.to_local(grad_placements=[Partial()]))


def _transformers_input(head):
    """Return the function that a `tp_plan` applies to a head's input, or None."""
    try:
        from torch.distributed.tensor import Replicate
        from transformers.distributed.tensor_parallel import ColwiseParallel
    except ImportError:  # a transformers with other styles
        return None
    forward = head.__dict__.get("forward")
    variables = inspect.getclosurevars(forward).nonlocals if inspect.isfunction(forward) else {}
    style = variables.get("self")
    fits = type(style) is ColwiseParallel and not forward_hooks(head)
    if not fits or style.output_layouts != Replicate() or not style.use_local_output:
        return None
    wrapped = getattr(variables["original_forward"], "__func__", None)
    if style.should_use_local_tensors(head) or wrapped not in (torch.nn.Linear.forward, type(head).forward):
        return None
    return lambda hidden: style.transform_inputs_pre_forward(head, (hidden,), {}, variables["mesh"])[0][0]
