"""Compile launches for a GPU that this machine lacks, and read the compiler's output.

Triton's wheel carries the compilers of AMD and NVIDIA; neither needs a device. `launches_on(device)` records launches
instead of running them, each with exactly the configuration that it would use on the device. `compiled(launch)`
compiles one and reads the output.
"""

import functools
import hashlib
import importlib
import json
import re
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from liger_hw import backends
from liger_hw.backends import ARCHITECTURES, amd, nvidia
from liger_hw.backends.device import Device
from liger_hw.hooks import hooks
from liger_lab.levels import assembly
from liger_lab.levels.assembly import Access

DEVICES = nvidia.ARCHS | amd.ARCHS
_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """All facts of a launch that the compiler sees, as plain data.

    Attributes:
        module, kernel: names of the kernel's module and function.
        arch: one of DEVICES.
        signature: parameter -> its Triton type, or "constexpr".
        constants: parameter -> value, of the "constexpr" parameters.
        attributes: position -> known facts of that argument: alignment, size.
        options: compiler options, num_warps among them.
        config: the configuration as `Config.to_json` returns it, with its "source" and "key".
        aligned: whether every row of every tensor begins at a multiple of 16 bytes.
        matrices: the parameters that are tensors of rows, not one vector shared by all rows.
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
        """Return all that determines a launch's code, apart from the architecture."""
        return (self.module, self.kernel, *(str(x) for x in (self.signature, self.constants, self.attributes)),
                str(self.options))  # fmt: skip

    @property
    def key(self) -> str:
        """Return a hash of all that the compiled code and its reading depend on.
        It covers the source of kernel and callees, constants, types, options, target, Triton's version, the reader."""
        text = json.dumps([self.what, self.arch, _source(self.module, self.kernel), *reader()])
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.cache
def _source(module: str, kernel: str) -> str:
    return getattr(importlib.import_module(module), kernel).cache_key


@functools.cache
def reader() -> tuple[str, str]:
    """Return Triton's version and a hash of the code that compiles and reads."""
    import triton

    sources = b"".join(Path(file).read_bytes() for file in (__file__, assembly.__file__))
    return triton.__version__, hashlib.sha256(sources).hexdigest()


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel.

    Attributes:
        registers: registers a lane (AMD: vector registers, accumulation registers included).
        spills: bytes (NVIDIA) or registers (AMD) a lane that did not fit and went to memory.
        scratch: bytes of memory a lane that the compiler set aside.
        shared: bytes of shared memory a program.
        waves: waves that a scheduler keeps, as the compiler reports; None for NVIDIA, whose compiler reports none.
        accesses: every load and store of the source, see `assembly.Access`.
        atomics, loops, calls, doubles: atomic operations, compare-and-swap loops, calls that were not inlined, and
            fp64 arithmetic, in instructions.
        library: functions of the vendor's library that the source names.
        overwritten: tiles that a later copy may overwrite while a matrix product still reads them.
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
    overwritten: int = 0
    library: list = field(default_factory=list)

    def to_json(self) -> dict:
        return vars(self) | {"accesses": [vars(access) for access in self.accesses]}

    @classmethod
    def from_json(cls, content: dict) -> "Resources":
        return cls(**(content | {"accesses": tuple(Access(**access) for access in content["accesses"])}))


@contextmanager
def launches_on(device: Device):
    """Record launches for `device`, one of DEVICES, instead of running them; yield their list.

    Tensors are on the CPU or on "meta". Launches with the same code have the same `what`. Outputs are uninitialised, so
    values computed from them mean nothing.
    """
    launches = []

    def record(kernel, grid, config, *args):
        launches.append(describe(kernel, config, args, device))

    with hooks.replace_launches(record), backends.use_backend(f"{device.vendor}:{device.arch}"):
        yield launches


def describe(kernel, config, args, device) -> Launch:
    """Describe a launch by the types, constants and alignments that Triton would find."""
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
    known = config.to_json() | {"source": config.source, "key": config.key}
    return Launch(
        kernel.fn.__module__, kernel.fn.__name__, device.arch, signature, constants, attributes,
        config.options(device), known, _aligned(args, constants), matrices,
    )  # fmt: skip


def _aligned(args, constants) -> bool:
    """Tell whether every row (rotary embedding: half row) begins at a multiple of 16 bytes."""
    for x in args:
        if torch.is_tensor(x) and x.is_floating_point() and x.ndim > 1:
            steps = [x.shape[-1], *(stride for stride in x.stride()[:-1])]
            if "rotary_dim" in constants:
                steps.append(constants["rotary_dim"] // 2)
            if x.data_ptr() % 16 or any(step * x.element_size() % 16 for step in steps):
                return False
    return True


def compiled(job: Launch) -> Resources:
    """Compile a launch with Triton's own stages, past its disk cache, and read the result.

    Raises:
        Exception: any exception of the compiler, of many types.
    """
    return read(*built(job))


# `Architecture.same_code` names stages that write the same text for several architectures, but for the architecture's
# name. `built` reuses the text of such a stage for the other architectures and runs the later stages for each. Matrix
# products share "ttir" alone, as each generation has matrix instructions of its own.
# In ms, on one core of an EPYC: the front end 20, "ttir" 3, "ttgir" 14, "llir" 42, "ptx" 12 and ptxas 40, or "amdgcn"
# 30; to read Triton's own IR 2.
_SAME_CODE = {row.device.arch: row.same_code for row in ARCHITECTURES.values()}
_last_built = {}  # the last kernel's `what`, and (stage, group) -> (an architecture of the group, texts, shared memory)


def built(job: Launch, binary: bool = False) -> tuple[dict, int]:
    """Run the stages up to machine code: (stage -> output, bytes of shared memory).

    Args:
        binary: also assemble AMD's text ("hsaco").
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
    stages, metadata = {}, {"target": target, **options.__dict__}
    backend.add_stages(stages, options, source.language)
    assemble = stages.pop("hsaco", None)
    text, metadata["shared"] = _relative_code(job, stages)
    last = next(reversed(text), None)
    module = text.get(last)
    if last in (None, "ttir", "ttgir"):
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        if last:
            module = _parsed(module, context)
        else:
            codegen = backend.get_codegen_implementation(options)
            module = source.make_ir(target, options, codegen, backend.get_module_map(), context)
    for name in list(stages)[len(text) :]:
        module = stages[name](module, metadata)
        text[name] = module if isinstance(module, bytes) else str(module)
        group = _SAME_CODE[job.arch].get(name)
        has_matrix_product = name != "ttir" and "tt.dot" in text["ttir"]
        if group and not has_matrix_product:
            _last_built[name, group] = job.arch, dict(text), metadata["shared"]
    if binary:
        text["hsaco"] = assemble(text["amdgcn"], metadata)
    return text, metadata["shared"]


def _relative_code(job: Launch, stages) -> tuple[dict, int | None]:
    """Return the reusable texts of this kernel from another architecture, renamed.
    The second value is the shared memory, or None before the stage that sets it."""
    if _last_built.get("what") != job.what:
        _last_built.clear()
        _last_built["what"] = job.what
    for name in reversed(stages):
        cached = _last_built.get((name, _SAME_CODE[job.arch].get(name)))
        if cached:
            arch, texts, shared = cached
            return {stage: _renamed(text, arch, job.arch) for stage, text in texts.items()}, shared
    return {}, None


def _renamed(text: str, arch: str, to: str) -> str:
    for its, mine in zip(_names(arch), _names(to)):
        text = text.replace(its, mine)
    return text


def _names(arch: str) -> tuple:
    """Return compilers' names: "sm_89", Triton "cuda:89"; "gfx1151", newer triples "amdgpu11.51"."""
    if arch.startswith("sm"):
        return f"sm_{arch[2:]}", f"cuda:{arch[2:]}"
    return arch, f"amdgpu{arch[3:-2]}.{arch[-2:]}"


def _parsed(text: str, context):
    from triton._C.libtriton import ir

    with tempfile.NamedTemporaryFile("w", suffix=".mlir") as file:
        file.write(text)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    return module


def read(text: dict, shared: int) -> Resources:
    """Read the resources from the output of `built`."""
    read_vendor = _read_nvidia if "ptx" in text else _read_amd
    library = assembly.library_calls(text["ttir"])
    return Resources(shared=shared, library=library, **read_vendor(text, assembly.accesses_of(text["ttir"])))


_DOUBLES = r"^\s*(?:@!?%p\d+ )?(?:add|sub|mul|div|fma|cvt|setp|sqrt|rcp|neg|abs|min|max)\.\S*f64\b"


def _read_nvidia(text, accesses) -> dict:
    ptx = text["ptx"]
    lines = ptx.splitlines()
    registers, stack = assembly.cubin_usage(text["cubin"])
    return {
        "registers": registers,
        "spills": stack,  # no kernel here has an array on the stack, so all of it is spills
        "scratch": stack,
        "accesses": tuple(assembly.with_widths(accesses, ptx, assembly.ptx_access)),
        "atomics": len(_find(r"\b(?:atom|red)\.global", ".global", lines)),
        "loops": len(_find(r"\batom\.\S*cas\b", "cas", lines)),
        "calls": len(_find(r"^\s*call\b", "call", lines)),
        "doubles": len(_find(_DOUBLES, "f64", lines)),
        "overwritten": assembly.overwritten_tiles(text["ttgir"]),
    }  # fmt: skip


def _read_amd(text, accesses) -> dict:
    code = text["amdgcn"]
    lines = code.splitlines()

    def number(name):
        return int(_find(rf"^\s*-?\s*\.{name}:\s*(\d+)", f".{name}:", lines)[0])

    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "scratch": number("private_segment_fixed_size"),
        "waves": int(_find(r"^;\s*Occupancy:\s*(\d+)", "Occupancy:", lines)[0]),
        "accesses": tuple(assembly.with_widths(accesses, code, assembly.amd_access)),
        "atomics": len(_find(r"^\s+(?:global|buffer|flat)_atomic", "_atomic", lines)),
        "loops": len(_find(r"^\s+\w+_atomic_cmpswap", "_atomic", lines)),
        "calls": len(_find(r"^\s+s_swappc", "s_swappc", lines)),
        "doubles": len(_find(r"^\s+v_\w+_f64\w*\b", "_f64", lines)),
    }


def _find(pattern: str, word: str, lines: list[str]) -> list[str]:
    """Find `pattern` in the lines with `word`: a tenth of a full search's time."""
    return re.findall(pattern, "\n".join(line for line in lines if word in line), re.M)
