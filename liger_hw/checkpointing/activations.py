"""Plan the activations of a Hugging Face model within a budget."""

import torch

from liger_hw._torch import is_compiled
from liger_hw.checkpointing.budget import host_bytes_of
from liger_hw.checkpointing.passes import COMPILED_MODEL, Activations, plans_of
from liger_hw.checks import check


def activations(model, budget="auto", host_budget=None):
    """Decide which results of `model`'s decoder layers to keep, recompute, or offload to the host.

    Where torch's operations are deterministic, losses and gradients stay bitwise equal to those without it. The first
    three training passes (a forward with its backward) recompute every layer, as `gradient_checkpointing_enable`
    does, and measure: the time of each operation of a layer, the bytes of its results, and the memory over the pass.
    The fourth pass follows the plan and proves it, by recomputing what it keeps, too. A batch with more tokens than
    before is measured anew. A layer is recomputed with the parameters and buffers of its forward; one that the
    program changed in place since raises an error in the backward. Under torch.func's transforms, forward-mode AD and
    `allow_mutation_on_saved_tensors` the layers run without a plan.

    Args:
        model: a `PreTrainedModel`, or a module around one such as a PEFT model. One that is not on its device yet may
            move before its first pass.
        budget: the most device memory that tensors may take at any time of a pass: bytes (an int, or a string such as
            "100GiB"); a share of the device's memory (a float up to 1); "auto", the memory that is free after the
            measured passes, less 5%. On a CPU, which does not count memory, the bytes that the layers keep beyond their
            inputs. None: give every layer its former checkpointing back.
        host_budget: the most host memory for offloaded results: bytes, or 0 to offload nothing. Default: half of the
            free memory, divided by the processes of this host (LOCAL_WORLD_SIZE); 0 for a model on a CPU.

    Returns:
        the `Activations`, with the `ActivationPlan` in its attribute `plan` from the fourth pass on; `print` shows a
        table, and `undo()` ends it. None where `budget` is None.

    Raises:
        ValueError: `budget` or `host_budget` is out of range (from the first pass, if the model is not on its device
            yet); nothing fits the budget (at the latest from the first backward, before the optimizer's first step,
            unless the optimizer's state makes it too small); `model` has no layers that transformers can checkpoint, is
            compiled, or needs no gradient.

    Examples:
        >>> plan = liger_hw.activations(model, "64MiB")
    """
    check(isinstance(model, torch.nn.Module), "model", type(model).__name__, "a torch.nn.Module")
    for former in plans_of(model):
        former.undo()
    if budget is None:
        return None
    layers = _layers(model)
    if any(map(is_compiled, model.modules())):
        raise ValueError(COMPILED_MODEL)
    device = next(layers[0].parameters()).device
    moves = device.type == "meta" or device.type == "cpu" and torch.accelerator.is_available()
    device = None if moves else device
    return Activations(model, layers, budget, host_bytes_of(host_budget, device), device)


def _layers(model):
    """Return the outermost layers that transformers can checkpoint.

    Raises:
        ValueError: there is none, or none needs a gradient.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inner = {id(m) for layer in layers for m in layer.modules() if m is not layer}
    layers = [layer for layer in layers if id(layer) not in inner]
    allowed = "a model whose layers derive from transformers' GradientCheckpointingLayer"
    check(layers, "model", f"{type(model).__name__}, which is left alone: it has no such layers", allowed)
    trains = any(p.requires_grad for p in model.parameters())
    check(trains, "model", "no parameter that needs a gradient", "one at least")
    return layers
