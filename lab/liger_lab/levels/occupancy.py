"""Compute the occupancy of a core from the hardware's limits.

This is plain arithmetic, so it works for GPUs that are absent. Sources: CUDA's occupancy calculator; LLVM's AMDGPU
occupancy model (SIInstrInfo, AMDGPUBaseInfo).
"""

from dataclasses import dataclass

from liger_hw.backends.device import Core


@dataclass(frozen=True)
class Occupancy:
    """How many programs and warps a core holds.

    Attributes:
        programs: programs of the kernel that fit one core.
        warps: their warps.
        share: `warps` divided by the core's maximum, 0 to 1.
        limit: the resource that lacks room for another program: "registers", "shared", "warps" or "programs".
    """

    programs: int
    warps: int
    share: float
    limit: str


def warps_by_registers(core: Core, registers: int) -> int:
    """Return the warps of one scheduler at `registers` a lane; LLVM prints it as Occupancy."""
    granules = -(-max(registers, 1) // core.granule) * core.granule
    return min(core.registers // granules, core.warps)


def occupancy(core: Core, registers: int, shared: int, num_warps: int) -> Occupancy:
    """Compute the occupancy of a core by a kernel.

    Args:
        registers: registers a lane.
        shared: bytes of shared memory a program.
        num_warps: warps a program.
    """
    total = core.warps * core.schedulers
    room = {
        "warps": total // num_warps,
        "registers": warps_by_registers(core, registers) * core.schedulers // num_warps,
        "programs": core.programs,
    }
    if shared:
        taken = -(-(shared + core.reserved) // core.shared_granule) * core.shared_granule
        room["shared"] = core.shared // taken
    limit = min(room, key=room.get)  # the first of equal resources
    programs = room[limit]
    return Occupancy(programs, programs * num_warps, programs * num_warps / total, limit)
