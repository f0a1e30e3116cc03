"""Where am I, and what is it like here?

One module per vendor answers: is this torch device yours, and what is it? Nothing is asked at import, because asking
a driver anything before a fork poisons the child. `LIGER_HW_BACKEND` and `use_backend` override the answer.
"""

import logging
import os
from contextlib import contextmanager

import torch

from liger_hw._triton import AVAILABLE, interpreting
from liger_hw.backends import amd, intel, nvidia
from liger_hw.backends.device import Device
from liger_hw.hooks import hooks
from liger_hw.spelling import check_known

logger = logging.getLogger(__name__)

VENDORS = {"nvidia": nvidia, "amd": amd, "intel": intel}
# The facts are a plain GPU's: the Triton interpreter on a CPU runs whatever configuration they give.
CPU = Device("cpu", "cpu", warp_size=32, num_cores=4, shared_memory=64 * 1024)

_META = torch.device("meta")
_devices: dict[torch.device, Device] = {}
_UNREAD = object()
_forced: str | None | object = _UNREAD


def describe(device: torch.device) -> Device:
    """The `Device` behind a torch device, asked of its driver; an unknown architecture is treated like its nearest."""
    for vendor in VENDORS.values():
        if vendor.owns(device):
            found = vendor.describe(device)
            if found.arch not in vendor.ARCHS:
                like = vendor.nearest(found.arch).arch
                logger.warning("liger_hw does not know %s (%s); it is treated like %s", found.arch, found.name, like)
            return found
    return CPU


def detected(device: torch.device) -> Device:
    """What is really there, found once per torch device."""
    found = _devices.get(device)
    if found is None:
        found = _devices[device] = describe(device)
    return found


@contextmanager
def meta_tensors_are_on(device: torch.device):
    """Within, meta tensors are taken to live on `device`: shows what would run there, and how, without running it."""
    _devices[_META] = detected(device)
    try:
        yield
    finally:
        del _devices[_META]


def device_of(tensor: torch.Tensor) -> Device:
    """The `Device` whose launch configurations serve `tensor`: the one it lives on, unless another is forced."""
    device = tensor.device
    found = _devices.get(device) if _forced is None else None  # the rest is asked once; every launch comes this way
    if found is not None:
        return found
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
    """Why `device` could not be launched on with these options, the device's own among them; None if it could.

    Its compiler is not asked: some end the process that asks them what they cannot build.
    """
    lanes = num_warps * options.get("warp_size", device.warp_size)
    if lanes > device.max_threads:
        return f"{num_warps} warps are {lanes} threads, allowed: {device.max_threads} at most"
    return VENDORS[device.vendor].refusal(device, num_warps, options) if device.vendor in VENDORS else None


def knobs(device: Device) -> dict[str, tuple]:
    """Options of that vendor's compiler that a tuner may vary, with the values they may take."""
    return VENDORS[device.vendor].KNOBS if device.vendor in VENDORS else {}


def check_name(name: str) -> str:
    """Return `name` if it is a backend name; otherwise raise a ValueError that lists them."""
    archs = [f"{vendor}:{arch}" for vendor, module in VENDORS.items() for arch in module.ARCHS]
    check_known("backend", name, ["reference", "triton", *VENDORS, *archs], "LIGER_HW_BACKEND and use_backend take")
    return name


def forced() -> str | None:
    """The backend that LIGER_HW_BACKEND or `use_backend` names, or None. The variable is read once, at first use."""
    global _forced
    if _forced is _UNREAD:
        name = os.environ.get("LIGER_HW_BACKEND")
        _forced = check_name(name) if name else None
    return _forced


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
    found = target(name, device)
    return ("triton",) if found.vendor == "cpu" else found.backends[:-1]


@contextmanager
def use_backend(name: str | None):
    """Run with one named backend, or with `None` for the automatic choice, whatever LIGER_HW_BACKEND says.

    A plain global and not a ContextVar: the choice is made in forward, and autograd runs backward on threads that
    inherit no context.

    Args:
        name: "reference", "triton", "nvidia", "amd", "intel", or a vendor with an architecture: "amd:gfx942".

    Raises:
        ValueError: the name is unknown.
    """
    global _forced
    before, _forced = forced(), name if name is None else check_name(name)
    try:
        yield
    finally:
        _forced = before
