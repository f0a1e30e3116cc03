"""Execute accesses to memory, scratch and LDS.

Among LDS's are exchanges between lanes that touch no memory.
Source: the documents "AMD Instinct MI300 ISA", "AMD Instinct CDNA4 ISA", "RDNA3 ISA" and "RDNA4 ISA".
"""

import functools
import re

import numpy as np

from liger_lab.levels.emulation.machine import M0, SCRATCH, Fault
from liger_lab.levels.emulation.pseudocode import Unknown


def nothing(w, value=None):
    pass


def _mover(decoder, name, fields, register_field):
    """Return (size, load into registers, read from registers) of a plain access."""
    store, size, signed, half = access_of(name)
    register = fields[register_field] - 256
    if fields.get("acc"):
        register += 256

    def put(w, data, lanes):
        """Write what `lanes` loaded; other active lanes get zeros."""
        for i in range(max(1, size // 4)):
            value = np.zeros(lanes.shape, np.uint32)
            if size >= 4:
                value[lanes] = data.view(np.uint32)[:, i]
            else:
                loaded = data.view(f"u{size}")[:, 0].astype(np.uint32)
                if signed:
                    sign = np.uint32(1 << 8 * size - 1)
                    loaded = (loaded ^ sign) - sign
                value[lanes] = loaded
                if half is not None:
                    value &= np.uint32(0xFFFF)
                    old = w.v[register]
                    upper, lower = np.uint32(0xFFFF0000), np.uint32(0xFFFF)
                    value = (old & lower) | value << np.uint32(16) if half else (old & upper) | value
            w.set_vector(register + i, value)

    def take(w, lanes):
        if size >= 4:
            words = [w.v[register + i][lanes] for i in range(size // 4)]
            return np.stack(words, 1).view(np.uint8)
        word = w.v[register][lanes] >> np.uint32(16 if half else 0)
        return np.ascontiguousarray(word.view(np.uint8).reshape(-1, 4)[:, :size])

    return store, size, put, take


def _buffer(decoder, name, fields):
    if "INV" in name or "WB" in name:
        return nothing
    to_lds = fields.get("lds")
    if fields.get("idxen") or fields.get("tfe") or to_lds and "LOAD_DWORD" not in name:
        raise Unknown("index, status or narrow LDS load of a buffer access")
    store, size, put, take = _mover(decoder, name, fields, "vdata")
    resource = fields.get("srsrc", fields.get("rsrc"))
    constant, offset_in_lane = fields.get("offset", fields.get("ioffset")), fields["offen"]
    address = fields["vaddr"] - 256
    soffset = decoder.source(fields["soffset"], is_float=False)

    def run(w):
        low, high = w.s[resource][:, None].astype(np.uint64), w.s[resource + 1][:, None].astype(np.uint64)
        base = low | (high & np.uint64(0xFFFF)) << np.uint64(32)
        offset = w.v[address].astype(np.uint64) if offset_in_lane else np.uint64(0)
        offset = np.broadcast_to(offset + np.uint64(constant), w.active.shape)
        # out of bounds: loads give 0, stores do nothing (raw buffers)
        lanes = w.active & (offset + np.uint64(size) <= w.s[resource + 2][:, None])
        addresses = (base + offset + soffset(w))[lanes]
        if (base == SCRATCH).all():  # where scratch has no instructions of its own (gfx90a)
            _access_scratch(decoder, w, addresses.astype(np.int64) - SCRATCH, size, lanes, store, put, take)
        elif store:
            decoder.arena.store(addresses, take(w, lanes))
        elif to_lds:
            data = np.zeros((*lanes.shape, size), np.uint8)
            data[lanes] = decoder.arena.load(addresses, size)
            _store_from_m0(decoder, w, constant, data[w.active])
        else:
            put(w, decoder.arena.load(addresses, size), lanes)

    return run


def _store_from_m0(decoder, w, offset, data):
    """Store data of the active lanes in LDS from M0 + `offset` on."""
    place = w.s[M0].astype(np.int64)[:, None] + offset + data.shape[1] * np.arange(w.lanes)
    programs = np.broadcast_to(w.programs[:, None], w.active.shape)
    decoder.lds.store(programs[w.active], place[w.active], data)


def _global(decoder, name, fields, flat):
    if "INV" in name or "WB" in name:
        return nothing
    store, to_lds = "STORE" in name, "LOAD_LDS" in name
    if to_lds and "DWORD" not in name:
        raise Unknown("narrow LDS load of a global access")
    data = ("data" if "data" in fields else "vsrc") if store else "vdst"
    store, size, put, take = _mover(decoder, name, fields, data)
    address, base = fields.get("addr", fields.get("vaddr")) - 256, fields["saddr"]
    bits = 24 if "ioffset" in fields else 13
    offset = _signed(fields.get("ioffset", fields.get("offset")), bits)
    no_base = flat or base == (127 if decoder.cdna else 124)

    def run(w):
        lanes = w.active
        if no_base:
            where = w.v[address] | w.v[address + 1].astype(np.uint64) << np.uint64(32)
        else:
            where = (w.s[base] | w.s[base + 1].astype(np.uint64) << np.uint64(32))[:, None] + w.v[address]
        where = (where + np.uint64(offset & (1 << 64) - 1))[lanes]
        if store:
            decoder.arena.store(where, take(w, lanes))
        elif to_lds:
            _store_from_m0(decoder, w, offset, decoder.arena.load(where, size))
        else:
            put(w, decoder.arena.load(where, size), lanes)

    return run


def _scratch(decoder, name, fields):
    store = "STORE" in name
    data = ("data" if "data" in fields else "vsrc") if store else "vdst"
    store, size, put, take = _mover(decoder, name, fields, data)
    address, base = fields.get("addr", fields.get("vaddr")) - 256, fields["saddr"]
    offset = _signed(fields.get("ioffset", fields.get("offset")), 24 if "ioffset" in fields else 13)
    by_lane, by_scalar = fields["sve"], base != (127 if decoder.cdna else 124)

    def run(w):
        lanes = w.active
        where = np.full(lanes.shape, offset, np.int64)
        if by_lane:
            where += w.v[address]
        if by_scalar:
            where += w.s[base][:, None]
        _access_scratch(decoder, w, where[lanes], size, lanes, store, put, take)

    return run


def _access_scratch(decoder, w, where, size, lanes, store, put, take):
    """Load or store at the bytes `where` of the active lanes' own scratch."""
    if (where < 0).any():
        raise Fault("an access below scratch")
    row = (w.programs[:, None] * decoder.lanes + np.arange(decoder.lanes))[lanes]
    if store:
        decoder.scratch.store(row, where, take(w, lanes))
    else:
        put(w, decoder.scratch.load(row, where, size), lanes)


def _ds(decoder, name, fields):
    address, offsets = fields["addr"] - 256, (fields["offset0"], fields["offset1"])
    offset = offsets[1] << 8 | offsets[0]
    if "BPERMUTE" in name or name == "DS_PERMUTE_B32":
        return _permute(decoder, name, fields, address, offset)
    if "SWIZZLE" in name:
        return _swizzle(decoder, fields, address, offset)
    if name in ("DS_READ_B64_TR_B16", "DS_READ_B64_TR_B8"):
        return _transposed(decoder, fields, address, offset, np.uint8 if name.endswith("B8") else np.uint16)
    if not re.search(r"READ|WRITE|LOAD|STORE", name) or "ADDTID" in name or "_TR_" in name:
        raise Unknown(name)
    two = "READ2" in name or "WRITE2" in name or "2ADDR" in name
    plain = re.sub(r"(READ|WRITE)2(ST64)?", r"\1", name)
    store, size, _, _ = _mover(decoder, plain, fields, "vdst")
    scale = size * (64 if "ST64" in name or "STRIDE64" in name else 1)
    movers = [_mover(decoder, plain, fields, "data0" if store else "vdst")]
    places = [offset]
    if two:
        second = fields | {"vdst": fields["vdst"] + size // 4}
        movers.append(_mover(decoder, plain, second, "data1" if store else "vdst"))
        places = [offsets[0] * scale, offsets[1] * scale]

    def run(w):
        lanes = w.active
        programs = np.broadcast_to(w.programs[:, None], lanes.shape)[lanes]
        base = w.v[address][lanes].astype(np.int64)
        loaded = []
        for (_, _, _, take), place in zip(movers, places):
            if store:
                decoder.lds.store(programs, base + place, take(w, lanes))
            else:
                loaded.append(decoder.lds.load(programs, base + place, size))
        for (_, _, put, _), data in zip(movers, loaded):
            put(w, data, lanes)

    return run


def _transposed(decoder, fields, address, offset, kind):
    """Read rows of 16 values by 16 lanes; lane i gets column i (gfx950).

    The lanes read 8 bytes each: 4 rows of 16 bits, or 8 of bytes.
    """
    target = fields["vdst"] - 256 + 256 * fields.get("acc", 0)

    def run(w):
        if not w.active.all():  # the document says nothing of lanes that do not take part
            raise Unknown("a transposed read with inactive lanes")
        programs = np.repeat(w.programs, w.lanes)
        read = decoder.lds.load(programs, w.v[address].astype(np.int64).ravel() + offset, 8)
        rows = read.view(kind).reshape(len(w.programs), w.lanes // 16, -1, 16)
        words = np.ascontiguousarray(rows.swapaxes(2, 3)).view(np.uint32).reshape(len(w.programs), w.lanes, 2)
        for i in range(2):
            w.set_vector(target + i, words[:, :, i])

    return run


def _permute(decoder, name, fields, address, offset):
    data, target = fields["data0"] - 256, fields["vdst"] - 256
    if name == "DS_PERMUTE_B32":
        raise Unknown(name)

    def run(w):
        lane = ((w.v[address].astype(np.int64) + offset) >> 2) & (w.lanes - 1)
        valid = np.take_along_axis(w.active, lane, 1) | ("FI" in name)
        w.set_vector(target, np.where(valid, np.take_along_axis(w.v[data], lane, 1), np.uint32(0)))

    return run


def _swizzle(decoder, fields, source, offset):
    lane, target = np.arange(decoder.lanes), fields["vdst"] - 256
    if offset & 0x8000:
        if offset >= 0xC000:
            raise Unknown("a rotation by ds_swizzle")
        at = (lane & ~3) | ((offset >> (2 * (lane & 3))) & 3)
    else:
        at = (lane & ~31) | ((((lane & 31) & (offset & 31)) | ((offset >> 5) & 31)) ^ ((offset >> 10) & 31))
    return lambda w: w.set_vector(target, np.where(w.active[:, at], w.v[source][:, at], np.uint32(0)))


def _smem(decoder, name, fields):
    if not name.startswith("S_LOAD"):
        if "INV" in name or "PREFETCH" in name:
            return nothing
        raise Unknown(name)
    size = re.search(r"_(DWORD(?:X(\d+))?|B(\d+)|([UI])(\d+))$", name)
    words = int(size[3]) // 32 if size[3] else int(size[2] or 1)
    base, target = fields["sbase"], fields["sdata"]
    immediate = _signed(fields.get("ioffset", fields.get("offset")), 24 if "ioffset" in fields else 21)
    if decoder.cdna:
        immediate *= fields["imm"]
        scalar = fields["soffset"] if fields["soffset_en"] else None
        if not fields["imm"] and not fields["soffset_en"]:
            raise Unknown("an offset in a scalar register without its flag")
    else:
        scalar = fields["soffset"] if fields["soffset"] != 124 else None

    def run(w):
        where = w.s[base] | w.s[base + 1].astype(np.uint64) << np.uint64(32)
        where = where + np.uint64(immediate & (1 << 64) - 1)
        if scalar is not None:
            where = where + w.s[scalar]
        if size[5]:
            bits = int(size[5])
            data = decoder.arena.load(where, bits // 8).view(f"{size[4].lower()}{bits // 8}")
            w.set_scalar(target, data[:, 0].astype(np.int32).view(np.uint32))
            return
        data = decoder.arena.load(where & ~np.uint64(3), 4 * words).view(np.uint32)
        for i in range(words):
            w.set_scalar(target + i, data[:, i].copy())

    return run


def access_of(name):
    """Return (is a store, bytes, signed, half of a D16 access or None)."""
    parts = name.split("_")
    store = "STORE" in parts or "WRITE" in parts
    half = int("HI" in parts) if "D16" in parts else None
    if "ATOMIC" in parts or not {"STORE", "WRITE", "LOAD", "READ"} & set(parts):
        raise Unknown(name)
    for part in parts[1:]:
        wide = re.fullmatch(r"DWORD(?:X(\d))?|B(32|64|96|128)", part)
        if wide:
            return store, int(wide[2]) // 8 if wide[2] else 4 * int(wide[1] or 1), False, half
    for part in parts[1:]:
        if part in ("UBYTE", "SBYTE", "BYTE", "U8", "I8", "B8"):
            return store, 1, part in ("SBYTE", "I8"), half
        if part in ("USHORT", "SSHORT", "SHORT", "U16", "I16", "B16"):
            return store, 2, part in ("SSHORT", "I16"), half
    raise Unknown(name)


def _signed(number, bits):
    return number - (number >> bits - 1 << bits)


ACCESSES = {  # format of an instruction -> function(decoder, name, fields) that returns a function of waves
    **dict.fromkeys(("MUBUF", "VBUFFER"), _buffer),
    **dict.fromkeys(("GLOBAL", "VGLOBAL"), functools.partial(_global, flat=False)),
    **dict.fromkeys(("FLAT", "VFLAT"), functools.partial(_global, flat=True)),
    **dict.fromkeys(("SCRATCH", "VSCRATCH"), _scratch),
    "DS": _ds,
    "SMEM": _smem,
}
