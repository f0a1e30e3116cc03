"""Intel GPUs, through XPU."""

import torch

from liger_hw.backends.device import Device

KiB, MiB = 1024, 1024 * 1024
# Whether a launch may go past Triton's launcher for this vendor (liger_hw/shortcut.py). Not before an execution on its
# hardware is in benchmarks/evidence.
LAUNCHER_SHORTCUT = False

# What its Triton compiler takes. By default it builds a kernel that spills again with 256 registers a hardware thread,
# at half the resident threads; it does not, and refuses "256" where asked, beyond 32 sub-groups of a work-group.
GRF_MODES = ("default", "128", "256", "auto")
SUB_GROUPS = 32
KNOBS = {"grf_mode": GRF_MODES, "warp_size": (16, 32)}  # what the tuner varies beside the numbers of a Config


def _xe(arch, sub_group, sub_groups, core_threads, num_cores, shared_kib, l2_mib, bandwidth):
    # either way a hardware thread's 128 registers are 64 fp32 values a lane
    return Device(
        "intel", arch, sub_group, num_cores, shared_kib * KiB,
        registers=64, max_threads=SUB_GROUPS * sub_group, core_threads=core_threads, l2=l2_mib * MiB,
        bandwidth=bandwidth, warp_sizes=sub_groups, launch_options={"grf_mode": "default", "warp_size": sub_group},
    )  # fmt: skip


def _xe_hpc(*facts):
    """Xe-HPC and Xe2: 8 vector engines a core, 8 threads each, 64-byte registers: sub-groups of 32."""
    return _xe(facts[0], 32, (16, 32), 2048, *facts[1:])


def _xe_hpg(*facts):
    """Xe-HPG: 16 vector engines a core, 8 threads each, 32-byte registers, of which sub-groups of 32 have half."""
    return _xe(facts[0], 16, (8, 16, 32), 2048, *facts[1:])


# From the oneAPI occupancy calculator and the Triton backend's table of peak bandwidths. The first is the one a
# bare "intel" stands for when none is present.
ARCHS = {
    device.arch: device
    for device in (
        _xe_hpc("pvc", 64, 128, 204, 1638),  # one stack of a Max 1550
        _xe_hpg("dg2", 32, 64, 16, 560),  # Arc A770: 128 KiB a core, 64 a work-group
        _xe_hpc("bmg", 20, 128, 18, 456),  # Arc B580
        _xe_hpc("lnl", 8, 128, 8, 136),  # Lunar Lake 140V
    )
}
# (major, minor) of the version that the graphics core reports, as SYCL's list of architectures has it.
VERSIONS = {
    (12, 55): "dg2", (12, 56): "dg2", (12, 57): "dg2", (12, 60): "pvc", (12, 61): "pvc",
    (12, 70): "mtl", (12, 71): "mtl", (12, 74): "arl_h", (20, 1): "bmg", (20, 2): "bmg", (20, 4): "lnl",
    (30, 0): "ptl_h", (30, 1): "ptl_u",
}  # fmt: skip
LIKE = {"mtl": "dg2", "arl_h": "dg2", "arl_s": "dg2", "ptl_h": "lnl", "ptl_u": "lnl"}


def owns(device: torch.device) -> bool:
    return device.type == "xpu"


def nearest(arch: str) -> Device:
    """The known architecture that `arch` most likely resembles; Battlemage stands in for newer client parts."""
    return ARCHS[arch if arch in ARCHS else LIKE.get(arch, "bmg")]


def _arch(p, device: torch.device) -> str:
    """The architecture's name: torch numbers it, and Triton's Intel driver names it in a dict, for the current device.

    The number comes first: naming it takes that driver a SYCL compiler, and no driver is there without Triton.
    """
    version = getattr(p, "architecture", 0) >> 8 & 0xFFFFFFFF  # family, then this, then a byte of zeros
    known = VERSIONS.get((version >> 22, version >> 14 & 0xFF))
    return known or _driver_arch(device)


def _driver_arch(device: torch.device) -> str:
    try:
        from triton.runtime import driver

        with torch.xpu.device(device):
            return driver.active.get_current_target().arch.get("arch") or "unknown"
    except (AttributeError, ImportError, RuntimeError):  # no Triton, one without Intel's driver, or no active driver
        return "unknown"


def describe(device: torch.device) -> Device:
    p = torch.xpu.get_device_properties(device)
    arch = _arch(p, device)
    like = nearest(arch)
    warp_size = next((n for n in (like.warp_size, 32, 16) if n in p.sub_group_sizes), max(p.sub_group_sizes))
    sub_groups = min(SUB_GROUPS, getattr(p, "max_num_sub_groups", 0) or SUB_GROUPS)
    return like.with_facts(
        arch=arch,
        warp_size=warp_size,
        warp_sizes=tuple(p.sub_group_sizes),
        num_cores=p.gpu_subslice_count,
        shared_memory=p.local_mem_size,
        max_threads=min(p.max_work_group_size, sub_groups * warp_size),
        l2=getattr(p, "last_level_cache_size", 0),
        launch_options=like.launch_options | {"warp_size": warp_size},
        name=p.name,
    )


def refusal(device: Device, num_warps: int, options: dict) -> str | None:
    """What the compiler would raise; Triton's own autotuner does not survive these."""
    if options["warp_size"] not in device.warp_sizes:
        return f"warp_size={options['warp_size']}, allowed: {', '.join(map(str, device.warp_sizes))}"
    if options["grf_mode"] not in GRF_MODES:
        return f"grf_mode={options['grf_mode']}, allowed: {', '.join(GRF_MODES)}"
    if options["grf_mode"] == "256" and num_warps > SUB_GROUPS:
        return f"num_warps={num_warps} with grf_mode=256, allowed: {SUB_GROUPS} at most"
    return None
