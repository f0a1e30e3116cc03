"""Define the configuration of a launch, and the arithmetic that heuristics share."""

from dataclasses import dataclass, field

from liger_hw import backends
from liger_hw.backends.device import Device

HEURISTIC, SHIPPED, LOCAL = "heuristic", "shipped", "local"  # where a configuration comes from
MEASURED, COMPILED = "measured", "compiled"  # how the entry of a table was found


@dataclass(frozen=True)
class Config:
    """How to launch one kernel; equal values are equal configurations.

    Attributes:
        meta: Triton meta-parameters by name, in the order of the kernel's last parameters: powers of two that span a
            tile, and STAGES, how far a kernel's own loop loads ahead.
        num_warps: warps per program.
        num_stages: stages of the compiler's loop pipeliner.
        programs: for kernels whose grid does not grow with the rows: programs per core.
        knobs: options of the device's own compiler that differ from the device's launch options.
        fp_fusion: whether a product and a sum may be rounded once. False where a kernel promises to round both: the
            compiler also takes bf16(a * b) + c for one bf16 operation.
        device: the Device it was made for; `tuned` fills this in.
        source: "heuristic", "shipped" or "local".
        key: what tables call it: "rms_norm_forward(4096, 2)"; `tuned` fills this in.
        triton: the version of Triton that the entry of its table was found with; empty for a heuristic's choice.
        compiled_as: text of all that a compiled kernel depends on, a part of every launch's key: Python remembers the
            hash of a text, while a hash of these fields costs more than the look-up.
    """

    meta: dict
    num_warps: int = 4
    num_stages: int = 1
    programs: int = 1
    knobs: dict = field(default_factory=dict)
    fp_fusion: bool = True
    device: Device | None = None
    source: str = HEURISTIC
    key: str = ""
    triton: str = ""
    compiled_as: str = field(init=False, repr=False, compare=False)

    def __post_init__(self):
        device = (self.device.vendor, self.device.launch_options) if self.device else None
        compiled = self.meta, self.num_warps, self.num_stages, self.knobs, self.fp_fusion, device
        object.__setattr__(self, "compiled_as", repr(compiled))

    def __hash__(self):
        return hash(self.compiled_as)

    def __getitem__(self, name):
        return self.meta[name]

    def grid_for(self, tiles: int) -> int:
        """Return the programs of a grid that strides over `tiles`: none idle, at least one."""
        return max(min(self.programs * self.device.num_cores, tiles), 1)

    def options(self, here: Device) -> dict:
        """Return launch options for the compiler of `here`, without another vendor's knobs."""
        mine = self.device.launch_options | self.knobs if self.device.vendor == here.vendor else {}
        # The default of enable_fp_fusion changes with Triton 3.10; stating it keeps the numbers.
        fusion = {"enable_fp_fusion": self.fp_fusion}
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **fusion, **mine}

    def to_json(self) -> dict:
        return {
            "meta": self.meta, "num_warps": self.num_warps, "num_stages": self.num_stages, "programs": self.programs,
            **({"knobs": self.knobs} if self.knobs else {}),
        }  # fmt: skip

    def launch_error(self) -> str | None:
        """Return why its device cannot launch it, or None."""
        return backends.launch_error(self.device, self.num_warps, self.device.launch_options | self.knobs)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least `n`, without Triton."""
    return 1 << max(n - 1, 0).bit_length()


def row_warps(elements: int, device: Device, per_lane: int = 8) -> int:
    """Return the warps for `elements` values, `per_lane` a lane, within the device's limit."""
    return min(max(power_of_2(elements) // (per_lane * device.warp_size), 1), device.max_warps)
