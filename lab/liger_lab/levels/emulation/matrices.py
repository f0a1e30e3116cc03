"""Execute matrix instructions: MFMA of CDNA, WMMA of RDNA3 and RDNA4.

Layouts are those of AMD's documents ("AMD Instinct MI300 ISA", section 7; "RDNA3 ISA" and "RDNA4 ISA", section 7.9).
The sum over k is computed in fp64 and rounded once; the order of the hardware's own sum is not documented. A sum of
int8 products is exact.
"""

import re

import numpy as np

from liger_lab.levels.emulation.pseudocode import Unknown

_RESULTS = {"F32": np.float32, "I32": np.int32}


def multiply(decoder, inst, name, fields):
    """Return a function of waves that computes D = A B + C."""
    shape = re.fullmatch(r"V_W?MF?MA_(F32|F16|BF16|I32)_(\d+)X(\d+)X(\d+)_?(F16|BF16|F32|IU?8)(?:_1K)?(?:_w\d+)?", name)
    if not shape or any(fields.get(field) for field in ("cbsz", "abid", "blgp") if "MFMA" in name):
        raise Unknown(name)
    out, rows, cols, depth, kind = shape[1], *(int(n) for n in shape.groups()[1:4]), shape[5]
    if rows != cols or rows not in (16, 32):
        raise Unknown(name)
    wmma = "WMMA" in name
    signs = 3 if kind == "IU8" else 0  # both operands with signs
    if wmma and (fields.get("neg") != signs or fields.get("neg_hi") or fields.get("clmp")):
        raise Unknown(f"{name} with signs")
    lanes = decoder.lanes
    lane = np.arange(lanes)
    index = lane % rows  # the row of A, the column of B
    doubled = wmma and decoder.family == "rdna3"  # both halves of a wave hold the same A and B
    groups = 1 if doubled else lanes // rows
    per_lane = depth // groups
    k_of = (np.zeros_like(lane) if doubled else lane // rows)[:, None] * per_lane + np.arange(per_lane)
    values = rows * cols // lanes
    i = np.arange(values)
    group = (lane // rows)[:, None]
    if not wmma:  # groups of four rows
        row_of = (i // 4) * 4 * (lanes // rows) + 4 * group + i % 4
    elif doubled:
        row_of = 2 * i + group
    else:
        row_of = values * group + i
    row_of = np.broadcast_to(row_of, (lanes, values))
    a, b = (_values(fields, field, bit, kind) for field, bit in (("src0", 0), ("src1", 1)))
    target = fields["vdst"] - 256 + (256 if fields.get("acc_cd") else 0)
    addend = fields["src2"]
    c_register = addend - 256 + (256 if fields.get("acc_cd") else 0) if addend >= 256 else None
    if c_register is None and addend != 128:
        raise Unknown(f"{name} with the addend {addend}")
    if out not in _RESULTS:
        raise Unknown(f"{name}: results of 16 bits")
    result = _RESULTS[out]

    def run(w):
        if not (w.active is not None and w.all_active):
            raise Unknown(f"{name} with inactive lanes")
        programs = len(w.programs)
        left = np.zeros((programs, rows, depth))
        right = np.zeros((programs, depth, cols))
        left[:, index[:, None], k_of] = a(w, per_lane)
        right[:, k_of, index[:, None]] = b(w, per_lane)
        product = left @ right
        # the target may begin within the addend, so all values are read before one is written
        addends = [0 if c_register is None else w.v[c_register + r].view(result) for r in range(values)]
        sums = [product[:, row_of[:, r], index] + addend for r, addend in enumerate(addends)]
        for r, value in enumerate(sums):
            w.v[target + r] = value.astype(result).view(np.uint32)

    return run


def _values(fields, field, bit, kind):
    """Return a function (waves, values) for the values of an operand: (programs, lanes, values)."""
    in_word = {"F32": 1, "I8": 4, "IU8": 4}.get(kind, 2)
    register = fields[field] - 256
    if register < 0:
        raise Unknown("a matrix in scalar registers")
    if "acc" in fields and (fields["acc"] >> bit) & 1:
        register += 256

    def read(w, values):
        words = values // in_word
        raw = np.ascontiguousarray(np.moveaxis(w.v[register : register + words], 0, 2))
        if kind == "F32":
            return raw.view(np.float32)
        if in_word == 4:
            return raw.view(np.int8)
        halves = raw.view(np.uint16)
        if kind == "F16":
            return halves.view(np.float16)
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)

    return read
