"""AMD GPUs, through ROCm, which PyTorch also calls "cuda"."""

import torch

from liger_hw.backends.device import Device

KiB, MiB = 1024, 1024 * 1024
# Whether a launch may go past Triton's launcher for this vendor (liger_hw/shortcut.py). Not before an execution on its
# hardware is in benchmarks/evidence.
LAUNCHER_SHORTCUT = False
KNOBS = {"waves_per_eu": (1, 2, 4)}  # what the tuner varies beside the numbers of a Config


def _cdna(arch, num_cores, shared_kib, l2_mib, bandwidth):
    # wave64, 512 registers a lane shared by the 4 SIMDs' waves: a block of 1024 threads is 4 waves a SIMD, 128 each
    return Device(
        "amd", arch, 64, num_cores, shared_kib * KiB,
        registers=128, max_threads=1024, core_threads=2048, l2=l2_mib * MiB, bandwidth=bandwidth,
    )  # fmt: skip


def _rdna(arch, num_cores, registers, l2_mib, bandwidth):
    # wave32; a block may span the two CUs of a work-group processor and its 128 KiB, but holds 64 KiB at most
    return Device(
        "amd", arch, 32, num_cores, 64 * KiB,
        registers=registers, max_threads=1024, core_threads=1024, l2=l2_mib * MiB, bandwidth=bandwidth,
    )  # fmt: skip


# From ROCm's table of GPU specifications; registers from LLVM's occupancy model (1536 a SIMD lane over 8 waves, or 1024
# on the parts with the small file). The first is the one a bare "amd" stands for when none is present.
ARCHS = {
    device.arch: device
    for device in (
        _cdna("gfx942", 304, 64, 32, 5300),  # MI300X
        _cdna("gfx90a", 104, 64, 8, 1638),  # MI210, one die of an MI250X
        _cdna("gfx950", 256, 160, 32, 8000),  # MI355X
        _rdna("gfx1100", 96, 192, 6, 960),  # RX 7900 XTX
        _rdna("gfx1101", 60, 192, 4, 624),  # RX 7800 XT
        _rdna("gfx1102", 32, 128, 2, 288),  # RX 7600
        _rdna("gfx1150", 16, 128, 2, 120),  # Strix Point
        _rdna("gfx1151", 40, 192, 2, 256),  # Strix Halo
        _rdna("gfx1200", 32, 192, 4, 320),  # RX 9060 XT
        _rdna("gfx1201", 64, 192, 8, 640),  # RX 9070 XT
    )
}


def owns(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is not None


def nearest(arch: str) -> Device:
    """The known architecture that `arch` most likely resembles: same generation, then the longest common name."""

    def likeness(known: str) -> int:
        return next((i for i, (a, b) in enumerate(zip(known, arch)) if a != b), min(len(known), len(arch)))

    return max(ARCHS.values(), key=lambda known: (len(known.arch) == len(arch), likeness(known.arch)))


def describe(device: torch.device) -> Device:
    p = torch.cuda.get_device_properties(device)
    arch = p.gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-" -> "gfx942"
    return nearest(arch).with_facts(
        arch=arch, warp_size=p.warp_size, num_cores=p.multi_processor_count, l2=p.L2_cache_size, name=p.name
    )


def refusal(device: Device, num_warps: int, options: dict) -> str | None:
    """Nothing beyond the threads of a block, which are every vendor's limit."""
    return None
