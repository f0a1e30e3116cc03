"""AMD GPUs, through ROCm, which PyTorch also calls "cuda"."""

from functools import partial
from os.path import commonprefix

import torch

from liger_hw.backends.device import Architecture, Core, Device, KiB, MiB

NAME = "AMD"
KNOBS = {"waves_per_eu": (1, 2, 4)}  # compiler options that the tuner varies in addition to a Config
# Whether a launch may bypass Triton's launcher for this vendor (liger_hw/shortcut.py). Not before an execution on its
# hardware is in lab/results/evidence.
LAUNCHER_SHORTCUT = False
INLINED_LAUNCHES = False  # whether code of torch.compile launches kernels itself (liger_hw/inlining.py)


def _row(arch, cards, device, core, in_matrix=True, **same_code):
    device = Device("amd", arch, max_threads=1024, core=core, **device)
    return Architecture(device, cards, in_matrix, same_code={"ttir": "amd"} | same_code)


def _waves_of_64(arch, cards, num_cores, shared_kib, l2_mib, bandwidth, **more):
    """Make a row of a GPU with waves of 64 lanes.

    `more`: `in_matrix`, and for each compiler stage the name that its text shares.

    A SIMD has 512 registers a lane: a program of 1024 threads is 4 waves a SIMD, with 128 registers a lane.
    """
    device = {"warp_size": 64, "num_cores": num_cores, "shared_memory": shared_kib * KiB, "registers": 128,
              "core_threads": 2048, "l2": l2_mib * MiB, "bandwidth": bandwidth}  # fmt: skip
    core = Core(schedulers=4, registers=512, granule=8, warps=8, programs=16, shared=shared_kib * KiB)
    return _row(arch, cards, device, core, **more)


def _waves_of_32(arch, cards, num_cores, registers, l2_mib, bandwidth, ascending_only=False, **more):
    """Make a row of a GPU with waves of 32 lanes.

    A program may span the two CUs of a work-group processor with 128 KiB, and use 64 KiB of it.

    Args:
        registers: registers of a SIMD's lane, for the 8 waves of a program of 1024 threads: 1536, or 1024 on parts with
            the small register file.
    """
    device = {"warp_size": 32, "num_cores": num_cores, "shared_memory": 64 * KiB, "registers": registers // 8,
              "core_threads": 1024, "l2": l2_mib * MiB, "bandwidth": bandwidth,
              "ascending_only": ascending_only}  # fmt: skip
    core = Core(schedulers=4, registers=registers, granule=registers // 64, warps=16, programs=32, shared=128 * KiB,
                compute_units=2)  # fmt: skip
    return _row(arch, cards, device, core, **more)


_cdna = partial(_waves_of_64, ttgir="cdna")
_rdna3 = partial(_waves_of_32, ttgir="rdna", llir="rdna3")
# LLVM generates the same code for both. Its accesses of a loop to lower addresses have a negative offset in a register
# and a large one in the instruction (Triton 3.9), whose sum the hardware's check of bounds does not wrap: it would skip
# stores. The emulation found it in cross entropy's gradient, of 40,000 classes. The divergences run down as well: at
# the compile matrix's launches LLVM leaves their offsets positive.
_rdna4 = partial(_waves_of_32, ascending_only=True, ttgir="rdna", amdgcn="rdna4")

# From ROCm's table of GPU specifications; registers from LLVM's occupancy model; cards from AMD's product pages, as
# LLVM's list of targets names them. Cores, L2 and bandwidth of the part in the comment. The first row serves the bare
# name "amd" where no AMD GPU is present.
# fmt: off
ROWS = (
    #      arch      cards                      cores  shared  L2  GB/s
    #                                                     KiB MiB
    _cdna("gfx942", "MI300X, MI300A, MI325X",     304,    64,  32, 5300),  # MI300X
    _cdna("gfx90a", "MI210, MI250, MI250X",       104,    64,   8, 1638),  # MI210, one die of an MI250X
    _cdna("gfx950", "MI350X, MI355X",             256,   160,  32, 8000),  # MI355X
    #       arch      cards                            cores  registers  L2  GB/s
    #                                                                   MiB
    _rdna3("gfx1100", "RX 7900 XTX, 7900 XT, PRO W7900",  96,      1536,  6, 960),  # RX 7900 XTX
    _rdna3("gfx1101", "RX 7800 XT, 7700 XT, PRO W7700",   60,      1536,  4, 624),  # RX 7800 XT
    _rdna3("gfx1102", "RX 7600",                          32,      1024,  2, 288),  # RX 7600
    _rdna3("gfx1150", "Ryzen AI 300 (Strix Point)",       16,      1024,  2, 120),  # Strix Point
    _rdna3("gfx1151", "Ryzen AI Max (Strix Halo)",        40,      1536,  2, 256),  # Strix Halo
    _rdna4("gfx1200", "RX 9060 XT",                       32,      1536,  4, 320),  # RX 9060 XT
    _rdna4("gfx1201", "RX 9070, 9070 XT",                 64,      1536,  8, 640),  # RX 9070 XT
)
# fmt: on
ARCHS = {row.device.arch: row.device for row in ROWS}


def owns(device: torch.device) -> bool:
    """Return whether `device` is a GPU of this vendor."""
    return device.type == "cuda" and torch.version.hip is not None


def nearest(arch: str) -> Device:
    """Return the architecture with a name as long as `arch` and the longest common beginning.

    So an unknown GPU of gfx12, whose waves have 32 lanes, gets the facts of gfx1200, a Radeon.
    """
    return max(ARCHS.values(), key=lambda known: (len(known.arch) == len(arch), len(commonprefix([known.arch, arch]))))


def describe(device: torch.device) -> Device:
    """Return the facts of its architecture, with the numbers that the driver reports."""
    p = torch.cuda.get_device_properties(device)
    arch = p.gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-" -> "gfx942"
    return nearest(arch).with_facts(
        arch=arch, warp_size=p.warp_size, num_cores=p.multi_processor_count, l2=p.L2_cache_size, name=p.name
    )


def launch_error(device: Device, num_warps: int, options: dict) -> str | None:
    """Return None: this compiler takes everything that `backends.launch_error` allows."""
    return None
