"""Hold the limits of a core, from which its occupancy follows.

Sources: CUDA's arch_traits.h; LLVM's AMDGPU occupancy model (SIInstrInfo, AMDGPUBaseInfo) and ROCm's table of GPU
specifications.
"""

from dataclasses import dataclass


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
