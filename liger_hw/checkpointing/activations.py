"""Plan the activations of a Hugging Face model within a budget."""

import os

import torch

from liger_hw._torch import is_compiled
from liger_hw.checkpointing.passes import COMPILED, Activations, LayerCall
from liger_hw.checks import check, refuse

HOST_SHARE = 0.5  # of the host's free memory that offloaded results may take, by default


def activations(model, budget="auto", host_budget=None):
    """Decide which results of `model`'s decoder layers to keep, recompute, or offload to the host.

    Where torch's operations are deterministic, losses and gradients stay bitwise equal to those without it. The first
    three training passes (a forward with its backward) recompute every layer, as `gradient_checkpointing_enable` does,
    and measure: the time of each operation of a layer, the bytes of its results, and the memory over the pass. The
    fourth pass follows the plan and proves it, by recomputing what it keeps, too. A batch with more tokens than before
    is measured anew.

    Args:
        model: a `PreTrainedModel`, or a module around one such as a PEFT model, on its device.
        budget: the most device memory that tensors may take at any time of a pass: bytes (an int); a share of the
            device's memory (a float up to 1); "auto", the memory that is free after the measured passes, less 5%. On a
            CPU, which does not count memory, the bytes that the layers keep beyond their inputs. None: give every layer
            its former checkpointing back.
        host_budget: the most host memory for offloaded results: bytes, or 0 to offload nothing. Default: half of the
            free memory, divided by the processes of this host (LOCAL_WORLD_SIZE).

    Returns:
        the `Activations`, with the `Plan` in its attribute `plan` from the fourth pass on; `print` shows a table, and
        `undo()` ends it. None where `budget` is None.

    Raises:
        ValueError: `budget` or `host_budget` is out of range; nothing fits the budget (at the latest from the first
            backward, before the optimizer's first step, unless the optimizer's state makes it too small); `model` has
            no layers that transformers can checkpoint, is compiled, or needs no gradient.
    """
    check(isinstance(model, torch.nn.Module), "model", type(model).__name__, "a torch.nn.Module")
    for former in {id(a): a for a in map(_activations_of, model.modules()) if a is not None}.values():
        former.undo()
    if budget is None:
        return None
    layers = _layers(model)
    if any(map(is_compiled, model.modules())):
        raise ValueError(COMPILED)
    device = next(layers[0].parameters()).device
    return Activations(model, layers, _budget(budget, device), _host_budget(host_budget))


def _activations_of(module):
    call = vars(module).get("_gradient_checkpointing_func")
    return call.activations if isinstance(call, LayerCall) else None


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
    check(
        any(p.requires_grad for p in model.parameters()), "model", "no parameter that needs a gradient", "one at least"
    )
    return layers


def _budget(budget, device):
    """Return the budget in bytes, or "auto"."""
    allowed = 'bytes (an int), a share of the device\'s memory (a float up to 1), "auto" or None'
    if device.type == "cpu":
        check(isinstance(budget, int) and budget >= 0, "budget", budget, "bytes (an int): a CPU does not count memory")
        return budget
    if budget == "auto":
        return budget
    if isinstance(budget, float) and 0 < budget <= 1:
        budget = int(budget * torch.accelerator.get_memory_info(device)[1])
    elif not isinstance(budget, int) or isinstance(budget, bool):
        refuse("budget", repr(budget), allowed)
    allocated = torch.accelerator.memory_allocated(device)
    check(budget > allocated, "budget", f"{budget} bytes", f"more than the {allocated} bytes that tensors take now")
    return budget


def _host_budget(host_budget):
    """Return the bytes of host memory that offloaded results may take."""
    free = _free_host_memory()
    if host_budget is None:
        return int(HOST_SHARE * free / int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    in_range = isinstance(host_budget, int) and not isinstance(host_budget, bool) and 0 <= host_budget <= free
    check(in_range, "host_budget", host_budget, f"0 to {free} bytes, the host memory that is free now")
    return host_budget


def _free_host_memory():
    """Return the available bytes of host memory; 0 where the system does not tell."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":") for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0
