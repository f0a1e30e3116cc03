"""Decode AMD instructions into functions that execute them on waves.

Formats, fields and operand types come from tinygrad's decoders, which are generated from AMD's documents; arithmetic
comes from AMD's pseudo-code (`pseudocode`). Exchanges between lanes are written here, and memory in `accesses`, after
AMD's documents. What is not known raises `Unknown`, which names the instruction.
"""

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from liger_lab.levels.emulation.accesses import ACCESSES, nothing
from liger_lab.levels.emulation.machine import EXEC, SCALARS, VCC
from liger_lab.levels.emulation.matrices import multiply
from liger_lab.levels.emulation.pseudocode import REPLACED, Unknown, translate

# Architectures that the emulation can execute -> family of their instructions in tinygrad. Another architecture needs a
# decoder of its own: gfx1250 has waves of 32 lanes, as RDNA, but other instructions.
FAMILIES = {
    **dict.fromkeys(("gfx942", "gfx90a", "gfx950"), "cdna"),
    **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151"), "rdna3"),
    **dict.fromkeys(("gfx1200", "gfx1201"), "rdna4"),
}
_LITERAL, _DPP, _SDWA = 255, 250, 249  # numbers of a first source that say what the next 4 bytes are
_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0, 248: 0.15915494309189532}
IGNORED = (
    "S_NOP", "S_WAIT", "S_CLAUSE", "S_DELAY_ALU", "S_SENDMSG", "S_SET_INST_PREFETCH", "S_SLEEP", "S_SETPRIO",
    "S_CODE_END", "S_INST_PREFETCH", "S_ICACHE", "S_ROUND_MODE", "S_DENORM_MODE", "S_SETREG", "S_VERSION",
)  # fmt: skip
# Products of gfx90a that gfx950 replaced by others of the same numbers, 0x54 and 0x55 (LLVM, VOP3PInstructions.td)
_ON_GFX90A = {
    "V_MFMA_F32_16X16X32_F16": "V_MFMA_I32_32X32X8I8",
    "V_MFMA_F32_32X32X16_F16": "V_MFMA_I32_16X16X16I8",
}
# 16-bit operations that keep the upper half of their register on CDNA; the others clear it (LLVM, AMDGPU,
# GCNSubtarget::zeroesHigh16BitsOfDest)
_KEEP_UPPER = ("V_MAD_F16", "V_MAD_U16", "V_MAD_I16", "V_FMA_F16", "V_DIV_FIXUP_F16", "V_FMA_MIX", "V_MAD_MIX")


@dataclass(frozen=True)
class Instruction:
    """A decoded instruction.

    Attributes:
        name: AMD's name.
        size: bytes.
        kind: "step", "branch", "barrier" or "end".
        run: executes a step on `Waves`; for a branch: returns the programs that take it.
        target: bytes from the instruction's end to a branch's target.
        wait: for a wait for vector memory: how many accesses may remain under way.
    """

    name: str
    size: int
    kind: str = "step"
    run: Callable | None = None
    target: int = 0
    wait: int | None = None


class Decoder:
    """Decode instructions of one architecture.

    Args:
        arch: one of FAMILIES.
        arena: the memory of loads and stores.
    """

    def __init__(self, arch, arena):
        self.arch, self.arena = arch, arena
        self.family = FAMILIES[arch]
        self.cdna = self.family == "cdna"
        self.lanes = 64 if self.cdna else 32
        self.pseudocode = _pseudocode(self.family)
        self.lds = self.scratch = None
        self.known = {}  # bytes of an instruction -> Instruction

    def decode(self, code: bytes) -> Instruction:
        """Decode the first instruction of `code`, of which 20 bytes suffice."""
        for size in (4, 8, 12, 16):  # no instruction is the beginning of another
            instruction = self.known.get(code[:size])
            if instruction:
                return instruction
        instruction = self._decode(code)
        self.known[code[: instruction.size]] = instruction
        return instruction

    def _decode(self, code):
        from tinygrad.renderer.amd import decode_inst

        _register_formats()
        if self.arch == "gfx90a":
            code = _renumbered(code)
        try:
            inst = decode_inst(code, self.family)
        except ValueError as error:
            raise Unknown(f"{self.arch}: {error}") from None
        kind = re.sub(r"_(LIT|DPP16|SDWA|SDWA_SDST)$", "", type(inst).__name__)
        dual = kind == "VOPD"
        name = "VOPD" if dual else re.sub(r"_E(32|64)$", "", inst.op_name)
        name = _ON_GFX90A.get(name, name) if self.arch == "gfx90a" else name
        coded = ("op", "opx", "opy", "encoding")
        fields = {field: _number(getattr(inst, field)) for field, _ in inst._fields if field not in coded}
        size, extra = inst._base_size, None
        base = size - 4 if kind != type(inst).__name__ else size
        sources = [fields.get(source) for source in ("src0", "src1", "src2", "ssrc0", "ssrc1", "srcx0", "srcy0")]
        if size > base:
            extra = inst._raw >> 8 * base
        elif _LITERAL in sources or fields.get("src0") in (_DPP, _SDWA):
            extra, size = int.from_bytes(code[base : base + 4], "little"), base + 4
        elif dual and any(word in inst.opx.name + inst.opy.name for word in ("FMAAK", "FMAMK")):
            extra, size = int.from_bytes(code[base : base + 4], "little"), base + 4
        try:
            return self._decoded(inst, kind, name, fields, size, extra)
        except Exception as error:
            raise Unknown(f"{self.arch} {kind} {name} {fields}: {error!r}") from error

    def _decoded(self, inst, kind, name, fields, size, extra):
        if kind == "SOPP":
            return self._control(name, fields["simm16"], size)
        if name.startswith(IGNORED):
            return Instruction(name, size, run=nothing)
        if name.startswith("S_BARRIER_SIGNAL"):
            return Instruction(name, size, run=nothing)
        if kind in ACCESSES:
            run = ACCESSES[kind](self, name, fields)
        elif name == "VOPD":
            run = self._dual(inst, fields, extra)
        elif "MFMA" in name or "WMMA" in name:
            run = multiply(self, inst, name, fields)
        elif "ACCVGPR" in name:
            run = self._accumulation(name, fields, extra)
        elif "LANE" in name or name.startswith("V_SWAP"):
            run = self._lanes(name, fields, extra)
        else:
            run = self._arithmetic(inst, kind, name, fields, extra)
        return Instruction(name, size, run=run)

    # --- control ------------------------------------------------------------------------------------------------------
    def _control(self, name, simm16, size):
        if name in ("S_ENDPGM", "S_ENDPGM_SAVED"):
            return Instruction(name, size, "end")
        if name in ("S_BARRIER", "S_BARRIER_WAIT"):
            return Instruction(name, size, "barrier")
        if name.startswith(IGNORED):
            return Instruction(name, size, run=nothing, wait=self._waits_for(name, simm16))
        both = slice(0, self.lanes // 32)
        conditions = {
            "S_BRANCH": lambda w: np.ones(len(w.programs), bool),
            "S_CBRANCH_SCC0": lambda w: ~w.scc,
            "S_CBRANCH_SCC1": lambda w: w.scc,
            "S_CBRANCH_VCCZ": lambda w: ~w.s[VCC : VCC + 2][both].any(0),
            "S_CBRANCH_VCCNZ": lambda w: w.s[VCC : VCC + 2][both].any(0),
            "S_CBRANCH_EXECZ": lambda w: ~w.s[EXEC : EXEC + 2][both].any(0),
            "S_CBRANCH_EXECNZ": lambda w: w.s[EXEC : EXEC + 2][both].any(0),
        }
        if name not in conditions:
            raise Unknown(name)
        return Instruction(name, size, "branch", conditions[name], 4 * (simm16 - (simm16 >> 15 << 16)))

    # --- operands -----------------------------------------------------------------------------------------------------
    def source(self, number, bits=32, is_float=True, literal=None, scalar=False):
        """Return a function of waves for an operand's bits, uint32 or uint64.

        Args:
            number: as encoded: 0 scalar registers, 128 constants, 256 vector registers.
            scalar: for a scalar instruction: shape (programs,), else (programs, lanes or 1).
        """
        if number >= 256:
            register = number - 256
            if bits == 64:
                return lambda w: w.v[register] | w.v[register + 1].astype(np.uint64) << np.uint64(32)
            return lambda w: w.v[register]
        wide = bits == 64
        if number < SCALARS and not (number == 124 and not self.cdna):
            if wide:
                both = lambda w: w.s[number] | w.s[number + 1].astype(np.uint64) << np.uint64(32)  # noqa: E731
                return both if scalar else lambda w: both(w)[:, None]
            return (lambda w: w.s[number]) if scalar else lambda w: w.s[number][:, None]
        if number == 253:
            return lambda w: w.scc.astype(np.uint32) if scalar else w.scc.astype(np.uint32)[:, None]
        if number in (251, 252) and self.cdna:
            raise Unknown(f"source {number}")
        value = self._constant(number, bits, is_float, literal)
        constant = np.full(1 if scalar else (1, 1), value, np.uint64 if wide else np.uint32)
        return lambda w: constant

    def _constant(self, number, bits, is_float, literal):
        if number == _LITERAL:
            return literal << 32 if bits == 64 and is_float else literal
        if number == 124:
            return 0
        if 128 <= number <= 208:
            value = number - 128 if number <= 192 else 192 - number
            return value & ((1 << (64 if bits == 64 else 32)) - 1)
        if number in _FLOATS:
            kind = {16: np.float16, 32: np.float32, 64: np.float64}[bits if is_float else 32]
            return int(np.array(_FLOATS[number], kind).view(f"u{kind().itemsize}"))
        raise Unknown(f"source {number}")

    def _waits_for(self, name, simm16):
        if name == "S_WAITCNT":
            return simm16 & 15 | (simm16 >> 14 & 3) << 4 if self.cdna else simm16 >> 10 & 63
        return {"S_WAIT_LOADCNT": simm16 & 63, "S_WAIT_LOADCNT_DSCNT": simm16 >> 8 & 63}.get(name)

    def _operand(self, inst, kind, field, fields, index, extra):
        """Return a function for the bits of a vector instruction's source, modifiers applied."""
        number = fields[field]
        named = next((name for name in (field, field.removeprefix("v"), f"v{field}") if name in inst.operands), field)
        info, bits = inst.operands.get(named), inst.op_bits.get(named, 32)
        form = info[0].name.removeprefix("FMT_NUM_") if info else "B32"
        packed = kind.startswith("VOP3P")
        is_float = bool(re.search(r"F(16|32|64)$", form))
        size = int(re.search(r"\d+$", form)[0]) if re.search(r"[FIUB]\d+$", form) else 32
        mixed = "_MIX" in inst.op_name
        half, short = None, size == 16 and bits == 16
        if short and not packed:
            if kind.startswith("VOP3"):
                half = (fields.get("opsel", 0) >> index) & 1
            elif number >= 256 and not self.cdna:
                number, half = 256 + (number & 127), (number >> 7) & 1
            else:
                half = 0
        negate, absolute = _modifiers(fields, index, extra if number in (_DPP, _SDWA) or "vsrc0" in fields else None)
        if field == "src0" and number == _DPP:
            get = self._dpp_source(extra)
        elif fields.get("src0") == _SDWA:
            get = self._sdwa_source(number, index, extra)
        elif packed and not mixed:
            return self._packed(number, bits, size, is_float, index, fields, extra)
        else:
            get = self.source(number, 16 if short else bits, is_float, extra)
        sign_bit = {16: 1 << 15, 32: 1 << 31, 64: 1 << 63}[64 if bits == 64 else 16 if short else 32]
        if mixed:
            negate, absolute = (fields["neg"] >> index) & 1, (fields["neg_hi"] >> index) & 1
            in_16 = ((fields["opsel_hi"] | fields["opsel_hi2"] << 2) >> index) & 1
            sign_bit = 0x80008000 if in_16 else 1 << 31
            if in_16 and number in _FLOATS:
                get = self.source(number, 16, True, extra)
        steps = []
        type = np.uint64 if bits == 64 else np.uint32
        if half is not None and number >= 256 or half:
            shift = np.uint32(16 * half)
            steps.append(lambda x: (x >> shift) & np.uint32(0xFFFF))
        if absolute:
            steps.append(lambda x: x & type(~sign_bit & ((1 << (64 if bits == 64 else 32)) - 1)))
        if negate:
            steps.append(lambda x: x ^ type(sign_bit))
        if not steps:
            return get
        return lambda w: functools.reduce(lambda x, step: step(x), steps, get(w))

    def _packed(self, number, bits, size, is_float, index, fields, extra):
        """Return a packed source: both halves as selected, with their signs."""
        high_from = ((fields["opsel_hi"] | fields["opsel_hi2"] << 2) >> index) & 1
        low_from = (fields["opsel"] >> index) & 1
        part = 32 if bits == 64 else 16
        if part == 32 and number < 256 and number >= SCALARS:
            one = self.source(number, 32, is_float, extra)
            get = lambda w: one(w) | one(w).astype(np.uint64) << np.uint64(32)  # noqa: E731
        else:
            get = self.source(number, 64 if bits == 64 else 16 if size == 16 else 32, is_float, extra)
        type = np.uint64 if part == 32 else np.uint32
        mask = type((1 << part) - 1)
        signs = ((fields["neg"] >> index) & 1) << (part - 1) | ((fields["neg_hi"] >> index) & 1) << (2 * part - 1)

        def run(w):
            x = get(w)
            low = (x >> type(part * low_from)) & mask
            high = (x >> type(part * high_from)) & mask
            return (low | high << type(part)) ^ type(signs)

        return run

    def _dpp_source(self, extra):
        source, lanes, in_range, by_active = self._dpp(extra)
        zero = np.uint32(0)

        def run(w):
            valid = in_range if by_active else in_range & w.active[:, lanes]
            return np.where(valid, w.v[source][:, lanes], zero)

        return run

    def _dpp(self, extra):
        """Return (register, source lanes, which exist, whether inactive lanes count)."""
        control, fetch_inactive = (extra >> 8) & 511, (extra >> 18) & 1
        lanes, in_range = dpp_lanes(control, self.lanes, self.cdna)
        return extra & 255, lanes, in_range, bool(fetch_inactive)

    def _dpp_writes(self, extra):
        """Return a function for the lanes that a DPP instruction writes."""
        _, lanes, in_range, by_active = self._dpp(extra)
        bound, banks, rows = (extra >> 19) & 1, (extra >> 24) & 15, (extra >> 28) & 15
        lane = np.arange(self.lanes)
        enabled = ((rows >> (lane >> 4)) & 1).astype(bool) & ((banks >> ((lane & 15) >> 2)) & 1).astype(bool)
        if bound:
            return lambda w: enabled
        return lambda w: enabled & in_range & (True if by_active else w.active[:, lanes])

    def _sdwa_source(self, number, index, extra):
        if index == 0:
            number = extra & 255 | (0 if (extra >> 23) & 1 else 256)
            select, signed = (extra >> 16) & 7, (extra >> 19) & 1
        else:
            if (extra >> 31) & 1:
                number &= 255
            select, signed = (extra >> 24) & 7, (extra >> 27) & 1
        get = self.source(number)
        if select == 6:
            return get
        shift, bits = (8 * select, 8) if select < 4 else (16 * (select - 4), 16)

        def run(w):
            part = (get(w) >> np.uint32(shift)) & np.uint32((1 << bits) - 1)
            if signed:
                part = (part ^ np.uint32(1 << bits - 1)) - np.uint32(1 << bits - 1)
            return part

        return run

    # --- arithmetic ---------------------------------------------------------------------------------------------------
    def _arithmetic(self, inst, kind, name, fields, extra):
        scalar = kind.startswith("SOP") or name.startswith("V_S_")  # the latter are encoded as vector instructions
        text = REPLACED.get(name) or self.pseudocode.get(name)
        if text is None:
            raise Unknown("no pseudo-code")
        inputs, getters = [], []
        constants = {}
        if "BITOP3" in name:  # the fields of signs hold its truth table, which the first statement puts together
            constants["TTBL"] = fields["omod"] << 6 | fields["abs"] << 3 | fields["neg"]
            fields = fields | {"omod": 0, "abs": 0, "neg": 0}
            text = re.sub(r"\bD\.", "D0.", text.partition(";")[2])
        if "simm16" in fields:
            constants["SIMM16"] = fields["simm16"]
            if "CMPK" in name:  # the register to compare is the target's field
                text = re.sub(r"\bS0\b", "D0", text)
            # older documents name the constant as a source
            text = re.sub(r"\bS1\b" if "CMPK" in name else r"\bS0\b", "SIMM16", text)
        if "SIMM32" in text:
            constants["SIMM32"] = extra
        if "OPSEL" in text:
            constants["OPSEL"] = fields["opsel"]
            constants["OPSEL_HI"] = fields["opsel_hi"] | fields["opsel_hi2"] << 2
        for index, options in enumerate((("src0", "ssrc0"), ("src1", "vsrc1", "ssrc1"), ("src2",))):
            field = next((option for option in options if option in fields), None)
            used = re.search(rf"\bS{index}\b|\bS\[", text)
            if field and used:
                if scalar:
                    bits = inst.op_bits.get(field, 32)
                    is_float = "_F" in name
                    getter = self.source(fields[field], 64 if bits == 64 else 32, is_float, extra, scalar=True)
                    if not kind.startswith("SOP"):
                        getter = _with_sign(getter, *_modifiers(fields, index, None))
                else:
                    bits = inst.op_bits.get(field, inst.op_bits.get(field.removeprefix("v"), 32))
                    getter = self._operand(inst, kind, field, fields, index, extra)
                inputs.append((f"S{index}", "u64" if bits == 64 else "u32"))
                getters.append(getter)
        place = "sdst" if kind.startswith("SOP") or fields.get("sd") else "vdst"
        target, bits = fields.get(place), inst.op_bits.get(place, 32)
        high_half = 0
        if not scalar and bits == 16:
            if kind.startswith("VOP3"):
                high_half = (fields.get("opsel", 0) >> 3) & 1
            elif not self.cdna:
                target, high_half = 256 + (target & 127), (target >> 7) & 1
        if re.search(r"\bD0\b(?!\.u64\[laneId\])", text):
            inputs.append(("D0", "u64" if bits == 64 else "u32"))
            old = self.source(target, 64 if bits == 64 else 32, True, scalar=scalar)
            getters.append((lambda w: old(w) >> np.uint32(16)) if high_half else old)
        carry = VCC
        if kind == "VOP3SD":
            carry = fields["sdst"]
        elif kind.startswith(("VOPC", "VOP3_SDST")):
            carry = target if target is not None else VCC
        if "VCC.u64[laneId]" in text or "VCC" in text:
            read = VCC if kind not in ("VOP3", "VOP3SD") or "DIV_FMAS" in name else fields.get("src2", VCC)
            inputs.append(("VCC[lane]", "u1"))
            getters.append((lambda w: w.mask(read)) if read < SCALARS else lambda w: np.zeros((1, 1), bool))
        for word, getter in (
            ("SCC", lambda w: w.scc),
            ("laneNumber", lambda w: np.arange(w.lanes, dtype=np.uint32)[None]),
        ):
            if word in text:
                inputs.append((word, "u1" if word == "SCC" else "u32"))
                getters.append(getter)
        if "EXEC" in text and scalar:
            inputs.append(("EXEC", f"u{self.lanes}"))
            getters.append(self.source(EXEC, self.lanes, scalar=True))
        function, outputs = translate(text, tuple(inputs), tuple(constants.items()))
        lanes = self._dpp_writes(extra) if fields.get("src0") == _DPP else None
        setters = [
            self._setter(output, type, scalar, target, carry, high_half, name, kind, fields, extra, lanes)
            for output, type in outputs
        ]
        change = _output_modifier(name, fields, kind)
        changes_exec = any(output == "EXEC" for output, _ in outputs)

        def run(w):
            with np.errstate(all="ignore"):
                values = function(*(get(w) for get in getters))
            if changes_exec:  # another output may be a view of EXEC before
                values = [np.copy(value) for value in values]
            for setter, value in zip(setters, values):
                setter(w, change(value) if change else value)

        return run

    def _setter(self, output, type, scalar, target, carry, high_half, name, kind, fields, extra, lanes):
        """Return a function that writes one output of the pseudo-code."""
        if output == "SCC":
            return lambda w, value: setattr(w, "scc", np.broadcast_to(value, w.scc.shape).copy())
        if output in ("D0[lane]", "VCC[lane]"):
            return lambda w, value: w.set_mask(carry, value & w.active)
        if output == "EXEC[lane]":
            return lambda w, value: w.set_mask(EXEC, value & w.active)
        if output == "EXEC" or (output == "D0" and scalar):
            register = EXEC if output == "EXEC" else target
            if register == 124 and not self.cdna:
                return nothing
            if type == "u64":

                def set_pair(w, value):
                    w.set_scalar(register, value.astype(np.uint32))
                    w.set_scalar(register + 1, (value >> np.uint64(32)).astype(np.uint32))

                return set_pair
            return lambda w, value: w.set_scalar(register, value)
        if output != "D0":
            raise Unknown(f"the output {output}")
        register = target - 256
        if fields.get("src0") == _SDWA:
            return self._sdwa_setter(register, extra)
        if type == "u64":

            def set_wide(w, value):
                w.set_vector(register, value.astype(np.uint32), lanes and lanes(w))
                w.set_vector(register + 1, (value >> np.uint64(32)).astype(np.uint32), lanes and lanes(w))

            return set_wide
        if type in ("u16", "u8"):
            keep = not self.cdna or name.startswith(_KEEP_UPPER) or high_half
            if "MIXHI" in name:
                high_half = 1

            def set_half(w, value):
                value = value.astype(np.uint32)
                old = w.v[register]
                if high_half:
                    value = (old & np.uint32(0xFFFF)) | value << np.uint32(16)
                elif keep:
                    value = (old & np.uint32(0xFFFF0000)) | value
                w.set_vector(register, value, lanes and lanes(w))

            return set_half
        if lanes:
            return lambda w, value: w.set_vector(register, value, lanes(w))
        return lambda w, value: w.set_vector(register, value)

    def _sdwa_setter(self, register, extra):
        select, unused = (extra >> 8) & 7, (extra >> 11) & 3
        if (extra >> 13) & 7:
            raise Unknown("a clamp or a factor of SDWA's output")
        if select == 6:
            return lambda w, value: w.set_vector(register, value.astype(np.uint32))
        shift, bits = (8 * select, 8) if select < 4 else (16 * (select - 4), 16)
        mask = np.uint32(((1 << bits) - 1) << shift)
        if unused == 1:
            raise Unknown("SDWA with extended signs of the output")

        def run(w, value):
            value = (value.astype(np.uint32) << np.uint32(shift)) & mask
            w.set_vector(register, value | (w.v[register] & ~mask) if unused == 2 else value)

        return run

    def _dual(self, inst, fields, extra):
        """Execute VOPD: both halves read their sources before either writes."""
        halves = []
        for letter in "xy":
            name = getattr(inst, "op" + letter).name.removeprefix("V_DUAL_")
            target = fields["vdst" + letter]
            text = REPLACED.get(f"V_{name}") or self.pseudocode.get(f"V_{name}")
            first, second = fields["src" + letter + "0"], fields["vsrc" + letter + "1"]
            if text is None:
                raise Unknown(f"no pseudo-code of V_{name}")
            is_float = name.endswith("F32") or "_F32_" in name
            possible = {
                "S0": self.source(first, 32, is_float or name in ("MOV_B32", "CNDMASK_B32"), extra),
                "S1": self.source(second),
                "D0": self.source(target),
                "VCC[lane]": lambda w: w.mask(VCC),
            }
            if name.startswith("DOT2"):
                raise Unknown(name)
            used = [key for key in possible if re.search(rf"\b{re.escape(key.split('[')[0])}\b", text)]
            inputs = tuple((key, "u1" if "[" in key else "u32") for key in used)
            constants = (("SIMM32", extra),) if "SIMM32" in text else ()
            function, outputs = translate(text, inputs, constants)
            if outputs != (("D0", "u32"),):
                raise Unknown(f"outputs {outputs} of V_{name}")
            halves.append((function, [possible[key] for key in used], target - 256))

        def run(w):
            with np.errstate(all="ignore"):
                values = [function(*(get(w) for get in getters))[0] for function, getters, _ in halves]
            for value, (_, _, register) in zip(values, halves):
                w.set_vector(register, value)

        return run

    def _accumulation(self, name, fields, extra):
        """Move between vector and accumulation registers, which are those from 256 on in `Waves.v`."""
        source, target = fields["src0"], fields["vdst"] - 256
        if "WRITE" not in name:
            source += 256
        if "READ" not in name:
            target += 256
        get = self.source(source, literal=extra)
        return lambda w: w.set_vector(target, get(w))

    # --- exchanges between lanes --------------------------------------------------------------------------------------
    def _lanes(self, name, fields, extra):
        if name == "V_SWAP_B32":
            one, other = fields["vdst"] - 256, fields["src0"] - 256

            def swap(w):
                first, second = w.v[one].copy(), w.v[other].copy()
                w.set_vector(one, second)
                w.set_vector(other, first)

            return swap
        if "PERMLANE" in name and "SWAP" in name:
            return self._swap_rows(name, fields)
        get, target = self.source(fields["src0"], literal=extra), fields["vdst"]
        scalar = target % 256  # some formats number it among the vector registers
        everywhere = lambda w: np.broadcast_to(get(w), (len(w.programs), w.lanes))  # noqa: E731
        if "READFIRSTLANE" in name:
            return lambda w: w.set_scalar(scalar, everywhere(w)[np.arange(len(w.programs)), w.active.argmax(1)].copy())
        which = self.source(fields["src1"], literal=extra)
        if "READLANE" in name:

            def read(w):
                lane = np.broadcast_to(which(w), (len(w.programs), 1))[:, 0] & np.uint32(w.lanes - 1)
                w.set_scalar(scalar, everywhere(w)[np.arange(len(w.programs)), lane].copy())

            return read
        if "WRITELANE" in name:

            def write(w):
                lane = np.broadcast_to(which(w), (len(w.programs), 1))[:, 0] & np.uint32(w.lanes - 1)
                w.v[target - 256][np.arange(len(w.programs)), lane] = everywhere(w)[:, 0]

            return write
        if name in ("V_PERMLANE16_B32", "V_PERMLANEX16_B32"):
            upper = self.source(fields["src2"], literal=extra)
            fetch_inactive, bound = fields["opsel"] & 1, (fields["opsel"] >> 1) & 1
            lane = np.arange(self.lanes)
            row = (lane & ~15) ^ (16 if "X16" in name else 0)

            def permute(w):
                low, high = (np.broadcast_to(part(w), (len(w.programs), 1)) for part in (which, upper))
                selectors = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
                chosen = (selectors >> (np.uint64(4) * (lane & 15).astype(np.uint64))) & np.uint64(15)
                at = row + chosen.astype(np.int64)
                valid = np.take_along_axis(w.active, at, 1) | bool(fetch_inactive)
                value = np.where(valid, np.take_along_axis(everywhere(w), at, 1), np.uint32(0))
                w.set_vector(target - 256, value, None if bound else valid)

            return permute
        if name == "V_PERMLANE64_B32" and self.lanes == 32:
            return lambda w: w.set_vector(target - 256, get(w))
        raise Unknown(name)

    def _swap_rows(self, name, fields):
        """Swap odd rows of the target with even rows of the source (gfx950)."""
        one, other = fields["vdst"] - 256, fields["src0"] - 256
        rows = 32 if "LANE32" in name else 16
        lane = np.arange(self.lanes)
        odd, even = lane[(lane // rows) % 2 == 1], lane[(lane // rows) % 2 == 0]

        def run(w):
            active = w.active[:, odd]
            if (active != w.active[:, even]).any():  # AMD's pseudo-code says nothing of it
                raise Unknown(f"{name} of an active and an inactive lane")
            kept, arriving = w.v[one][:, odd], w.v[other][:, even]
            w.v[one][:, odd], w.v[other][:, even] = np.where(active, (arriving, kept), (kept, arriving))

        return run


def dpp_lanes(control, lanes, cdna):
    """Return the source of each lane for a DPP control, and which exist.

    Source: the ISA documents, table "DPP".
    """
    lane = np.arange(lanes)
    row, i = lane & ~15, lane & 15
    everywhere = np.ones(lanes, bool)
    group, k = control & 0x1F0, control & 15
    if control < 0x100:
        return (lane & ~3) | ((control >> (2 * (lane & 3))) & 3), everywhere
    if group == 0x100:
        return row + np.minimum(i + k, 15), i + k <= 15
    if group == 0x110:
        return row + np.maximum(i - k, 0), i >= k
    if group == 0x120:
        return row + ((i - k) & 15), everywhere
    if control == 0x140:
        return row + 15 - i, everywhere
    if control == 0x141:
        return row + ((i & 8) | (7 - (i & 7))), everywhere
    if group == 0x150:
        return row + k, everywhere
    if group == 0x160 and not cdna:
        return row + (i ^ k), everywhere
    if cdna and control in (0x130, 0x134, 0x138, 0x13C, 0x142, 0x143):
        return {
            0x130: (np.minimum(lane + 1, lanes - 1), lane + 1 < lanes),
            0x134: ((lane + 1) % lanes, everywhere),
            0x138: (np.maximum(lane - 1, 0), lane >= 1),
            0x13C: ((lane - 1) % lanes, everywhere),
            0x142: (np.maximum(row - 1, 0), row >= 16),
            0x143: (np.full(lanes, 31), lane >= 32),
        }[control]
    raise Unknown(f"DPP control {control:#x}")


def _with_sign(getter, negate, absolute):
    """Return a function for the bits of an fp32 source, modifiers applied."""
    keep, flip = np.uint32(0x7FFFFFFF if absolute else 0xFFFFFFFF), np.uint32(negate << 31)
    return lambda w: getter(w) & keep ^ flip


def _modifiers(fields, index, extra):
    """Return (negate, absolute) of source `index`."""
    if "neg" in fields:
        return (fields["neg"] >> index) & 1, (fields.get("abs", 0) >> index) & 1
    if extra is not None and index < 2:
        if fields.get("src0") == _SDWA:
            shift = 20 if index == 0 else 28
        else:
            shift = 20 + 2 * index
        return (extra >> shift) & 1, (extra >> shift + 1) & 1
    return 0, 0


def _output_modifier(name, fields, kind):
    """Return a function that clamps or scales a result, or None."""
    factor, clamp = fields.get("omod", 0), fields.get("clmp", 0)
    if kind.startswith("VOP1") or kind.startswith("VOP2"):
        return None  # SDWA's are read from its own word
    if not factor and not clamp:
        return None
    if factor and not clamp and re.search(r"_F32$", name) and "CVT" not in name:
        scale = np.float32({1: 2, 2: 4, 3: 0.5}[factor])
        return lambda value: (value.view(np.float32) * scale).view(np.uint32)
    if clamp and not factor and re.search(r"_F32$", name):
        return lambda value: np.clip(np.nan_to_num(value.view(np.float32)), 0, 1).view(np.uint32)
    raise Unknown("a clamp or a factor of the output")


def _number(field):
    return field if isinstance(field, int) else field.offset


@functools.cache
def _pseudocode(family):
    """Return AMD's pseudo-code by instruction's name, encodings of one name merged."""
    module = importlib.import_module(f"tinygrad.runtime.autogen.amd.{family}.str_pcode")
    comments = re.compile(r"//[^\n]*")
    return {re.sub(r"_E(32|64)$", "", op.name): comments.sub("", text) for op, text in reversed(module.PCODE.items())}


def _renumbered(code: bytes) -> bytes:
    """Return an instruction of gfx90a with gfx942's number, which the decoder knows.

    The five bf16 products have the numbers 0x63 to 0x67 on gfx90a and 0x5d to 0x61 since gfx942, where 0x62 to 0x68 are
    sparse products (LLVM, VOP3PInstructions.td).
    """
    word = int.from_bytes(code[:4], "little")
    if word >> 23 != 0x1A7 or not 0x63 <= word >> 16 & 0x7F <= 0x67:
        return code
    return (word - (6 << 16)).to_bytes(4, "little") + code[4:]


@functools.cache
def _register_formats():
    """Add the formats of buffer accesses, which tinygrad 0.14's lists of RDNA3 and RDNA4 lack."""
    from tinygrad.renderer import amd
    from tinygrad.runtime.autogen.amd.rdna3.ins import MUBUF
    from tinygrad.runtime.autogen.amd.rdna4.ins import VBUFFER

    amd._load_formats()["rdna3"].insert(0, MUBUF)
    amd._load_formats()["rdna4"].insert(0, VBUFFER)
