"""How many programs of a kernel live on one core at a time, from what each takes.

Rates of nothing: the hardware's own limits, so that a figure for a GPU that is not here can be worked out on paper.
Sources: CUDA's occupancy calculator and arch_traits.h; LLVM's AMDGPU occupancy model (SIInstrInfo, AMDGPUBaseInfo) and
ROCm's table of GPU specifications.
"""

from dataclasses import dataclass

from liger_hw.backends.device import Device

KiB = 1024


@dataclass(frozen=True)
class Limits:
    """What one core holds. On RDNA a "core" here is a work-group processor, the two CUs that share a program.

    Attributes:
        schedulers: parts of a core that each keep their own warps and registers.
        registers: registers a lane that one scheduler deals out: with w warps there, each has at most registers / w.
        granule: a warp's registers are a multiple of it.
        warps: warps that one scheduler keeps at most.
        programs: programs a core keeps at most.
        shared: bytes of shared memory of a core.
        reserved: bytes of it that every program takes beside its own.
        shared_granule: a program's bytes are a multiple of it.
    """

    schedulers: int
    registers: int
    granule: int
    warps: int
    programs: int
    shared: int
    reserved: int = 0
    shared_granule: int = 1


def _nvidia(warps, programs, shared_kib):
    # 65,536 registers a core: 16,384 a scheduler, 512 a lane of its warps; dealt out 256 a warp, 8 a lane
    return Limits(4, 512, 8, warps // 4, programs, shared_kib * KiB, reserved=KiB, shared_granule=128)


def _cdna(shared_kib):
    return Limits(4, 512, 8, 8, 16, shared_kib * KiB)


def _rdna(registers, granule):
    return Limits(4, registers, granule, 16, 32, 128 * KiB)


_LARGE, _SMALL = _rdna(1536, 24), _rdna(1024, 16)  # RDNA's two register files
LIMITS = {
    "sm80": _nvidia(64, 32, 164),
    "sm86": _nvidia(48, 16, 100),
    "sm89": _nvidia(48, 24, 100),
    "sm90": _nvidia(64, 32, 228),
    "sm100": _nvidia(64, 32, 228),
    "sm103": _nvidia(64, 32, 228),
    "sm120": _nvidia(48, 24, 100),
    "sm121": _nvidia(48, 24, 100),
    "gfx90a": _cdna(64),
    "gfx942": _cdna(64),
    "gfx950": _cdna(160),
    "gfx1100": _LARGE,
    "gfx1101": _LARGE,
    "gfx1102": _SMALL,
    "gfx1150": _SMALL,
    "gfx1151": _LARGE,
    "gfx1200": _LARGE,
    "gfx1201": _LARGE,
}


@dataclass(frozen=True)
class Occupancy:
    """How full a core is.

    Attributes:
        programs: programs of the kernel that one core holds.
        warps: their warps.
        share: `warps` of those that the core could keep, 0 to 1.
        limit: what there is too little of for one more program: "registers", "shared", "warps" or "programs".
    """

    programs: int
    warps: int
    share: float
    limit: str


def waves_by_registers(limits: Limits, registers: int) -> int:
    """Warps that the registers of one scheduler suffice for, at most those it keeps: what LLVM prints as Occupancy."""
    granules = -(-max(registers, 1) // limits.granule) * limits.granule
    return min(limits.registers // granules, limits.warps)


def occupancy(device: Device, registers: int, shared: int, num_warps: int) -> Occupancy:
    """The occupancy of a kernel with `registers` a lane, `shared` bytes and `num_warps` a program.

    Raises:
        KeyError: nobody wrote down the limits of this architecture.
    """
    limits = LIMITS[device.arch]
    total = limits.warps * limits.schedulers
    by = {
        "warps": total // num_warps,
        "registers": waves_by_registers(limits, registers) * limits.schedulers // num_warps,
        "programs": limits.programs,
    }
    if shared:
        taken = -(-(shared + limits.reserved) // limits.shared_granule) * limits.shared_granule
        by["shared"] = limits.shared // taken
    limit = min(by, key=by.get)  # of equal ones the first
    programs = by[limit]
    return Occupancy(programs, programs * num_warps, programs * num_warps / total, limit)


def warps_per_scheduler(device: Device, found: Occupancy) -> float:
    """Warps that one scheduler has to choose from while it waits for memory."""
    return found.warps / LIMITS[device.arch].schedulers
