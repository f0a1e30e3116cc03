"""Facts about hardware as plain data: `Device`, which a launch may know, and `Architecture`, a row of facts."""

from dataclasses import dataclass, field, replace

from liger_hw.backends.core import Core


@dataclass(frozen=True, eq=False)  # compared by identity: one value per torch device, hashed on every launch
class Device:
    """Facts about one GPU (or the CPU). Heuristics read these and nothing else.

    Attributes:
        vendor: "nvidia", "amd", "intel" or "cpu".
        arch: the vendor's name of the architecture: "sm90", "gfx942", "pvc", "cpu".
        warp_size: lanes of one warp / wavefront / sub-group.
        num_cores: SMs / CUs / Xe cores.
        shared_memory: bytes of shared memory one program may use.
        registers: 32-bit registers each lane has when a core is filled with one block of `max_threads`.
        max_threads: lanes of one program at most.
        core_threads: lanes resident on one core at most.
        l2: bytes of last-level cache.
        async_copy: loads of a pipelined loop go to shared memory without passing through registers.
        bandwidth: memory bandwidth in GB/s, from the data sheet; 0 if unknown.
        launch_options: options every launch on this vendor passes to its compiler.
        warp_sizes: sizes of a warp that its compiler can be asked for; empty where there is no choice.
        name: what the driver calls it; empty for a description that no driver gave.
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
    launch_options: dict = field(default_factory=dict)
    warp_sizes: tuple = ()
    name: str = ""
    core: Core | None = None

    @property
    def max_warps(self) -> int:
        """The most warps one program may have: 32 of 32 lanes, 16 of 64."""
        return self.max_threads // self.warp_size

    @property
    def bytes_in_flight(self) -> int:
        """Bytes that a core must have requested to use its share of the bandwidth; 0 if the bandwidth is unknown.

        For a latency of 800 ns: a planning number, that of busy memory.
        """
        return self.bandwidth * 800 // self.num_cores

    @property
    def fast_memory(self) -> bool:
        """Whether a core should have more than 40 KB under way: a B200's (43, of 54 GB/s a core), not an H200's (29, of
        36)."""
        return self.bytes_in_flight > 40_000

    @property
    def backends(self) -> tuple[str, ...]:
        """Names an implementation may be registered under, most specific first."""
        if self.vendor == "cpu":
            return ("cpu", "reference")
        return (f"{self.vendor}:{self.arch}", self.vendor, "triton", "reference")

    def with_facts(self, **facts) -> "Device":
        """Copy this device with facts that a driver reported; None and 0 mean that it did not."""
        return replace(self, **{name: value for name, value in facts.items() if value})


@dataclass(frozen=True)
class Architecture:
    """One row of a vendor's file: everything that is written down about an architecture.

    Attributes:
        device: the facts that a launch may know; those of one product, which the row's comment names.
        cards: products of this architecture, as the tables of docs/hardware.md show them.
        in_matrix: whether `liger-hw matrix --compile` compiles for it where no --archs names it. Triton's wheel must
            have its compiler.
        same_code: compiler stage ("ttir", "ttgir", "llir", "ptx", "amdgcn") -> group of architectures for which that
            stage writes the same text but for their names. The compile matrix runs such a stage once for a group. A
            stage that is not named runs for this architecture alone, which is slower and always right.
        versions: (major, minor) numbers by which the driver names it, if it gives numbers (Intel).
    """

    device: Device
    cards: str
    in_matrix: bool = False
    same_code: dict = field(default_factory=dict)
    versions: tuple = ()
