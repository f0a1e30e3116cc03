"""Read a compiled kernel's memory accesses from its Triton IR and its assembly.

Every load and store in a kernel's source has a place, "layer_norm.py:214:9", which the compilers keep as debug
information. Triton's IR gives its tile, PTX or AMD's assembly its instructions.
"""

import math
import re
import struct
from collections import Counter
from dataclasses import dataclass, field, replace

from liger_hw.tuning import power_of_2


@dataclass(frozen=True)
class Access:
    """One `tl.load` or `tl.store` of a kernel's source, with all its instances in compiled code.

    Attributes:
        at: "cross_entropy/kernels.py:212:30".
        kind: "load" or "store".
        pointer: the kernel's parameter that it reads or writes; "?" if the compiler lost it.
        elements: elements of its tile; 1 for a scalar.
        row: contiguous elements at most: the tile's last dimension.
        itemsize: bytes of an element.
        loops: number of separate loops around it: 2 if two loops over a row share one line.
        widths: bytes a lane -> number of instructions; 0 instructions if the compiler lists them under another access.
    """

    at: str
    kind: str
    pointer: str
    elements: int
    row: int
    itemsize: int
    loops: int
    widths: dict = field(default_factory=dict)

    @property
    def widest(self) -> int:
        """Return the bytes a lane of its widest instruction; 0 if it has none.

        A kernel may hold a second, masked and narrower copy of an access for the end of its rows.
        """
        return max((int(width) for width in self.widths), default=0)


def expected_width(access: Access, warp_size: int) -> int:
    """Return the bytes a lane that this tile allows: 16, fewer in small tiles."""
    lane = access.elements * access.itemsize // warp_size
    return max(min(16, power_of_2(lane + 1) // 2, access.row * access.itemsize), access.itemsize)


_BITS = {"i1": 8, "i8": 8, "f16": 16, "bf16": 16, "f32": 32, "i32": 32, "i64": 64, "f64": 64, "i16": 16}
_ACCESS = re.compile(r"tt\.(load|store) (%\w+).* : (?:tensor<([\dx]+)x!tt\.ptr<(\w+)>>|!tt\.ptr<(\w+)>) loc\((.*)\)$")
_POINTER = re.compile(r"(%\w+) = tt\.(?:addptr|splat|broadcast|expand_dims|bitcast|reshape) (%\w+)")
_PARAMETER = re.compile(r"(%\w+): !tt\.ptr<\w+>[^%]*? loc\(\"(\w+)\"")
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)$", re.M)
_PLACE = re.compile(r'"([^"]*\.py)":(\d+):(\d+)')


def accesses_of(ttir: str) -> list[Access]:
    """List the loads and stores in Triton's IR by place and pointer, without instructions."""
    aliases = dict(_ALIAS.findall(ttir))
    parameters, source_of = dict(_PARAMETER.findall(ttir)), dict(_POINTER.findall(ttir))
    accesses, loops, nested = {}, {}, []
    for number, line in enumerate(ttir.splitlines()):
        line = line.strip()
        if line.startswith("}") and nested:
            nested.pop()
        if line.endswith("{"):
            loop = " scf.for " in f" {line}" or " scf.while " in f" {line}" or line.startswith("} do")
            nested.append(number if loop else None)
        match = _ACCESS.search(line)
        if match is None:
            continue
        kind, pointer, shape, tile_type, scalar_type, location = match.groups()
        sizes = [int(size) for size in shape.split("x")] if shape else [1]
        elements = 1
        for size in sizes:
            elements *= size
        while pointer in source_of:
            pointer = source_of[pointer]
        at, name = _innermost(location, aliases), parameters.get(pointer, "?")
        bits = _BITS[tile_type or scalar_type]
        within = [number for number in nested if number is not None]
        loops.setdefault((at, kind, name), set()).update(within[-1:])
        before = accesses.get((at, kind, name))
        if before is None or before.elements < elements:
            accesses[at, kind, name] = Access(at, kind, name, elements, sizes[-1], bits // 8, 0, {})
    return [replace(access, loops=len(loops[key])) for key, access in accesses.items()]


def _innermost(location: str, aliases: dict) -> str:
    """Resolve a location through its aliases to a place in a file."""
    while True:
        place = _PLACE.search(location)
        alias = re.search(r"#loc\d*", location)
        if place and (alias is None or place.start() < alias.start()):
            return f"{_short(place.group(1))}:{place.group(2)}:{place.group(3)}"
        if alias is None:
            return "?"
        location = aliases[alias.group(0)]


def _short(path: str) -> str:
    """Return a file's place in its group of kernels: "dyt.py", "cross_entropy/kernels.py"."""
    _, kernels, place = path.rpartition("/kernels/")
    return place.partition("/")[2] or place if kernels else path.rpartition("/")[2]


_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', re.M)
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")


def with_widths(accesses: list[Access], assembly: str, instruction) -> list[Access]:
    """Return `accesses` with the instructions that execute them.

    Pointers that share a place, in a helper function, share its instructions. An instruction whose place the compiler
    lost becomes an access of one element at "?".

    Args:
        instruction: a line of assembly -> (kind, bytes a lane), or None.
    """
    files = {number: _short(f"{folder}/{name}" if name else folder) for number, folder, name in _FILE.findall(assembly)}
    widths, at, inline = {}, "?", None
    for line in assembly.splitlines():
        if "inline asm" in line:  # the compiler numbers its lines on from the first one's place
            inline = 0 if "begin" in line else None
        location = _LOC.match(line)
        if location and not inline:
            inline = None if inline is None else 1
            number, row, column = location.groups()
            at = f"{files.get(number)}:{row}:{column}" if row != "0" else "?"
            continue
        moved = instruction(line)
        if moved:
            widths.setdefault((at, moved[0]), Counter())[moved[1]] += 1
    for place, kind in list(widths):
        line, _, column = place.rpartition(":")
        on_line = {access.at for access in accesses if (access.at.rpartition(":")[0], access.kind) == (line, kind)}
        if column == "0" and len(on_line) == 1:  # the compiler merged places of one line
            widths.setdefault((*on_line, kind), Counter()).update(widths.pop((place, kind)))
    known = [replace(access, widths=dict(widths.get((access.at, access.kind), {}))) for access in accesses]
    known = [access if access.widths else replace(access, widths=_estimated_widths(access, known)) for access in known]
    places = {(access.at, access.kind) for access in accesses}
    lost = [
        Access("?", place[1], "?", 1, 1, 1, 0, dict(count)) for place, count in widths.items() if place not in places
    ]
    return known + lost


def _estimated_widths(access: Access, accesses: list[Access]) -> dict:
    """Estimate the width of an access without instructions; returns {width: 0}.

    AMD's compiler prints the instructions of one clause under the place of the first. The estimate is the narrowest
    width of accesses to the same pointer with tiles at least as large; if all other tiles are smaller, the widest.
    """
    others = [other for other in accesses if other.kind == access.kind and other.widths]
    same = [other for other in others if other.pointer == access.pointer] or others
    widths = [width for other in same if other.elements >= access.elements for width in other.widths]
    if widths:
        return {min(widths): 0}
    return {max(width for other in same for width in other.widths): 0} if same else {}


_PTX_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* \[.*?\], \[.*?\], (0x[0-9a-fA-F]+|\d+)")
_PTX = re.compile(r"\b(ld|st)\.global(?:\.[\w:]+)*?(?:\.(v[248]))?\.([bfus]\d+)\b")
_AMD = re.compile(r"^\s+(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_WIDTHS = [
    (re.compile(pattern), width)
    for pattern, width in [
        (r"dwordx4|b128", 16), (r"dwordx3|b96", 12), (r"dwordx2|b64", 8), (r"dword|b32", 4), (r"short|16", 2), ("", 1),
    ]
]  # fmt: skip


def ptx_access(line: str) -> tuple[str, int] | None:
    """Return (kind, bytes a lane) of a line of PTX that accesses global memory."""
    if ".global" not in line:
        return None
    copy = _PTX_COPY.search(line)
    if copy:
        return "load", int(copy.group(1), 0)
    match = _PTX.search(line)
    if match is None:
        return None
    lanes = int(match.group(2)[1:]) if match.group(2) else 1
    return {"ld": "load", "st": "store"}[match.group(1)], lanes * int(match.group(3)[1:]) // 8


def amd_access(line: str) -> tuple[str, int] | None:
    """Return (kind, bytes a lane) of a line of AMD's assembly that accesses global memory."""
    match = _AMD.match(line)
    if match is None:
        return None
    return match.group(1), next(width for pattern, width in _AMD_WIDTHS if pattern.search(match.group(2)))


def library_calls(ttir: str) -> list[str]:
    """List the functions of the vendor's library that the kernel calls."""
    return sorted(set(re.findall(r'tt\.extern_elementwise.*?symbol = "(\w+)"', ttir)))


_PRODUCT = re.compile(r"warp_group_dot (%\S+), (%[^\s,]+).*isAsync = true")
_BUFFERS = re.compile(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(\d+)x")


def overwritten_tiles(ttgir: str) -> int:
    """Count tiles in shared memory that are overwritten before an asynchronous product has read them.

    A loop copies tiles of later iterations, as many ahead as before it, and starts products that may still run when it
    copies the next (`pendings`). Such a tile needs a buffer more than there are copies ahead. Triton 3.6 and 3.9 give
    none to a tile with another use beside the product, such as a sum: results then differ between runs (H200).
    """
    buffers = {name: int(count) for name, count in _BUFFERS.findall(ttgir)}
    views = dict(re.findall(r"(%\S+) = ttg\.memdesc_(?:index|subslice) (%[^\s\[]+)\[", ttgir))
    overwritten = set()
    for product in _PRODUCT.finditer(ttgir):
        start, end = ttgir.rfind("scf.for", 0, product.start()), ttgir.find("scf.yield", product.start())
        products = len(_PRODUCT.findall(ttgir[start:end]))
        pending = re.search(r"warp_group_dot_wait.*pendings = (\d+)", ttgir[product.end() : end])
        for tile in product.groups():
            while tile in views:
                tile = views[tile]
            ahead = len(re.findall(rf"memdesc_index {re.escape(tile)}\[", ttgir[:start]))
            if tile in buffers and ahead and pending and buffers[tile] < ahead + math.ceil(int(pending[1]) / products):
                overwritten.add(tile)
    return len(overwritten)


_REGISTERS, _FRAME = 0x2F, 0x11  # EIATTR_REGCOUNT, EIATTR_FRAME_SIZE


def cubin_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack a lane of the kernel in a cubin.

    `cuobjdump -res-usage` prints the same. Both are attributes in the section .nv.info: (format, attribute, size), then
    (symbol, value).
    """
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    header = [struct.unpack_from("<IIQQQQ", cubin, sections + i * entry) for i in range(count)]
    attributes = {}
    for name, _, _, _, offset, size in header:
        start = header[names][4] + name
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        at = offset
        while at < offset + size:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form == 4:  # `value` bytes of data follow; other formats have none
                if attribute in (_REGISTERS, _FRAME):
                    attributes[attribute] = max(attributes.get(attribute, 0), struct.unpack_from("<II", cubin, at)[1])
                at += value
    return attributes[_REGISTERS], attributes.get(_FRAME, 0)
