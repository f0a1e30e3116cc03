"""Intel GPUs, through XPU."""

from functools import partial

import torch

from liger_hw.backends.device import Architecture, Device, KiB, MiB

NAME = "Intel"
# Options of its Triton compiler. By default it recompiles a kernel that spills with 256 registers a hardware thread, at
# half the resident threads. Work-groups of more than 32 sub-groups it does not recompile, and it refuses "256" there.
GRF_MODES = ("default", "128", "256", "auto")
SUB_GROUPS = 32
KNOBS = {"grf_mode": GRF_MODES, "warp_size": (16, 32)}  # options that the tuner varies in addition to a Config
# Whether a launch may bypass Triton's launcher for this vendor (liger_hw/shortcut.py). Not before an execution on its
# hardware is in lab/results/evidence.
LAUNCHER_SHORTCUT = False
INLINED_LAUNCHES = False  # whether code of torch.compile launches kernels itself (liger_hw/inlining.py)


def _row(arch, cards, num_cores, shared_kib, l2_mib, bandwidth, versions, sub_group, sub_groups):
    device = Device(
        "intel", arch, sub_group, num_cores, shared_kib * KiB,
        registers=64,  # a hardware thread has 128, of 64 bytes for 32 lanes or of 32 bytes for 16
        max_threads=SUB_GROUPS * sub_group, core_threads=2048, l2=l2_mib * MiB, bandwidth=bandwidth,
        warp_sizes=sub_groups, launch_options={"grf_mode": "default", "warp_size": sub_group},
    )  # fmt: skip
    return Architecture(device, cards, versions=versions)


# Xe-HPC and Xe2: 8 vector engines a core, 8 threads each, 64-byte registers: sub-groups of 32.
_xe_hpc = partial(_row, sub_group=32, sub_groups=(16, 32))
# Xe-HPG: 16 vector engines a core, 8 threads each, 32-byte registers, of which a lane of 32 would have half.
_xe_hpg = partial(_row, sub_group=16, sub_groups=(8, 16, 32))

# From the oneAPI occupancy calculator and the Triton backend's table of peak bandwidths; versions from SYCL's list of
# architectures; cards from Intel's product pages. Cores, L2 and bandwidth of the part in the comment (an A770 has 128
# KiB a core, 64 a work-group). The first row serves the bare name "intel" where no Intel GPU is present.
# fmt: off
ROWS = (
    #        arch   cards                         cores shared   L2  GB/s  versions of the graphics core
    #                                                      KiB  MiB
    _xe_hpc("pvc", "Data Center GPU Max 1100, 1550", 64,  128, 204, 1638, ((12, 60), (12, 61))),  # a Max 1550's stack
    _xe_hpg("dg2", "Arc A770, A750, A380",           32,   64,  16,  560, ((12, 55), (12, 56), (12, 57))),  # Arc A770
    _xe_hpc("bmg", "Arc B580, B570, Pro B60",        20,  128,  18,  456, ((20, 1), (20, 2))),  # Arc B580
    _xe_hpc("lnl", "Core Ultra 200V (Lunar Lake)",    8,  128,   8,  136, ((20, 4),)),  # Lunar Lake 140V
)
# fmt: on
ARCHS = {row.device.arch: row.device for row in ROWS}
# Architectures without a row: the row whose facts they take, and their versions.
RELATIVES = {
    "mtl": ("dg2", ((12, 70), (12, 71))),
    "arl_h": ("dg2", ((12, 74),)),
    "arl_s": ("dg2", ()),
    "ptl_h": ("lnl", ((30, 0),)),
    "ptl_u": ("lnl", ((30, 1),)),
}
_VERSIONS = {version: arch for arch, (_, versions) in RELATIVES.items() for version in versions}
_VERSIONS |= {version: row.device.arch for row in ROWS for version in row.versions}


def owns(device: torch.device) -> bool:
    """Return whether `device` is a GPU of this vendor."""
    return device.type == "xpu"


def nearest(arch: str) -> Device:
    """Return the architecture's relative, or Battlemage for unknown parts."""
    return ARCHS[arch if arch in ARCHS else RELATIVES.get(arch, ("bmg",))[0]]


def _arch_of(p, device: torch.device) -> str:
    """Return the architecture's name, from torch's properties or Triton's Intel driver.

    torch comes first: a SYCL compiler builds the driver at its first use, and without Triton there is none.
    """
    version = getattr(p, "architecture", 0) >> 8 & 0xFFFFFFFF  # below the family's 32 bits, above a byte of zeros
    return _VERSIONS.get((version >> 22, version >> 14 & 0xFF)) or _driver_arch(device)


def _driver_arch(device: torch.device) -> str:
    """Return the architecture's name in Triton's Intel driver, or "unknown"."""
    try:
        from triton.runtime import driver

        with torch.xpu.device(device):
            return driver.active.get_current_target().arch.get("arch") or "unknown"
    except (AttributeError, ImportError, RuntimeError):  # no Triton, one without Intel's driver, or no active driver
        return "unknown"


def describe(device: torch.device) -> Device:
    """Return the facts of its architecture, with the numbers that the driver reports."""
    p = torch.xpu.get_device_properties(device)
    arch = _arch_of(p, device)
    known = nearest(arch)
    warp_size = next((n for n in (known.warp_size, 32, 16) if n in p.sub_group_sizes), max(p.sub_group_sizes))
    sub_groups = min(SUB_GROUPS, getattr(p, "max_num_sub_groups", 0) or SUB_GROUPS)
    return known.with_facts(
        arch=arch,
        warp_size=warp_size,
        warp_sizes=tuple(p.sub_group_sizes),
        num_cores=p.gpu_subslice_count,
        shared_memory=p.local_mem_size,
        max_threads=min(p.max_work_group_size, sub_groups * warp_size),
        l2=getattr(p, "last_level_cache_size", 0),
        launch_options=known.launch_options | {"warp_size": warp_size},
        name=p.name,
    )


def launch_error(device: Device, num_warps: int, options: dict) -> str | None:
    """Return why the compiler would raise, or None; Triton's autotuner does not catch these errors."""
    if options["warp_size"] not in device.warp_sizes:
        return f"warp_size={options['warp_size']}, allowed: {', '.join(map(str, device.warp_sizes))}"
    if options["grf_mode"] not in GRF_MODES:
        return f"grf_mode={options['grf_mode']}, allowed: {', '.join(GRF_MODES)}"
    if options["grf_mode"] == "256" and num_warps > SUB_GROUPS:
        return f"num_warps={num_warps} with grf_mode=256, allowed: {SUB_GROUPS} at most"
    return None
