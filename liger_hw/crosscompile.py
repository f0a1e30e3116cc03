"""Compile launches for a GPU that is not here, and read what the compiler made of them.

Triton's wheel carries the compilers of AMD and NVIDIA; neither asks for a device. `launches_on(device)` turns every
launch in its body into a description of what would be compiled there, with exactly the configuration the launch would
use; `compiled(launch)` compiles one and reads it.
"""

import functools
import hashlib
import importlib
import json
import re
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from unittest import mock

import torch

from liger_hw import assembly, backends, launch
from liger_hw.assembly import Access
from liger_hw.backends import amd, nvidia
from liger_hw.backends.device import Device

DEVICES = nvidia.ARCHS | amd.ARCHS
_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """What the compiler sees of a launch, as plain data.

    Attributes:
        module, kernel: where the kernel is.
        arch: one of DEVICES.
        signature: parameter -> its Triton type, or "constexpr".
        constants: parameter -> value, of those.
        attributes: position -> what is known of that argument: alignment, size.
        options: of the compiler, num_warps among them.
        config: the configuration, as `Config.to_json` gives it, with its "source".
        aligned: whether every row of every tensor begins at a multiple of 16 bytes.
        matrices: the parameters that are tensors of rows, and not one vector for all of them.
    """

    module: str
    kernel: str
    arch: str
    signature: dict
    constants: dict
    attributes: dict
    options: dict
    config: dict
    aligned: bool
    matrices: tuple

    @property
    def what(self) -> tuple:
        """What makes two launches the same code, apart from the architecture."""
        return (self.module, self.kernel, *(str(x) for x in (self.signature, self.constants, self.attributes)),
                str(self.options))  # fmt: skip

    @property
    def key(self) -> str:
        """A hash of all that the compiled code depends on: the kernel's source with that of all it calls, constants,
        types, options, target, the version of Triton, and of what reads the result."""
        text = json.dumps([self.what, self.arch, _source(self.module, self.kernel), *reader()])
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def _source(module: str, kernel: str) -> str:
    return getattr(importlib.import_module(module), kernel).cache_key


@functools.cache
def reader() -> tuple[str, str]:
    """The version of Triton, and a hash of the code that compiles and reads."""
    import triton

    own = b"".join(Path(file).read_bytes() for file in (__file__, assembly.__file__))
    return triton.__version__, hashlib.sha256(own).hexdigest()


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        registers: registers a lane (AMD: vector registers, accumulation registers included).
        spills: bytes (NVIDIA) or registers (AMD) a lane that did not fit and went to memory.
        scratch: bytes of memory a lane that the compiler set aside.
        shared: bytes of shared memory a program.
        waves: waves that a scheduler keeps by the compiler's own account; None where it says nothing (NVIDIA).
        accesses: every load and store of the source, see `assembly.Access`.
        atomics, loops, calls, doubles: atomic operations, compare-and-swap loops, calls that were not inlined, and
            fp64 arithmetic, in instructions.
        library: functions of the vendor's library that the source names.
    """

    registers: int
    spills: int
    scratch: int
    shared: int
    waves: int | None = None
    accesses: tuple = ()
    atomics: int = 0
    loops: int = 0
    calls: int = 0
    doubles: int = 0
    library: list = field(default_factory=list)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, found: dict) -> "Resources":
        return cls(**(found | {"accesses": tuple(Access(**access) for access in found["accesses"])}))


@contextmanager
def launches_on(device: Device):
    """Within, launches of tensors on the CPU or on "meta" are recorded for `device` and not run; yields their list, in
    which those that differ in nothing the compiler sees are equal in `what`.

    Outputs hold garbage, so values computed from them mean nothing.
    """
    found = []

    def record(kernel, grid, config, *args):
        if 0 not in grid:
            found.append(_describe(kernel, config, args, device))

    users = _modules_that_launch()
    with mock.patch.multiple(backends, interpreting=lambda: True, device_of=lambda tensor: device):
        with _patched(users, "launch", record), _patched(users, "device_of", lambda tensor: device):
            with backends.use_backend(f"{device.vendor}:{device.arch}"):
                yield found


def _modules_that_launch():
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("liger_hw.") and getattr(module, "launch", None) is launch.launch
    ]


@contextmanager
def _patched(modules, name, replacement):
    before = [(module, getattr(module, name)) for module in modules if hasattr(module, name)]
    for module, _ in before:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, value in before:
            setattr(module, name, value)


def _describe(kernel, config, args, device) -> Launch:
    """Types, constants and the facts about alignment that Triton would find in these arguments."""
    values = [*args, *config.meta.values()]
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif torch.is_tensor(value):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[i] = [["tt.divisibility", 16]] if value.data_ptr() % 16 == 0 else []
            if device.vendor == "amd" and value.numel() * value.element_size() < 2**31:
                attributes[i] += [["tt.pointer_range", 32]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if not parameter.do_not_specialize:
                if value == 1:
                    signature[parameter.name], constants[parameter.name] = "constexpr", 1
                elif value % 16 == 0:
                    attributes[i] = [["tt.divisibility", 16]]
    matrices = tuple(p.name for p, value in zip(kernel.params, args) if torch.is_tensor(value) and value.ndim > 1)
    return Launch(
        kernel.fn.__module__, kernel.fn.__name__, device.arch, signature, constants, attributes,
        config.options(device), config.to_json() | {"source": config.source}, _aligned(args, constants), matrices,
    )  # fmt: skip


def _aligned(args, constants) -> bool:
    """Whether every row begins at a multiple of 16 bytes; of a rotary embedding, every half of one."""
    for x in args:
        if torch.is_tensor(x) and x.is_floating_point() and x.ndim > 1:
            steps = [x.shape[-1], *(stride for stride in x.stride()[:-1])]
            if "rotary_dim" in constants:
                steps.append(constants["rotary_dim"] // 2)
            if x.data_ptr() % 16 or any(step * x.element_size() % 16 for step in steps):
                return False
    return True


def compiled(job: Launch) -> Resources:
    """Compile what `job` describes, through Triton's own stages and past its cache on disk, and read the result.

    Raises:
        Exception: whatever the compiler raises; it knows many ways.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    device = DEVICES[job.arch]
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    if device.vendor == "nvidia":
        target = GPUTarget("cuda", int(job.arch.removeprefix("sm")), 32)
    else:
        target = GPUTarget("hip", job.arch, device.warp_size)
    attributes = {(i,): facts for i, facts in job.attributes.items()}
    source = ASTSource(kernel, job.signature, job.constants, attributes)
    backend = make_backend(target)
    options = backend.parse_options(dict(job.options))
    stages, metadata, text = {}, {"target": target, **options.__dict__}, {}
    backend.add_stages(stages, options, source.language)
    relative = _of_relative(job)
    if relative:
        module, text["ttir"], metadata["shared"] = relative
        stages = {name: stage for name, stage in stages.items() if name not in ("ttir", "ttgir", "llir")}
    else:
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = _front_end(job, source, target, options, backend, context)
    for name, stage in stages.items():
        module = stage(module, metadata)
        if name in ("ttir", "llir", "ptx", "cubin", "amdgcn"):
            text[name] = module if isinstance(module, bytes) else str(module)
        if name == "llir":
            _remember(job, _family(job.arch), (job.arch, text["llir"], text["ttir"], metadata["shared"]))
        if name == "amdgcn":  # what is left only assembles it
            break
    read = _read_nvidia if device.vendor == "nvidia" else _read_amd
    library = assembly.library_calls(text["ttir"])
    return Resources(shared=metadata["shared"], library=library, **read(text, assembly.accesses_of(text["ttir"])))


# Architectures for which Triton writes the same LLVM IR but for their names. What a compiler does then, it does for
# each: to their LLVM and ptxas they differ.
FAMILIES = (("sm86", "sm89"), ("gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151"), ("gfx1200", "gfx1201"))
_made = {}  # of the kernel compiled last: its `what`, Triton's first IR by vendor, and LLVM's by family


def _family(arch: str) -> tuple:
    return next((family for family in FAMILIES if arch in family), (arch,))


def _remember(job: Launch, name, made) -> None:
    if _made.get("what") != job.what:
        _made.clear()
        _made["what"] = job.what
    _made[name] = made


def _remembered(job: Launch, name):
    return _made.get(name) if _made.get("what") == job.what else None


def _of_relative(job: Launch) -> tuple[str, str, int] | None:
    """The LLVM IR that another architecture of its family was given, in this one's name, with Triton's IR and the
    shared memory; None if none was. That is three fifths of the time."""
    made = _remembered(job, _family(job.arch))
    if made is None:
        return None
    arch, llir, *rest = made
    for its, mine in zip(_names(arch), _names(job.arch)):
        llir = llir.replace(its, mine)
    return llir, *rest


def _names(arch: str) -> tuple:
    """What LLVM calls an architecture: "sm_89"; "gfx1151" and, in newer triples, "amdgpu11.51"."""
    if arch.startswith("sm"):
        return (f"sm_{arch[2:]}",)
    return arch, f"amdgpu{arch[3:-2]}.{arch[-2:]}"


def _front_end(job, source, target, options, backend, context):
    """Triton's first IR of the kernel. It knows the configuration but not the architecture, so that those which choose
    alike share it: to read it takes 4 ms where to make it takes 20, of 100 in all."""
    from triton._C.libtriton import ir

    written = _remembered(job, target.backend)
    if written is None:
        codegen = backend.get_codegen_implementation(options)
        module = source.make_ir(target, options, codegen, backend.get_module_map(), context)
        _remember(job, target.backend, str(module))
        return module
    with tempfile.NamedTemporaryFile("w", suffix=".ttir") as file:
        file.write(written)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    return module


_DOUBLES = re.compile(r"^\s*(?:@!?%p\d+ )?(?:add|sub|mul|div|fma|cvt|setp|sqrt|rcp|neg|abs|min|max)\.\S*f64\b", re.M)


def _read_nvidia(text, accesses) -> dict:
    ptx = text["ptx"]
    registers, stack = assembly.cubin_usage(text["cubin"])
    return {
        "registers": registers,
        "spills": stack,  # no kernel here has an array that the compiler would put there
        "scratch": stack,
        "accesses": tuple(assembly.with_widths(accesses, ptx, assembly.ptx_access)),
        "atomics": len(re.findall(r"\b(?:atom|red)\.global", ptx)),
        "loops": len(re.findall(r"\batom\.\S*cas\b", ptx)),
        "calls": len(re.findall(r"^\s*call\b", ptx, re.M)),
        "doubles": len(_DOUBLES.findall(ptx)),
    }  # fmt: skip


def _read_amd(text, accesses) -> dict:
    code = text["amdgcn"]

    def number(name):
        return int(re.search(rf"^\s*-?\s*\.{name}:\s*(\d+)", code, re.M).group(1))

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "scratch": number("private_segment_fixed_size"),
        "waves": int(re.search(r"^;\s*Occupancy:\s*(\d+)", code, re.M).group(1)),
        "accesses": tuple(assembly.with_widths(accesses, code, assembly.amd_access)),
        "atomics": len(re.findall(r"^\s+(?:global|buffer|flat)_atomic", code, re.M)),
        "loops": len(re.findall(r"^\s+\w+_atomic_cmpswap", code, re.M)),
        "calls": len(re.findall(r"^\s+s_swappc", code, re.M)),
        "doubles": len(re.findall(r"^\s+v_\w+_f64\w*\b", code, re.M)),
    }
