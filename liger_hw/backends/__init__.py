"""Find the hardware of a tensor, its facts, and the backends that serve it.

One file per vendor recognises and describes its torch devices; one row of it holds all facts about an architecture. No
driver is queried at import, because a query before a fork breaks CUDA in the child. `LIGER_HW_BACKEND` and
`use_backend` force another choice.
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
# A CPU gets the facts of a common GPU: the Triton interpreter runs any configuration that follows from them.
CPU = Device("cpu", "cpu", warp_size=32, num_cores=4, shared_memory=64 * 1024)


def _by_number(row: Architecture) -> tuple:
    digits = "".join(c for c in row.device.arch if c.isdigit())
    return len(digits), row.device.arch


# "nvidia:sm90" -> its row: vendors in the order above, architectures by their numbers, as every table shows them
ARCHITECTURES: dict[str, Architecture] = {
    row.device.backends[0]: row for vendor in VENDORS.values() for row in sorted(vendor.ROWS, key=_by_number)
}
BACKENDS = ("reference", "triton", *VENDORS, *ARCHITECTURES)  # of backends


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
    """Return the `Device` of a torch device; its driver is queried once."""
    known = _devices.get(device)
    if known is None:
        known = _devices[device] = describe(device)
    return known


@contextmanager
def meta_tensors_are_on(device: torch.device):
    """Treat meta tensors as tensors on `device` within the block.

    So the configurations of `device` can be computed without a launch.
    """
    before, _devices[_META] = _devices.get(_META), detected(device)
    try:
        yield
    finally:
        _devices[_META] = before
        if before is None:
            del _devices[_META]


def device_of(tensor: torch.Tensor) -> Device:
    """Return the `Device` for launches on `tensor`: its own, or the forced one."""
    device = tensor.device
    known = _devices.get(device) if _forced is None else None  # every launch calls this: one look-up in the common case
    if known is not None:
        return known
    name = forced()
    return detected(device) if name is None else target(name, device)


def target(name: str, device: torch.device) -> Device:
    """Return the `Device` that a backend name means for tensors on `device`."""
    here = detected(device)
    vendor, _, arch = name.partition(":")
    if vendor not in VENDORS or (here.vendor == vendor and arch in ("", here.arch)):
        return here
    archs = VENDORS[vendor].ARCHS
    return archs[arch] if arch else next(iter(archs.values()))


def launch_error(device: Device, num_warps: int, options: dict) -> str | None:
    """Return why `device` cannot launch a kernel with these compiler options, or None.

    Arithmetic decides, not the compiler: some compilers end the process where they fail.
    """
    lanes = num_warps * options.get("warp_size", device.warp_size)
    if lanes > device.max_threads:
        return f"{num_warps} warps are {lanes} threads, allowed: {device.max_threads} at most"
    return VENDORS[device.vendor].launch_error(device, num_warps, options) if device.vendor in VENDORS else None


def knobs(device: Device) -> dict[str, tuple]:
    """Return the compiler options that a tuner may vary, with their possible values."""
    return VENDORS[device.vendor].KNOBS if device.vendor in VENDORS else {}


# Forcing --------------------------------------------------------------------------------------------------------------

_UNREAD = "LIGER_HW_BACKEND was not read yet"
_forced: str | None = _UNREAD  # the forced backend: of the last open block, or of the variable
_blocks: dict[object, str | None] = {}  # open `use_backend` blocks, in the order of their start
_entering_or_leaving = threading.Lock()


def check_name(name: str) -> str:
    """Return `name` if it is a backend name; otherwise raise a ValueError that lists them."""
    check_known("backend", name, BACKENDS, "LIGER_HW_BACKEND and use_backend take")
    return name


@functools.cache
def _variable() -> str | None:
    """Return the backend that LIGER_HW_BACKEND names, or None; read it once."""
    name = os.environ.get("LIGER_HW_BACKEND")
    return check_name(name) if name else None


def forced() -> str | None:
    """Return the backend that `use_backend` or LIGER_HW_BACKEND names, or None."""
    global _forced
    if _forced is _UNREAD:
        variable = _variable()
        with _entering_or_leaving:
            _forced = variable if _forced is _UNREAD else _forced
    return _forced


@contextmanager
def use_backend(name: str | None):
    """Run the block with one named backend; `None` means the automatic choice.

    The choice overrides LIGER_HW_BACKEND and holds in every thread: autograd runs backward on threads that inherit no
    context, which a ContextVar would not reach. The block entered last decides, over all threads.

    Args:
        name: "reference", "triton", "nvidia", "amd", "intel", or a vendor with an architecture: "amd:gfx942".

    Raises:
        ValueError: the name is unknown.

    Examples:
        >>> with liger_hw.use_backend("reference"):
        ...     normed = liger_hw.rms_norm(torch.rand(2, 8), torch.ones(8))
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
    """Return the names of implementations for tensors on `device`, most specific first.

    A forced backend excludes the reference.

    Raises:
        RuntimeError: the forced backend cannot run on `device`.
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
            f"set TRITON_INTERPRET=1 before importing liger_hw, or do not force it (leave the block of use_backend, or "
            f"unset LIGER_HW_BACKEND)"
        )
    serving = target(name, device)
    return ("triton",) if serving.vendor == "cpu" else serving.backends[:-1]
