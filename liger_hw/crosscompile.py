"""Compile launches for a GPU that is not here, and read what the compiler made of them.

Triton's wheel carries the compilers of AMD and NVIDIA; neither asks for a device. `compiling_for(device)` makes every
launch in its body a compilation for that device, with exactly the configuration the launch would use there.
"""

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from liger_hw import backends, launch
from liger_hw.backends.device import Device

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.int64: "*i64", torch.int32: "*i32", torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes.

    Attributes:
        kernel, arch: its name and the architecture.
        num_warps, shared: warps and bytes of shared memory a program.
        registers: registers a lane (AMD: vector registers, accumulation registers included).
        spills: bytes (NVIDIA) or registers (AMD) a lane that did not fit and went to memory.
        loads, stores: global accesses by bytes a lane, as {width: count}.
        forbidden: what no kernel here may contain: atomics, compare-and-swap loops, fp64 arithmetic, calls.
    """

    kernel: str
    arch: str
    num_warps: int
    shared: int
    registers: int
    spills: int
    loads: dict = field(default_factory=dict)
    stores: dict = field(default_factory=dict)
    forbidden: tuple = ()


@contextmanager
def compiling_for(device: Device):
    """Within, launches of CPU tensors compile for `device` instead of running; yields the list of their `Resources`.

    Outputs hold garbage, so values computed from them mean nothing.
    """
    found, seen = [], {}

    def compile_only(kernel, grid, config, *args):
        if 0 in grid:
            return
        signature, constants, attributes = _specialise(kernel, config, args, device)
        key = (kernel, str(signature), str(constants), str(attributes), str(config.options(device)))
        if key not in seen:
            seen[key] = _compile(kernel, signature, constants, attributes, config, device)
            found.append(seen[key])

    users = _modules_that_launch()
    with mock.patch.multiple(backends, interpreting=lambda: True, device_of=lambda tensor: device):
        with _patched(users, "launch", compile_only), _patched(users, "device_of", lambda tensor: device):
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


def _specialise(kernel, config, args, device):
    """Types, constants and the facts about alignment that Triton would find in these arguments."""
    values = [*args, *config.meta.values()]
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif torch.is_tensor(value):
            signature[parameter.name] = _TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]] if value.data_ptr() % 16 == 0 else []
            if device.vendor == "amd" and value.numel() * value.element_size() < 2**31:
                attributes[(i,)] += [["tt.pointer_range", 32]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if not parameter.do_not_specialize:
                if value == 1:
                    signature[parameter.name], constants[parameter.name] = "constexpr", 1
                elif value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def _compile(kernel, signature, constants, attributes, config, device) -> Resources:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if device.vendor == "nvidia":
        target = GPUTarget("cuda", int(device.arch.removeprefix("sm")), 32)
    else:
        target = GPUTarget("hip", device.arch, device.warp_size)
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=target, options=config.options(device))
    read = _read_nvidia if device.vendor == "nvidia" else _read_amd
    return Resources(kernel.__name__, device.arch, config.num_warps, built.metadata.shared, **read(built))


def _read_nvidia(built) -> dict:
    ptx = built.asm["ptx"]
    widths = Counter()
    for match in re.finditer(r"\b(ld|st)\.global(?:\.[\w:]+)*?(?:\.(v[248]))?\.([bfus]\d+)\b", ptx):
        lanes = int(match.group(2)[1:]) if match.group(2) else 1
        widths[match.group(1), lanes * int(match.group(3)[1:]) // 8] += 1
    found = re.findall(r"\b(atom|red)\.global|\b(call)\b|\.(f64)\b", ptx)
    usage = _cuobjdump(built.asm["cubin"])
    return {
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "spills": int(re.search(r"LOCAL:(\d+)", usage).group(1)) + int(re.search(r"STACK:(\d+)", usage).group(1)),
        "loads": {width: n for (kind, width), n in widths.items() if kind == "ld"},
        "stores": {width: n for (kind, width), n in widths.items() if kind == "st"},
        "forbidden": tuple(sorted({word for match in found for word in match if word})),
    }


@functools.cache
def _cuobjdump(cubin: bytes) -> str:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "kernel.cubin")
        with open(file, "wb") as out:
            out.write(cubin)
        return subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file], capture_output=True, text=True, check=True
        ).stdout


_AMD_WIDTHS = [
    (r"dwordx4|b128", 16), (r"dwordx3|b96", 12), (r"dwordx2|b64", 8), (r"dword|b32", 4), (r"short|16", 2), ("", 1),
]  # fmt: skip


def _read_amd(built) -> dict:
    text = built.asm["amdgcn"]

    def number(name):
        return int(re.search(rf"^\s*-?\s*\.{name}:\s*(\d+)", text, re.M).group(1))

    widths = Counter()
    for match in re.finditer(r"^\s+(?:global|buffer|flat)_(load|store)_(\w+)", text, re.M):
        widths[match.group(1), next(width for pattern, width in _AMD_WIDTHS if re.search(pattern, match.group(2)))] += 1
    found = re.findall(r"^\s+\w+_(atomic|cmpswap)\w*|^\s+(s_swappc)\w*|^\s+v_(?:add|mul|fma)_(f64)\b", text, re.M)
    return {
        "registers": number("vgpr_count"),
        "spills": number("vgpr_spill_count") + number("sgpr_spill_count"),
        "loads": {width: n for (kind, width), n in widths.items() if kind == "load"},
        "stores": {width: n for (kind, width), n in widths.items() if kind == "store"},
        "forbidden": tuple(sorted({word for match in found for word in match if word})),
    }
