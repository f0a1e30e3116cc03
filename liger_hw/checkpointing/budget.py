"""Read the budgets of a plan: device memory and host memory in bytes."""

import os

import torch

from liger_hw.checks import check, refuse

BUDGET_VARIABLE = "LIGER_HW_ACTIVATIONS"  # of the environment: the budget of models patched under liger_kernel's names
HOST_SHARE = 0.5  # of the host's free memory that offloaded results may take, by default
UNITS = {"MiB": 2**20, "GiB": 2**30}
ALLOWED = 'bytes (an int, or "100GiB", "512MiB"), a share of the device\'s memory (a float up to 1) or "auto"'


class BudgetTooSmall(ValueError):
    """No plan fits the budget, not even one that recomputes every layer."""


def bytes_of(budget, device):
    """Return a budget in bytes, or "auto".

    Args:
        budget: of `liger_hw.activations`.
        device: the device of the model, or None while it is not known: then only the form of a number is checked.

    Raises:
        ValueError: the budget is of no known form, or out of the range of the device.
    """
    if isinstance(budget, str) and budget != "auto":
        budget = _number(budget)
    whole = isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0
    if device is not None and device.type == "cpu":
        check(whole, "budget", budget, "bytes (an int): a CPU does not count memory")
        return budget
    share = isinstance(budget, float) and 0 < budget <= 1
    if not (whole or share or budget == "auto"):
        refuse("budget", repr(budget), ALLOWED)
    if device is None or budget == "auto":
        return budget
    if share:
        budget = int(budget * torch.accelerator.get_memory_info(device)[1])
    allocated = torch.accelerator.memory_allocated(device)
    check(budget > allocated, "budget", f"{budget} bytes", f"more than the {allocated} bytes that tensors take now")
    return budget


def _number(text):
    unit = UNITS.get(text[-3:])
    try:
        return int(float(text[:-3]) * unit) if unit else int(text) if text.isdigit() else float(text)
    except (ValueError, OverflowError):  # no number, or infinity
        refuse("budget", repr(text), ALLOWED)


def size(nbytes) -> str:
    """Write a number of bytes: 1.50 GiB, 12.3 MiB, 800 bytes."""
    unit = next((unit for unit in ("GiB", "MiB") if nbytes >= UNITS[unit]), None)
    return f"{nbytes / UNITS[unit]:,.2f} {unit}" if unit else f"{nbytes:.0f} bytes"


def host_bytes_of(host_budget, device):
    """Return the bytes of host memory for offloaded results; 0 by default on a CPU.

    Raises:
        ValueError: more than is free, or no number of bytes.
    """
    free = _free_host_memory()
    if host_budget is None and device is not None and device.type == "cpu":
        return 0
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
