"""What one core holds, and how many programs of a kernel fit on it: plain data and arithmetic.

Nothing here is measured: these are the hardware's own limits, so that the occupancy of a GPU that is not here can be
computed. Sources: CUDA's occupancy calculator and arch_traits.h; LLVM's AMDGPU occupancy model (SIInstrInfo,
AMDGPUBaseInfo) and ROCm's table of GPU specifications.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Occupancy:
    """How full a core is.

    Attributes:
        programs: programs of the kernel that one core holds.
        warps: their warps.
        share: `warps` divided by the warps that the core could keep, 0 to 1.
        limit: the resource that has no room for one more program: "registers", "shared", "warps" or "programs".
    """

    programs: int
    warps: int
    share: float
    limit: str


@dataclass(frozen=True)
class Core:
    """The limits of one core.

    Attributes:
        schedulers: parts of the core that each keep their own warps and registers.
        registers: registers a lane that one scheduler deals out: of w warps there, each has at most registers / w.
        granule: a warp's registers are a multiple of it.
        warps: warps that one scheduler keeps at most.
        programs: programs that the core keeps at most.
        shared: bytes of shared memory of the core.
        reserved: bytes of it that every program takes beside its own.
        shared_granule: a program's bytes are a multiple of it.
        compute_units: how many of `Device.num_cores` are this one core: 2 on RDNA, whose programs share a work-group
            processor of two compute units; 1 elsewhere.
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
        """Warps that one scheduler keeps if each lane takes `registers`: what LLVM prints as Occupancy."""
        granules = -(-max(registers, 1) // self.granule) * self.granule
        return min(self.registers // granules, self.warps)

    def occupancy(self, registers: int, shared: int, num_warps: int) -> Occupancy:
        """Compute how full this core is of a kernel's programs.

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
        limit = min(room, key=room.get)  # the first of equal ones
        programs = room[limit]
        return Occupancy(programs, programs * num_warps, programs * num_warps / total, limit)
