"""Which hardware tensors live on, its facts, and which backend serves it.

One file per vendor says which torch devices are its own and describes them; everything known of an architecture is one
row of such a file. No driver is asked at import, because asking one before a fork poisons the child.
`LIGER_HW_BACKEND` and `use_backend` force another choice.
"""

import functools
import logging
import os
import threading
from contextlib import contextmanager

import torch

from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.backends import amd, intel, nvidia
from liger_hw.backends.device import Architecture, Device
from liger_hw.hooks import hooks
from liger_hw.spelling import check_known

logger = logging.getLogger(__name__)

VENDORS = {"nvidia": nvidia, "amd": amd, "intel": intel}
# The facts are a plain GPU's: the Triton interpreter on a CPU runs any configuration that they give.
CPU = Device("cpu", "cpu", warp_size=32, num_cores=4, shared_memory=64 * 1024)


def _by_number(row: Architecture) -> tuple:
    digits = "".join(c for c in row.device.arch if c.isdigit())
    return len(digits), row.device.arch


# "nvidia:sm90" -> its row: vendors in the order above, architectures by their numbers, as every table shows them
ARCHITECTURES: dict[str, Architecture] = {
    row.device.backends[0]: row for vendor in VENDORS.values() for row in sorted(vendor.ROWS, key=_by_number)
}


# Devices --------------------------------------------------------------------------------------------------------------

_META = torch.device("meta")
_devices: dict[torch.device, Device] = {}


def describe(device: torch.device) -> Device:
    """Ask the driver for the `Device` behind a torch device.

    An architecture without a row gets the facts of its nearest relative, and one line in the log.
    """
    for vendor in VENDORS.values():
        if vendor.owns(device):
            described = vendor.describe(device)
            arch = described.arch
            if arch not in vendor.ARCHS:
                nearest = vendor.nearest(arch).arch
                logger.warning("liger_hw does not know %s (%s); it is treated like %s", arch, described.name, nearest)
            return described
    return CPU


def detected(device: torch.device) -> Device:
    """The `Device` that is really there, asked of its driver once."""
    known = _devices.get(device)
    if known is None:
        known = _devices[device] = describe(device)
    return known


@contextmanager
def meta_tensors_are_on(device: torch.device):
    """Within, take meta tensors to live on `device`: shows which configurations would run there, without running."""
    _devices[_META] = detected(device)
    try:
        yield
    finally:
        del _devices[_META]


def device_of(tensor: torch.Tensor) -> Device:
    """The `Device` whose launch configurations serve `tensor`: the one it lives on, unless another is forced."""
    device = tensor.device
    known = _devices.get(device) if _forced is None else None  # every launch comes this way: one look-up where possible
    if known is not None:
        return known
    name = forced()
    return detected(device) if name is None else target(name, device)


def target(name: str, device: torch.device) -> Device:
    """The `Device` that the backend name `name` means for tensors on `device`."""
    here = detected(device)
    vendor, _, arch = name.partition(":")
    if vendor not in VENDORS or (here.vendor == vendor and arch in ("", here.arch)):
        return here
    archs = VENDORS[vendor].ARCHS
    return archs[arch] if arch else next(iter(archs.values()))


def refusal(device: Device, num_warps: int, options: dict) -> str | None:
    """Why `device` would refuse a launch with these compiler options, its own among them; None if it would not.

    Its compiler is not asked: some end the process where they cannot compile.
    """
    lanes = num_warps * options.get("warp_size", device.warp_size)
    if lanes > device.max_threads:
        return f"{num_warps} warps are {lanes} threads, allowed: {device.max_threads} at most"
    return VENDORS[device.vendor].refusal(device, num_warps, options) if device.vendor in VENDORS else None


def knobs(device: Device) -> dict[str, tuple]:
    """Options of that vendor's compiler that a tuner may vary, with the values they may take."""
    return VENDORS[device.vendor].KNOBS if device.vendor in VENDORS else {}


# Forcing --------------------------------------------------------------------------------------------------------------

_UNREAD = "LIGER_HW_BACKEND was not read yet"
_forced: str | None = _UNREAD  # the backend that is forced now: that of the last open block, or the variable's
_blocks: dict[object, str | None] = {}  # `use_backend` blocks that are open, in the order in which they were entered
_entering_or_leaving = threading.Lock()


def check_name(name: str) -> str:
    """Return `name` if it is a backend name; otherwise raise a ValueError that lists them."""
    known = ["reference", "triton", *VENDORS, *ARCHITECTURES]
    check_known("backend", name, known, "LIGER_HW_BACKEND and use_backend take")
    return name


@functools.cache
def _variable() -> str | None:
    """The backend that LIGER_HW_BACKEND names, or None; read once, at first use."""
    name = os.environ.get("LIGER_HW_BACKEND")
    return check_name(name) if name else None


def forced() -> str | None:
    """The backend that `use_backend` or LIGER_HW_BACKEND names, or None."""
    global _forced
    if _forced is _UNREAD:
        variable = _variable()
        with _entering_or_leaving:
            _forced = variable if _forced is _UNREAD else _forced
    return _forced


@contextmanager
def use_backend(name: str | None):
    """Run with one named backend, or with `None` for the automatic choice, whatever LIGER_HW_BACKEND says.

    The choice holds in every thread, because autograd runs backward on threads that inherit no context: a ContextVar
    would not reach them. Of several open blocks, in one thread or in many, the one entered last rules.

    Args:
        name: "reference", "triton", "nvidia", "amd", "intel", or a vendor with an architecture: "amd:gfx942".

    Raises:
        ValueError: the name is unknown.
    """
    global _forced
    name = name if name is None else check_name(name)
    outside = _variable()
    block = object()
    with _entering_or_leaving:
        _forced = _blocks[block] = name
    try:
        yield
    finally:
        with _entering_or_leaving:
            del _blocks[block]
            _forced = next(reversed(_blocks.values())) if _blocks else outside


def backends_for(device: torch.device) -> tuple[str, ...]:
    """Names of the implementations that may serve tensors on `device`, most specific first.

    Forced means forced: the reference is not in the chain then, and tensors that cannot run Triton are an error.
    """
    name = forced()
    if name == "reference":
        return ("reference",)
    if name is None and not AVAILABLE:
        return CPU.backends  # plain torch, on any device
    if name is None:
        return detected(device).backends
    if not AVAILABLE:
        raise RuntimeError(
            f"backend {name!r} is forced and runs Triton kernels, but the package triton is not installed"
        )
    if device.type == "cpu" and not interpreting() and hooks.launch is None:
        raise RuntimeError(
            f"backend {name!r} is forced and runs Triton kernels, but the tensors are on {device}: move them to a GPU, "
            f"set TRITON_INTERPRET=1 before importing liger_hw, or unset LIGER_HW_BACKEND"
        )
    serving = target(name, device)
    return ("triton",) if serving.vendor == "cpu" else serving.backends[:-1]
