"""NVIDIA GPUs, through CUDA."""

import torch

from liger_hw.backends.device import Device

KiB, MiB = 1024, 1024 * 1024
# Whether a launch may go past Triton's launcher for this vendor (liger_hw/shortcut.py). Executed: benchmarks/evidence.
LAUNCHER_SHORTCUT = True
KNOBS = {}  # what the tuner varies beside the numbers of a Config


def _arch(arch, num_cores, shared_kib, core_threads, l2_mib, bandwidth):
    return Device(
        "nvidia", arch, 32, num_cores, shared_kib * KiB,
        registers=64, max_threads=1024, core_threads=core_threads, l2=l2_mib * MiB, bandwidth=bandwidth,
        async_copy=True,
    )  # fmt: skip


# Limits from CUDA's arch_traits.h; cores, L2 and bandwidth of the part named. The first is the one a bare
# "nvidia" stands for when none is present.
ARCHS = {
    device.arch: device
    for device in (
        _arch("sm90", 132, 227, 2048, 50, 4800),  # H200 (H100 SXM: 3350)
        _arch("sm80", 108, 163, 2048, 40, 2039),  # A100 80 GB
        _arch("sm86", 84, 99, 1536, 6, 768),  # RTX A6000
        _arch("sm89", 128, 99, 1536, 72, 1008),  # RTX 4090
        _arch("sm100", 148, 227, 2048, 126, 8000),  # B200
        _arch("sm103", 148, 227, 2048, 126, 8000),  # B300
        _arch("sm120", 170, 99, 1536, 96, 1792),  # RTX 5090
        _arch("sm121", 48, 99, 1536, 24, 273),  # GB10
    )
}


def owns(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None


def nearest(arch: str) -> Device:
    """The known architecture that `arch` most likely resembles: the newest that is not newer."""
    number = int(arch.removeprefix("sm"))
    older = [known for known in ARCHS.values() if int(known.arch[2:]) <= number]
    return max(older, key=lambda known: int(known.arch[2:]), default=ARCHS["sm80"])


def describe(device: torch.device) -> Device:
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


def refusal(device: Device, num_warps: int, options: dict) -> str | None:
    """Nothing beyond the threads of a block, which are every vendor's limit."""
    return None
