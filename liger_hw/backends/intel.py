"""Intel GPUs, through XPU."""

import torch

from liger_hw.backends.device import Device

KiB, MiB = 1024, 1024 * 1024


def _xe(arch, num_cores, shared_kib, l2_mib, bandwidth):
    # 128 registers of 64 bytes a hardware thread: at sub-group 32, 64 fp32 values a lane. The compiler itself
    # retries a kernel that spills with 256, at half the resident threads, so "default" is the mode to ask for.
    return Device(
        "intel", arch, 32, num_cores, shared_kib * KiB,
        registers=64, max_threads=1024, core_threads=2048, l2=l2_mib * MiB, bandwidth=bandwidth,
        launch_options={"grf_mode": "default"},
    )  # fmt: skip


# From the oneAPI occupancy calculator and the Triton backend's table of peak bandwidths. The first is the one a
# bare "intel" stands for when none is present.
ARCHS = {
    device.arch: device
    for device in (
        _xe("pvc", 64, 128, 204, 1638),  # one stack of a Max 1550
        _xe("dg2", 32, 64, 16, 560),  # Arc A770: 128 KiB a core, 64 a work-group
        _xe("bmg", 20, 128, 18, 456),  # Arc B580
        _xe("lnl", 8, 128, 8, 136),  # Lunar Lake 140V
    )
}


def owns(device: torch.device) -> bool:
    return device.type == "xpu"


def nearest(arch: str) -> Device:
    """The known architecture that `arch` most likely resembles; Battlemage stands in for newer client parts."""
    return ARCHS.get(arch, ARCHS["dg2"] if arch in ("mtl", "arl_h", "arl_s") else ARCHS["bmg"])


def _driver_arch(device: torch.device) -> str:
    """Triton's Intel driver names the architecture in a dict, for the current device; torch.xpu only numbers it."""
    from triton.runtime import driver

    with torch.xpu.device(device):
        return driver.active.get_current_target().arch.get("arch") or "unknown"


def describe(device: torch.device) -> Device:
    p = torch.xpu.get_device_properties(device)
    arch = _driver_arch(device)
    return nearest(arch).with_facts(
        arch=arch,
        warp_size=32 if 32 in p.sub_group_sizes else max(p.sub_group_sizes),
        num_cores=p.gpu_subslice_count,
        shared_memory=p.local_mem_size,
        max_threads=min(p.max_work_group_size, 1024),
        l2=getattr(p, "last_level_cache_size", 0),
        name=p.name,
    )
