"""Hold facts about hardware: `Device` for launches, `Core` for occupancy, `Architecture` for a table's row.

Sources of a core's limits: CUDA's arch_traits.h; LLVM's AMDGPU occupancy model (SIInstrInfo, AMDGPUBaseInfo) and ROCm's
table of GPU specifications.
"""

from dataclasses import dataclass, field, replace

from liger_hw.spelling import check_known

KiB, MiB = 1024, 1024 * 1024
STAGES = ("ttir", "ttgir", "llir", "ptx", "amdgcn")  # of Triton's compilers for NVIDIA and AMD


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


@dataclass(frozen=True, eq=False)  # compared by identity: one value per torch device, hashed on every launch
class Device:
    """Facts about one GPU (or the CPU). Heuristics read these and nothing else.

    Attributes:
        vendor: "nvidia", "amd", "intel" or "cpu".
        arch: the vendor's name of the architecture: "sm90", "gfx942", "pvc", "cpu".
        warp_size: lanes of one warp / wavefront / sub-group.
        num_cores: SMs / CUs / Xe cores.
        shared_memory: bytes of shared memory one program may use.
        registers: 32-bit registers a lane in a program of `max_threads` lanes.
        max_threads: most lanes of one program.
        core_threads: most lanes resident on one core.
        l2: bytes of last-level cache.
        async_copy: whether loads of a pipelined loop bypass registers on the way to shared memory.
        ascending_only: whether loops must run to higher addresses, see `backends.amd`.
        tf32: whether Triton multiplies fp32 matrices in TF32 on it, if torch's flag allows that.
        grouped_mm: whether torch's `grouped_mm` of bf16 is one kernel on it; elsewhere torch waits for the device and
            calls one product for each group.
        bandwidth: memory bandwidth in GB/s, from the data sheet; 0 if unknown.
        launch_options: compiler options of every launch.
        warp_sizes: warp sizes that the compiler supports, if a launch may choose; else empty.
        name: the driver's name of it; empty without a driver.
        core: limits of one core, from which occupancy is computed; None if unknown (Intel, CPU).
    """

    vendor: str
    arch: str
    warp_size: int
    num_cores: int
    shared_memory: int
    registers: int = 64
    max_threads: int = 1024
    core_threads: int = 2048
    l2: int = 0
    bandwidth: int = 0
    async_copy: bool = False
    ascending_only: bool = False
    tf32: bool = False
    grouped_mm: bool = False
    launch_options: dict = field(default_factory=dict)
    warp_sizes: tuple = ()
    name: str = ""
    core: Core | None = None

    @property
    def max_warps(self) -> int:
        """Return the most warps of one program: 32 of 32 lanes, 16 of 64."""
        return self.max_threads // self.warp_size

    @property
    def bytes_in_flight(self) -> int:
        """Return the bytes in flight that a core needs for its share of the bandwidth.

        The assumed latency is 800 ns, that of busy memory. 0 if the bandwidth is unknown.
        """
        return self.bandwidth * 800 // self.num_cores

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the names of implementations for this device, most specific first."""
        if self.vendor == "cpu":
            return ("cpu", "reference")
        return (f"{self.vendor}:{self.arch}", self.vendor, "triton", "reference")

    def with_facts(self, **facts) -> "Device":
        """Copy this device with a driver's facts; None and 0 mean unknown."""
        return replace(self, **{name: value for name, value in facts.items() if value})


@dataclass(frozen=True)
class Architecture:
    """One row of a vendor's file: all that the package knows about an architecture.

    Attributes:
        device: the facts for launches, of the product that the row's comment names.
        cards: products of this architecture, as the tables of docs/hardware.md show them.
        in_matrix: whether `liger-hw compile` compiles for it by default. Its compiler must be in Triton's
            wheel.
        same_code: compiler stage ("ttir", "ttgir", "llir", "ptx", "amdgcn") -> group of architectures. For a group the
            stage writes the same text except for architecture names, and the compile matrix runs it once. Other stages
            run for this architecture alone, which is slower and always right.
        versions: (major, minor) numbers of it in the driver, if the driver gives numbers (Intel).

    Raises:
        ValueError: `same_code` names something else than a stage.
    """

    device: Device
    cards: str
    in_matrix: bool = False
    same_code: dict = field(default_factory=dict)
    versions: tuple = ()

    def __post_init__(self):
        for stage in self.same_code:  # a row passes its further keyword arguments here
            check_known("compiler stage", stage, STAGES)
