"""Compute the occupancy of a core from the hardware's limits.

This is plain data and arithmetic, so it works for GPUs that are absent. Sources: CUDA's occupancy calculator and
arch_traits.h; LLVM's AMDGPU occupancy model (SIInstrInfo, AMDGPUBaseInfo) and ROCm's table of GPU specifications.
"""

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Core:
    """The limits of one core.

    Attributes:
        schedulers: parts of the core with their own warps and registers.
        registers: registers a lane of one scheduler: with w warps, each lane has at most registers / w.
        granule: registers are allocated in multiples of it.
        warps: most warps of one scheduler.
        programs: most programs of the core.
        shared: bytes of shared memory of the core.
        reserved: bytes of it that every program takes in addition to its own.
        shared_granule: shared memory is allocated in multiples of it.
        compute_units: compute units of `Device.num_cores` in this core: 2 on RDNA, whose programs share a work-group
            processor; 1 elsewhere.
    """

    schedulers: int
    registers: int
    granule: int
    warps: int
    programs: int
    shared: int
    reserved: int = 0
    shared_granule: int = 1
    compute_units: int = 1

    def warps_by_registers(self, registers: int) -> int:
        """Return the warps of one scheduler at `registers` a lane; LLVM prints it as Occupancy."""
        granules = -(-max(registers, 1) // self.granule) * self.granule
        return min(self.registers // granules, self.warps)

    def occupancy(self, registers: int, shared: int, num_warps: int) -> Occupancy:
        """Compute the occupancy of this core by a kernel.

        Args:
            registers: registers a lane.
            shared: bytes of shared memory a program.
            num_warps: warps a program.
        """
        total = self.warps * self.schedulers
        room = {
            "warps": total // num_warps,
            "registers": self.warps_by_registers(registers) * self.schedulers // num_warps,
            "programs": self.programs,
        }
        if shared:
            taken = -(-(shared + self.reserved) // self.shared_granule) * self.shared_granule
            room["shared"] = self.shared // taken
        limit = min(room, key=room.get)  # the first of equal resources
        programs = room[limit]
        return Occupancy(programs, programs * num_warps, programs * num_warps / total, limit)
