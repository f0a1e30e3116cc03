"""Read an AMD code object: its machine code, kernel descriptor and arguments.

Sources: LLVM's "User Guide for AMDGPU Backend", sections "Code Object", "Kernel Descriptor" and "Kernel Dispatch".
"""

import io
import struct
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Argument:
    """One entry of the kernel-argument segment: its place in bytes, and AMD's `value_kind`."""

    offset: int
    size: int
    kind: str


@dataclass(frozen=True)
class CodeObject:
    """A kernel that is ready to load.

    Attributes:
        image: the loadable segments, from address `start` on.
        first: the address of the first instruction, from the same origin. Where arguments are preloaded into registers,
            it is 256 bytes after the entry, as in front of it is code for firmware that does not preload.
        lds, scratch: bytes a program, bytes a lane.
        user_sgprs: what the hardware puts into the first scalar registers, in order: ("kernarg", half of the arguments'
            address), ("preload", word of the arguments), ("scratch", word of its buffer descriptor) or ("junk", 0).
        program_ids: which of the program's coordinates follow them, in order.
        scratch_offset: whether the offset of the wave's scratch follows these.
        ids_in_ttmp: whether the coordinates are in registers of the trap handler instead (gfx12).
        arguments: the kernel's arguments.
    """

    image: np.ndarray
    start: int
    first: int
    lds: int
    scratch: int
    user_sgprs: tuple
    program_ids: tuple
    scratch_offset: bool
    ids_in_ttmp: bool
    arguments: tuple


def with_lds(code: CodeObject, size: int) -> CodeObject:
    """Return the code with at least `size` bytes of LDS."""
    return replace(code, lds=max(code.lds, size))


def read(binary: bytes, assembly: str, arch: str) -> CodeObject:
    """Read a code object with one kernel.

    Args:
        binary: the ELF file.
        assembly: its assembly, whose metadata name the arguments.
        arch: one of `instructions.FAMILIES`.
    """
    import yaml
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(binary))
    segments = [
        (s["p_vaddr"], s.data().ljust(s["p_memsz"], b"\0")) for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"
    ]
    start = min(address for address, _ in segments)
    image = np.zeros(max(address + len(data) for address, data in segments) - start, np.uint8)
    for address, data in segments:
        image[address - start : address - start + len(data)] = np.frombuffer(data, np.uint8)
    if any(s.num_relocations() for s in elf.iter_sections() if s["sh_type"] in ("SHT_RELA", "SHT_REL")):
        raise NotImplementedError("relocations in a code object")
    symbols = elf.get_section_by_name(".dynsym").iter_symbols()
    (descriptor_at,) = (symbol["st_value"] for symbol in symbols if symbol.name.endswith(".kd"))
    descriptor = image[descriptor_at - start : descriptor_at - start + 64].tobytes()
    lds, scratch = struct.unpack_from("<II", descriptor)
    entry = descriptor_at + struct.unpack_from("<q", descriptor, 16)[0]
    _, rsrc1, rsrc2, properties, preload = struct.unpack_from("<IIIHH", descriptor, 44)
    rounding, denormals = (rsrc1 >> 12) & 15, (rsrc1 >> 16) & 15
    if rounding or denormals != 15:
        raise NotImplementedError(f"rounding mode {rounding} or denormal mode {denormals}")
    user = []
    # (bit of the properties, registers): private segment buffer, dispatch, queue, kernel arguments, dispatch id, flat
    # scratch, private segment size
    for bit, registers in ((0, 4), (1, 2), (2, 2), (3, 2), (4, 2), (5, 2), (6, 1)):
        if properties >> bit & 1:
            kind = {0: "scratch", 3: "kernarg"}.get(bit, "junk")
            user += [(kind, word) for word in range(registers)]
    count, word = preload & 0x7F, preload >> 7
    user += [("preload", word + i) for i in range(count)]
    # LLVM pads these registers on gfx11 ("user SGPR init 16 bug")
    user += [("junk", 0)] * ((rsrc2 >> 1 & 31) - len(user))
    ids = tuple(axis for axis, bit in enumerate((7, 8, 9)) if rsrc2 >> bit & 1)
    text = assembly[assembly.index("\t.amdgpu_metadata") :].partition("\n")[2].partition("\t.end_amdgpu_metadata")[0]
    (kernel,) = yaml.safe_load(text)["amdhsa.kernels"]
    arguments = tuple(Argument(a[".offset"], a[".size"], a[".value_kind"]) for a in kernel.get(".args", ()))
    first = entry + 256 if count else entry
    gfx12 = arch.startswith("gfx12")
    return CodeObject(image, start, first, lds, scratch, tuple(user), ids, bool(rsrc2 & 1), gfx12, arguments)
