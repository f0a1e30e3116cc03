"""NVIDIA GPUs, through CUDA."""

import torch

from liger_hw.backends.device import Architecture, Core, Device, KiB, MiB

NAME = "NVIDIA"
KNOBS = {}  # compiler options that the tuner varies in addition to a Config
# Whether a launch may bypass Triton's launcher for this vendor (liger_hw/shortcut.py). Executed: lab/results/evidence.
LAUNCHER_SHORTCUT = True
INLINED_LAUNCHES = True  # whether code of torch.compile launches kernels itself (liger_hw/inlining.py)


def _row(
    arch, cards, num_cores, shared_kib, core_threads, programs, l2_mib, bandwidth, in_matrix=True, grouped_mm=False,
    **same_code,
):  # fmt: skip
    core = Core(
        # 65,536 registers a core: 16,384 a scheduler, 512 a lane; allocated in steps of 256 a warp, 8 a lane
        schedulers=4, registers=512, granule=8, warps=core_threads // 32 // 4, programs=programs,
        # every program takes 1 KiB in addition to its own, so a core has 1 KiB more than one program may use
        shared=(shared_kib + 1) * KiB, reserved=KiB, shared_granule=128,
    )  # fmt: skip
    device = Device(
        "nvidia", arch, 32, num_cores, shared_kib * KiB, registers=64, max_threads=1024, core_threads=core_threads,
        l2=l2_mib * MiB, bandwidth=bandwidth, async_copy=True, tf32=True,
        grouped_mm=grouped_mm, core=core,
    )  # fmt: skip
    return Architecture(device, cards, in_matrix, {"ttir": "nvidia"} | same_code)


# Limits from CUDA's arch_traits.h and occupancy calculator, cards from NVIDIA's product pages; cores, L2 and bandwidth
# of the first card (A100: 80 GB); grouped_mm from `_scaled_mm_allowed_device` of torch's GroupedBlas. The first row
# serves the bare name "nvidia" where no NVIDIA GPU is present.
# fmt: off
ROWS = (
    #     arch   cards                            cores, KiB, threads, programs, L2 MiB, GB/s, same code by stage
    _row("sm90", "H200, H100, GH200",               132, 227, 2048, 32,  50, 4800, grouped_mm=True, ttgir="sm80"),
    _row("sm80", "A100, A30",                       108, 163, 2048, 32,  40, 2039, ttgir="sm80"),
    _row("sm86", "A6000, A40, A10, RTX 3090, 3080",  84,  99, 1536, 16,   6,  768, ttgir="sm80", ptx="sm86"),
    _row("sm89", "RTX 4090, 4080, L40S, L40, L4",   128,  99, 1536, 24,  72, 1008, ttgir="sm80", ptx="sm86"),
    _row("sm100", "B200, GB200",                    148, 227, 2048, 32, 126, 8000, grouped_mm=True, ttgir="sm100"),
    _row("sm103", "B300, GB300",                    148, 227, 2048, 32, 126, 8000, grouped_mm=True, in_matrix=False),
    _row("sm120", "RTX 5090, 5080, RTX PRO 6000",   170,  99, 1536, 24,  96, 1792, ttgir="sm100"),
    _row("sm121", "GB10 (DGX Spark)",                48,  99, 1536, 24,  24,  273, in_matrix=False),
)
# fmt: on
ARCHS = {row.device.arch: row.device for row in ROWS}


def owns(device: torch.device) -> bool:
    """Return whether `device` is a GPU of this vendor."""
    return device.type == "cuda" and torch.version.hip is None


def nearest(arch: str) -> Device:
    """Return the newest known architecture that is not newer than `arch`."""
    number = int(arch.removeprefix("sm"))
    older = [known for known in ARCHS.values() if int(known.arch[2:]) <= number]
    return max(older, key=lambda known: int(known.arch[2:]), default=ARCHS["sm80"])


def describe(device: torch.device) -> Device:
    """Return the facts of its architecture, with the numbers that the driver reports."""
    p = torch.cuda.get_device_properties(device)
    arch = f"sm{p.major}{p.minor}"
    return nearest(arch).with_facts(
        arch=arch,
        warp_size=p.warp_size,
        num_cores=p.multi_processor_count,
        shared_memory=p.shared_memory_per_block_optin,
        core_threads=p.max_threads_per_multi_processor,
        l2=p.L2_cache_size,
        name=p.name,
    )


def launch_error(device: Device, num_warps: int, options: dict) -> str | None:
    """Return None: this compiler takes everything that `backends.launch_error` allows."""
    return None
